"""Logits processors that a checkpoint's generation_config.json asks for.

They have the names, the order and the meaning that transformers gives them in
generation_config.json, so that the same texts come out. A rule sees all tokens of a text, those it
was begun with too.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor

from regard.decode.constraints import ByRow, Constraints
from regard.errors import UsageError, log

_MOST_IDS = 100_000  # in one rule
_MAX_RULE_LENGTH = 10_000_000  # tokens that a rule may speak of


@dataclass(frozen=True)
class RuleInputs:
    """What the rules must know of a batch, sentence by sentence."""

    ends: Sequence[int]  # tokens that end a text
    before: Sequence[Sequence[int]]  # tokens that each text was begun with
    read: Sequence[Sequence[int]] = ()  # tokens of each source, or the prompt
    limits: Sequence[int] = ()  # how many tokens may be written
    earlier: Sequence[int] = ()  # how many of `before` were written, too


@dataclass
class DecodingStep:
    """One step of decoding: which sentence each row is of, and its tokens so far."""

    given: RuleInputs
    number: list[int]
    written: Tensor
    forced: bool = False  # the first token of a text is

    @property
    def step(self) -> int:
        """Number of tokens that were generated."""
        return self.written.shape[1]

    def new(self) -> list[int]:
        """Number of tokens of each row that were generated, now or earlier."""
        earlier = self.given.earlier or [0] * len(self.given.before)
        return [earlier[n] + self.step for n in self.number]

    @cached_property
    def tokens(self) -> list[list[int]]:
        """All tokens of each row, its prompt too."""
        pairs = zip(self.number, self.written.tolist(), strict=True)
        return [[*self.given.before[n], *row] for n, row in pairs]


def _mask(scores: Tensor, rows: Sequence[int], ids: Sequence[int]) -> Tensor:
    """Make tokens impossible in some rows."""
    if rows:
        scores[torch.tensor(rows).unsqueeze(1), torch.tensor(ids, dtype=torch.long)] = -inf
    return scores


# Rules: each changes the scores (rows, vocab) of a step, given the value that the file has.


def repetition_penalty(scores: Tensor, now: DecodingStep, strength: float) -> Tensor:
    """Repetition penalty: make every token that a text has already less likely (CTRL, 2019)."""
    seen = torch.zeros_like(scores, dtype=torch.bool)
    for row, tokens in zip(seen, now.tokens, strict=True):
        row[torch.tensor(tokens, dtype=torch.long)] = True
    weaker = torch.where(scores < 0, scores * strength, scores / strength)
    return torch.where(seen, weaker, scores)


def _forbid_ngrams(
    scores: Tensor, texts: Sequence[list[int]], earlier: Sequence[Sequence[int]], size: int
) -> Tensor:
    """Forbid what would end texts in n-grams of so many tokens that earlier ones hold."""
    for row, (tokens, known) in enumerate(zip(texts, earlier, strict=True)):
        if len(tokens) + 1 >= size:
            last = tokens[len(tokens) + 1 - size :]
            for start in range(len(known) - size + 1):
                *first, after = known[start : start + size]
                if first == last:
                    scores[row, after] = -inf
    return scores


def no_repeat_ngram_size(scores: Tensor, now: DecodingStep, size: int) -> Tensor:
    """Forbid repeated n-grams (Paulus et al. 2017)."""
    return _forbid_ngrams(scores, now.tokens, now.tokens, size)


def encoder_no_repeat_ngram_size(scores: Tensor, now: DecodingStep, size: int) -> Tensor:
    """Forbid n-grams of the source."""
    return _forbid_ngrams(scores, now.tokens, [now.given.read[n] for n in now.number], size)


def sequence_bias(
    scores: Tensor, now: DecodingStep, pairs: Sequence[tuple[Sequence[int], float]]
) -> Tensor:
    """Make runs of tokens more or less likely: the last of them, where the others came before."""
    more = torch.zeros_like(scores)
    for run, bias in pairs:
        *first, last = run
        for row, tokens in enumerate(now.tokens):
            if not first or (len(run) <= len(tokens) and tokens[-len(first) :] == first):
                more[row, last] += bias
    return scores + more


def bad_words_ids(scores: Tensor, now: DecodingStep, runs: Sequence[Sequence[int]]) -> Tensor:
    """Forbid these sequences of tokens; the end of a text alone is none."""
    real = [(run, -inf) for run in runs if list(run) not in ([end] for end in now.given.ends)]
    return sequence_bias(scores, now, real)


def min_length(scores: Tensor, now: DecodingStep, length: int) -> Tensor:
    """Forbid the end before a text has so many tokens, its prompt included."""
    short = [row for row, tokens in enumerate(now.tokens) if len(tokens) < length]
    return _mask(scores, short, now.given.ends)


def min_new_tokens(scores: Tensor, now: DecodingStep, length: int) -> Tensor:
    """Forbid the end before so many tokens were generated."""
    rows = [row for row, count in enumerate(now.new()) if count < length]
    return _mask(scores, rows, now.given.ends)


def _only(scores: Tensor, rows: Sequence[int], ids: Sequence[int]) -> Tensor:
    """Make all but some tokens impossible, and these certain."""
    for row in rows:
        scores[row] = -inf
        scores[row, ids] = 0.0
    return scores


def forced_bos_token_id(scores: Tensor, now: DecodingStep, number: int) -> Tensor:
    """Begin with a token, where there is only the one after which every text begins."""
    return _only(scores, [n for n, row in enumerate(now.tokens) if len(row) == 1], [number])


def forced_eos_token_id(scores: Tensor, now: DecodingStep, ids: Sequence[int]) -> Tensor:
    """End with a token where a text is as long as it may be."""
    last = [row for row, n in enumerate(now.number) if now.given.limits[n] == now.step + 1]
    return _only(scores, last, ids)


def exponential_decay_length_penalty(
    scores: Tensor, now: DecodingStep, decay: tuple[int, float]
) -> Tensor:
    """Make the end likelier and likelier after so many tokens."""
    start, factor = decay
    ends = list(now.given.ends)
    for row, count in enumerate(now.new()):
        if count > start:
            scores[row, ends] += scores[row, ends].abs() * (factor ** (count - start) - 1)
    return scores


def suppress_tokens(scores: Tensor, now: DecodingStep, ids: Sequence[int]) -> Tensor:
    """Never generate these tokens."""
    return _mask(scores, range(len(scores)), ids)


def begin_suppress_tokens(scores: Tensor, now: DecodingStep, ids: Sequence[int]) -> Tensor:
    """Do not begin with these tokens; where the first one is forced, that is the second."""
    first = [
        row
        for row, (n, count) in enumerate(zip(now.number, now.new(), strict=True))
        if count == int(now.forced and len(now.given.before[n]) <= 1)
    ]
    return _mask(scores, first, ids)


# ---- what a file may say


def _expect(good: bool, value: Any, expected: str) -> None:
    if not good:
        raise UsageError(f"{value!r:.60}; expected {expected}")


def _whole(value: Any, most: int, what: str = "number") -> int:
    whole = isinstance(value, int) and not isinstance(value, bool)
    _expect(whole and 0 <= value <= most, value, f"a {what} from 0 to {most:,}")
    return value


def _count(value: Any, vocab: int) -> int:
    return _whole(value, _MAX_RULE_LENGTH)


def _id(value: Any, vocab: int) -> int:
    return _whole(value, vocab - 1, "token")


def _number(value: Any, low: float, high: float) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    _expect(good and low <= value <= high, value, f"a number from {low:g} to {high:g}")
    return value


def _ids(value: Any, vocab: int) -> list[int]:
    good = isinstance(value, list) and len(value) <= _MOST_IDS
    _expect(good, value, f"a list of at most {_MOST_IDS:,} tokens")
    return [_id(one, vocab) for one in value]


def _some(value: Any, vocab: int) -> list[int]:
    """Let through a token, or a list of them."""
    return _ids(value if isinstance(value, list) else [value], vocab)


def _runs(value: Any, vocab: int) -> list[list[int]]:
    good = isinstance(value, list) and len(value) <= 1000 and all(value)
    _expect(good, value, "a list of at most 1,000 runs of tokens")
    return [_ids(run, vocab) for run in value]


def _are_pairs(value: Any, most: int) -> bool:
    few = isinstance(value, list) and len(value) <= most
    return few and all(isinstance(pair, list) and len(pair) == 2 for pair in value)


def _biases(value: Any, vocab: int) -> list[tuple[list[int], float]]:
    good = _are_pairs(value, 1000) and all(run for run, _ in value)
    _expect(good, value, "a list of at most 1,000 runs of tokens, each with a number")
    return [(_ids(run, vocab), _number(bias, -1e9, 1e9)) for run, bias in value]


def _decay(value: Any, vocab: int) -> tuple[int, float]:
    good = isinstance(value, list | tuple) and len(value) == 2
    _expect(good, value, "a number of tokens and a factor")
    return _count(value[0], vocab), _number(value[1], 0.001, 100)


def _prompt(value: Any, vocab: int) -> list[int | None]:
    """Let through the tokens that follow the first one, each with its place; null is detected."""
    good = _are_pairs(value, 16) and [n for n, _ in value] == [*range(1, 1 + len(value))]
    _expect(good, value, "at most 16 pairs of a place, from 1 on, and a token")
    return [None if token is None else _id(token, vocab) for _, token in value]


def _named_ids(value: Any, vocab: int) -> dict[str, int]:
    good = isinstance(value, Mapping) and 0 < len(value) <= 1000
    _expect(good, value, "an object of at most 1,000 names with their tokens")
    return {str(name): _id(token, vocab) for name, token in value.items()}


def _heads(value: Any, vocab: int) -> list[tuple[int, int]]:
    good = _are_pairs(value, 1000) and bool(value)
    _expect(good, value, "a list of at most 1,000 pairs of a layer and a head")
    return [(_count(layer, vocab), _count(head, vocab)) for layer, head in value]


def _flag(value: Any, vocab: int) -> bool:
    _expect(isinstance(value, bool), value, "true or false")
    return value


def _text(value: Any, vocab: int) -> str:
    _expect(isinstance(value, str) and 0 < len(value) <= 40, value, "a short text")
    return value


@dataclass(frozen=True)
class LogitsRule:
    """How a value is checked, with the size of the vocabulary, and what it does."""

    check: Callable[[Any, int], Any]
    change: Callable[[Tensor, DecodingStep, Any], Tensor] | None = None  # of logits


GENERATION_RULES: dict[str, LogitsRule] = {
    "sequence_bias": LogitsRule(_biases, sequence_bias),
    "repetition_penalty": LogitsRule(lambda x, vocab: _number(x, 0.001, 1000), repetition_penalty),
    "no_repeat_ngram_size": LogitsRule(_count, no_repeat_ngram_size),
    "encoder_no_repeat_ngram_size": LogitsRule(_count, encoder_no_repeat_ngram_size),
    "bad_words_ids": LogitsRule(_runs, bad_words_ids),
    "min_length": LogitsRule(_count, min_length),
    "min_new_tokens": LogitsRule(_count, min_new_tokens),
    "forced_bos_token_id": LogitsRule(_id, forced_bos_token_id),
    "forced_eos_token_id": LogitsRule(_some, forced_eos_token_id),
    "exponential_decay_length_penalty": LogitsRule(_decay, exponential_decay_length_penalty),
    "suppress_tokens": LogitsRule(_ids, suppress_tokens),
    "begin_suppress_tokens": LogitsRule(_ids, begin_suppress_tokens),
    # what these say is no change of logits
    "eos_token_id": LogitsRule(_some),
    "decoder_start_token_id": LogitsRule(_id),
    "max_length": LogitsRule(_count),
    "renormalize_logits": LogitsRule(lambda x, vocab: x is True),
    "early_stopping": LogitsRule(lambda x, vocab: x if x == "never" else x is True),
    "regard_usual_limit": LogitsRule(
        _flag
    ),  # we exported it, and mean what we do without max_length
    # and these say what Whisper writes after (regard.decode.speech.whisper)
    "forced_decoder_ids": LogitsRule(_prompt),
    "no_timestamps_token_id": LogitsRule(_id),
    "prev_sot_token_id": LogitsRule(_id),
    "lang_to_id": LogitsRule(_named_ids),
    "task_to_id": LogitsRule(_named_ids),
    "is_multilingual": LogitsRule(_flag),
    "language": LogitsRule(_text),
    "task": LogitsRule(_text),
    "return_timestamps": LogitsRule(_flag),
    "max_initial_timestamp_index": LogitsRule(_count),
    "alignment_heads": LogitsRule(_heads),
}
_NO_EFFECT = {
    "repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
}


def checked(rules: Any, vocab: int) -> dict[str, Any]:
    """Rules of a file, each checked, without those that have no effect."""
    if not isinstance(rules, Mapping):
        raise UsageError(f"'rules' are {rules!r:.40}; expected an object")
    good: dict[str, Any] = {}
    for key, value in rules.items():
        if key not in GENERATION_RULES:
            raise UsageError(f"unknown rule {key!r:.40}; known are {', '.join(GENERATION_RULES)}")
        try:
            good[key] = GENERATION_RULES[key].check(value, vocab)
        except UsageError as mistake:
            raise UsageError(f"{key}={mistake}") from None
    return _effective(good)


class GenerationConfig:
    """A checkpoint's generation_config.json as options of decoding, or ours if it has none.

    `rules` are as a file has them, None for a model of our own.
    """

    def __init__(self, rules: Any, eos: int, vocab: int, begin: int = 0):
        self.foreign = rules is not None
        self.rules = checked({} if rules is None else rules, vocab)
        self.begin: int = self.rules.get("decoder_start_token_id", begin)
        self.all_ends: list[int] = self.rules.get("eos_token_id", [eos])
        self.eos = eos if eos in self.all_ends else -1  # which no token is
        self.ends = [end for end in self.all_ends if end != eos]
        self.longest: int | None = self.rules.get("max_length")
        self.told: set[str] = set()  # what was said of how this is not as transformers does it

    def tell(self, otherwise: str) -> None:
        """Say once, of a public checkpoint, what is done otherwise than transformers does it."""
        ours = self.rules.get("regard_usual_limit")  # a model that we exported
        if self.foreign and not ours and otherwise not in self.told:
            self.told.add(otherwise)
            log(f"otherwise than transformers: {otherwise}")

    @property
    def constraints(self) -> Constraints:
        """How every text begins and ends, and when a beam search does."""
        ours = Constraints(bos=self.begin, eos=self.eos, ends=self.ends)
        if not self.foreign:
            return ours
        early = self.rules.get("early_stopping", False)
        stopping = "never" if early == "never" else "early" if early else "length"
        again = self.rules.get("renormalize_logits", False)
        return replace(ours, stopping=stopping, on="logprobs", renormalise=again)

    def changes(self, given: RuleInputs, **others: Any) -> "list[Rules]":
        """The rules as changes of logits, with others beside or instead of them."""
        rules = Rules(_effective({**self.rules, **others}), given)
        return [rules] if rules else []


def _effective(rules: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out rules without effect."""
    return {key: value for key, value in rules.items() if value != _NO_EFFECT.get(key)}


@dataclass
class Rules(ByRow):
    """Checked rules as one change of logits, which knows the sentence of each row."""

    rules: Mapping[str, Any]
    given: RuleInputs

    def __bool__(self) -> bool:
        return any(GENERATION_RULES[key].change is not None for key in self.rules)

    def __call__(self, logits: Tensor, written: Tensor, number: Tensor) -> Tensor:
        """Change the logits (rows, vocab) of rows with these tokens, of sentences by number."""
        forced = "forced_bos_token_id" in self.rules
        now = DecodingStep(self.given, number.tolist(), written, forced)
        for key, rule in GENERATION_RULES.items():
            if rule.change is not None and key in self.rules:
                logits = rule.change(logits, now, self.rules[key])
        return logits
