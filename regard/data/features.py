"""What there is to know of words beside their pieces: how they are written, what stands before."""

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

FILE = "features.json"
MOST = 99_999
LONGEST = 300  # letters of a feature; one of longer words is never common
LEAST = 2  # how often a feature must be seen to be learnt

WORD = re.compile(
    r"""(?:https?://|www\.)\S+|[\w.+-]{1,64}@[\w-]{1,64}(?:\.\w{1,20}){1,4}
    |\d+(?:[.,:/]\d+)*|[^\W\d_](?:\.[^\W\d_])+\.?
    |\w+?(?=n['’]t\b)|n['’]t\b|['’](?:s|m|d|ll|re|ve)\b|\w+|\.{2,}|-{2,}|[^\w\s]""",
    re.VERBOSE | re.IGNORECASE,
)
SHAPES = ((r"[^\W\d_a-z]+", "X"), (r"[a-z]+", "x"), (r"\d+", "9"))

Tell = Callable[[Sequence[str]], list[tuple[str, ...]]]


def split_words(text: str) -> list[str]:
    """Split a text into words and signs, the ends of don't and she's apart."""
    return WORD.findall(text)


@lru_cache(maxsize=100_000)
def _affixes(word: str) -> tuple[str, ...]:
    low, shape = word.lower(), word[:40]
    for pattern, sign in SHAPES:
        shape = re.sub(pattern, sign, shape)
    found = [f"word {low}", f"shape {shape[:8]}"]
    found += [f"begin {low[:n]}" if len(low) >= n else "" for n in (1, 2, 3)]
    found += [f"end {low[-n:]}" if len(low) >= n else "" for n in (1, 2, 3, 4)]
    return tuple(found)


def affixes(words: Sequence[str]) -> list[tuple[str, ...]]:
    """Return of each word how it begins, ends and is written."""
    return [_affixes(word) for word in words]


def _before(words: Sequence[str], most: int) -> list[tuple[str, ...]]:
    low = ["<s>"] * most + [word.lower() for word in words]
    return [
        tuple(" ".join(low[i - n : i + 1]) for n in range(1, most + 1))
        for i in range(most, len(low))
    ]


# name -> what there is to know of each word, as many things of every one; "" is nothing
FEATURES: dict[str, Tell] = {
    "words": lambda words: [(f"word {word.lower()}",) for word in words],
    "affixes": affixes,
    "bigrams": lambda words: _before(words, 1),
    "trigrams": lambda words: _before(words, 2),
}


def named(names: str) -> list[Tell]:
    """Look features up by their names, such as affixes+bigrams, or none."""
    found = [] if names == "none" else names.split("+")
    if len(set(found)) != len(found):
        raise UsageError(f"features={names[:60]} names some of them twice; keep one")
    return [lookup("features", name, FEATURES) for name in found]


class Features:
    """The features that are known by a number; any other is nothing, which is number 0.

    Words may be known by them alone: then a word has no pieces, and a rare one no name.
    """

    def __init__(self, names: str, known: Sequence[str], alone: bool = False):
        self.names, self.known, self.alone = names, list(known), alone
        self.tells = named(names)
        self.kinds = sum(len(tell(["a"])[0]) for tell in self.tells)
        self.size = len(self.known) + 1
        self._numbers = {feature: n for n, feature in enumerate(self.known, 1)}
        told = {"names": names, "alone": alone, "known": self.known}
        self.text = json.dumps(told, ensure_ascii=False) + "\n"
        self.sha = hashlib.sha256(self.text.encode(errors="replace")).hexdigest()

    @classmethod
    def learn(
        cls, names: str, sentences: Iterable[Sequence[str]], most: int, alone: bool = False
    ) -> "Features":
        """Know so many of the features that are seen more than once, the most frequent ones."""
        counts: Counter[str] = Counter()
        tells = named(names)
        for words in sentences:
            for tell in tells:
                counts.update(one for some in tell(words) for one in some)
        del counts[""]
        often = [f for f, n in counts.items() if n >= LEAST and len(f) <= LONGEST]
        return cls(names, sorted(often, key=lambda f: (-counts[f], f))[:most], alone)

    @classmethod
    def load(cls, folder: Path) -> "Features":
        """Read the features of a folder, or say what is wrong with the file."""
        path = folder / FILE
        file = read_json(path)
        names, known = file.get("names"), file.get("known")
        if not isinstance(names, str) or not isinstance(known, list) or len(known) > MOST:
            raise UsageError(
                f"{path}: expected names and a list of at most {MOST:,} known features"
            )
        if not all(isinstance(one, str) and 0 < len(one) <= LONGEST for one in known):
            raise UsageError(f"{path}: a known feature that is no short text")
        if len(set(known)) != len(known):
            raise UsageError(f"{path}: known features that are double")
        try:
            return cls(names, known, file.get("alone") is True)
        except UsageError as mistake:
            raise UsageError(f"{path}: {mistake}") from None

    def save(self, folder: Path) -> None:
        """Write the features beside a model."""
        write_atomically(folder / FILE, self.text)

    def numbers(self, words: Sequence[str]) -> np.ndarray:
        """Return the numbers of the words' features, (words, kinds)."""
        get = self._numbers.get
        told: list[Any] = [tell(words) for tell in self.tells]
        found = [[get(f, 0) for some in each for f in some] for each in zip(*told, strict=True)]
        return np.array(found, dtype=np.int64).reshape(len(words), self.kinds)
