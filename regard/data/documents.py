"""Texts to learn a language from: one running text, or documents that have nothing to do with it.

Running text is read as one long line of tokens. Documents stand between a begin and an end, are
packed side by side and never look at each other.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from regard.data.lines import find_fault, missing, opened_text
from regard.data.split import Split, hash_text, keys_of, shares_of, split_rows, unseen
from regard.data.store import Column, Store, build_store
from regard.data.table import BadRow, Table, is_folder, is_table, like_header, stem_and_suffix
from regard.data.text import (
    PARTS,
    KeyRow,
    PairReader,
    column_of,
    index_folder,
    key_path,
)
from regard.data.tokenizer import Tokenizer
from regard.errors import UsageError
from regard.files import refuse

TEXT_KEYS = ("text", "content", "document", "body", "story", "sentence", "src", "source")
LAST = 0.1  # share of a running text that is kept for validation
CHUNK = 500_000  # characters of a running text that are split into tokens at once
MOST_TEXT = 20 * 2**30  # bytes of one file


@dataclass
class Texts:
    """The texts of each part, whether they run on, and what the user should be told."""

    parts: dict[str, list[str]]
    running: bool
    notes: list[str] = field(default_factory=list)
    split: Split = field(default_factory=Split)

    @property
    def sha(self) -> str:
        """Return a hash of what is trained and validated on."""
        parts = [hash_texts(self.parts.get(part, ())) for part in ("train", "valid")]
        return hash_texts(["running" if self.running else "documents", *parts])


def hash_texts(texts: Iterable[str]) -> str:
    """Return one hash of many texts."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode() + b"\x00")
    return digest.hexdigest()


def load_texts(
    data: str | Path,
    *,
    valid: str | None = None,
    test: str | None = None,
    key: str | None = None,
    header: bool | None = None,
    need: tuple[str, ...] = ("train", "valid"),
    trained: Split | None = None,
) -> Texts:
    """Read the needed parts of a file or folder; without a validation part one is split off.

    `valid` and `test` are files, or shares of the data to keep, such as 0.05. `key` names the
    column of the text in a table. A model that was `trained` on the data is judged on what was
    held out.
    """
    shares = shares_of(valid, test)
    files = find_texts(Path(data))
    for name, path in (("valid", valid), ("test", test)):
        if name in shares:
            files.pop(name, None)
        elif path is not None:
            files[name] = [_beside(path, Path(data))]
    noted = trained.bounds if trained is not None else {}
    if need == ("test",) and list(files) == ["train"] and "test" not in (*noted, *shares):
        files = {"test": files["train"]}  # only one part is wanted, and only one given
    running = all(len(some) == 1 and not is_table(some[0]) for some in files.values())
    texts = Texts({}, running)
    lacking = [name for name in ("valid", "test") if name not in files]
    lacking = [name for name in lacking if name in shares or name in noted or name == "valid"]
    splitting = [name for name in lacking if name in (*need, *shares)] if "train" in files else []

    def read(name: str) -> list[str]:
        return [t for path in files[name] for t in read_texts(path, key, header, texts.notes)]

    for name in need:
        if name not in files and name not in splitting:
            raise UsageError(f"{data}: no {name} part; expected a file such as {name}.txt")
        if name in files:
            texts.parts[name] = read(name)
            if not any(text.strip() for text in texts.parts[name]):
                raise UsageError(f"{files[name][0]}: there is no text in it")
    where = str(files["train"][0]) if "train" in files else str(data)
    if splitting:
        if "train" not in texts.parts:
            texts.parts["train"] = read("train")
        given = {name: shares.get(name) for name in splitting}
        split = _cut_off if running else _split_off
        split(texts, given, trained, where)
        for name in need:
            if name not in texts.parts:
                raise UsageError(f"{data}: no {name} part; expected a file such as {name}.txt")
        known = (*need, *shares)
        texts.parts = {name: texts.parts[name] for name in texts.parts if name in known}
    elif trained is not None and len(need) == 1:
        judge = _judge_running if running else _judge_documents
        judge(texts, need[0], trained, where)
    if not running and "train" in texts.parts:
        texts.split = texts.split.noting(keys_of(_documents(texts.parts["train"], where)))
    return texts


