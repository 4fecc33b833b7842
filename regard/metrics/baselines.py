"""Trivial predictors: the majority class, a simple classifier, the frequencies of tokens."""

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch import Tensor

from regard.data.features import split_words
from regard.errors import UsageError
from regard.files import write_atomically
from regard.files.hashes import verify
from regard.metrics.labels import count, macro_f1, one_hot, percent
from regard.metrics.linear import (
    fit_ngrams,
    fit_vectors,
    fit_words,
    ngram_logits,
    vector_logits,
    word_logits,
)
from regard.metrics.mixture import MIXTURE_FILE, UNHEARD, Mixture, load_mixture

BASELINE_FILE = "baseline.safetensors"
COMMONEST = "the commonest label"
FREQUENCIES = "the frequencies of tokens"
_MAX_ROWS = 20_000  # that a baseline is fitted on, unless it says
_MAX_COUNTED_TOKENS = 2**24  # that frequencies are counted of
_MAX_BASELINE_WORDS = 400  # of a text
_MAX_BASELINE_TABLE = 2**20  # in a table: labels times features
MAX_LABELS = _MAX_BASELINE_TABLE // 1000  # that a simple classifier is fitted to
_MAX_BYTES = 2**26  # of a file
_BASELINE_SIDE = 16  # pixels that images are downsampled to

Arrays = dict[str, np.ndarray]


class Baseline(NamedTuple):
    """A simple classifier: arrays fitted to inputs and targets, and predictions from them.

    Targets and predictions are the number of a label (n,), or tables (n, labels) if multi-label.
    """

    fit: Callable[..., Arrays]  # inputs, targets, labels and, if linear, what was chosen before
    predict: Callable[[Any, Arrays, int], np.ndarray]
    names: tuple[str, ...]  # of its arrays, sorted
    is_valid: Callable[[Arrays, int], bool]  # whether arrays are of so many labels
    multilabel: str = ""  # the classifier of its kind for any number of labels a row
    logits: Callable[[Any, Arrays], np.ndarray] | None = None  # (n, labels), of a linear one
    rows: int = _MAX_ROWS  # that it is fitted on, evenly spaced


def _hash(words: Iterable[str]) -> np.ndarray:
    return np.array([zlib.crc32(word.encode(errors="replace")) for word in words], dtype=np.int64)


def _ngrams(text: str) -> np.ndarray:
    """Hashes of the distinct unigrams and bigrams of a text."""
    words = [word.lower() for word in split_words(text)[:_MAX_BASELINE_WORDS]]
    pairs = [f"{a} {b}" for a, b in zip(words, words[1:], strict=False)]
    return np.unique(_hash([*words, *pairs]))


