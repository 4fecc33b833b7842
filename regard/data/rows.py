"""Texts as an encoder reads them: rows of token ids with the features of their words."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.data.batches import IndexBatches, pad
from regard.data.features import WordFeatures, split_words
from regard.data.tokenizer import Sampler, Tokenizer, blank_id


class TokenRow(NamedTuple):
    """One text: token ids with the special tokens around, and for each its word and features."""

    ids: np.ndarray
    word_ids: np.ndarray  # -1 for special tokens
    features: np.ndarray | None = None  # (tokens, kinds)
    truncated: bool = False
    words: Sequence[str] = ()  # if their ids do not tell them
    text: str = ""  # the whole of it, for what reads no tokens


class TextBatch(NamedTuple):
    """Rows padded to the longest."""

    ids: Tensor
    lengths: Tensor
    features: Tensor | None
    rows: Sequence[TokenRow] = ()

    @property
    def tokens(self) -> int:
        """Number of tokens without padding."""
        return int(self.lengths.sum())

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Arguments of an encoder; the features of words are types of tokens there."""
        inputs = {"ids": self.ids, "lengths": self.lengths}
        return inputs if self.features is None else {**inputs, "types": self.features}


def collate(rows: Sequence[TokenRow], padding: int, device: Any = "cpu") -> TextBatch:
    """Pad rows to the longest."""
    ids, lengths = pad([row.ids for row in rows], padding)
    features = None
    if rows[0].features is not None:
        table = np.zeros((*ids.shape, rows[0].features.shape[1]), dtype=np.int64)
        for place, row in zip(table, rows, strict=True):
            place[: len(row.ids)] = row.features
        features = torch.from_numpy(table).to(device)
    return TextBatch(ids.to(device), lengths.to(device), features, rows)


