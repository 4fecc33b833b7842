"""Whole-word masking for masked language models (Devlin et al. 2019)."""

import re

import numpy as np
import torch

from regard.data.documents import TokenisedTexts
from regard.data.tokenize import SPACELESS
from regard.data.tokenizer import Tokenizer, mask_id
from regard.data.windows import Packed, TextCrops, TokenBatch, TokenBatches

_SPACELESS_CHARACTER = re.compile(f"[{SPACELESS}]")
_MASKED, _KEPT = 0.8, 0.1  # shares of the chosen tokens; the rest become random ones


class WholeWordMasking:
    """Chooses whole words, seen from token ids alone, and masks their tokens.

    Of the chosen tokens 80% become the mask, 10% a random token, and 10% stay.
    """

    def __init__(self, tokenizer: Tokenizer):
        self.bos, self.eos, self.mask_id = tokenizer.bos, tokenizer.eos, mask_id(tokenizer)
        self.special = np.array(sorted(tokenizer.special_ids))
        self.plain = np.setdiff1d(np.arange(tokenizer.vocab), self.special)
        pieces = [tokenizer.pieces([number])[0] for number in range(tokenizer.vocab)]
        wordpiece = any(piece.startswith("##") for piece in pieces)  # it marks what continues
        self.continues = np.array(
            [piece.startswith("##") if wordpiece else _within_word(piece[:1]) for piece in pieces]
        )
        self.continued = np.array([wordpiece or _within_word(piece[-1:]) for piece in pieces])
        raw = [len(piece) == 6 and piece.startswith("<0x") for piece in pieces]
        for table in (self.continues, self.continued):  # the bytes of a letter belong together
            table[raw] = True
            table[self.special] = False

    def starts(self, ids: np.ndarray) -> np.ndarray:
        """True for each token (b, l) that begins a word."""
        starts = np.ones(ids.shape, dtype=bool)
        starts[:, 1:] = ~(self.continues[ids[:, 1:]] & self.continued[ids[:, :-1]])
        return starts

    def mask(
        self, ids: np.ndarray, share: float, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens (b, l) with a share of the words masked, and which are to be predicted."""
        word = np.cumsum(self.starts(ids)) - 1
        real = ~np.isin(ids, self.special)
        drawn = rng.random(ids.size)
        chosen = (drawn[word] < share).reshape(ids.shape) & real
        if not chosen.any() and real.any():  # one at least
            chosen = (word == word[np.flatnonzero(real)[0]]).reshape(ids.shape) & real
        fate = rng.random(ids.shape)
        random = self.plain[rng.integers(0, len(self.plain), ids.shape)]
        masked = np.where(chosen & (fate < _MASKED), self.mask_id, ids)
        return np.where(chosen & (fate >= _MASKED + _KEPT), random, masked), chosen


def _within_word(character: str) -> bool:
    """True if a character is part of a word that is written together."""
    return character.isalnum() and not _SPACELESS_CHARACTER.match(character)


class MaskedBatches(TokenBatches):
    """Windows in which the tokens of masked words are predicted from all around them."""

    def __init__(
        self,
        texts: TokenisedTexts,
        part: str,
        masking: WholeWordMasking,
        *,
        context: int,
        batch_tokens: int,
        share: float,
        seed: int,
    ):
        self.masking, self.share, self.seed = masking, share, seed % 2**64
        column, rows = texts.columns[part], max(1, batch_tokens // context)
        self.windows = (
            TextCrops(column.ids, rows, max(1, context - 2), seed)
            if texts.running
            else Packed(column, rows, context, context, seed)
        )

    def __getitem__(self, n: int) -> TokenBatch:
        """Batch n."""
        ids, documents, _ = self.windows[n]
        ids = ids.astype(np.int64)
        if documents is None:
            ids = np.pad(ids, ((0, 0), (1, 1)))
            ids[:, 0], ids[:, -1] = self.masking.bos, self.masking.eos
        rng = np.random.Generator(np.random.PCG64([self.seed, n, 1]))
        masked, chosen = self.masking.mask(ids, self.share, rng)
        places = np.flatnonzero(chosen)
        reads, at, writes = map(torch.from_numpy, (masked, places, ids.ravel()[places]))
        numbers = None if documents is None else torch.from_numpy(documents)
        return TokenBatch(reads, numbers, at, writes, len(places), ids.size)
