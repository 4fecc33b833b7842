"""The ladder from a gated unit to a transformer: five language models that differ in one part.

A gated unit is attention over its own history. h_t = u_t h_{t-1} + (1 - u_t) c_t unrolls to
h_t = sum_{i<=t} w_ti c_i with the weights w_ti = (prod_{i<j<=t} u_j) (1 - u_i). Each rung frees
something of it: the weights, the candidates c, keys from values, and last one head from another.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Unpack, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from regard.attention.attend import attend
from regard.attention.masks import Causal, Mask, Padding
from regard.attention.multihead import Cache, MultiHead, RowSelect, SelfAttentionInputs
from regard.attention.positions import POSITION_ALIASES, with_aliases
from regard.attention.watch import watcher
from regard.errors import UsageError, lookup
from regard.layers.block import BlockConfig, build_attention
from regard.layers.shapes import Ids, Lengths, Vectors
from regard.models import gpt
from regard.models.declaration import FamilyInfo
from regard.models.gpt import GPT, GPTConfig
from regard.models.state import State
from regard.settings import setting

# positions that are added to the input: a recurrence has neither queries nor keys to turn
_LADDER_POSITIONS = ("none", "sinusoidal", "learned")


@dataclass(frozen=True)
class LadderConfig(GPTConfig):
    """The sizes and parts of a decoder whose attention is one of the rungs."""

    position: str = setting(
        "sinusoidal", "position embedding", choices=with_aliases(_LADDER_POSITIONS)
    )
    scale_embedding: bool = True
    init: str = "scaled"
    rung: str = setting("gated", "kind of attention", choices=lambda: RUNGS)
    gates: int | None = setting(None, "number of gates (rung=gated); none: one per channel", min=1)


def past_weights(gates: Float[Tensor, "... l"]) -> Float[Tensor, "... l l"]:
    """Share that a gated unit keeps of each of its candidates, from its gates' logits.

    The weights are (prod_{i<j<=t} u_j) (1 - u_i), and the rest of a row is for h_0 = 0. Their
    logarithms are sums, taken in fp64: differences of long sums lose too much in fp32.
    """
    kept = F.logsigmoid(gates.double())
    so_far = kept.cumsum(-1)
    written = kept - gates.double()  # log(1 - u)
    log = so_far.unsqueeze(-1) + (written - so_far).unsqueeze(-2)
    ahead = torch.ones(log.shape[-2:], dtype=torch.bool, device=log.device).triu(1)
    return log.masked_fill(ahead, -torch.inf).exp().to(gates.dtype)


def gated_attention(
    candidates: Vectors,
    gates: Float[Tensor, "b l g"],
    *,
    mask: Mask | None = None,
    watch: object = None,
) -> Vectors:
    """States of a gated unit as attention over its candidates, with given weights.

    Every gate is a head, and the candidates of its channels are the values.
    """
    heads = gates.shape[-1]
    values = candidates.unflatten(-1, (heads, -1)).transpose(1, 2)
    weights = past_weights(gates.transpose(1, 2))
    out = attend(values, values, values, normalise=weights, mask=mask, watch=watch)
    return out.transpose(1, 2).flatten(2)


class RecurrentCache(Cache):
    """A cache that also holds the last hidden vectors of each text, (sentence, hypothesis, w)."""

    past: Tensor | None = None

    def begin(self, prompts: Tensor, width: int) -> None:
        """Keep the vectors at the ends of prompts, of which all vectors (b, l, w) are there yet."""
        last = self.v.new_zeros(len(prompts), width)
        if self.past is not None:
            read = torch.cat([last.unsqueeze(1), self.past], 1)
            last = read[torch.arange(len(prompts), device=read.device), prompts]
        self.past = last.unsqueeze(1)

    def keep(self, select: RowSelect) -> None:
        """Go on with some sentences only."""
        super().keep(select)
        if self.past is not None:
            self.past = self.past[select.rows]

    def join(self, other: Cache) -> None:
        """Go on with the sentences of another cache too."""
        super().join(other)
        past = cast(RecurrentCache, other).past
        assert self.past is not None and past is not None
        self.past = torch.cat([self.past, past])


class LadderState(State):
    """A state whose hypotheses have their own last vectors."""

    def select(self, parents: Tensor) -> "LadderState":
        """Let hypothesis j of sentence i continue hypothesis parents[i, j] of that sentence."""
        for cache in cast(list[RecurrentCache], self.caches):
            assert cache.past is not None
            index = parents.unsqueeze(-1).expand(-1, -1, cache.past.shape[-1])
            cache.past = cache.past.gather(1, index)
        super().select(parents)
        return self


def seen_among(mask: Mask | None, length: int) -> Tensor | None:
    """Mask of packed documents, (b, q, k); None if it is only causal."""
    if mask is None or mask.aligned(length, length):
        return None
    return mask.tile(slice(0, length), slice(0, length))[:, 0]


def carry(h: Tensor, seen: Tensor | None, t: int) -> Tensor:
    """h where token t belongs to the same document as the one before, else zeros."""
    if seen is None or t == 0:
        return h
    return h.masked_fill(~seen[:, t, t - 1, None], 0.0)


class RecurrentAttention(nn.Module):
    """Attention whose next output depends on the last one, which a cache keeps."""

    out: nn.Linear

    def forward(self, x: Vectors, **inputs: Unpack[SelfAttentionInputs]) -> Vectors:
        """Read texts from their beginning, or the next token after a cached state."""
        cache = cast(RecurrentCache | None, inputs.get("cache"))
        h = self.states(x, inputs["at"], inputs.get("mask"), cache)
        if cache is not None:
            cache.past = h
        return self.out(h)

    def states(
        self, x: Tensor, at: Tensor, mask: Mask | None, cache: RecurrentCache | None
    ) -> Tensor:
        """h of each token, whose keys and values are added to the cache."""
        raise NotImplementedError


class Gated(RecurrentAttention):
    """A gated unit: c_t = tanh(W x_t + U h_{t-1}), h_t = u_t h_{t-1} + (1 - u_t) c_t.

    The gates u_t = sigmoid(W' x_t + U' h_{t-1}) are those of single channels or of groups of them.
    The recurrence is to this attention what the fused kernel is to a softmax: it gives the output
    in linear memory, and the weights are made only for those who watch.
    """

    kv_heads, head_width = 1, 0  # nothing is cached but the last vector

    def __init__(self, width: int, gates: int, bias: bool):
        super().__init__()
        if width % gates:
            raise UsageError(f"gates={gates} does not divide width={width}; choose one that does")
        self.width, self.heads = width, gates
        self.reads = nn.Linear(width, width + gates, bias=bias)
        self.again = nn.Linear(width, width + gates, bias=False)
        self.out = nn.Linear(width, width, bias=bias)

    def tick(self, read: Tensor, before: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """h_t, c_t and the gates' logits, from the projected x_t and from h_{t-1}."""
        candidate, gates = (read + self.again(before)).split([self.width, self.heads], -1)
        candidate, kept = candidate.tanh(), gates.sigmoid()
        if self.heads < self.width:
            kept = kept.repeat_interleave(self.width // self.heads, -1)
        return torch.lerp(candidate, before, kept), candidate, gates

    def unroll(self, x: Tensor, mask: Mask | None) -> list[Tensor]:
        """h, candidates and the gates' logits of all tokens, one after the other."""
        seen, h = seen_among(mask, x.shape[1]), torch.zeros_like(x[:, 0])
        made = []
        for t, read in enumerate(self.reads(x).unbind(1)):
            made.append(self.tick(read, carry(h, seen, t)))
            h = made[-1][0]
        return [torch.stack(part, 1) for part in zip(*made, strict=True)]

    def states(
        self, x: Tensor, at: Tensor, mask: Mask | None, cache: RecurrentCache | None
    ) -> Tensor:
        """Unroll texts from their beginning, or take the next step after a cached state."""
        if cache is not None and cache.past is not None:
            h = self.tick(self.reads(x), cache.past)[0]
        else:
            h, candidates, gates = self.unroll(x, mask)
            if watcher() is not None:
                gated_attention(candidates, gates, mask=mask or Causal(), watch=self)
        if cache is not None:
            nothing = x.new_empty(len(x), 1, x.shape[1], 0)
            cache.append(nothing, nothing, at)
        return h


class SequentialCandidates(nn.Module):
    """Candidates c_t = tanh(W x_t + U h_{t-1}), where h is the average of those before."""

    def __init__(self, width: int, bias: bool):
        super().__init__()
        self.reads = nn.Linear(width, width, bias=bias)
        self.again = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, q: Tensor, mask: Mask | None, past: Tensor | None) -> Tensor:
        """Candidates of texts from their beginning, or after h."""
        read = self.reads(x)
        if past is not None:
            return (read + self.again(past)).tanh()
        seen, h, made = seen_among(mask, x.shape[1]), torch.zeros_like(x[:, 0]), []
        for t, (now, asks) in enumerate(zip(read.unbind(1), q.split(1, 1), strict=True)):
            made.append((now + self.again(carry(h, seen, t))).tanh())
            c = torch.stack(made, 1)
            own = None if seen is None else Padding(seen[:, t, : t + 1])
            h = attend(asks, c, c, mask=own).squeeze(1)
        return torch.stack(made, 1)


