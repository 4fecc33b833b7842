"""Recurrent networks, and a decoder with attention to a memory.

Shapes: b sentences, r = b times hypotheses rows, t words, s places of the memory.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.attention.attend import attend
from regard.attention.dropout import dropout
from regard.attention.masks import Mask, Padding
from regard.attention.multihead import is_linear
from regard.attention.normalisers import Sample
from regard.attention.scores import Additive, Bilinear, Dot, Gaussian
from regard.attention.watch import as_one
from regard.errors import UsageError, lookup
from regard.layers.block import prob_field, size_field
from regard.settings import setting

Given = Callable[[Tensor], Tensor]  # from what is known of a word to what a cell is given
Parts = tuple[Tensor, ...]  # what a cell remembers, each (r, w); what it says comes first


@dataclass(frozen=True)
class CellConfig:
    """The cells of a recurrent network, and the attention of its decoder."""

    width: int = size_field(256, 2**16, "width of the cells")
    cell: str = setting("lstm", "recurrent cell", choices=lambda: CELLS)
    attention: str = setting("additive", "attention score", choices=lambda: ATTENTIONS)
    order: str = setting(
        "before", "when attention is asked: before or after the cell", choices=lambda: ORDERS
    )
    normalise: str = setting("softmax", "normalisation of the scores", choices=lambda: NORMALISES)
    readout: str = setting("maxout", "readout before the vocabulary head", choices=lambda: READOUTS)
    dropout: float = prob_field(0.2, "dropout")


# Cells


class Cell(nn.Module):
    """A recurrent cell: its next output follows from its input and its state."""

    gates = 1  # rows of its matrices, in widths
    parts = 1  # tensors of its state

    def __init__(self, inner: int, width: int):
        super().__init__()
        self.width = width
        self.given = nn.Linear(inner, self.gates * width)
        self.past = nn.Linear(width, self.gates * width, bias=False)

    def reset_parameters(self) -> None:
        """Initialise every gate by Glorot's rule, and recurrent matrices as orthogonal ones."""
        for part in self.given.weight.split(self.width):
            nn.init.xavier_uniform_(part)
        for part in self.past.weight.split(self.width):
            nn.init.orthogonal_(part)
        nn.init.zeros_(self.given.bias)

    def step(self, given: Tensor, state: Parts) -> Parts:
        """Return the next state; `given` (r, gates w) is the projected input."""
        raise NotImplementedError

    def forward(self, x: Tensor, state: Parts) -> tuple[Tensor, Parts]:
        """Run over (r, t, inner) and return all outputs and the last state."""
        said = []
        for given in self.given(x).unbind(1):
            state = self.step(given, state)
            said.append(state[0])
        return torch.stack(said, 1), state


class LSTM(Cell):
    """Long short-term memory (Hochreiter and Schmidhuber 1997, forgetting as Gers et al. 2000).

    i, f, g, o = W x + U h; c' = sigmoid(f) c + sigmoid(i) tanh(g); h' = sigmoid(o) tanh(c').
    """

    gates, parts = 4, 2

    def reset_parameters(self) -> None:
        """Initialise as every cell, but with the forget gate open."""
        super().reset_parameters()
        nn.init.ones_(self.given.bias[self.width : 2 * self.width])

    def step(self, given: Tensor, state: Parts) -> Parts:
        """Return the next hidden and cell state."""
        h, c = state
        if is_linear(self.past) and self.past.bias is None:
            all_four = torch.addmm(given, h, self.past.weight.t())
        else:
            all_four = given + self.past(h)
        i, f, g, o = all_four.chunk(4, -1)
        c = torch.addcmul(f.sigmoid() * c, i.sigmoid(), g.tanh())
        return o.sigmoid() * c.tanh(), c


class GRU(Cell):
    """The gated recurrent unit (Cho et al. 2014).

    r, u = sigmoid(W x + U h); n = tanh(W' x + r U' h); h' = u h + (1 - u) n.
    """

    gates = 3

    def step(self, given: Tensor, state: Parts) -> Parts:
        """Return the next hidden state."""
        (h,) = state
        gates, new = given.split([2 * self.width, self.width], -1)
        past, old = self.past(h).split([2 * self.width, self.width], -1)
        r, u = (gates + past).sigmoid().chunk(2, -1)
        new = torch.tanh(torch.addcmul(new, r, old))
        return (torch.addcmul(new, u, h - new),)


CELLS: dict[str, type[Cell]] = {"lstm": LSTM, "gru": GRU}


