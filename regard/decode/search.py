"""Beam search, greedy decoding and sampling, with any model that is a Writer.

A text begins after `bos`, or after the last token of its own prompt (`begin`), and ends with `eos`;
neither is among the ids that are returned. What is decoded for a sentence depends on no neighbour
in its batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from math import gcd, inf, isnan

import torch
from torch import Tensor
from torch.nn import functional as F

from regard import native
from regard.decode.batching import in_batches as in_batches
from regard.decode.rules import ByRow
from regard.decode.trace import active_trace
from regard.decode.writer import Writer
from regard.errors import UsageError, lookup

BOS, EOS = 1, 2
# No text is longer than this unless max_length says so.
LONGEST = 512
# Given texts are read this many tokens at a time, to bound the memory of the logits.
SPAN = 64

# when a beam search ends: ours, and those of transformers
STOPPINGS = ("patience", "early", "length", "never")

# A change of logits (b, vocab), in place or not, that knows the tokens written so far (b, t).
Adjust = Callable[[Tensor, Tensor], Tensor] | ByRow
# The most tokens of a text: for all, for each sentence, or (None) by the length of its source.
Limit = int | Sequence[int] | Tensor | None
# Called with the number of a sentence and its newest token; True ends the text there.
OnToken = Callable[[int, int], bool | None]


@dataclass(frozen=True)
class Hypothesis:
    """A text that was generated or scored."""

    ids: list[int]
    score: float  # the log-probability, divided as the length penalty says
    logprob: float
    steps: list[float]  # log-probability of each token, and of the end where that was reached


# What a log-probability is divided by so that lengths (the end counts too) can be compared.
# name -> (divisor of a length and an exponent, usual exponent)
PENALTIES: dict[str, tuple[Callable, float]] = {
    "average": (lambda length, alpha: length**alpha, 1.0),
    "gnmt": (lambda length, alpha: ((5 + length) / 6) ** alpha, 0.6),
    "none": (lambda length, alpha: length**0, 0.0),
}


def penalty(name: str, alpha: float | None = None) -> Callable:
    """Return the divisor of a log-probability as a function of how many tokens it is the sum of."""
    divisor, usual = lookup("length_penalty", name, PENALTIES)
    alpha = usual if alpha is None else alpha
    if not -inf < alpha < inf:
        raise UsageError(f"alpha={alpha} is not a number; 0 means no length penalty")
    return lambda length: divisor(length, alpha)


def enough_texts(
    beam: int, n_best: int, divisor: Callable, stopping: str, patience: float = 1.0
) -> float:
    """Number of finished texts after which the search for a sentence ends."""
    if stopping != "patience":
        return beam if stopping == "early" else inf
    # where length earns nothing, finished and open texts compare directly: no need to give up
    return inf if divisor(2) == 1 else max(n_best, round(min(patience * beam, 1e9)))


def hypothesis(ids: list[int], passed: list[float], score: float) -> Hypothesis:
    """A text from its log-probability after each token."""
    steps = [b - a for a, b in pairwise([0.0, *passed])]
    return Hypothesis(ids, score, passed[-1], steps)


def forbid(*ids: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Never generate these tokens."""
    return lambda logits, written: logits.index_fill_(1, logits.new_tensor(ids).long(), -inf)


def at_least(length: int, eos: int = EOS) -> Adjust:
    """Do not end before a text has this many tokens."""
    go_on = forbid(eos)
    return lambda logits, written: go_on(logits, written) if written.shape[1] < length else logits


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


def keep_top_k(count: int) -> Adjust:
    """Top-k sampling: keep the k most likely tokens."""
    if count < 1:
        raise UsageError(f"top_k={count} leaves nothing to draw; choose 1 or more")

    def adjust(logits: Tensor, written: Tensor) -> Tensor:
        least = logits.topk(min(count, logits.shape[1]), dim=1).values[:, -1:]
        return logits.masked_fill(logits < least, -inf)

    return adjust


def keep_top_p(mass: float) -> Adjust:
    """Nucleus sampling: keep the fewest tokens of this much probability (Holtzman et al. 2020)."""
    if not 0 < mass <= 1:
        raise UsageError(f"top_p={mass} is not above 0 and at most 1")

    def adjust(logits: Tensor, written: Tensor) -> Tensor:
        ordered, places = logits.sort(dim=1, descending=True)
        probabilities = ordered.softmax(1)
        before = probabilities.cumsum(1) - probabilities
        return logits.scatter(1, places, ordered.masked_fill(before >= mass, -inf))

    return adjust


