"""Rotary positions, sliding windows and biases of attention, as config.json has them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

from regard.attention.positions import POSITION_ALIASES, POSITIONS, Rotary, RotaryScaling
from regard.errors import UsageError, lookup
from regard.layers.block import ATTENTION_BIASES
from regard.layers.context import Windows, windowed
from regard.models.gpt import GPTConfig
from regard.models.protocols import BlockModelConfig
from regard.pretrained.config_keys import KeyGroup, Theirs, mapping

SLIDING, FULL = "sliding_attention", "full_attention"
# our kind of scaling -> the keys that it has beside rope_type: theirs and ours
_SCALINGS: dict[str, dict[str, str]] = {
    "none": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "original_max_position_embeddings": "original_length",
        "low_freq_factor": "low",
        "high_freq_factor": "high",
    },
    "yarn": {
        "factor": "factor",
        "original_max_position_embeddings": "original_length",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
    },
}
# and those that any kind may have; None or what has no effect is let through
_COMMON = ("rope_type", "type", "rope_theta", "truncate", "mscale", "mscale_all_dim")


def rope(length: int = 2048) -> KeyGroup:
    """Return the keys of rotary positions; `length` is the context where a file does not say."""
    return KeyGroup(partial(read_rope, length=length), write_rope)


def read_rope(theirs: Theirs, length: int = 2048) -> dict[str, Any]:
    """Return base and scaling, as transformers 5 writes them or as those before did."""
    given = theirs.get("rope_scaling") or theirs.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise UsageError(f"rope_parameters={given!r} is not an object")
    kind = str(given.get("rope_type", given.get("type", "default")))
    kind = "none" if kind == "default" else kind
    keys = lookup("rope_type", kind, _SCALINGS)
    known = {*_COMMON, *(key for each in _SCALINGS.values() for key in each)}
    part = given.get("partial_rotary_factor", theirs.get("partial_rotary_factor"))
    if part not in (None, 1):
        raise UsageError(f"partial_rotary_factor={part!r:.40} is not supported; only 1 is")
    for key, value in given.items():
        if key not in known and key != "partial_rotary_factor" and value is not None:
            raise UsageError(f"{key!r:.40} in rope_parameters is not supported; leave it out")
    values = {ours: given[key] for key, ours in keys.items() if given.get(key) is not None}
    if "original_length" in keys.values():
        values.setdefault("original_length", theirs.get("max_position_embeddings", length))
        if theirs.get("original_max_position_embeddings") is not None:  # it comes first in theirs
            values["original_length"] = theirs["original_max_position_embeddings"]
    if "factor" in keys and "factor" not in values:
        raise UsageError(f"rope_type={kind} has no factor; write by how much it reaches further")
    if given.get("truncate", True) is not True:
        raise UsageError(f"truncate={given['truncate']} is not supported; only true is")
    mscale = given.get("mscale"), given.get("mscale_all_dim")
    if kind == "yarn" and all(mscale) and "attention_factor" not in values:  # 0 is as none
        values["attention_factor"] = _mscale(values["factor"], *mscale)
    for key in ("beta_fast", "beta_slow"):
        if values.get(key) == 0:
            del values[key]
    base = given.get("rope_theta", theirs.get("rope_theta", 10_000.0))
    if isinstance(base, bool) or not isinstance(base, int | float):
        raise UsageError(f"rope_theta={str(base)[:40]} is not a number")
    scaling = {f"scaling.{key}": value for key, value in values.items()}
    return {"position_base": base, "scaling.kind": kind, **scaling}


def _mscale(factor: Any, one: Any, other: Any) -> float:
    """Return the attention factor that DeepSeek's two numbers give."""
    if not all(isinstance(x, int | float) for x in (factor, one, other)):
        raise UsageError(f"mscale={one!r} and mscale_all_dim={other!r} are not both numbers")
    log = math.log(max(1.0, factor))
    return (0.1 * one * log + 1) / (0.1 * other * log + 1)


def write_rope(config: GPTConfig) -> dict[str, Any]:
    """Return base and scaling in the keys of transformers 5, and the base in the older one too."""
    config = canonical(config)
    scaling, base = config.scaling, config.position_base
    kind = scaling.kind
    values = {key: getattr(scaling, ours) for key, ours in _SCALINGS.get(kind, {}).items()}
    values = {key: value for key, value in values.items() if value is not None}
    named = {"rope_type": "default" if kind == "none" else kind, "rope_theta": base}
    return {"rope_theta": base, "rope_parameters": {**named, **values}}


