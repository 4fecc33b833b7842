"""A figure of plots with its notes and the numbers behind it, as PNG or as a page."""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import AutoLocator

from regard.errors import UsageError
from regard.files import write_atomically
from regard.metrics.results import Named
from regard.viewer.fonts import cut
from regard.viewer.html import PAGE_HEAD, digest
from regard.viewer.panels import INK, MARGIN, NOTE, SOFT, TITLE, Sheet, lines_of
from regard.viewer.plot import plain

# row -> column -> number
Numbers = Mapping[str, Mapping[str, float]]

# inches: before a plot for its ticks and label, above it for its title, under it
_LEFT, _ABOVE, _UNDER = 0.62, 0.3, 0.45

_PAGE = (
    PAGE_HEAD
    + """<body>
<main class="figure">
{body}
</main>
</body>
</html>
"""
)


@dataclass(frozen=True, eq=False)
class Plot:
    """One plot of a figure: what paints its axes, its title and labels; `bare` has no ticks."""

    paint: Callable[[Axes], None]
    title: str = ""
    x: str = ""
    y: str = ""
    bare: bool = False

    def draw(self, axes: Axes, sheet: Sheet) -> None:
        """Draw it on axes."""
        if self.bare:
            axes.set_frame_on(False)
        else:
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_locator(AutoLocator())
            plain(axes)
        self.paint(axes)
        axes.minorticks_off()
        if axes.images:
            axes.grid(False)
        room = axes.get_position().width * sheet.width * 72 / 8.5  # not into the next plot
        title = cut(sheet.spell(self.title), room)
        axes.set_title(title, loc="left", pad=4, **sheet.style(8.5))
        axes.set_xlabel(sheet.spell(self.x), labelpad=2, **sheet.style(8, SOFT))
        axes.set_ylabel(sheet.spell(self.y), labelpad=2, **sheet.style(8, SOFT))
        if (legend := axes.get_legend()) is not None:
            legend.set_frame_on(False)


def draw_plots(
    title: str,
    rows: Sequence[Sequence[Plot]],
    *,
    notes: Sequence[str] = (),
    size: tuple[float, float] = (3.0, 2.1),
    widths: Sequence[float] | None = None,
    bare: bool = False,
    headings: Sequence[str] = (),
) -> Sheet:
    """Draw rows of plots of one size (width, height) in inches under a title and notes.

    Args:
        title: title of the figure
        rows: rows of plots
        notes: lines below the title
        size: width and height of a plot in inches
        widths: widths of the columns, where they differ
        bare: leave no room for ticks and labels
        headings: heading above each row
    """
    count = max(map(len, rows))
    widths = widths or [size[0]] * count
    left, under = (0.12, 0.05) if bare else (_LEFT, _UNDER)
    width = 2 * MARGIN + sum(widths) + left * count
    lines = lines_of(notes, width)
    headings = [*headings, *[""] * (len(rows) - len(headings))]
    highs = [_ABOVE + size[1] + under + NOTE * bool(heading) for heading in headings]
    height = TITLE + NOTE * len(lines) + sum(highs) + MARGIN
    texts = [title, *lines, *(t for row in rows for p in row for t in (p.title, p.x, p.y) if t)]
    texts += filter(None, headings)
    sheet = Sheet(width, height, texts)
    sheet.head(title, lines)
    down = TITLE + NOTE * len(lines)
    for row, heading, high in zip(rows, headings, highs, strict=True):
        under_it, across = down + high - under - size[1], MARGIN
        if heading:
            sheet.write(heading, MARGIN + left, down + 0.16, 8.5, INK, width - 2 * MARGIN - left)
        for plot, wide in zip(row, widths, strict=False):
            axes = sheet.axes(across + left, under_it, wide, size[1], xticks=[], yticks=[])
            plot.draw(axes, sheet)
            across += left + wide
        down += high
    return sheet


@dataclass(frozen=True, eq=False)
class Drawing(Named):
    """A figure, what is to be said of it, and the numbers behind it."""

    title: str
    numbers: Numbers
    notes: Sequence[str] = ()
    sheet: Sheet = field(default=None, repr=False)  # type: ignore[assignment]
    path: str | None = None  # where it was written

    def save(self, path: str | Path) -> Path:
        """Write it to a file as its suffix says: .html or .png."""
        path = Path(path)
        suffix = path.suffix.lower()
        if suffix in (".html", ".htm"):
            write_atomically(path, self.html())
        elif suffix == ".png":
            write_atomically(path, self.sheet.png())
        else:
            raise UsageError(f"{path}: unknown kind of file; end it in .html or .png")
        return path

    def html(self) -> str:
        """Page of its own, which loads nothing and runs nothing."""
        # the picture says these to all who see it
        body = [f'<p class="hidden">{escape(note)}</p>' for note in self.notes]
        body += [inline_image(self.sheet.png(), self.title), _table(table_of(self.numbers))]
        return still_page(self.title, [f'<h1 class="hidden">{escape(self.title)}</h1>', *body])

    def _repr_html_(self) -> str:
        return (
            f'<iframe srcdoc="{escape(self.html())}" sandbox="" title="{escape(self.title)}" '
            'style="width:100%;height:760px;border:0"></iframe>'
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        told = {"title": self.title, "notes": list(self.notes), "numbers": self.numbers}
        return told if self.path is None else {**told, "path": self.path}

    def __str__(self) -> str:
        rows = table_of(self.numbers)
        wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
        first, *rest = zip(*rows, strict=True)
        columns = [[f"{cell:<{wide[0]}}" for cell in first]]
        columns += [[f"{cell:>{w}}" for cell in c] for c, w in zip(rest, wide[1:], strict=True)]
        lines = ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]
        end = "give out= a .png or .html to see it" if self.path is None else f"wrote {self.path}"
        return "\n".join([self.title, *lines, end])


def inline_image(png: bytes, alt: str) -> str:
    """Element of a page that holds a picture itself."""
    return f'<img alt="{escape(alt)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'


def still_page(title: str, body: Sequence[str]) -> str:
    """Page of some elements, which loads nothing and runs nothing."""
    style = files("regard.viewer").joinpath("page.css").read_text("utf-8")
    policy = f"default-src 'none'; img-src data:; style-src {digest(style)}; base-uri 'none'"
    page = {"policy": policy, "title": escape(title), "style": style}
    return _PAGE.format(**page, body="\n".join(body))


def table_of(numbers: Numbers) -> list[list[str]]:
    """Numbers as rows of cells, the head first."""
    columns = list(dict.fromkeys(name for row in numbers.values() for name in row))
    head = ["", *columns]
    return [
        head,
        *(
            [name, *(f"{row[c]:.4g}" if c in row else "" for c in columns)]
            for name, row in numbers.items()
        ),
    ]


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Write rows of cells as an HTML table."""
    head, *rest = ([escape(cell) for cell in row] for row in rows)
    lines = ["<tr>" + "".join(f"<th>{cell}</th>" for cell in head) + "</tr>"]
    for first, *cells in rest:
        lines.append(f"<tr><th>{first}</th>" + "".join(f"<td>{c}</td>" for c in cells) + "</tr>")
    return '<table class="numbers">' + "".join(lines) + "</table>"
