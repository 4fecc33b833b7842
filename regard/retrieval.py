"""Search by meaning: an index of vectors of texts or images, and the entries nearest to a query."""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from regard import files
from regard.answering import in_chunks, read_lines, table_rows
from regard.api import Place, find_model, is_starter, load, not_none
from regard.data.in_memory import UserData
from regard.data.lines import opened
from regard.errors import UsageError, log
from regard.files import making, read_json, write_atomically
from regard.metrics.results import Named
from regard.modalities.base import TABLES
from regard.own import using
from regard.settings import fill, setting
from regard.verbs import Call

_CHUNK = 512  # entries that are embedded at once
_ROWS = 2**16  # vectors that are compared at once
_MOST_EXACT = 10_000_000  # vectors that are compared one by one unless told
_TEXT_FILES = {".txt", ".md", ".rst", ".jsonl", *TABLES}
_KEPT = (".safetensors", ".json", ".gguf", ".spm")  # files that vectors depend on
_NOT_KEPT = ("recipe.json", "report.json")
_METHODS = ("auto", "exact", "hnsw")
_MOST_ENTRY = 2**24  # bytes of one entry


@dataclass(frozen=True)
class IndexSettings:
    """Settings of `index`."""

    out: Path | None = setting(None, "folder of the index")
    columns: str | None = setting(None, "column of a table that is embedded")
    pooling: str | None = setting(
        None,
        "pooling of the tokens' vectors; the model's unless given",
        choices="regard.tasks.text.embed:POOLINGS",
    )
    max_length: int | None = setting(None, "maximum tokens per text", min=1, max=100_000)
    method: str = setting(
        "auto", "exact, or hnsw (approximate); auto: exact up to 10 million", choices=_METHODS
    )


@dataclass(frozen=True)
class SearchSettings:
    """Settings of `search`."""

    n: int = setting(5, "number of results", min=1, max=100_000)
    model: str | None = setting(None, "path of the index's model, if it has moved")
    exact: bool = setting(False, "compare all vectors, even if there is an approximate index")


@dataclass(frozen=True)
class Indexed(Named):
    """An index that was written."""

    path: str
    entries: int
    width: int

    def __str__(self) -> str:
        return f"wrote {self.path}: {self.entries:,} vectors of {self.width} numbers"


@dataclass(frozen=True)
class Match(Named):
    """An entry of an index, and the cosine of its vector with that of the query."""

    score: float
    text: str  # of a text, or the path of an image
    where: str  # file, and line if it is one of several

    def __str__(self) -> str:
        where = "" if self.where in ("", self.text) else f"  ({self.where})"
        return f"{self.score:.4f}  {self.text}{where}"


class Matches(list[Any]):
    """Entries nearest to a query, the nearest first; or those of several queries."""

    def __str__(self) -> str:
        several = any(isinstance(one, Matches) for one in self)
        return ("\n\n" if several else "\n").join(map(str, self))


@using
def index(
    model: Place,
    data: UserData,
    /,
    *,
    out: Place | None = None,
    quiet: bool = True,
    **settings: Any,
) -> Indexed:
    """Embed the texts of a file, folder or table, or the images of a folder, to search them.

    index("embed", "notes", out="notes.index")

    A line of a text file, a row of a table and an image are an entry each. `model` is any that
    embeds; `data` may lie in memory, too. Further keys: `regard index --help`.
    """
    asked = fill(IndexSettings, settings | not_none(out=out))
    if asked.out is None:
        raise UsageError("out is missing; add out=FOLDER for the index")
    if asked.method == "hnsw":
        _hnswlib()
    runner, task = _embedder(model)
    how = not_none(pooling=asked.pooling, max_length=asked.max_length)
    completed = runner.check(how)
    entries = _entries(runner, data, completed, asked.columns)
    with making(asked.out) as partial:
        count, width = _write(runner, entries, how, partial, quiet)
        if not count:
            raise UsageError(f"{data!s:.80}: nothing to index in it; expected texts or images")
        about = {
            "regard_index": 1,
            "model": str(model) if is_starter(model) else str(Path(model).absolute()),
            "task": task,
            "fingerprint": fingerprint(find_model(model)),
            "settings": how,
            "reads": runner.inputs.many,
            "entries": count,
            "width": width,
            "method": _method(asked.method, count),
        }
        if about["method"] == "hnsw":
            about["hnsw_sha256"] = _write_hnsw(partial, count, width)
        write_atomically(partial / "index.json", json.dumps(about, indent=1) + "\n")
    return Indexed(str(asked.out), count, width)


