"""Beam search, greedy decoding and sampling, token by token from the logits of a model.

What is decoded for a sentence depends on no neighbour in its batch.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from math import gcd, inf, isnan
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from regard import native
from regard.decode.constraints import BEAM_STOPPINGS, Constraints
from regard.decode.options import Decoding, Divisor
from regard.decode.trace import Continuations, active_observer
from regard.errors import UsageError, lookup


@dataclass(frozen=True)
class Hypothesis:
    """A text that was generated or scored."""

    ids: list[int]
    score: float  # the log-probability, divided as the length penalty says
    logprob: float
    steps: list[float]  # log-probability of each token, and of the end where that was reached


def hypothesis(ids: list[int], passed: list[float], score: float) -> Hypothesis:
    """A text from its log-probability after each token."""
    if isnan(score):
        raise UsageError("the model answers with numbers that are not finite; is it damaged?")
    steps = [b - a for a, b in pairwise([0.0, *passed])]
    return Hypothesis(ids, score, passed[-1], steps)


def enough_texts(
    beam: int, n_best: int, divisor: Divisor, stopping: str, patience: float = 1.0
) -> float:
    """Number of finished texts after which the search for a sentence ends.

    Args:
        beam: beam size
        n_best: hypotheses to return
        divisor: length penalty, by which scores are divided
        stopping: when the search ends: patience, early, length or never
        patience: factor of the beam size, with stopping="patience"
    """
    if stopping != "patience":
        return beam if stopping == "early" else inf
    # where length earns nothing, finished and open texts compare directly: no need to give up
    return inf if divisor(2) == 1 else max(n_best, round(min(patience * beam, 1e9)))


# Which tokens can be drawn


def keep_top_k(logits: Tensor, count: int) -> Tensor:
    """Top-k sampling: keep the k most likely tokens."""
    least = logits.topk(min(count, logits.shape[1]), dim=1).values[:, -1:]
    return logits.masked_fill(logits < least, -inf)


def keep_top_p(logits: Tensor, mass: float) -> Tensor:
    """Nucleus sampling: keep the fewest tokens of this much probability (Holtzman et al. 2020)."""
    ordered, places = logits.sort(dim=1, descending=True)
    probabilities = ordered.softmax(1)
    before = probabilities.cumsum(1) - probabilities
    return logits.scatter(1, places, ordered.masked_fill(before >= mass, -inf))


def keep_min_p(logits: Tensor, share: float) -> Tensor:
    """Min-p sampling: keep tokens of at least this fraction of the largest probability."""
    probabilities = logits.softmax(1)
    least = probabilities.amax(1, keepdim=True) * share
    return logits.masked_fill(probabilities < least, -inf)


# Logits


def _logprobs(logits: Tensor) -> Tensor:
    """Log-probabilities of logits, in the same memory where possible."""
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    return torch.log_softmax(logits, 1, out=logits)


def _argmax(x: Tensor) -> Tensor:
    """Place of the first largest entry of each row (b, n).

    The largest of each stretch first: PyTorch's argmax goes through a long row one by one, which
    is quicker for a few rows only.
    """
    stretch = gcd(x.shape[1], 512)
    if stretch < 16 or len(x) < 6:
        return x.argmax(1)
    parts = x.unflatten(1, (-1, stretch))
    which = parts.amax(2).argmax(1, keepdim=True)
    inside = parts.gather(1, which.unsqueeze(2).expand(-1, -1, stretch)).argmax(2)
    return (which * stretch + inside).squeeze(1)


def _most_likely(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The first most likely token of each row, and its log-probability."""
    if (picked := native.argmax(logits)) is not None:
        return picked
    logprobs = _logprobs(logits)
    token = _argmax(logprobs)
    return token, logprobs.gather(1, token.unsqueeze(1))


