"""What a checkpoint format is: one table of config keys and weight names that is read both ways.

Its `keys` turn their config.json into our config and back, its `weights` name every parameter of
ours in their state dict; whatever a table does not name is refused. The tables themselves are in
`regard.pretrained.formats`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from regard.attention.positions import POSITION_ALIASES
from regard.errors import UsageError
from regard.models import family
from regard.models.protocols import ModelConfig
from regard.pretrained.config_keys import (
    Key,
    KeyGroup,
    Theirs,
    only,
    read_keys,
    setting_of,
    write_keys,
)
from regard.pretrained.weight_names import WeightNames, within


@dataclass(frozen=True)
class Architecture:
    """One class of transformers that a format has: a base model, or one with a head.

    `config` are the settings of ours that make this class. Their state dict has the base model's
    weights under the format's prefix, unless it is the `base` itself.
    """

    task: str  # of ours
    config: Mapping[str, Any] = field(default_factory=dict)
    keys: tuple[Key, ...] = ()
    weights: WeightNames = field(default_factory=dict)
    base: bool = False
    about: Mapping[str, Any] = field(default_factory=dict)  # of our config.json, beside the model

    def fits(self, config: ModelConfig) -> bool:
        """Tell whether one of our configs has the settings that make this class."""
        return all(setting_of(config, key) == value for key, value in self.config.items())


class TokenTemplate(NamedTuple):
    """Which special tokens stand around a text and a pair of texts, by their roles.

    `types` are the token types of the parts of a pair.
    """

    single: tuple[str, ...] = ("A",)
    pair: tuple[str, ...] = ("A", "B")
    types: tuple[int, ...] = (0, 1)


BERT_TEMPLATE = TokenTemplate(("cls", "A", "sep"), ("cls", "A", "sep", "B", "sep"), (0, 0, 0, 1, 1))
ROBERTA_TEMPLATE = TokenTemplate(
    ("cls", "A", "sep"), ("cls", "A", "sep", "sep", "B", "sep"), (0,) * 6
)
BOS_TEMPLATE = TokenTemplate(("bos", "A"), ("bos", "A", "bos", "B"), (0, 0, 1, 1))


@dataclass(frozen=True)
class Format:
    """All there is to know about one kind of public checkpoint."""

    model_type: str  # as their config.json has it
    family: str  # key of MODELS
    architectures: Mapping[str, Architecture]  # by their class; the first one is the default
    keys: tuple[Key | KeyGroup, ...]
    weights: WeightNames  # of the base model
    config: Mapping[str, Any] = field(default_factory=dict)  # of ours, in every such checkpoint
    fixed: Theirs = field(default_factory=dict)  # keys of theirs of which one value is supported
    prefix: str = ""  # of the base model's weights, there or not
    tied: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # a parameter of ours that tying leaves out -> with which it is tied, the first that is there
    older: Mapping[str, str] = field(default_factory=dict)  # ends of weight names and older ones
    ignored: tuple[str, ...] = ()  # patterns of state dict names that are no weights
    harmless: tuple[str, ...] = ()  # config keys that change no output
    prepare: Callable[[Theirs], Theirs] = dict  # a config with its older spellings made new
    canonical: Callable[[Any], Any] = lambda config: config  # of equal models, one config
    derived: Callable[[Any], dict[str, Tensor]] = lambda config: {}  # theirs that we compute
    inputs: str = "text"  # or sound, or images, which have no tokenizer, or both (images and text)
    template: TokenTemplate = TokenTemplate()  # where the tokenizer's own files do not say
    decoder_start: str | None = None  # role of the token, where config.json does not say
    forced_eos: int | None = None  # where no file says

    def read_config(self, theirs: Theirs, named: str = "") -> Any:
        """Return our config for their config.json of a class, by default the first."""
        architecture = self.architectures[named or next(iter(self.architectures))]
        theirs = self.prepare(theirs)
        only(theirs, self.fixed)
        if isinstance(names := theirs.get("id2label"), Mapping):
            theirs = {**theirs, "num_labels": len(names)}
        keys = (*self.keys, *architecture.keys)
        settings = {**self.config, **architecture.config}
        return self.canonical(read_keys(family(self.family)[0], theirs, keys, settings))

    def write_config(self, config: ModelConfig, task: str | None = None) -> dict[str, Any]:
        """Return their config.json for our config of a model for a task."""
        named = self.architecture(task, config)
        keys = (*self.keys, *self.architectures[named].keys)
        first = {"model_type": self.model_type, "architectures": [named]}
        return {**first, **self.fixed, **write_keys(config, keys)}

    def serves(self, task: str | None) -> list[str]:
        """Name the classes for a task; to translate is to answer texts with texts."""
        tasks = {name: architecture.task for name, architecture in self.architectures.items()}
        named = [name for name, other in tasks.items() if task in (None, other)]
        return named or [n for n, other in tasks.items() if (task, other) == ("translate", "text")]

    def architecture(self, task: str | None = None, config: ModelConfig | None = None) -> str:
        """Name their class for a task and, if it is given, our config; or the default one."""
        named = self.serves(task)
        if not named:
            raise UsageError(f"{self.model_type} has no model for {task}")
        fitting = [n for n in named if config is not None and self.architectures[n].fits(config)]
        return (fitting or named)[0]

    def weight_table(self, named: str | None = None) -> WeightNames:
        """Return the names of all weights of one of its classes."""
        architecture = self.architectures[named or next(iter(self.architectures))]
        base = within("", "" if architecture.base else self.prefix, self.weights)
        return {**base, **architecture.weights}


# What a model computes does not depend on these.
_TRAINING_ONLY = re.compile(r"init|drop_path|.*dropout")


def differing(ours: ModelConfig, again: ModelConfig) -> list[str]:
    """Name the settings in which a config differs from what came back from a format."""

    def settings(config: ModelConfig) -> dict[str, Any]:
        values = asdict(config)
        if isinstance(block := values.pop("block", None), dict):
            block["kv_heads"] = block["kv_heads"] or block["heads"]
            block["head_width"] = block["head_width"] or block["width"] // block["heads"]
            values |= {f"block.{key}": value for key, value in block.items()}
        if "position" in values:
            values["position"] = POSITION_ALIASES.get(values["position"], values["position"])
        return values

    one, other = settings(ours), settings(again)
    return [key for key in one if one[key] != other[key] and not _TRAINING_ONLY.fullmatch(key)]
