"""Texts with masks, as a masked language model reads them and with the masks filled in."""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from regard.data.tokenizer import Tokenizer, mask_id
from regard.errors import UsageError

_MASKS = ("[MASK]", "<mask>")  # how people write it, whatever the tokenizer says


class PartlyFilled(NamedTuple):
    """A text that is being filled in: its tokens, the masks left, and the tokens put so far."""

    ids: np.ndarray
    places: list[int]
    chosen: tuple[int, ...] = ()
    logprob: float = 0.0

    def put(self, token: int, logprob: float) -> "PartlyFilled":
        """Fill the first mask that is left."""
        ids = self.ids.copy()
        ids[self.places[0]] = token
        rest, chosen = self.places[1:], (*self.chosen, token)
        return PartlyFilled(ids, rest, chosen, self.logprob + logprob)


class GapText:
    """Encodes texts with masks, and fills tokens into the masks of a text.

    A text has at most `longest` tokens; of a longer one the part around its masks is read.
    """

    def __init__(self, tokenizer: Tokenizer, longest: int):
        self.tokenizer, self.longest = tokenizer, longest
        self.mask = mask_id(tokenizer)
        self.mask_token = tokenizer.mask_token or _MASKS[0]
        self.before, self.after = tokenizer.around("encoder")
        names = sorted({*_MASKS, self.mask_token}, key=len, reverse=True)
        self.mask_pattern = re.compile("|".join(map(re.escape, names)))
        self.pieces = [tokenizer.pieces([number])[0] for number in range(tokenizer.vocab)]
        self.wordpiece = any(piece.startswith("##") for piece in self.pieces)  # continues a word
        self.spaced = any(len(p) > 1 and p[0] == "▁" for p in self.pieces)  # begins one

    def encode(self, text: str, number: int, *, needs_mask: bool = True) -> PartlyFilled:
        """Encode a text with the special tokens around it, and find its masks."""
        masks = len(self.mask_pattern.findall(text))
        if needs_mask and not masks and text.strip():
            raise UsageError(
                f"text {number}: {text[:40]!r} has nothing to fill in; write {self.mask_token} "
                "for a word"
            )
        ids = self.encode_bare(text)
        places = [at for at, token in enumerate(ids) if token == self.mask]
        if len(places) != masks:
            raise UsageError(
                f"text {number}: the tokenizer finds {len(places)} of {masks} masks in "
                f"{text[:40]!r}; write {self.mask_token} for a word"
            )
        room = self.longest - len(self.before) - len(self.after)
        start = 0
        if len(ids) > room and not places:
            ids = ids[:room]
        if len(ids) > room:  # read what is around the masks
            if places[-1] - places[0] >= room:
                raise UsageError(f"text {number}: its masks are more than {room} pieces apart")
            middle = (places[0] + places[-1] + 1 - room) // 2
            start = max(0, min(middle, len(ids) - room))
            ids = ids[start : start + room]
        shift = len(self.before) - start
        whole = np.array([*self.before, *ids, *self.after], dtype=np.int64)
        return PartlyFilled(whole, [at + shift for at in places])

    def encode_bare(self, text: str) -> list[int]:
        """Encode a text with masks, with nothing around it."""
        if self.tokenizer.mask_token:
            text = self.mask_pattern.sub(lambda _: self.mask_token, text)
            return self.tokenizer.encode(text, specials=True)
        # a word brings the space before it along, so that a mask stands for both
        first, *rest = self._between_masks(text)
        ids = self.tokenizer.encode(first) if first else []
        for part in self.tokenizer.encode_parts(rest):
            ids += [self.mask, *part]
        return ids

    def _between_masks(self, text: str) -> list[str]:
        *parts, last = self.mask_pattern.split(text)
        return [part.removesuffix(" ") if self.spaced else part for part in parts] + [last]

    def word(self, token: int) -> str:
        """Spelling of a token, without a space before it."""
        if self.wordpiece:
            return self.pieces[token].removeprefix("##")
        return self.tokenizer.decode([token]).removeprefix(" ")

    def fill_in(self, text: str, tokens: Sequence[int]) -> str:
        """Put tokens in the place of a text's masks, each with a space before it or none."""
        whole, *rest = self._between_masks(text)
        for token, part in zip(tokens, rest, strict=True):
            piece = self.pieces[token]
            if self.wordpiece and piece.startswith("##"):
                whole = whole.removesuffix(" ")
            elif self.spaced and piece.startswith("▁") and whole:
                whole += " "
            whole += self.word(token) + part
        return whole