def _count(
    rows: Sequence[np.ndarray], numbers: np.ndarray, labels: int
) -> tuple[np.ndarray, np.ndarray]:
    """Commonest features, sorted, and in how many rows of each label they occur."""
    owner = np.repeat(numbers, [len(row) for row in rows])
    keys, place = np.unique(np.concatenate([*rows, np.zeros(0, np.int64)]), return_inverse=True)
    total = np.bincount(place, minlength=len(keys))
    most = max(1, _MAX_BASELINE_TABLE // labels)
    kept = np.sort(np.argsort(-total, kind="stable")[:most])
    new = np.full(len(keys), -1)
    new[kept] = np.arange(len(kept))
    place = new[place]
    counts = np.zeros((len(kept), labels))
    np.add.at(counts, (place[place >= 0], owner[place >= 0]), 1)
    return keys[kept], counts


def _log_share(counts: np.ndarray) -> np.ndarray:
    return np.log((counts + 1) / (counts + 1).sum(0))


def _bayes_scores(rows: Sequence[np.ndarray], tables: Arrays) -> np.ndarray:
    keys, prior = tables["keys"], tables["prior"]
    scores = np.empty((len(rows), len(prior)), np.float32)
    for n, row in enumerate(rows):
        place = np.searchsorted(keys, row)
        known = place[keys[np.minimum(place, len(keys) - 1)] == row] if len(keys) else place[:0]
        scores[n] = prior + tables["weights"][known].sum(0)
    return scores


def _fit_bayes_per_label(texts: Sequence[str], targets: np.ndarray, labels: int) -> Arrays:
    """Fit one binary naive Bayes per label: the log odds of its presence."""
    ngrams = [_ngrams(text) for text in texts]
    rows, numbers = np.nonzero(targets)
    every = np.full(len(texts), labels)  # one more column, which counts all rows
    repeated = [*(ngrams[row] for row in rows), *ngrams]
    keys, counts = _count(repeated, np.concatenate([numbers, every]), labels + 1)
    present, all_rows = counts[:, :labels], counts[:, labels:]
    frequency = targets.sum(0)
    odds = np.log(frequency + 1) - np.log(len(texts) - frequency + 1)
    return {
        "keys": keys,
        "weights": (_log_share(present) - _log_share(all_rows - present)).astype(np.float32),
        "prior": odds.astype(np.float32),
    }


def _predict_bayes_per_label(texts: Sequence[str], tables: Arrays, labels: int) -> np.ndarray:
    """Every label that is more probable than not."""
    return _bayes_scores([_ngrams(text) for text in texts], tables) > 0


def downsample(images: np.ndarray, side: int = _BASELINE_SIDE) -> np.ndarray:
    """Images (n, c, h, w) averaged over blocks, as vectors (n, c * h' * w')."""
    n, c, h, w = images.shape
    rows, columns = (np.arange(min(side, n)) * n // min(side, n) for n in (h, w))
    values = np.add.reduceat(images.astype(np.float32), rows, axis=2)
    values = np.add.reduceat(values, columns, axis=3)
    sizes = np.diff(rows, append=h)[:, None] * np.diff(columns, append=w)
    return (values / sizes / 255).reshape(n, -1)


def block_means(values: np.ndarray) -> np.ndarray:
    """Series (n, c) averaged over stretches of steps, as one vector of a fixed size."""
    ends = np.arange(_BASELINE_SIDE + 1) * len(values) // _BASELINE_SIDE
    parts = [values[a : max(b, a + 1)].mean(0) for a, b in zip(ends, ends[1:], strict=False)]
    return np.concatenate(parts)[:MAX_LABELS]


def _valid_bayes(tables: Arrays, labels: int) -> bool:
    keys, weights, prior = tables["keys"], tables["weights"], tables["prior"]
    return keys.ndim == 1 and weights.shape == (len(keys), labels) and prior.shape == (labels,)


def _valid_linear(tables: Arrays, labels: int) -> bool:
    weights, bias = tables["weights"], tables["bias"]
    keys, idf = tables.get("keys", weights), tables.get("idf", weights)
    alike = weights.ndim == 2 and len(keys) == len(idf) == len(weights)
    return alike and weights.shape[1:] == bias.shape == (labels,)


def _linear(fit: Any, logits: Any, *more: str, **how: Any) -> Baseline:
    """A linear classifier: how it is fitted, and logits by its arrays."""
    names = tuple(sorted(("bias", "chosen", "weights", *more)))

    def predict(inputs: Any, tables: Arrays, labels: int) -> np.ndarray:
        return logits(inputs, tables).argmax(1)

    return Baseline(fit, predict, names, _valid_linear, logits=logits, **how)


def frequency_loss(train: np.ndarray, test: np.ndarray) -> float:
    """Cross-entropy of tokens by their smoothed frequencies in a training text, in nats."""
    counts = np.bincount(train[:_MAX_COUNTED_TOKENS], minlength=int(test.max(initial=0)) + 1) + 1.0
    return float(-np.log(counts / counts.sum())[test[:_MAX_COUNTED_TOKENS]].mean())


# name, which is printed -> classifier
BASELINES: dict[str, Baseline] = {
    "a linear model of n-grams": _linear(
        fit_ngrams, ngram_logits, "keys", "idf", multilabel="naive Bayes of each label"
    ),
    "naive Bayes of each label": Baseline(
        _fit_bayes_per_label,
        _predict_bayes_per_label,
        ("keys", "prior", "weights"),
        _valid_bayes,
    ),
    "a linear model of words and neighbours": _linear(
        fit_words, word_logits, "keys", "idf", rows=2**16
    ),
    "a linear model of pixels and gradients": _linear(fit_vectors, vector_logits),
    "a linear model of band energies": _linear(fit_vectors, vector_logits),
    "a linear model of means and kernels": _linear(fit_vectors, vector_logits),
}


# of folders that were written before; they are not shown any more
_FORMER = ("naive Bayes", *(f"the nearest mean {it}" for it in ("image", "series", "spectrogram")))
_FORMER += ("the commonest tag of each word",)


@dataclass(frozen=True)
class Baselines:
    """The majority class (or set of labels), and a fitted simple classifier.

    Where a model is made of an encoder and this classifier, `mixture` has the weights of both, and
    `refitted` the arrays of the same classifier fitted to the validation part, too.
    """

    commonest: np.ndarray  # the labels of the most frequent answer, (labels,)
    kind: str = ""
    tables: Arrays | None = None
    mixture: Mixture | None = None
    refitted: Arrays | None = None

    @classmethod
    def fit(cls, kind: str, inputs: Any, targets: np.ndarray, *chosen: str) -> "Baselines":
        """Fit to inputs and target labels (n, labels), any number of them a row.

        A linear model is the one that was `chosen` on other rows, if one was.
        """
        most = BASELINES[kind].rows if kind else _MAX_ROWS
        some = np.unique(np.linspace(0, len(targets) - 1, most).astype(np.int64))
        rows, counts = np.unique(targets[some], axis=0, return_counts=True)
        commonest = rows[::-1][counts[::-1].argmax()]  # the first of equals
        labels, single = targets.shape[1], (targets.sum(1) == 1).all()
        kind = kind if single else BASELINES[kind].multilabel
        if not kind or labels > MAX_LABELS or len(rows) < 2:
            return cls(commonest)
        picked = inputs[some] if isinstance(inputs, np.ndarray) else [inputs[i] for i in some]
        wanted = targets[some].argmax(1) if single else targets[some]
        return cls(commonest, kind, BASELINES[kind].fit(picked, wanted, labels, *chosen))

    def tables_for(self, valid: bool = False) -> Arrays | None:
        """Arrays by which a part is judged: the validation part, by those that did not learn it."""
        return self.tables if valid or self.refitted is None else self.refitted

    def scores(
        self, inputs: Any, targets: np.ndarray, valid: bool = False
    ) -> dict[str, dict[str, float]]:
        """Accuracy and macro F1 of each on a test set, in percent, or on the validation part."""
        labels, tables = len(self.commonest), self.tables_for(valid)
        predictions = {COMMONEST: np.broadcast_to(self.commonest, targets.shape)}
        if tables is not None:
            predicted = BASELINES[self.kind].predict(inputs, tables, labels)
            predictions[self.kind] = predicted if predicted.ndim > 1 else one_hot(predicted, labels)
        return {
            name: {
                "accuracy": float(percent((targets == table).all(1).sum(), len(targets))),
                "macro_f1": macro_f1(count(targets, table)),
            }
            for name, table in predictions.items()
        }

    def logits(self, inputs: Any, valid: bool = False) -> np.ndarray:
        """Logits (n, labels) of a linear model."""
        logits, tables = BASELINES[self.kind].logits if self.kind else None, self.tables_for(valid)
        if logits is None or tables is None:
            raise UsageError("this model has no linear part, but a file that says how to add it")
        return logits(inputs, tables)

    def added(self, encoder: Tensor, inputs: Callable[[], Any], valid: bool = False) -> Tensor:
        """Logits (n, labels) of a model by those of its encoder: with a linear part, of both."""
        if self.mixture is None:
            return encoder
        linear = torch.from_numpy(self.logits(inputs(), valid))
        return self.mixture.logits(encoder, linear.to(encoder.device))

    @property
    def caveat(self) -> str:
        """Why attention has no part in an answer, where a linear model alone gives it."""
        return UNHEARD if self.mixture and not self.mixture.encoder else ""

    @property
    def chosen(self) -> str:
        """What of a linear model was chosen on held-out training rows, if there is one."""
        return bytes((self.tables or {}).get("chosen", np.zeros(0, np.uint8))).decode()

    def save(self, folder: Path) -> None:
        """Write them beside a model."""
        tables = {"commonest": self.commonest.astype(np.uint8), **(self.tables or {})}
        whole = {name: np.ascontiguousarray(table) for name, table in tables.items()}
        write_atomically(folder / BASELINE_FILE, save(whole, metadata={"kind": self.kind}))

    @classmethod
    def load(cls, folder: Path, labels: int) -> "Baselines | None":
        """Read those of a folder, if there are any, or say what is wrong with the file."""
        path = folder / BASELINE_FILE
        mixture, refitted = load_mixture(folder)
        if not path.is_file():
            if mixture is not None:
                raise UsageError(f"{path}: missing, and it is a part of the model; restore it")
            return None
        if path.stat().st_size > _MAX_BYTES:
            raise UsageError(f"{path}: larger than {_MAX_BYTES:,} bytes; remove it")
        verify(folder, BASELINE_FILE)
        try:
            with safe_open(path, "numpy") as file:
                kind = (file.metadata() or {}).get("kind", "")
                tables = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError, TypeError) as error:
            raise UsageError(f"{path}: {str(error)[:100]}; remove it") from None
        commonest = tables.pop("commonest", np.zeros(0))
        if kind in _FORMER:
            kind, tables = "", {}
        baseline = BASELINES.get(kind)
        known = tuple(sorted(tables)) == (baseline.names if baseline else ())
        valid = baseline.is_valid(tables, labels) if known and baseline else not kind
        good = known and valid
        if commonest.shape != (labels,) or not good:
            raise UsageError(f"{path}: not the baselines of {labels} labels; remove it")
        if mixture is not None and (baseline is None or baseline.logits is None):
            raise UsageError(f"{path}: no linear model, which is a part of the model; restore it")
        names = tuple(sorted(refitted))
        if (
            baseline
            and refitted
            and (names != baseline.names or not baseline.is_valid(refitted, labels))
        ):
            raise UsageError(
                f"{folder / MIXTURE_FILE}: not a linear model of {labels} labels; restore it"
            )
        return cls(
            commonest.astype(bool), kind, tables if kind else None, mixture, refitted or None
        )