class RowEncoder:
    """Makes rows of texts and of words: tokenised, truncated, with special tokens and features.

    Where a text has features, it is split into words, and each is tokenised by itself.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        features: WordFeatures | None = None,
        sampler: Sampler | None = None,
        *,
        bare: bool = False,
    ):
        """Take a tokenizer and, for BPE dropout, its sampler; `bare`: without special tokens."""
        self.tokenizer, self.features, self.sampler = tokenizer, features, sampler
        self.before, self.after = ([], []) if bare else tokenizer.around("encoder")
        self.alone = features is not None and features.alone
        self.blank = blank_id(tokenizer)

    def room(self, max_length: int) -> int:
        """Number of tokens of a text that fit beside the special tokens, at least one."""
        return max(1, max_length - len(self.before) - len(self.after))

    def texts(
        self, texts: Sequence[str], max_length: int, keys: Sequence[int] = ()
    ) -> list[TokenRow]:
        """Encode texts, truncated to a length; with BPE dropout by these keys, if there is one."""
        room = self.room(max_length)
        if self.features is not None:
            split = [split_words(text) for text in texts]
            pairs = zip(split, keys or [None] * len(texts), strict=True)
            rows = [self.words(words, max_length, key) for words, key in pairs]
            return [row._replace(text=text) for row, text in zip(rows, texts, strict=True)]
        if keys and self.sampler is not None:
            pairs = zip(texts, keys, strict=True)
            tokens = [self.sampler.encode(text, key) for text, key in pairs]
        else:
            tokens = self.tokenizer.encode_batch(texts)
        return [
            self._framed(ids[:room], range(min(room, len(ids))), None, len(ids) > room, text)
            for ids, text in zip(tokens, texts, strict=True)
        ]

    def words(self, words: Sequence[str], max_length: int, key: int | None = None) -> TokenRow:
        """Encode the words of a text, truncated to a length."""
        return self.row(words, self.pieces(words, key), max_length)

    def row(
        self, words: Sequence[str], pieces: Sequence[Sequence[int]], max_length: int
    ) -> TokenRow:
        """Make a row of words that are tokenised already."""
        ids = [i for some in pieces for i in some]
        word_ids = [n for n, some in enumerate(pieces) for _ in some]
        room = self.room(max_length)
        features = None if self.features is None else self.features.numbers(words)
        row = self._framed(ids[:room], word_ids[:room], features, len(ids) > room)
        return row._replace(words=words) if self.alone else row

    def pieces(self, words: Sequence[str], key: int | None = None) -> list[list[int]]:
        """Tokenise each word by itself into one token or more."""
        if self.alone:
            return [[self.blank]] * len(words)
        if key is not None and self.sampler is not None:
            return [self.sampler.encode(word, key) for word in words]
        return self.tokenizer.encode_words(words)

    def spelled(self, row: TokenRow) -> list[str]:
        """Text to show for each token of a row."""
        pieces = self.tokenizer.pieces(row.ids.tolist())
        if not row.words:
            return pieces
        word_ids: list[int] = row.word_ids.tolist()
        return [p if n < 0 else row.words[n] for p, n in zip(pieces, word_ids, strict=True)]

    def _framed(
        self,
        ids: Sequence[int],
        word_ids: Sequence[int],
        features: np.ndarray | None,
        truncated: bool,
        text: str = "",
    ) -> TokenRow:
        around = len(self.before), len(self.after)
        row = np.array([*self.before, *ids, *self.after], dtype=np.int64)
        if not len(row):  # nothing at all to read
            row, around = np.array([self.tokenizer.bos]), (1, 0)
        words = np.pad(np.array(word_ids, dtype=np.int64), around, constant_values=-1)
        if features is not None:
            features = np.pad(features[np.array(word_ids, dtype=np.int64)], (around, (0, 0)))
        return TokenRow(row, words, features, truncated, text=text)


class TextBatches:
    """Batch n of rows under a budget of padded tokens: a pure function of (seed, n)."""

    def __init__(
        self,
        rows: Sequence[TokenRow],
        encoder: RowEncoder,
        make: Callable[[np.ndarray, list[TokenRow], TextBatch], Any] = lambda *parts: parts,
        *,
        tokens: int,
        seed: int,
        max_rows: int | None = None,
        word_dropout: float = 0.0,
        feature_dropout: float = 0.0,
        again: Callable[[int, int], TokenRow] | None = None,
    ):
        """Take rows and what makes a batch of them: of their numbers, the rows, and their tensors.

        Words are masked, and features dropped, with these probabilities; for BPE dropout, `again`
        encodes row i anew in batch n.
        """
        self.rows, self.encoder, self.make, self.seed = rows, encoder, make, seed
        self.word_dropout, self.feature_dropout = word_dropout, feature_dropout
        self.again = again
        lengths = np.array([len(row.ids) for row in rows])
        self.batches = IndexBatches([lengths], tokens, seed, max_rows)

    def __getitem__(self, n: int) -> Any:
        """Batch n."""
        picked = self.batches[n]
        rng = np.random.Generator(np.random.PCG64([self.seed % 2**64, n, 2]))
        rows = [self._drop(self._row(int(i), n), rng) for i in picked]
        return self.make(picked, rows, collate(rows, self.encoder.tokenizer.pad))

    def epoch(self) -> float:
        """Number of batches in which all rows are read once."""
        return self.batches.len_epoch()

    def _row(self, i: int, n: int) -> TokenRow:
        if self.again is None:
            return self.rows[i]
        row = self.again(i, n)
        return row if not row.truncated else self.rows[i]

    def _drop(self, row: TokenRow, rng: np.random.Generator) -> TokenRow:
        ids, word_ids, features = row.ids, row.word_ids, row.features
        if self.word_dropout:
            dropped = rng.random(int(word_ids.max(initial=-1)) + 2) < self.word_dropout
            dropped[-1] = False  # special tokens are always seen
            ids = np.where(dropped[word_ids], self.encoder.blank, ids)
            if features is not None and self.encoder.alone:
                features = np.where(dropped[word_ids][:, None], 0, features)
        if features is not None and self.feature_dropout:
            features = np.where(rng.random(features.shape) < self.feature_dropout, 0, features)
        return row._replace(ids=ids, features=features)
