"""Masked image modelling: MAE around a ViT, SimMIM around a Swin.

Both take noise (b, units), one number for each unit of an image that is masked or visible as a
whole: those with the smallest are visible.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from regard.errors import UsageError, lookup
from regard.layers.block import BlockConfig, build_block, build_final_norm, size_field
from regard.layers.fast.run import run_blocks
from regard.layers.grid import GridPosition
from regard.layers.init import INITS
from regard.layers.patches import grid_at
from regard.layers.shapes import Images, Size, Vectors
from regard.models.swin import Swin
from regard.models.vit import ViT
from regard.settings import setting


def patchify(images: Images, unit: int) -> Float[Tensor, "b u p"]:
    """Cut images into squares, row by row; the pixels of each row by row, channels last."""
    squares = images.unfold(2, unit, unit).unfold(3, unit, unit)  # b c y x p q
    return squares.permute(0, 2, 3, 4, 5, 1).flatten(3).flatten(1, 2)


def unpatchify(units: Float[Tensor, "b u p"], unit: int, columns: int) -> Images:
    """Join squares to images that are so many of them wide."""
    squares = units.unflatten(2, (unit, unit, -1)).unflatten(1, (-1, columns))  # b y x p q c
    return squares.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)


class Target(NamedTuple):
    """What is predicted, and how a prediction becomes pixels again."""

    make: Callable[[Tensor], Tensor]
    undo: Callable[[Tensor, Tensor], Tensor]


def _moments(units: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each unit."""
    return units.mean(-1, keepdim=True), (units.var(-1, keepdim=True) + 1e-6).sqrt()


def _normalised(units: Tensor) -> Tensor:
    mean, std = _moments(units)
    return (units - mean) / std


def _restored(predicted: Tensor, units: Tensor) -> Tensor:
    mean, std = _moments(units)
    return predicted * std + mean


# name -> pixels as they are, or normalised within each unit
_MASKED_TARGETS: dict[str, Target] = {
    "pixels": Target(lambda units: units, lambda predicted, units: predicted),
    "normalised": Target(_normalised, _restored),
}


def ordered(noise: Float[Tensor, "b u"], mask_share: float) -> tuple[Int[Tensor, "b u"], int]:
    """Units of each image in the order of their noise, and how many are visible."""
    return noise.argsort(1), visible_count(noise.shape[1], mask_share)


def visible_count(units: int, mask_share: float) -> int:
    """Number of visible units of an image."""
    return max(1, int(units * (1 - mask_share)))


class MaskedPrediction(NamedTuple):
    """The predictions for every unit, and which of them were masked."""

    units: Float[Tensor, "b u p"]
    masked: Bool[Tensor, "b u"]


class MaskedImageModel(nn.Module):
    """What both share: an encoder, units of images, and a loss on those that are masked.

    Args:
        encoder: encoder to pretrain
        config: share of units to mask, and the rest of the objective
        unit: side of a unit in pixels
        target: what is predicted of a unit
        power: power of the error
    """

    def __init__(
        self,
        encoder: ViT | Swin,
        config: "MAEConfig | SimMIMConfig",
        unit: int,
        target: Target,
        power: int,
    ):
        super().__init__()
        self.encoder, self.config, self.unit = encoder, config, unit
        self.target, self.power = target, power

    def masked_count(self, units: int) -> int:
        """Number of masked units of so many."""
        return units - visible_count(units, self.config.mask_share)

    def size(self, images: Tensor) -> Size:
        """Number of units of images in each direction."""
        return self.encoder.grid((images.shape[2], images.shape[3]))

    def units(self, images: Images) -> Float[Tensor, "b u p"]:
        """Cut images into units, padded to whole ones with zeros."""
        height, width = (self.unit * n for n in self.size(images))
        right, down = width - images.shape[3], height - images.shape[2]
        return patchify(F.pad(images, (0, right, 0, down)), self.unit)

    def loss(self, images: Images, noise: Float[Tensor, "b u"]) -> Float[Tensor, ""]:
        """Sum over images of the mean error on their masked units."""
        predicted, masked = self(images, noise)
        target = self.target.make(self.units(images))
        error = (predicted.float() - target).abs().pow(self.power).mean(-1)
        return ((error * masked).sum(1) / masked.sum(1)).sum()

    def reconstruct(self, images: Images, noise: Float[Tensor, "b u"]) -> tuple[Tensor, Tensor]:
        """Images with masked units predicted, and the mask of their pixels, (b, 1, y, x)."""
        predicted, masked = self(images, noise)
        units, (_, columns) = self.units(images), self.size(images)
        predicted = self.target.undo(predicted, units)
        whole = unpatchify(torch.where(masked[..., None], predicted, units), self.unit, columns)
        hidden = masked[..., None].expand(-1, -1, self.unit**2)
        height, width = (min(a, b) for a, b in zip(images.shape[2:], whole.shape[2:], strict=True))
        hidden = unpatchify(hidden.float(), self.unit, columns)[..., :height, :width]
        return whole[..., :height, :width], hidden.bool()


