"""What a checkpoint format is: config keys and weight names of transformers beside ours.

A `Format` is one table that is read both ways. Its `keys` turn their config.json into our config
and back, its `weights` name every parameter of ours in their state dict; whatever a table does not
name is refused. The tables themselves are in `regard.pretrained.formats`.
"""

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from regard.attention.positions import ALIASES
from regard.errors import UsageError, lookup
from regard.models import family
from regard.models.folder import on_meta
from regard.settings import fill
from regard.weights import float_state

Theirs = Mapping[str, Any]  # a config.json of transformers

# ---- config keys


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

    def write(self, config: Any) -> dict[str, Any]:
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


def write_keys(config: Any, keys: Iterable[Key | KeyGroup]) -> dict[str, Any]:
    """Return their keys for one of our configs."""
    return {name: value for key in keys for name, value in key.write(config).items()}


def shortened(value: Any) -> str:
    """Write a value in at most 40 characters."""
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def setting_of(config: Any, path: str) -> Any:
    """Return the setting of a config at a dotted path, None where there is no such."""
    for name in path.split("."):
        config = getattr(config, name, None)
    return config


# ---- weight names


@dataclass(frozen=True)
class Rule:
    """Where one weight of ours stands in their state dict; each `{}` is the number of a layer.

    Several of theirs are concatenated along the rows: evenly, unless `rows` says how many each has.
    `also` are names under which the same weight may be written once more, or instead: two that
    differ are refused. `instead` are names that are read only where its own is missing. Where
    theirs holds several of ours, `part` is which of how many parts of its rows is this one, evenly
    unless `rows` says otherwise.
    """

    theirs: tuple[str, ...]
    change: str = "same"
    rows: tuple[int, ...] = ()
    also: tuple[str, ...] = ()
    instead: tuple[str, ...] = ()
    part: tuple[int, int] = (0, 1)

    def renamed(self, rename: Callable[[str], str]) -> "Rule":
        """Return the rule with every name of theirs changed."""
        names = (self.theirs, self.also, self.instead)
        theirs, also, instead = (tuple(map(rename, some)) for some in names)
        return replace(self, theirs=theirs, also=also, instead=instead)


# Our module or parameter -> theirs: one name, several, or a rule, which may depend on our config. A
# row for a module holds for each of its parameters, whose own names are the same on both sides.
Row = str | tuple[str, ...] | Rule
WeightNames = Mapping[str, Row | Callable[[Any], Row]]


class Change(NamedTuple):
    """How one of their tensors becomes ours under a config, and back."""

    read: Callable[[Tensor, Any], Tensor]
    write: Callable[[Tensor, Any], Tensor]


def _transposed(x: Tensor, config: Any) -> Tensor:
    """Transpose a matrix; a bias stays as it is."""
    return x.mT if x.ndim == 2 else x


def _part_by_head(x: Tensor, config: Any) -> Tensor:
    """Part (h 3 d) rows, with query, key and value of a head together, into (3 h d)."""
    return x.unflatten(0, (config.block.heads, 3, -1)).transpose(0, 1).flatten(0, 2)


def _join_by_head(x: Tensor, config: Any) -> Tensor:
    """Put (3 h d) rows together by head, (h 3 d)."""
    return x.unflatten(0, (3, config.block.heads, -1)).transpose(0, 1).flatten(0, 2)


def _flat_patches(x: Tensor, config: Any) -> Tensor:
    """Return the weight of a convolution as that of a product with patches."""
    return x.flatten(1)


def _square_patches(x: Tensor, config: Any) -> Tensor:
    """Return the weight of a product with patches as that of a convolution."""
    return x.unflatten(1, (config.channels, config.patch, config.patch))


