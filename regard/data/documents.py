"""Texts to learn a language from: one running text, or documents that have nothing to do with it.

Running text is read as one long line of tokens. Documents stand between a begin and an end, are
packed side by side and never look at each other.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from regard.data.columns import column_of, first_names, key_path, text_at
from regard.data.conversation import Conversation, encode_answers
from regard.data.lines import find_fault, missing, opened_text
from regard.data.parts import (
    Dataset,
    PartReader,
    given_files,
    index_folder,
    listing,
    load_parts,
    named_files,
    single_file,
)
from regard.data.split import RowSplitter, Split, key_of, shares_and_files
from regard.data.store import Column, StoreRow, tokenised_parts
from regard.data.table import BadRow, Table, is_folder, is_table, like_header, stem_and_suffix
from regard.data.text_rows import ReadRow, TextRows, in_batches, portions, read_rows, spread
from regard.data.tokenizer import Tokenizer
from regard.errors import UsageError
from regard.files import refuse

TEXT_KEYS = ("text", "content", "document", "body", "story", "sentence", "src", "source")
_LAST = 0.1  # share of a running text that is kept for validation
CHUNK_CHARACTERS = 500_000  # characters of a running text that are split into tokens at once
_MOST_TEXT = 20 * 2**30  # bytes of a document
MOST_RUNNING = 2**40  # bytes of a running text
_READ = 1 << 24  # bytes of it that are read at once
_MOST_LEARNT = 1 << 26  # bytes of texts that a tokenizer is learnt from; of more, a sample


@dataclass
class Texts(Dataset[Sequence[str]]):
    """The texts of each part, and whether they run on: then they are the blocks of a single one."""

    running: bool

    @cached_property
    def sha(self) -> str:
        """A hash of what is trained and validated on."""
        parts = [self._sha(self.parts.get(part, ())) for part in ("train", "valid")]
        return hash_texts(["running" if self.running else "documents", *parts])

    def part_sha(self, part: str) -> str:
        """Hash of the texts of one part."""
        return self._sha(self.parts[part])

    def _sha(self, texts: Sequence[str]) -> str:
        if not self.running:
            return hash_texts(texts)
        digest = hashlib.sha256()
        for block in as_bytes(texts):
            digest.update(block)
        digest.update(b"\x00" * bool(texts))
        return digest.hexdigest()

    def talks(self, part: str) -> bool:
        """True if some of the texts of a part are conversations."""
        texts = self.parts[part]
        if isinstance(texts, TextRows):
            return not self.running and bool(texts.numbers.any())
        return any(isinstance(text, Conversation) for text in texts)

    def sample(self, part: str) -> list[str]:
        """Texts that a tokenizer is learnt from: all of the part, or of a large one a sample."""
        texts = self.parts[part]
        some = list(spread(texts, _MOST_LEARNT))
        return ["".join(some)] if self.running and len(some) == len(texts) else some


def as_bytes(texts: Iterable[str]) -> Iterator[bytes]:
    """Texts in UTF-8."""
    if isinstance(texts, TextRows):
        return (text for (text,) in texts.raw())
    return (text.encode() for text in texts)


def hash_texts(texts: Iterable[str]) -> str:
    """One hash of many texts."""
    digest = hashlib.sha256()
    for text in as_bytes(texts):
        digest.update(text + b"\x00")
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
    shares, given = shares_and_files(valid, test)
    files = find_texts(Path(data)) | given_files(data, given)
    files = {name: some for name, some in files.items() if name not in shares}
    kept = trained.bounds if trained is not None else {}
    unnamed = need == ("test",) and list(files) == ["train"] and "test" not in kept
    running = all(len(some) == 1 and not is_table(some[0]) for some in files.values())
    texts = Texts({}, running)

    def read(name: str) -> TextRows[str]:
        reader = (RunningReader if running else DocumentReader)(files[name], key, header)
        rows, state = read_rows(reader, _running if running else _document, key, header)
        texts.notes.extend(note for note in state["notes"] if note not in texts.notes)
        if not any(text.strip() for text in rows):
            raise UsageError(f"{files[name][0]}: there is no text in it")
        return rows

    return load_parts(
        texts,
        {name: PartReader(some[0], partial(read, name)) for name, some in files.items()},
        need=need,
        shares=shares,
        absent=lambda name: f"{data}: no {name} part; expected a file such as {name}.txt",
        where=data,
        splitter=(EndSplitter if running else RowSplitter)("documents"),
        unnamed=unnamed,
        trained=trained,
    )


def _document(texts: list[str], number: int) -> str:
    return Conversation(texts[0]) if number else texts[0]


def _running(texts: list[str], number: int) -> str:
    return texts[0]


class EndSplitter(RowSplitter):
    """Keeps the end of a running text from training; its rows are blocks of the text."""

    def split(
        self,
        rows: TextRows[str],
        shares: Mapping[str, float | None],
        where: str,
        notes: list[str],
        trained: Split | None = None,
    ) -> tuple[dict[str, Any], Split]:
        """Cut the parts off the end: as when a model was trained on the text, or by shares."""
        if trained is not None and _is_cut(rows, trained):
            notes.append(f"{where}: cut as when the model was trained on it")
            return _cut_parts(rows, trained), trained
        size = _characters(rows)
        test = int(size * (1 - (shares.get("test") or 0)))
        valid = int(test - size * (shares["valid"] or _LAST)) if "valid" in shares else test
        bounds = {
            name: {"": at} for name, at in (("valid", valid), ("test", test)) if name in shares
        }
        sizes = [f"{test - valid:,} characters to validate on"] if "valid" in shares else []
        sizes += [f"{size - test:,} to test on"] if "test" in shares else []
        notes.append(
            f"of {size:,} characters, the last {' and '.join(sizes)} were kept from training; give "
            f"your own with {' and '.join(f'{name}=' for name in bounds)}"
        )
        split = Split(bounds, "end", (_hash_start(rows, valid),))
        return _cut_parts(rows, split), split

    def held_out(
        self, rows: TextRows[str], part: str, trained: Split, where: str, notes: list[str]
    ) -> Any:
        """End of the text that a model was not trained on, if it was on the rest."""
        if part == "train" or not _is_cut(rows, trained):
            return rows
        parts = _cut_parts(rows, trained)
        if part in parts:
            notes.append(
                f"{where}: the model was trained on this text; judged on the "
                f"{_characters(parts[part]):,} characters that were held out ({part})"
            )
            return parts[part]
        remedy = "; part=valid judges on those held out" if "valid" in parts else ""
        notes.append(
            f"warning: {where}: the model was trained on {_characters(parts['train']):,} of these "
            f"{_characters(rows):,} characters, so the scores are too good for new ones{remedy}"
        )
        return rows

    def sampled(self, split: Split, train: Any) -> Split:
        """Split as it is: it knows the beginning of the text."""
        return split


def _characters(rows: TextRows[str]) -> int:
    return int(rows.numbers.sum())


def _cut_parts(rows: TextRows[str], split: Split) -> dict[str, TextRows[str]]:
    size = _characters(rows)
    test = split.bounds.get("test", {}).get("", size)
    valid = split.bounds.get("valid", {}).get("", test)
    ends = {"train": (0, valid), "valid": (valid, test), "test": (test, size)}
    return {n: _cut(rows, *at) for n, at in ends.items() if n == "train" or n in split.bounds}


def _cut(rows: TextRows[str], begin: int, end: int) -> TextRows[str]:
    """Blocks of the text between two characters; they lie where those of the whole text do."""
    (column,), starts = rows.texts, np.concatenate([[0], np.cumsum(rows.numbers.astype(np.int64))])
    # where the text begins as the whole does, so do its blocks, but for the last ones
    kept = int((starts[:-1] + CHUNK_CHARACTERS < end).sum()) if begin == 0 else 0
    first = max(kept, int(np.searchsorted(starts, begin, side="right")) - 1)
    last = int(np.searchsorted(starts, end))
    pieces = (
        rows[n][max(0, begin - int(starts[n])) : max(0, end - int(starts[n]))]
        for n in range(first, last)
    )
    sizes = [(len(block.encode()), len(block)) for block in blocks(pieces)]
    before = rows[first][: begin - int(starts[first])] if 0 < begin < starts[-1] else ""
    offset = int(column.offsets[min(first, len(rows))]) + len(before.encode())
    more = np.array(sizes, np.int64).reshape(-1, 2)
    offsets = np.concatenate([column.offsets[:kept], offset + np.cumsum([0, *more[:, 0]])])
    facts = np.zeros((kept + len(more), rows.facts.shape[1]), np.uint64)
    facts[:, 0] = [*rows.numbers[:kept].tolist(), *more[:, 1].tolist()]
    return TextRows([Column(column.ids, offsets)], facts, rows.make)


def _hash_start(rows: TextRows[str], end: int) -> int:
    """Hash of the first so many characters, as `hash_text` has it."""
    digest = hashlib.blake2b(digest_size=8)
    for block in as_bytes(_cut(rows, 0, end)):
        digest.update(block)
    return int.from_bytes(digest.digest(), "big")


def _is_cut(rows: TextRows[str], trained: Split) -> bool:
    """True if a model was trained on the beginning of a text."""
    size = _characters(rows)
    borders = [some.get("", size) for some in trained.bounds.values()]
    if trained.by != "end":
        return False
    return trained.sample == (_hash_start(rows, min(*borders, size) if borders else size),)


# Files


def find_texts(data: Path) -> dict[str, list[Path]]:
    """Find the files of each part: those named after it, or else all text files to train on."""
    if not is_folder(data):
        if not os.path.exists(data):
            raise UsageError(missing(data))
        return {"train": [data]}
    parts = {
        name: [single_file(some, name, data, "data")] for name, some in named_files(data).items()
    }
    if "train" in parts:
        return parts
    try:
        every = sorted(p for p in data.rglob("*") if stem_and_suffix(p)[1] == "txt" and p.is_file())
    except OSError as error:
        raise refuse(error, data) from error
    files = [path for some in index_folder(data).values() for path in some.values()]
    if not every and len(files) == 1:
        every = files
    if not every:
        raise UsageError(
            f"{data}: no train.txt, train.jsonl, train.csv nor other .txt files; found "
            f"{listing(data)}"
        )
    return {**parts, "train": [path for path in every if [path] not in parts.values()]}


class DocumentReader:
    """Documents: the whole text of each plain file, and the text of each row of a table."""

    def __init__(self, paths: Sequence[Path], key: str | None = None, header: bool | None = None):
        self.paths, self.key, self.header = paths, key, header
        self.notes: list[str] = []
        self.at = [0, 0]  # which file, and how many of its rows were read

    @property
    def files(self) -> list[Path]:
        """All files that are read."""
        return [
            file
            for path in self.paths
            for file in (Table(path).files if is_table(path) else [path])
        ]

    def state(self) -> dict[str, Any]:
        """Where it is, and notes for the user."""
        return {"at": self.at, "notes": self.notes}

    def rows(self, after: dict[str, Any] | None = None) -> Iterator[ReadRow]:
        """Yield each text, 1 if it is a conversation, and its hash."""
        for text in self.texts(after):
            yield (text,), int(isinstance(text, Conversation)), key_of(text)

    def texts(self, after: dict[str, Any] | None = None) -> Iterator[str]:
        """Yield each text, from the first or after a state."""
        begun, rows = after["at"] if after else (0, 0)
        self.notes = list(after["notes"]) if after else []
        for number, path in enumerate(self.paths[begun:], begun):
            done = rows if number == begun else 0
            self.at = [number, done]
            if is_table(path):
                yield from self._table(path, done)
            elif not done:
                self.at[1] = 1
                yield "".join(read_whole(path))

    def _table(self, path: Path, done: int) -> Iterator[str]:
        table, at = Table(path, skip=done), None
        for number, value, fault in table:
            self.at[1], skipped = table.count, table.count <= done
            if fault and not skipped:
                raise UsageError(fault.message)
            if value is None:
                continue
            if isinstance(value, list):
                if at is None:
                    at, headed = _text_column(table, value, self.key, self.header)
                    if headed:
                        continue
                text = value[at] if at < len(value) else ""
            elif skipped:
                continue
            else:
                text = self._text(path, number, value)
            if text.strip() and not skipped:
                yield text
        self.notes += [note for note in table.notes if note not in self.notes]

    def _text(self, path: Path, number: int, value: dict[str, Any]) -> str:
        """Text of an object, or the conversation that it is."""
        if self.key is None and isinstance(value.get("messages"), list):
            return Conversation.of(value["messages"], f"{path}:{number}: messages")
        try:
            names = [self.key] if self.key else [name for name in TEXT_KEYS if name in value]
            return text_at(value, key_path(names[0] if names else TEXT_KEYS[0], value))
        except BadRow as bad:
            raise UsageError(f"{path}:{number}: {bad.what}; {bad.remedy}") from None


class RunningReader:
    """One running text, in blocks."""

    def __init__(self, paths: Sequence[Path], key: str | None = None, header: bool | None = None):
        self.files, self.at = paths, 0  # characters that were read

    def state(self) -> dict[str, Any]:
        """Where it is."""
        return {"at": self.at, "notes": []}

    def rows(self, after: dict[str, Any] | None = None) -> Iterator[ReadRow]:
        """Yield each block, and how many characters it has."""
        self.at = 0
        for block in blocks(read_whole(self.files[0], MOST_RUNNING)):
            self.at += len(block)
            if after is None or self.at > after["at"]:
                yield (block,), len(block), 0


def _text_column(
    table: Table, names: list[str], key: str | None, header: bool | None
) -> tuple[int, bool]:
    """Choose the column of the text by the first rows, and tell whether the first is a header."""
    known = [name.strip().casefold() for name in names]
    if key:
        at = column_of(key, names, table.where(1))
        named = not key.isdecimal() or (at < len(known) and known[at] in TEXT_KEYS)
    else:
        places = [known.index(name) for name in TEXT_KEYS if name in known]
        named = bool(places) and header is not False
        if not named and len(names) > 1:
            raise UsageError(
                f"{table.where(1)}: which column is the text? Found {first_names(names)}; set "
                "columns="
            )
        at = places[0] if named else 0
    if header is not None:
        return at, header
    return at, named or bool(like_header(table.cells(), [at]))


def read_whole(path: Path, most: int = _MOST_TEXT) -> Iterator[str]:
    """Yield a plain, gzip or xz file of UTF-8 text in pieces, with its line ends made \\n."""
    kept, number, size = b"", 0, 0  # bytes and lines before
    with opened_text(path) as file:
        while True:
            part = file.read(_READ)
            data = kept + part if size else part.removeprefix(b"\xef\xbb\xbf")
            size += len(part)
            if size > most:
                raise UsageError(f"{path}: over {most >> 30} GB; cut it into several files")
            end = data.rfind(b"\n") + 1
            if part and not end and len(data) > _READ:  # a line without end
                end = next(
                    at
                    for at in range(len(data) - 1, 0, -1)
                    if at == 1 or (data[at] & 0xC0 != 0x80 and data[at - 1] != 13)
                )
            data, kept = (data[:end], data[end:]) if part else (data, b"")
            yield _decoded(data, path, number).replace("\r\n", "\n")
            number += data.count(b"\n")
            if not part:
                return


def _decoded(data: bytes, path: Path, before: int) -> str:
    """Decode part of a text after so many lines, or say where it is none."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        number = before + data.count(b"\n", 0, error.start) + 1
        start = data.rfind(b"\n", 0, error.start) + 1
        line = data[start : data.find(b"\n", error.start) % (len(data) + 1)]
        fault = find_fault(bytes(line), "", f"{path}:{number}")
        raise UsageError(fault.message if fault else f"{path}:{number}: not UTF-8") from None
    if "\0" in text:
        number = before + text.count("\n", 0, text.index("\0")) + 1
        raise UsageError(f"{path}:{number}: a NUL byte, so this is not text; give a text file")
    return text


