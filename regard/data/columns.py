"""Which columns of a table are read: by number or name, by language, or by what names usually mean.

A row of cells or of keys becomes two sides, such as a source and its target or a text and its
label.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from regard.data.languages import find_languages, language_of
from regard.data.table import BadRow, Table, like_header
from regard.errors import UsageError

# Which names of columns or keys belong together: text to text, then media to text.
_ROLES = (
    (
        {"source", "src", "text", "sentence", "input", "question", "review"},
        {"target", "tgt", "label", "class", "category", "translation", "output", "answer"},
    ),
    (
        {"image", "audio", "path", "file"},
        {"caption", "mask", "text", "transcript", "transcription", "sentence", "label"},
    ),
)


def input_column(
    names: Sequence[str], usual: Sequence[str], asked: str | None = None, known: Sequence[str] = ()
) -> str:
    """Column that is read: as asked for, as in training, the only one, or a usual one.

    `asked` is columns=, of which the first is read; `known` are those of a training.
    """
    if asked:
        first = asked.split(",")[0].strip()
        if first.isdecimal() and first not in names and 0 < int(first) <= len(names):
            return names[int(first) - 1]
        if first not in names:
            raise UsageError(f"columns={asked:.60}: no such column; found {first_names(names)}")
        return first
    for name in (*known[:1], *(names if len(names) == 1 else ()), *usual):
        if name in names:
            return name
    for name in names:
        if name.strip().casefold() in usual:
            return name
    raise UsageError(f"which of the columns {first_names(names)} is read? Name it with columns=")


def columns_read(
    path: Path, columns: str | None = None, header: bool | None = None, **languages: str | None
) -> tuple[str, ...]:
    """Names of the columns by which a table is read, if it has names."""
    chosen = TwoColumns(path, columns, header=header, **languages)
    table = Table(path, encoding="auto")
    try:
        for row in table:
            if row.value is not None:
                chosen.read(table, row.value)
                break
    except BadRow:  # lists, such as those of words
        pass
    return chosen.names


def names_in(path: Path) -> list[str]:
    """Cells of the first row of a table, or the keys of its first object."""
    first = next((row.value for row in Table(path, encoding="auto") if row.value is not None), [])
    return [str(name).strip() for name in first]


def find_roles(names: Sequence[str]) -> tuple[int, int] | None:
    """Find the columns with well-known names such as source and target, or text and label."""
    names = [name.strip().casefold() for name in names]
    for inputs, outputs in _ROLES:
        a = next((i for i, name in enumerate(names) if name in inputs), None)
        b = next((i for i, name in enumerate(names) if name in outputs), None)
        if a is not None and b is not None and a != b:
            return a, b
    return None


def parse_columns(columns: str | Sequence[str | int] | None) -> tuple[str, str] | None:
    """Read `columns=`: two names or two numbers from 1, such as "2,1" or "text,label"."""
    if columns is None:
        return None
    parts = columns.split(",") if isinstance(columns, str) else [str(part) for part in columns]
    parts = [part.strip() for part in parts]
    numbers = [part for part in parts if re.fullmatch(r"-?\d+", part)]
    bad = len(parts) != 2 or not all(parts)
    if bad or any(len(number) > 6 or int(number) < 1 for number in numbers):
        raise UsageError(
            f"columns={','.join(parts)[:60]} is not two columns; give two "
            "numbers from 1 or two names, such as columns=2,1 or columns=text,label"
        )
    return parts[0], parts[1]


def column_of(name: str, names: Sequence[str], where: str, numbers: bool = True) -> int:
    """Place of a column given by name, or by number."""
    if numbers and name.isdecimal():
        return int(name) - 1
    if name in names:
        return list(names).index(name)
    known = [cell.strip().casefold() for cell in names]
    if name.casefold() in known:
        return known.index(name.casefold())
    raise UsageError(
        f"{where}: no column '{name}' in the header row; found "
        f"{', '.join(cell[:30] for cell in names[:8])}; set columns= to names or numbers"
    )


def key_path(name: str, value: dict[str, Any]) -> tuple[str, ...]:
    """Path of keys that a name or number of columns= stands for."""
    if name in value:
        return (name,)
    if name.isdecimal() and 1 <= int(name) <= len(value):
        return (list(value)[int(name) - 1],)
    return tuple(name.split("."))


def text_at(value: Any, path: Sequence[str]) -> str:
    """Text that lies at a path of keys."""
    for key in path:
        if not isinstance(value, dict) or key not in value:
            keys = ", ".join(map(str, value)) if isinstance(value, dict) else "no object"
            what = f"no key '{'.'.join(path)}' (found: {keys})"
            raise BadRow("columns", what, "add it or set columns=")
        value = value[key]
    if isinstance(value, str):
        if "\0" in value or not (value.isascii() or _encodable(value)):
            what = f"key '{'.'.join(path)}' holds a NUL or half a surrogate"
            raise BadRow("json", what, "remove it")
        return value
    if value is None or value != value:  # no number at all
        return ""
    if isinstance(value, (dict, list, bytes)):
        what = f"key '{'.'.join(path)}' holds a {type(value).__name__}, expected text"
        raise BadRow("json", what, "make it a string or set columns=")
    return json.dumps(value) if isinstance(value, bool | int | float) else str(value)


def _encodable(text: str) -> bool:
    """True if a text can be written as UTF-8, which half a surrogate pair cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def first_names(names: Sequence[str]) -> str:
    """First names of a row, short enough for a message."""
    return ", ".join(name.strip()[:30] for name in names[:8])


