"""Languages by the names that columns and files have for them."""

import re
from collections.abc import Sequence

# One language a row: its code, then other names it goes by in headers.
LANGUAGES = {
    name: row.split()[0]
    for row in """ar ara arabic|bg bul bulgarian|bn ben bengali|ca cat catalan
cs ces cze czech|da dan danish|de deu ger german deutsch|el ell gre greek|en eng english
es spa spanish|et est estonian|fa fas per persian|fi fin finnish|fr fra fre french|he heb hebrew
hi hin hindi|hr hrv croatian|hu hun hungarian|id ind indonesian|it ita italian|ja jpn japanese
ko kor korean|lt lit lithuanian|lv lav latvian|nl nld dut dutch|no nor norwegian|pl pol polish
pt por portuguese|ro ron rum romanian|ru rus russian|sk slk slo slovak|sl slv slovenian
sr srp serbian|sv swe swedish|sw swa swahili|ta tam tamil|th tha thai|tr tur turkish
uk ukr ukrainian|ur urd urdu|vi vie vietnamese|zh zho chi cmn chinese mandarin
yue cantonese""".replace("\n", "|").split("|")
    for name in row.split()
}


def language_of(name: str) -> str | None:
    """Language code that a name stands for (en, EN-us, English, eng), or None."""
    name = name.strip().casefold()
    if name in LANGUAGES:
        return LANGUAGES[name]
    code = re.fullmatch(r"([a-z]{2,3})[-_](?:[a-z]{2}|[a-z]{4}|\d{3})", name)
    return LANGUAGES.get(code[1]) if code else None


def same_language(name: str, asked: str) -> bool:
    """True if two names mean the same language."""
    name, asked = name.strip().casefold(), asked.strip().casefold()
    return name == asked or (language_of(name) or name) == (language_of(asked) or asked)


def find_languages(
    names: Sequence[str], source: str | None, target: str | None
) -> tuple[int, int] | None:
    """Find the columns named after the languages, those asked or else the first two."""
    coded = [i for i, name in enumerate(names) if language_of(name)]
    sides = []
    for asked in (source, target):
        fitting = [i for i, name in enumerate(names) if asked and same_language(name, asked)]
        sides.append(fitting[0] if fitting else None)
    for i in (0, 1):
        if sides[i] is None and (source, target)[i] is None:
            sides[i] = next((c for c in coded if c != sides[1 - i] and c not in sides), None)
    a, b = sides
    return (a, b) if a is not None and b is not None and a != b else None
