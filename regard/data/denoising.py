"""Denoising pretraining: a text is to be restored from what is left of it.

T5's span corruption, BART's text infilling and sentence permutation are pure functions of what they
are given and a seed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from regard.data.batches import IndexBatches
from regard.data.documents import Texts, blocks
from regard.data.parallel import PairBatch, make_batch
from regard.data.seeds import mix
from regard.data.sentences import split_sentences
from regard.data.store import Store, tokenised
from regard.data.tokenizer import Tokenizer
from regard.errors import UsageError

_SENTINEL = "<extra_id_{}>"  # how T5's tokenizers name their sentinels
_SENTINELS = 100

Ids = Sequence[int] | np.ndarray


def cut_at_random(length: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Cut a length into so many parts of at least one, all ways being equally likely."""
    cuts = np.sort(rng.choice(length - 1, count - 1, replace=False)) + 1
    return np.diff(cuts, prepend=0, append=length)


def corrupt_spans(
    ids: Ids, sentinels: Sequence[int], seed: int, *, share: float = 0.15, mean: float = 3.0
) -> tuple[np.ndarray, np.ndarray]:
    """Take spans out of a text, and return what is left and what was taken (Raffel et al. 2020).

    Both name the spans by the same sentinels: `Thank you <X> me to your party <Y> week.` and
    `<X> for inviting <Y> last <Z>`. So together they hold the whole text.
    """
    ids = np.asarray(ids, dtype=np.int64)
    if len(ids) < 2 or len(sentinels) < 2:
        raise UsageError(
            f"a text of {len(ids)} pieces with {len(sentinels)} sentinels; "
            "to take a span out needs 2 of each"
        )
    if np.isin(ids, sentinels).any():
        raise UsageError("a text has sentinels of its own, so its spans could not be told apart")
    rng = np.random.default_rng(seed)
    taken = min(max(1, round(len(ids) * share)), len(ids) - 1)
    count = min(max(1, round(taken / mean)), len(ids) - taken, len(sentinels) - 1)
    # what is kept may be nothing before the first span and after the last, not between two
    kept = cut_at_random(len(ids) - taken + 2, count + 1, rng)
    kept[[0, -1]] -= 1
    lengths = cut_at_random(taken, count, rng)
    starts = np.cumsum(kept[:-1]) + np.cumsum(lengths) - lengths
    left, out, end = [], [], 0
    for name, start, length in zip(sentinels, starts.tolist(), lengths.tolist(), strict=False):
        left += [ids[end:start], [name]]
        end = start + length
        out += [[name], ids[start:end]]
    left.append(ids[end:])
    out.append([sentinels[count]])
    return np.concatenate(left).astype(np.int64), np.concatenate(out).astype(np.int64)


def infill(ids: Ids, mask: int, seed: int, *, share: float = 0.3, mean: float = 3.0) -> np.ndarray:
    """Put one mask in the place of each of some spans, which may be empty (Lewis et al. 2020).

    Their lengths are drawn by Poisson until this share of the text is gone.
    """
    ids = np.asarray(ids, dtype=np.int64)
    rng = np.random.default_rng(seed)
    budget = round(len(ids) * share)
    gaps = len(ids) - budget + 1  # no two spans touch
    lengths: list[int] = []
    while sum(lengths) < budget and len(lengths) < gaps:
        # a span may be empty where there are more tokens gone than masks: a text never grows
        least = int(len(lengths) >= sum(lengths))
        lengths.append(min(max(least, int(rng.poisson(mean))), budget - sum(lengths)))
    places = np.sort(rng.choice(gaps, len(lengths), replace=False)).tolist()
    out, end, gone = [], 0, 0
    for place, length in zip(places, lengths, strict=True):
        out += [ids[end : place + gone], [mask]]
        gone += length
        end = place + gone
    return np.concatenate([*out, ids[end:]]).astype(np.int64)


def permute_parts(ids: Ids, lengths: Ids, seed: int) -> np.ndarray:
    """Put the parts (sentences) of a text, which have these lengths, in another order."""
    parts = np.split(np.asarray(ids, dtype=np.int64), np.cumsum(lengths)[:-1])
    order = np.random.default_rng(seed).permutation(len(parts))
    return np.concatenate([parts[place] for place in order])


# Texts in pieces of at most a length, whose sentences are known