class TwoColumns:
    """The two columns of a table that are read: as asked for, else as its first rows show.

    `source` and `target` name languages; where they are left open, the table may name them.
    """

    def __init__(
        self,
        path: str | Path,
        columns: str | Sequence[str | int] | None = None,
        source: str | None = None,
        target: str | None = None,
        header: bool | None = None,
    ):
        self.path, self.columns = path, parse_columns(columns)
        self.source, self.target, self.header = source, target, header
        self.notes: list[str] = []
        self.names: tuple[str, ...] = ()  # of the columns, where they have some
        self._cells: tuple[int, int] | None = None
        self._keys: tuple[tuple[str, ...], tuple[str, ...]] | None = None

    def read(self, table: Table, value: list[str] | dict[str, Any]) -> tuple[str, str] | None:
        """Two sides of a row, or None for the header row."""
        if isinstance(value, dict):
            if self._keys is None:
                self._keys = self._choose_keys(value)
                self.names = tuple(map(".".join, self._keys))
            return text_at(value, self._keys[0]), text_at(value, self._keys[1])
        if self._cells is None:
            self._cells, header = self._choose_cells(table, value)
            if header:
                return None
        a, b = self._cells
        if max(a, b) < len(value):
            return value[a], value[b]
        remedy = "put a TAB between source and target; two aligned files need from= and to="
        if len(value) > 1 or table.kind == "csv":
            remedy = "add the missing column or set columns="
        what = f"{len(value)} column{'s' if len(value) > 1 else ''}, expected at least"
        raise BadRow("columns", f"{what} {max(a, b) + 1}", remedy)

    def _choose_cells(self, table: Table, names: list[str]) -> tuple[tuple[int, int], bool]:
        """Choose the two columns by the first rows, and tell whether the first is a header."""
        asked = (self.source, self.target)
        chosen, header = None, False
        if self.columns:
            named = not all(column.isdecimal() for column in self.columns)
            if named and self.header is False:
                raise UsageError(
                    f"{self.path}: columns={','.join(self.columns)} are names, but with "
                    "header=false there are none; give numbers such as columns=2,1"
                )
            a, b = (column_of(name, names, f"{self.path}:1") for name in self.columns)
            chosen = (a, b)
            cells = [names[i] if i < len(names) else "" for i in chosen]
            roles = find_roles(cells) or find_roles(cells[::-1])
            header = named or bool(roles or find_languages(cells, None, None))
        elif self.header is not False:
            by_language = find_languages(names, None, None)
            chosen = find_languages(names, *asked) if any(asked) else None
            chosen = chosen or find_roles(names) or (by_language if not any(asked) else None)
            header = chosen is not None
            # Two languages in the first two columns are a header, but not the one asked for.
            if not header and by_language == (0, 1):
                raise UsageError(
                    f"{self.path}:1: no columns for from={asked[0]} to={asked[1]}; the header "
                    f"names {', '.join(names)}; change from= and to=, or set columns="
                )
        at, by_names = chosen or (0, 1), header
        header = self._has_header(table, names, at, header)
        if header and chosen is None and len(names) > 2:
            raise UsageError(
                f"{self.path}:1: which of its columns {first_names(names)}? Name two with "
                f"columns=, such as columns={names[0].strip()},{names[1].strip()}"
            )
        if header and max(at) < len(names):
            a, b = self.names = names[at[0]].strip(), names[at[1]].strip()
            more = "" if by_names or self.header else "; give header=false if it is none"
            self.notes.append(f"{self.path}: row 1 is a header; reading columns {a} and {b}{more}")
            if language_of(a) and language_of(b):
                self.source, self.target = self.source or a, self.target or b
        return at, header

    def _has_header(self, table: Table, names: list[str], at: tuple[int, int], known: bool) -> bool:
        """True if the first row is a header: as told, by known names, or by the others."""
        if self.header is not None or known:
            return known if self.header is None else self.header
        header = like_header(table.cells(), at)
        if header is None:
            raise UsageError(
                f"{self.path}:1: whether its first row ({first_names(names)}) is a header is not "
                "clear; say header=true or header=false"
            )
        return header

    def _choose_keys(self, value: dict[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Choose the two keys by the first object."""
        if self.columns:
            return key_path(self.columns[0], value), key_path(self.columns[1], value)
        asked = (self.source, self.target)
        nested = value.get("translation")
        inner = nested if isinstance(nested, dict) else value
        prefix = ("translation",) if inner is nested else ()
        names = list(inner)
        languages = find_languages(names, *asked)
        if languages is None and inner is nested and not any(asked) and len(names) == 2:
            languages = (0, 1)
        if at := languages or find_roles(names):
            a, b = names[at[0]], names[at[1]]
            if languages:
                self.source, self.target = self.source or a, self.target or b
            return (*prefix, a), (*prefix, b)
        pair = f" for from={asked[0]} to={asked[1]}" if any(asked) else ""
        raise BadRow(
            "columns",
            f"no pair of keys{pair} among {', '.join(names[:8]) or 'none'}",
            "name them source and target (or src and tgt, or translation) or set columns=",
        )
