"""Learning by painting what is masked: MAE around a ViT, SimMIM around a Swin.

Both take noise (b, units), one number for each piece of an image that is masked or seen as a whole:
the pieces with the smallest are seen.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from regard.errors import UsageError, lookup
from regard.layers.block import BlockConfig, build_block, build_final_norm, size
from regard.layers.patches import grid_at
from regard.layers.run import run_blocks
from regard.layers.start import STARTS
from regard.models.vit import Grid, ViT


def cut(images: Float[Tensor, "b c y x"], unit: int) -> Float[Tensor, "b u p"]:
    """Cut images into squares, row by row; the pixels of each row by row, channels last."""
    return rearrange(images, "b c (y p) (x q) -> b (y x) (p q c)", p=unit, q=unit)


def lay(pieces: Float[Tensor, "b u p"], unit: int, columns: int) -> Float[Tensor, "b c y x"]:
    """Lay squares together again to images that are so many of them wide."""
    shape = "b (y x) (p q c) -> b c (y p) (x q)"
    return rearrange(pieces, shape, p=unit, q=unit, x=columns)


class Target(NamedTuple):
    """What is to be painted, and how what was painted becomes pixels again."""

    make: Callable[[Tensor], Tensor]
    undo: Callable[[Tensor, Tensor], Tensor]


def _law(pieces: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and spread of each piece."""
    return pieces.mean(-1, keepdim=True), (pieces.var(-1, keepdim=True) + 1e-6).sqrt()


def _normalised(pieces: Tensor) -> Tensor:
    mean, spread = _law(pieces)
    return (pieces - mean) / spread


def _restored(painted: Tensor, pieces: Tensor) -> Tensor:
    mean, spread = _law(pieces)
    return painted * spread + mean


# name -> pixels as they are, or those of each piece brought to the mean 0 and the spread 1
TARGETS: dict[str, Target] = {
    "pixels": Target(lambda pieces: pieces, lambda painted, pieces: painted),
    "normalised": Target(_normalised, _restored),
}


def shown(noise: Float[Tensor, "b u"], mask_share: float) -> tuple[Int[Tensor, "b u"], int]:
    """Return the pieces of each image in the order of their noise, and how many are seen."""
    return noise.argsort(1), kept_of(noise.shape[1], mask_share)


def kept_of(units: int, mask_share: float) -> int:
    """Return how many of the pieces of an image are seen."""
    return max(1, int(units * (1 - mask_share)))


class Painted(NamedTuple):
    """What was painted for every piece, and which of them were masked."""

    pieces: Float[Tensor, "b u p"]
    masked: Bool[Tensor, "b u"]


class Painter(nn.Module):
    """What both ways share: an encoder, pieces of images, and a loss on those that are masked."""

    def __init__(self, encoder: Any, config: Any, unit: int, target: Target, power: int):
        super().__init__()
        self.encoder, self.config, self.unit = encoder, config, unit
        self.target, self.power = target, power

    def masks(self, units: int) -> int:
        """Return how many pieces are masked of so many."""
        return units - kept_of(units, self.config.mask_share)

    def size(self, images: Tensor) -> tuple[int, int]:
        """Return how many pieces images have in each direction."""
        return self.encoder.grid((images.shape[2], images.shape[3]))

    def pieces(self, images: Float[Tensor, "b c y x"]) -> Float[Tensor, "b u p"]:
        """Cut images into their pieces; what is missing to whole ones is zero."""
        height, width = (self.unit * n for n in self.size(images))
        right, down = width - images.shape[3], height - images.shape[2]
        return cut(F.pad(images, (0, right, 0, down)), self.unit)

    def loss(
        self, images: Float[Tensor, "b c y x"], noise: Float[Tensor, "b u"]
    ) -> Float[Tensor, ""]:
        """Return the sum over images of the mean error on their masked pieces."""
        painted, masked = self(images, noise)
        wanted = self.target.make(self.pieces(images))
        error = (painted.float() - wanted).abs().pow(self.power).mean(-1)
        return ((error * masked).sum(1) / masked.sum(1)).sum()

    def paint_over(
        self, images: Float[Tensor, "b c y x"], noise: Float[Tensor, "b u"]
    ) -> tuple[Tensor, Tensor]:
        """Return images with what is masked painted, and which pixels that are, (b, 1, y, x)."""
        painted, masked = self(images, noise)
        pieces, (_, columns) = self.pieces(images), self.size(images)
        painted = self.target.undo(painted, pieces)
        whole = lay(torch.where(masked[..., None], painted, pieces), self.unit, columns)
        hidden = masked[..., None].expand(-1, -1, self.unit**2)
        height, width = (min(a, b) for a, b in zip(images.shape[2:], whole.shape[2:], strict=True))
        hidden = lay(hidden.float(), self.unit, columns)[..., :height, :width]
        return whole[..., :height, :width], hidden.bool()