@using
def search(index: Place, query: Any, /, **settings: Any) -> Any:
    """Entries of an index that are nearest in meaning to a query, the nearest first.

    search("notes.index", "when do we meet?", n=3)[0].text

    Several queries give such a list each. Images are asked for by an image or, where their model
    embeds texts in the same space (CLIP), by a text.
    """
    asked = fill(SearchSettings, settings)
    found = Index(index, asked.model)
    if isinstance(query, list | tuple) and not query:
        raise UsageError('QUERY is missing; write for example: regard search INDEX "a question"')
    if isinstance(query, list | tuple) and len(query) == 1 and isinstance(query[0], str):
        query = query[0]
    if isinstance(query, list | tuple):
        return found.search(query, asked.n, exact=asked.exact)
    return found.search([query], asked.n, exact=asked.exact)[0]


class Index:
    """An index of vectors in a folder, read where it lies.

    Args:
        folder: of the index.
        model: where its model lies, if not where it lay.
    """

    def __init__(self, folder: Place, model: Place | None = None):
        self.folder = Path(folder)
        path = self.folder / "index.json"
        if not path.is_file():
            raise UsageError(f"{folder}: no index; make one with: regard index MODEL DATA out=...")
        about = read_json(path)
        try:
            self.entries, self.width = int(about["entries"]), int(about["width"])
            self.method = str(about["method"])
            self.task, self.how = about["task"], dict(about["settings"])
            self.hash, named = str(about["fingerprint"]), str(about["model"])
            self.vectors = np.load(self.folder / "vectors.npy", mmap_mode="r", allow_pickle=False)
            self.offsets = np.load(self.folder / "offsets.npy", mmap_mode="r", allow_pickle=False)
        except UsageError:
            raise
        except (KeyError, TypeError, ValueError, OSError, EOFError) as error:
            raise UsageError(f"{folder}: a damaged index ({error!s:.80}); make it again") from None
        shapes = self.vectors.shape, self.offsets.shape
        if shapes != ((self.entries, self.width), (self.entries + 1,)):
            raise UsageError(
                f"{folder}: vectors {shapes[0]} do not fit its index.json; index again"
            )
        self.about, self.place = about, find_model(model or named)
        if fingerprint(self.place) != self.hash:
            raise UsageError(
                f"{folder} was made by another model than {self.place} is now; name the right one "
                "with model=, or index the data again"
            )

    def search(self, queries: Sequence[Any], n: int, *, exact: bool = False) -> Matches:
        """Nearest entries of each query."""
        wanted = self._embed(list(queries))
        approximate = self.method == "hnsw" and not exact
        nearest = self._approximate if approximate else self._exact
        best, scores = nearest(wanted, min(n, self.entries))
        with open(self.folder / "entries.jsonl", "rb") as file:
            return Matches(
                Matches(self._entry(file, int(i), float(s)) for i, s in zip(*row, strict=True))
                for row in zip(best, scores, strict=True)
            )

    def _embed(self, queries: list[Any]) -> np.ndarray:
        """Unit vectors (q, w) of queries; a text that is no file asks an index of images, too."""
        runner = load(self.place, task=self.task)
        words = all(isinstance(one, str) and not os.path.isfile(one) for one in queries)
        if self.task is None and words:
            try:
                runner = load(self.place, task="embed")
            except UsageError:
                raise UsageError(
                    f"{self.folder} is of {self.about['reads']}, and its model reads no texts; "
                    "give the path of one as the query"
                ) from None
        vectors = _unit(runner.run(queries, **(self.how if self.task else {})))
        if vectors.shape[1] != self.width:
            raise UsageError(
                f"a query of {vectors.shape[1]} numbers cannot be compared with the "
                f"{self.width} of {self.folder}"
            )
        return vectors

    def _exact(self, wanted: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Numbers and cosines (q, n) of the nearest, by comparing all vectors, some at a time."""
        scores = np.full((len(wanted), 0), 0.0, np.float32)
        numbers = np.zeros((len(wanted), 0), np.int64)
        for start in range(0, self.entries, _ROWS):
            some = wanted @ np.asarray(self.vectors[start : start + _ROWS]).T
            places = np.broadcast_to(np.arange(start, start + some.shape[1]), some.shape)
            scores, numbers = np.hstack([scores, some]), np.hstack([numbers, places])
            if scores.shape[1] > n:
                kept = np.argpartition(-scores, n - 1, axis=1)[:, :n]
                scores, numbers = (np.take_along_axis(x, kept, 1) for x in (scores, numbers))
        order = np.lexsort((numbers, -scores), axis=1)  # of equals the first comes first
        return np.take_along_axis(numbers, order, 1), np.take_along_axis(scores, order, 1)

    def _approximate(self, wanted: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
        path = self.folder / "hnsw.bin"
        if not path.is_file() or files.sha256(path) != self.about.get("hnsw_sha256"):
            raise UsageError(f"{path}: damaged or missing; search with exact=true, or index again")
        graph = _hnswlib().Index(space="ip", dim=self.width)
        graph.load_index(str(path))
        graph.set_ef(max(100, 2 * n))
        numbers, distances = graph.knn_query(wanted, k=n)
        return numbers.astype(np.int64), 1 - distances

    def _entry(self, file: Any, number: int, score: float) -> Match:
        begin, end = int(self.offsets[number]), int(self.offsets[number + 1])
        if not 0 <= begin < end <= begin + _MOST_ENTRY:
            raise UsageError(f"{self.folder}: entry {number} has no place; make the index again")
        file.seek(begin)
        try:
            told = json.loads(file.read(end - begin))
            return Match(score, str(told["text"]), str(told["where"]))
        except (ValueError, TypeError, KeyError):
            raise UsageError(f"{self.folder}: entry {number} is damaged; index again") from None


def fingerprint(folder: Path) -> str:
    """Hash of all files of a model that its vectors depend on."""
    paths = [folder] if folder.is_file() else sorted(folder.iterdir())
    kept = [p for p in paths if p.suffix in _KEPT and p.name not in _NOT_KEPT and p.is_file()]
    return sha256("".join(f"{p.name} {files.sha256(p)}\n" for p in kept).encode()).hexdigest()


def _embedder(model: Place) -> tuple[Any, str | None]:
    """A model that embeds, and the task that says so, if its own is another."""
    runner = load(model)
    if runner.name == "pretrain":  # an encoder of images
        return runner, None
    return runner if runner.name == "embed" else load(model, task="embed"), "embed"


def _unit(answers: Sequence[Any]) -> np.ndarray:
    if not answers or not hasattr(answers[0], "vector"):
        raise UsageError("this model gives no vectors; name one that embeds, such as embed")
    vectors = np.stack([answer.vector for answer in answers]).astype(np.float32)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


Entry = tuple[Any, str]  # an input, and where it is


def _entries(runner: Any, data: UserData, completed: Any, columns: str | None) -> Iterator[Entry]:
    """Inputs of a path or of data in memory, in order."""
    if not isinstance(data, str | Path):
        inputs, _ = runner.inputs_of(data, completed)
        yield from ((given, f"row {n}") for n, given in enumerate(inputs, 1))
        return
    path = Path(data)
    if not path.exists():
        raise UsageError(f"{path}: no such file or folder")
    if not _reads_texts(runner):
        found = runner.inputs_at(str(path), completed)
        for given, row in found.inputs if found else ():
            yield given, str(given) if row is None else str(path)
        return
    paths = [path]
    if path.is_dir():
        walked = (Path(place) / name for place, _, names in os.walk(path) for name in names)
        known = (p for p in walked if p.suffix.lower() in _TEXT_FILES and p.name[0] != ".")
        paths = sorted(known)
        if not paths:
            ends = ", ".join(sorted(_TEXT_FILES))
            raise UsageError(f"{path}: no texts in this folder; expected files in {ends}")
    for each in paths:
        yield from _lines(runner, each, columns)


def _reads_texts(runner: Any) -> bool:
    return runner.inputs.one == "text"


def _lines(runner: Any, path: Path, columns: str | None) -> Iterator[Entry]:
    """Lines of a text, or the chosen column of a table."""

    def choose(names: list[str]) -> str:
        return runner.column_of(names, columns)

    if path.suffix.lower() in TABLES:
        completed = fill(IndexSettings, not_none(columns=columns))
        rows = table_rows(str(path), runner, Call([], {}, completed=completed))
        yield from ((text, f"{path}:{n}") for n, (text, _) in enumerate(rows, 1))
        return
    with opened(path) as file:
        for number, (text, _) in enumerate(read_lines(file, choose, str(path)), 1):
            if str(text).strip():
                yield text, f"{path}:{number}"


def _write(
    runner: Any, entries: Iterable[Entry], how: dict[str, Any], folder: Path, quiet: bool
) -> tuple[int, int]:
    """Write vectors, entries and where each begins; return how many there are, and their width."""
    count, width, place = 0, 0, 0
    with (
        _array(folder / "vectors.npy") as vectors,
        _array(folder / "offsets.npy") as offsets,
        open(folder / "entries.jsonl", "wb") as texts,
    ):
        offsets.add(np.zeros(1, np.int64))
        for chunk, mistake in in_chunks(((e, {"where": w}) for e, w in entries), _CHUNK):
            if mistake:
                raise mistake
            found = _unit(runner.run([given for given, _ in chunk], **how))
            width = found.shape[1]
            vectors.add(found)
            for given, told in chunk:
                where = told["where"] if told else ""
                line = json.dumps({"text": str(given), "where": where}, ensure_ascii=False) + "\n"
                place += texts.write(line.encode(errors="replace"))
                offsets.add(np.array([place], np.int64))
            count += len(chunk)
            if not quiet and count % (100 * _CHUNK) == 0:
                log(f"{count:,} entries")
    return count, width


class _Growing:
    """An array on disk that grows by rows; its header has room for any number of them."""

    def __init__(self, file: Any):
        self.file, self.rows, self.like = file, 0, np.zeros((0, 1), np.float32)

    def add(self, rows: np.ndarray) -> None:
        """Write more rows."""
        if not self.rows:
            self.like = rows[:0]
            self.write_header()
        self.rows += len(rows)
        self.file.write(np.ascontiguousarray(rows).tobytes())

    def write_header(self) -> None:
        """Write how many rows there are; NumPy leaves room for this number to grow."""
        self.file.seek(0)
        shape = (self.rows, *self.like.shape[1:])
        about = {"descr": self.like.dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self.file, about)


@contextmanager
def _array(path: Path) -> Iterator[_Growing]:
    with open(path, "wb") as file:
        growing = _Growing(file)
        yield growing
        growing.write_header()


def _method(asked: str, count: int) -> str:
    if asked != "auto":
        return asked
    return "exact" if count <= _MOST_EXACT else "hnsw"


def _hnswlib() -> Any:
    try:
        import hnswlib
    except ImportError as error:
        raise UsageError(
            "the package hnswlib is not installed; pip install regard[hnsw], or use method=exact"
        ) from error
    return hnswlib


def _write_hnsw(folder: Path, count: int, width: int) -> str:
    """Write a graph of near vectors beside these, and return its hash."""
    vectors = np.load(folder / "vectors.npy", mmap_mode="r", allow_pickle=False)
    graph = _hnswlib().Index(space="ip", dim=width)
    graph.init_index(max_elements=count, ef_construction=200, M=16, random_seed=1)
    for start in range(0, count, _ROWS):
        some = np.asarray(vectors[start : start + _ROWS])
        graph.add_items(some, np.arange(start, start + len(some)))
    path = folder / "hnsw.bin"
    graph.save_index(str(path))
    return files.sha256(path)