def build_cells(config: CellConfig, inner: int, depth: int) -> list[Cell]:
    """Make a stack of cells, the lowest with inputs of a width `inner`."""
    kind = lookup("cell", config.cell, CELLS)
    return [kind(config.width if i else inner, config.width) for i in range(depth)]


def init_cells(model: nn.Module) -> None:
    """Initialise every cell of a model."""
    for part in model.modules():
        if isinstance(part, Cell):
            part.reset_parameters()


# Attention


class ReinforceTape:
    """The samples of hard attention and their baselines, for REINFORCE (Williams 1992).

    The gradient of an expected loss is that of log p(sample) (loss - baseline), for any baseline
    that does not depend on the sample. Here the loss is that of the token and of all after it.
    """

    def __init__(self):
        self.log_probs: list[Tensor] = []  # of what was sampled, (b, t)
        self.baselines: list[Tensor] = []  # expected losses, (b, t)

    def loss(self, losses: Tensor, real: Tensor | None = None) -> Tensor:
        """Return zero, with the gradient of REINFORCE for the losses of tokens (b, t).

        Tokens that are not `real`, but padding, count for nothing.
        """
        if not self.log_probs:
            return losses.new_zeros(())
        log_prob, baseline = torch.cat(self.log_probs, 1), torch.cat(self.baselines, 1)
        real = torch.ones_like(losses, dtype=torch.bool) if real is None else real
        ahead = losses.detach().masked_fill(~real, 0.0).flip(1).cumsum(1).flip(1)
        learns = log_prob * (ahead - baseline.detach())
        learns = learns + BASELINE * F.smooth_l1_loss(baseline, ahead, reduction="none")
        learns = learns.masked_fill(~real, 0.0).sum()
        return learns - learns.detach()


BASELINE = 0.01  # of the baseline's own loss: small, so that it does not use up a clipped gradient


class SoftAttention(nn.Module):
    """Soft attention: a softmax over all places."""

    def forward(self, q: Tensor, draws: ReinforceTape | None) -> str:
        """Return the softmax."""
        return "softmax"


class HardAttention(nn.Module):
    """Hard attention: one place, sampled in training, the most probable otherwise (Xu et al. 2015).

    The baseline is predicted from the decoder's state.
    """

    def __init__(self, width: int):
        super().__init__()
        self.baseline = nn.Linear(width, 1)

    def forward(self, q: Tensor, draws: ReinforceTape | None) -> str | Callable[[Tensor], Tensor]:
        """Return what samples for queries (b, q, w), and records the samples."""
        if not self.training:
            return "argmax"
        sample = Sample()

        def draw(scores: Tensor) -> Tensor:
            weights = sample(scores)
            if draws is not None and sample.log_probability is not None:
                draws.log_probs.append(sample.log_probability.squeeze(1))
                draws.baselines.append(self.baseline(q.detach()).squeeze(-1))
            return weights

        return draw


# name -> what makes weights of scores, for queries of a width
NORMALISES: dict[str, Callable[[int], nn.Module]] = {
    "softmax": lambda width: SoftAttention(),
    "sample": HardAttention,
}


class CrossAttention(nn.Module):
    """Attention of a recurrent decoder's states (b, q, w) to a memory (b, s, m), with one head."""

    heads = 1

    def __init__(self, width: int, memory_width: int, normalise: nn.Module | None = None):
        super().__init__()
        self.normalise = normalise or SoftAttention()

    def read(self, memory: Tensor, mask: Mask | None) -> Tensor:
        """Return the keys of a memory, computed once."""
        return memory

    def ask(self, q: Tensor, keys: Tensor, mask: Mask | None) -> tuple[Tensor, Any]:
        """Return the queries as the score takes them, and the score."""
        raise NotImplementedError

    def forward(
        self,
        q: Tensor,
        keys: Tensor,
        memory: Tensor,
        mask: Mask | None = None,
        draws: ReinforceTape | None = None,
    ) -> Tensor:
        """Return the context vectors (b, q, m)."""
        asked, score = self.ask(q, keys, mask)
        seen = attend(
            asked.unsqueeze(1),
            keys.unsqueeze(1),
            memory.unsqueeze(1),
            score=score,
            mask=mask,
            normalise=self.normalise(q, draws),
            watch=self,
        )
        return seen.squeeze(1)