def canonical(config: GPTConfig) -> GPTConfig:
    """Return the config of the same model with one spelling of its positions, windows and biases.

    What has no effect is as in a config that does not mention it.
    """
    position, scaling = POSITION_ALIASES.get(config.position, config.position), RotaryScaling()
    local, block = windowed(config), config.block
    if not local:
        config = replace(config, window=None, window_layers=None, near_base=None)
    else:
        layers = None if len(local) == config.depth else tuple(sorted(local))
        config = replace(config, window_layers=layers)
    if ATTENTION_BIASES[block.attention_bias](block.bias) == (block.bias, block.bias):
        config = replace(config, block=replace(block, attention_bias="same"))
    if position == "rotary_part" and config.position_share == 1:
        position = "rotary"
    if position != "rotary_part":
        config = replace(config, position_share=1.0)
    if position not in ("rotary", "rotary_part", "yarn"):
        return replace(config, position=position, position_base=10_000.0, scaling=scaling)
    part = POSITIONS[position](head_width=2, scaling=config.scaling, max_length=config.max_length)
    given = cast(Rotary, part).scaling
    keys = lookup("rotary scaling", given.kind, _SCALINGS).values()
    scaling = replace(scaling, kind=given.kind, **{key: getattr(given, key) for key in keys})
    position = "rotary" if position == "yarn" else position
    return replace(config, position=position, scaling=scaling)


def rope_by_layer(
    theirs: Theirs, local_base: Any, base: Any, length: int
) -> tuple[dict[str, Any], float]:
    """Return the settings of rotary positions in full layers, and the base in sliding ones."""
    given = mapping(theirs, "rope_parameters")
    if set(given) - {SLIDING, FULL}:
        raise UsageError(f"rope_parameters={str(given)[:60]}; expected {FULL} and {SLIDING}")
    local, full = (mapping(given, kind) for kind in (SLIDING, FULL))
    context = {"max_position_embeddings": theirs.get("max_position_embeddings", length)}
    near = read_rope({**context, "rope_theta": local_base, "rope_parameters": local})
    if near["scaling.kind"] != "none":
        kind = near["scaling.kind"]
        raise UsageError(f"rope_type={kind} of {SLIDING} is not supported; only default is")
    full = {**full, **mapping(theirs, "rope_scaling")}
    settings = read_rope({**context, "rope_theta": base, "rope_parameters": full})
    return settings, near["position_base"]


# ---- sliding windows


def read_layer_types(theirs: Theirs, depth: int, is_local: Callable[[int], Any]) -> tuple[int, ...]:
    """Return the layers that have a sliding window, `is_local` saying so where no list does."""
    kinds = theirs.get("layer_types")
    if kinds is None:
        kinds = [SLIDING if is_local(i) else FULL for i in range(min(depth, 1000))]
    if not isinstance(kinds, list) or len(kinds) != depth:
        raise UsageError(
            f"layer_types={str(kinds)[:40]}; expected a kind for each of {depth} layers"
        )
    for kind in kinds:
        lookup("layer_types", str(kind), dict.fromkeys((SLIDING, FULL)))
    return tuple(i for i, kind in enumerate(kinds) if kind == SLIDING)


def window_settings(window: Any, local: tuple[int, ...], depth: int) -> dict[str, Any]:
    """Return our settings for a window that some layers have."""
    if window is None or not local:
        return {"window": None, "window_layers": None}
    return {"window": window, "window_layers": None if len(local) == depth else local}


def layer_types(config: Windows) -> list[str]:
    """Return the kind of every layer: with a sliding window, or full."""
    local = windowed(config)
    return [SLIDING if i in local else FULL for i in range(config.depth)]


# ---- biases of attention


def attention_bias(default: bool = False, rest: bool | str = False) -> KeyGroup:
    """Return the key of attention's biases, where those of the rest are fixed or have a key."""
    return KeyGroup(partial(_read_bias, default, rest), _write_bias)


def _read_bias(default: bool, rest: bool | str, theirs: Theirs) -> dict[str, str]:
    bias = theirs.get("attention_bias", default)
    rest = theirs.get(rest, False) if isinstance(rest, str) else rest
    if not isinstance(bias, bool):
        raise UsageError(f"attention_bias={str(bias)[:40]} is neither true nor false")
    return {"block.attention_bias": "same" if bias == rest else "all" if bias else "none"}


def _write_bias(config: BlockModelConfig) -> dict[str, bool]:
    block = config.block
    qkv, out = ATTENTION_BIASES[block.attention_bias](block.bias)
    if qkv != out:
        raise UsageError(f"attention_bias='{block.attention_bias}'")
    return {"attention_bias": out}