CHANGES: dict[str, Change] = {
    "same": Change(lambda x, config: x, lambda x, config: x),
    # transformers' Conv1D keeps its matrix transposed
    "transpose": Change(_transposed, _transposed),
    # positions of RoBERTa and BART begin in the third row
    "skip2": Change(
        lambda x, config: x[2:], lambda x, config: torch.cat([x.new_zeros(2, *x.shape[1:]), x])
    ),
    # a vector written as a matrix of one row
    "row": Change(lambda x, config: x.flatten(), lambda x, config: x.unsqueeze(0)),
    # a matrix of one row written as a vector
    "row_of": Change(lambda x, config: x.unsqueeze(0), lambda x, config: x.flatten()),
    "by_head": Change(_part_by_head, _join_by_head),
    "patches": Change(_flat_patches, _square_patches),
}


def as_rule(entry: Row | Callable[[Any], Row], config: Any) -> Rule:
    """Return the rule that a row of a weight table stands for under one of our configs."""
    entry = entry(config) if callable(entry) else entry
    if isinstance(entry, Rule):
        return entry
    return Rule((entry,) if isinstance(entry, str) else entry)


def within(ours: str, theirs: str, weights: WeightNames) -> WeightNames:
    """Return a weight table with prefixes before our names and before theirs."""

    def prefixed(entry: Row | Callable[[Any], Row]) -> Callable[[Any], Row]:
        return lambda config: as_rule(entry, config).renamed(lambda name: theirs + name)

    return {ours + name: prefixed(entry) for name, entry in weights.items()}


def each(name: str) -> tuple[str, ...]:
    """Return the names that a pattern such as `{q,k,v}_proj` stands for."""
    before, options, after = re.split(r"{(\w+(?:,\w+)+)}", name)
    return tuple(f"{before}{option}{after}" for option in options.split(","))


def block(
    attention: tuple[str, str, str], network: tuple[str, str, str], change: str = "same"
) -> dict[str, Row | Callable[[Any], Row]]:
    """Name the modules of a block.

    `attention` are its projection of queries, keys and values (one name, or several in braces), of
    the output, and its norm; `network` the two products of the feed-forward network, and its norm.
    """
    qkv, *rest = attention
    names: dict[str, Any] = {"attention.qkv": each(qkv) if "," in qkv else (qkv,)}
    modules = ("attention.out", "around_attention.norm")
    modules += ("feed_forward.inner", "feed_forward.outer", "around_feed_forward.norm")
    names |= {ours: (name,) for ours, name in zip(modules, (*rest, *network), strict=True)}
    return {ours: Rule(theirs, change) for ours, theirs in names.items()}


def half(name: str, number: int) -> Rule:
    """Return the rule of a weight that is one half (0 or 1) of the rows of theirs."""
    return Rule((name,), part=(number, 2))


def head_width(config: Any) -> int:
    """Return how wide a head is, whether the config says so or not."""
    return config.block.head_width or config.block.width // config.block.heads


def kv_heads(config: Any) -> int:
    """Return how many heads keys and values have, whether the config says so or not."""
    return config.block.kv_heads or config.block.heads


def qkv_rows(config: Any) -> tuple[int, ...]:
    """Return how many rows queries, keys and values have where heads may share keys and values."""
    return tuple(n * head_width(config) for n in (config.block.heads, *[kv_heads(config)] * 2))


# ---- formats


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

    def fits(self, config: Any) -> bool:
        """Tell whether one of our configs has the settings that make this class."""
        return all(setting_of(config, key) == value for key, value in self.config.items())


class Template(NamedTuple):
    """Which special tokens stand around a text and a pair of texts, by their roles.

    `types` are the token types of the parts of a pair.
    """

    single: tuple[str, ...] = ("A",)
    pair: tuple[str, ...] = ("A", "B")
    types: tuple[int, ...] = (0, 1)


