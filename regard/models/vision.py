"""What the vision families share: an image encoder with a classification head."""

from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from regard.layers.block import size_field
from regard.layers.heads import Attentive
from regard.layers.layout import Layout, TokenGrid, pool_layout
from regard.layers.shapes import Images, Size, Vectors
from regard.settings import setting

# the tasks of a vision family, with what each sets in its config; as an encoder of features for
# another model (captions) it has neither a head nor a pool of its own
VISION_TASKS: dict[str, dict[str, Any]] = {
    "images": {},
    "pretrain": {"labels": 0},
    "features": {"labels": 0, "pool": "mean"},
}


@dataclass(frozen=True)
class ConvolutionConfig:
    """What every network has that begins with a stem of convolutions."""

    labels: int = setting(1000, "labels; a training takes those of the data", min=0, max=10_000_000)
    channels: int = size_field(3, 4096, "colour channels")
    image: int = size_field(224, 2**16, "image size in pixels")
    stem: str = setting("large", "stem, before the blocks", choices=("large", "small"))
    stem_width: int = size_field(64, 2**16, "channels of the stem")


def build_head(width: int, labels: int) -> nn.Module:
    """Make the linear head of a classifier; without labels nothing stands on the features."""
    return nn.Linear(width, labels) if labels else nn.Identity()


class VisionModel(nn.Module):
    """logits = head(pool(features(images))); a family adds the features and their grid."""

    config: Any
    out_width: int  # of the features
    pool: nn.Module
    head: nn.Module

    @property
    def pooled_width(self) -> int:
        """Width of pooled features."""
        return self.out_width

    def grid(self, size: Size) -> Size:
        """Number of features of an image of (height, width) in each direction."""
        raise NotImplementedError

    def features(self, images: Images) -> Vectors:
        """Last vectors: those of tokens before the grid, then row by row."""
        raise NotImplementedError

    def forward(self, images: Images) -> Float[Tensor, "b labels"]:
        """Logits of the labels, or without labels the pooled features."""
        return self.head(self.pool(self.features(images)))

    def layout(self, size: Size) -> dict[str, Layout]:
        """Layout of each layer's attention over an image of (height, width)."""
        return {}

    def pool_layout(self, grid: TokenGrid) -> dict[str, Layout]:
        """Layout of attention pooling over the last grid, if the model pools so."""
        return {"pool": pool_layout(grid)} if isinstance(self.pool, Attentive) else {}


class ConvolutionModel(VisionModel):
    """A stem of convolutions, then stages, each after the first on half as many places."""

    stem: Any
    stages: nn.ModuleList

    def init_convolutions(self) -> None:
        """Initialise all convolutions for rectifiers (He et al. 2015)."""
        for part in self.modules():
            if isinstance(part, nn.Conv2d):
                nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")

    def grid(self, size: Size) -> Size:
        """Number of places of the last stage in each direction for (height, width)."""
        halves = 2 ** (self.stem.halves + len(self.stages) - 1)
        return -(-size[0] // halves), -(-size[1] // halves)
