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
from regard.data.split import RowSplitter, Split, hash_text, shares_and_files
from regard.data.store import Column, tokenised
from regard.data.table import BadRow, Table, is_folder, is_table, like_header, stem_and_suffix
from regard.data.tokenizer import Tokenizer
from regard.errors import UsageError
from regard.files import refuse

TEXT_KEYS = ("text", "content", "document", "body", "story", "sentence", "src", "source")
_LAST = 0.1  # share of a running text that is kept for validation
CHUNK_CHARACTERS = 500_000  # characters of a running text that are split into tokens at once
_MOST_TEXT = 20 * 2**30  # bytes of one file


@dataclass
class Texts(Dataset[list[str]]):
    """The texts of each part, and whether they run on."""

    running: bool

    @cached_property
    def sha(self) -> str:
        """A hash of what is trained and validated on."""
        parts = [hash_texts(self.parts.get(part, ())) for part in ("train", "valid")]
        return hash_texts(["running" if self.running else "documents", *parts])

    def part_sha(self, part: str) -> str:
        """Hash of the texts of one part."""
        return hash_texts(self.parts[part])


def hash_texts(texts: Iterable[str]) -> str:
    """One hash of many texts."""
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
    shares, given = shares_and_files(valid, test)
    files = find_texts(Path(data)) | given_files(data, given)
    files = {name: some for name, some in files.items() if name not in shares}
    kept = trained.bounds if trained is not None else {}
    unnamed = need == ("test",) and list(files) == ["train"] and "test" not in kept
    running = all(len(some) == 1 and not is_table(some[0]) for some in files.values())
    texts = Texts({}, running)

    def read(name: str) -> list[str]:
        rows = [t for path in files[name] for t in read_texts(path, key, header, texts.notes)]
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


class EndSplitter(RowSplitter):
    """Keeps the end of a running text from training."""

    def split(
        self,
        rows: list[str],
        shares: Mapping[str, float | None],
        where: str,
        notes: list[str],
        trained: Split | None = None,
    ) -> tuple[dict[str, list[str]], Split]:
        """Cut the parts off the end: as when a model was trained on the text, or by shares."""
        (text,) = rows
        if trained is not None and _is_cut(text, trained):
            notes.append(f"{where}: cut as when the model was trained on it")
            return _cut_parts(text, trained), trained
        size = len(text)
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
        split = Split(bounds, "end", (hash_text(text[:valid]),))
        return _cut_parts(text, split), split

    def held_out(
        self, rows: list[str], part: str, trained: Split, where: str, notes: list[str]
    ) -> list[str]:
        """End of the text that a model was not trained on, if it was on the rest."""
        (text,) = rows
        if part == "train" or not _is_cut(text, trained):
            return rows
        parts = _cut_parts(text, trained)
        if part in parts:
            notes.append(
                f"{where}: the model was trained on this text; judged on the "
                f"{len(parts[part][0]):,} characters that were held out ({part})"
            )
            return parts[part]
        remedy = "; part=valid judges on those held out" if "valid" in parts else ""
        notes.append(
            f"warning: {where}: the model was trained on {len(parts['train'][0]):,} of these "
            f"{len(text):,} characters, so the scores are too good for new ones{remedy}"
        )
        return rows

    def sampled(self, split: Split, train: list[str]) -> Split:
        """Split as it is: it knows the beginning of the text."""
        return split


def _cut_parts(text: str, split: Split) -> dict[str, list[str]]:
    test = split.bounds.get("test", {}).get("", len(text))
    valid = split.bounds.get("valid", {}).get("", test)
    parts = {"train": [text[:valid]], "valid": [text[valid:test]], "test": [text[test:]]}
    return {name: some for name, some in parts.items() if name == "train" or name in split.bounds}


def _is_cut(text: str, trained: Split) -> bool:
    """True if a model was trained on the beginning of a text."""
    borders = [some.get("", len(text)) for some in trained.bounds.values()]
    start = text[: min(borders, default=len(text))]
    return trained.by == "end" and trained.sample == (hash_text(start),)


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


