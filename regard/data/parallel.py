"""A parallel corpus as training batches: tokenised once, framed by special tokens, padded."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from torch import Tensor

from regard.data.batches import IndexBatches, pad
from regard.data.pairs import Corpus, Pair
from regard.data.seeds import mix
from regard.data.store import StoreRow, tokenised_parts
from regard.data.text_rows import in_batches, portions, spread
from regard.data.tokenize import train_tokenizer
from regard.data.tokenizer import Tokenizer

SIDES = ("source", "target")
_SOME = 2000  # pairs whose letters are compared
_MOST_LEARNT = 1 << 26  # bytes of pairs that tokenizers are learnt from; of more, a sample


# Tokenizers


def same_letters(pairs: Sequence[Pair]) -> bool:
    """True if both sides are written in the same letters, so that one vocabulary suits."""
    letters = [
        {c for p in pairs[:_SOME] for c in getattr(p, side) if c.isalpha()} for side in SIDES
    ]
    return len(letters[0] & letters[1]) > 0.5 * min(map(len, letters), default=0)


def learn_tokenizers(
    pairs: Sequence[Pair], kind: str, vocab: int, vocabularies: str = "auto"
) -> tuple[Tokenizer, Tokenizer]:
    """Train one tokenizer for both sides, or one for each.

    `vocabularies` is joint, separate, or auto: joint where both sides share their letters.
    """
    same = vocabularies == "auto" and same_letters(pairs)
    pairs = spread(pairs, _MOST_LEARNT)
    if vocabularies == "joint" or same:
        texts = (text for pair in pairs for text in (pair.source, pair.target))
        joint = train_tokenizer(texts, kind=kind, vocab=vocab)
        return joint, joint
    texts_of = ([getattr(pair, side) for pair in pairs] for side in SIDES)
    source, target = (train_tokenizer(texts, kind=kind, vocab=vocab) for texts in texts_of)
    return source, target


# Batches


class PairBatch(NamedTuple):
    """Padded sources, and targets shifted: `reads` for the decoder, `writes` to be predicted."""

    source: Tensor
    source_lengths: Tensor
    reads: Tensor
    writes: Tensor  # -1 is padding
    tokens: int  # to be predicted
    read: int  # of both sides


def make_batch(
    sources: Sequence[np.ndarray],
    targets: Sequence[np.ndarray],
    source: Tokenizer,
    target: Tokenizer,
) -> PairBatch:
    """Put the special tokens around sources and targets, and pad them."""
    before, after = (np.array(ids, dtype=np.int64) for ids in source.around("source"))
    framed = [np.concatenate([before, row, after]) for row in sources]
    ids, lengths = pad(framed, source.pad)
    reads, _ = pad([np.concatenate([[target.begin], row]) for row in targets], target.pad)
    writes, target_lengths = pad([np.append(row, target.eos) for row in targets], -1)
    tokens = int(target_lengths.sum())
    read = tokens + int(lengths.sum())
    return PairBatch(ids, lengths, reads, writes, tokens, read)


class PairBatches:
    """Batch n of a parallel corpus, a pure function of (seed, n).

    Pairs with a side of more than `longest` tokens are left out.
    """

    def __init__(
        self,
        corpus: Corpus,
        tokenizers: tuple[Tokenizer, Tokenizer],
        *,
        tokens: int,
        longest: int,
        seed: int,
        bpe_dropout: float = 0.0,
    ):
        self.pairs, self.tokenizers = corpus.parts["train"], tokenizers
        self.longest, self.seed = longest, seed
        shas = [tokenizer.sha for tokenizer in tokenizers]
        parts = [partial(self._rows, some) for some in portions(self.pairs)]
        nothing = f"every pair is longer than max_length={longest} pieces; raise it"
        self.store = tokenised_parts(parts, "pairs", corpus.sha, *shas, longest, nothing=nothing)
        self.left_out = len(self.pairs) - len(self.store)
        lengths = [(self.store.lengths(i) + 1).astype(np.int32) for i in (0, 1)]
        self.plan = IndexBatches(lengths, tokens, seed)
        self.samplers = [t.sampler(bpe_dropout, seed) for t in tokenizers if bpe_dropout]

    def _rows(self, some: range) -> Iterator[StoreRow]:
        """Yield the ids of both sides of each of some pairs that is kept, and which pair it is."""
        place = some.start
        for pairs in in_batches(self.pairs, some):
            sides = [
                tokenizer.encode_batch([getattr(pair, side) for pair in pairs])
                for side, tokenizer in zip(SIDES, self.tokenizers, strict=True)
            ]
            for number, (a, b) in enumerate(zip(*sides, strict=True), place):
                if max(len(a), len(b)) <= self.longest:
                    yield a, b, [number]
            place += len(pairs)

    def epoch(self) -> float:
        """Number of batches in which all pairs are read once."""
        return self.plan.len_epoch()

    def __getitem__(self, n: int) -> PairBatch:
        """Batch n; with BPE dropout it is split into pieces anew."""
        rows = self.plan[n]
        if self.samplers:
            sources, targets = (self._sampled(column, rows, n) for column in (0, 1))
        else:
            sources, targets = ([self.store[column][i] for i in rows] for column in (0, 1))
        return make_batch(sources, targets, *self.tokenizers)

    def _sampled(self, column: int, rows: np.ndarray, n: int) -> list[np.ndarray]:
        """Split one side of some pairs by BPE dropout, at most twice as long as without."""
        texts = [getattr(self.pairs[self.store[2][i][0]], SIDES[column]) for i in rows]
        keys = [mix(self.seed, n, int(i)) for i in rows]
        ids = map(self.samplers[column].encode, texts, keys)
        return [np.asarray(row[: 2 * self.longest]) for row in ids]
