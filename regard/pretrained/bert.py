"""The encoders of transformers: BERT, RoBERTa, ALBERT, and DeBERTa v2 and v3.

Their base models carry a pooler that only the head that labels texts reads; ours has it in that
head, and nowhere else.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from regard.errors import Mistake, choose
from regard.models.bert import BertConfig
from regard.pretrained.gpt import PLAIN
from regard.pretrained.load import read_keys, write_keys
from regard.pretrained.tables import Format, Key, Rule

# the end of their class's name -> our task -> our head
TASKS = {
    "Model": "embed",
    "ForMaskedLM": "fill",
    "ForPreTraining": "fill",
    "ForSequenceClassification": "classify",
    "ForTokenClassification": "tag",
}
HEADS = {"embed": "none", "fill": "words", "classify": "classify", "tag": "tag"}
Words = Mapping[str, Any]
Names = Mapping[str, str | tuple[str, ...]]  # our part -> theirs, `~` standing for the base model


@dataclass(frozen=True)
class Dialect:
    """How one of these families says what all of them say."""

    name: str  # with which their classes begin
    prefix: str
    keys: tuple[Key, ...]
    fixed: Words  # what a file may not have otherwise
    parts: Words  # what our config always has
    names: Names  # of the weights below the head
    fill: Names  # of the heads
    classify: Names
    bias: tuple[str, ...]  # of the words; any of these names will do
    also: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # other names in `fill`
    position: str = "same"  # how the table of positions changes
    least_types: int = 1
    ignored: tuple[str, ...] = ()
    read: Callable[[Words], dict[str, Any]] = lambda theirs: {}  # settings that no key holds
    write: Callable[[BertConfig], dict[str, Any]] = lambda config: {}


def _keys(
    vocab: int,
    *more: Key,
    depth: int = 12,
    width: int = 768,
    types: int = 2,
    act: str = "gelu",
    drop: float = 0.1,
) -> tuple[Key, ...]:
    """Name the settings that all of them have, with the defaults in which they differ."""
    return (
        Key("vocab", "vocab_size", vocab),
        Key("depth", "num_hidden_layers", depth),
        Key("types", "type_vocab_size", types),
        Key("labels", "num_labels", 2),
        Key("tie", "tie_word_embeddings", True),
        Key("block.width", "hidden_size", width),
        Key("block.heads", "num_attention_heads", width // 64),
        Key("block.ffn_width", "intermediate_size", 4 * width),
        Key("block.feed_forward", "hidden_act", act, PLAIN),
        Key("block.dropout", "hidden_dropout_prob", drop),
        Key("block.attention_dropout", "attention_probs_dropout_prob", drop),
        *more,
    )


def _trio(theirs: str) -> tuple[str, ...]:
    return tuple(theirs.format(part) for part in ("query", "key", "value"))


_EPS = Key("block.norm_eps", "layer_norm_eps", 1e-12)
_LENGTH = Key("max_length", "max_position_embeddings", 512)
_DROPOUT = Key("head_dropout", "classifier_dropout", 0.1)
_ABSOLUTE = {"position_embedding_type": "absolute"}
_ENCODER = {**_ABSOLUTE, "is_decoder": False, "add_cross_attention": False}
_EMBED: Names = {
    "embed.tokens": "~embeddings.word_embeddings",
    "embed.types": "~embeddings.token_type_embeddings",
    "embed.norm": "~embeddings.LayerNorm",
    "embed.position.table": "~embeddings.position_embeddings",
}
_LAYER = "~encoder.layer.{}"
_LAYERS: Names = {
    "blocks.{}.attention.qkv": _trio("~encoder.layer.{{}}.attention.self.{}"),
    "blocks.{}.attention.out": f"{_LAYER}.attention.output.dense",
    "blocks.{}.around_attention.norm": f"{_LAYER}.attention.output.LayerNorm",
    "blocks.{}.feed_forward.inner": f"{_LAYER}.intermediate.dense",
    "blocks.{}.feed_forward.outer": f"{_LAYER}.output.dense",
    "blocks.{}.around_feed_forward.norm": f"{_LAYER}.output.LayerNorm",
}
_PREDICTIONS: Names = {
    "head.transform": "cls.predictions.transform.dense",
    "head.norm": "cls.predictions.transform.LayerNorm",
    "head.out": "cls.predictions.decoder",
}

# What the file must say, since something else is meant where it does not.
_DISENTANGLED = {"relative_attention": True, "share_att_key": True, "position_biased_input": False}


def _number(theirs: Words, key: str, default: int) -> int:
    """Return a whole number of theirs."""
    value = default if theirs.get(key) is None else theirs[key]
    if isinstance(value, bool) or not isinstance(value, int):
        raise Mistake(f"{key}={str(value)[:40]} is not a whole number")
    return value


def _after_two(theirs: Words) -> dict[str, Any]:
    """Return how many positions there are after the two rows that no token has."""
    rows = _number(theirs, _LENGTH.theirs, 512)
    if rows < 3:
        raise Mistake(f"{_LENGTH.theirs}={rows} is too small; it must be at least 3")
    return {"max_length": rows - 2}


def _narrow(theirs: Words) -> dict[str, Any]:
    """Refuse a table that is not narrower than the model, which they widen all the same."""
    inner, width = _number(theirs, "embedding_size", 128), _number(theirs, "hidden_size", 4096)
    if inner == width:
        raise Mistake(f"embedding_size={inner} is not supported; only less than hidden_size is")
    return {}


def _spread(theirs: Words) -> dict[str, Any]:
    """Refuse what only some DeBERTas have, and say how far distances go."""
    for key, value in _DISENTANGLED.items():
        if key not in theirs:
            raise Mistake(f"{key} is missing; only {key}={value} is supported")
    kinds = theirs.get("pos_att_type") or []
    kinds = kinds.lower().split("|") if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list) or sorted(map(str, kinds)) != ["c2p", "p2c"]:
        raise Mistake(f"pos_att_type={str(kinds)[:40]} is not supported; only p2c|c2p is")
    width, heads = _number(theirs, "hidden_size", 1536), _number(theirs, "num_attention_heads", 24)
    for key, value in (
        ("embedding_size", width),
        ("pooler_hidden_size", width),
        ("attention_head_size", width // max(1, heads)),
    ):
        if _number(theirs, key, value) != value:
            raise Mistake(f"{key}={theirs[key]} is not supported; only {value} is")
    span = _number(theirs, "max_relative_positions", -1)
    return {"distances.span": span if span > 0 else _number(theirs, _LENGTH.theirs, 512)}


BERT = Dialect(
    "Bert",
    "bert.",
    _keys(30522, _EPS, _LENGTH, _DROPOUT),
    _ENCODER,
    {},
    {**_EMBED, **_LAYERS},
    _PREDICTIONS,
    {"head.pool.dense": "~pooler.dense", "head.out": "classifier"},
    ("cls.predictions.bias",),
    ignored=(r"^cls\.seq_relationship\.",),
)

ROBERTA = Dialect(
    "Roberta",
    "roberta.",
    _keys(50265, _EPS, _DROPOUT),
    {**_ENCODER, "pad_token_id": 1},  # the positions begin after its row
    {"pool": "roberta"},
    {**_EMBED, **_LAYERS},
    {
        "head.transform": "lm_head.dense",
        "head.norm": "lm_head.layer_norm",
        "head.out": "lm_head.decoder",
    },
    {"head.pool.dense": "classifier.dense", "head.out": "classifier.out_proj"},
    ("lm_head.bias",),
    position="skip2",
    read=_after_two,
    write=lambda config: {_LENGTH.theirs: config.max_length + 2},
)

_GROUP = "~encoder.albert_layer_groups.0.albert_layers.0"
ALBERT = Dialect(
    "Albert",
    "albert.",
    _keys(
        30000,
        _EPS,
        _LENGTH,
        Key("head_dropout", "classifier_dropout_prob", 0.1),
        Key("inner_width", "embedding_size", 128),
        width=4096,
        act="gelu_new",
        drop=0.0,
    ),
    {**_ABSOLUTE, "num_hidden_groups": 1, "inner_group_num": 1},
    {"layers": "shared"},
    {
        **_EMBED,
        "embed.widen": "~encoder.embedding_hidden_mapping_in",
        "blocks.{}.attention.qkv": _trio(f"{_GROUP}.attention.{{}}"),
        "blocks.{}.attention.out": f"{_GROUP}.attention.dense",
        "blocks.{}.around_attention.norm": f"{_GROUP}.attention.LayerNorm",
        "blocks.{}.feed_forward.inner": f"{_GROUP}.ffn",
        "blocks.{}.feed_forward.outer": f"{_GROUP}.ffn_output",
        "blocks.{}.around_feed_forward.norm": f"{_GROUP}.full_layer_layer_norm",
    },
    {
        "head.transform": "predictions.dense",
        "head.norm": "predictions.LayerNorm",
        "head.out": "predictions.decoder",
    },
    {"head.pool.dense": "~pooler", "head.out": "classifier"},
    ("predictions.bias",),
    ignored=(r"^sop_classifier\.",),
    read=_narrow,
)

DEBERTA = Dialect(
    "DebertaV2",
    "deberta.",
    _keys(
        128100,
        Key("block.norm_eps", "layer_norm_eps", 1e-7),
        _LENGTH,
        Key("head_dropout", "cls_dropout", 0.1),
        Key("distances.buckets", "position_buckets", -1, {-1: 0}),
        Key("distances.norm", "norm_rel_ebd", "none", {"layer_norm": "layer"}),
        depth=24,
        width=1536,
        types=0,
    ),
    {**_DISENTANGLED, "conv_kernel_size": 0, "pooler_hidden_act": "gelu"},
    {"pool": "deberta", "position": "disentangled", "block.score": "disentangled"},
    {
        **_EMBED,
        **_LAYERS,
        "blocks.{}.attention.qkv": _trio("~encoder.layer.{{}}.attention.self.{}_proj"),
        "embed.position.table": "~encoder.rel_embeddings",
        "embed.position.norm": "~encoder.LayerNorm",
    },
    _PREDICTIONS,
    {"head.pool.dense": "pooler.dense", "head.out": "classifier"},
    ("cls.predictions.bias", "lm_predictions.lm_head.bias"),
    also={
        "head.transform": ("lm_predictions.lm_head.dense",),
        "head.norm": ("lm_predictions.lm_head.LayerNorm",),
    },
    least_types=0,
    ignored=(r"^(mask|lm)_predictions\.", r"embeddings\.position_embeddings\."),
    read=_spread,
    write=lambda config: {
        "pos_att_type": ["p2c", "c2p"],
        "max_relative_positions": config.distances.span,
    },
)
DIALECTS = {"bert": BERT, "roberta": ROBERTA, "albert": ALBERT, "deberta-v2": DEBERTA}


def _read(dialect: Dialect, theirs: Words, architecture: str) -> BertConfig:
    """Return our config for one of theirs."""
    theirs = {key: value for key, value in theirs.items() if value is not None}
    if "hidden_act" in theirs:
        choose("hidden_act", str(theirs["hidden_act"]), PLAIN)
    task = TASKS[architecture.removeprefix(dialect.name)]
    parts = {**dialect.parts, **dialect.read(theirs), "head": HEADS[task]}
    if isinstance(names := theirs.get("id2label"), Mapping):
        theirs = {**theirs, "num_labels": len(names)}
    return read_keys(BertConfig, theirs, dialect.keys, parts, dialect.fixed)


def _write(dialect: Dialect, model_type: str, config: BertConfig, task: str) -> dict[str, Any]:
    """Return their config for one of ours."""
    if config.members > 1:
        raise Mistake(f"{model_type} is one encoder, not {config.members}; train with members=1")
    if config.block.feed_forward not in PLAIN.values():
        raise Mistake(f"{model_type} has no feed_forward '{config.block.feed_forward}'")
    end = next(end for end, ours in TASKS.items() if ours == task)
    first = {"model_type": model_type, "architectures": [dialect.name + end]}
    config = replace(config, types=max(dialect.least_types, config.types))
    return write_keys(config, dialect.keys, {**first, **dialect.fixed, **dialect.write(config)})


def _rules(dialect: Dialect, config: BertConfig, architecture: str) -> list[Rule]:
    """Name all weights."""
    base = "" if architecture == f"{dialect.name}Model" else dialect.prefix
    heads: dict[str, Names] = {
        "none": {},
        "words": dialect.fill,
        "classify": dialect.classify,
        "tag": {"head.out": "classifier"},
    }
    rules: dict[str, Rule] = {}
    for ours, theirs in {**dialect.names, **heads[config.head]}.items():
        names = theirs if isinstance(theirs, tuple) else (theirs,)
        for part, old in (("weight", "gamma"), ("bias", "beta")):
            full = tuple(f"{name.replace('~', base)}.{part}" for name in names)
            also = [f"{name.replace('~', base)}.{old}" for name in names if "LayerNorm" in name]
            also += [f"{name}.{part}" for name in dialect.also.get(ours, ())]
            rules[f"{ours}.{part}"] = Rule(f"{ours}.{part}", full, also=tuple(also))

    def change(ours: str, **parts: Any) -> None:
        rules[ours] = replace(rules[ours], **parts)

    change("embed.position.table.weight", change=dialect.position)
    if config.head == "words":
        bias = rules["head.out.bias"].theirs
        if config.tie:
            change("embed.tokens.weight", also=rules["head.out.weight"].theirs)
            change("head.out.bias", theirs=dialect.bias[:1], also=(*dialect.bias[1:], *bias))
        else:
            change("head.out.bias", also=dialect.bias)
    return list(rules.values())


FORMATS = {
    model_type: Format(
        model_type,
        {dialect.name + end: task for end, task in TASKS.items()},
        "bert",
        partial(_read, dialect),
        partial(_write, dialect, model_type),
        partial(_rules, dialect),
        ignored=(r"position_ids$", r"(^|\.)pooler\.", *dialect.ignored),
        prefix=dialect.prefix,
    )
    for model_type, dialect in DIALECTS.items()
}
