"""Rotary positions (RoPE), and how they are stretched to longer texts."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from regard.attention.once import once
from regard.attention.positions.absolute import coordinate_width, rates
from regard.attention.positions.base import GrowingTable, Position
from regard.errors import UsageError, lookup
from regard.settings import setting


@dataclass(frozen=True)
class RotaryScaling:
    """How rotary positions are stretched to reach further than they were trained for.

    Kinds: none; linear (all rates divided by the factor); llama3 (only rates whose wavelength is
    past original_length / low, none shorter than original_length / high); yarn (rates that turn
    less than beta_slow times in the original length are divided, those that turn more than
    beta_fast times are not; scores grow by attention_factor squared).
    """

    kind: str = setting(
        "none",
        "scaling of positions beyond the trained length",
        choices=lambda: ROTARY_SCALINGS,
    )
    factor: float = setting(1.0, "scaling factor of positions", min=0.01, max=1e6)
    original_length: int = setting(0, "positions before scaling", min=0, max=2**40)
    low: float = setting(
        1.0, "rotations below which frequencies are divided (llama3)", min=1e-3, max=1e6
    )
    high: float = setting(
        4.0, "rotations above which frequencies are kept (llama3)", min=1e-3, max=1e6
    )
    beta_fast: float = setting(
        32.0, "rotations above which frequencies are kept (yarn)", min=1e-3, max=1e6
    )
    beta_slow: float = setting(
        1.0, "rotations below which frequencies are divided (yarn)", min=1e-3, max=1e6
    )
    attention_factor: float | None = setting(
        None, "factor of queries and keys (yarn)", min=1e-3, max=1e3
    )


def _linear(plain: Tensor, base: float, by: RotaryScaling) -> Tensor:
    """Divide all rates by the factor."""
    return plain / by.factor


def _llama3(plain: Tensor, base: float, by: RotaryScaling) -> Tensor:
    """Divide the slow rates, keep the fast ones, and go smoothly from these to those."""
    turns = by.original_length * plain / (2 * math.pi)  # in the original length
    keep = ((turns - by.low) / (by.high - by.low)).clamp(0, 1)
    return torch.lerp(plain / by.factor, plain, keep)


def _yarn(plain: Tensor, base: float, by: RotaryScaling) -> Tensor:
    """Divide the slow rates, keep the fast ones, and go evenly by number from these to those."""

    def number(turns: float) -> float:
        """Index of the rate that turns this often in the original length."""
        return len(plain) * math.log(by.original_length / (turns * 2 * math.pi)) / math.log(base)

    first = max(math.floor(number(by.beta_fast)), 0)
    last = min(math.ceil(number(by.beta_slow)), 2 * len(plain) - 1)
    last = last + 0.001 if last == first else last
    numbers = torch.arange(len(plain), dtype=plain.dtype, device=plain.device)
    return torch.lerp(plain, plain / by.factor, ((numbers - first) / (last - first)).clamp(0, 1))


ROTARY_SCALINGS: dict[str, Callable[[Tensor, float, RotaryScaling], Tensor]] = {
    "none": lambda plain, base, by: plain,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}


class Rotary(Position):
    """Queries and keys rotated by their position, so that only distance matters (RoPE).

    Pairs are (i, i + d/2), the layout of LLaMA and most public checkpoints.

    Args:
        width: width of the embeddings
        heads: attention heads
        head_width: width of a head
        base: base of the rotations
        scaling: stretching past the trained length
        max_length: longest text
        rest: settings of other positions
    """

    def __init__(
        self,
        width: int = 0,
        heads: int = 1,
        head_width: int = 0,
        *,
        base: float = 10_000.0,
        scaling: RotaryScaling | None = None,
        max_length: int = 1024,
        **rest,
    ):
        super().__init__()
        if head_width % 2:
            raise UsageError(f"rotary positions need an even head_width, not {head_width}")
        scaling = scaling or RotaryScaling()
        lookup("rotary scaling", scaling.kind, ROTARY_SCALINGS)
        if not scaling.original_length:
            scaling = replace(scaling, original_length=max(1, int(max_length / scaling.factor)))
        if scaling.kind == "llama3" and scaling.high <= scaling.low:
            raise UsageError(f"llama3 scaling needs high={scaling.high} above low={scaling.low}")
        self.base, self.scaling = base, scaling
        self.tables: dict[tuple, GrowingTable] = {}

    @property
    def stretch(self) -> float:
        """Factor of queries and keys."""
        if self.scaling.kind != "yarn":
            return 1.0
        factor = self.scaling.attention_factor
        return 0.1 * math.log(max(1.0, self.scaling.factor)) + 1.0 if factor is None else factor

    def rates(self, width: int, device: torch.device | None = None) -> Tensor:
        """Angle by which each pair of a width turns from one position to the next, in fp64."""
        return ROTARY_SCALINGS[self.scaling.kind](
            rates(width, self.base, device), self.base, self.scaling
        )

    def _cos_sin_rows(self, width: int, at: Tensor) -> Tensor:
        """cos, cos, -sin and sin of every rate at fp64 numbers (n), (n, 2 * width)."""
        angles = at.unsqueeze(-1) * self.rates(width, at.device)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([cos, cos, -sin, sin], -1) * self.stretch

    def rotate(self, x: Tensor, at: Tensor) -> Tensor:
        """Rotate each pair by its angle."""
        both = partial(self._both, x.dtype, x.shape[-1], at)
        cos, sin = once(both, self, at, dtype=x.dtype, width=x.shape[-1])
        return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)

    def cos_sin(self, dtype: torch.dtype, width: int, at: Tensor) -> Tensor:
        """cos, cos, -sin and sin at each coordinate (..., c), (..., c, 2 * width / c)."""
        each = coordinate_width(width, at)
        key = each, self.base, self.scaling  # which may be set anew at any time
        if key not in self.tables:
            self.tables[key] = GrowingTable(partial(self._cos_sin_rows, each))
        return self.tables[key](at, dtype)

    def _both(self, dtype: torch.dtype, width: int, at: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin for both sides of each pair, the sine of the first side negative."""
        four = self.cos_sin(dtype, width, at).unflatten(-1, (4, -1)).transpose(-3, -2)
        cos, sin = four.flatten(-3).chunk(2, -1)
        return (cos.unsqueeze(1), sin.unsqueeze(1)) if at.ndim == 3 else (cos, sin)


