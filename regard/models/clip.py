"""CLIP as it was published: an encoder of images and one of texts whose vectors meet."""

from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from regard.layers.block import BlockConfig, size
from regard.layers.start import STARTS
from regard.models.declaration import FamilyInfo
from regard.models.gpt import GPT, GPTConfig
from regard.models.vit import ViT, ViTConfig

_TEXT = BlockConfig(512, 8, 2048, feed_forward="gelu_quick", dropout=0.0)
_VISION = BlockConfig(768, 12, 3072, feed_forward="gelu_quick", dropout=0.0)


@dataclass(frozen=True)
class ClipConfig:
    """Both encoders, the width in which they meet, and what stands at the end of a text.

    The vector of a text is that of its first token `end` or, without one, of its highest token.
    """

    vision: ViTConfig = field(
        default_factory=lambda: ViTConfig(
            0, patch=32, block=_VISION, stem="patches_nobias", embed_norm="layer"
        )
    )
    text: GPTConfig = field(
        default_factory=lambda: GPTConfig(49408, 12, _TEXT, max_length=77, start="normal")
    )
    width: int = size(512, 2**16)
    end: int | None = field(default=49407, metadata={"min": 0, "max": 10_000_000})

    @property
    def image(self) -> int:
        """Return for images of which size it was made."""
        return self.vision.image

    @property
    def channels(self) -> int:
        """Return how many channels its images have."""
        return self.vision.channels

    @property
    def patch(self) -> int:
        """Return the side of the patches of its images."""
        return self.vision.patch

    @property
    def vocab(self) -> int:
        """Return how many tokens it knows."""
        return self.text.vocab

    @property
    def max_length(self) -> int:
        """Return how many tokens of a text it reads."""
        return self.text.max_length

    @property
    def block(self) -> BlockConfig:
        """Return what the blocks that read texts are made of."""
        return self.text.block


# the published model of Radford et al. 2021 with patches of 32 pixels
PRESETS: dict[str, ClipConfig] = {"clip": ClipConfig()}
SIZES: dict[str, dict[str, Any]] = {
    name: {
        "width": width,
        **dict.fromkeys(
            ("vision", "text"),
            {
                "depth": depth,
                "block": {"width": width, "heads": heads, "ffn_width": 4 * width},
            },
        ),
    }
    for name, depth, width, heads in (
        ("tiny", 2, 64, 2),
        ("small", 4, 128, 4),
        ("base", 12, 512, 8),
        ("big", 24, 1024, 16),
    )
}
INFO = FamilyInfo("image+text", {"embed": {}}, PRESETS, SIZES)


class Clip(nn.Module):
    """Two encoders and a matrix for each: images and texts are compared where these lead.

    How sharply they are compared is learned, as the logarithm of a factor.
    """

    def __init__(self, config: ClipConfig):
        super().__init__()
        self.config = config
        self.vision, self.text = ViT(config.vision), GPT(config.text)
        self.image_out = nn.Linear(config.vision.block.width, config.width, bias=False)
        self.text_out = nn.Linear(config.text.block.width, config.width, bias=False)
        self.sharpness = nn.Parameter(torch.tensor(2.6592))
        self.out_width = config.width
        for part in (self.image_out, self.text_out):
            STARTS["glorot"](part)

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return how many patches an image of (height, width) has in each direction."""
        return self.vision.grid(size)

    def features(self, images: Float[Tensor, "b c y x"]) -> Float[Tensor, "b l w"]:
        """Return the last vectors of images: that of the token before the grid, then row by row."""
        return self.vision.features(images)

    def pool(self, x: Float[Tensor, "b l w"]) -> Float[Tensor, "b v"]:
        """Return one vector of each image where they meet texts, of any length."""
        return self.image_out(self.vision.pool(x))

    def hidden(
        self, ids: Int[Tensor, "b l"], lengths: Int[Tensor, " b"] | None = None
    ) -> Float[Tensor, "b l v"]:
        """Return the vector of each token of texts where they meet images."""
        return self.text_out(self.text.hidden(ids, lengths))

    def text_vectors(
        self, ids: Int[Tensor, "b l"], lengths: Int[Tensor, " b"] | None = None
    ) -> Float[Tensor, "b v"]:
        """Return one vector of each text, of any length."""
        if lengths is not None:  # what stands behind a text is none of it
            real = torch.arange(ids.shape[1], device=ids.device) < lengths.unsqueeze(1)
            ids = ids.masked_fill(~real, 0)
        end = self.config.end
        last = (ids if end is None else (ids == end).int()).argmax(-1)
        rows = torch.arange(len(ids), device=ids.device)
        return self.text_out(self.text.hidden(ids, lengths)[rows, last])

    def images(self, images: Float[Tensor, "b c y x"]) -> Float[Tensor, "b v"]:
        """Return the unit vectors of images where they meet texts."""
        return F.normalize(self.pool(self.features(images)).float(), dim=-1)

    def texts(
        self, ids: Int[Tensor, "b l"], lengths: Int[Tensor, " b"] | None = None
    ) -> Float[Tensor, "b v"]:
        """Return the unit vectors of texts where they meet images."""
        return F.normalize(self.text_vectors(ids, lengths).float(), dim=-1)

    def compare(
        self, images: Float[Tensor, "m v"], texts: Float[Tensor, "n v"]
    ) -> Float[Tensor, "m n"]:
        """Return how well each image and each text go together, as logits."""
        return self.sharpness.exp() * images @ texts.mT

    def forward(
        self,
        images: Float[Tensor, "m c y x"],
        ids: Int[Tensor, "n l"],
        lengths: Int[Tensor, " n"] | None = None,
    ) -> Float[Tensor, "m n"]:
        """Return how well each image and each text go together, as logits."""
        return self.compare(self.images(images), self.texts(ids, lengths))
