"""Receptive fields of convolution, local attention, windows and full attention, by gradient."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from matplotlib.axes import Axes
from torch import Tensor, nn

from regard import LocalRelation, MultiHead, WindowAttention
from regard.gallery.drawn import Drawn
from regard.settings import setting
from regard.viewer import BLUES, LINE, Drawing, Plot, draw_plots

_WIDTH, _HEADS = 16, 2
_SAMPLES = 8  # random stacks that a field is averaged over


@dataclass(frozen=True)
class ReceptiveFieldSettings(Drawn):
    """Settings of the receptive fields."""

    side: int = setting(21, "side of the grid, one token a pixel", min=5, max=63)
    depth: int = setting(4, "layers", min=1, max=12)
    window: int = setting(3, "side of a kernel and of a neighbourhood, odd", min=1, max=31)
    windows: int = setting(7, "side of a window, shifted by its half", min=2, max=31)
    seed: int = setting(1, "random seed", min=0, max=2**63 - 1)


class Convolution(nn.Module):
    """A convolution of a grid (b, y, x, w)."""

    def __init__(self, window: int):
        super().__init__()
        self.inner = nn.Conv2d(_WIDTH, _WIDTH, window, padding=window // 2)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve with one kernel for all places."""
        return self.inner(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


class LocalAttention(nn.Module):
    """Attention over a neighbourhood of each place of a grid (b, y, x, w)."""

    def __init__(self, window: int):
        super().__init__()
        self.inner = LocalRelation(_WIDTH, window=window)

    def forward(self, x: Tensor) -> Tensor:
        """Attend to the neighbours of each place."""
        return self.inner(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


class Full(nn.Module):
    """Attention of each place of a grid (b, y, x, w) to all."""

    def __init__(self):
        super().__init__()
        self.inner = MultiHead(_WIDTH, _HEADS)

    def forward(self, x: Tensor) -> Tensor:
        """Attend to all places."""
        return self.inner(x.flatten(1, 2)).view_as(x)


# name -> how to make layer n
_LAYERS: dict[str, Callable[[ReceptiveFieldSettings, int], nn.Module]] = {
    "convolution": lambda settings, n: Convolution(settings.window),
    "local attention": lambda settings, n: LocalAttention(settings.window),
    "windows, shifted": lambda settings, n: WindowAttention(
        MultiHead(_WIDTH, _HEADS), settings.windows, n % 2 * (settings.windows // 2)
    ),
    "full attention": lambda settings, n: Full(),
}


def field(stack: list[nn.Module], side: int, generator: torch.Generator) -> Tensor:
    """Return by how much each place of a grid moves the middle of the last layer, (side, side).

    A layer is x + f(norm(x)), as in a Transformer.
    """
    x = torch.randn(1, side, side, _WIDTH, generator=generator).requires_grad_()
    y = x
    for layer in stack:
        y = y + layer(nn.functional.layer_norm(y, (_WIDTH,)))
    chosen = torch.randn(_WIDTH, generator=generator)  # a direction; a sum over channels is normed
    (gradient,) = torch.autograd.grad((y[0, side // 2, side // 2] * chosen).sum(), x)
    return gradient[0].abs().sum(-1)


def fields(settings: ReceptiveFieldSettings) -> dict[str, list[Tensor]]:
    """Return the field of a stack of 1, 2, ... layers of each kind, the mean of random ones."""
    generator = torch.Generator().manual_seed(settings.seed)
    found = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        for name, make in _LAYERS.items():
            stacks = [[make(settings, n) for n in range(settings.depth)] for _ in range(_SAMPLES)]
            found[name] = [
                torch.stack([field(s[: n + 1], settings.side, generator) for s in stacks]).mean(0)
                for n in range(settings.depth)
            ]
    return found


def reach(field: Tensor) -> int:
    """Return the side of the square in which a field is not zero."""
    rows, columns = (field != 0).nonzero().unbind(1)
    return int(max(rows.max() - rows.min(), columns.max() - columns.min())) + 1


def shade(field: Tensor) -> Tensor:
    """Return shades from 0 to 1: zero is 0, all else at least a fifth, the root of its share.

    The place itself, which the residual favours, is as dark as the next.
    """
    others = field.flatten().sort(descending=True).values[1:2]
    top = others if len(others) and others > 0 else field.max()
    return torch.where(field > 0, 0.2 + 0.5 * (field / top).clamp(max=1).sqrt(), 0.0)


def draw(settings: ReceptiveFieldSettings) -> Drawing:
    """Draw the fields layer by layer."""
    found = fields(settings)

    def frame(axes: Axes) -> None:
        axes.set_frame_on(True)
        for edge in axes.spines.values():
            edge.set_color(LINE)

    def paint(field: Tensor) -> Callable[[Axes], None]:
        shades = {"cmap": BLUES, "vmin": 0, "vmax": 1, "interpolation": "nearest"}
        return lambda axes: frame(axes.imshow(shade(field), **shades).axes)

    rows = [
        [
            Plot(paint(field), f"{name}, {n + 1}: {reach(field)} x {reach(field)}", bare=True)
            for n, field in enumerate(layers)
        ]
        for name, layers in found.items()
    ]
    notes = (
        f"How much each of {settings.side} x {settings.side} tokens moves the one in the middle, "
        f"after so many layers: the size of the gradient, the mean of {_SAMPLES} untrained stacks, "
        "its root drawn. White is exactly zero.",
    )
    title = "Receptive fields, layer by layer"
    numbers = {
        f"{name}, side": {f"layer {n + 1}": float(reach(f)) for n, f in enumerate(layers)}
        for name, layers in found.items()
    }
    sheet = draw_plots(title, rows, notes=notes, size=(1.9, 1.9), bare=True)
    return Drawing(title, numbers, notes, sheet)
