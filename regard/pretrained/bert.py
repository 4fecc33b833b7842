"""The encoders of transformers, from BERT to ModernBERT.

Their base models carry a pooler that only the head that labels texts reads; ours has it in that
head, and nowhere else.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from regard.errors import UsageError, lookup
from regard.layers.feedforward import FEED_FORWARDS
from regard.models.bert import BertConfig
from regard.models.gpt import windowed
from regard.pretrained.gpt import GATED, PLAIN, read_bias, write_bias
from regard.pretrained.load import read_keys, write_keys
from regard.pretrained.tables import Format, Key, Rule

# the end of their class's name -> our task -> our head
TASKS = {
    "Model": "embed",
    "ForMaskedLM": "fill",
    "ForSequenceClassification": "classify",
    "ForTokenClassification": "tag",
}
PRETRAINED = {**TASKS, "ForPreTraining": "fill"}
HARMLESS = (
    *("directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers"),
    *("pooler_size_per_head", "pooler_type", "type_vocab_size", "embedding_size"),
    *("down_scale_factor", "gap_size", "net_structure_type", "num_memory_blocks"),
    *("pooler_hidden_size", "attention_head_size", "legacy", "z_steps", "augmentation"),
    *("is_decoder", "conv_act", "conv_groups", "tie_weights_", "global_rope_theta"),
    *("local_rope_theta", "reference_compile", "repad_logits_with_grad", "sparse_prediction"),
    *("sparse_pred_ignore_index", "deterministic_flash_attn", "sinusoidal_pos_embds"),
    # read or compared by a dialect that says it otherwise, or not read by transformers itself
    *("global_attn_every_n_layers", "rope_scaling", "head_dim", "layer_norm_eps"),
    *("position_embedding_type", "hidden_size", "num_attention_heads", "num_hidden_layers"),
)
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
    bias: tuple[str, ...] = ()  # of the words, where it has names of its own; any of them will do
    tag: Names = field(default_factory=lambda: {"head.out": "classifier"})
    tasks: Mapping[str, str] = field(default_factory=lambda: TASKS)
    acts: Mapping[str, str] = field(default_factory=lambda: PLAIN)
    halves: Mapping[str, int] = field(
        default_factory=dict
    )  # which half of theirs a part of ours is
    also: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # other names in `fill`
    position: str = "same"  # how the table of positions changes
    least_types: int = 1
    aliases: Words = field(default_factory=dict)  # other names of keys
    ignored: tuple[str, ...] = ()
    read: Callable[[Words], dict[str, Any]] = lambda theirs: {}  # settings that no key holds
    write: Callable[[BertConfig], dict[str, Any]] = lambda config: {}


def _keys(
    vocab: int,
    *more: Key,
    without: tuple[str, ...] = (),
    depth: int = 12,
    width: int = 768,
    types: int = 2,
    act: str = "gelu",
    drop: float = 0.1,
) -> tuple[Key, ...]:
    """Name the settings that all of them have, with the defaults in which they differ."""
    keys = (
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
    return tuple(key for key in keys if key.theirs not in without)


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
        raise UsageError(f"{key}={str(value)[:40]} is not a whole number")
    return value


def _after_two(theirs: Words) -> dict[str, Any]:
    """Return how many positions there are after the two rows that no token has."""
    rows = _number(theirs, _LENGTH.theirs, 512)
    if rows < 3:
        raise UsageError(f"{_LENGTH.theirs}={rows} is too small; it must be at least 3")
    return {"max_length": rows - 2}


def _narrow(theirs: Words) -> dict[str, Any]:
    """Refuse a table that is not narrower than the model, which they widen all the same."""
    inner, width = _number(theirs, "embedding_size", 128), _number(theirs, "hidden_size", 4096)
    if inner == width:
        raise UsageError(f"embedding_size={inner} is not supported; only less than hidden_size is")
    return {}


def _spread(theirs: Words) -> dict[str, Any]:
    """Refuse what only some DeBERTas have, and say how far distances go."""
    for key, value in _DISENTANGLED.items():
        if key not in theirs:
            raise UsageError(f"{key} is missing; only {key}={value} is supported")
    kinds = theirs.get("pos_att_type") or []
    kinds = kinds.lower().split("|") if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list) or sorted(map(str, kinds)) != ["c2p", "p2c"]:
        raise UsageError(f"pos_att_type={str(kinds)[:40]} is not supported; only p2c|c2p is")
    width, heads = _number(theirs, "hidden_size", 1536), _number(theirs, "num_attention_heads", 24)
    for key, value in (
        ("embedding_size", width),
        ("pooler_hidden_size", width),
        ("attention_head_size", width // max(1, heads)),
    ):
        if _number(theirs, key, value) != value:
            raise UsageError(f"{key}={theirs[key]} is not supported; only {value} is")
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
    tasks=PRETRAINED,
    ignored=(r"^cls\.seq_relationship\.",),
)

ROBERTA = Dialect(
    "Roberta",
    "roberta.",
    _keys(50265, _EPS, _DROPOUT),
    {**_ENCODER, "pad_token_id": 1},  # the positions begin after its row
    {"pool": "roberta", "head_act": "gelu"},
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

# RoBERTa in all but its name and its vocabulary
XLM_ROBERTA = replace(ROBERTA, name="XLMRoberta", keys=_keys(30522, _EPS, _DROPOUT))
CAMEMBERT = replace(XLM_ROBERTA, name="Camembert")

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
    tasks=PRETRAINED,
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
    tasks=PRETRAINED,
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
_DISTILLED = "~transformer.layer.{}"
# by which of its keys transformers also calls them
_ALIASES = {"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"}
DISTILBERT = Dialect(
    "DistilBert",
    "distilbert.",
    (
        Key("vocab", "vocab_size", 30522),
        Key("depth", "n_layers", 6),
        Key("labels", "num_labels", 2),
        Key("tie", "tie_word_embeddings", True),
        Key("block.width", "dim", 768),
        Key("block.heads", "n_heads", 12),
        Key("block.ffn_width", "hidden_dim", 3072),
        Key("block.feed_forward", "activation", "gelu", PLAIN),
        Key("block.dropout", "dropout", 0.1),
        Key("block.attention_dropout", "attention_dropout", 0.1),
        Key("head_dropout", "seq_classif_dropout", 0.2),
        _LENGTH,
    ),
    {},
    {"pool": "distilbert", "types": 0, "block.norm_eps": 1e-12},
    {
        **_EMBED,
        "blocks.{}.attention.qkv": tuple(f"{_DISTILLED}.attention.{part}_lin" for part in "qkv"),
        "blocks.{}.attention.out": f"{_DISTILLED}.attention.out_lin",
        "blocks.{}.around_attention.norm": f"{_DISTILLED}.sa_layer_norm",
        "blocks.{}.feed_forward.inner": f"{_DISTILLED}.ffn.lin1",
        "blocks.{}.feed_forward.outer": f"{_DISTILLED}.ffn.lin2",
        "blocks.{}.around_feed_forward.norm": f"{_DISTILLED}.output_layer_norm",
    },
    {
        "head.transform": "vocab_transform",
        "head.norm": "vocab_layer_norm",
        "head.out": "vocab_projector",
    },
    {"head.pool.dense": "pre_classifier", "head.out": "classifier"},
    least_types=0,
    aliases=_ALIASES,
)


def _widened(theirs: Words) -> dict[str, Any]:
    """Return how wide the table is where it is not as wide as the model."""
    inner, width = _number(theirs, "embedding_size", 128), _number(theirs, "hidden_size", 256)
    return {"inner_width": None if inner == width else inner}


ELECTRA = Dialect(
    "Electra",
    "electra.",
    _keys(30522, _EPS, _LENGTH, _DROPOUT, width=256),
    _ENCODER,
    {"pool": "electra", "head_act": "gelu"},
    {**_EMBED, **_LAYERS, "embed.widen": "~embeddings_project"},
    {
        "head.transform": "generator_predictions.dense",
        "head.norm": "generator_predictions.LayerNorm",
        "head.out": "generator_lm_head",
    },
    {"head.pool.dense": "classifier.dense", "head.out": "classifier.out_proj"},
    # what tells replaced tokens has learnt is in the model below its head
    tasks={**TASKS, "ForPreTraining": "embed"},
    ignored=(r"^discriminator_predictions\.",),
    read=_widened,
    write=lambda config: {"embedding_size": config.inner_width or config.block.width},
)

MPNET = Dialect(
    "MPNet",
    "mpnet.",
    _keys(30527, _EPS, without=("type_vocab_size",)),
    # the only number of buckets that its program counts with, and where positions begin
    {"relative_attention_num_buckets": 32, "pad_token_id": 1},
    {"pool": "roberta", "head_act": "gelu", "position": "learned_t5", "types": 0},
    {
        **_EMBED,
        **_LAYERS,
        "embed.position.distances.table": "~encoder.relative_attention_bias",
        "blocks.{}.attention.qkv": tuple(f"{_LAYER}.attention.attn.{part}" for part in "qkv"),
        "blocks.{}.attention.out": f"{_LAYER}.attention.attn.o",
        "blocks.{}.around_attention.norm": f"{_LAYER}.attention.LayerNorm",
    },
    ROBERTA.fill,
    ROBERTA.classify,
    ROBERTA.bias,
    position="skip2",
    least_types=0,
    read=lambda theirs: (
        _after_two(theirs) | {"head_dropout": theirs.get("hidden_dropout_prob", 0.1)}
    ),
    write=ROBERTA.write,
)


# ---- ModernBERT

_KINDS = ("full_attention", "sliding_attention")
_THETAS = (("global_rope_theta", 160_000.0), ("local_rope_theta", 10_000.0))
_POOLS = {"cls": "cls", "mean": "mean"}


def _near_and_far(theirs: Words) -> dict[str, Any]:
    """Return how far each layer sees, and by what bases it turns."""
    depth, every = (
        _number(theirs, key, default)
        for key, default in (("num_hidden_layers", 22), ("global_attn_every_n_layers", 3))
    )
    if not 1 <= depth <= 1000 or every < 1:
        raise UsageError(f"num_hidden_layers={depth} with global_attn_every_n_layers={every}")
    kinds = theirs.get("layer_types", [_KINDS[bool(i % every)] for i in range(depth)])
    if (
        not isinstance(kinds, list)
        or len(kinds) != depth
        or not set(map(str, kinds)) <= set(_KINDS)
    ):
        raise UsageError(
            f"layer_types={str(kinds)[:60]}; expected {depth} of {' and '.join(_KINDS)}"
        )
    near = tuple(i for i, kind in enumerate(kinds) if kind == _KINDS[1])
    given, scaling = (theirs.get(f"rope_{key}", {}) for key in ("parameters", "scaling"))
    if not isinstance(given, Mapping) or not isinstance(scaling, Mapping) or set(given) - {*_KINDS}:
        raise UsageError(f"rope_parameters={str(given)[:60]}; expected {' and '.join(_KINDS)}")
    bases = []
    for kind, (key, default) in zip(_KINDS, _THETAS, strict=True):
        told = given.get(kind) or {}
        told = {**told, **scaling} if isinstance(told, Mapping) else {"rope_type": told}
        name = told.get("rope_type", told.get("type", "default"))
        if name != "default":
            raise UsageError(f"rope_type={str(name)[:40]} is not supported; only default is")
        base = told.get("rope_theta", theirs.get(key, default))
        if isinstance(base, bool) or not isinstance(base, int | float):
            raise UsageError(f"{key}={str(base)[:40]} is not a number")
        bases.append(float(base))
    lookup("classifier_pooling", str(theirs.get("classifier_pooling", "cls")), _POOLS)
    lookup("classifier_activation", str(theirs.get("classifier_activation", "gelu")), PLAIN)
    width, heads = _number(theirs, "hidden_size", 768), _number(theirs, "num_attention_heads", 12)
    if _number(theirs, "head_dim", size := width // max(1, heads)) != size:
        raise UsageError(f"head_dim={theirs['head_dim']} is not supported; only {size} is")
    bias = theirs.get("mlp_bias", False)
    return {
        "window": _number(theirs, "local_attention", 128) // 2 + 1 if near else None,
        "window_layers": near if 0 < len(near) < depth else None,
        "position_base": bases[0],
        "near_base": bases[1] if near else None,
        "block.bias": bias,
        **read_bias(theirs.get("attention_bias", False), bias),
        "embed_norm": "layer" if theirs.get("norm_bias", False) is True else "layer_nobias",
    }


def _layer_types(config: BertConfig) -> dict[str, Any]:
    """Say how far each layer sees, and by what bases it turns."""
    near, base = windowed(config), config.position_base
    bases = (base, base if config.near_base is None else config.near_base)
    return {
        "layer_types": [_KINDS[i in near] for i in range(config.depth)],
        "local_attention": 2 * ((config.window or 65) - 1),
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": base}
            for kind, base in zip(_KINDS, bases, strict=True)
        },
        **{key: base for (key, _), base in zip(_THETAS, bases, strict=True)},
        "attention_bias": write_bias(config.block),
        "mlp_bias": config.block.bias,
    }


_MODERN = "~layers.{}"
_PREDICTION: Names = {"head.transform.dense": "head.dense", "head.transform.norm": "head.norm"}
MODERNBERT = Dialect(
    "ModernBert",
    "model.",
    (
        Key("vocab", "vocab_size", 50368),
        Key("depth", "num_hidden_layers", 22),
        Key("max_length", "max_position_embeddings", 8192),
        Key("labels", "num_labels", 2),
        Key("tie", "tie_word_embeddings", True),
        Key("pool", "classifier_pooling", "cls", _POOLS),
        Key("head_act", "classifier_activation", "gelu", PLAIN),
        Key("head_bias", "decoder_bias", True),
        Key("transform_bias", "classifier_bias", False),
        Key("head_dropout", "classifier_dropout", 0.0),
        Key("block.width", "hidden_size", 768),
        Key("block.heads", "num_attention_heads", 12),
        Key("block.ffn_width", "intermediate_size", 1152),
        Key("block.feed_forward", "hidden_activation", "gelu", GATED),
        Key("block.norm", "norm_bias", False, {False: "layer_nobias", True: "layer"}),
        Key("block.norm_eps", "norm_eps", 1e-5),
        Key("block.dropout", "embedding_dropout", 0.0),
        Key("block.attention_dropout", "attention_dropout", 0.0),
        Key("block.ffn_dropout", "mlp_dropout", 0.0),
    ),
    {},
    {
        "position": "rotary",
        "types": 0,
        "first_norm": "none",
        "transform": "dense",
        "block.order": "pre",
    },
    {
        "embed.tokens": "~embeddings.tok_embeddings",
        "embed.norm": "~embeddings.norm",
        "blocks.{}.attention.qkv": f"{_MODERN}.attn.Wqkv",
        "blocks.{}.attention.out": f"{_MODERN}.attn.Wo",
        "blocks.{}.around_attention.norm": f"{_MODERN}.attn_norm",
        "blocks.{}.feed_forward.gate": f"{_MODERN}.mlp.Wi",
        "blocks.{}.feed_forward.inner": f"{_MODERN}.mlp.Wi",
        "blocks.{}.feed_forward.outer": f"{_MODERN}.mlp.Wo",
        "blocks.{}.around_feed_forward.norm": f"{_MODERN}.mlp_norm",
        "norm": "~final_norm",
    },
    {"head.transform": "head.dense", "head.norm": "head.norm", "head.out": "decoder"},
    {**_PREDICTION, "head.out": "classifier"},
    tag={**_PREDICTION, "head.out": "classifier"},
    acts=GATED,
    halves={"blocks.{}.feed_forward.gate": 0, "blocks.{}.feed_forward.inner": 1},
    least_types=0,
    read=_near_and_far,
    write=_layer_types,
)

# norms before their parts and turned positions: our own taggers are written as such
_ESM = "~encoder.layer.{}"
ESM = Dialect(
    "Esm",
    "esm.",
    (
        *_keys(33, without=("type_vocab_size",)),
        Key("block.norm_eps", "layer_norm_eps", 1e-12),
        Key("max_length", "max_position_embeddings", 1026),
        Key("position_base", "rope_theta", 10_000.0),
        Key("head_dropout", "classifier_dropout", 0.1),
        Key("embed_norm", "emb_layer_norm_before", False, {True: "layer", False: "none"}),
    ),
    {
        "position_embedding_type": "rotary",
        "token_dropout": False,
        "is_folding_model": False,
        "is_decoder": False,
        "add_cross_attention": False,
    },
    {"position": "rotary", "types": 0, "pool": "roberta", "block.order": "pre"},
    {
        "embed.tokens": "~embeddings.word_embeddings",
        "embed.norm": "~embeddings.layer_norm",
        "blocks.{}.attention.qkv": _trio(f"{_ESM}.attention.self.{{}}".replace("{}", "{{}}", 1)),
        "blocks.{}.attention.out": f"{_ESM}.attention.output.dense",
        "blocks.{}.around_attention.norm": f"{_ESM}.attention.LayerNorm",
        "blocks.{}.feed_forward.inner": f"{_ESM}.intermediate.dense",
        "blocks.{}.feed_forward.outer": f"{_ESM}.output.dense",
        "blocks.{}.around_feed_forward.norm": f"{_ESM}.LayerNorm",
        "norm": "~encoder.emb_layer_norm_after",
    },
    {
        "head.transform": "lm_head.dense",
        "head.norm": "lm_head.layer_norm",
        "head.out": "lm_head.decoder",
    },
    {"head.pool.dense": "classifier.dense", "head.out": "classifier.out_proj"},
    ("lm_head.bias",),
    acts={"gelu": "gelu"},
    least_types=0,
    ignored=(r"inv_freq$", r"contact_head\.", r"embeddings\.position_embeddings\."),
)
DIALECTS = {
    "bert": BERT,
    "roberta": ROBERTA,
    "albert": ALBERT,
    "deberta-v2": DEBERTA,
    "xlm-roberta": XLM_ROBERTA,
    "camembert": CAMEMBERT,
    "distilbert": DISTILBERT,
    "electra": ELECTRA,
    "mpnet": MPNET,
    "modernbert": MODERNBERT,
    "esm": ESM,
}


def _read(dialect: Dialect, theirs: Words, architecture: str) -> BertConfig:
    """Return our config for one of theirs."""
    theirs = {key: value for key, value in theirs.items() if value is not None}
    theirs = {key: theirs[also] for also, key in dialect.aliases.items() if also in theirs} | theirs
    (act,) = (key for key in dialect.keys if key.ours == "block.feed_forward")
    lookup(act.theirs, str(theirs.get(act.theirs, act.default)), dialect.acts)
    task = dialect.tasks[architecture.removeprefix(dialect.name)]
    parts = {**dialect.parts, **dialect.read(theirs), "head": HEADS[task]}
    if isinstance(names := theirs.get("id2label"), Mapping):
        theirs = {**theirs, "num_labels": len(names)}
    return settle(read_keys(BertConfig, theirs, dialect.keys, parts, dialect.fixed))


def settle(config: BertConfig) -> BertConfig:
    """Say the same in the plainest words: a head's activation, and what layers see."""
    acts = [FEED_FORWARDS.get(name) for name in (config.head_act, config.block.feed_forward)]
    if acts[0] is not None and acts[1] is not None and acts[0][1] is acts[1][1]:
        config = replace(config, head_act="same")
    near = windowed(config)
    if not near:
        return replace(config, window=None, window_layers=None, near_base=None)
    layers = None if len(near) == config.depth else tuple(sorted(near))
    base = config.position_base if config.near_base is None else config.near_base
    return replace(config, window_layers=layers, near_base=base)