BERT_TEMPLATE = Template(("cls", "A", "sep"), ("cls", "A", "sep", "B", "sep"), (0, 0, 0, 1, 1))
ROBERTA_TEMPLATE = Template(("cls", "A", "sep"), ("cls", "A", "sep", "sep", "B", "sep"), (0,) * 6)
BOS_TEMPLATE = Template(("bos", "A"), ("bos", "A", "bos", "B"), (0, 0, 1, 1))


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
    inputs: str = "text"  # or images, which have no tokenizer, or both
    template: Template = Template()  # where the tokenizer's own files do not say
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

    def write_config(self, config: Any, task: str | None = None) -> dict[str, Any]:
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

    def architecture(self, task: str | None = None, config: Any = None) -> str:
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
TRAINING_ONLY = re.compile(r"start|drop_path|.*dropout")


def differing(ours: Any, again: Any) -> list[str]:
    """Name the settings in which a config differs from what came back from a format."""

    def settings(config: Any) -> dict[str, Any]:
        values = asdict(config)
        if isinstance(block := values.pop("block", None), dict):
            block["kv_heads"] = block["kv_heads"] or block["heads"]
            block["head_width"] = block["head_width"] or block["width"] // block["heads"]
            values |= {f"block.{key}": value for key, value in block.items()}
        if "position" in values:
            values["position"] = ALIASES.get(values["position"], values["position"])
        return values

    one, other = settings(ours), settings(again)
    return [key for key in one if one[key] != other[key] and not TRAINING_ONLY.fullmatch(key)]


# ---- converting weights


def to_ours(
    format: Format, config: Any, theirs: Mapping[str, Tensor], named: str | None = None
) -> dict[str, Tensor]:
    """Return the weights of our model from theirs, which are those of a class."""
    shapes = {name: tuple(x.shape) for name, x in theirs.items()}
    with on_meta():
        empty = float_state(family(format.family)[1](config))
    places = compare(format, config, empty, shapes, named)
    return convert(format, config, empty, theirs, places, named)