def read_texts(
    path: Path, key: str | None = None, header: bool | None = None, notes: list[str] | None = None
) -> Iterator[str]:
    """Yield the whole text of a plain file, or the text of each row of a table.

    `key` names the column of the text, or gives its number.
    """
    if not is_table(path):
        yield read_whole(path)
        return
    table, at = Table(path), None
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
            if key is None and isinstance(value.get("messages"), list):
                yield Conversation.of(value["messages"], f"{path}:{number}: messages")
                continue
            try:
                names = [key] if key else [name for name in TEXT_KEYS if name in value]
                text = text_at(value, key_path(names[0] if names else TEXT_KEYS[0], value))
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


def read_whole(path: Path) -> str:
    """Read a plain, gzip or xz file of UTF-8 text, with its line ends made \\n."""
    data = bytearray()
    with opened_text(path) as file:
        while part := file.read(2**24):  # asked for all at once, memory for the most is taken
            data += part
            if len(data) > _MOST_TEXT:
                raise UsageError(f"{path}: over {_MOST_TEXT >> 30} GB; cut it into several files")
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
        raise UsageError(f"{path}:{number}: a NUL byte, so this is not text; give a text file")
    return text.replace("\r\n", "\n")


# Tokens


def blocks(text: str, marks: str = "\n ") -> Iterator[str]:
    """Blocks of a long text, each cut behind the first of these marks that it holds, if any."""
    start = 0
    while start < len(text):
        end = min(len(text), start + CHUNK_CHARACTERS)
        if end < len(text):
            found = (text.rfind(mark, start, end) + 1 for mark in marks)
            end = next(filter(None, found), end)
        yield text[start:end]
        start = end


def encode_running(tokenizer: Tokenizer, text: str) -> Iterator[list[int]]:
    """Split a running text into ids, part by part; joined they decode to the text."""
    for block in blocks(text):
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
    texts: Sequence[str], tokenizer: Tokenizer, template: str, context: int
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


def count_bytes(texts: Iterable[str]) -> int:
    """Bytes of texts, and of the answers in conversations."""
    said = (
        [m.content for m in text.messages() if m.role == "assistant"]
        if isinstance(text, Conversation)
        else [text]
        for text in texts
    )
    return sum(len(one.encode()) for some in said for one in some)


def has_conversations(texts: Iterable[str]) -> bool:
    """True if some of the texts are conversations."""
    return any(isinstance(text, Conversation) for text in texts)


def tokenise_texts(
    texts: Texts,
    tokenizer: Tokenizer,
    parts: Sequence[str] = ("train", "valid"),
    *,
    template: str = "plain",
    context: int = 1024,
) -> TokenisedTexts:
    """Tokenise parts into stores, unless they are; documents get their begin and end.

    Conversations are written by a template, each answer within a context.
    """

    def rows(part: str) -> Iterator[list[list[int]]]:
        some = texts.parts[part]
        if texts.running:
            for text in some:
                for ids in encode_running(tokenizer, text):
                    yield [ids]
            return
        for start in range(0, len(some), 1000):
            for ids in tokenizer.encode_batch(some[start : start + 1000]):
                yield [[tokenizer.bos, *ids, tokenizer.eos]]

    def answers(part: str) -> Iterator[list[list[int]]]:
        for ids, learnt in encode_documents(texts.parts[part], tokenizer, template, context):
            yield [ids, learnt]

    sha, columns, learnt = texts.sha, {}, {}
    for part in parts:
        if has_conversations(texts.parts[part]):
            key = sha, tokenizer.sha, part, "conversations", template, context
            store = tokenised(partial(answers, part), *key)
            columns[part], learnt[part] = store[0], store[1].ids
            continue
        column = tokenised(partial(rows, part), sha, tokenizer.sha, part, "language")[0]
        ends = np.array([0, len(column.ids)])
        columns[part] = Column(column.ids, ends) if texts.running else column
    sizes = {part: count_bytes(texts.parts[part]) for part in parts}
    return TokenisedTexts(columns, sizes, texts.running, learnt)