def cut_texts(
    texts: Iterable[Iterable[str]], tokenizer: Tokenizer, longest: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield stretches of texts: ids, of which there are at most so many, and those a sentence.

    A text comes in pieces. Joined, its stretches are all of it.
    """
    for text in texts:
        ids: list[int] = []
        lengths: list[int] = []
        for number, block in enumerate(blocks(text, "\n")):
            pieces = split_sentences(block)
            # what parts two sentences belongs to the second, as a space does to its word
            sentences = [a + b for a, b in zip(["", *pieces[1::2]], pieces[::2], strict=False)]
            rows = tokenizer.encode_parts(sentences) if number else _begun(sentences, tokenizer)
            rows += tokenizer.encode_parts(pieces[-1:]) if pieces and pieces[-1] else []
            for row in rows:
                for start in range(0, len(row), longest):
                    part = row[start : start + longest]
                    if len(ids) + len(part) > longest:
                        yield ids, lengths
                        ids, lengths = [], []
                    ids += part
                    lengths.append(len(part))
        if ids:
            yield ids, lengths


def _begun(sentences: list[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Split the sentences of a text's beginning into ids; its first word has no space before it."""
    first = next((i for i, sentence in enumerate(sentences) if sentence.strip()), 0)
    return [
        *tokenizer.encode_parts(sentences[:first]),
        *tokenizer.encode_batch(sentences[first : first + 1]),
        *tokenizer.encode_parts(sentences[first + 1 :]),
    ]


# Tokens for what was masked


class Sentinels(NamedTuple):
    """The tokens that stand for what was masked in a text."""

    mask: int
    spans: list[int]


def sentinels_of(tokenizer: Tokenizer, vocab: int, needed: int) -> Sentinels:
    """Tokenizer's own sentinels, or spare rows of a vocabulary."""
    named = [tokenizer.token_to_id(_SENTINEL.format(n)) for n in range(_SENTINELS)]
    spans = [n for n in named if n is not None] or list(range(tokenizer.vocab, vocab))
    mask = tokenizer.mask if tokenizer.mask is not None else (spans or [-1])[0]
    if mask < 0 or len(spans) < min(needed, 2):
        raise UsageError(
            f"the model has no tokens to mark what is taken out ({len(spans)} found); "
            "begin with a model that was trained by objective=spans or noise, or without init="
        )
    return Sentinels(mask, spans)


Corrupt = Callable[[np.ndarray, np.ndarray, Sentinels, int, float, float], tuple[Any, Any]]


def mask_spans(
    ids: np.ndarray, sentences: np.ndarray, marks: Sentinels, seed: int, share: float, mean: float
) -> tuple[Any, Any]:
    """Text without some spans, and the spans, named by the same sentinels (T5)."""
    return corrupt_spans(ids, marks.spans, seed, share=share, mean=mean)


def add_noise(
    ids: np.ndarray, sentences: np.ndarray, marks: Sentinels, seed: int, share: float, mean: float
) -> tuple[Any, Any]:
    """Text of shuffled sentences with some spans masked, and the text (BART)."""
    shuffled = permute_parts(ids, sentences, mix(seed, "order"))
    return infill(shuffled, marks.mask, seed, share=share, mean=mean), ids


def span_lengths(lengths: np.ndarray, share: float, mean: float) -> np.ndarray:
    """Approximate number of tokens in the spans of texts, with a sentinel for each."""
    masked = np.maximum(1, np.round(lengths * share))
    return (masked + np.maximum(1, masked / mean) + 1).astype(np.int64)


@dataclass(frozen=True)
class Corruption:
    """A way to corrupt a text, and what it needs."""

    corrupt: Corrupt
    sentinels: int  # tokens of its own
    share: float  # of a text that is masked, unless told
    target_lengths: Callable[[np.ndarray, float, float], np.ndarray]


CORRUPTIONS: dict[str, Corruption] = {
    "spans": Corruption(mask_spans, _SENTINELS, 0.15, span_lengths),
    "noise": Corruption(add_noise, 1, 0.3, lambda lengths, share, mean: lengths),
}


class DenoisingBatches:
    """Batch n of corrupted texts, a pure function of (seed, n)."""

    def __init__(
        self,
        texts: Texts,
        tokenizer: Tokenizer,
        corruption: str,
        *,
        vocab: int,
        share: float | None,
        mean_span: float,
        tokens: int,
        longest: int,
        seed: int,
    ):
        self.tokenizer, self.corruption = tokenizer, CORRUPTIONS[corruption]
        self.tokens, self.longest, self.seed = tokens, longest, seed
        self.sentinels = sentinels_of(tokenizer, vocab, self.corruption.sentinels)
        self.masked = self.corruption.share if share is None else share, mean_span
        self.stores = {part: self._tokenised(texts, part) for part in ("train", "valid")}
        self.plan = self._plan("train", tokens, seed)

    def _tokenised(self, texts: Texts, part: str) -> Store:
        """Cut a part into stretches of tokens, with the lengths of their sentences."""

        def rows() -> Iterator[tuple[list[int], list[int]]]:
            some = texts.parts[part]
            whole = [some] if texts.running else ([text] for text in some)
            cut = cut_texts(whole, self.tokenizer, self.longest)
            return (row for row in cut if len(row[0]) > 1)

        return tokenised(rows, texts.sha, self.tokenizer.sha, part, self.longest, "mending")

    def _plan(self, part: str, tokens: int, seed: int) -> IndexBatches:
        lengths = self.stores[part].lengths(0)
        targets = self.corruption.target_lengths(lengths, *self.masked)
        return IndexBatches([lengths + 1, targets + 1], tokens, seed)

    def _batch(self, part: str, rows: np.ndarray, n: int) -> PairBatch:
        ids, sentences = self.stores[part].columns
        pairs = [
            self.corruption.corrupt(
                ids[i], sentences[i], self.sentinels, mix(self.seed, part, n, int(i)), *self.masked
            )
            for i in rows
        ]
        sources, targets = zip(*pairs, strict=True)
        return make_batch(sources, targets, self.tokenizer, self.tokenizer)

    def __getitem__(self, n: int) -> PairBatch:
        """Batch n."""
        return self._batch("train", self.plan[n], n)

    def epoch(self) -> float:
        """Number of batches in which all texts are read once."""
        return self.plan.len_epoch()

    def valid(self) -> list[PairBatch]:
        """Validation part, always corrupted alike."""
        plan = self._plan("valid", max(4096, self.tokens), 0)
        return [self._batch("valid", plan[n], 0) for n in range(plan.len_epoch())]
