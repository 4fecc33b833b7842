"""Regard: attention, from one weighted average to a trained model you can look into."""

import sys
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from regard.verbs import VERBS

if sys.platform == "win32" and not sys.flags.utf8_mode:  # else files would be read as another code
    raise ImportError(
        "Regard reads and writes UTF-8; on Windows set PYTHONUTF8=1 before Python starts"
    )

if TYPE_CHECKING:
    from regard.api import (
        compare as compare,
        cost as cost,
        dictionary as dictionary,
        directions as directions,
        doctor as doctor,
        evaluate as evaluate,
        export as export,
        filter as filter,
        heads as heads,
        import_model as import_model,
        list_models as list_models,
        load as load,
        look as look,
        train as train,
        verify as verify,
    )
    from regard.attention.attend import attend as attend
    from regard.attention.intervene import change as change, cut as cut, record as record
    from regard.attention.multihead import MultiHead as MultiHead
    from regard.attention.positions import POSITIONS as POSITIONS
    from regard.attention.scores import SCORES as SCORES
    from regard.attention.watch import watch as watch
    from regard.errors import UsageError as UsageError
    from regard.gallery import show as show
    from regard.insight.causes import causes as causes
    from regard.insight.lens import lens as lens
    from regard.insight.patching import patch as patch
    from regard.layers.feedforward import FEED_FORWARDS as FEED_FORWARDS
    from regard.layers.norm import NORMS as NORMS
    from regard.layers.block import RESIDUALS as RESIDUALS
    from regard.layers.windows import WindowAttention as WindowAttention
    from regard.models import MODELS as MODELS
    from regard.models.local import LocalRelation as LocalRelation
    from regard.native import fast as fast
    from regard.own import register as register
    from regard.recipes import list_recipes as list_recipes
    from regard.retrieval import index as index, search as search
    from regard.training.callbacks import Callback as Callback, StopTraining as StopTraining

__version__ = "0.1.0"

# Where each name that is no verb lives; torch is imported only when one of them is asked for.
HOMES = {
    "load": "regard.api",
    "attend": "regard.attention.attend",
    "watch": "regard.attention.watch",
    "record": "regard.attention.intervene",
    "change": "regard.attention.intervene",
    "cut": "regard.attention.intervene",
    "causes": "regard.insight.causes",
    "lens": "regard.insight.lens",
    "patch": "regard.insight.patching",
    "fast": "regard.native",
    "UsageError": "regard.errors",
    "register": "regard.own",
    "SCORES": "regard.attention.scores",
    "POSITIONS": "regard.attention.positions",
    "NORMS": "regard.layers.norm",
    "FEED_FORWARDS": "regard.layers.feedforward",
    "RESIDUALS": "regard.layers.block",
    "MODELS": "regard.models",
    "MultiHead": "regard.attention.multihead",
    "WindowAttention": "regard.layers.windows",
    "LocalRelation": "regard.models.local",
    "Callback": "regard.training.callbacks",
    "StopTraining": "regard.training.callbacks",
}
HOMES |= dict(verb.exported for verb in VERBS.values() if not verb.terminal)

__all__ = sorted(HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    for verb in VERBS.values():
        if name in verb.aliases:  # a former spelling
            return partial(__getattr__(verb.exported[0]), verb.aliases[name])
    if name not in HOMES:
        raise AttributeError(f"module 'regard' has no attribute '{name}'")
    value = getattr(import_module(HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
