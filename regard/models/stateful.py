"""Decoders that read a whole target as they decode one: step by step from a state."""

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.layers.recurrent.attention import ReinforceTape
from regard.layers.recurrent.decoder import RecurrentState
from regard.layers.shapes import Ids, Lengths
from regard.layers.vocabulary import VocabularyLinear


class StatefulDecoder(nn.Module):
    """An encoder-decoder whose state after a source and some target tokens is of constant size."""

    head: VocabularyLinear

    def _begin(self, source: Tensor, lengths: Tensor | None) -> RecurrentState:
        """Encode the sources and return the first state."""
        raise NotImplementedError

    def _read(
        self, ids: Tensor, state: RecurrentState, draws: ReinforceTape | None = None
    ) -> Tensor:
        """Read the next tokens and return their last vectors; the state is changed in place."""
        raise NotImplementedError

    def hidden(
        self,
        source: Int[Tensor, "b s"],
        target: Int[Tensor, "b t"],
        source_lengths: Lengths | None = None,
        target_lengths: Lengths | None = None,
        *,
        draws: ReinforceTape | None = None,
    ) -> Float[Tensor, "b t w"]:
        """Decoder's last vectors, before the head; `draws` records hard attention.

        Args:
            source: source ids
            target: target ids that are read
            source_lengths: real tokens of each source
            target_lengths: real tokens of each target
            draws: records the samples of hard attention
        """
        return self._read(target, self._begin(source, source_lengths), draws)

    def forward(self, *texts: Any) -> Float[Tensor, "b t vocab"]:
        """Logits of the token after each target token; takes what `hidden` takes."""
        return self.head(self.hidden(*texts))

    def start(
        self, source: Int[Tensor, "b s"], lengths: Lengths | None = None, *, capacity: int = 256
    ) -> RecurrentState:
        """Encode the sources; the state does not grow with the text."""
        return self._begin(source, lengths)

    def step(
        self, ids: Ids, state: RecurrentState
    ) -> tuple[Float[Tensor, "b l vocab"], RecurrentState]:
        """Read the next tokens of all hypotheses and return the logits after each."""
        return self.head.step_logits(self._read(ids, state), state), state
