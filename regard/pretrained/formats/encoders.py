"""Encoder checkpoints, from BERT to ModernBERT, and ESM.

Their base models carry a pooler that only the head that labels texts reads; ours has it in that
head, and nowhere else.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from regard.errors import UsageError
from regard.layers.context import windowed
from regard.layers.feedforward import FEED_FORWARDS
from regard.models.bert import BertConfig
from regard.pretrained.config_keys import (
    ACTIVATIONS,
    GATED_ACTIVATIONS,
    Key,
    KeyGroup,
    Theirs,
    activation,
    integer,
    only,
    sizes,
    without_nulls,
)
from regard.pretrained.format import (
    BERT_TEMPLATE,
    ROBERTA_TEMPLATE,
    Architecture,
    Format,
    TokenTemplate,
)
from regard.pretrained.formats.rope import (
    FULL,
    SLIDING,
    attention_bias,
    layer_types,
    read_layer_types,
    rope_by_layer,
)
from regard.pretrained.weight_names import Rule, WeightNames, block, each, half, within

_HARMLESS = (
    *("directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers"),
    *("pooler_size_per_head", "pooler_type", "type_vocab_size", "embedding_size"),
    *("down_scale_factor", "gap_size", "net_structure_type", "num_memory_blocks"),
    *("pooler_hidden_size", "attention_head_size", "legacy", "z_steps", "augmentation"),
    *("is_decoder", "conv_act", "conv_groups", "tie_weights_", "global_rope_theta"),
    *("local_rope_theta", "reference_compile", "repad_logits_with_grad", "sparse_prediction"),
    *("sparse_pred_ignore_index", "deterministic_flash_attn", "sinusoidal_pos_embds"),
    # read or compared by a format that says it otherwise, or not read by transformers itself
    *("global_attn_every_n_layers", "rope_scaling", "head_dim", "layer_norm_eps"),
    *("position_embedding_type", "hidden_size", "num_attention_heads", "num_hidden_layers"),
)
_TIED = {"head.out.weight": ("embed.tokens.weight",)}
_OLDER = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}

# ---- what most of them share

_ENCODER_ONLY = {"is_decoder": False, "add_cross_attention": False}
_ABSOLUTE = {"position_embedding_type": "absolute"}
_LENGTH = Key("max_length", "max_position_embeddings", 512)
_HEAD_DROPOUT = Key("head_dropout", "classifier_dropout", 0.1)
_LABELS = Key("labels", "num_labels", 2)
_TYPES = Key("types", "type_vocab_size", 2, value=lambda config: max(1, config.types))


def _bert_keys(
    vocab: int,
    *more: Key | KeyGroup,
    depth: int = 12,
    width: int = 768,
    act: str = "gelu",
    acts: Mapping[str, str] = ACTIVATIONS,
    dropout: float = 0.1,
    eps: float = 1e-12,
) -> tuple[Key | KeyGroup, ...]:
    """Return the keys that most of them have, with the defaults in which they differ."""
    counts = {"depth": depth, "width": width, "heads": width // 64, "ffn_width": 4 * width}
    return (
        *sizes(vocab=vocab, tie=True, **counts),
        _LABELS,
        activation("hidden_act", act, acts),
        Key("block.dropout", "hidden_dropout_prob", dropout),
        Key("block.attention_dropout", "attention_probs_dropout_prob", dropout),
        Key("block.norm_eps", "layer_norm_eps", eps),
        *more,
    )


_EMBEDDINGS: WeightNames = {
    "embed.tokens": "embeddings.word_embeddings",
    "embed.types": "embeddings.token_type_embeddings",
    "embed.norm": "embeddings.LayerNorm",
    "embed.position.table": "embeddings.position_embeddings",
}
_BERT_BLOCK = block(
    attention=(
        *("attention.self.{query,key,value}", "attention.output.dense"),
        "attention.output.LayerNorm",
    ),
    network=("intermediate.dense", "output.dense", "output.LayerNorm"),
)
_BERT_WEIGHTS: WeightNames = {
    **_EMBEDDINGS,
    **within("blocks.{}.", "encoder.layer.{}.", _BERT_BLOCK),
}
_CLASSIFIER: WeightNames = {"head.out": "classifier"}
_ROBERTA_CLASSIFIER: WeightNames = {
    "head.pool.dense": "classifier.dense",
    "head.out": "classifier.out_proj",
}


def _word_head(transform: str, norm: str, out: str, *bias: str) -> WeightNames:
    """Name the head that predicts words, whose bias may stand under names of its own."""

    def bias_rule(config: BertConfig) -> Rule:
        if not bias:
            return Rule((f"{out}.bias",))
        if config.tie:
            return Rule(bias[:1], also=(*bias[1:], f"{out}.bias"))
        return Rule((f"{out}.bias",), instead=bias)

    names: WeightNames = {"head.transform": transform, "head.norm": norm, "head.out": out}
    return {**names, "head.out.bias": bias_rule}


_BERT_WORDS = _word_head(
    "cls.predictions.transform.dense",
    "cls.predictions.transform.LayerNorm",
    "cls.predictions.decoder",
    "cls.predictions.bias",
)
_ROBERTA_WORDS = _word_head(
    "lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias"
)


def _architectures(
    name: str,
    words: WeightNames,
    classifier: WeightNames,
    tagger: WeightNames = _CLASSIFIER,
    pretraining: str | None = None,
) -> dict[str, Architecture]:
    """Return the classes that each of them has; `pretraining` is the task of the one for it."""
    made = {
        f"{name}Model": Architecture("embed", {"head": "none"}, base=True),
        f"{name}ForMaskedLM": Architecture("fill", {"head": "words"}, weights=words),
        f"{name}ForSequenceClassification": Architecture(
            "classify", {"head": "classify"}, weights=classifier
        ),
        f"{name}ForTokenClassification": Architecture("tag", {"head": "tag"}, weights=tagger),
    }
    if pretraining == "fill":
        made[f"{name}ForPreTraining"] = made[f"{name}ForMaskedLM"]
    elif pretraining == "embed":  # what tells replaced tokens has learnt is below its head
        made[f"{name}ForPreTraining"] = Architecture("embed", {"head": "none"})
    return made


def canonical(config: BertConfig) -> BertConfig:
    """Return the config of the same model, its activations and windows in one spelling."""
    acts = [FEED_FORWARDS.get(name) for name in (config.head_act, config.block.feed_forward)]
    if acts[0] is not None and acts[1] is not None and acts[0][1] is acts[1][1]:
        config = replace(config, head_act="same")
    local = windowed(config)
    if not local:
        return replace(config, window=None, window_layers=None, near_base=None)
    layers = None if len(local) == config.depth else tuple(sorted(local))
    base = config.position_base if config.near_base is None else config.near_base
    return replace(config, window_layers=layers, near_base=base)


def _format(
    model_type: str,
    architectures: Mapping[str, Architecture],
    keys: tuple[Key | KeyGroup, ...],
    weights: WeightNames = _BERT_WEIGHTS,
    *,
    ignored: tuple[str, ...] = (),
    prepare: Callable[[Theirs], Theirs] = dict,
    **more: Any,
) -> Format:
    """Return a format with what all of them share."""
    return Format(
        model_type,
        "bert",
        architectures,
        keys,
        weights,
        tied=_TIED,
        older=_OLDER,
        ignored=(r"position_ids$", r"(^|\.)pooler\.", *ignored),
        harmless=_HARMLESS,
        prepare=lambda theirs: prepare(without_nulls(theirs)),
        **{"canonical": canonical, "template": BERT_TEMPLATE, **more},
    )


# ---- _BERT, RoBERTa and those that follow them

_BERT = _format(
    "bert",
    _architectures(
        "Bert",
        _BERT_WORDS,
        {"head.pool.dense": "bert.pooler.dense", **_CLASSIFIER},
        pretraining="fill",
    ),
    _bert_keys(30522, _TYPES, _LENGTH, _HEAD_DROPOUT),
    fixed={**_ABSOLUTE, **_ENCODER_ONLY},
    prefix="bert.",
    ignored=(r"^cls\.seq_relationship\.",),
)


def _read_after_padding(theirs: Theirs) -> dict[str, Any]:
    """Read how many positions there are after the two rows that no token has."""
    rows = integer(theirs, _LENGTH.theirs, 512)
    if rows < 3:
        raise UsageError(f"{_LENGTH.theirs}={rows} is too small; it must be at least 3")
    return {"max_length": rows - 2}


_AFTER_PADDING = KeyGroup(_read_after_padding, lambda c: {_LENGTH.theirs: c.max_length + 2})
_PADDED_POSITIONS: WeightNames = {
    "embed.position.table": Rule(("embeddings.position_embeddings",), "skip2")
}
_ROBERTA = _format(
    "roberta",
    _architectures("Roberta", _ROBERTA_WORDS, _ROBERTA_CLASSIFIER),
    _bert_keys(50265, _TYPES, _HEAD_DROPOUT, _AFTER_PADDING),
    {**_BERT_WEIGHTS, **_PADDED_POSITIONS},
    config={"pool": "roberta", "head_act": "gelu"},
    fixed={**_ABSOLUTE, **_ENCODER_ONLY, "pad_token_id": 1},  # the positions begin after its row
    prefix="roberta.",
    template=ROBERTA_TEMPLATE,
)
# RoBERTa in all but its name and its vocabulary
_XLM_ROBERTA, _CAMEMBERT = (
    replace(
        _ROBERTA,
        model_type=model_type,
        architectures=_architectures(name, _ROBERTA_WORDS, _ROBERTA_CLASSIFIER),
        keys=_bert_keys(30522, _TYPES, _HEAD_DROPOUT, _AFTER_PADDING),
    )
    for model_type, name in (("xlm-roberta", "XLMRoberta"), ("camembert", "Camembert"))
)
_MPNET = _format(
    "mpnet",
    _architectures("MPNet", _ROBERTA_WORDS, _ROBERTA_CLASSIFIER),
    _bert_keys(
        30527,
        _AFTER_PADDING,
        KeyGroup(lambda theirs: {"head_dropout": theirs.get("hidden_dropout_prob", 0.1)}),
    ),
    {
        **_BERT_WEIGHTS,
        **_PADDED_POSITIONS,
        "embed.position.distances.table": "encoder.relative_attention_bias.weight",
        "blocks.{}.attention.qkv": each("encoder.layer.{}.attention.attn.{q,k,v}"),
        "blocks.{}.attention.out": "encoder.layer.{}.attention.attn.o",
        "blocks.{}.around_attention.norm": "encoder.layer.{}.attention.LayerNorm",
    },
    config={"pool": "roberta", "head_act": "gelu", "position": "learned_t5", "types": 0},
    # the only number of buckets that its program counts with, and where positions begin
    fixed={"relative_attention_num_buckets": 32, "pad_token_id": 1},
    prefix="mpnet.",
    template=ROBERTA_TEMPLATE,
)

# ---- _ALBERT, whose layers share their weights, and _ELECTRA: tables narrower than the model


def _refuse_equal_widths(theirs: Theirs) -> Theirs:
    """Refuse a table that is not narrower than the model, which they widen all the same."""
    inner, width = integer(theirs, "embedding_size", 128), integer(theirs, "hidden_size", 4096)
    if inner == width:
        raise UsageError(f"embedding_size={inner} is not supported; only less than hidden_size is")
    return theirs


_ALBERT_WORDS = _word_head(
    "predictions.dense", "predictions.LayerNorm", "predictions.decoder", "predictions.bias"
)
_ALBERT_BLOCK = block(
    attention=("attention.{query,key,value}", "attention.dense", "attention.LayerNorm"),
    network=("ffn", "ffn_output", "full_layer_layer_norm"),
)
_ALBERT = _format(
    "albert",
    _architectures(
        "Albert",
        _ALBERT_WORDS,
        {"head.pool.dense": "albert.pooler", **_CLASSIFIER},
        pretraining="fill",
    ),
    _bert_keys(
        30000,
        _TYPES,
        _LENGTH,
        Key("head_dropout", "classifier_dropout_prob", 0.1),
        Key("inner_width", "embedding_size", 128),
        width=4096,
        act="gelu_new",
        dropout=0.0,
    ),
    {
        **_EMBEDDINGS,
        "embed.widen": "encoder.embedding_hidden_mapping_in",
        **within("blocks.{}.", "encoder.albert_layer_groups.0.albert_layers.0.", _ALBERT_BLOCK),
    },
    config={"layers": "shared"},
    fixed={**_ABSOLUTE, "num_hidden_groups": 1, "inner_group_num": 1},
    prefix="albert.",
    ignored=(r"^sop_classifier\.",),
    prepare=_refuse_equal_widths,
)


def _read_inner_width(theirs: Theirs) -> dict[str, Any]:
    """Read how wide the table is where it is not as wide as the model."""
    inner, width = integer(theirs, "embedding_size", 128), integer(theirs, "hidden_size", 256)
    return {"inner_width": None if inner == width else inner}


_ELECTRA = _format(
    "electra",
    _architectures(
        "Electra",
        _word_head(
            "generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head"
        ),
        _ROBERTA_CLASSIFIER,
        pretraining="embed",
    ),
    _bert_keys(
        30522,
        *(_TYPES, _LENGTH, _HEAD_DROPOUT),
        KeyGroup(_read_inner_width, lambda c: {"embedding_size": c.inner_width or c.block.width}),
        width=256,
    ),
    {**_BERT_WEIGHTS, "embed.widen": "embeddings_project"},
    config={"pool": "electra", "head_act": "gelu"},
    fixed={**_ABSOLUTE, **_ENCODER_ONLY},
    prefix="electra.",
    ignored=(r"^discriminator_predictions\.",),
)

# ---- DeBERTa

# What the file must say, since something else is meant where it does not.
_DISENTANGLED = {"relative_attention": True, "share_att_key": True, "position_biased_input": False}


def _read_distances(theirs: Theirs) -> dict[str, Any]:
    """Refuse what only some DeBERTas have, and read how far distances go."""
    for key, value in _DISENTANGLED.items():
        if key not in theirs:
            raise UsageError(f"{key} is missing; only {key}={value} is supported")
    kinds = theirs.get("pos_att_type") or []
    kinds = kinds.lower().split("|") if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list) or sorted(map(str, kinds)) != ["c2p", "p2c"]:
        raise UsageError(f"pos_att_type={str(kinds)[:40]} is not supported; only p2c|c2p is")
    width = integer(theirs, "hidden_size", 1536)
    heads = max(1, integer(theirs, "num_attention_heads", 24))
    widths = {"embedding_size": width, "pooler_hidden_size": width}
    only(theirs, {**widths, "attention_head_size": width // heads})
    span = integer(theirs, "max_relative_positions", -1)
    return {"distances.span": span if span > 0 else integer(theirs, _LENGTH.theirs, 512)}


def _write_distances(config: BertConfig) -> dict[str, Any]:
    return {"pos_att_type": ["p2c", "c2p"], "max_relative_positions": config.distances.span}


_DEBERTA_WORDS: WeightNames = {
    **_word_head(
        "cls.predictions.transform.dense",
        "cls.predictions.transform.LayerNorm",
        "cls.predictions.decoder",
        "cls.predictions.bias",
        "lm_predictions.lm_head.bias",
    ),
    "head.transform": Rule(
        ("cls.predictions.transform.dense",), also=("lm_predictions.lm_head.dense",)
    ),
    "head.norm": Rule(
        ("cls.predictions.transform.LayerNorm",), also=("lm_predictions.lm_head.LayerNorm",)
    ),
}
_DEBERTA = _format(
    "deberta-v2",
    _architectures(
        "DebertaV2",
        _DEBERTA_WORDS,
        {"head.pool.dense": "pooler.dense", **_CLASSIFIER},
        pretraining="fill",
    ),
    _bert_keys(
        128100,
        _LENGTH,
        Key("types", "type_vocab_size", 0),
        Key("head_dropout", "cls_dropout", 0.1),
        Key("distances.buckets", "position_buckets", -1, {-1: 0}),
        Key("distances.norm", "norm_rel_ebd", "none", {"layer_norm": "layer"}),
        KeyGroup(_read_distances, _write_distances),
        depth=24,
        width=1536,
        eps=1e-7,
    ),
    {
        **_BERT_WEIGHTS,
        "blocks.{}.attention.qkv": each("encoder.layer.{}.attention.self.{query,key,value}_proj"),
        "embed.position.table": "encoder.rel_embeddings",
        "embed.position.norm": "encoder.LayerNorm",
    },
    config={"pool": "deberta", "position": "disentangled", "block.score": "disentangled"},
    fixed={**_DISENTANGLED, "conv_kernel_size": 0, "pooler_hidden_act": "gelu"},
    prefix="deberta.",
    ignored=(r"^(mask|lm)_predictions\.", r"embeddings\.position_embeddings\."),
)

# ---- DistilBERT


def _prepare_distilbert(theirs: Theirs) -> Theirs:
    """Let the usual names of its keys count, as transformers does."""
    usual = {"hidden_size": "dim", "num_attention_heads": "n_heads"}
    usual["num_hidden_layers"] = "n_layers"
    return {**theirs, **{own: theirs[name] for name, own in usual.items() if name in theirs}}


_DISTILBERT_BLOCK = block(
    attention=("attention.{q,k,v}_lin", "attention.out_lin", "sa_layer_norm"),
    network=("ffn.lin1", "ffn.lin2", "output_layer_norm"),
)
_DISTILBERT = _format(
    "distilbert",
    _architectures(
        "DistilBert",
        _word_head("vocab_transform", "vocab_layer_norm", "vocab_projector"),
        {"head.pool.dense": "pre_classifier", **_CLASSIFIER},
    ),
    (
        Key("vocab", "vocab_size", 30522),
        Key("depth", "n_layers", 6),
        _LABELS,
        Key("tie", "tie_word_embeddings", True),
        Key("block.width", "dim", 768),
        Key("block.heads", "n_heads", 12),
        Key("block.ffn_width", "hidden_dim", 3072),
        activation("activation", "gelu"),
        Key("block.dropout", "dropout", 0.1),
        Key("block.attention_dropout", "attention_dropout", 0.1),
        Key("head_dropout", "seq_classif_dropout", 0.2),
        _LENGTH,
    ),
    {**_EMBEDDINGS, **within("blocks.{}.", "transformer.layer.{}.", _DISTILBERT_BLOCK)},
    config={"pool": "distilbert", "types": 0, "block.norm_eps": 1e-12},
    prefix="distilbert.",
    prepare=_prepare_distilbert,
)

# ---- ModernBERT

_POOLS = {"cls": "cls", "mean": "mean"}


def _read_layers(theirs: Theirs) -> dict[str, Any]:
    """Read the windows of layers, and the bases of their rotary positions."""
    depth = integer(theirs, "num_hidden_layers", 22)
    every = integer(theirs, "global_attn_every_n_layers", 3)
    if not 1 <= depth <= 1000 or every < 1:
        raise UsageError(f"num_hidden_layers={depth} with global_attn_every_n_layers={every}")
    local = read_layer_types(theirs, depth, lambda i: i % every)
    bases = (theirs.get("local_rope_theta", 10_000.0), theirs.get("global_rope_theta", 160_000.0))
    rotary, local_base = rope_by_layer(theirs, *bases, 8192)
    if rotary["scaling.kind"] != "none":
        raise UsageError(f"rope_type={rotary['scaling.kind']} is not supported; only default is")
    width, heads = integer(theirs, "hidden_size", 768), integer(theirs, "num_attention_heads", 12)
    only(theirs, {"head_dim": width // max(1, heads)})
    return {
        "window": integer(theirs, "local_attention", 128) // 2 + 1 if local else None,
        "window_layers": local if 0 < len(local) < depth else None,
        "position_base": rotary["position_base"],
        "near_base": local_base if local else None,
    }


def _write_layers(config: BertConfig) -> dict[str, Any]:
    base = config.position_base
    local = base if config.near_base is None else config.near_base
    return {
        "layer_types": layer_types(config),
        "local_attention": 2 * ((config.window or 65) - 1),
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta}
            for kind, theta in ((FULL, base), (SLIDING, local))
        },
        "global_rope_theta": base,
        "local_rope_theta": local,
    }


def _head_act(config: BertConfig) -> str:
    """Return the activation of the head by its own name, where ours is that of the blocks."""
    if config.head_act != "same":
        return config.head_act
    act = FEED_FORWARDS[config.block.feed_forward][1]
    return next(name for name, (_, one) in FEED_FORWARDS.items() if one is act)


_MODERN_HEAD: WeightNames = {
    "head.transform.dense": "head.dense",
    "head.transform.norm": "head.norm",
    **_CLASSIFIER,
}
_MODERN_BLOCK: WeightNames = {
    **block(
        attention=("attn.Wqkv", "attn.Wo", "attn_norm"), network=("mlp.Wi", "mlp.Wo", "mlp_norm")
    ),
    "feed_forward.gate": half("mlp.Wi", 0),
    "feed_forward.inner": half("mlp.Wi", 1),
}
_MODERNBERT = _format(
    "modernbert",
    _architectures(
        "ModernBert", _word_head("head.dense", "head.norm", "decoder"), _MODERN_HEAD, _MODERN_HEAD
    ),
    (
        *sizes(vocab=50368, depth=22, width=768, heads=12, ffn_width=1152, length=8192, tie=True),
        _LABELS,
        Key("pool", "classifier_pooling", "cls", _POOLS, only=True),
        Key("head_act", "classifier_activation", "gelu", ACTIVATIONS, only=True, value=_head_act),
        Key("head_bias", "decoder_bias", True),
        Key("transform_bias", "classifier_bias", False),
        Key("head_dropout", "classifier_dropout", 0.0),
        activation("hidden_activation", "gelu", GATED_ACTIVATIONS),
        Key("block.norm", "norm_bias", False, {False: "layer_nobias", True: "layer"}),
        KeyGroup(
            lambda t: {"embed_norm": "layer" if t.get("norm_bias") is True else "layer_nobias"}
        ),
        Key("block.norm_eps", "norm_eps", 1e-5),
        Key("block.dropout", "embedding_dropout", 0.0),
        Key("block.attention_dropout", "attention_dropout", 0.0),
        Key("block.ffn_dropout", "mlp_dropout", 0.0),
        Key("block.bias", "mlp_bias", False),
        attention_bias(rest="mlp_bias"),
        KeyGroup(_read_layers, _write_layers),
    ),
    {
        "embed.tokens": "embeddings.tok_embeddings",
        "embed.norm": "embeddings.norm",
        **within("blocks.{}.", "layers.{}.", _MODERN_BLOCK),
        "norm": "final_norm",
    },
    config={
        "position": "rotary",
        "types": 0,
        "first_norm": "none",
        "transform": "dense",
        "block.order": "pre",
    },
    prefix="model.",
)

# ---- ESM: norms before their sublayers and rotary positions: our own taggers are written as such


def _canonical_esm(config: BertConfig) -> BertConfig:
    """Leave out how to pool for a head that pools nothing: our taggers say it, too."""
    config = canonical(config)
    return config if config.head == "classify" else replace(config, pool="roberta")


_ESM = _format(
    "esm",
    _architectures("Esm", _ROBERTA_WORDS, _ROBERTA_CLASSIFIER),
    _bert_keys(
        33,
        Key("max_length", "max_position_embeddings", 1026),
        Key("position_base", "rope_theta", 10_000.0),
        _HEAD_DROPOUT,
        Key("embed_norm", "emb_layer_norm_before", False, {True: "layer", False: "none"}),
        acts={"gelu": "gelu"},
    ),
    {
        "embed.tokens": "embeddings.word_embeddings",
        "embed.norm": "embeddings.layer_norm",
        **within(
            "blocks.{}.",
            "encoder.layer.{}.",
            {
                **_BERT_BLOCK,
                "around_attention.norm": "attention.LayerNorm",
                "around_feed_forward.norm": "LayerNorm",
            },
        ),
        "norm": "encoder.emb_layer_norm_after",
    },
    config={"position": "rotary", "types": 0, "pool": "roberta", "block.order": "pre"},
    fixed={
        "position_embedding_type": "rotary",
        "token_dropout": False,
        "is_folding_model": False,
        **_ENCODER_ONLY,
    },
    prefix="esm.",
    ignored=(r"inv_freq$", r"contact_head\.", r"embeddings\.position_embeddings\."),
    canonical=_canonical_esm,
    template=TokenTemplate(),
)

FORMATS = (
    *(_BERT, _ROBERTA, _ALBERT, _DEBERTA, _XLM_ROBERTA, _CAMEMBERT, _DISTILBERT, _ELECTRA, _MPNET),
    *(_MODERNBERT, _ESM),
)
