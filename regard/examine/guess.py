"""What data are for: a task by how they look, said with the reason."""

from itertools import islice
from pathlib import Path
from typing import NamedTuple

from regard.data.documents import TEXT_KEYS, find_texts
from regard.data.labelled import TAG_KEYS, TREC, WORD_KEYS
from regard.data.languages import find_languages
from regard.data.lines import missing
from regard.data.pairs import PairReader, find_parts
from regard.data.parts import named_files
from regard.data.table import Table, is_folder, kind_of, stem_and_suffix
from regard.errors import UsageError
from regard.modalities import modality_of
from regard.modalities.base import LOOKED

_LABEL_NAMES = {"label", "labels", "class", "category"}


class Guess(NamedTuple):
    """A task and why it was taken."""

    task: str
    why: str


def guess_task(
    data: str, *, columns: str | None = None, languages: bool = False, header: bool | None = None
) -> Guess:
    """Tell by how data look what they are for."""
    path = Path(data)
    if not path.exists():
        raise UsageError(missing(path))
    inputs = modality_of(data, columns, header)
    if inputs is not None:
        target, why = inputs.guess(path, columns, header)
        return Guess(inputs.tasks[target], why)
    if languages:
        return Guess("translate", "from= and to= name two languages")
    if is_folder(path):
        part = _aligned(path)
        if part:
            return Guess("translate", part)
        files = named_files(path).get("train") or next(iter(find_texts(path).values()))
        if not files:
            raise UsageError(f"{data}: no train part in it; name a file of the folder")
        path = files[0]
    return _of_rows(path, columns, header)


def _aligned(folder: Path) -> str:
    """Return why a folder is one of aligned files, if it is."""
    try:
        parts = find_parts(folder)
    except UsageError as refused:
        return "two languages or more in aligned files" if "which languages" in str(refused) else ""
    train = parts.get("train")
    if train is None or train.target_path is None:
        return ""
    return f"{train.path.name} and {train.target_path.name} are aligned"


def _of_rows(path: Path, columns: str | None, header: bool | None) -> Guess:
    if stem_and_suffix(path)[1] == "conllu":
        return Guess("tag", "CoNLL-U")
    rows = list(islice(Table(path, encoding="auto"), LOOKED))
    first = next((row.value for row in rows if row.value is not None), None)
    values = [row.value for row in rows if isinstance(row.value, list)]
    if first is None:
        return Guess("language", "a text file")
    if isinstance(first, dict):
        lists = [key for key, value in first.items() if isinstance(value, list)]
        if set(lists) & set(WORD_KEYS) and set(lists) & set(TAG_KEYS):
            return Guess("tag", f"lists of words and tags ({', '.join(lists)})")
        texts = [key for key in first if key in TEXT_KEYS]
        if not columns and texts and len(first) == 1:
            return Guess("language", f"rows of one text ({texts[0]})")
        if not columns and _LABEL_NAMES & set(first):
            return Guess("classify", "texts with a column of labels")
        if not columns and ("translation" in first or find_languages(list(first), None, None)):
            return Guess("translate", "columns named after languages")
    else:
        if kind_of(path) is None and all(len(value) == 1 for value in values):
            if all(TREC.fullmatch(value[0].strip()) for value in values):
                return Guess("classify", "lines such as NUM:date and a text")
            blank = any(row.value is None and row.fault is None for row in rows)
            pairs = [value[0].split() for value in values]
            if blank and all(len(pair) in (2, 3, 4) for pair in pairs):
                return Guess("tag", "words and tags, with blank lines between sentences")
            return Guess("language", "running text")
        inner = any(row.value is None and row.fault is None for row in rows[:-1])
        single = all(" " not in cell.strip() for value in values for cell in value[:2])
        if inner and single and len(first) >= 2:
            return Guess("tag", "words and tags, with blank lines between sentences")
        if len(first) == 1:
            return Guess("language", "rows of one text")
        names = {cell.strip().casefold() for cell in first}
        if not columns and _LABEL_NAMES & names:
            return Guess("classify", "texts with a column of labels")
    return _of_pairs(path, columns, header)


def _of_pairs(path: Path, columns: str | None, header: bool | None) -> Guess:
    reader = PairReader(path, columns=columns, header=header, skip_bad=True)
    try:
        targets = [pair.target for pair in islice(reader, LOOKED)]
    except UsageError as refused:
        if "columns" in str(refused) or "header" in str(refused):
            raise
        targets = []
    different = len(set(targets))
    short = all(len(target) <= 40 for target in targets)
    if len(targets) >= 6 and short and 3 * different <= len(targets):
        return Guess("classify", f"a column with {different} different values that repeat")
    if not targets:
        return Guess("language", "no rows of two columns")
    return Guess("translate", "pairs of texts")
