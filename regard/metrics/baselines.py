"""What a model that labels should beat: the commonest answer, and the simplest that learns."""

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from regard.data.features import split_words
from regard.errors import UsageError
from regard.files import write_atomically
from regard.hashes import verify
from regard.metrics.labels import count, macro_f1, ones, percent

FILE = "baseline.safetensors"
COMMONEST = "the commonest label"
MOST_ROWS = 20_000  # that a baseline learns from, evenly spread
MOST_WORDS = 400  # read of a text
MOST_NUMBERS = 2**20  # in a table, and so of its labels times what it knows
MOST_BYTES = 2**24  # of a file
SIDE = 16  # pixels that images are brought to

Arrays = dict[str, np.ndarray]


class Kind(NamedTuple):
    """A simple way to learn labels: tables from inputs and numbers, and answers from tables."""

    learn: Callable[[Any, np.ndarray, int], Arrays]
    answer: Callable[[Any, Arrays, int], np.ndarray]
    names: tuple[str, ...]  # of its tables, sorted
    fits: Callable[[Arrays, int], bool]  # whether tables are of so many labels


def _hash(words: Iterable[str]) -> np.ndarray:
    return np.array([zlib.crc32(word.encode(errors="replace")) for word in words], dtype=np.int64)


def _grams(text: str, pairs: bool = True) -> np.ndarray:
    """Return the words of a text and its pairs of neighbours, by their hashes, each once."""
    words = [word.lower() for word in split_words(text)[:MOST_WORDS]]
    both = [f"{a} {b}" for a, b in zip(words, words[1:], strict=False)] if pairs else []
    return np.unique(_hash([*words, *both]))


def _bayes(texts: Sequence[str], numbers: np.ndarray, labels: int) -> Arrays:
    """Count in how many texts of each label a word or a pair of words is (Laplace's rule)."""
    return _counts([_grams(text) for text in texts], numbers, labels)


