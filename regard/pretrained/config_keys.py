"""Config keys of transformers beside our settings, read and written."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from regard.errors import UsageError, lookup
from regard.models.protocols import ModelConfig
from regard.settings import fill

Theirs = Mapping[str, Any]  # a config.json of transformers


@dataclass(frozen=True)
class Key:
    """One of our settings (`block.width`), the key of theirs that holds it, and their default.

    `names` gives our name of a value where it differs from theirs; of several for one of ours, the
    first is written. `only` says that no other values than these are supported. `value` computes
    what is written where that is not the setting itself.
    """

    ours: str
    theirs: str
    default: Any = None
    names: Mapping[Any, Any] = field(default_factory=dict)
    only: bool = False
    value: Callable[[Any], Any] | None = None

    def read(self, theirs: Theirs) -> dict[str, Any]:
        """Return our setting, under their name so that a refusal says what is in the file."""
        value = theirs.get(self.theirs, self.default)
        if self.only:
            return {self.theirs: lookup(self.theirs, str(value), self.names)}
        known = isinstance(value, Hashable) and value in self.names
        return {self.theirs: self.names[value] if known else value}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Return their key with the value of our setting."""
        value = self.value(config) if self.value else setting_of(config, self.ours)
        if self.only and value not in self.names.values():
            raise UsageError(f"{self.ours}={value!r}")
        if value is None and self.default is None:
            return {}  # what is absent means the same
        back = {ours: name for name, ours in reversed(list(self.names.items()))}
        value = back.get(value, value)
        return {self.theirs: list(value) if isinstance(value, tuple) else value}


@dataclass(frozen=True)
class KeyGroup:
    """Settings that take several keys, or a computation, to read and to write."""

    read: Callable[[Theirs], dict[str, Any]]  # their config -> our settings
    write: Callable[[Any], dict[str, Any]] = lambda config: {}  # our config -> their keys


# their name of an activation -> ours of the feed-forward network that has it, without and with a
# gate
ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "quick_gelu": "gelu_quick",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "swish",
    "swish": "swish",
}
GATED_ACTIVATIONS = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "gelu_pytorch_tanh": "geglu_tanh",
    "gelu_new": "geglu_tanh",
}


def activation(theirs: str, default: str, names: Mapping[str, str] = ACTIVATIONS) -> Key:
    """Return the key of the feed-forward network, which their configs name by its activation."""
    return Key("block.feed_forward", theirs, default, names, only=True)


def sizes(
    *,
    depth: int,
    width: int,
    heads: int,
    ffn_width: int | None = None,
    vocab: int | None = None,
    length: int | None = None,
    tie: bool | None = None,
) -> tuple[Key, ...]:
    """Return the keys of the sizes that most configs name alike, with a format's defaults."""
    defaults = {
        ("vocab", "vocab_size"): vocab,
        ("depth", "num_hidden_layers"): depth,
        ("max_length", "max_position_embeddings"): length,
        ("tie", "tie_word_embeddings"): tie,
        ("block.width", "hidden_size"): width,
        ("block.heads", "num_attention_heads"): heads,
        ("block.ffn_width", "intermediate_size"): ffn_width,
    }
    return tuple(Key(*names, value) for names, value in defaults.items() if value is not None)


def without_nulls(theirs: Theirs) -> Theirs:
    """Let a key that is null mean what it means where it is absent."""
    return {key: value for key, value in theirs.items() if value is not None}


def integer(theirs: Theirs, key: str, default: int, least: int = -(2**63)) -> int:
    """Return a whole number of theirs, null being the default."""
    value = default if theirs.get(key) is None else theirs[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{key}={str(value)[:40]} is not a whole number")
    return value


def positive(theirs: Theirs, key: str, default: float) -> float:
    """Return a number of theirs that is above 0."""
    value = theirs.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e18:
        raise UsageError(f"{key}={str(value)[:40]} is not supported; expected a number above 0")
    return value


def mapping(theirs: Theirs, key: str) -> Theirs:
    """Return an object of theirs, empty where there is none."""
    value = theirs.get(key) or {}
    if not isinstance(value, Mapping):
        raise UsageError(f"{key}={str(value)[:40]} is not an object")
    return value


def only(theirs: Theirs, expected: Theirs) -> None:
    """Refuse keys that are there with another value than the one that is supported."""
    for key, value in expected.items():
        if theirs.get(key, value) != value:
            raise UsageError(f"{key}={shortened(theirs[key])} is not supported; only {value} is")


def read_keys(
    cls: type, theirs: Theirs, keys: Iterable[Key | KeyGroup], settings: Mapping[str, Any]
) -> Any:
    """Make one of our configs of theirs and of settings that no key of theirs tells."""
    values, short = dict(settings), {}
    for key in keys:
        values |= key.read(theirs)
        if isinstance(key, Key):
            short[key.theirs] = key.ours
    return fill(cls, values, short=short)


def write_keys(config: ModelConfig, keys: Iterable[Key | KeyGroup]) -> dict[str, Any]:
    """Return their keys for one of our configs."""
    return {name: value for key in keys for name, value in key.write(config).items()}


def shortened(value: Any) -> str:
    """Write a value in at most 40 characters."""
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def setting_of(config: ModelConfig, path: str) -> Any:
    """Return the setting of a config at a dotted path, None where there is no such."""
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name, None)
    return value