def _settle_esm(config: BertConfig) -> BertConfig:
    """Leave out how to pool for a head that pools nothing: our taggers say it, too."""
    config = settle(config)
    return config if config.head == "classify" else replace(config, pool=ESM.parts["pool"])


def _write(dialect: Dialect, model_type: str, config: BertConfig, task: str) -> dict[str, Any]:
    """Return their config for one of ours."""
    if config.members > 1:
        raise UsageError(f"{model_type} is one encoder, not {config.members}; train with members=1")
    if config.block.feed_forward not in dialect.acts.values():
        raise UsageError(f"{model_type} has no feed_forward '{config.block.feed_forward}'")
    end = next(end for end, ours in dialect.tasks.items() if ours == task)
    first = {"model_type": model_type, "architectures": [dialect.name + end]}
    config = replace(config, types=max(dialect.least_types, config.types))
    if config.head_act == "same":
        act = FEED_FORWARDS[config.block.feed_forward][1]
        plain = next(name for name, (_, one) in FEED_FORWARDS.items() if one is act)
        config = replace(config, head_act=plain)
    return write_keys(config, dialect.keys, {**first, **dialect.fixed, **dialect.write(config)})


def _rules(dialect: Dialect, config: BertConfig, architecture: str) -> list[Rule]:
    """Name all weights."""
    base = "" if architecture == f"{dialect.name}Model" else dialect.prefix
    heads: dict[str, Names] = {
        "none": {},
        "words": dialect.fill,
        "classify": dialect.classify,
        "tag": dialect.tag,
    }
    rules: dict[str, Rule] = {}
    for ours, theirs in {**dialect.names, **heads[config.head]}.items():
        names = theirs if isinstance(theirs, tuple) else (theirs,)
        for part, old in (("weight", "gamma"), ("bias", "beta")):
            full = tuple(f"{name.replace('~', base)}.{part}" for name in names)
            also = [f"{name.replace('~', base)}.{old}" for name in names if "LayerNorm" in name]
            also += [f"{name}.{part}" for name in dialect.also.get(ours, ())]
            half = (dialect.halves[ours], 2) if ours in dialect.halves else (0, 1)
            rules[f"{ours}.{part}"] = Rule(f"{ours}.{part}", full, also=tuple(also), part=half)

    def change(ours: str, **parts: Any) -> None:
        rules[ours] = replace(rules[ours], **parts)

    if (table := "embed.position.distances.table") in dialect.names:  # no module of its own
        rules[table] = replace(rules[f"{table}.weight"], ours=table)
    if dialect.position != "same":
        change("embed.position.table.weight", change=dialect.position)
    if config.head == "words":
        bias = rules["head.out.bias"].theirs
        if config.tie:
            change("embed.tokens.weight", also=rules["head.out.weight"].theirs)
            if dialect.bias:
                change("head.out.bias", theirs=dialect.bias[:1], also=(*dialect.bias[1:], *bias))
        else:
            change("head.out.bias", instead=dialect.bias)
    return list(rules.values())


FORMATS = {
    model_type: Format(
        model_type,
        {dialect.name + end: task for end, task in dialect.tasks.items()},
        "bert",
        partial(_read, dialect),
        partial(_write, dialect, model_type),
        partial(_rules, dialect),
        ignored=(r"position_ids$", r"(^|\.)pooler\.", *dialect.ignored),
        prefix=dialect.prefix,
        settle=_settle_esm if dialect is ESM else settle,
        harmless=HARMLESS,
    )
    for model_type, dialect in DIALECTS.items()
}
