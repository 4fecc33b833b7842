"""Options of decoding: how a text is searched for."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import Any

from regard.errors import UsageError, lookup
from regard.settings import setting

# What a log-probability is divided by, given how many tokens it is the sum of (a number or a
# tensor; the end counts too), so that texts of different lengths can be compared.
Divisor = Callable[[Any], Any]
# name -> (divisor of a length and an exponent, usual exponent)
PENALTIES: dict[str, tuple[Callable[[Any, float], Any], float]] = {
    "average": (lambda length, alpha: length**alpha, 1.0),
    "gnmt": (lambda length, alpha: ((5 + length) / 6) ** alpha, 0.6),
    "none": (lambda length, alpha: length**0, 0.0),
}


def penalty(name: str, alpha: float | None = None) -> Divisor:
    """Divisor of a log-probability, by the name and exponent of a length penalty."""
    divisor, usual = lookup("length_penalty", name, PENALTIES)
    exponent = usual if alpha is None else alpha
    if not -inf < exponent < inf:
        raise UsageError(f"alpha={exponent} is not a number; 0 means no length penalty")
    return _divided(divisor, exponent)


@cache
def _divided(divisor: Callable[[Any, float], Any], exponent: float) -> Divisor:
    """The same function for the same penalty, so that what was made by it can be found again."""
    return lambda length: divisor(length, exponent)


@dataclass(frozen=True)
class Decoding:
    """How text is generated: by beam search, greedily, or by sampling.

    Settings of a task inherit these fields; a task with other defaults states these anew.
    """

    GROUP = "decoding"

    beam: int = setting(5, "beam size; 1 is greedy", min=1, max=1000)
    n_best: int = setting(1, "hypotheses to return per input", min=1, max=1000)
    length_penalty: str = setting("average", "length penalty", choices=PENALTIES)
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
        """True if tokens are sampled: some setting of sampling was given."""
        return any(x is not None for x in (self.temperature, self.top_k, self.top_p, self.min_p))

    @property
    def divisor(self) -> Divisor:
        """Divisor of a log-probability that the length penalty asks for."""
        return penalty(self.length_penalty, self.alpha)

    def check(self) -> None:
        """Refuse options that contradict each other."""
        least = {"beam": 1, "n_best": 1, "temperature": 0, "top_k": 1, "top_p": 1e-9, "min_p": 0}
        most = {"temperature": 1e9, "top_p": 1, "min_p": 1}
        for name, low in least.items():
            value, high = getattr(self, name), most.get(name, inf)
            if value is not None and not low <= value <= high:
                raise UsageError(f"{name}={value}; expected a number from {low:g} to {high:g}")
        if self.n_best > self.beam and not self.sampling:
            raise UsageError(
                f"n_best={self.n_best} is more than beam={self.beam}; widen the beam, or sample "
                "with temperature="
            )


DEFAULT = Decoding()
