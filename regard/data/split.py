"""Which rows are kept from training to validate and to test on, by the hash of what they hold.

Copies of a row (but for case and space) have one hash, so they stay in one part; rows that are
added leave the parts of the others as they were, but for a few near a border. What was decided is
written into recipe.json, by which a model is later judged on the rows that it has not seen.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from regard.data.text_rows import pick
from regard.errors import UsageError, lookup

_SPACE = 2**64  # how many hashes there are
_MOST_STRATA = 1000  # labels by which rows are split evenly; of more, each has few rows
_SAMPLED = 1024  # hashes of training rows that are noted
_SEEN = 0.3  # share of training rows in data from which the held-out ones are to be picked


def fold(text: str) -> str:
    """Make a text that is the same for texts that differ only in case and space."""
    return " ".join(text.casefold().split())


def hash_text(text: str) -> int:
    """Hash a text to 64 bits, the same on every machine and in every session."""
    digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big")


@runtime_checkable
class Compact(Protocol):
    """Items in little memory, which know by what they are split."""

    @property
    def keys(self) -> np.ndarray:
        """Hash of each item."""
        ...

    def strata(self) -> list[str]:
        """Label by which each item is split evenly, or nothing."""
        ...


def key_of(text: str) -> int:
    """Hash of a text by which it is held out: the same for those that differ in case and space."""
    return hash_text(fold(text))


def keys_of(items: Sequence[Any]) -> np.ndarray:
    """Hash of each item: of the text itself, or of its source."""
    if isinstance(items, Compact):
        return items.keys
    sources = (item if isinstance(item, str) else item.source for item in items)
    return np.array([key_of(source) for source in sources], np.uint64)


def share_of(value: Any, key: str = "valid") -> float | None:
    """Share that valid= or test= names, if it names one and no file."""
    try:
        share = float(value or "")
    except (TypeError, ValueError):
        return None
    if not 0 < share < 1:
        raise UsageError(
            f"{key}={value} is neither a file nor a share between 0 and 1, such as 0.1"
        )
    return share


def shares_of(valid: Any, test: Any) -> dict[str, float]:
    """Shares that valid= and test= name, for those that do."""
    given = {"valid": share_of(valid), "test": share_of(test, "test")}
    shares = {part: share for part, share in given.items() if share is not None}
    if sum(shares.values()) > 0.9:
        raise UsageError(f"valid={valid} and test={test} leave too little to learn from")
    return shares


def shares_and_files(valid: Any, test: Any) -> tuple[dict[str, float], dict[str, Any]]:
    """Part what valid= and test= name into shares of train, and files."""
    shares, given = shares_of(valid, test), {"valid": valid, "test": test}
    return shares, {name: file for name, file in given.items() if name not in shares}


def usual_share(rows: int) -> float:
    """Share to validate on: a tenth, but 200 rows where a fifth has them; 2% of many."""
    count = min(2000.0, max(0.02 * rows, min(0.1 * rows, 500), min(0.2 * rows, 200)))
    return max(1.0, count) / max(1, rows)


@dataclass(frozen=True)
class Split:
    """Hashes below a border are valid, and those from another on are test, for each label."""

    bounds: dict[str, dict[str, int]] = field(default_factory=dict)  # part -> label -> border
    by: str = "text"  # or whole, or end for a running text
    sample: tuple[int, ...] = ()  # the smallest hashes of the training rows

    def parts(self, keys: Any, labels: Sequence[str] = ()) -> dict[str, np.ndarray]:
        """Numbers of the rows of each part."""
        keys = np.asarray(keys, np.uint64)
        valid, test = self.bounds.get("valid", {}), self.bounds.get("test", {})
        if labels and "" not in {*valid, *test}:
            label_of = _labels(keys, labels)
            own = [label_of[key] for key in keys.tolist()]
            low = _below(keys, [valid.get(label, 0) for label in own])
            high = ~_below(keys, [test.get(label, _SPACE) for label in own])
        else:
            low = _below(keys, [valid.get("", 0)])
            high = ~_below(keys, [test.get("", _SPACE)])
        which = {"train": ~low & ~high, "valid": low, "test": high & ~low}
        return {part: np.flatnonzero(which[part]) for part in ("train", *self.bounds)}

    def noting(self, keys: Any) -> "Split":
        """Split with a sample of the rows that are trained on."""
        return replace(self, sample=tuple(np.unique(keys)[:_SAMPLED].tolist()))

    def seen(self, keys: np.ndarray) -> float:
        """Share of rows that were trained on, as far as the sample tells, of rows not held out.

        The sample has the smallest hashes, and those that are held out to validate on are smaller.
        """
        if not self.sample:
            return 0.0
        exact, known = len(self.sample) < _SAMPLED, np.array(self.sample, np.uint64)
        near = keys if exact else keys[keys <= known[-1]]
        if len(near) < (1 if exact else 5):
            return 0.0  # too few to tell
        return float(np.isin(near, known).mean())

    def to_json(self) -> dict[str, Any]:
        """Split as plain values, hashes in hexadecimal."""
        bounds = {
            part: {label: f"{border:016x}" for label, border in some.items()}
            for part, some in self.bounds.items()
        }
        return {"by": self.by, **bounds, "sample": "".join(f"{key:016x}" for key in self.sample)}

    @classmethod
    def from_json(cls, value: Any) -> "Split | None":
        """Read what a recipe notes, or nothing where it does not."""
        try:
            bounds = {
                part: {str(label): int(border, 16) for label, border in value[part].items()}
                for part in ("valid", "test")
                if part in value
            }
            text = value["sample"]
            sample = tuple(int(text[i : i + 16], 16) for i in range(0, len(text), 16))
            return cls(bounds, str(value["by"]), sample)
        except (TypeError, KeyError, ValueError, AttributeError):
            return None


def _below(keys: np.ndarray, borders: Sequence[int]) -> np.ndarray:
    """True for each hash below its border, or below the only one, which may be beyond all."""
    last = np.array([min(border, _SPACE - 1) for border in borders], np.uint64)
    return (keys < last) | np.array([border >= _SPACE for border in borders])


def _labels(keys: np.ndarray, labels: Sequence[str]) -> dict[int, str]:
    """One label for all copies of a row, so that they stay together."""
    label_of: dict[int, str] = {}
    for key, label in zip(keys.tolist(), labels, strict=True):
        label_of[key] = min(label_of.get(key, label), label)
    return label_of


def plan_split(
    keys: Any, labels: Sequence[str], shares: Mapping[str, float | None], where: str
) -> Split:
    """Settle the borders for shares of the rows of every label; a share of None is the usual one.

    A border is that share of all hashes, which stays the same when rows are added; only where
    chance gives a label far too few or too many is it put between two of its rows. Rows without
    `labels` are alike.
    """
    keys = np.asarray(keys, np.uint64)
    every = np.unique(keys)
    if len(every) <= len(shares):
        raise UsageError(
            f"{where}: too few different rows to split a validation part off; give one with valid="
        )
    groups = {"": every}
    if any(labels):
        label_of, found = _labels(keys, labels), {}
        for key in sorted(label_of):
            found.setdefault(label_of[key], []).append(key)
        if len(found) <= _MOST_STRATA:
            groups = {label: np.array(some, np.uint64) for label, some in found.items()}
    bounds: dict[str, dict[str, int]] = {}
    taken = {label: 0 for label in groups}
    for part, share in shares.items():
        share = usual_share(len(every)) if share is None else share
        low = part == "valid"
        bounds[part] = {}
        for label, group in groups.items():
            border, count = _border(group, share, label, low, len(group) - 1 - taken[label])
            taken[label] += count
            bounds[part][label] = border
        if not any(_count(group, bounds[part][label], low) for label, group in groups.items()):
            # at least one row, of any label
            bounds[part] = {"": int(every[1] if low else every[-1])}
    mixed = len(bounds) > 1 and len(groups) > 1 and any("" in some for some in bounds.values())
    if mixed:  # borders are those of labels, or of all rows, for both parts alike
        return plan_split(keys, (), shares, where)
    return Split(bounds)


def _count(group: np.ndarray, border: int, low: bool) -> int:
    below = len(group) if border >= _SPACE else int(np.searchsorted(group, np.uint64(border)))
    return below if low else len(group) - below


def _border(group: np.ndarray, share: float, label: str, low: bool, most: int) -> tuple[int, int]:
    """Border that parts a share of sorted hashes off at one end, and how many that are."""
    expected = share * len(group)
    border = int(share * _SPACE) if low else _SPACE - int(share * _SPACE)
    count = _count(group, border, low)
    fits = abs(count - expected) <= max(0.99, expected / 4) and (count > 0 or expected < 1)
    if fits and count <= most:
        return border, count
    # where a label has few rows, some get one and others none, so that in all the share is right
    count = max(0, min(most, int(expected + hash_text(label) / _SPACE)))
    if low:
        return (int(group[count]) if count else 0), count
    return (int(group[len(group) - count]) if count else _SPACE), count


def describe_split(split: Split, sizes: Mapping[str, int], of: str) -> str:
    """Note on how many rows were split off."""
    total = sum(sizes.values())
    parts = [
        f"{sizes[part]:,} to {word}"
        for part, word in (("valid", "validate on"), ("test", "test on"))
        if part in split.bounds
    ]
    files = " and ".join(f"{part}=" for part in split.bounds)
    return (
        f"of {total:,} {of}, {' and '.join(parts)} were split off train by hash; give your own "
        f"with {files}"
    )


def _by_text(items: Sequence[Any], labels: Sequence[str], make: Callable[..., Split]) -> Any:
    keys = keys_of(items)
    split = make(keys, labels)
    return split.parts(keys, labels), split


def _whole(items: Sequence[Any], labels: Sequence[str], make: Callable[..., Split]) -> Any:
    """Hold out only texts that are part of no other; all that is part of them is in no part."""
    split_words = [tuple(fold(item.source).split()) for item in items]
    known = set(split_words)
    sizes = sorted({len(words) for words in known})

    def parts(words: tuple[str, ...]) -> set[tuple[str, ...]]:
        runs = ((at, n) for n in sizes if n <= len(words) for at in range(len(words) - n + 1))
        return {words[at : at + n] for at, n in runs} & known

    inner: set[tuple[str, ...]] = set()
    for words in sorted(known, key=len, reverse=True):
        if words not in inner:  # else its parts are known as those of a longer one
            inner |= parts(words) - {words}
    outer = [i for i, words in enumerate(split_words) if words not in inner]
    keys = keys_of([items[i] for i in outer])
    own = [labels[i] for i in outer] if labels else []
    split = replace(make(keys, own), by="whole")
    numbers = {part: [outer[i] for i in some] for part, some in split.parts(keys, own).items()}
    held = [i for part, some in numbers.items() if part != "train" for i in some]
    gone = set().union(*(parts(split_words[i]) for i in held))
    numbers["train"] = [i for i, words in enumerate(split_words) if words not in gone]
    return numbers, split


# name -> how rows are split: each by itself, or with all that is part of it
SPLITS: dict[str, Callable[..., Any]] = {"text": _by_text, "whole": _whole}


class RowSplitter:
    """Keeps rows from training by the hash of their source, evenly by label.

    `items` returns the items of rows, each with its source and perhaps labels, and `pick` some of
    the rows by their numbers.
    """

    def __init__(
        self,
        of: str,
        by: str = "text",
        items: Callable[[Any], Sequence[Any]] = lambda rows: rows,
        pick: Callable[[Any, Any], Any] = pick,
    ):
        self.of, self.items, self.pick = of, items, pick
        lookup("valid_by", by, SPLITS)
        self.by = by

    def split(
        self,
        rows: Any,
        shares: Mapping[str, float | None],
        where: str,
        notes: list[str],
        trained: Split | None = None,
    ) -> tuple[dict[str, Any], Split]:
        """Split parts off the rows of train: as a model that was trained on them, or by shares."""
        items = self.items(rows)
        if trained is not None and trained.bounds and _seen(items, trained)[0] >= _SEEN:
            numbers, split = _numbers_of(items, trained)
            notes.append(f"{where}: split as when the model was trained on it")
        else:

            def make(keys: Sequence[int], labels: Sequence[str]) -> Split:
                return plan_split(keys, labels, shares, where)

            numbers, split = SPLITS[self.by](items, _strata(items), make)
            sizes = {part: len(some) for part, some in numbers.items()}
            notes.append(describe_split(split, sizes, self.of))
        return {part: self.pick(rows, some) for part, some in numbers.items()}, split

    def held_out(self, rows: Any, part: str, trained: Split, where: str, notes: list[str]) -> Any:
        """Rows on which a model may be judged, and note what is to be known.

        Where it was trained on much of them, these are the rows that were held out; where none
        were, the user is warned.
        """
        items = self.items(rows)
        count = len(items)
        share, numbers = _seen(items, trained)
        if not share:
            return rows
        if share >= _SEEN and len(numbers.get(part, ())):
            if part != "train":
                notes.append(
                    f"{where}: the model was trained on this file; judged on the "
                    f"{len(numbers[part]):,} of its {count:,} {self.of} that were held out ({part})"
                )
            return self.pick(rows, numbers[part])
        if part != "train":
            held = [n for n in trained.bounds if len(numbers.get(n, ())) and share >= _SEEN]
            remedy = f"; part={held[0]} judges on those held out" if held else ""
            level = "warning" if share >= _SEEN else "note"
            notes.append(
                f"{level}: {where}: about {share:.1%} of these {count:,} {self.of} were trained "
                f"on, so the scores are too good for new ones{remedy}"
            )
        return rows

    def sampled(self, split: Split, train: Any) -> Split:
        """Split with a sample of the rows that are trained on."""
        return split.noting(keys_of(self.items(train)))


def _seen(items: Sequence[Any], trained: Split) -> tuple[float, dict[str, Any]]:
    """About what share of items a model was trained on, and which are of each of its parts."""
    if not trained.sample or not len(items):
        return 0.0, {}
    if not trained.bounds:
        return trained.seen(keys_of(items)), {}
    numbers = _numbers_of(items, trained)[0]
    kept = keys_of(items)[np.asarray(numbers["train"], np.int64)]
    return trained.seen(kept) * len(kept) / len(items), numbers


def _numbers_of(items: Sequence[Any], split: Split) -> tuple[dict[str, Any], Split]:
    """Items of each part, by a known split."""
    make = lookup("valid_by", split.by, SPLITS)
    return make(items, _strata(items), lambda keys, labels: split)


def _strata(items: Sequence[Any]) -> list[str]:
    """The one label by which each item is split evenly; nothing where some have several."""
    if isinstance(items, Compact):
        return items.strata()
    labels: list[tuple[str, ...]] = [getattr(item, "labels", ()) for item in items]
    single = all(len(some) == 1 and some[0] for some in labels)
    return [some[0] for some in labels] if single else []