class AdditiveAttention(CrossAttention):
    """v . tanh(W s + U h) (Bahdanau et al. 2015), U h computed once a sentence."""

    def __init__(self, width: int, memory_width: int, normalise: nn.Module | None = None):
        super().__init__(width, memory_width, normalise)
        self.score = Additive(width, memory_width)

    def read(self, memory: Tensor, mask: Mask | None) -> Tensor:
        """Return U h."""
        return self.score.key(memory)

    def ask(self, q: Tensor, keys: Tensor, mask: Mask | None) -> tuple[Tensor, Any]:
        """Return W s, and the rest of the score."""
        return self.score.query(q), self._match

    def _match(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.tanh(q.unsqueeze(-2) + k.unsqueeze(-3)) @ self.score.vector


class DotAttention(CrossAttention):
    """s . h / sqrt(w) (Luong et al. 2015), for states as wide as the memory."""

    def __init__(self, width: int, memory_width: int, normalise: nn.Module | None = None):
        super().__init__(width, memory_width, normalise)
        if width != memory_width:
            raise UsageError(
                f"attention=dot compares a state of {width} numbers with a memory of "
                f"{memory_width}; choose bilinear, or a memory as wide (direction=forward)"
            )

    def ask(self, q: Tensor, keys: Tensor, mask: Mask | None) -> tuple[Tensor, Any]:
        """Return the states as they are."""
        return q, Dot()


class BilinearAttention(CrossAttention):
    """s W h / sqrt(m): Luong's general score."""

    def __init__(self, width: int, memory_width: int, normalise: nn.Module | None = None):
        super().__init__(width, memory_width, normalise)
        self.score = Bilinear(width, memory_width)

    def ask(self, q: Tensor, keys: Tensor, mask: Mask | None) -> tuple[Tensor, Any]:
        """Return the states as they are."""
        return q, self.score


class LocationAttention(CrossAttention):
    """Location-based attention: the place follows from the state alone.

    It is p = S sigmoid(v . tanh(W s)) among S (Luong et al. 2015, local-p), and its
    neighbours count by exp(-(i - p)^2 / 2 sigma^2), with sigma learned: the gaussian score of one
    coordinate.
    """

    def __init__(self, width: int, memory_width: int, normalise: nn.Module | None = None):
        super().__init__(width, memory_width, normalise)
        self.place = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
        self.sharpness = nn.Parameter(torch.tensor(0.5))  # one over sigma

    def read(self, memory: Tensor, mask: Mask | None) -> Tensor:
        """Return the place of each, counted from the middle so that its square stays small."""
        at = torch.arange(memory.shape[1], dtype=memory.dtype, device=memory.device)
        middle = self._places(memory.shape[1], mask, at) / 2
        return ((at - middle) * self.sharpness).expand(len(memory), -1).unsqueeze(-1)

    def ask(self, q: Tensor, keys: Tensor, mask: Mask | None) -> tuple[Tensor, Any]:
        """Return the places that the states point to."""
        places = self._places(keys.shape[1], mask, q).unsqueeze(-1)
        return self.sharpness * places * (self.place(q).sigmoid() - 0.5), Gaussian()

    @staticmethod
    def _places(most: int, mask: Mask | None, like: Tensor) -> Tensor:
        """Return how many places there are, (b or 1, 1)."""
        if isinstance(mask, Padding):
            return mask.keep.sum(-1, keepdim=True).to(like.dtype)
        return like.new_full((1, 1), most)


ATTENTIONS: dict[str, type[CrossAttention] | None] = {
    "none": None,  # one fixed context for all words
    "additive": AdditiveAttention,
    "dot": DotAttention,
    "bilinear": BilinearAttention,
    "location": LocationAttention,
}


# Readouts


class Maxout(nn.Module):
    """Maxout of state, word and context (Bahdanau's deep output)."""

    def __init__(self, width: int, memory_width: int):
        super().__init__()
        self.state = nn.Linear(width, 2 * width)
        self.word = nn.Linear(width, 2 * width, bias=False)
        self.context = nn.Linear(memory_width, 2 * width, bias=False)

    def forward(self, state: Tensor, word: Tensor, context: Tensor) -> Tensor:
        """Return (..., w)."""
        both = self.state(state) + self.word(word) + self.context(context)
        return torch.maximum(*both.chunk(2, -1))


class Tanh(nn.Module):
    """tanh(W [context; state]): Luong's attentional state."""

    def __init__(self, width: int, memory_width: int):
        super().__init__()
        self.state = nn.Linear(width, width)
        self.context = nn.Linear(memory_width, width, bias=False)

    def forward(self, state: Tensor, word: Tensor, context: Tensor) -> Tensor:
        """Return (..., w)."""
        return torch.tanh(self.state(state) + self.context(context))


READOUTS: dict[str, type[Maxout] | type[Tanh]] = {"maxout": Maxout, "tanh": Tanh}


# The decoder


@dataclass
class RecurrentState:
    """The state of decoding: sentences with their memory, and hypotheses with their cells' states.

    Row i * hypotheses + j is hypothesis j of sentence i; the memory is there once a sentence.
    """

    memory: Tensor  # (b, s, m)
    keys: Tensor  # (b, s, k)
    mask: Mask | None
    parts: list[Parts]  # of each layer, and whatever else goes with a hypothesis: (r, ...)
    hypotheses: int = 1
    length: int = 0  # tokens of each hypothesis that have been read

    @property
    def sentences(self) -> int:
        """Return how many sentences are still being written."""
        return len(self.memory)

    def _move(self, rows: Tensor) -> None:
        flat = rows.flatten()
        self.parts = [tuple(part[flat] for part in parts) for parts in self.parts]
        self.hypotheses = rows.shape[1]

    def _rows(self, device: torch.device) -> Tensor:
        count = self.sentences * self.hypotheses
        return torch.arange(count, device=device).view(-1, self.hypotheses)

    def select(self, parents: Tensor) -> "RecurrentState":
        """Let hypothesis j of sentence i continue hypothesis parents[i, j] of that sentence."""
        self._move(self._rows(parents.device).gather(1, parents))
        return self

    def keep(self, sentences: Tensor) -> "RecurrentState":
        """Go on with these sentences only."""
        self._move(self._rows(sentences.device)[sentences])
        self.memory, self.keys = self.memory[sentences], self.keys[sentences]
        if isinstance(self.mask, Padding):
            self.mask = Padding(self.mask.keep[sentences])
        return self


class RecurrentDecoder(nn.Module):
    """A recurrent decoder with attention to a memory, up to the vectors before the head.

    s_t = g(y_{t-1}, s_{t-1}, c_t), where c_t is the context vector. Only the lowest cell
    has it as input, so that the cells above read all words at once.
    """

    def __init__(
        self,
        config: CellConfig,
        vocab: int,
        memory_width: int,
        depth: int = 1,
        normalises: Mapping[str, Callable[[int], nn.Module]] = MappingProxyType(NORMALISES),
    ):
        super().__init__()
        self.width = width = config.width
        look = lookup("attention", config.attention, ATTENTIONS)
        order = lookup("order", config.order, ORDERS)
        self.order = order.read if look else _fixed
        self.tokens = nn.Embedding(vocab, width)
        self.scale, self.drop = width**0.5, config.dropout
        inner = order.inner(width, memory_width) if look else memory_width
        self.cell, *upper = build_cells(config, width + inner, depth)
        self.upper = nn.ModuleList(upper)
        self.first = nn.Linear(memory_width, depth * self.cell.parts * width)
        self.cross = None
        if look is not None:
            normalise = lookup("normalise", config.normalise, normalises)(width)
            self.cross = look(width, memory_width, normalise)
        self.readout = lookup("readout", config.readout, READOUTS)(width, memory_width)

    def begin(
        self, memory: Tensor, mask: Mask | None = None, *, context: Tensor | None = None
    ) -> RecurrentState:
        """Return the first state for a memory (b, s, m), computed of a `context` (b, m).

        Without one, that is the mean of the memory.
        """
        if context is None:
            context = attend(
                memory.new_zeros(len(memory), 1, 1),
                memory.new_zeros(len(memory), memory.shape[1], 1),
                memory,
                mask=mask,
            ).squeeze(1)
        keys = memory if self.cross is None else self.cross.read(memory, mask)
        parts = self.cell.parts
        begun = torch.tanh(self.first(context)).split(self.width, -1)
        cells = [tuple(begun[i : i + parts]) for i in range(0, len(begun), parts)]
        said = torch.zeros_like(begun[0])
        return RecurrentState(memory, keys, mask, [*cells, (said, context)])

    def read(
        self, tokens: Tensor, state: RecurrentState, draws: ReinforceTape | None = None
    ) -> tuple[Tensor, RecurrentState]:
        """Read the next tokens (r, t) and return the vectors before the head, (r, t, w).

        The state is changed in place.
        """
        words = dropout(self.tokens(tokens) * self.scale, self.drop, self.training)
        said = self.order(self, words, state, draws)
        state.length += tokens.shape[1]
        return dropout(said, self.drop, self.training), state

    def look(self, q: Tensor, state: RecurrentState, draws: ReinforceTape | None) -> Tensor:
        """Return the context vectors of states (r, t, w); hypotheses share their memory."""
        assert self.cross is not None
        together = q.reshape(state.sentences, -1, q.shape[-1])
        seen = self.cross(together, state.keys, state.memory, state.mask, draws)
        return seen.view(*q.shape[:-1], -1)

    def above(self, x: Tensor, state: RecurrentState) -> Tensor:
        """Pass the outputs of the lowest cell (r, t, w) through those above it."""
        for i, cell in enumerate(self.upper, 1):
            x, state.parts[i] = cell(dropout(x, self.drop, self.training), state.parts[i])
        return x

    def known(self, words: Tensor) -> tuple[tuple[Tensor, ...], Callable[[Tensor], Given]]:
        """Return what is known of all words, and what adds the rest that the lowest cell is given.

        Part of the product is done for all words at once, if the matrix is nothing but one.
        """
        given = self.cell.given
        if not is_linear(given):
            beside = lambda x: lambda one: given(torch.cat([one, x], -1))  # noqa: E731
            return words.unbind(1), beside
        of_words, rest = given.weight.split([self.width, given.in_features - self.width], 1)

        def add(x: Tensor) -> Given:
            same = F.linear(x, rest)
            return lambda one: one + same

        return F.linear(words, of_words, given.bias).unbind(1), add


def _fixed(
    decoder: RecurrentDecoder, words: Tensor, state: RecurrentState, draws: ReinforceTape | None
) -> Tensor:
    """Give every word the same context: the bottleneck (Cho et al. 2014)."""
    given, rest = decoder.known(words)
    _, context = state.parts[-1]
    same = rest(context)
    cell, parts, said = decoder.cell, state.parts[0], []
    for one in given:
        parts = cell.step(same(one), parts)
        said.append(parts[0])
    state.parts[0] = parts
    top = decoder.above(torch.stack(said, 1), state)
    return decoder.readout(top, words, context.unsqueeze(1))


def _before(
    decoder: RecurrentDecoder, words: Tensor, state: RecurrentState, draws: ReinforceTape | None
) -> Tensor:
    """CrossAttention with the last state, then go on with what is seen (Bahdanau et al. 2015)."""
    given, rest = decoder.known(words)
    cell, parts, said, seen = decoder.cell, state.parts[0], [], []
    with as_one(decoder.cross):
        for one in given:
            context = decoder.look(parts[0].unsqueeze(1), state, draws).squeeze(1)
            parts = cell.step(rest(context)(one), parts)
            said.append(parts[0])
            seen.append(context)
    state.parts[0] = parts
    top = decoder.above(torch.stack(said, 1), state)
    return decoder.readout(top, words, torch.stack(seen, 1))


def _after(
    decoder: RecurrentDecoder, words: Tensor, state: RecurrentState, draws: ReinforceTape | None
) -> Tensor:
    """Update states with words alone, and attend with all of them at once (Luong et al. 2015)."""
    x, state.parts[0] = decoder.cell(words, state.parts[0])
    top = decoder.above(x, state)
    return decoder.readout(top, words, decoder.look(top, state, draws))


def _input_feeding(
    decoder: RecurrentDecoder, words: Tensor, state: RecurrentState, draws: ReinforceTape | None
) -> Tensor:
    """Feed the last output back in, and attend with the new state (Luong et al. 2015)."""
    given, rest = decoder.known(words)
    said = []
    with as_one(decoder.cross):
        for one, word in zip(given, words.split(1, 1), strict=True):
            last, context = state.parts[-1]
            state.parts[0] = decoder.cell.step(rest(last)(one), state.parts[0])
            top = decoder.above(state.parts[0][0].unsqueeze(1), state)
            now = decoder.readout(top, word, decoder.look(top, state, draws)).squeeze(1)
            state.parts[-1] = now, context
            said.append(now)
    return torch.stack(said, 1)


class Order(NamedTuple):
    """When a decoder attends: the width of its lowest cell's further input, and its recurrence."""

    inner: Callable[[int, int], int]
    read: Callable[[RecurrentDecoder, Tensor, RecurrentState, ReinforceTape | None], Tensor]


ORDERS: dict[str, Order] = {
    "before": Order(lambda width, memory: memory, _before),
    "after": Order(lambda width, memory: 0, _after),
    "input_feeding": Order(lambda width, memory: width, _input_feeding),
}