def _continuations(logprobs: Tensor, so_far: Tensor, count: int) -> Continuations:
    """The best continuations, (sentences, count).

    logprobs is (sentences, hypotheses, vocab), so_far (sentences, hypotheses). A top-k of many
    numbers is slow, a maximum is not: so the vocabulary is dealt to some piles, and only piles
    whose maximum is among the best can hold one of the best.
    """
    sentences, _, vocab = logprobs.shape
    piles = min(vocab, 64 * max(1, round((vocab * count) ** 0.5 / 64)))  # 64: for the vector units
    dealt = vocab - vocab % piles
    tops = logprobs[..., :dealt].unflatten(-1, (-1, piles)).amax(-2)
    if dealt < vocab:
        some = tops[..., : vocab - dealt]
        torch.maximum(some, logprobs[..., dealt:], out=some)
    tops = (tops + so_far.unsqueeze(-1)).flatten(1)
    pile = tops.topk(min(count, tops.shape[1]), dim=1, sorted=False).indices
    parents = pile // piles
    cards = torch.arange(0, vocab, piles, device=pile.device)
    tokens = (pile % piles).unsqueeze(-1) + cards
    beyond = tokens >= vocab
    tokens = tokens.clamp_(max=vocab - 1)
    place = (parents.unsqueeze(-1) * vocab + tokens).flatten(1)
    scores = logprobs.view(sentences, -1).gather(1, place).view(tokens.shape)
    scores = (scores + so_far.gather(1, parents).unsqueeze(-1)).masked_fill_(beyond, -inf)
    scores, best = scores.flatten(1).topk(min(count, tokens[0].numel()), dim=1)
    parents, tokens = parents.gather(1, best // len(cards)), tokens.flatten(1).gather(1, best)
    missing = (0, count - scores.shape[1])  # with a tiny vocabulary
    if missing[1]:
        parents, tokens = F.pad(parents, missing), F.pad(tokens, missing)
        scores = F.pad(scores, missing, value=-inf)
    return Continuations(scores, parents, tokens)


# Searches


class Forced(NamedTuple):
    """Tokens of prefixes at one step."""

    must: Tensor  # (sentences, 1): there is one
    tokens: Tensor  # (sentences, 1)
    logprobs: Tensor  # (sentences, hypotheses)


class Search:
    """The texts of sentences that were admitted together and have as many tokens each.

    Args:
        source: what was read for each sentence, (b, s).
        lengths: number of real tokens or frames of each source, all if None.
        options: how to search.
        constraints: what may be written.
        first: number of the first sentence as a row of the decoder.
    """

    def __init__(
        self,
        source: Tensor,
        lengths: Tensor | None,
        options: Decoding,
        constraints: Constraints,
        first: int = 0,
    ):
        count, device = source.shape[0], source.device
        limits = constraints.limits(source, lengths, options.max_length)
        prefixes = constraints.prefixes(count)
        self.options, self.constraints, self.divisor = options, constraints, options.divisor
        self.first = first
        self.step, self.longest = 0, max(limits, default=0)
        self.limit = torch.tensor(limits, dtype=torch.long, device=device)
        self.forced = self.limit.new_full((count, max(map(len, prefixes), default=0)), -1)
        for row, ids in zip(self.forced, prefixes, strict=True):
            row[: len(ids)] = self.limit.new_tensor(ids)
        self.ids = constraints.first_tokens(source)  # tokens (rows, l) that are read next
        self.number = torch.arange(count, device=device)  # place of each sentence in the batch
        self.written = self.ids.new_empty(count, 1, 0)  # the tokens of each hypothesis
        self.passed = torch.empty(count, 1, 0, device=device)  # log-probability after each of them
        self.done = torch.zeros(count, dtype=torch.bool, device=device)  # whose texts are complete

    def __len__(self) -> int:
        return len(self.number)

    def advance(self, logits: Tensor) -> Tensor | None:
        """Choose the next tokens by logits (rows, vocab), which may be overwritten.

        Returns the hypotheses (sentences, hypotheses) that are continued, None if each is.
        """
        raise NotImplementedError

    def texts(self, sentences: Tensor) -> Iterable[list[Hypothesis]]:
        """Texts of sentences that are done, given where they are."""
        raise NotImplementedError

    def complete(self) -> dict[int, list[Hypothesis]]:
        """Texts of the sentences that are done, by the number of their row."""
        done = self.done.nonzero().squeeze(1)
        rows = (self.first + self.number[done]).tolist()
        return dict(zip(rows, self.texts(done), strict=True))

    def among(self, rows: Collection[int]) -> Tensor:
        """True for sentences (b) whose row is among some."""
        return self.done.new_tensor([self.first + n in rows for n in self.number.tolist()])

    def keep(self, sentences: Tensor) -> None:
        """Go on with these sentences only."""
        self.ids = self.ids.unflatten(0, (len(self), -1))[sentences].flatten(0, 1)
        self.limit, self.forced = self.limit[sentences], self.forced[sentences]
        self.number, self.done = self.number[sentences], self.done[sentences]
        self.written, self.passed = self.written[sentences], self.passed[sentences]

    def adjusted(self, logits: Tensor) -> Tensor:
        """Logits (rows, vocab) changed as the constraints ask."""
        return self.constraints.adjusted(logits, self.written.flatten(0, 1), self.number)

    def force(self, logits: Tensor) -> Forced | None:
        """Tokens that prefixes have at this step, if any has one."""
        if self.step >= self.forced.shape[1]:
            return None
        tokens = self.forced[:, self.step : self.step + 1]
        each = tokens.clamp(min=0).repeat_interleave(len(logits) // len(tokens), 0)
        likely = logits.gather(1, each).squeeze(1) - logits.logsumexp(1)
        return Forced(tokens >= 0, tokens, likely.view(len(tokens), -1))

    def extend(self, tokens: Tensor, logprobs: Tensor) -> None:
        """Add a token to each hypothesis, and the log-probability of its text."""
        self.written = torch.cat([self.written, tokens.unsqueeze(-1)], dim=2)
        self.passed = torch.cat([self.passed, logprobs.unsqueeze(-1)], dim=2)
        self.ids = tokens.reshape(-1, 1)
        self.step += 1


class BeamSearch(Search):
    """Beam search: the texts of highest score for each sentence, best first.

    At each step the best 2 * beam ways to go on are considered: an end among the first `beam` of
    them finishes a text, and the best `beam` others go on. A sentence is done when patience * beam
    texts are finished (Kasai et al. 2022; inf never gives up), or when none still open can become
    one of the best: a log-probability only falls, and no divisor exceeds that of max_length.
    Other kinds of `stopping`, as transformers has them, wait for `beam` texts: early stops there,
    length goes on while the best open text, as long as it is, beats the worst of them, and never
    while it could as long as it may become.
    """

    def __init__(
        self,
        source: Tensor,
        lengths: Tensor | None,
        options: Decoding,
        constraints: Constraints,
        first: int = 0,
    ):
        super().__init__(source, lengths, options, constraints, first)
        beam, n_best, stopping = options.beam, options.n_best, constraints.stopping
        lookup("stopping", stopping, dict.fromkeys(BEAM_STOPPINGS))
        if not constraints.patience > 0:
            raise UsageError(f"patience={constraints.patience} is not above 0")
        if constraints.on_token is not None:
            raise UsageError(f"on_token= cannot follow beam={beam}; choose beam=1")
        self.enough = enough_texts(beam, n_best, self.divisor, stopping, constraints.patience)
        self.ranked = n_best if stopping == "patience" else beam  # among whom a text must come
        self.considered = max(2, 2 + len(constraints.ends)) * beam
        self.finished: list[list[Hypothesis]] = [[] for _ in range(len(self))]
        self.bar = torch.full((len(self),), -inf, dtype=torch.float64, device=source.device)
        self.observer = active_observer(len(self) or 1)

    def advance(self, logits: Tensor) -> Tensor:
        """Consider the best continuations, finish those that end, and go on with the others."""
        beam, last = self.options.beam, self.limit == self.step + 1
        forced, logprobs = self.force(logits), self._adjusted_logprobs(logits)
        so_far = self.passed[..., -1] if self.step else logprobs.new_zeros(len(self), 1)
        ways = _continuations(logprobs.view(*so_far.shape, -1), so_far, self.considered)
        if forced is not None:  # one way only
            first = F.pad((so_far + forced.logprobs)[:, :1], (0, self.considered - 1), value=-inf)
            ways = Continuations(
                torch.where(forced.must, first, ways.scores),
                ways.parents.masked_fill(forced.must, 0),
                torch.where(forced.must, forced.tokens, ways.tokens),
            )
        ended = self.constraints.is_end(ways.tokens)
        finishing = (ended | last.unsqueeze(1)) & (ways.scores != -inf)
        enough = self._finish(ways, finishing[:, :beam])
        # the best that have not ended, in their order
        going = ended.to(torch.uint8).sort(dim=1, stable=True).indices[:, :beam]
        chosen = ways.pick(going)
        past = chosen.parents.unsqueeze(-1).expand(-1, -1, self.step)
        self.written, self.passed = self.written.gather(1, past), self.passed.gather(1, past)
        self.extend(chosen.tokens, chosen.scores)
        divisor = self.divisor(self.step)
        beaten = chosen.scores[:, 0] / self._best_divisor(divisor) <= self.bar
        ends = {
            "enough texts had ended": enough,
            "the longest text was reached": last,
            "none that was open could become better than those that had ended": beaten,
        }
        self.observer.observe(ways, finishing, going, divisor, ends)
        self.done = enough | last | beaten
        return chosen.parents

    def _adjusted_logprobs(self, logits: Tensor) -> Tensor:
        """Log-probabilities (rows, vocab) as the constraints ask."""
        on = self.constraints.on
        logprobs = _logprobs(self.adjusted(logits) if on == "logits" else logits)
        logprobs = self.adjusted(logprobs) if on == "logprobs" else logprobs
        return logprobs.log_softmax(1) if self.constraints.renormalise else logprobs

    def _finish(self, ways: Continuations, finishing: Tensor) -> Tensor:
        """Keep the texts that end; True for sentences (b) that have enough of them."""
        enough = torch.zeros_like(self.done)
        rows, places = finishing.nonzero(as_tuple=True)
        if not len(rows):
            return enough
        origin, sentences = ways.parents[rows, places], self.number[rows].tolist()
        for sentence, text, likely, token, score in zip(
            sentences,
            self.written[rows, origin].tolist(),
            self.passed[rows, origin].tolist(),
            ways.tokens[rows, places].tolist(),
            ways.scores[rows, places].tolist(),
            strict=True,
        ):
            ids = text if token == self.constraints.eos else [*text, token]
            text = hypothesis(ids, [*likely, score], score / self.divisor(self.step + 1))
            self.finished[sentence].append(text)
        self.bar[rows] = self.bar.new_tensor([self._score_to_beat(n) for n in sentences])
        counts = [len(self.finished[sentence]) for sentence in sentences]
        enough[rows] = enough.new_tensor([count >= self.enough for count in counts])
        return enough

    def _score_to_beat(self, sentence: int) -> float:
        """Score that a text must beat to be among the best of a sentence."""
        scores = sorted((one.score for one in self.finished[sentence]), reverse=True)
        return scores[self.ranked - 1] if len(scores) >= self.ranked else -inf

    def _best_divisor(self, now: float) -> Tensor | float:
        """Divisor that makes the best of a text that is open, of those it may come to."""
        if self.constraints.stopping not in ("patience", "never"):
            return now
        return self.divisor(self.limit).clamp(min=now)

    def texts(self, sentences: Tensor) -> Iterable[list[Hypothesis]]:
        """The best texts of sentences that are done, given where they are."""
        for number in self.number[sentences].tolist():
            best = sorted(self.finished[number], key=lambda text: -text.score)
            yield best[: self.options.n_best]

    def keep(self, sentences: Tensor) -> None:
        """Go on with these sentences only."""
        super().keep(sentences)
        self.bar = self.bar[sentences]


class LeftToRight(Search):
    """Greedy decoding, or sampling: texts come in the order they were drawn."""

    def __init__(
        self,
        source: Tensor,
        lengths: Tensor | None,
        options: Decoding,
        constraints: Constraints,
        first: int = 0,
    ):
        super().__init__(source, lengths, options, constraints, first)
        self.draw = TokenSampler(self) if options.sampling and options.temperature != 0 else None
        self.samples = options.n_best
        if constraints.on_token is not None and self.samples > 1:
            raise UsageError(
                f"n_best={self.samples} texts cannot be streamed token by token; choose 1"
            )
        shape = len(self), self.samples
        self.written, self.passed = (x.expand(*shape, 0) for x in (self.written, self.passed))
        self.ended = torch.zeros(shape, dtype=torch.bool, device=source.device)

    def advance(self, logits: Tensor) -> Tensor | None:
        """Pick the most likely token of each hypothesis, or draw one."""
        parents = None
        if self.step == 0 and self.samples > 1:  # here they part
            logits = logits.repeat_interleave(self.samples, 0)
            parents = self.ids.new_zeros(self.ended.shape)
        forced, logits = self.force(logits), self.adjusted(logits)
        picked = _most_likely(logits) if self.draw is None else self.draw(logits)
        tokens, logprobs = (x.view(self.ended.shape) for x in picked)
        if forced is not None:
            tokens = torch.where(forced.must, forced.tokens, tokens)
            logprobs = torch.where(forced.must, forced.logprobs, logprobs)
        self.done = self.limit == self.step + 1
        self.extend(tokens, self.passed[..., -1] + logprobs if self.step else logprobs)
        self.ended |= self.constraints.is_end(tokens)
        self.done |= self.ended.all(1)
        if (on_token := self.constraints.on_token) is not None:
            pairs = zip(self.number.tolist(), tokens[:, 0].tolist(), strict=True)
            stop = [one != self.constraints.eos and bool(on_token(n, one)) for n, one in pairs]
            self.done |= self.done.new_tensor(stop)
        return parents

    def texts(self, sentences: Tensor) -> Iterable[list[Hypothesis]]:
        """Texts of sentences that are done, given where they are."""
        passed = self.passed[sentences].tolist()
        for ids, likely in zip(self.written[sentences].tolist(), passed, strict=True):
            yield [self._cut(*pair) for pair in zip(ids, likely, strict=True)]

    def _cut(self, ids: list[int], passed: list[float]) -> Hypothesis:
        """A text up to its end."""
        eos, ends = self.constraints.eos, self.constraints.ends
        size = next((n for n, one in enumerate(ids) if one == eos or one in ends), len(ids))
        kept = size if ids[size : size + 1] == [eos] else size + 1
        passed = passed[: size + 1]
        return hypothesis(ids[:kept], passed, passed[-1] / self.divisor(len(passed)))

    def keep(self, sentences: Tensor) -> None:
        """Go on with these sentences only."""
        super().keep(sentences)
        self.ended = self.ended[sentences]


class TokenSampler:
    """Draws of tokens by their probability, from numbers that belong to each sentence.

    They depend on the seed and the number of its line alone. Temperature comes first, then top_k,
    top_p and min_p; log-probabilities are those of the model itself.
    """

    def __init__(self, search: Search):
        options, constraints, limits = search.options, search.constraints, search.limit.tolist()
        self.search = search
        self.temperature = 1.0 if options.temperature is None else options.temperature
        lines = range(len(search)) if constraints.lines is None else constraints.lines
        if len(lines) != len(search):
            raise UsageError(f"{len(lines)} line numbers for {len(search)} sentences")
        seed = options.seed if constraints.seed is None else constraints.seed
        uniforms = torch.zeros(len(lines), search.longest, options.n_best, dtype=torch.float64)
        for row, line, limit in zip(uniforms, lines, limits, strict=True):
            torch.rand(limit, options.n_best, generator=_generator(seed, line), out=row[:limit])
        self.uniforms = uniforms.to(search.limit.device)

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """A token for each row of logits (rows, vocab), and its log-probability."""
        logprobs = _logprobs(logits)
        logits = logprobs / self.temperature
        options = self.search.options
        if options.top_k is not None:
            logits = keep_top_k(logits, options.top_k)
        if options.top_p is not None:
            logits = keep_top_p(logits, options.top_p)
        if options.min_p is not None:
            logits = keep_min_p(logits, options.min_p)
        # the token at which the sum of the probabilities passes the number drawn from [0, 1)
        sums = logits.double().softmax(1).cumsum(1)
        drawn = self.uniforms[self.search.number, self.search.step]
        point = drawn.view(-1, 1) * sums[:, -1:]
        token = torch.searchsorted(sums, point, right=True).clamp_(max=logits.shape[1] - 1)
        return token, logprobs.gather(1, token)


def _generator(seed: int, line: int) -> torch.Generator:
    """Random generator of one line, unrelated to those of other lines and seeds."""
    digest = blake2b(f"{seed} {line}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big"))
