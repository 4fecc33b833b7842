"""Fonts that hold every letter of a text, and how wide a text is in them."""

from functools import cache
from unicodedata import east_asian_width

from matplotlib.font_manager import FontEntry, findSystemFonts, fontManager, get_font

from regard.viewer.picture import language_of

PLAIN_FONT = "DejaVu Sans"  # comes with matplotlib, so it is always there
# Which fonts to ask first for what the plain one lacks, by the language the letters belong to.
_FIRST_FONTS = {
    "zh": ("Noto Sans CJK SC", "Source Han Sans SC", "PingFang SC", "Microsoft YaHei", "SimHei"),
    "ja": ("Noto Sans CJK JP", "Source Han Sans", "Hiragino Sans", "Yu Gothic", "Meiryo"),
    "ko": ("Noto Sans CJK KR", "Source Han Sans K", "Apple SD Gothic Neo", "Malgun Gothic"),
    "": ("Noto Sans", "Arial Unicode MS", "WenQuanYi Zen Hei", "Droid Sans Fallback"),
}


@cache
def fonts_for(text: str) -> tuple[list[str], frozenset[str]]:
    """Fonts that together hold every letter of a text, and the letters that none has."""
    fonts: list[str] = [PLAIN_FONT]
    needed = {ord(letter) for letter in text if not letter.isspace()} - letters_in(_plain())
    if not needed:
        return fonts, frozenset()
    fonts, missing = _search(text, needed)
    if missing and add_new_fonts():
        fonts, missing = _search(text, needed)
    return fonts, frozenset(map(chr, missing))


@cache
def add_new_fonts() -> bool:
    """Add fonts that were installed after matplotlib listed them, and tell whether there are any.

    Its list is kept in a file of the user's cache, and is not made again when fonts come.
    """
    known = {entry.fname for entry in fontManager.ttflist}
    before = len(fontManager.ttflist)
    for path in set(findSystemFonts()) - known:
        try:
            fontManager.addfont(path)
        except (OSError, RuntimeError):  # a kind of font that matplotlib cannot draw
            continue
    return len(fontManager.ttflist) > before


def _search(text: str, needed: set[int]) -> tuple[list[str], set[int]]:
    """Plain font and those that hold what it lacks, and the letters that none has."""
    fonts, needed = [PLAIN_FONT], set(needed)
    first = [
        *_FIRST_FONTS[language_of(text)],
        *(name for names in _FIRST_FONTS.values() for name in names),
    ]
    entries = [
        entry
        for entry in fontManager.ttflist
        if _upright(entry)
        and not entry.name.startswith(("Last Resort", ".LastResort"))  # boxes for every letter
    ]
    entries.sort(key=lambda entry: first.index(entry.name) if entry.name in first else len(first))
    for entry in entries:
        if entry.name not in fonts and needed & (letters := letters_in(entry)):
            fonts.append(entry.name)
            needed -= letters
        if not needed:
            break
    return fonts, needed


def _upright(entry: FontEntry) -> bool:
    return entry.style == "normal" and entry.weight in (400, "normal", "regular")


def _plain() -> FontEntry:
    return next(e for e in fontManager.ttflist if e.name == PLAIN_FONT and _upright(e))


def letters_in(entry: FontEntry) -> set[int]:
    """Code points a font can draw, none if it cannot be read."""
    try:
        return set(get_font(entry.fname).get_charmap())
    except (OSError, RuntimeError):  # a colour font, or a broken file
        return set()


def spell(text: str, missing: frozenset[str]) -> str:
    """Write letters that no font has as their code points, which are at least legible."""
    return "".join(
        f"[U+{ord(letter):04X}]" if letter in missing else letter for letter in text
    ).replace("][", " ")


def text_width(text: str) -> float:
    """Width of a text in font sizes; letters the plain font lacks are estimated."""
    return sum(map(_advance, text))


@cache
def _advance(letter: str) -> float:
    font = get_font(_plain().fname)
    if font.get_char_index(ord(letter)) == 0:
        return 1.0 if east_asian_width(letter) in "WF" else 0.62
    font.set_size(1.0, 72 * 64)  # one font size is 64 pixels
    return font.load_char(ord(letter)).linearHoriAdvance / 65536 / 64


def cut(text: str, width: float) -> str:
    """Cut a text to a width in font sizes, with an ellipsis in place of what does not fit."""
    if text_width(text) <= width:
        return text
    while text and text_width(text + "…") > width:
        text = text[:-1]
    return text + "…"