@dataclass(frozen=True)
class MAEConfig:
    """How much is masked, what is painted, and the sizes of what paints."""

    mask_share: float = field(default=0.75, metadata={"min": 0, "max": 0.99})
    target: str = "normalised"
    depth: int = size(2, 1000)
    block: BlockConfig = field(
        default_factory=lambda: BlockConfig(
            128, 4, 512, norm_eps=1e-6, feed_forward="gelu", dropout=0.0
        )
    )


class MAE(Painter):
    """The encoder reads the patches that are seen; a small decoder paints the others (He 2022).

    In the decoder a learned vector stands for each masked patch, told apart by its place alone.
    """

    def __init__(self, encoder: ViT, config: MAEConfig):
        if getattr(encoder.config, "stem", "") != "patches":
            raise UsageError(
                "patches that are masked must not be seen by their neighbours, so objective=masked "
                "needs a vit with stem=patches, or a swin"
            )
        target = lookup("target", config.target, TARGETS)
        super().__init__(encoder, config, encoder.config.patch, target, 2)
        outer, block = encoder.config, config.block
        self.before = outer.tokens
        self.enter = nn.Linear(outer.block.width, block.width)
        self.mask = nn.Embedding(1, block.width)
        made_for = encoder.grid((outer.image, outer.image))
        self.position = Grid(block.width, made_for, outer.tokens)
        self.blocks = nn.ModuleList(build_block(block, self.position) for _ in range(config.depth))
        self.norm = build_final_norm(block)
        self.paint = nn.Linear(block.width, outer.channels * outer.patch**2)
        for part in (self.enter, self.mask, self.position, self.blocks, self.paint):
            STARTS["normal"](part)

    def pieces(self, images: Float[Tensor, "b c y x"]) -> Float[Tensor, "b u p"]:
        """Cut images into patches; pixels beyond the last whole one are not seen."""
        height, width = (self.unit * n for n in self.size(images))
        return cut(images[..., :height, :width], self.unit)

    def features(
        self, images: Float[Tensor, "b c y x"], order: Int[Tensor, "b k"]
    ) -> Float[Tensor, "b l w"]:
        """Return the vectors of the tokens before the grid and of some patches."""
        tokens, at = self.encoder.embed(images)
        some = order[..., None].expand(-1, -1, tokens.shape[-1])
        tokens = torch.cat([tokens[:, : self.before], tokens[:, self.before :].gather(1, some)], 1)
        first = at[: self.before].expand(len(order), -1, -1)
        return self.encoder.encode(tokens, torch.cat([first, at[self.before :][order]], 1))

    def forward(self, images: Float[Tensor, "b c y x"], noise: Float[Tensor, "b u"]) -> Painted:
        """Paint every patch of images of which some are seen."""
        order, kept = shown(noise, self.config.mask_share)
        x = self.enter(self.features(images, order[:, :kept]))
        back = order.argsort(1)
        hidden = self.mask.weight.to(x.dtype).expand(len(x), noise.shape[1] - kept, -1)
        grid = torch.cat([x[:, self.before :], hidden], 1)
        grid = grid.gather(1, back[..., None].expand_as(grid))
        x = torch.cat([x[:, : self.before], grid], 1) + self.position.over(self.size(images))
        at = grid_at(*self.size(images), self.before, images.device)
        x = run_blocks(self.blocks, x, norm=self.norm, at=at)
        return Painted(self.paint(x)[:, self.before :], back >= kept)


@dataclass(frozen=True)
class SimMIMConfig:
    """How much is masked, and what is painted."""

    mask_share: float = field(default=0.6, metadata={"min": 0, "max": 0.99})
    target: str = "pixels"


class SimMIM(Painter):
    """A learned vector stands for masked patches, and one product paints pixels (Xie et al. 2022).

    What is masked together is what becomes one token of the last stage.
    """

    def __init__(self, encoder: Any, config: SimMIMConfig):
        outer = encoder.config
        unit = outer.patch << (len(outer.depths) - 1)
        super().__init__(encoder, config, unit, lookup("target", config.target, TARGETS), 1)
        self.mask = nn.Embedding(1, outer.block.width)
        self.paint = nn.Linear(encoder.out_width, outer.channels * unit**2)
        for part in (self.mask, self.paint):
            STARTS["normal"](part)

    def features(
        self, images: Float[Tensor, "b c y x"], masked: Bool[Tensor, "b u"]
    ) -> Float[Tensor, "b u w"]:
        """Return the last vectors of images of which some pieces are masked."""
        x = self.encoder.patches(images)
        fine = self.unit // self.encoder.config.patch
        grid = masked.unflatten(1, self.size(images))
        grid = grid.repeat_interleave(fine, 1).repeat_interleave(fine, 2)
        hidden = grid[:, : x.shape[1], : x.shape[2], None]
        return self.encoder.encode(torch.where(hidden, self.mask.weight.to(x.dtype)[0], x))

    def forward(self, images: Float[Tensor, "b c y x"], noise: Float[Tensor, "b u"]) -> Painted:
        """Paint every piece of images of which some are seen."""
        order, kept = shown(noise, self.config.mask_share)
        masked = order.argsort(1) >= kept
        return Painted(self.paint(self.features(images, masked)), masked)
