"""Why attention has many heads: two look-ups at once by one head, by two and by four."""

from dataclasses import dataclass

import torch
from matplotlib.axes import Axes
from torch import Tensor, nn
from torch.nn import functional as F

from regard import MultiHead, UsageError, watch
from regard.gallery.drawn import Drawn
from regard.settings import setting
from regard.viewer import BLUES, Drawing, Plot, draw_plots

_SIDE = 5  # pixels of a letter
_LETTERS = {
    "A": ".###. #...# ##### #...# #...#",
    "C": ".#### #.... #.... #.... .####",
    "E": "##### #.... ####. #.... #####",
    "H": "#...# #...# ##### #...# #...#",
    "L": "#.... #.... #.... #.... #####",
    "O": ".###. #...# #...# #...# .###.",
    "T": "##### ..#.. ..#.. ..#.. ..#..",
    "X": "#...# .#.#. ..#.. .#.#. #...#",
}
_BATCH, _TESTED, _LR = 64, 512, 0.01
_MOST = 4  # numbers of heads in one picture


@dataclass(frozen=True)
class ManyHeadsSettings(Drawn):
    """Settings of two look-ups at once."""

    heads: tuple[int, ...] = setting((1, 2, 4), "numbers of heads to compare", min=1, max=48)
    width: int = setting(48, "width, the same for all", min=48, max=1024)
    places: int = setting(8, "places to look up", min=3, max=20)
    steps: int = setting(500, "training steps of each", min=1, max=20_000)
    seed: int = setting(1, "random seed", min=0, max=2**63 - 1)


