"""A recurrent decoder with attention to a memory.

Shapes: b sentences, r = b times hypotheses rows, t words, s places of the memory.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.attention.attend import attend
from regard.attention.dropout import dropout
from regard.attention.masks import Mask, Padding, join_padding
from regard.attention.multihead import is_linear
from regard.attention.shapes import join_rows
from regard.attention.watch import as_one
from regard.errors import lookup
from regard.layers.block import prob_field, size_field
from regard.layers.recurrent.attention import ATTENTIONS, NORMALISES, ReinforceTape
from regard.layers.recurrent.cells import CELLS, Cell, Parts
from regard.settings import setting

Given = Callable[[Tensor], Tensor]  # from what is known of a word to what a cell is given


@dataclass(frozen=True)
class CellConfig:
    """The cells of a recurrent network, and the attention of its decoder."""

    width: int = size_field(256, 2**16, "width of the cells")
    cell: str = setting("lstm", "recurrent cell", choices=lambda: CELLS)
    attention: str = setting("additive", "attention score", choices=lambda: ATTENTIONS)
    order: str = setting(
        "before", "attend before or after the recurrent cell", choices=lambda: _ORDERS
    )
    normalise: str = setting("softmax", "normalisation of the scores", choices=lambda: NORMALISES)
    readout: str = setting(
        "maxout", "readout before the vocabulary head", choices=lambda: _READOUTS
    )
    dropout: float = prob_field(0.2, "dropout")


def build_cells(config: CellConfig, inner: int, depth: int) -> list[Cell]:
    """Make a stack of cells, the lowest with inputs of a width `inner`."""
    kind = lookup("cell", config.cell, CELLS)
    return [kind(config.width if i else inner, config.width) for i in range(depth)]


class Maxout(nn.Module):
    """Maxout of state, word and context (Bahdanau's deep output)."""

    def __init__(self, width: int, memory_width: int):
        super().__init__()
        self.state = nn.Linear(width, 2 * width)
        self.word = nn.Linear(width, 2 * width, bias=False)
        self.context = nn.Linear(memory_width, 2 * width, bias=False)

    def forward(self, state: Tensor, word: Tensor, context: Tensor) -> Tensor:
        """(..., w)."""
        both = self.state(state) + self.word(word) + self.context(context)
        return torch.maximum(*both.chunk(2, -1))


class Tanh(nn.Module):
    """tanh(W [context; state]): Luong's attentional state."""

    def __init__(self, width: int, memory_width: int):
        super().__init__()
        self.state = nn.Linear(width, width)
        self.context = nn.Linear(memory_width, width, bias=False)

    def forward(self, state: Tensor, word: Tensor, context: Tensor) -> Tensor:
        """(..., w)."""
        return torch.tanh(self.state(state) + self.context(context))


_READOUTS: dict[str, type[Maxout] | type[Tanh]] = {"maxout": Maxout, "tanh": Tanh}


@dataclass(eq=False)
class RecurrentState:
    """The state of decoding: sentences with their memory, and hypotheses with their cells' states.

    Row i * hypotheses + j is hypothesis j of sentence i; the memory is there once a sentence.
    """

    memory: Tensor  # (b, s, m)
    keys: Tensor  # (b, s, k)
    mask: Mask | None
    parts: list[Parts]  # of each layer, and whatever else goes with a hypothesis: (r, ...)
    hypotheses: int = 1
    length: int | Tensor = 0  # tokens that were read, (b) where sentences differ

    @property
    def sentences(self) -> int:
        """Number of sentences that are still being written."""
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
        if isinstance(self.length, Tensor):
            self.length = self.length[sentences]
        return self

    def join(self, other: "RecurrentState") -> "RecurrentState":
        """Go on with the sentences of another state too, which has as many hypotheses of each."""
        lengths = [
            one.memory.new_zeros(one.sentences, dtype=torch.long) + one.length
            for one in (self, other)
        ]
        self.length = torch.cat(lengths)
        self.mask = join_padding((self.mask, other.mask), (self.memory, other.memory))
        self.memory = join_rows(self.memory, other.memory, 1)
        self.keys = join_rows(self.keys, other.keys, 1)
        self.parts = [
            tuple(torch.cat(pair) for pair in zip(mine, theirs, strict=True))
            for mine, theirs in zip(self.parts, other.parts, strict=True)
        ]
        return self


class RecurrentDecoder(nn.Module):
    """A recurrent decoder with attention to a memory, up to the vectors before the head.

    s_t = g(y_{t-1}, s_{t-1}, c_t), where c_t is the context vector. Only the lowest cell
    has it as input, so that the cells above read all words at once.

    Args:
        config: cells, attention and readout
        vocab: number of words
        memory_width: width of the memory
        depth: cells above each other
        normalises: what makes weights of scores, by name
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
        order = lookup("order", config.order, _ORDERS)
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
        self.readout = lookup("readout", config.readout, _READOUTS)(width, memory_width)

    def begin(
        self, memory: Tensor, mask: Mask | None = None, *, context: Tensor | None = None
    ) -> RecurrentState:
        """First state for a memory (b, s, m), computed of a `context` (b, m).

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
        """Context vectors of states (r, t, w); hypotheses share their memory."""
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
        """Projected words, and a function that adds the rest of the lowest cell's input.

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


_ORDERS: dict[str, Order] = {
    "before": Order(lambda width, memory: memory, _before),
    "after": Order(lambda width, memory: 0, _after),
    "input_feeding": Order(lambda width, memory: width, _input_feeding),
}