# Tokens


def blocks(pieces: Iterable[str], marks: str = "\n ") -> Iterator[str]:
    """Blocks of a long text that comes in pieces.

    Each is cut behind the first of these marks that it holds, if any.
    """
    waiting: list[str] = []
    size = 0
    for piece in pieces:
        waiting.append(piece)
        size += len(piece)
        if size <= CHUNK_CHARACTERS:
            continue
        text, start = "".join(waiting), 0
        while len(text) - start > CHUNK_CHARACTERS:
            end = start + CHUNK_CHARACTERS
            found = (text.rfind(mark, start, end) + 1 for mark in marks)
            end = next(filter(None, found), end)
            yield text[start:end]
            start = end
        waiting = [text[start:]]
        size = len(waiting[0])
    if size:
        yield "".join(waiting)


def encode_running(tokenizer: Tokenizer, text: str) -> Iterator[list[int]]:
    """Split a running text into ids, part by part; joined they decode to the text."""
    for block in blocks([text]):
        yield tokenizer.encode_parts([block])[0]


@dataclass(frozen=True)
class TokenisedTexts:
    """The tokens of each part of some texts, memory-mapped; a running text is one row.

    Of conversations a row is one answer after what came before it; `learnt` tells of every token
    of a part whether it is to be predicted.
    """

    columns: dict[str, Column]
    bytes: dict[str, int]  # of the texts of each part, or of the answers in conversations
    running: bool
    learnt: dict[str, np.ndarray] = field(default_factory=dict)