def _counts(rows: Sequence[np.ndarray], numbers: np.ndarray, labels: int) -> Arrays:
    owner = np.repeat(numbers, [len(row) for row in rows])
    keys, place = np.unique(np.concatenate([*rows, np.zeros(0, np.int64)]), return_inverse=True)
    total = np.bincount(place, minlength=len(keys))
    most = max(1, MOST_NUMBERS // labels)
    kept = np.sort(np.argsort(-total, kind="stable")[:most])
    new = np.full(len(keys), -1)
    new[kept] = np.arange(len(kept))
    place = new[place]
    counts = np.ones((len(kept), labels))
    np.add.at(counts, (place[place >= 0], owner[place >= 0]), 1)
    often = np.bincount(numbers, minlength=labels) + 1
    return {
        "keys": keys[kept],
        "weights": np.log(counts / counts.sum(0)).astype(np.float32),
        "prior": np.log(often / often.sum()).astype(np.float32),
    }


def _by_bayes(texts: Sequence[str], tables: Arrays, labels: int) -> np.ndarray:
    """Return the likeliest label of each text; words that were never seen say nothing."""
    return _likeliest([_grams(text) for text in texts], tables)


def _likeliest(rows: Sequence[np.ndarray], tables: Arrays) -> np.ndarray:
    found, keys = [], tables["keys"]
    for row in rows:
        place = np.searchsorted(keys, row)
        known = place[keys[np.minimum(place, len(keys) - 1)] == row] if len(keys) else place[:0]
        found.append(np.argmax(tables["prior"] + tables["weights"][known].sum(0)))
    return np.array(found, dtype=np.int64)


def worth_of_order(texts: Sequence[str], numbers: np.ndarray, labels: int, folds: int = 5) -> float:
    """Return by how many percent naive Bayes is better for knowing pairs of words, too.

    Each fifth of the texts is judged by what was learnt from the others.
    """
    right = []
    for pairs in (False, True):
        rows = [_grams(text, pairs) for text in texts]
        fold, total = np.arange(len(rows)) % folds, 0
        for n in range(folds):
            known = [row for row, at in zip(rows, fold, strict=True) if at != n]
            asked = [row for row, at in zip(rows, fold, strict=True) if at == n]
            answers = _likeliest(asked, _counts(known, numbers[fold != n], labels))
            total += int((answers == numbers[fold == n]).sum())
        right.append(total)
    return 100 * (right[1] - right[0]) / max(1, len(texts))


def _usual(words: Sequence[str], numbers: np.ndarray, labels: int) -> Arrays:
    """Note the commonest tag of each word, and of those seen only once."""
    pairs = Counter(zip(_hash(words).tolist(), numbers.tolist(), strict=True))
    best: dict[int, int] = {}
    often: Counter[int] = Counter()
    for (word, tag), n in pairs.most_common():
        best.setdefault(word, tag)
        often[word] += n
    rare = Counter(best[word] for word, n in often.items() if n == 1) or Counter(numbers.tolist())
    keys = np.array(sorted(word for word, _ in often.most_common(MOST_NUMBERS)), dtype=np.int64)
    tags = np.array([best[word] for word in keys.tolist()], dtype=np.int64)
    return {"keys": keys, "tags": tags, "else": np.array([rare.most_common(1)[0][0]])}


def _by_usual(words: Sequence[str], tables: Arrays, labels: int) -> np.ndarray:
    """Return the commonest tag of each word."""
    keys, asked = tables["keys"], _hash(words)
    place = np.minimum(np.searchsorted(keys, asked), len(keys) - 1)
    return np.where(keys[place] == asked, tables["tags"][place], tables["else"])


def small(images: np.ndarray) -> np.ndarray:
    """Return images (n, c, h, w) brought to a few pixels each, (n, c * h' * w')."""
    n, c, h, w = images.shape
    rows, columns = (np.arange(min(SIDE, side)) * side // min(SIDE, side) for side in (h, w))
    values = np.add.reduceat(images.astype(np.float32), rows, axis=2)
    values = np.add.reduceat(values, columns, axis=3)
    sizes = np.diff(rows, append=h)[:, None] * np.diff(columns, append=w)
    return (values / sizes / 255).reshape(n, -1)


def _means(vectors: np.ndarray, numbers: np.ndarray, labels: int) -> Arrays:
    """Return the mean image of each label; one without any is nowhere near."""
    means = np.full((labels, vectors.shape[1]), 1e4, dtype=np.float32)
    for label in np.unique(numbers).tolist():
        means[label] = vectors[numbers == label].mean(0)
    return {"means": means}


def _by_means(vectors: np.ndarray, tables: Arrays, labels: int) -> np.ndarray:
    """Return the label whose mean image is nearest."""
    means = tables["means"]
    if means.shape[1] != vectors.shape[1]:
        raise UsageError(f"{FILE}: means of {means.shape[1]} numbers, but images of other sizes")
    return np.argmin((means**2).sum(1) - 2 * vectors @ means.T, axis=1)


def _is_bayes(tables: Arrays, labels: int) -> bool:
    keys, weights, prior = tables["keys"], tables["weights"], tables["prior"]
    return keys.ndim == 1 and weights.shape == (len(keys), labels) and prior.shape == (labels,)


def _is_usual(tables: Arrays, labels: int) -> bool:
    keys, tags = tables["keys"], np.append(tables["tags"], tables["else"])
    right = keys.ndim == 1 and tags.shape == (len(keys) + 1,) and tags.dtype == np.int64
    return right and len(keys) > 0 and bool((tags >= 0).all() and (tags < labels).all())


def _are_means(tables: Arrays, labels: int) -> bool:
    return tables["means"].ndim == 2 and len(tables["means"]) == labels


# name -> what learns so
KINDS: dict[str, Kind] = {
    "naive Bayes": Kind(_bayes, _by_bayes, ("keys", "prior", "weights"), _is_bayes),
    "the commonest tag of each word": Kind(_usual, _by_usual, ("else", "keys", "tags"), _is_usual),
    "the nearest mean image": Kind(_means, _by_means, ("means",), _are_means),
}


@dataclass(frozen=True)
class Baselines:
    """The commonest labels, and a table of what else was learnt simply."""

    commonest: np.ndarray  # which labels the commonest answer has, (labels,)
    kind: str = ""
    tables: Arrays | None = None

    @classmethod
    def learn(cls, kind: str, inputs: Any, wanted: np.ndarray) -> "Baselines":
        """Learn from inputs and which labels are right, (n, labels); several have no kind."""
        some = np.unique(np.linspace(0, len(wanted) - 1, MOST_ROWS).astype(np.int64))
        rows, often = np.unique(wanted[some], axis=0, return_counts=True)
        commonest, labels = rows[::-1][often[::-1].argmax()], wanted.shape[1]  # the first of equals
        if not (wanted.sum(1) == 1).all() or labels > MOST_NUMBERS // 1000:
            return cls(commonest)
        picked = inputs[some] if isinstance(inputs, np.ndarray) else [inputs[i] for i in some]
        tables = KINDS[kind].learn(picked, wanted[some].argmax(1), labels)
        return cls(commonest, kind, tables)

    def scores(self, inputs: Any, wanted: np.ndarray) -> dict[str, dict[str, float]]:
        """Return accuracy and macro F1, in percent, of each on rows that are to be judged."""
        labels = len(self.commonest)
        found = {COMMONEST: np.broadcast_to(self.commonest, wanted.shape)}
        if self.tables is not None:
            answers = KINDS[self.kind].answer(inputs, self.tables, labels)
            found[self.kind] = ones(answers, labels)
        return {
            name: {
                "accuracy": float(percent((wanted == table).all(1).sum(), len(wanted))),
                "macro_f1": macro_f1(count(wanted, table)),
            }
            for name, table in found.items()
        }

    def save(self, folder: Path) -> None:
        """Write them beside a model."""
        tables = {"commonest": self.commonest.astype(np.uint8), **(self.tables or {})}
        whole = {name: np.ascontiguousarray(table) for name, table in tables.items()}
        write_atomically(folder / FILE, save(whole, metadata={"kind": self.kind}))

    @classmethod
    def load(cls, folder: Path, labels: int) -> "Baselines | None":
        """Read those of a folder, if there are any, or say what is wrong with the file."""
        path = folder / FILE
        if not path.is_file():
            return None
        if path.stat().st_size > MOST_BYTES:
            raise UsageError(f"{path}: larger than {MOST_BYTES:,} bytes; remove it")
        verify(folder, FILE)
        try:
            with safe_open(path, "numpy") as file:
                kind = (file.metadata() or {}).get("kind", "")
                tables = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError, TypeError) as error:
            raise UsageError(f"{path}: {str(error)[:100]}; remove it") from None
        commonest = tables.pop("commonest", np.zeros(0))
        how = KINDS.get(kind)
        known = tuple(sorted(tables)) == (how.names if how else ())
        good = known and (how is None or how.fits(tables, labels)) and (how or not kind)
        if commonest.shape != (labels,) or not good:
            raise UsageError(f"{path}: not the baselines of {labels} labels; remove it")
        return cls(commonest.astype(bool), kind, tables if kind else None)
