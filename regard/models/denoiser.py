"""A denoiser of convolutions and window attention: non-local means, learned."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from regard.errors import UsageError, lookup
from regard.layers.block import BlockConfig, build_attention, build_residual, size_field
from regard.layers.layout import Layout, token_grid
from regard.layers.patches import Patches, check_images
from regard.layers.shapes import Size
from regard.layers.windows import WINDOW_POSITIONS, WindowAttention
from regard.models.declaration import FamilyInfo, size_table
from regard.settings import setting


@dataclass(frozen=True)
class DenoiserConfig:
    """The sizes and parts of a denoiser.

    `image` is the side of the crops that it is trained on, `patch` that of a token; the block's
    ffn_width is that between its two convolutions. One block in `every` has attention.
    """

    channels: ClassVar[int] = 1  # colours are denoised one by one
    image: int = size_field(64, 2**16, "image size in pixels")
    patch: int = size_field(2, 64, "patch size in pixels")
    depth: int = size_field(8, 1000, "layers")
    every: int = size_field(2, 1000, "blocks between attention")
    block: BlockConfig = field(default_factory=lambda: BlockConfig(64, 4, 64, dropout=0.0))
    look: str = setting("windows", "attention between convolutions", choices=lambda: _LOOKS)
    window: int = size_field(8, 256, "window of attention in patches")
    position: str = setting("table", "position embedding", choices=WINDOW_POSITIONS)


PRESETS: dict[str, DenoiserConfig] = {"denoiser": DenoiserConfig()}
SIZES = size_table(
    "depth block.width block.heads block.ffn_width",
    {
        "tiny": (4, 32, 2, 32),
        "small": (8, 64, 4, 64),
        "base": (12, 96, 6, 96),
        "big": (16, 128, 8, 128),
    },
)
INFO = FamilyInfo("image", {"denoise": {}}, PRESETS, SIZES)


class Near(nn.Module):
    """x + W2 * relu(W1 * x): two convolutions with a residual."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.first = Patches(width, inner, 3, stride=1, padding=1, flatten=False)
        self.second = Patches(inner, width, 3, stride=1, padding=1, flatten=False)

    def forward(self, x: Float[Tensor, "b y x w"]) -> Float[Tensor, "b y x w"]:
        """Pass a grid through both convolutions."""
        return x + self.second(image_of(self.first(image_of(x)).relu()))


class Around(nn.Module):
    """x + attention(norm(x)), within windows."""

    def __init__(self, config: DenoiserConfig, shift: int):
        super().__init__()
        block = config.block
        position = lookup("position", config.position, WINDOW_POSITIONS)
        inside = build_attention(block, position(block.width, block.heads, config.window, 0))
        self.attention = WindowAttention(inside, config.window, shift, "keep")
        self.around_attention = build_residual(block)

    def forward(self, x: Float[Tensor, "b y x w"]) -> Float[Tensor, "b y x w"]:
        """Attend within the windows of a grid."""
        return self.around_attention(x, self.attention)


def _nowhere(config: DenoiserConfig, shift: int) -> nn.Module:
    return nn.Identity()


# name -> the attention of a block, made from the config and the shift of its windows
_LOOKS: dict[str, Callable[[DenoiserConfig, int], nn.Module]] = {
    "windows": Around,
    "none": _nowhere,
}


