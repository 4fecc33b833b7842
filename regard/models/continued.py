"""Models that read a whole text just as they write one: from a state, which goes on."""

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.layers.recurrent import Draws, RecurrentState
from regard.layers.vocabulary import Head


class Continued(nn.Module):
    """What a family that begins with a source and goes on by some words answers to."""

    head: Head

    def _begin(self, source: Tensor, lengths: Tensor | None) -> RecurrentState:
        """Read the sources."""
        raise NotImplementedError

    def _read(self, ids: Tensor, state: RecurrentState, draws: Draws | None = None) -> Tensor:
        """Read the next words and return their last vectors; the state goes on."""
        raise NotImplementedError

    def hidden(
        self,
        source: Int[Tensor, "b s"],
        target: Int[Tensor, "b t"],
        source_lengths: Int[Tensor, " b"] | None = None,
        target_lengths: Int[Tensor, " b"] | None = None,
        *,
        draws: Draws | None = None,
    ) -> Float[Tensor, "b t w"]:
        """Return the decoder's last vectors, before the head; `draws` notes what was drawn."""
        return self._read(target, self._begin(source, source_lengths), draws)

    def forward(self, *texts: Any) -> Float[Tensor, "b t vocab"]:
        """Return the logits of the token after each target token; takes what `hidden` takes."""
        return self.head(self.hidden(*texts))

    def start(
        self,
        source: Int[Tensor, "b s"],
        lengths: Int[Tensor, " b"] | None = None,
        *,
        capacity: int = 256,
    ) -> RecurrentState:
        """Read the sources; what writing needs does not grow with the text."""
        return self._begin(source, lengths)

    def step(
        self, ids: Int[Tensor, "b l"], state: RecurrentState
    ) -> tuple[Float[Tensor, "b l vocab"], RecurrentState]:
        """Read the next tokens of all hypotheses and return the logits after each."""
        return self.head.step_logits(self._read(ids, state)), state
