"""Constraints of decoding: how texts begin, what may follow, and when they end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from regard.errors import UsageError

BOS, EOS = 1, 2
# No text is longer than this unless max_length says so.
MAX_TEXT_TOKENS = 512

# when a beam search ends: ours, and those of transformers
BEAM_STOPPINGS = ("patience", "early", "length", "never")


class ByRow:
    """A change of logits that must know which sentence each row is of."""

    def __call__(self, logits: Tensor, written: Tensor, number: Tensor) -> Tensor:
        """Change the logits (rows, vocab) of rows with these tokens, of sentences by number."""
        raise NotImplementedError


# A change of logits (b, vocab), in place or not, that knows the tokens written so far (b, t).
Adjust = Callable[[Tensor, Tensor], Tensor] | ByRow
# The most tokens of a text: for all, for each sentence, or (None) by the length of its source.
Limit = int | Sequence[int] | Tensor | None
# Called with the number of a sentence and its newest token; True ends the text there.
OnToken = Callable[[int, int], bool | None]


@dataclass(frozen=True)
class Constraints:
    """What may be written for the sources of a batch, beside how it is searched for.

    Args:
        bos: token that each text is written after.
        begin: tokens (b) or (b, l) that each text is written after, instead of bos.
        eos: token that ends a text and is not part of it.
        ends: tokens that end a text and are part of it.
        prefix: tokens that each text begins with, one sequence for each source.
        max_length: most tokens of a text, for all or for each source; instead of the option's.
        adjust: changes of the logits.
        on: "logits" or "logprobs": what a beam search adjusts.
        renormalise: make a beam's adjusted log-probabilities sum to 1 again.
        stopping: when a beam search ends: patience, early, length or never.
        patience: finished texts that a beam search waits for, as a multiple of the beam.
        lines: numbers of the sources for random draws, which depend on nothing else but the seed.
        seed: random seed of sampling, instead of the option's.
        on_token: called with (source, token) after each token; True ends the text.
    """

    bos: int = BOS
    begin: Tensor | None = None
    eos: int = EOS
    ends: Sequence[int] = ()
    prefix: Sequence[Sequence[int]] | None = None
    max_length: Limit = None
    adjust: Sequence[Adjust] = ()
    on: str = "logits"
    renormalise: bool = False
    stopping: str = "patience"
    patience: float = 1.0
    lines: Sequence[int] | None = None
    seed: int | None = None
    on_token: OnToken | None = None

    def first_tokens(self, source: Tensor) -> Tensor:
        """Tokens (b, l) that the text of each source is written after."""
        if self.begin is None:
            return torch.full((source.shape[0], 1), self.bos, device=source.device)
        if len(self.begin) != source.shape[0]:
            raise UsageError(f"{len(self.begin)} first tokens for {source.shape[0]} sentences")
        return self.begin.reshape(len(self.begin), -1)

    def prefixes(self, count: int) -> Sequence[Sequence[int]]:
        """Prefix of the text of each of so many sources."""
        prefixes = [[]] * count if self.prefix is None else self.prefix
        if len(prefixes) != count:
            raise UsageError(f"{len(prefixes)} prefixes for {count} sentences; give one for each")
        if any(self.eos in ids for ids in prefixes):
            raise UsageError(
                f"a prefix contains the end of the text, token {self.eos}; leave it out"
            )
        return prefixes

    def limits(self, source: Tensor, lengths: Tensor | None, usual: int | None) -> list[int]:
        """Most tokens of the text of each source; `usual` if nothing is said."""
        count = source.shape[0]
        prefixes, most = self.prefixes(count), self.max_length
        if most is None:
            most = usual
        if most is None:
            read = [source.shape[1]] * count if lengths is None else lengths.tolist()
            pairs = zip(read, prefixes, strict=True)
            limits = [usual_limit(n) + len(ids) for n, ids in pairs]
        else:
            limits = [most] * count if isinstance(most, int) else list(map(int, most))
        if len(limits) != count:
            raise UsageError(f"{len(limits)} values of max_length for {count} sentences")
        for limit, ids in zip(limits, prefixes, strict=True):
            if limit < 1:
                raise UsageError(f"max_length={limit} leaves nothing to write; choose 1 or more")
            if limit < len(ids):
                raise UsageError(f"a prefix of {len(ids)} tokens is longer than max_length={limit}")
        return limits

    def is_end(self, tokens: Tensor) -> Tensor:
        """True for tokens that end a text."""
        is_end = tokens == self.eos
        for end in self.ends:
            is_end = is_end | (tokens == end)
        return is_end

    def adjusted(self, logits: Tensor, written: Tensor, number: Tensor) -> Tensor:
        """Logits (rows, vocab) after all changes; rows have written tokens, sentences a number."""
        for change in self.adjust:
            if isinstance(change, ByRow):
                each = number.repeat_interleave(len(logits) // len(number))
                logits = change(logits, written, each)
            else:
                logits = change(logits, written)
        return logits


UNCONSTRAINED = Constraints()


def usual_limit(length: int) -> int:
    """Most tokens of a text whose source has so many."""
    return min(MAX_TEXT_TOKENS, 10 + length + length // 2)


@dataclass(frozen=True)
class Forbid:
    """Tokens that are never generated."""

    ids: tuple[int, ...]

    def __call__(self, logits: Tensor, written: Tensor) -> Tensor:
        """Logits (b, vocab) of -inf for these tokens, in place."""
        return logits.index_fill_(1, logits.new_tensor(self.ids).long(), -inf)


def forbid(*ids: int) -> Forbid:
    """Never generate these tokens."""
    return Forbid(ids)


def stop_repetition(times: int = 8, longest: int = 32, eos: int = EOS) -> Adjust:
    """End a text that has repeated its last tokens, up to `longest` of them, so many times."""
    if times < 2 or longest < 1:
        raise UsageError(f"times={times}, longest={longest}; expected at least 2 and 1")

    def adjust(logits: Tensor, written: Tensor) -> Tensor:
        looping = torch.zeros(len(written), dtype=torch.bool, device=written.device)
        for period in range(1, min(longest, written.shape[1] // times) + 1):
            tail = written[:, -times * period :]
            looping |= (tail[:, period:] == tail[:, :-period]).all(1)
        ending = logits[:, eos : eos + 1].clone()
        logits = logits.masked_fill(looping.unsqueeze(1), -inf)
        logits[:, eos : eos + 1] = ending
        return logits

    return adjust