def to_theirs(
    format: Format, config: Any, ours: Mapping[str, Tensor], named: str | None = None
) -> dict[str, Tensor]:
    """Return their weights for those of our model."""
    theirs: dict[str, Tensor] = {}
    shared: dict[str, list[Tensor | None]] = {}  # of which ours are parts
    for name, rule in resolved_rules(format, config, ours, named).items():
        tensor, (number, whole) = ours[name], rule.part
        if whole > 1:
            shared.setdefault(rule.theirs[0], [None] * whole)[number] = tensor
            continue
        count = len(rule.theirs)
        parts = tensor.split(rule.rows or len(tensor) // count) if count > 1 else [tensor]
        for other, part in zip(rule.theirs, parts, strict=True):
            theirs[other] = CHANGES[rule.change].write(part, config).contiguous()
    return theirs | {name: torch.cat(cast(list, parts)) for name, parts in shared.items()}


def compare(
    format: Format,
    config: Any,
    ours: Mapping[str, Tensor],
    shapes: Mapping[str, Sequence[int]],
    named: str | None = None,
) -> dict[str, str]:
    """Refuse weights whose names or shapes do not fit our model, before any memory is taken.

    `ours` are its parameters and buffers, on the meta device. Returns where each of the weights
    that the rules name stands in the file.
    """
    expected = to_theirs(format, config, ours, named)
    also: dict[str, list[str]] = {}
    for rule in resolved_rules(format, config, ours, named).values():
        for other in (*rule.also, *rule.instead):
            also.setdefault(other, []).append(rule.theirs[0])
    shared: dict[str, str] = {}
    own: dict[str, str] = {}
    wrong: list[str] = []
    twice: list[str] = []
    for name in shapes:
        spellings = (name, format.prefix + name, name.removeprefix(format.prefix))
        spelling = next((n for n in spellings if n in expected or n in also), None)
        if spelling in expected:
            twice += [name] if spelling in own else []
            own[spelling] = name
        elif spelling is not None:
            for owner in also[spelling]:
                shared.setdefault(owner, name)
        elif not any(re.search(pattern, name) for pattern in format.ignored):
            wrong.append(f"unknown {name}")
    places = shared | own  # rather its own name than one that it shares
    # a weight of its own may be absent where it is the same as another one (T5's head)
    for other, names in also.items():
        if other in places:
            places = dict.fromkeys(names, places[other]) | places
    wrong = [f"missing {name}" for name in expected if name not in places] + wrong
    wrong += [f"{name} is there with and without its prefix" for name in twice]
    wrong += [
        f"{place} is {list(shapes[place])}, not {list(expected[name].shape)}"
        for name, place in places.items()
        if tuple(shapes[place]) != tuple(expected[name].shape)
    ]
    if wrong:
        more = f" and {len(wrong) - 6} more" if len(wrong) > 6 else ""
        raise UsageError(f"the weights do not fit the config: {'; '.join(wrong[:6])}{more}")
    return places


def convert(
    format: Format,
    config: Any,
    ours: Mapping[str, Tensor],
    theirs: Mapping[str, Tensor],
    places: Mapping[str, str],
    named: str | None = None,
) -> dict[str, Tensor]:
    """Change weights that have been compared, one after the other, into ours."""
    made: dict[str, Tensor] = {}
    for name, rule in resolved_rules(format, config, ours, named).items():
        _refuse_contradiction(format, rule, theirs, places)
        change, (number, whole) = CHANGES[rule.change].read, rule.part
        parts = [change(theirs[places[part]], config) for part in rule.theirs]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        if whole > 1:
            joined = (joined.split(rule.rows) if rule.rows else joined.chunk(whole))[number]
        made[name] = joined.reshape(ours[name].shape).contiguous()
    return made


def _refuse_contradiction(
    format: Format, rule: Rule, theirs: Mapping[str, Tensor], places: Mapping[str, str]
) -> None:
    """Refuse a weight that is there twice with different values: which is meant is unclear."""
    for other in rule.also:
        place = places[rule.theirs[0]]
        for spelling in {other, format.prefix + other, other.removeprefix(format.prefix)}:
            if spelling == place or spelling not in theirs or spelling in places.values():
                continue
            if not torch.equal(theirs[spelling], theirs[place]):
                raise UsageError(
                    f"{spelling} and {place} differ, though the config says that they are the "
                    "same; set tie_word_embeddings to false in config.json if they are not"
                )


def resolved_rules(
    format: Format, config: Any, names: Iterable[str], named: str | None = None
) -> dict[str, Rule]:
    """Give each parameter of ours its rule, with the numbers of its layers filled in."""
    table = format.weight_table(named)
    rules: dict[str, Rule] = {}
    for name in names:
        rule = _rule(name, table, config)
        if rule is None:
            raise UsageError(
                f"weight '{name}' has no counterpart in the format {format.model_type}"
            )
        old = (
            other.removesuffix(end) + older
            for other in rule.theirs
            for end, older in format.older.items()
            if other.endswith(end)
        )
        rules[name] = replace(rule, also=(*rule.also, *old))
    for absent, owners in format.tied.items():
        owner = next((name for name in owners if name in rules), None)
        if absent not in rules and owner and (lent := _rule(absent, table, config)):
            also = (*rules[owner].also, *lent.theirs, *lent.also)
            rules[owner] = replace(rules[owner], also=also)
    return rules


LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def _rule(name: str, table: WeightNames, config: Any) -> Rule | None:
    """Return the rule of a parameter: its own row, or that of its module."""
    row = LAYER_NUMBER.sub("{}", name)
    module, _, leaf = row.rpartition(".")
    if row in table:
        rule = as_rule(table[row], config)
    elif module in table:
        rule = as_rule(table[module], config).renamed(lambda other: f"{other}.{leaf}")
    else:
        return None
    numbers = LAYER_NUMBER.findall(name)
    return rule.renamed(lambda other: other.format(*numbers))
