"""All pictures of the lectures on one page, in their order, each with the command that draws it."""

import io
import shlex
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from PIL import Image

from regard import UsageError
from regard.cli import main
from regard.files import write_atomically
from regard.gallery.diffusion import drawn_photo
from regard.settings import setting
from regard.training import Progress
from regard.verbs import Listing
from regard.viewer import inline_image, still_page


class Tile(NamedTuple):
    """A picture: the rows of the lectures that it belongs to, what it shows, and its command."""

    rows: str
    title: str
    command: str
    draws: bool = True  # a picture, or else a text


PHOTO, TEXTURE, PAIRS = "photo.png", "texture.png", "pairs.tsv"  # made up, unless given
TILES = (
    Tile("F1", "Particles beside the heat equation", "show particles"),
    Tile("F2", "Anisotropic diffusion", "show perona_malik"),
    Tile("F3", "The bilateral filter over both of its widths", f"show bilateral_grid {PHOTO}"),
    Tile("F4, F5", "A noisy photo by five filters", f"show filter_comparison {PHOTO}"),
    Tile("F6", "A texture grown by hard attention", f"show texture {TEXTURE} width=48 height=48"),
    Tile("R2, T2", "Where a translator looks", 'look en-zh "How are you?"'),
    Tile("R5, T3, V2-V5", "The figures of the lectures", "show lectures", False),
    Tile("A1", "The softmax at several temperatures", "show temperature"),
    Tile("A1", "Why scores are divided by the root of d_k", "show scaling"),
    Tile("A2", "Why many heads", "show heads"),
    Tile("P1", "A binary counter beside sinusoids", "show counter"),
    Tile("T1", "One-hot vectors times the embedding matrix", "show embedding"),
    Tile("T5", "Words in a plane", 'look fill words="river lake sea film album song"'),
    Tile("T6", "Where a language model looks", 'look shakespeare "To be, or not to be"'),
    Tile("A3, V8", "Receptive fields", "show receptive_fields"),
    Tile("V8", "What a first layer looks for", "show filters"),
    Tile("I2", "More features than dimensions", "show superposition"),
    Tile("I3", "Two misconceptions, measured", f"show misconceptions en-zh data={PAIRS}"),
)
_PAIRS = """How are you?\t你好吗？
I love you.\t我爱你。
He is a student.\t他是学生。
The weather is good today.\t今天天气很好。
She likes reading books.\t她喜欢看书。
Where do you live?\t你住在哪里？
We are going to school.\t我们要去学校。
This is my friend.\t这是我的朋友。
"""


@dataclass(frozen=True)
class GallerySettings:
    """Settings of the page of all pictures."""

    out: Path = setting(Path("gallery.html"), "page to write, .html")
    photo: Path | None = setting(None, "a photo of your own for the filters")


class Gallery(Listing):
    """The pieces with a line on each, and the page on which they were drawn."""

    path = ""

    def __str__(self) -> str:
        return f"{super().__str__()}\n\nwrote {self.path}"


def draw_gallery(settings: GallerySettings, pieces: dict[str, str], quiet: bool = True) -> Gallery:
    """Draw all tiles, and write them as a page."""
    if settings.out.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"out={settings.out}: the page of all pictures ends in .html")
    if settings.photo is not None and not settings.photo.is_file():
        raise UsageError(f"photo={settings.photo}: no such file")
    with (
        TemporaryDirectory(prefix="regard-gallery-") as place,
        Progress("draw", len(TILES), quiet=quiet) as bar,
    ):
        body = ['<h1>Attention in pictures</h1><ol class="lectures">']
        for number, element in enumerate(_elements(settings, Path(place)), 1):
            body.append(f'<li id="tile-{number}">{element}</li>')
            bar.update(1)
    write_atomically(settings.out, still_page("Attention in pictures", [*body, "</ol>"]))
    made = Gallery(pieces)
    made.path = str(settings.out)
    return made


def _elements(settings: GallerySettings, place: Path) -> Iterator[str]:
    """What stands on each tile."""
    files = _material(settings, place)
    for number, tile in enumerate(TILES, 1):
        words = [_with_files(word, files) for word in shlex.split(tile.command)]
        out = f"out={words[1]}.png" if tile.draws else ""
        picture = place / f"tile-{number}.png"
        printed = _run([*words, f"out={picture}"] if tile.draws else words)
        shown = f"<pre>{escape(printed)}</pre>"
        if tile.draws:
            image = inline_image(picture.read_bytes(), tile.title)
            shown = f'<a href="#tile-{number}">{image}</a>'
        own = tile.command.replace(PHOTO, settings.photo.name) if settings.photo else tile.command
        yield (
            f'<h2><a href="#tile-{number}">{escape(tile.rows)}</a> {escape(tile.title)}</h2>'
            f"{shown}<code>{escape(f'regard {own} {out}'.strip())}</code>"
        )


def _run(words: list[str]) -> str:
    """What a command prints; a refusal is raised."""
    said, told = io.StringIO(), io.StringIO()
    with redirect_stdout(said), redirect_stderr(told):
        code = main(words)
    if code:
        raise UsageError(f"regard {' '.join(words)}: {told.getvalue().strip()}")
    return said.getvalue()


def _with_files(word: str, files: dict[str, Path]) -> str:
    key, equals, value = word.rpartition("=")
    return f"{key}{equals}{files[value]}" if value in files else word


def _material(settings: GallerySettings, place: Path) -> dict[str, Path]:
    """Files that commands read: a photo, a texture and some sentences."""
    files = {name: place / name for name in (PHOTO, TEXTURE, PAIRS)}
    _picture(drawn_photo()[0]).resize((200, 200), Image.Resampling.BICUBIC).save(files[PHOTO])
    y, x = torch.meshgrid(torch.arange(24), torch.arange(24), indexing="ij")
    bricks = ((y % 6 == 0) | ((x + 6 * (y // 6 % 2)) % 12 == 0)).float()
    noise = torch.randn(24, 24, generator=torch.Generator().manual_seed(1))
    _picture((0.35 + 0.5 * bricks + 0.03 * noise).clamp(0, 1)).save(files[TEXTURE])
    files[PAIRS].write_text(_PAIRS, "utf-8")
    return files | ({} if settings.photo is None else {PHOTO: settings.photo})


def _picture(grey: torch.Tensor) -> Image.Image:
    return Image.fromarray((255 * grey).round().byte().numpy())
