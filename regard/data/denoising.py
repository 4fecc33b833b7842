"""Denoising pretraining: a text is to be restored from what is left of it (T5, BART)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from regard.data.batches import IndexBatches
from regard.data.corrupt import corrupt_spans, cut_texts, infill, permute_parts
from regard.data.documents import Texts
from regard.data.parallel import PairBatch, make_batch
from regard.data.seeds import mix
from regard.data.store import Store, tokenised
from regard.data.tokenizer import Tokenizer
from regard.errors import UsageError

_SENTINEL = "<extra_id_{}>"  # how T5's tokenizers name their sentinels
_SENTINELS = 100


class Sentinels(NamedTuple):
    """The tokens that stand for what was masked in a text."""

    mask: int
    spans: list[int]


def sentinels_of(tokenizer: Tokenizer, vocab: int, needed: int) -> Sentinels:
    """Return the tokenizer's own sentinels, or spare rows of a vocabulary."""
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
    """Return a text without some spans, and the spans, named by the same sentinels (T5)."""
    return corrupt_spans(ids, marks.spans, seed, share=share, mean=mean)


def add_noise(
    ids: np.ndarray, sentences: np.ndarray, marks: Sentinels, seed: int, share: float, mean: float
) -> tuple[Any, Any]:
    """Return a text of shuffled sentences with some spans masked, and the text (BART)."""
    shuffled = permute_parts(ids, sentences, mix(seed, "order"))
    return infill(shuffled, marks.mask, seed, share=share, mean=mean), ids


def span_lengths(lengths: np.ndarray, share: float, mean: float) -> np.ndarray:
    """Return about how many tokens the spans of texts have, with a sentinel for each."""
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
        device: str = "cpu",
    ):
        self.tokenizer, self.corruption = tokenizer, CORRUPTIONS[corruption]
        self.tokens, self.longest, self.seed, self.device = tokens, longest, seed, device
        self.sentinels = sentinels_of(tokenizer, vocab, self.corruption.sentinels)
        self.masked = self.corruption.share if share is None else share, mean_span
        self.stores = {part: self._tokenised(texts, part) for part in ("train", "valid")}
        self.plan = self._plan("train", tokens, seed)

    def _tokenised(self, texts: Texts, part: str) -> Store:
        """Cut a part into stretches of tokens, with the lengths of their sentences."""

        def rows() -> Iterator[tuple[list[int], list[int]]]:
            cut = cut_texts(texts.parts[part], self.tokenizer, self.longest)
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
        return make_batch(sources, targets, self.tokenizer, self.tokenizer, self.device)

    def __getitem__(self, n: int) -> PairBatch:
        """Return batch n."""
        return self._batch("train", self.plan[n], n)

    def epoch(self) -> float:
        """Return in how many batches all texts are read once."""
        return self.plan.len_epoch()

    def valid(self) -> list[PairBatch]:
        """Return the validation part, always corrupted alike."""
        plan = self._plan("valid", max(4096, self.tokens), 0)
        return [self._batch("valid", plan[n], 0) for n in range(plan.len_epoch())]