class TwoLookUps(nn.Module):
    """One layer of attention that reads the letters at two places, and writes both."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.attention = MultiHead(width, heads)
        self.write = nn.Linear(width, 2 * _SIDE**2)

    def forward(self, asked: Tensor, tokens: Tensor) -> Tensor:
        """Both letters (b, 2, pixels) that a query (b, 1, w) reads from tokens (b, places, w)."""
        return self.write(self.attention(asked, tokens)[:, 0]).unflatten(-1, (2, -1))


@dataclass(frozen=True)
class Questions:
    """Letters at places, and which two of them are asked for: all as a layer reads them."""

    asked: Tensor  # (b, 1, w)
    tokens: Tensor  # (b, places, w): a place, and the letter there
    letters: Tensor  # (b, places, pixels)
    wanted: Tensor  # (b, 2): places
    answers: Tensor  # (b, 2, pixels)


def ask(count: int, places: int, width: int, generator: torch.Generator) -> Questions:
    """Random letters at all places, and two different places to look up."""
    rows = [[float(dot == "#") for dot in art.replace(" ", "")] for art in _LETTERS.values()]
    known = torch.tensor(rows)
    letters = known[torch.randint(len(known), (count, places), generator=generator)]
    wanted = torch.rand(count, places, generator=generator).topk(2).indices
    named = F.one_hot(torch.arange(places), places).expand(count, -1, -1)
    tokens = torch.cat([named, letters], -1)
    asked = F.one_hot(wanted, places).flatten(1).unsqueeze(1).float()
    return Questions(
        F.pad(asked, (0, width - asked.shape[-1])),
        F.pad(tokens, (0, width - tokens.shape[-1])),
        letters,
        wanted,
        letters.gather(1, wanted.unsqueeze(-1).expand(-1, -1, letters.shape[-1])),
    )


def error(written: Tensor, answers: Tensor) -> Tensor:
    """Squared error over the variance of a pixel: 1 for whoever always writes the mean letter."""
    return F.mse_loss(written, answers) / answers.var(0, correction=0).mean()


def train(settings: ManyHeadsSettings, heads: int, test: Questions) -> tuple[TwoLookUps, list]:
    """Train a layer with some heads; also its error on other questions every tenth step."""
    generator = torch.Generator().manual_seed(settings.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = TwoLookUps(settings.width, heads)
    optimiser, errors = torch.optim.Adam(model.parameters(), _LR), []
    for step in range(settings.steps + 1):
        if step % 10 == 0 or step == settings.steps:
            with torch.no_grad():
                errors.append((step, float(error(model(test.asked, test.tokens), test.answers))))
        some = ask(_BATCH, settings.places, settings.width, generator)
        optimiser.zero_grad()
        error(model(some.asked, some.tokens), some.answers).backward()
        if step < settings.steps:
            optimiser.step()
    return model, errors


def draw_many_heads(settings: ManyHeadsSettings) -> Drawing:
    """Draw where each head looks, what is written, and how the error falls."""
    if not 1 <= len(set(settings.heads)) == len(settings.heads) <= _MOST:
        raise UsageError(f"heads= names {len(settings.heads)} numbers; give 1 to {_MOST} different")
    for heads in settings.heads:
        if settings.width % heads:
            raise UsageError(f"heads={heads} does not divide width={settings.width}")
    generator = torch.Generator().manual_seed(settings.seed + 1)
    test = ask(_TESTED, settings.places, settings.width, generator)
    blurred = test.answers.mean(1, keepdim=True).expand_as(test.answers)
    numbers = {"the average of both": {"error": float(error(blurred, test.answers))}}
    first = int((test.answers[:, 0] != test.answers[:, 1]).any(-1).nonzero()[0])
    one, two = (place + 1 for place in test.wanted[first].tolist())

    def picture(pixels: Tensor) -> Plot:
        def paint(axes: Axes) -> None:
            shown = pixels.view(-1, _SIDE, _SIDE)
            row = F.pad(shown, (1, 1, 1, 1)).transpose(0, 1).flatten(1)
            axes.imshow(row, cmap=BLUES, vmin=0, vmax=1)

        return Plot(paint, bare=True)

    def titled(plot: Plot, title: str) -> Plot:
        return Plot(plot.paint, title, bare=True)

    def weights(shown: Tensor, title: str) -> Plot:
        def paint(axes: Axes) -> None:
            axes.imshow(shown, cmap=BLUES, vmin=0, vmax=1, aspect="auto")
            for head, row in enumerate(shown):
                for place, weight in enumerate(row.tolist()):
                    colour = "white" if weight > 0.5 else "black"
                    told = {"ha": "center", "va": "center", "fontsize": 6.5, "color": colour}
                    if weight >= 0.005:
                        axes.text(place, head, f"{weight:.2f}", **told)

        return Plot(paint, title, bare=True)

    rows = [
        [
            titled(picture(test.letters[first]), f"letters at places 1 to {settings.places}"),
            titled(picture(test.answers[first, :1]), f"asked: place {one}"),
            titled(picture(test.answers[first, 1:]), f"and place {two}"),
        ]
    ]
    curves = {}
    for heads in settings.heads:
        model, curves[heads] = train(settings, heads, test)
        with torch.no_grad(), watch(model) as maps:
            written = model(test.asked[first : first + 1], test.tokens[first : first + 1])
        name = f"{heads} head{'s' * (heads > 1)}"
        numbers[name] = {"error": curves[heads][-1][1], "head width": settings.width // heads}
        looked = maps["attention"].weights(0)[0, :, 0]
        rows.append(
            [
                weights(looked, f"{name} of width {settings.width // heads}: weights"),
                titled(picture(written[0, :1]), "written"),
                titled(picture(written[0, 1:]), f"error {curves[heads][-1][1]:.2g}"),
            ]
        )

    def fall(axes: Axes) -> None:
        for heads, errors in curves.items():
            axes.plot(*zip(*errors, strict=True), label=f"{heads} head{'s' * (heads > 1)}")
        average = numbers["the average of both"]["error"]
        axes.axhline(average, color="0.5", linestyle="--", linewidth=0.9, label="the average")
        axes.set_yscale("log")
        axes.legend(fontsize=7)

    rows.append([Plot(fall, "error by training step")])
    title = "Why many heads: two look-ups at once"
    notes = (
        "A query names two places, and the letters there are to be written one by one. One head "
        "has one row of weights: it sees a weighted average of both letters, and writes the same "
        "blur twice, or one of them well. Two heads look at one place each. All layers have the "
        "same width and as many parameters; an error of 1 is that of the mean letter.",
    )
    sheet = draw_plots(title, rows, notes=notes, size=(3.9, 0.9), widths=(3.9, 0.9, 0.9))
    return Drawing(title, numbers, notes, sheet)
