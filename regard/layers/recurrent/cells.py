"""Recurrent cells, and stacks of them. Shapes: r rows, t words, w the width."""

import torch
from torch import Tensor, nn

from regard.attention.multihead import is_linear

Parts = tuple[Tensor, ...]  # what a cell remembers, each (r, w); what it says comes first


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
        """Next state; `given` (r, gates w) is the projected input."""
        raise NotImplementedError

    def forward(self, x: Tensor, state: Parts) -> tuple[Tensor, Parts]:
        """Run over (r, t, inner) and return all outputs and the last state."""
        said = []
        for given in self.given(x).unbind(1):
            state = self.step(given, state)
            said.append(state[0])
        return torch.stack(said, 1), state


class RNN(Cell):
    """The plain recurrent unit (Elman 1990): h' = tanh(W x + U h)."""

    def step(self, given: Tensor, state: Parts) -> Parts:
        """Next hidden state."""
        return (torch.tanh(given + self.past(state[0])),)


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
        """Next hidden and cell state."""
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
        """Next hidden state."""
        (h,) = state
        gates, new = given.split([2 * self.width, self.width], -1)
        past, old = self.past(h).split([2 * self.width, self.width], -1)
        r, u = (gates + past).sigmoid().chunk(2, -1)
        new = torch.tanh(torch.addcmul(new, r, old))
        return (torch.addcmul(new, u, h - new),)


CELLS: dict[str, type[Cell]] = {"lstm": LSTM, "gru": GRU, "rnn": RNN}


def init_cells(model: nn.Module) -> None:
    """Initialise every cell of a model."""
    for part in model.modules():
        if isinstance(part, Cell):
            part.reset_parameters()
