"""The best cheap classifier: a linear model of n-grams or of a vector of numbers.

scikit-learn fits it; what is kept are plain arrays, by which it predicts without scikit-learn.
"""

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from regard.data.features import split_words
from regard.errors import UsageError

_MAX_LETTERS = 6000  # of a text that are read
_MAX_SPELLED = 3_000_000  # letters of all texts up to which n-grams of these are read
_MAX_READ = 24_000_000  # letters of all texts that are fitted; of more, evenly spaced texts
_AT_ONCE = 256  # texts whose n-grams are in memory while they are labelled
_MAX_COMPARED = 10**8  # keys that rows have, times labels, up to which costly candidates are tried
_MAX_PRODUCTS = 2 * 10**8  # the same times the numbers of a vector
_MAX_WEIGHTS = 2**21  # n-grams times labels that are kept, the most frequent ones
_LENGTHS = range(2, 6)  # of n-grams of characters
_FOLDS, _SMALL = 5, 2000  # held out in turn up to so many rows; of more rows, one of them
_SVM = (0.3, 1.0, 3.0)  # C of a linear SVM of n-grams
_BAYES = (0.1, 0.3)  # that naive Bayes adds to what it counts
_LOGISTIC = (0.01, 0.1, 1.0, 10.0)  # C of a logistic regression of standardised numbers
_RIDGE = (10.0, 100.0, 1000.0)  # penalty of a least-squares classifier of the same
_SCALES = 2.0 ** np.arange(-4, 5)  # by which decisions become logits
_SMOOTHING = 0.02  # of labels, so that rows which are all right ask for no endless scale
_UNSEEN = -30.0  # logit of a label that no row has
_SPELLED = "words and characters"  # that n-grams are of, if not of words alone

Arrays = dict[str, np.ndarray]


class _Candidate(NamedTuple):
    """A model that may be chosen: its name, and what makes it."""

    name: str
    make: Callable[[], Any]


class _Held(NamedTuple):
    """What a candidate gave for rows that were held out."""

    accuracy: float
    loss: float
    scale: float


