"""An embedding is a one-hot vector times a matrix: it takes a row of it."""

from dataclasses import dataclass

import torch
from matplotlib.axes import Axes
from torch import Tensor, nn
from torch.nn import functional as F

from regard import UsageError
from regard.gallery.drawn import Drawn
from regard.settings import setting
from regard.viewer import BLUES, Drawing, Plot, draw_plots

_MAX_WORDS, _MAX_LETTERS = 16, 12


@dataclass(frozen=True)
class EmbeddingSettings(Drawn):
    """Settings of the embedding."""

    text: str = setting("the cat saw the other cat", "words, of which each is a token")
    width: int = setting(6, "numbers in the vector of a token", min=1, max=16)
    seed: int = setting(1, "random seed of the matrix", min=0, max=2**63 - 1)


def draw(settings: EmbeddingSettings) -> Drawing:
    """Draw the one-hot vectors of a text, the embedding matrix and their product."""
    words = settings.text.split()
    if not 0 < len(words) <= _MAX_WORDS:
        raise UsageError(f"text= has {len(words)} words; give 1 to {_MAX_WORDS}")
    vocabulary = sorted(set(words))
    ids = torch.tensor([vocabulary.index(word) for word in words])
    generator = torch.Generator().manual_seed(settings.seed)
    table = nn.Embedding(len(vocabulary), settings.width)
    with torch.no_grad():
        table.weight.copy_(torch.randn(table.weight.shape, generator=generator))
    one_hot = F.one_hot(ids, len(vocabulary)).float()
    product, looked_up = one_hot @ table.weight, table(ids)
    (gradient,) = torch.autograd.grad(looked_up.sum(), table.weight)
    (same,) = torch.autograd.grad(product.sum(), table.weight)
    short = [word if len(word) <= _MAX_LETTERS else word[:11] + "…" for word in vocabulary]
    rows = [short[i] for i in ids.tolist()]
    weight = table.weight.detach()

    def cells(axes: Axes, values: Tensor, form: str) -> None:
        for (row, column), value in zip(
            torch.cartesian_prod(*map(torch.arange, values.shape)).tolist(),
            values.flatten().tolist(),
            strict=True,
        ):
            axes.text(column, row, form.format(value), ha="center", va="center", fontsize=6)

    def hot(axes: Axes) -> None:
        axes.imshow(one_hot, cmap=BLUES, vmin=0, vmax=3, aspect="auto")
        cells(axes, one_hot, "{:.0f}")
        axes.set_yticks(range(len(rows)), rows, parse_math=False)
        axes.set_xticks(range(len(short)), short, rotation=60, ha="right", parse_math=False)

    def matrix(values: Tensor, names: list[str]):
        def paint(axes: Axes) -> None:
            axes.imshow(values, cmap="RdBu", vmin=-4, vmax=4, aspect="auto")
            cells(axes, values, "{:.2f}")
            axes.set_yticks(range(len(names)), names, parse_math=False)
            axes.set_xticks(range(settings.width))

        return paint

    title = "A one-hot vector times the embedding matrix is a row of it"
    notes = (
        f"{len(words)} tokens over a vocabulary of {len(vocabulary)}: the product and the table "
        "looked up at the tokens' numbers are the same, and so are their gradients: a row learns "
        "as often as its word occurs, and not at all where it does not.",
    )
    plots = [
        Plot(hot, "one-hot, X"),
        Plot(matrix(weight, short), "embedding matrix, E", "coordinate"),
        Plot(matrix(product.detach(), rows), "X E", "coordinate"),
    ]
    widths = (0.34 * len(short) + 0.6, 0.42 * settings.width + 0.3, 0.42 * settings.width + 0.3)
    high = 0.26 * len(words) + 0.5
    sheet = draw_plots(title, [plots], notes=notes, size=(2.6, high), widths=widths)
    numbers = {
        "largest difference": {
            "X E and the row": float((product - looked_up).detach().abs().max()),
            "their gradients": float((gradient - same).abs().max()),
        },
        "occurrences": {
            word: float(n) for word, n in zip(short, one_hot.sum(0).tolist(), strict=True)
        },
        "gradient of the row": {
            word: g for word, g in zip(short, gradient[:, 0].tolist(), strict=True)
        },
    }
    return Drawing(title, numbers, notes, sheet)
