"""Regard: attention, from one weighted average to a trained model you can look into."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard.api import (
        compare,
        cost,
        doctor,
        evaluate,
        export,
        filter,
        import_model,
        load,
        look,
        train,
    )
    from regard.attention.attend import attend
    from regard.attention.positions import POSITIONS
    from regard.attention.scores import SCORES
    from regard.attention.watch import watch
    from regard.errors import Mistake
    from regard.layers.feedforward import FEED_FORWARDS
    from regard.layers.norm import NORMS
    from regard.layers.residual import RESIDUALS
    from regard.models import MODELS

__version__ = "0.1.0"

# Where each name lives; torch is imported only when one of them is asked for.
HOMES = {
    "load": "regard.api",
    "compare": "regard.api",
    "evaluate": "regard.api",
    "export": "regard.api",
    "filter": "regard.api",
    "import_model": "regard.api",
    "doctor": "regard.api",
    "attend": "regard.attention.attend",
    "watch": "regard.attention.watch",
    "Mistake": "regard.errors",
    "SCORES": "regard.attention.scores",
    "POSITIONS": "regard.attention.positions",
    "NORMS": "regard.layers.norm",
    "FEED_FORWARDS": "regard.layers.feedforward",
    "RESIDUALS": "regard.layers.block",
    "MODELS": "regard.models",
}
# Subpackages that are verbs as well: regard.train(...) is regard.api.train(...).
VERBS = ("cost", "look", "train")

__all__ = [
    "FEED_FORWARDS",
    "MODELS",
    "NORMS",
    "POSITIONS",
    "RESIDUALS",
    "SCORES",
    "Mistake",
    "attend",
    "compare",
    "cost",
    "doctor",
    "evaluate",
    "export",
    "filter",
    "import_model",
    "load",
    "look",
    "train",
    "watch",
]


class Verb(ModuleType):
    """A subpackage that can be called by its own name."""

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        """Call the function of this name in regard.api."""
        return getattr(import_module("regard.api"), self.__name__.rpartition(".")[2])(
            *arguments, **settings
        )


class Package(ModuleType):
    """The package itself, which makes a verb callable in the moment it is imported by anyone."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in VERBS and isinstance(value, ModuleType):
            value.__class__ = Verb
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = Package


def __getattr__(name: str) -> Any:
    if name in VERBS:
        return import_module(f"regard.{name}")
    if name not in HOMES:
        raise AttributeError(f"module 'regard' has no attribute '{name}'")
    value = getattr(import_module(HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
