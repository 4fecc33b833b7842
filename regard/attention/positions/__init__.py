"""Position encodings, by name: one file for each idea."""

from collections.abc import Callable, Collection
from functools import partial

from regard.attention.positions.absolute import Learned, Sinusoidal, rates, sinusoids
from regard.attention.positions.base import GrowingTable, PerLayer, Position, of_layer
from regard.attention.positions.distance import (
    ALiBi,
    Distance,
    Fire,
    KerpleLog,
    KerplePower,
    LearnedT5,
    T5Bias,
    slopes,
)
from regard.attention.positions.relative import XL, CoPE, Disentangled, Distances, Shaw
from regard.attention.positions.rotary import (
    ROTARY_SCALINGS,
    PartRotary,
    Rotary,
    RotaryScaling,
    Yarn,
)
from regard.errors import UsageError, lookup

__all__ = [
    "POSITION_ALIASES",
    "ALiBi",
    "CoPE",
    "Disentangled",
    "Distance",
    "Distances",
    "Fire",
    "GrowingTable",
    "KerpleLog",
    "KerplePower",
    "Learned",
    "LearnedT5",
    "POSITIONS",
    "PartRotary",
    "PerLayer",
    "Position",
    "Rotary",
    "RotaryScaling",
    "ROTARY_SCALINGS",
    "Shaw",
    "Sinusoidal",
    "T5Bias",
    "XL",
    "Yarn",
    "build_position",
    "has_table",
    "of_layer",
    "rates",
    "sinusoids",
    "slopes",
]

POSITIONS: dict[str, type[Position]] = {
    "none": Position,
    "sinusoidal": Sinusoidal,
    "learned": Learned,
    "rotary": Rotary,
    "rotary_part": PartRotary,
    "yarn": Yarn,
    "alibi": ALiBi,
    "t5": T5Bias,
    "shaw": Shaw,
    "xl": XL,
    "kerple_log": KerpleLog,
    "kerple_power": KerplePower,
    "fire": Fire,
    "cope": CoPE,
    "disentangled": Disentangled,
    "learned_t5": LearnedT5,
}
"""Positions by name; add your own under a new one."""
POSITION_ALIASES = {
    "nope": "none",
    "sin": "sinusoidal",
    "absolute": "learned",
    "rope": "rotary",
    "relative": "shaw",
    "transformer_xl": "xl",
    "t5_bias": "t5",
    "kerple": "kerple_log",
}


def with_aliases(names: Collection[str]) -> Callable[[], list[str]]:
    """Names of positions as a setting can be given them, each beside its other names."""
    return lambda: [*names, *(alias for alias, name in POSITION_ALIASES.items() if name in names)]


def has_table(name: str) -> bool:
    """True if positions of a name are looked up in a learned table, which ends."""
    return issubclass(POSITIONS.get(POSITION_ALIASES.get(name, name), Position), Learned)


def build_position(
    name: str,
    width: int,
    heads: int,
    head_width: int,
    *,
    base: float = 10_000.0,
    layout: str = "pairs",
    max_length: int = 1024,
    bidirectional: bool = False,
    scaling: RotaryScaling | None = None,
    **settings: object,
) -> Position:
    """Make the position of a stack by its name; each block then has `of_layer` of it.

    Args:
        name: key of POSITIONS, or an alias
        width: width of the embeddings
        heads: attention heads
        head_width: width of a head
        base: base of the sinusoids or rotations
        layout: order of sines and cosines: pairs or halves
        max_length: length of a learned table, or of training
        bidirectional: whether keys may come after queries
        scaling: stretching of rotary positions
        settings: further arguments of single positions
    """
    part = lookup("position", POSITION_ALIASES.get(name, name), POSITIONS)
    if part.causal_only and bidirectional:
        raise UsageError(
            f"position '{name}' counts what came before; a model that reads in both directions "
            "needs another, such as rotary"
        )
    make = partial(
        part,
        width,
        heads,
        head_width,
        base=base,
        layout=layout,
        max_length=max_length,
        bidirectional=bidirectional,
        scaling=scaling,
        **settings,
    )
    return PerLayer(make) if part.per_layer else make()
