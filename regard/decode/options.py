"""Decoding options, and one function that generates text by them (after Whisper's decoding)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from regard.decode import search
from regard.decode.search import BOS, EOS, Adjust, Hypothesis, Limit, OnToken
from regard.decode.writer import Writer
from regard.errors import UsageError
from regard.settings import setting


@dataclass(frozen=True)
class Decoding:
    """How text is generated: by beam search, greedily, or by sampling.

    Settings of a task inherit these fields; a task with other defaults states these anew.
    """

    GROUP = "decoding"

    beam: int = setting(5, "beam size; 1 is greedy", min=1, max=1000)
    n_best: int = setting(1, "hypotheses to return per input", min=1, max=1000)
    length_penalty: str = setting("average", "length penalty", choices=search.PENALTIES)
    alpha: float | None = setting(None, "exponent of the length penalty", min=-10, max=10)
    max_length: int | None = setting(None, "maximum number of tokens", min=1, max=10_000)
    temperature: float | None = setting(None, "sample, at this temperature", min=0, max=100)
    top_k: int | None = setting(None, "sample from the k most likely tokens", min=1)
    top_p: float | None = setting(None, "sample from the nucleus of this mass", min=0, max=1)
    min_p: float | None = setting(
        None, "sample above this fraction of the top probability", min=0, max=1
    )
    seed: int = setting(1, "random seed of sampling", min=0)

    @property
    def sampling(self) -> bool:
        """Tell whether tokens are sampled: some setting of sampling was given."""
        return any(x is not None for x in (self.temperature, self.top_k, self.top_p, self.min_p))

    def check(self) -> None:
        """Refuse options that contradict each other."""
        if self.n_best > self.beam and not self.sampling:
            raise UsageError(
                f"n_best={self.n_best} is more than beam={self.beam}; widen the beam, or sample "
                "with temperature="
            )


DEFAULT = Decoding()


def decode(
    model: Writer,
    source: Tensor,
    lengths: Tensor | None = None,
    options: Decoding = DEFAULT,
    *,
    bos: int = BOS,
    eos: int = EOS,
    ends: Sequence[int] = (),
    adjust: Sequence[Adjust] = (),
    prefix: Sequence[Sequence[int]] | None = None,
    begin: Tensor | None = None,
    max_length: Limit = None,
    lines: Sequence[int] | None = None,
    on_token: OnToken | None = None,
    stopping: str = "patience",
    on: str = "logits",
    renormalise: bool = False,
) -> list[list[Hypothesis]]:
    """Generate the hypotheses of each source by sampling, greedy or beam search.

    `bos` starts each text (or `begin`, one token for each source); `eos` ends it and is not
    returned, `ends` do and are. `adjust` are changes of the logits, `prefix` the tokens that each
    text must begin with, and `max_length` limits for each source that replace the option's.
    `lines` number the sources for the random draws. `on_token` is called with (source, token)
    after each token and returns True to stop. `stopping`, `on` and `renormalise` say how a beam is
    searched, as `GenerationConfig.beam` returns them.
    """
    options.check()
    shared: dict[str, Any] = {
        "length_penalty": options.length_penalty,
        "alpha": options.alpha,
        "max_length": options.max_length if max_length is None else max_length,
        "prefix": prefix,
        "adjust": adjust,
        "begin": begin,
        "bos": bos,
        "eos": eos,
        "ends": ends,
    }
    if options.sampling:
        return search.sample(
            model,
            source,
            lengths,
            samples=options.n_best,
            temperature=1.0 if options.temperature is None else options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            seed=options.seed,
            lines=lines,
            on_token=on_token,
            **shared,
        )
    if options.beam == 1:
        return search.greedy(model, source, lengths, on_token=on_token, **shared)
    if on_token is not None:
        raise UsageError(f"on_token= cannot follow beam={options.beam}; choose beam=1")
    return search.beam(
        model,
        source,
        lengths,
        beam=options.beam,
        n_best=options.n_best,
        stopping=stopping,
        on=on,
        renormalise=renormalise,
        **shared,
    )
