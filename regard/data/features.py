"""Hand-crafted features of words, beside their tokens: affixes, shape, and the words before."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from regard.errors import UsageError, lookup
from regard.files import read_json, write_atomically

_FILE = "features.json"
_MAX_FEATURES = 99_999
_MAX_LETTERS = 300  # of a feature; one of longer words is never common
_MIN_COUNT = 2  # how often a feature must be seen to be learnt

_WORD = re.compile(
    r"""(?:https?://|www\.)\S+|[\w.+-]{1,64}@[\w-]{1,64}(?:\.\w{1,20}){1,4}
    |\d+(?:[.,:/]\d+)*|[^\W\d_](?:\.[^\W\d_])+\.?
    |\w+?(?=n['’]t\b)|n['’]t\b|['’](?:s|m|d|ll|re|ve)\b|\w+|\.{2,}|-{2,}|[^\w\s]""",
    re.VERBOSE | re.IGNORECASE,
)
SHAPES = ((r"[^\W\d_a-z]+", "X"), (r"[a-z]+", "x"), (r"\d+", "9"))

FeatureFunction = Callable[[Sequence[str]], list[tuple[str, ...]]]


def split_words(text: str) -> list[str]:
    """Split a text into words and signs, the ends of don't and she's apart."""
    return _WORD.findall(text)


@lru_cache(maxsize=100_000)
def _affixes(word: str) -> tuple[str, ...]:
    low, shape = word.lower(), word[:40]
    for pattern, sign in SHAPES:
        shape = re.sub(pattern, sign, shape)
    features = [f"word {low}", f"shape {shape[:8]}"]
    features += [f"begin {low[:n]}" if len(low) >= n else "" for n in (1, 2, 3)]
    features += [f"end {low[-n:]}" if len(low) >= n else "" for n in (1, 2, 3, 4)]
    return tuple(features)


def affixes(words: Sequence[str]) -> list[tuple[str, ...]]:
    """Prefixes, suffixes and shape of each word."""
    return [_affixes(word) for word in words]


def _ngrams(words: Sequence[str], most: int) -> list[tuple[str, ...]]:
    low = ["<s>"] * most + [word.lower() for word in words]
    return [
        tuple(" ".join(low[i - n : i + 1]) for n in range(1, most + 1))
        for i in range(most, len(low))
    ]


# name -> the features of each word, as many of every one; "" is none
WORD_FEATURES: dict[str, FeatureFunction] = {
    "words": lambda words: [(f"word {word.lower()}",) for word in words],
    "affixes": affixes,
    "bigrams": lambda words: _ngrams(words, 1),
    "trigrams": lambda words: _ngrams(words, 2),
}


def feature_functions(names: str) -> list[FeatureFunction]:
    """Look features up by their names, such as affixes+bigrams, or none."""
    listed = [] if names == "none" else names.split("+")
    if len(set(listed)) != len(listed):
        raise UsageError(f"features={names[:60]} names some of them twice; keep one")
    return [lookup("features", name, WORD_FEATURES) for name in listed]


class WordFeatures:
    """The features that are known by a number; any other is nothing, which is number 0.

    Words may be known by them alone: then a word has no pieces, and a rare one no name.
    """

    def __init__(self, names: str, known: Sequence[str], alone: bool = False):
        self.names, self.known, self.alone = names, list(known), alone
        self.functions = feature_functions(names)
        self.kinds = sum(len(function(["a"])[0]) for function in self.functions)
        self.size = len(self.known) + 1
        self._numbers = {feature: n for n, feature in enumerate(self.known, 1)}
        file = {"names": names, "alone": alone, "known": self.known}
        self.text = json.dumps(file, ensure_ascii=False) + "\n"
        self.sha = hashlib.sha256(self.text.encode(errors="replace")).hexdigest()

    @classmethod
    def learn(
        cls, names: str, sentences: Iterable[Sequence[str]], most: int, alone: bool = False
    ) -> "WordFeatures":
        """Know so many of the features that are seen more than once, the most frequent ones."""
        counts: Counter[str] = Counter()
        functions = feature_functions(names)
        for words in sentences:
            for function in functions:
                counts.update(one for some in function(words) for one in some)
        del counts[""]
        often = [f for f, n in counts.items() if n >= _MIN_COUNT and len(f) <= _MAX_LETTERS]
        return cls(names, sorted(often, key=lambda f: (-counts[f], f))[:most], alone)

    @classmethod
    def load(cls, folder: Path) -> "WordFeatures":
        """Read the features of a folder, or say what is wrong with the file."""
        path = folder / _FILE
        file = read_json(path)
        names, known = file.get("names"), file.get("known")
        if not isinstance(names, str) or not isinstance(known, list) or len(known) > _MAX_FEATURES:
            raise UsageError(
                f"{path}: expected names and a list of at most {_MAX_FEATURES:,} known features"
            )
        if not all(isinstance(one, str) and 0 < len(one) <= _MAX_LETTERS for one in known):
            raise UsageError(f"{path}: a known feature that is not a short text")
        if len(set(known)) != len(known):
            raise UsageError(f"{path}: known features that are double")
        try:
            return cls(names, known, file.get("alone") is True)
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None

    def save(self, folder: Path) -> None:
        """Write the features beside a model."""
        write_atomically(folder / _FILE, self.text)

    def numbers(self, words: Sequence[str]) -> np.ndarray:
        """Numbers of the words' features, (words, kinds)."""
        get = self._numbers.get
        features: list[Any] = [function(words) for function in self.functions]
        rows = [[get(f, 0) for some in each for f in some] for each in zip(*features, strict=True)]
        return np.array(rows, dtype=np.int64).reshape(len(words), self.kinds)