class PartRotary(Rotary):
    """Rotary positions of only the first part of each head (GPT-NeoX)."""

    def __init__(
        self, width: int = 0, heads: int = 1, head_width: int = 0, *, share: float = 0.25, **rest
    ):
        super().__init__(width, heads, **rest)
        self.exact = int(head_width * share)
        self.part = self.exact + self.exact % 2
        if self.part > head_width:
            raise UsageError(f"rotary positions need an even head_width, not {head_width}")
        if self.exact % 2 and self.scaling.kind == "yarn":
            raise UsageError(
                f"yarn counts pairs, but position_share={share} turns {self.exact} of {head_width} "
                "channels of a head; choose a share that turns an even number"
            )

    def rates(self, width: int, device: torch.device | None = None) -> Tensor:
        """Angle by which each pair turns, by the part as it was before it was made even."""
        return super().rates(self.exact if width == self.part else width, device)

    def rotate(self, x: Tensor, at: Tensor) -> Tensor:
        """Rotate each pair of the first part by its angle."""
        if not self.part:
            return x
        return torch.cat([super().rotate(x[..., : self.part], at), x[..., self.part :]], -1)


class Yarn(Rotary):
    """Rotary positions stretched by YaRN (Peng et al. 2023) to four times what was trained for.

    Unless a scaling is given, max_length is what is to be reached.
    """

    def __init__(self, *sizes: int, scaling: RotaryScaling | None = None, **rest):
        if scaling is None or scaling.kind == "none":
            scaling = RotaryScaling("yarn", factor=4.0)
        super().__init__(*sizes, scaling=scaling, **rest)