class DenoiserBlock(nn.Module):
    """Convolutions, then window attention, shifted every second time."""

    def __init__(self, config: DenoiserConfig, number: int):
        super().__init__()
        turn, rest = divmod(number + 1, config.every)
        look = lookup("look", config.look, _LOOKS)
        self.near = Near(config.block.width, config.block.ffn_width)
        self.around = (_nowhere if rest else look)(config, 0 if turn % 2 else config.window // 2)

    def forward(self, x: Float[Tensor, "b y x w"]) -> Float[Tensor, "b y x w"]:
        """Pass a grid through both."""
        return self.around(self.near(x))


class Denoiser(nn.Module):
    """Blocks of convolutions and window attention that predict the noise of an image.

    clean = noisy - sigma f(noisy, sigma). Grey images of any size, from 0 to 1; what is missing to
    whole windows is mirrored. One model serves all sigmas, since it reads sigma as a second
    channel (FFDNet, Zhang et al. 2018); where none is told, the image is asked for it.
    """

    def __init__(self, config: DenoiserConfig):
        super().__init__()
        self.config = config
        block, p = config.block, config.patch
        if config.window < 2 and config.look == "windows":
            raise UsageError(f"window={config.window} sees nothing but itself; choose 8 or so")
        self.stem = Patches(2, block.width, 3 * p, stride=p, padding=p, flatten=False)
        self.blocks = nn.ModuleList(DenoiserBlock(config, n) for n in range(config.depth))
        self.head = Patches(block.width, p**2, 3, stride=1, padding=1, flatten=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise so that the predicted noise is zero, and blocks add little."""
        for part in self.modules():
            if isinstance(part, Patches):
                nn.init.kaiming_normal_(part.project.weight, nonlinearity="relu")
                nn.init.zeros_(part.project.bias)
        for block in self.blocks:
            for part in block.modules():
                if isinstance(part, Near):
                    part.second.project.weight.data.mul_(self.config.depth**-0.5)
                if isinstance(part, WindowAttention):
                    part.inside.reset_parameters()
                    nn.init.zeros_(part.inside.out.weight)
        nn.init.zeros_(self.head.project.weight)

    @property
    def whole(self) -> int:
        """Multiple of pixels to which the sides of an image are padded."""
        return self.config.patch * self.config.window

    @property
    def reach(self) -> int:
        """Radius of the receptive field in pixels."""
        depth, looks = self.config.depth, self.config.depth // self.config.every
        return self.config.patch * (2 * depth + 2 + looks * (self.config.window - 1))

    def level(self, images: Float[Tensor, "b 1 y x"]) -> Float[Tensor, " b"]:
        """Estimate the standard deviation of the noise of images."""
        return noise_level(images)

    def grid(self, size: Size) -> Size:
        """Number of tokens of an image of (height, width) in each direction."""
        height, width = (-(-n // self.whole) * self.config.window for n in size)
        return height, width

    def features(
        self, images: Float[Tensor, "b 1 y x"], sigma: Float[Tensor, " b"]
    ) -> Float[Tensor, "b h w e"]:
        """Last vectors of images whose sides are whole, as a grid."""
        levels = sigma[:, None, None, None].expand_as(images)
        x = self.stem(torch.cat([images - 0.5, levels], 1))
        for block in self.blocks:
            x = block(x)
        return x

    def layout(self, size: Size) -> dict[str, Layout]:
        """Layout of each layer's attention over an image of (height, width)."""
        layers, grid = {}, self.grid(size)
        whole = token_grid(grid, self.config.patch, size)
        for n, block in enumerate(cast(Sequence[DenoiserBlock], self.blocks)):
            if isinstance(block.around, Around):
                tokens = block.around.attention.place(*grid)
                layers[f"blocks.{n}.around.attention.inside"] = Layout(whole, whole, tokens, tokens)
        return layers

    def forward(
        self, images: Float[Tensor, "b 1 y x"], sigma: Float[Tensor, " b"] | float | None = None
    ) -> Float[Tensor, "b 1 y x"]:
        """Denoised images; sigma is the standard deviation of their noise, 0 to 1."""
        check_images(images, 1)
        height, width = images.shape[2:]
        padded = mirrored(images, -height % self.whole, -width % self.whole)
        if sigma is None:
            sigma = self.level(images)
        sigma = torch.as_tensor(sigma, dtype=images.dtype, device=images.device)
        sigma = sigma.expand(len(images))
        x = self.head(image_of(self.features(padded, sigma)))
        noise = F.pixel_shuffle(image_of(x), self.config.patch)[..., :height, :width]
        return images - sigma[:, None, None, None] * noise


def image_of(x: Float[Tensor, "b y x w"]) -> Float[Tensor, "b w y x"]:
    """Grid as an image; what lies in memory stays where it is."""
    return x.permute(0, 3, 1, 2)


def mirrored(images: Tensor, down: int, right: int) -> Tensor:
    """Pad images (b, c, y, x) below and to the right by reflection, repeatedly if need be."""
    for dim, more in ((2, down), (3, right)):
        if more:
            n = images.shape[dim]
            place = torch.arange(n + more, device=images.device) % (2 * n)
            images = images.index_select(dim, torch.minimum(place, 2 * n - 1 - place))
    return images


_LAPLACE = ((1.0, -2.0, 1.0), (-2.0, 4.0, -2.0), (1.0, -2.0, 1.0))  # zero on a linear slope


def noise_level(images: Float[Tensor, "b 1 y x"]) -> Float[Tensor, " b"]:
    """Estimate the standard deviation of the noise from second differences.

    The median of the second differences (Immerkaer 1996), over what it is of normal noise.
    """
    height, width = images.shape[2:]
    images = mirrored(images, max(0, 3 - height), max(0, 3 - width))
    kernel = torch.tensor(_LAPLACE, dtype=images.dtype, device=images.device)[None, None]
    left = F.conv2d(images, kernel).flatten(1).abs().median(1).values
    return left / (6 * 0.6745)