@dataclass(frozen=True)
class MAEConfig:
    """The mask ratio, the target of the prediction, and the sizes of the decoder."""

    mask_share: float = setting(0.75, "share of the image that is masked", min=0, max=0.99)
    target: str = setting("normalised", "what is predicted", choices=_MASKED_TARGETS)
    depth: int = size_field(2, 1000, "decoder layers")
    block: BlockConfig = field(
        default_factory=lambda: BlockConfig(
            128, 4, 512, norm_eps=1e-6, feed_forward="gelu", dropout=0.0
        )
    )


class MAE(MaskedImageModel):
    """Masked autoencoder: the encoder reads visible patches, a small decoder predicts the others.

    (He et al. 2022.) To the decoder a masked patch is a learned vector plus its position.
    """

    encoder: ViT

    def __init__(self, encoder: ViT, config: MAEConfig):
        if not isinstance(encoder, ViT) or encoder.config.stem != "patches":
            raise UsageError(
                "patches that are masked must not be seen by their neighbours, so objective=masked "
                "needs a vit with stem=patches, or a swin"
            )
        target = lookup("target", config.target, _MASKED_TARGETS)
        super().__init__(encoder, config, encoder.config.patch, target, 2)
        outer, block = encoder.config, config.block
        self.before = outer.tokens
        self.enter = nn.Linear(outer.block.width, block.width)
        self.mask = nn.Embedding(1, block.width)
        made_for = encoder.grid((outer.image, outer.image))
        self.position = GridPosition(block.width, made_for, outer.tokens)
        self.blocks = nn.ModuleList(build_block(block) for _ in range(config.depth))
        self.norm = build_final_norm(block)
        self.paint = nn.Linear(block.width, outer.channels * outer.patch**2)
        for part in (self.enter, self.mask, self.position, self.blocks, self.paint):
            INITS["normal"](part)

    def units(self, images: Images) -> Float[Tensor, "b u p"]:
        """Cut images into patches; pixels beyond the last whole one are left out."""
        height, width = (self.unit * n for n in self.size(images))
        return patchify(images[..., :height, :width], self.unit)

    def features(self, images: Images, order: Int[Tensor, "b k"]) -> Vectors:
        """Vectors of the tokens before the grid and of some patches."""
        tokens, at = self.encoder.embed(images)
        some = order[..., None].expand(-1, -1, tokens.shape[-1])
        tokens = torch.cat([tokens[:, : self.before], tokens[:, self.before :].gather(1, some)], 1)
        first = at[: self.before].expand(len(order), -1, -1)
        return self.encoder.encode(tokens, torch.cat([first, at[self.before :][order]], 1))

    def forward(self, images: Images, noise: Float[Tensor, "b u"]) -> MaskedPrediction:
        """Predict every patch of images from those that are visible."""
        order, kept = ordered(noise, self.config.mask_share)
        x = self.enter(self.features(images, order[:, :kept]))
        back = order.argsort(1)
        hidden = self.mask.weight.to(x.dtype).expand(len(x), noise.shape[1] - kept, -1)
        grid = torch.cat([x[:, self.before :], hidden], 1)
        grid = grid.gather(1, back[..., None].expand_as(grid))
        x = torch.cat([x[:, : self.before], grid], 1) + self.position.over(self.size(images))
        at = grid_at(*self.size(images), self.before, images.device)
        x = run_blocks(self.blocks, x, norm=self.norm, at=at)
        return MaskedPrediction(self.paint(x)[:, self.before :], back >= kept)


@dataclass(frozen=True)
class SimMIMConfig:
    """The mask ratio, and the target of the prediction."""

    mask_share: float = setting(0.6, "share of the image that is masked", min=0, max=0.99)
    target: str = setting("pixels", "what is predicted", choices=_MASKED_TARGETS)


class SimMIM(MaskedImageModel):
    """A learned vector replaces masked patches, and a linear layer predicts pixels.

    (Xie et al. 2022.) A unit of the mask is what becomes one token of the last stage.
    """

    encoder: Swin

    def __init__(self, encoder: Swin, config: SimMIMConfig):
        if not isinstance(encoder, Swin):
            raise UsageError("SimMIM masks the patches of a swin; choose family=swin")
        outer = encoder.config
        unit = outer.patch << (len(outer.depths) - 1)
        super().__init__(encoder, config, unit, lookup("target", config.target, _MASKED_TARGETS), 1)
        self.mask = nn.Embedding(1, outer.block.width)
        self.paint = nn.Linear(encoder.out_width, outer.channels * unit**2)
        for part in (self.mask, self.paint):
            INITS["normal"](part)

    def features(self, images: Images, masked: Bool[Tensor, "b u"]) -> Float[Tensor, "b u w"]:
        """Last vectors of images of which some units are masked."""
        x = self.encoder.patches(images)
        fine = self.unit // self.encoder.config.patch
        grid = masked.unflatten(1, self.size(images))
        grid = grid.repeat_interleave(fine, 1).repeat_interleave(fine, 2)
        hidden = grid[:, : x.shape[1], : x.shape[2], None]
        return self.encoder.encode(torch.where(hidden, self.mask.weight.to(x.dtype)[0], x))

    def forward(self, images: Images, noise: Float[Tensor, "b u"]) -> MaskedPrediction:
        """Predict every unit of images from those that are visible."""
        order, kept = ordered(noise, self.config.mask_share)
        masked = order.argsort(1) >= kept
        return MaskedPrediction(self.paint(self.features(images, masked)), masked)