def keep_min_p(share: float) -> Adjust:
    """Min-p sampling: keep tokens of at least this fraction of the largest probability."""
    if not 0 <= share <= 1:
        raise UsageError(f"min_p={share} is not between 0 and 1")

    def adjust(logits: Tensor, written: Tensor) -> Tensor:
        probabilities = logits.softmax(1)
        least = probabilities.amax(1, keepdim=True) * share
        return logits.masked_fill(probabilities < least, -inf)

    return adjust


def usual_limit(length: int) -> int:
    """Return the default limit of tokens for a source of so many."""
    return min(LONGEST, 10 + length + length // 2)


def _adjusted(logits: Tensor, adjust: Sequence[Adjust], written: Tensor, number: Tensor) -> Tensor:
    """Apply all changes to the logits (rows, vocab), given what each row has so far."""
    for change in adjust:
        if isinstance(change, ByRow):
            each = number.repeat_interleave(len(logits) // len(number))
            logits = change(logits, written, each)
        else:
            logits = change(logits, written)
    return logits


def _is_end(tokens: Tensor, eos: int, ends: Sequence[int]) -> Tensor:
    """Tell which tokens end a text."""
    is_end = tokens == eos
    for end in ends:
        is_end = is_end | (tokens == end)
    return is_end


class _Constraints:
    """For each sentence: the most tokens of its text, and the prefix it must begin with."""

    def __init__(
        self,
        source: Tensor,
        lengths: Tensor | None,
        max_length: Limit,
        prefix: Sequence[Sequence[int]] | None,
        eos: int,
    ):
        count, device = source.shape[0], source.device
        prefix = [[]] * count if prefix is None else prefix
        if len(prefix) != count:
            raise UsageError(f"{len(prefix)} prefixes for {count} sentences; give one for each")
        if max_length is None:
            read = [source.shape[1]] * count if lengths is None else lengths.tolist()
            pairs = zip(read, prefix, strict=True)
            limit = [usual_limit(n) + len(ids) for n, ids in pairs]
        else:
            limit = (
                [max_length] * count if isinstance(max_length, int) else list(map(int, max_length))
            )
        if len(limit) != count:
            raise UsageError(f"{len(limit)} values of max_length for {count} sentences")
        for most, ids in zip(limit, prefix, strict=True):
            if most < 1:
                raise UsageError(f"max_length={most} leaves nothing to write; choose 1 or more")
            if most < len(ids):
                raise UsageError(f"a prefix of {len(ids)} tokens is longer than max_length={most}")
            if eos in ids:
                raise UsageError(
                    f"a prefix contains the end of the text, token {eos}; leave it out"
                )
        self.limit = torch.tensor(limit, dtype=torch.long, device=device)
        self.longest = max(limit, default=0)
        self.forced = self.limit.new_full((count, max(map(len, prefix), default=0)), -1)
        for row, ids in zip(self.forced, prefix, strict=True):
            row[: len(ids)] = self.limit.new_tensor(ids)

    def force(self, step: int, logits: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return which sentences have a forced token at a step, which, and its log-probability."""
        if step >= self.forced.shape[1]:
            return None
        token = self.forced[:, step : step + 1]
        each = token.clamp(min=0).repeat_interleave(len(logits) // len(token), 0)
        likely = logits.gather(1, each).squeeze(1) - logits.logsumexp(1)
        return token >= 0, token, likely.view(len(token), -1)

    def keep(self, sentences: Tensor) -> None:
        """Go on with these sentences only."""
        self.limit, self.forced = self.limit[sentences], self.forced[sentences]


class _FinishedHypotheses:
    """The finished texts of each sentence: score, ids, log-probability after each token."""

    def __init__(self, count: int, divisor: Callable, n_best: int):
        self.texts: list[list[tuple[float, list[int], list[float]]]] = [[] for _ in range(count)]
        self.divisor, self.n_best = divisor, n_best

    def add(self, sentence: int, ids: list[int], passed: list[float]) -> None:
        """Take a text that had the given log-probability after each of its tokens."""
        score = passed[-1] / self.divisor(len(passed))
        if isnan(score):
            raise UsageError("the model answers with numbers that are not finite; is it damaged?")
        self.texts[sentence].append((score, ids, passed))

    def bar(self, sentence: int, best: int) -> float:
        """Return the score that a text must beat to be among the best so many."""
        scores = sorted((score for score, *_ in self.texts[sentence]), reverse=True)
        return scores[best - 1] if len(scores) >= best else -inf

    def results(self, ordered: bool) -> list[list[Hypothesis]]:
        """Return the texts of each sentence, as they came or the best first."""
        if ordered:
            self.texts = [sorted(some, key=lambda text: -text[0]) for some in self.texts]
        return [
            [hypothesis(ids, passed, score) for score, ids, passed in some[: self.n_best]]
            for some in self.texts
        ]


def _first(source: Tensor, begin: Tensor | None, bos: int) -> Tensor:
    """Return the token (b, 1) that each text is written after."""
    if begin is None:
        return torch.full((source.shape[0], 1), bos, device=source.device)
    if begin.shape != source.shape[:1]:
        raise UsageError(f"{len(begin)} first tokens for {source.shape[0]} sentences")
    return begin.view(-1, 1)


def _active(done: Tensor) -> Tensor | None:
    """Return which are not done, if some are; the last ones take their places, so that few move."""
    if not bool(done.any()):
        return None
    count = len(done) - int(done.sum())
    order = torch.arange(count, device=done.device)
    order[done[:count]] = count + (~done[count:]).nonzero().squeeze(1)
    return order


def _logprobs(logits: Tensor) -> Tensor:
    """Return the log-probabilities of logits, in the same memory where possible."""
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    return torch.log_softmax(logits, 1, out=logits)


def _argmax(x: Tensor) -> Tensor:
    """Return where each row (b, n) has its first largest entry.

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


def _most_likely(
    logits: Tensor, written: Tensor, step: int, number: Tensor
) -> tuple[Tensor, Tensor]:
    """Pick the first most likely token of each row."""
    if (picked := native.argmax(logits)) is not None:
        return picked
    logprobs = _logprobs(logits)
    token = _argmax(logprobs)
    return token, logprobs.gather(1, token.unsqueeze(1))


def _continuations(logprobs: Tensor, so_far: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best continuations, (sentences, count): log-probability, parent and token.

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
    return scores, parents, tokens


@torch.inference_mode()
def beam(
    writer: Writer,
    source: Tensor,
    lengths: Tensor | None = None,
    *,
    beam: int = 5,
    n_best: int = 1,
    length_penalty: str = "average",
    alpha: float | None = None,
    patience: float = 1.0,
    stopping: str = "patience",
    on: str = "logits",
    renormalise: bool = False,
    max_length: Limit = None,
    prefix: Sequence[Sequence[int]] | None = None,
    adjust: Sequence[Adjust] = (),
    begin: Tensor | None = None,
    bos: int = BOS,
    eos: int = EOS,
    ends: Sequence[int] = (),
) -> list[list[Hypothesis]]:
    """Beam search: return the texts of highest score for each sentence, best first.

    At each step the best 2 * beam ways to go on are considered: an end among the first `beam` of
    them finishes a text, and the best `beam` others go on. A sentence is done when patience * beam
    texts are finished (Kasai et al. 2022; inf never gives up), or when none still open can become
    one of the best: a log-probability only falls, and no divisor exceeds that of max_length.
    Other kinds of `stopping`, as transformers has them, wait for `beam` texts: early stops there,
    length goes on while the best open text, as long as it is, beats the worst of them, and never
    while it could as long as it may become. Changes are made `on` logits or on logprobs, which may
    be renormalised. Tokens of `ends` end a text as eos does, and stay in it. Inside of
    `tracing` all that is considered for one sentence is kept.
    """
    lookup("stopping", stopping, dict.fromkeys(STOPPINGS))
    if beam < 1:
        raise UsageError(f"beam={beam} leaves nothing to follow; choose 1 or more")
    if not 1 <= n_best <= beam:
        raise UsageError(f"n_best={n_best} is not between 1 and beam={beam}; widen the beam")
    if not patience > 0:
        raise UsageError(f"patience={patience} is not above 0")
    divisor = penalty(length_penalty, alpha)
    enough = enough_texts(beam, n_best, divisor, stopping, patience)
    ranked = n_best if stopping == "patience" else beam  # among whom a text must come
    kept = max(2, 2 + len(ends)) * beam
    constraints = _Constraints(source, lengths, max_length, prefix, eos)
    count, device = source.shape[0], source.device
    finished = _FinishedHypotheses(count, divisor, n_best)
    if count == 0:
        return []
    trace = active_trace(count)

    state = writer.start(source, lengths, capacity=constraints.longest)
    ids = _first(source, begin, bos)
    number = torch.arange(count, device=device)  # which sentence each row of the batch is
    written = ids.new_empty(count, 1, 0)  # the tokens of each hypothesis
    passed = torch.empty(count, 1, 0, device=device)  # its log-probability after each of them
    bar = torch.full((count,), -inf, dtype=torch.float64, device=device)
    done = torch.zeros(count, dtype=torch.bool, device=device)
    for step in range(constraints.longest):
        logits, state = writer.step(ids, state)
        logits = logits[:, -1]
        forced = constraints.force(step, logits)
        before = written.flatten(0, 1)
        if on == "logits":
            logits = _adjusted(logits, adjust, before, number)
        logprobs = _logprobs(logits)
        if on == "logprobs":
            logprobs = _adjusted(logprobs, adjust, before, number)
        if renormalise:
            logprobs = logprobs.log_softmax(1)
        so_far = passed[..., -1] if step else logprobs.new_zeros(count, 1)
        logprobs = logprobs.view(*so_far.shape, -1)
        scores, parents, tokens = _continuations(logprobs, so_far, kept)
        if forced is not None:  # one way only
            must, token, likely = forced
            first = F.pad((so_far + likely)[:, :1], (0, kept - 1), value=-inf)
            scores, tokens = torch.where(must, first, scores), torch.where(must, token, tokens)
            parents = parents.masked_fill(must, 0)

        ended = _is_end(tokens, eos, ends)
        last = constraints.limit == step + 1
        finishing = (ended | last.unsqueeze(1)) & (scores != -inf) & ~done.unsqueeze(1)
        rows, places = finishing[:, :beam].nonzero(as_tuple=True)
        if len(rows):
            origin, sentences = parents[rows, places], number[rows].tolist()
            for sentence, text, likely, token, score in zip(
                sentences,
                written[rows, origin].tolist(),
                passed[rows, origin].tolist(),
                tokens[rows, places].tolist(),
                scores[rows, places].tolist(),
                strict=True,
            ):
                finished.add(sentence, text if token == eos else [*text, token], [*likely, score])
            bar[rows] = bar.new_tensor([finished.bar(sentence, ranked) for sentence in sentences])
            many = [len(finished.texts[sentence]) >= enough for sentence in sentences]
            done[rows] = done.new_tensor(many)

        # the best that have not ended, in their order
        going = ended.to(torch.uint8).sort(dim=1, stable=True).indices[:, :beam]
        if trace is not None:
            considered = scores[0], parents[0], tokens[0], finishing[0], going[0]
            trace.add(*considered, divisor(step + 1), beam)
        scores, parents, tokens = (x.gather(1, going) for x in (scores, parents, tokens))
        state.select(parents)
        past = parents.unsqueeze(-1).expand(-1, -1, step)
        written = torch.cat([written.gather(1, past), tokens.unsqueeze(-1)], dim=2)
        passed = torch.cat([passed.gather(1, past), scores.unsqueeze(-1)], dim=2)
        now, most = divisor(step + 1), divisor(constraints.limit)
        reach = most.clamp(min=now) if stopping in ("patience", "never") else now
        if trace is not None and bool(done | last):
            trace.stop("enough texts had ended" if bool(done) else "the longest text was reached")
        done |= last | (scores[:, 0] / reach <= bar)
        if trace is not None and bool(done) and not trace.end:
            trace.stop("none that was open could become better than those that had ended")
        if (active := _active(done)) is not None:
            if len(active) == 0:
                break
            state.keep(active)
            constraints.keep(active)
            number, written, passed, bar, done = (
                x[active] for x in (number, written, passed, bar, done)
            )
        ids = written[..., -1].reshape(-1, 1)
    return finished.results(ordered=True)


# Which token to take after each row and how likely it is, given adjusted logits (b, vocab), which
# may be overwritten, the tokens so far (b, t), the step and the number of each sentence.
Pick = Callable[[Tensor, Tensor, int, Tensor], tuple[Tensor, Tensor]]


@torch.inference_mode()
def _decode_one_by_one(
    writer: Writer,
    source: Tensor,
    lengths: Tensor | None,
    constraints: _Constraints,
    pick: Pick,
    texts: int,
    divisor: Callable,
    adjust: Sequence[Adjust],
    begin: Tensor | None,
    on_token: OnToken | None,
    bos: int,
    eos: int,
    ends: Sequence[int] = (),
) -> list[list[Hypothesis]]:
    """Decode left to right without a beam (greedy or sampling)."""
    count, device = source.shape[0], source.device
    finished = _FinishedHypotheses(count, divisor, texts)
    if count == 0:
        return []
    state = writer.start(source, lengths, capacity=constraints.longest)
    ids = _first(source, begin, bos)
    number = torch.arange(count, device=device)
    written = ids.new_empty(count, texts, 0)
    passed = torch.empty(count, texts, 0, device=device)
    ended = torch.zeros(count, texts, dtype=torch.bool, device=device)
    for step in range(constraints.longest):
        logits, state = writer.step(ids, state)
        logits = logits[:, -1]
        if step == 0 and texts > 1:  # here they part
            logits = logits.repeat_interleave(texts, 0)
            state.select(ids.new_zeros(count, texts))
        forced = constraints.force(step, logits)
        before = written.flatten(0, 1)
        logits = _adjusted(logits, adjust, before, number)
        token, likely = (x.view(ended.shape) for x in pick(logits, before, step, number))
        if forced is not None:
            must, one, logprob = forced
            token, likely = torch.where(must, one, token), torch.where(must, logprob, likely)
        so_far = passed[..., -1] if step else 0.0
        written = torch.cat([written, token.unsqueeze(-1)], dim=2)
        passed = torch.cat([passed, (so_far + likely).unsqueeze(-1)], dim=2)
        ended |= _is_end(token, eos, ends)
        done = ended.all(1) | (constraints.limit == step + 1)
        if on_token is not None:
            pairs = zip(number.tolist(), token[:, 0].tolist(), strict=True)
            done |= done.new_tensor([one != eos and bool(on_token(n, one)) for n, one in pairs])
        ids = token.view(-1, 1)
        if (active := _active(done)) is None:
            continue
        rows = done.nonzero().squeeze(1)
        for sentence, its_ids, its_passed in zip(
            number[rows].tolist(), written[rows].tolist(), passed[rows].tolist(), strict=True
        ):
            for text, values in zip(its_ids, its_passed, strict=True):
                over = (place for place, one in enumerate(text) if one == eos or one in ends)
                end = next(over, len(text))
                kept = end if end == len(text) or text[end] == eos else end + 1
                finished.add(sentence, text[:kept], values[: end + 1])
        if len(active) == 0:
            break
        state.keep(active)
        constraints.keep(active)
        number, written, passed, ended = (x[active] for x in (number, written, passed, ended))
        ids = written[..., -1].reshape(-1, 1)
    return finished.results(ordered=False)


def greedy(
    writer: Writer,
    source: Tensor,
    lengths: Tensor | None = None,
    *,
    length_penalty: str = "average",
    alpha: float | None = None,
    max_length: Limit = None,
    prefix: Sequence[Sequence[int]] | None = None,
    adjust: Sequence[Adjust] = (),
    begin: Tensor | None = None,
    on_token: OnToken | None = None,
    bos: int = BOS,
    eos: int = EOS,
    ends: Sequence[int] = (),
) -> list[list[Hypothesis]]:
    """Greedy decoding: take the most likely token at each step."""
    constraints = _Constraints(source, lengths, max_length, prefix, eos)

    divisor = penalty(length_penalty, alpha)
    rest = adjust, begin, on_token, bos, eos, ends
    return _decode_one_by_one(writer, source, lengths, constraints, _most_likely, 1, divisor, *rest)


def sample(
    writer: Writer,
    source: Tensor,
    lengths: Tensor | None = None,
    *,
    samples: int = 1,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int = 0,
    lines: Sequence[int] | None = None,
    length_penalty: str = "average",
    alpha: float | None = None,
    max_length: Limit = None,
    prefix: Sequence[Sequence[int]] | None = None,
    adjust: Sequence[Adjust] = (),
    begin: Tensor | None = None,
    on_token: OnToken | None = None,
    bos: int = BOS,
    eos: int = EOS,
    ends: Sequence[int] = (),
) -> list[list[Hypothesis]]:
    """Sampling: draw each token by its probability; texts come in the order they were drawn.

    What is drawn for a sentence depends on the seed and the number of its line alone. Temperature
    comes first, then top_k, top_p and min_p; log-probabilities are those of the model itself.
    """
    if on_token is not None and samples > 1:
        raise UsageError(f"samples={samples} texts cannot be streamed token by token; choose 1")
    if samples < 1:
        raise UsageError(f"samples={samples} asks for nothing; choose 1 or more")
    if not 0 <= temperature < inf:
        raise UsageError(f"temperature={temperature} is not a number from 0 on")
    cuts = [(top_k, keep_top_k), (top_p, keep_top_p), (min_p, keep_min_p)]
    changes = [make(value) for value, make in cuts if value is not None]
    constraints = _Constraints(source, lengths, max_length, prefix, eos)
    lines = range(source.shape[0]) if lines is None else lines
    if len(lines) != source.shape[0]:
        raise UsageError(f"{len(lines)} line numbers for {source.shape[0]} sentences")
    uniforms = torch.zeros(len(lines), constraints.longest, samples, dtype=torch.float64)
    for row, line, most in zip(uniforms, lines, constraints.limit.tolist(), strict=True):
        row[:most] = torch.rand(
            most, samples, dtype=torch.float64, generator=_generator(seed, line)
        )
    uniforms = uniforms.to(source.device)

    def pick(logits: Tensor, written: Tensor, step: int, number: Tensor) -> tuple[Tensor, Tensor]:
        if temperature == 0:
            return _most_likely(logits, written, step, number)
        logprobs = _logprobs(logits)
        logits = logprobs / temperature
        for change in changes:
            logits = change(logits, written)
        # the token at which the sum of the probabilities passes the number drawn from [0, 1)
        sums = logits.double().softmax(1).cumsum(1)
        point = uniforms[number, step].view(-1, 1) * sums[:, -1:]
        token = torch.searchsorted(sums, point, right=True).clamp_(max=logits.shape[1] - 1)
        return token, logprobs.gather(1, token)

    divisor = penalty(length_penalty, alpha)
    rest = adjust, begin, on_token, bos, eos, ends
    return _decode_one_by_one(writer, source, lengths, constraints, pick, samples, divisor, *rest)


def _generator(seed: int, line: int) -> torch.Generator:
    """Return the random generator of one line, unrelated to those of other lines and seeds."""
    digest = blake2b(f"{seed} {line}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big"))


@torch.inference_mode()
def score(
    writer: Writer,
    source: Tensor,
    lengths: Tensor | None,
    texts: Sequence[Sequence[int]],
    *,
    length_penalty: str = "average",
    alpha: float | None = None,
    bos: int = BOS,
    eos: int = EOS,
) -> list[Hypothesis]:
    """Forced decoding: return the log-probability of each token of a given text per sentence."""
    count = source.shape[0]
    if len(texts) != count:
        raise UsageError(f"{len(texts)} texts for {count} sentences; give one for each")
    finished = _FinishedHypotheses(count, penalty(length_penalty, alpha), 1)
    if count == 0:
        return []
    longest = max(map(len, texts)) + 1
    ids = torch.full((count, longest + 1), eos, device=source.device)
    ids[:, 0] = bos
    for row, text in zip(ids, texts, strict=True):
        row[1 : len(text) + 1] = ids.new_tensor(text)
    state = writer.start(source, lengths, capacity=longest)
    parts = []
    for start in range(0, longest, SPAN):
        end = min(longest, start + SPAN)
        logits, state = writer.step(ids[:, start:end], state)
        chosen = logits.gather(2, ids[:, start + 1 : end + 1].unsqueeze(-1)).squeeze(-1)
        parts.append(chosen - logits.logsumexp(-1))
    passed = torch.cat(parts, dim=1).double().cumsum(1).tolist()
    for sentence, (text, values) in enumerate(zip(texts, passed, strict=True)):
        finished.add(sentence, list(text), values[: len(text) + 1])
    return [one for (one,) in finished.results(ordered=False)]