class ParallelCandidates(nn.Module):
    """Candidates c_t = tanh(W x_t), each for itself."""

    def __init__(self, width: int, bias: bool):
        super().__init__()
        self.reads = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor, q: Tensor, mask: Mask | None, past: Tensor | None) -> Tensor:
        """Candidates of all tokens."""
        return self.reads(x).tanh()


Candidates = SequentialCandidates | ParallelCandidates


class Average(RecurrentAttention):
    """One head, its keys and values the candidates: h_t = sum_i softmax_i(q_t c_i / √w) c_i."""

    heads = kv_heads = 1

    def __init__(
        self, width: int, candidates: SequentialCandidates | ParallelCandidates, bias: bool
    ):
        super().__init__()
        self.head_width = width
        self.asks = nn.Linear(width, width, bias=bias)
        self.candidates = candidates
        self.out = nn.Linear(width, width, bias=bias)

    def states(
        self, x: Tensor, at: Tensor, mask: Mask | None, cache: RecurrentCache | None
    ) -> Tensor:
        """Let every token attend to all candidates so far."""
        q = self.asks(x)
        k = v = self.candidates(x, q, mask, None if cache is None else cache.past).unsqueeze(1)
        if cache is not None:
            k, v = cache.append(k, v, at)
        return attend(q.unsqueeze(1), k, v, mask=mask, watch=self).squeeze(1)