def ngrams(texts: Sequence[str], spelled: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Text and key of every n-gram: of one or two words and, if spelled, of characters of a word.

    The lowest bit of a key tells n-grams of characters from those of words.
    """
    split = [split_words(text[:_MAX_LETTERS].lower()) for text in texts]
    words = np.array([zlib.crc32(w.encode(errors="replace")) for some in split for w in some])
    words = words.astype(np.uint64)
    owner = np.repeat(np.arange(len(texts)), [len(some) for some in split])
    beside = owner[1:] == owner[:-1]
    keys = [words << np.uint64(1), (_mixed(words[:-1], words[1:]) << np.uint64(1))[beside]]
    rows = [owner, owner[1:][beside]]
    joined = [f" {' '.join(some)} " if some and spelled else "" for some in split]
    points = np.frombuffer("".join(joined).encode("utf-32-le", "replace"), np.uint32)
    places = np.repeat(np.arange(len(texts)), [len(one) for one in joined])
    spaces = np.append(0, np.cumsum(points == 32))
    found = points.astype(np.uint64)
    for n in _LENGTHS:
        found = _mixed(found[:-1], points[n - 1 :].astype(np.uint64))
        ends = np.arange(n, len(points) + 1)
        within = spaces[ends - 1] == spaces[ends - n + 1]  # no space but at its ends
        within &= places[ends - 1] == places[ends - n]
        keys.append(((found << np.uint64(1)) | np.uint64(1))[within])
        rows.append(places[n - 1 :][within])
    return np.concatenate(rows), np.concatenate(keys).view(np.int64)


def _mixed(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Hash of two numbers in their order (64 bits, as SplitMix mixes them)."""
    mixed = (one + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(29)
    return (mixed + other) * np.uint64(0x94D049BB133111EB)


class _Weighted(NamedTuple):
    """TF-IDF of the n-grams of texts that a table knows, sorted by text."""

    rows: np.ndarray
    columns: np.ndarray
    values: np.ndarray  # of unit length in each text, for words and for characters


def _weigh(
    rows: np.ndarray, columns: np.ndarray, keys: np.ndarray, idf: np.ndarray, count: int
) -> _Weighted:
    codes, often = np.unique(rows * np.int64(len(keys)) + columns, return_counts=True)
    rows, columns = codes // len(keys), codes % len(keys)
    values = (1 + np.log(often)) * idf[columns]
    block = 2 * rows + (keys[columns] & 1)
    norms = np.sqrt(np.bincount(block, values**2, minlength=2 * count))
    return _Weighted(rows, columns, (values / norms[block]).astype(np.float32))


def fit_ngrams(texts: Sequence[str], numbers: np.ndarray, labels: int, chosen: str = "") -> Arrays:
    """Fit a linear model to the n-grams of texts: of words and characters, or of many, words.

    Which one is decided on rows that are held out, unless it was `chosen` before.
    """
    letters = sum(min(_MAX_LETTERS, len(text)) for text in texts)
    if letters > _MAX_READ:
        some = np.linspace(0, len(texts) - 1, len(texts) * _MAX_READ // letters).astype(np.int64)
        texts, numbers = [texts[int(i)] for i in some], numbers[some]
    spelled = chosen.startswith(_SPELLED) if chosen else letters <= _MAX_SPELLED
    read = _SPELLED if spelled else "words"
    return _fit_sparse(*ngrams(texts, spelled), numbers, labels, chosen, read)


def ngram_logits(texts: Sequence[str], tables: Arrays) -> np.ndarray:
    """Logits (n, labels) of texts; n-grams that were not seen are ignored."""
    spelled = bool((tables["keys"] & 1).any())
    return _logits_at_once(texts, lambda some: ngrams(some, spelled), tables)


def neighbours(words: Sequence[str]) -> list[tuple[str, ...]]:
    """Each word of a sentence with the two before and the two after it."""
    around = ["", "", *words, "", ""]
    return [tuple(around[n : n + 5]) for n in range(len(words))]


def word_traits(windows: Sequence[tuple[str, ...]]) -> tuple[np.ndarray, np.ndarray]:
    """Row and key of what tells of each word: its form, ends and shape, and its neighbours."""
    keys: list[int] = []
    for before, left, word, right, after in windows:
        low, shape = word.lower(), "".join(map(_shape, word[:3]))
        about = (low, left.lower(), right.lower(), before.lower(), after.lower(), shape)
        ends = (low[-1:], low[-2:], low[-3:], left[-3:].lower(), right[-3:].lower(), low[:2])
        pairs = (f"{about[1]} {low}", f"{low} {about[2]}")
        traits = (*about, *ends, *pairs)
        keys += [zlib.crc32(f"{n} {x}".encode(errors="replace")) for n, x in enumerate(traits)]
    rows = np.repeat(np.arange(len(windows)), len(keys) // max(1, len(windows)))
    return rows, np.array(keys, np.int64) << 1


def _shape(letter: str) -> str:
    return "A" if letter.isupper() else "0" if letter.isdigit() else "a"


def fit_words(
    windows: Sequence[tuple[str, ...]], numbers: np.ndarray, labels: int, chosen: str = ""
) -> Arrays:
    """Fit a linear model to words with their neighbours, by hold-out unless one was `chosen`."""
    return _fit_sparse(*word_traits(windows), numbers, labels, chosen, "words and neighbours")


def word_logits(windows: Sequence[tuple[str, ...]], tables: Arrays) -> np.ndarray:
    """Logits (n, labels) of words with their neighbours."""
    return _logits_at_once(windows, word_traits, tables)


def _fit_sparse(
    rows: np.ndarray, found: np.ndarray, numbers: np.ndarray, labels: int, chosen: str, read: str
) -> Arrays:
    """Fit a linear model to the keys that rows have, of what is `read` there.

    Args:
        rows: the row of each key.
        found: the keys.
        numbers: the label of each row.
        labels: how many there are.
        chosen: which model was chosen before, if one was.
        read: what keys are of, in words.
    """
    from scipy.sparse import csr_matrix
    from sklearn.naive_bayes import MultinomialNB
    from sklearn.svm import LinearSVC

    count = len(numbers)
    keys, place = np.unique(found, return_inverse=True)
    pairs = np.unique(rows * np.int64(max(1, len(keys))) + place) % max(1, len(keys))
    often = np.bincount(pairs, minlength=len(keys))
    kept = np.sort(np.argsort(-often, kind="stable")[: max(1, _MAX_WEIGHTS // labels)])
    new = np.full(len(keys), -1)
    new[kept] = np.arange(len(kept))
    known = new[place] >= 0
    keys, idf = keys[kept], np.log((1 + count) / (1 + often[kept])) + 1
    weighted = _weigh(rows[known], new[place][known], keys, idf, count)
    matrix = csr_matrix((weighted.values, (weighted.rows, weighted.columns)), (count, len(keys)))
    models = [(f"naive Bayes, alpha={a:g}", partial(MultinomialNB, alpha=a)) for a in _BAYES]
    if chosen or matrix.nnz * labels <= _MAX_COMPARED:
        svm = partial(LinearSVC, random_state=0)
        models += [(f"linear SVM, C={c:g}", partial(svm, C=c)) for c in _SVM]
    candidates = [_Candidate(f"{read}, {name}", make) for name, make in models]
    fitted = _choose(matrix, numbers, labels, candidates, chosen)
    return {**fitted, "keys": keys, "idf": idf.astype(np.float32)}


def _logits_at_once(
    inputs: Sequence[Any],
    read: Callable[[Sequence[Any]], tuple[np.ndarray, np.ndarray]],
    tables: Arrays,
) -> np.ndarray:
    """Logits (n, labels) of inputs by the keys that are read of them, some at a time."""
    parts = [inputs[i : i + _AT_ONCE] for i in range(0, len(inputs), _AT_ONCE)]
    logits = [_some_logits(*read(some), len(some), tables) for some in parts]
    return np.concatenate([np.tile(tables["bias"], (0, 1)), *logits])


def _some_logits(rows: np.ndarray, found: np.ndarray, count: int, tables: Arrays) -> np.ndarray:
    keys, weights = tables["keys"], torch.from_numpy(tables["weights"])
    logits = np.tile(tables["bias"], (count, 1))
    if not len(found) or not len(keys):
        return logits
    place = np.minimum(np.searchsorted(keys, found), len(keys) - 1)
    known = keys[place] == found
    weighted = _weigh(rows[known], place[known], keys, tables["idf"], count)
    starts = torch.from_numpy(np.searchsorted(weighted.rows, np.arange(count)))
    columns, values = torch.from_numpy(weighted.columns), torch.from_numpy(weighted.values)
    total = F.embedding_bag(columns, weights, starts, mode="sum", per_sample_weights=values)
    return logits + total.numpy()


def fit_vectors(vectors: np.ndarray, numbers: np.ndarray, labels: int, chosen: str = "") -> Arrays:
    """Fit a linear model to standardised vectors (n, d), by hold-out unless one was `chosen`."""
    from sklearn.linear_model import LogisticRegression, RidgeClassifier

    mean, spread = vectors.mean(0), vectors.std(0)
    scale = 1 / (spread + 1e-3 * max(float(spread.mean()), 1e-6))
    models = [(f"ridge, alpha={a:g}", partial(RidgeClassifier, alpha=a)) for a in _RIDGE]
    if chosen or vectors.size * labels <= _MAX_PRODUCTS:
        logistic = partial(LogisticRegression, max_iter=100)
        models += [(f"logistic, C={c:g}", partial(logistic, C=c)) for c in _LOGISTIC]
    candidates = [_Candidate(*both) for both in models]
    fitted = _choose((vectors - mean) * scale, numbers, labels, candidates, chosen)
    weights = (fitted["weights"] * scale[:, None]).astype(np.float32)
    bias = (fitted["bias"] - mean @ weights).astype(np.float32)
    return {**fitted, "weights": weights, "bias": bias}


def vector_logits(vectors: np.ndarray, tables: Arrays) -> np.ndarray:
    """Logits (n, labels) of vectors (n, d)."""
    weights = tables["weights"]
    if len(weights) != vectors.shape[1]:
        raise UsageError(
            f"a linear model of {len(weights)} numbers, but inputs of {vectors.shape[1]}; "
            "give inputs of the size that it was trained on"
        )
    rows = [row @ weights for row in vectors]  # one by one: a product rounds by its shape
    return np.stack([*rows, *weights[:0]]).reshape(-1, weights.shape[1]) + tables["bias"]


def _choose(
    matrix: Any,
    numbers: np.ndarray,
    labels: int,
    candidates: Sequence[_Candidate],
    chosen: str = "",
) -> Arrays:
    """Weights of the candidate that is right most often on rows that are held out.

    `chosen` tells in words which, as bytes, by what its logits are multiplied, and how often it was
    right; given such words, that candidate is fitted to these rows.
    """
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it has not converged, or a label has few rows
        if not chosen:
            fold = np.arange(len(numbers)) % _FOLDS
            turns = range(_FOLDS if len(numbers) <= _SMALL else 1)
            held = [_held_out(matrix, numbers, labels, one, fold, turns) for one in candidates]
            best = max(range(len(held)), key=lambda n: (held[n].accuracy, -held[n].loss))
            chosen = _named(candidates[best], held[best].scale)
            chosen += f"; {100 * held[best].accuracy:.1f}% of held-out training rows"
        named = {_named(one, scale): (one, scale) for one in candidates for scale in _SCALES}
        one, scale = named[chosen.partition(";")[0]]
        weights, bias = _fitted(one.make(), matrix, numbers, labels)
    return {
        "weights": (scale * weights).astype(np.float32),
        "bias": np.where(bias > _UNSEEN, scale * bias, _UNSEEN).astype(np.float32),
        "chosen": np.frombuffer(chosen.encode(), np.uint8),
    }


def _named(candidate: _Candidate, scale: float) -> str:
    """What tells a candidate, with the scale of its logits, from all others."""
    return f"{candidate.name}, times {scale:g}"


def _held_out(
    matrix: Any,
    numbers: np.ndarray,
    labels: int,
    candidate: _Candidate,
    fold: np.ndarray,
    turns: range,
) -> _Held:
    """Accuracy of a candidate on rows that are held out in turn, and the best scale of logits."""
    logits, right = [], []
    for turn in turns:
        rest, some = fold != turn, fold == turn
        if not some.any() or len(np.unique(numbers[rest])) < 2:
            continue
        weights, bias = _fitted(candidate.make(), matrix[rest], numbers[rest], labels)
        logits.append(np.asarray(matrix[some] @ weights) + bias)
        right.append(numbers[some])
    if not logits:
        return _Held(0, 0, 1)
    decisions, wanted = torch.from_numpy(np.concatenate(logits)), np.concatenate(right)
    target = torch.from_numpy(wanted)
    smooth: Any = {"label_smoothing": _SMOOTHING}
    losses = [float(F.cross_entropy(scale * decisions, target, **smooth)) for scale in _SCALES]
    accuracy = float((decisions.argmax(1) == target).float().mean())
    return _Held(accuracy, min(losses), float(_SCALES[int(np.argmin(losses))]))


def _fitted(
    model: Any, matrix: Any, numbers: np.ndarray, labels: int
) -> tuple[np.ndarray, np.ndarray]:
    """Weights (d, labels) and bias (labels,) of a scikit-learn model fitted to rows."""
    model.fit(matrix, numbers)
    if hasattr(model, "coef_"):
        weights, bias = np.atleast_2d(model.coef_).T, np.atleast_1d(model.intercept_)
    else:  # naive Bayes
        weights, bias = model.feature_log_prob_.T, model.class_log_prior_
    if weights.shape[1] == 1:  # of two labels, the second against the first
        weights, bias = np.hstack([-weights, weights]) / 2, np.array([-bias[0], bias[0]]) / 2
    whole, biases = np.zeros((len(weights), labels)), np.full(labels, _UNSEEN)
    whole[:, model.classes_], biases[model.classes_] = weights, bias
    return whole, biases
