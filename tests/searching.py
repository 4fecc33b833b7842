"""Searches by name, with options and constraints as plain keywords."""

from dataclasses import fields
from typing import Any

from torch import Tensor

from regard.decode.constraints import EOS, Adjust, Constraints, forbid
from regard.decode.decoder import Decoder, score
from regard.decode.options import Decoding
from regard.decode.search import BeamSearch, Hypothesis, LeftToRight

OPTIONS = {one.name for one in fields(Decoding)} - {"max_length", "seed"}


def parts(told: dict[str, Any]) -> tuple[Decoding, Constraints]:
    """Options and constraints of a search."""
    options = Decoding(**{name: told[name] for name in OPTIONS & set(told)})
    return options, Constraints(**{k: v for k, v in told.items() if k not in OPTIONS})


def run(kind: Any, writer: Any, source: Tensor, lengths: Tensor | None, told: dict[str, Any]):
    """Hypotheses of each source by one kind of search."""
    options, constraints = parts(told)
    decoder = Decoder(writer, options)
    decoder.search = kind
    rows, texts = decoder.admit(source, lengths, constraints), {}
    while len(decoder):
        texts |= decoder.step()
    return [texts[row] for row in rows]


def beam(writer: Any, source: Tensor, lengths: Tensor | None = None, **told: Any):
    """Hypotheses by beam search."""
    return run(BeamSearch, writer, source, lengths, told)


def greedy(writer: Any, source: Tensor, lengths: Tensor | None = None, **told: Any):
    """Hypotheses by greedy decoding."""
    return run(LeftToRight, writer, source, lengths, {"beam": 1, **told})


def sample(writer: Any, source: Tensor, lengths: Tensor | None = None, **told: Any):
    """Hypotheses by sampling."""
    told = {"temperature": 1.0, "seed": 0, **told}
    return run(LeftToRight, writer, source, lengths, told)


def judge(writer: Any, source: Tensor, lengths: Tensor | None, texts: Any, **told: Any):
    """Given texts with their log-probabilities."""
    found: list[Hypothesis] = score(writer, source, lengths, texts, *parts(told))
    return found


def at_least(length: int, eos: int = EOS) -> Adjust:
    """Do not end before a text has this many tokens."""
    go_on = forbid(eos)
    return lambda logits, written: go_on(logits, written) if written.shape[1] < length else logits
