"""Receptive fields of convolution, local attention, windows and full attention, by gradient."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from matplotlib.axes import Axes
from torch import Tensor, nn

from regard import LocalRelation, MultiHead, WindowAttention
from regard.api import load_with_data
from regard.gallery.drawn import Drawn
from regard.gallery.first_layer import seeing
from regard.insight import SeenImages, chosen_layers, encoder_of, held_in, pull, seen_images
from regard.insight import fields as fields_of_layers
from regard.settings import setting
from regard.viewer import BLUES, LINE, Drawing, Plot, draw_plots

_WIDTH, _HEADS = 16, 2
_SAMPLES = 8  # random stacks that a field is averaged over
_LAYERS_DRAWN = 6  # of a model, unless they are named


@dataclass(frozen=True)
class ReceptiveFieldSettings(SeenImages, Drawn):
    """Settings of the receptive fields."""

    model: str | None = setting(None, "instead of layers side by side: a model that reads images")
    images: int = setting(64, "images that a model's fields are the mean of", min=1, max=10_000)
    side: int = setting(21, "side of the grid, one token a pixel", min=5, max=63)
    depth: int = setting(4, "layers", min=1, max=12)
    window: int = setting(3, "side of a kernel and of a neighbourhood, odd", min=1, max=31)
    windows: int = setting(7, "side of a window, shifted by its half", min=2, max=31)
    seed: int = setting(1, "random seed", min=0, max=2**63 - 1)


class ChannelsLast(nn.Module):
    """A layer of images (b, w, y, x) as one of a grid (b, y, x, w)."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """Convolve, or attend to the neighbours of each place."""
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
    "convolution": lambda settings, n: ChannelsLast(
        nn.Conv2d(_WIDTH, _WIDTH, settings.window, padding=settings.window // 2)
    ),
    "local attention": lambda settings, n: ChannelsLast(
        LocalRelation(_WIDTH, window=settings.window)
    ),
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
    return pull(y[:, side // 2, side // 2], x, chosen)[0].sum(-1)


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


def shade(field: Tensor) -> Tensor:
    """Return shades from 0 to 1: zero is 0, all else at least a fifth, the root of its share.

    The place itself, which the residual favours, is as dark as the next.
    """
    others = field.flatten().sort(descending=True).values[1:2]
    top = others if len(others) and others > 0 else field.max()
    return torch.where(field > 0, 0.2 + 0.5 * (field / top).clamp(max=1).sqrt(), 0.0)


def draw(settings: ReceptiveFieldSettings) -> Drawing:
    """Draw the fields layer by layer: of layers side by side, or of a model."""
    return _draw_layers(settings) if settings.model is None else _draw_model(settings)


def paint(field: Tensor) -> Callable[[Axes], None]:
    """Return what draws a field in a frame."""
    shades = {"cmap": BLUES, "vmin": 0, "vmax": 1, "interpolation": "nearest"}

    def frame(axes: Axes) -> None:
        axes.set_frame_on(True)
        for edge in axes.spines.values():
            edge.set_color(LINE)

    return lambda axes: frame(axes.imshow(shade(field), **shades).axes)


def _draw_layers(settings: ReceptiveFieldSettings) -> Drawing:
    found = {
        name: [(field, held_in(field).side) for field in layers]
        for name, layers in fields(settings).items()
    }
    rows = [
        [
            Plot(paint(field), f"{name}, {n + 1}: {side} x {side}", bare=True)
            for n, (field, side) in enumerate(layers)
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
        f"{name}, side": {f"layer {n + 1}": float(side) for n, (_, side) in enumerate(layers)}
        for name, layers in found.items()
    }
    sheet = draw_plots(title, rows, notes=notes, size=(1.9, 1.9), bare=True)
    return Drawing(title, numbers, notes, sheet)


def _draw_model(settings: ReceptiveFieldSettings) -> Drawing:
    task = seeing(str(settings.model))
    trained = encoder_of(task.model)
    generator = torch.Generator().manual_seed(settings.seed)
    if settings.data is None:
        config = trained.config
        shape = settings.images, config.channels, config.image, config.image
        images, kind = torch.randn(shape, generator=generator), "of noise"
    else:
        settings = replace(settings, data=load_with_data(task, settings.data)[1])
        images, kind = task.inputs.collate(seen_images(task, settings), task.format)[0], "images"
    layers = chosen_layers(trained, settings.layers, _LAYERS_DRAWN)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        fresh = type(trained)(trained.config).eval()
    rows, numbers = [], {}
    for name, encoder in {"untrained": fresh, "trained": trained}.items():
        found = fields_of_layers(encoder, images, layers, generator)
        sides = {n: (held_in(field).side, held_in(field, 0.5).side) for n, field in found.items()}
        rows.append(
            [
                Plot(paint(field), f"{n}: {sides[n][0]}, half in {sides[n][1]}", bare=True)
                for n, field in found.items()
            ]
        )
        numbers[f"{name}, side"] = {n: float(whole) for n, (whole, _) in sides.items()}
        numbers[f"{name}, side of half"] = {n: float(half) for n, (_, half) in sides.items()}
    title = f"{settings.model}: what a place in the middle of each layer sees"
    notes = (
        f"How much each pixel moves the middle of a layer: the size of the gradient, the mean of "
        f"{len(images):,} {kind}, its root drawn. White is exactly zero. Beside each name the side "
        "of the square that is not zero, and of the smallest that holds half of it.",
    )
    headings = ("with fresh weights", "trained")
    sheet = draw_plots(title, rows, notes=notes, size=(1.9, 1.9), bare=True, headings=headings)
    return Drawing(title, numbers, notes, sheet)