def encode_documents(
    texts: Iterable[str], tokenizer: Tokenizer, template: str, context: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the ids of each document, and 1 for each that is to be predicted.

    Of conversations that is what the assistant says, and each answer is a document.
    """
    for text in texts:
        if isinstance(text, Conversation):
            for read, written in encode_answers(text, template, tokenizer, context):
                yield [*read, *written], [0] * len(read) + [1] * len(written)
        else:
            ids = [tokenizer.bos, *tokenizer.encode(text), tokenizer.eos]
            yield ids, [1] * len(ids)


def count_bytes(texts: Texts, part: str) -> int:
    """Bytes of the texts of a part, and of the answers in conversations."""
    some = texts.parts[part]
    if isinstance(some, TextRows) and not texts.talks(part):
        return int(some.sizes.sum())
    said = (
        [m.content for m in text.messages() if m.role == "assistant"]
        if isinstance(text, Conversation)
        else [text]
        for text in some
    )
    return sum(len(one.encode()) for each in said for one in each)


def tokenise_texts(
    texts: Texts,
    tokenizer: Tokenizer,
    parts: Sequence[str] = ("train", "valid"),
    *,
    template: str = "plain",
    context: int = 1024,
    joined: bool = False,
) -> TokenisedTexts:
    """Tokenise parts into stores, unless they are; documents get their begin and end.

    Conversations are written by a template, each answer within a context; other documents may be
    `joined` to one running text.
    """
    running = texts.running or joined

    def rows(part: str, some: range) -> Iterator[StoreRow]:
        if running:
            for text in texts.parts[part][some.start : some.stop]:
                for ids in encode_running(tokenizer, text):
                    yield [ids]
            return
        for batch in in_batches(texts.parts[part], some):
            for ids in tokenizer.encode_batch(batch):
                yield [[tokenizer.bos, *ids, tokenizer.eos]]

    def answers(part: str, some: range) -> Iterator[StoreRow]:
        conversations = texts.parts[part][some.start : some.stop]
        return map(list, encode_documents(conversations, tokenizer, template, context))

    sha, columns, learnt = texts.sha, {}, {}
    for part in parts:
        cut = portions(texts.parts[part])
        if texts.talks(part):
            key = sha, tokenizer.sha, part, "conversations", template, context
            store = tokenised_parts([partial(answers, part, some) for some in cut], *key)
            columns[part], learnt[part] = store[0], store[1].ids
            continue
        key = sha, tokenizer.sha, part, "joined" if joined else "language"
        column = tokenised_parts([partial(rows, part, some) for some in cut], *key)[0]
        ends = np.array([0, len(column.ids)])
        columns[part] = Column(column.ids, ends) if running else column
    sizes = {part: count_bytes(texts, part) for part in parts}
    return TokenisedTexts(columns, sizes, running, learnt)