class _Document(NamedTuple):
    source: str
    where: str


def _documents(texts: list[str], where: str) -> list[_Document]:
    return [_Document(text, f"{where}:{number}") for number, text in enumerate(texts, 1)]


def _split_off(
    texts: Texts, shares: dict[str, float | None], trained: Split | None, where: str
) -> None:
    """Keep some documents, chosen by hash, from training."""
    items = _documents(texts.parts["train"], where)
    if len(set(texts.parts["train"])) < 2:
        raise UsageError("a single document cannot be split; give a validation part with valid=")
    parts, texts.split = split_rows({"train": items}, shares, "documents", texts.notes, trained)
    texts.parts |= {name: [item.source for item in some] for name, some in parts.items()}


def _judge_documents(texts: Texts, part: str, trained: Split, where: str) -> None:
    """Keep only the documents that a model has not seen, if it was trained on them."""
    items = _documents(texts.parts[part], where)
    some = unseen(items, part, trained, where, "documents", texts.notes)
    texts.parts[part] = [item.source for item in some]


def _cut_off(
    texts: Texts, shares: dict[str, float | None], trained: Split | None, where: str
) -> None:
    """Keep the end of a running text from training."""
    (text,) = texts.parts["train"]
    size = len(text)
    if trained is not None and _is_cut(text, trained):
        texts.split = trained
        texts.notes.append(f"{where}: cut as when the model was trained on it")
    else:
        test = int(size * (1 - (shares.get("test") or 0)))
        valid = int(test - size * (shares["valid"] or LAST)) if "valid" in shares else test
        borders = {"valid": {"": valid}} if "valid" in shares else {}
        borders |= {"test": {"": test}} if "test" in shares else {}
        texts.split = Split(borders, "end", (hash_text(text[:valid]),))
        told = [f"{test - valid:,} characters to validate on"] if "valid" in shares else []
        told += [f"{size - test:,} to test on"] if "test" in shares else []
        texts.notes.append(
            f"of {size:,} characters, the last {' and '.join(told)} were kept from training; give "
            f"your own with {' and '.join(f'{name}=' for name in borders)}"
        )
    texts.parts |= _cut_parts(text, texts.split)


def _cut_parts(text: str, split: Split) -> dict[str, list[str]]:
    test = split.bounds.get("test", {}).get("", len(text))
    valid = split.bounds.get("valid", {}).get("", test)
    parts = {"train": [text[:valid]], "valid": [text[valid:test]], "test": [text[test:]]}
    return {name: some for name, some in parts.items() if name == "train" or name in split.bounds}


def _is_cut(text: str, trained: Split) -> bool:
    """Tell whether a model was trained on the beginning of a text."""
    borders = [some.get("", len(text)) for some in trained.bounds.values()]
    start = text[: min(borders, default=len(text))]
    return trained.by == "end" and trained.sample == (hash_text(start),)


def _judge_running(texts: Texts, part: str, trained: Split, where: str) -> None:
    """Keep only the end of a running text that a model has not seen, if it was trained on it."""
    (text,) = texts.parts[part]
    if not _is_cut(text, trained) or part == "train":
        return
    parts = _cut_parts(text, trained)
    if part in parts:
        texts.parts[part] = parts[part]
        texts.notes.append(
            f"{where}: the model was trained on this text; judged on the {len(parts[part][0]):,} "
            f"characters that were held out ({part})"
        )
        return
    remedy = "; part=valid judges on those held out" if "valid" in parts else ""
    texts.notes.append(
        f"warning: {where}: the model was trained on {len(parts['train'][0]):,} of these "
        f"{len(text):,} characters, so the scores are too good for new ones{remedy}"
    )


# Files


