"""The settings of every verb: a task adds its own fields to these, and nothing else."""

import dataclasses
from dataclasses import dataclass, field, make_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from regard.data.parts import PARTS
from regard.native.processor import QUANTISED
from regard.settings import setting
from regard.tasks.frame.tune import TUNES
from regard.training.step import LoopSettings
from regard.viewer.settings import LookSettings

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# short keys of every task for fields of its model's config
SHORT_KEYS: dict[str, str | tuple[str, ...]] = {
    "position": "model.position",
    "depth": "model.depth",
    "dropout": "model.block.dropout",
    "attention_dropout": "model.block.attention_dropout",
    "norm": "model.block.norm",
    "order": "model.block.order",
    "feed_forward": "model.block.feed_forward",
    "width": "model.block.width",
    "heads": "model.block.heads",
    "ffn_width": "model.block.ffn_width",
}


@dataclass(frozen=True)
class TrainSettings(LoopSettings):
    """What every training can be told; a task adds `model`, the config of a family."""

    data: str | None = setting(None, "training data: a folder or a file", group="data")
    valid: str | None = setting(
        None, "validation data: a file, or a share such as 0.1", group="data"
    )
    test: str | None = setting(None, "test data: a file, or a share to hold out", group="data")
    out: str | None = setting(None, "the run folder", group="files")
    watch_every: int = setting(
        0,
        "steps between records of the attention, for look movie=true; 0: none",
        min=0,
        group="files",
    )
    probes: str | None = setting(
        None,
        "file of inputs for these records, one per line; from the validation part unless given",
        group="files",
    )
    init: str | None = setting(None, "a trained model to start from", group="model")
    tune: str = setting("all", "which weights to train with init=", choices=TUNES, group="model")
    lora_rank: int = setting(8, "LoRA rank", min=1, max=4096, group="model")
    lora_alpha: float = setting(16.0, "LoRA scaling (alpha)", above=0, max=1e6, group="model")
    lora_on: str = setting("*.qkv", "matrices that LoRA adapts, such as *.qkv", group="model")
    size: str = setting("tiny", "model size", group="model")


@dataclass(frozen=True)
class RunSettings:
    """What every run can be told."""

    columns: str | None = setting(
        None, "column of a table that is read, by name or number", group="data"
    )
    threads: int | None = setting(None, "CPU threads", min=1, max=1024, group="machine")


@dataclass(frozen=True)
class QuantiseSettings:
    """Whether texts are written by products of integers."""

    quantise: str = setting("none", "quantise matrix products", choices=QUANTISED, group="machine")


@dataclass(frozen=True)
class EvalSettings:
    """What every evaluation can be told, beside how the model is run."""

    data: str | None = setting(None, "test data: a folder or a file", group="data")
    part: str = setting("test", "the part of the data", choices=PARTS, group="data")
    test: str | None = setting(None, "which test file of the folder", group="data")
    outputs: str | None = setting(
        None, "a file for the predictions; .jsonl has more fields", group="files"
    )


@dataclass(frozen=True)
class BootstrapSettings(EvalSettings):
    """The same, for scores that are compared by resampling."""

    samples: int = setting(1000, "bootstrap resamples", min=100, max=100_000, group="scores")


Asked = RunSettings | EvalSettings | LookSettings  # completed settings of a verb


@cache
def with_parts(kind: Any, **parts: type) -> Any:
    """Return a settings class whose nested parts, such as the model, have other config classes."""
    own = [(name, part, field(default_factory=part)) for name, part in parts.items()]
    return make_dataclass(kind.__name__, own, bases=(kind,), frozen=True)


def derived(name: str, *bases: type) -> Any:
    """Return a settings class with the fields of several."""
    return make_dataclass(name, [], bases=bases, frozen=True)


def flat(settings: "DataclassInstance", prefix: str = "") -> dict[str, Any]:
    """Lay nested settings out by dotted keys, as a user would write them."""
    rows: dict[str, Any] = {}
    for item in dataclasses.fields(settings):
        value = getattr(settings, item.name)
        key = prefix + item.metadata.get("key", item.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            rows |= flat(value, key + ".")
        else:
            rows[key] = list(value) if isinstance(value, tuple) else value
    return rows
