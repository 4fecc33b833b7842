"""CLIP as published: a Vision Transformer and a causal text encoder with a joint space."""

from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from regard.layers.block import BlockConfig, size_field
from regard.layers.init import INITS
from regard.layers.shapes import Ids, Images, Lengths, Size, Vectors
from regard.models.declaration import FamilyInfo
from regard.models.gpt import GPT, GPTConfig
from regard.models.vit import ViT, ViTConfig
from regard.settings import setting

_TEXT = BlockConfig(512, 8, 2048, feed_forward="gelu_quick", dropout=0.0)
_VISION = BlockConfig(768, 12, 3072, feed_forward="gelu_quick", dropout=0.0)


@dataclass(frozen=True)
class ClipConfig:
    """Both encoders, the width of the joint space, and the end token of a text.

    The vector of a text is that of its first token `end` or, without one, of its highest token.
    """

    vision: ViTConfig = field(
        default_factory=lambda: ViTConfig(
            0, patch=32, block=_VISION, stem="patches_nobias", embed_norm="layer"
        )
    )
    text: GPTConfig = field(
        default_factory=lambda: GPTConfig(49408, 12, _TEXT, max_length=77, init="normal")
    )
    width: int = size_field(512, 2**16, "width of the common space")
    end: int | None = setting(49407, "token at the end of a text", min=0, max=10_000_000)

    @property
    def image(self) -> int:
        """Side of the images that it is made for."""
        return self.vision.image

    @property
    def channels(self) -> int:
        """Number of channels of an image."""
        return self.vision.channels

    @property
    def patch(self) -> int:
        """Side of the patches of its images."""
        return self.vision.patch

    @property
    def vocab(self) -> int:
        """Size of the vocabulary."""
        return self.text.vocab

    @property
    def max_length(self) -> int:
        """Maximum length of a text."""
        return self.text.max_length

    @property
    def block(self) -> BlockConfig:
        """Config of the text encoder's blocks."""
        return self.text.block


_CLIP_SIDES = ("vision", "text")
# the published model of Radford et al. 2021 with patches of 32 pixels
PRESETS: dict[str, ClipConfig] = {"clip": ClipConfig()}
SIZES: dict[str, dict[str, Any]] = {
    name: {
        "width": width,
        **{f"{side}.depth": depth for side in _CLIP_SIDES},
        **{f"{side}.block.width": width for side in _CLIP_SIDES},
        **{f"{side}.block.heads": heads for side in _CLIP_SIDES},
        **{f"{side}.block.ffn_width": 4 * width for side in _CLIP_SIDES},
    }
    for name, (depth, width, heads) in {
        "tiny": (2, 64, 2),
        "small": (4, 128, 4),
        "base": (12, 512, 8),
        "big": (24, 1024, 16),
    }.items()
}
INFO = FamilyInfo("image+text", {"embed": {}}, PRESETS, SIZES)


class Clip(nn.Module):
    """Two encoders, each projected to a joint space in which images and texts are compared.

    The inverse temperature is learned, as its logarithm.
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
            INITS["glorot"](part)

    def grid(self, size: Size) -> Size:
        """Number of patches of an image of (height, width) in each direction."""
        return self.vision.grid(size)

    def features(self, images: Images) -> Vectors:
        """Last vectors of images: that of the token before the grid, then row by row."""
        return self.vision.features(images)

    def pool(self, x: Vectors) -> Float[Tensor, "b v"]:
        """One vector of each image in the joint space, of any norm."""
        return self.image_out(self.vision.pool(x))

    def hidden(self, ids: Ids, lengths: Lengths | None = None) -> Float[Tensor, "b l v"]:
        """Vector of each token of texts in the joint space."""
        return self.text_out(self.text.hidden(ids, lengths))

    def text_vectors(self, ids: Ids, lengths: Lengths | None = None) -> Float[Tensor, "b v"]:
        """One vector of each text, of any norm."""
        if lengths is not None:  # padding is no part of a text
            real = torch.arange(ids.shape[1], device=ids.device) < lengths.unsqueeze(1)
            ids = ids.masked_fill(~real, 0)
        end = self.config.end
        last = (ids if end is None else (ids == end).int()).argmax(-1)
        rows = torch.arange(ids.shape[0], device=ids.device)
        return self.text_out(self.text.hidden(ids, lengths)[rows, last])

    def images(self, images: Images) -> Float[Tensor, "b v"]:
        """Unit vectors of images in the joint space."""
        return F.normalize(self.pool(self.features(images)).float(), dim=-1)

    def texts(self, ids: Ids, lengths: Lengths | None = None) -> Float[Tensor, "b v"]:
        """Unit vectors of texts in the joint space."""
        return F.normalize(self.text_vectors(ids, lengths).float(), dim=-1)

    def compare(
        self, images: Float[Tensor, "m v"], texts: Float[Tensor, "n v"]
    ) -> Float[Tensor, "m n"]:
        """Similarities of images and texts, as logits."""
        return self.sharpness.exp() * images @ texts.mT

    def forward(
        self,
        images: Float[Tensor, "m c y x"],
        ids: Int[Tensor, "n l"],
        lengths: Int[Tensor, " n"] | None = None,
    ) -> Float[Tensor, "m n"]:
        """Similarities of images and texts, as logits."""
        return self.compare(self.images(images), self.texts(ids, lengths))