Rung = Gated | Average | MultiHead


def gated(config: LadderConfig) -> Rung:
    """Weights of gates, recurrent candidates."""
    block = config.block
    return Gated(block.width, config.gates or block.width, block.bias)


def free_weights(config: LadderConfig) -> Rung:
    """Softmax weights: any candidate may be attended to, however long ago."""
    block = config.block
    return Average(block.width, SequentialCandidates(block.width, block.bias), block.bias)


def free_candidates(config: LadderConfig) -> Rung:
    """Candidates without recurrence, all computed in parallel."""
    block = config.block
    return Average(block.width, ParallelCandidates(block.width, block.bias), block.bias)


def keys_values(config: LadderConfig) -> Rung:
    """Keys and values are separate projections."""
    return build_attention(replace(config.block, heads=1))


def heads(config: LadderConfig) -> Rung:
    """Many heads: the layer of a transformer."""
    return build_attention(config.block)


# name -> what makes its layer, and how many tokens a step of decoding reads at most
RUNGS: dict[str, tuple[Callable[[LadderConfig], Rung], int | None]] = {
    "gated": (gated, 1),
    "free_weights": (free_weights, 1),
    "free_candidates": (free_candidates, None),
    "keys_values": (keys_values, None),
    "heads": (heads, None),
}
PRESETS: dict[str, LadderConfig] = {name: LadderConfig(rung=name) for name in RUNGS}


def resize(config: LadderConfig, like: GPTConfig) -> LadderConfig:
    """Config of a rung with the depth and block of a decoder."""
    return replace(config, depth=like.depth, block=like.block, max_length=like.max_length)


SIZES = {name: gpt.INFO.preset(name) for name in gpt.SIZES}
INFO = FamilyInfo("text", {"language": {}}, PRESETS, SIZES, resize)


def check(config: LadderConfig) -> None:
    """Refuse parts of a decoder that not every rung has."""
    position = POSITION_ALIASES.get(config.position, config.position)
    lookup("position of a ladder", position, dict.fromkeys(_LADDER_POSITIONS))
    plain, block = GPTConfig(), BlockConfig()
    for part, usual, names in (
        (config, plain, ("window", "prompt")),
        (config.block, block, ("kv_heads", "head_width", "score", "attention_dropout")),
    ):
        for name in names:
            if getattr(part, name) != getattr(usual, name):
                raise UsageError(
                    f"{name}={getattr(part, name)} is not for every rung; leave it out, or take gpt"
                )
    if config.gates is not None and config.rung != "gated":
        raise UsageError(f"gates={config.gates} is for rung=gated; rung={config.rung} has none")


class Ladder(GPT):
    """A decoder whose attention lies between a gated recurrent unit and multi-head attention."""

    cache, state = RecurrentCache, LadderState

    def __init__(self, config: LadderConfig):
        build, step_length = lookup("rung", config.rung, RUNGS)
        check(config)
        super().__init__(config, partial(build, config))
        self.config: LadderConfig = config
        self.step_length = step_length

    def start(
        self, source: Int[Tensor, "b s"], lengths: Lengths | None = None, *, capacity: int = 256
    ) -> State:
        """Read prompts but for their last tokens, with which the first step begins."""
        state = super().start(source, lengths, capacity=capacity)
        prompts = source.new_full((len(source),), source.shape[1]) if lengths is None else lengths
        for cache in cast(list[RecurrentCache], state.caches):
            cache.begin(prompts - 1, self.config.block.width)
        return state

    def step(self, ids: Ids, state: State) -> tuple[Float[Tensor, "b l vocab"], State]:
        """Read the next tokens of all hypotheses and return the logits after each."""
        parts = ids.split(self.step_length or ids.shape[1], dim=1)
        return torch.cat([super(Ladder, self).step(part, state)[0] for part in parts], 1), state
