"""Regard: attention, from one weighted average to a trained model you can look into."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard.api import (
        compare,
        cost,
        dictionary,
        directions,
        doctor,
        evaluate,
        export,
        filter,
        heads,
        import_model,
        load,
        look,
        misconceptions,
        show,
        train,
    )
    from regard.attention.attend import attend
    from regard.attention.intervene import change, cut, record
    from regard.attention.positions import POSITIONS
    from regard.attention.scores import SCORES
    from regard.attention.watch import watch
    from regard.errors import UsageError
    from regard.insight.causes import causes
    from regard.insight.lens import lens
    from regard.insight.patching import patch
    from regard.insight.superposition import superposition
    from regard.layers.feedforward import FEED_FORWARDS
    from regard.layers.norm import NORMS
    from regard.layers.residual import RESIDUALS
    from regard.models import MODELS
    from regard.native import fast

__version__ = "0.1.0"

# Where each name lives; torch is imported only when one of them is asked for.
HOMES = {
    "load": "regard.api",
    "compare": "regard.api",
    "evaluate": "regard.api",
    "export": "regard.api",
    "filter": "regard.api",
    "heads": "regard.api",
    "import_model": "regard.api",
    "doctor": "regard.api",
    "cost": "regard.api",
    "look": "regard.api",
    "misconceptions": "regard.api",
    "causes": "regard.insight.causes",
    "lens": "regard.insight.lens",
    "patch": "regard.insight.patching",
    "show": "regard.api",
    "directions": "regard.api",
    "train": "regard.api",
    "attend": "regard.attention.attend",
    "watch": "regard.attention.watch",
    "record": "regard.attention.intervene",
    "change": "regard.attention.intervene",
    "cut": "regard.attention.intervene",
    "dictionary": "regard.api",
    "superposition": "regard.insight.superposition",
    "fast": "regard.native",
    "UsageError": "regard.errors",
    "SCORES": "regard.attention.scores",
    "POSITIONS": "regard.attention.positions",
    "NORMS": "regard.layers.norm",
    "FEED_FORWARDS": "regard.layers.feedforward",
    "RESIDUALS": "regard.layers.residual",
    "MODELS": "regard.models",
}

__all__ = [
    "FEED_FORWARDS",
    "MODELS",
    "NORMS",
    "POSITIONS",
    "RESIDUALS",
    "SCORES",
    "UsageError",
    "attend",
    "causes",
    "change",
    "compare",
    "cost",
    "cut",
    "dictionary",
    "directions",
    "doctor",
    "evaluate",
    "export",
    "fast",
    "filter",
    "heads",
    "import_model",
    "lens",
    "load",
    "look",
    "misconceptions",
    "patch",
    "record",
    "show",
    "superposition",
    "train",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'regard' has no attribute '{name}'")
    value = getattr(import_module(HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