def find_texts(data: Path) -> dict[str, list[Path]]:
    """Find the files of each part: those named after it, or else all text files to train on."""
    if not is_folder(data):
        if not os.path.exists(data):
            raise UsageError(missing(data))
        return {"train": [data]}
    files = [path for some in index_folder(data).values() for path in some.values()]
    parts: dict[str, list[Path]] = {}
    for name, words in PARTS.items():
        pattern = re.compile(rf"(?:^|[._-])(?:{'|'.join(words)})(?:$|[._-])", re.IGNORECASE)
        found = [path for path in files if pattern.search(path.name)]
        if len(found) > 1:
            told = ", ".join(path.name for path in found)
            raise UsageError(f"{data}: several files for {name} ({told}); name one with data=")
        if found:
            parts[name] = found
    if "train" in parts:
        return parts
    try:
        every = sorted(p for p in data.rglob("*") if stem_and_suffix(p)[1] == "txt" and p.is_file())
    except OSError as error:
        raise refuse(error, data) from error
    if not every and len(files) == 1:
        every = files
    if not every:
        found = ", ".join(sorted(os.listdir(data))[:8]) or "nothing"
        raise UsageError(
            f"{data}: no train.txt, train.jsonl, train.csv nor other .txt files; found {found}"
        )
    return {**parts, "train": [path for path in every if [path] not in parts.values()]}


def _beside(given: str, data: Path) -> Path:
    """Find a file that a user named, from here or from beside the data."""
    home = data if is_folder(data) else data.parent
    for path in (Path(given), home / given):
        if os.path.exists(path) and not is_folder(path):
            return path
    raise UsageError(missing(Path(given)))


def read_texts(
    path: Path, key: str | None = None, header: bool | None = None, notes: list[str] | None = None
) -> Iterator[str]:
    """Yield the whole text of a plain file, or the text of each row of a table.

    `key` names the column of the text, or gives its number.
    """
    if not is_table(path):
        yield read_whole(path)
        return
    table, row = Table(path), KeyRow(PairReader(path))
    at = None
    for number, value, fault in table:
        if fault:
            raise UsageError(fault.message)
        if value is None:
            continue
        if isinstance(value, list):
            if at is None:
                at, headed = _text_column(table, value, key, header)
                if headed:
                    continue
            text = value[at] if at < len(value) else ""
        else:
            try:
                names = [key] if key else [name for name in TEXT_KEYS if name in value]
                text = row.side(value, key_path(names[0] if names else TEXT_KEYS[0], value))
            except BadRow as bad:
                raise UsageError(f"{path}:{number}: {bad.what}; {bad.remedy}") from None
        if text.strip():
            yield text
    if notes is not None:
        notes += [note for note in table.notes if note not in notes]


def _text_column(
    table: Table, names: list[str], key: str | None, header: bool | None
) -> tuple[int, bool]:
    """Choose the column of the text by the first rows, and tell whether the first is a header."""
    known = [name.strip().casefold() for name in names]
    if key:
        at = column_of(key, names, table.where(1))
        named = not key.isdecimal() or (at < len(known) and known[at] in TEXT_KEYS)
    else:
        found = [known.index(name) for name in TEXT_KEYS if name in known]
        named = bool(found) and header is not False
        if not named and len(names) > 1:
            told = ", ".join(name.strip()[:30] for name in names[:8])
            raise UsageError(
                f"{table.where(1)}: which column is the text? Found {told}; set columns="
            )
        at = found[0] if named else 0
    if header is not None:
        return at, header
    return at, named or bool(like_header(table.cells(), [at]))


def read_whole(path: Path) -> str:
    """Read a plain, gzip or xz file of UTF-8 text, with its line ends made \\n."""
    data = bytearray()
    with opened_text(path) as file:
        while part := file.read(2**24):  # asked for all at once, memory for the most is taken
            data += part
            if len(data) > MOST_TEXT:
                raise UsageError(f"{path}: over {MOST_TEXT >> 30} GB; cut it into several files")
    data = data.removeprefix(b"\xef\xbb\xbf")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        start = data.rfind(b"\n", 0, error.start) + 1
        line = data[start : data.find(b"\n", error.start) % (len(data) + 1)]
        fault = find_fault(bytes(line), "", f"{path}:{number}")
        raise UsageError(fault.message if fault else f"{path}:{number}: not UTF-8") from None
    if "\0" in text:
        number = text.count("\n", 0, text.index("\0")) + 1
        raise UsageError(f"{path}:{number}: a NUL byte, so this is no text; give a text file")
    return text.replace("\r\n", "\n")


