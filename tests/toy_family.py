"""A toy family: self-attention between the patches of an image, and a head."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from regard.attention.multihead import MultiHead
from regard.layers.heads import Mean
from regard.layers.layout import Layout, full_layout, token_grid
from regard.layers.patches import Patches, grid_at
from regard.models.declaration import FamilyInfo
from regard.models.vision import VisionModel, build_head


@dataclass(frozen=True)
class ToyConfig:
    """Its sizes."""

    labels: int = field(default=10, metadata={"min": 0, "max": 1000})
    channels: int = 3
    image: int = 32
    patch: int = 4
    widths: tuple[int, ...] = (16,)


PRESETS = {"toy": ToyConfig(), "toy_large": ToyConfig(image=224, patch=16, widths=(64,))}
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"image": 32, "patch": 4, "widths": (16,)},
    "small": {"image": 32, "patch": 4, "widths": (32,)},
}
INFO = FamilyInfo("image", {"images": {}}, PRESETS, SIZES)


class Toy(VisionModel):
    """One layer of self-attention between patches."""

    def __init__(self, config: ToyConfig):
        super().__init__()
        self.config, self.out_width = config, config.widths[-1]
        self.stem = Patches(config.channels, self.out_width, config.patch)
        self.attention = MultiHead(self.out_width, 2)
        self.pool, self.head = Mean(), build_head(self.out_width, config.labels)

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return how many patches an image has in each direction."""
        return self.stem.grid(size)

    def features(self, images: Tensor) -> Tensor:
        """Return the vectors of patches that have attended to each other."""
        x, grid = self.stem(images), self.grid((images.shape[2], images.shape[3]))
        return x + self.attention(x, at=grid_at(*grid, 0, images.device))

    def layout(self, size: tuple[int, int]) -> dict[str, Layout]:
        """Return how the layer is laid over an image."""
        grid = token_grid(self.grid(size), self.config.patch, size)
        return {"attention": full_layout(grid, grid)}