# Tokens


def encode_running(tokenizer: Tokenizer, text: str) -> Iterator[list[int]]:
    """Split a running text into ids, part by part; joined they decode to the text."""
    start = 0
    while start < len(text):
        end = min(len(text), start + CHUNK)
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or text.rfind(" ", start, end) + 1 or end
        yield tokenizer.encode_parts([text[start:end]])[0]
        start = end


def store_texts(folder: Path, texts: list[str], running: bool, tokenizer: Tokenizer) -> Store:
    """Tokenise texts into a store, or find them there; documents get their begin and end."""
    try:
        return Store.open(folder)
    except UsageError:
        pass

    def rows() -> Iterator[list[list[int]]]:
        if running:
            for text in texts:
                for ids in encode_running(tokenizer, text):
                    yield [ids]
            return
        for start in range(0, len(texts), 1000):
            for ids in tokenizer.encode_batch(texts[start : start + 1000]):
                yield [[tokenizer.bos, *ids, tokenizer.eos]]

    return build_store(folder, rows())


class Window(NamedTuple):
    """Rows of tokens (b, l), and which document each is of; without documents a row is all one."""

    ids: np.ndarray
    documents: np.ndarray | None = None


class Crops:
    """Batch n of a running text: crops from random places, a pure function of (seed, n)."""

    def __init__(self, ids: np.ndarray, rows: int, length: int, seed: int):
        if len(ids) < 2:
            raise UsageError(f"a text of {len(ids)} tokens is too short to learn from; give more")
        self.ids, self.rows, self.seed = ids, rows, seed % 2**64
        self.span = np.arange(min(length, len(ids)))

    def __getitem__(self, n: int) -> Window:
        """Return batch n."""
        chance = np.random.Generator(np.random.PCG64([self.seed, n]))
        starts = chance.integers(0, len(self.ids) - len(self.span) + 1, (self.rows, 1))
        return Window(self.ids[starts + self.span])


class Packed:
    """Batch n of documents laid end to end, a pure function of (seed, n).

    Each epoch shuffles the documents, lays windows over their row of tokens, one every `stride`,
    and shuffles these. A document that goes on in the next window is read there as a new text.
    """

    def __init__(self, column: Column, rows: int, length: int, stride: int, seed: int):
        self.ids, self.starts = column.ids, column.offsets[:-1]
        self.lengths = np.diff(column.offsets)
        self.seed, self.stride = seed % 2**64, stride
        self.span = np.arange(min(length, len(self.ids)))
        self.windows = (len(self.ids) - len(self.span)) // stride + 1
        self.rows = min(rows, self.windows)
        self.count = self.windows // self.rows  # batches an epoch
        self._plans: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def _plan(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the order of the documents, where each begins in it, and that of the windows."""
        if epoch not in self._plans:
            chance = np.random.Generator(np.random.PCG64([self.seed, epoch]))
            order = chance.permutation(len(self.lengths))
            begins = np.concatenate([[0], np.cumsum(self.lengths[order])[:-1]])
            self._plans = dict(list(self._plans.items())[-1:])
            self._plans[epoch] = order, begins, chance.permutation(self.windows)
        return self._plans[epoch]

    def __getitem__(self, n: int) -> Window:
        """Return batch n."""
        epoch, place = divmod(n, self.count)
        order, begins, windows = self._plan(epoch)
        first = windows[place * self.rows : (place + 1) * self.rows, None] * self.stride
        places = first + self.span
        documents = np.searchsorted(begins, places, side="right") - 1
        ids = self.ids[self.starts[order[documents]] + places - begins[documents]]
        return Window(ids, documents - documents[:, :1])


def stretches(offsets: np.ndarray, length: int) -> np.ndarray:
    """Cut rows of tokens into stretches (n, 2): from where to where to read.

    Each begins with the last token of the one before, so that every token but the first of a row
    is guessed once, after at most so many others.
    """
    found = []
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        for start in range(begin, max(begin + 1, end - 1), length):
            found.append((start, min(end, start + length + 1)))
    return np.array([(a, b) for a, b in found if b - a > 1], dtype=np.int64).reshape(-1, 2)
