"""Encoder-decoder checkpoints: T5 (1.0 and 1.1), mT5, BART, Marian (OPUS-MT) and Pegasus."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard.attention.positions import sinusoids
from regard.errors import UsageError, lookup
from regard.models.transformer import PRESETS, TransformerConfig
from regard.pretrained.config_keys import Key, KeyGroup, Theirs, activation
from regard.pretrained.format import ROBERTA_TEMPLATE, Architecture, Format, TokenTemplate
from regard.pretrained.weight_names import Rule, WeightNames, block, each, head_width, within

_EOS_ONCE = TokenTemplate(("A", "eos"), ("A", "B", "eos"), (0, 0, 0))
_EOS_TWICE = TokenTemplate(("A", "eos"), ("A", "eos", "B", "eos"), (0,) * 4)
_TIED = {"head.weight": ("target.tokens.weight", "source.tokens.weight")}


def _preset(name: str, keys: Iterable[Key | KeyGroup]) -> dict[str, Any]:
    """Return the settings of a preset of ours that no key tells."""
    values = asdict(PRESETS[name])
    values |= {f"block.{key}": value for key, value in values.pop("block").items()}
    told = {key.ours for key in keys if isinstance(key, Key)}
    return {key: value for key, value in values.items() if key not in told}


def _is_tied(theirs: Theirs) -> bool:
    """Tell whether the head is the table of the target's embeddings."""
    tied = theirs.get("tie_word_embeddings")
    if tied not in (None, True, False):
        raise UsageError(f"tie_word_embeddings={tied!r:.40} is neither true nor false")
    return tied is not False


# ---- what BART, Marian and Pegasus share


def read_sides(theirs: Theirs) -> dict[str, Any]:
    """Refuse a model whose encoder and decoder have different blocks."""
    for one, other in (
        ("encoder_attention_heads", "decoder_attention_heads"),
        ("encoder_ffn_dim", "decoder_ffn_dim"),
    ):
        if theirs.get(one) != theirs.get(other):
            raise UsageError(
                f"{one}={theirs.get(one)!r:.40} but {other}={theirs.get(other)!r:.40}; "
                "only models with the same blocks on both sides can be read"
            )
    return {}


def _write_sides(config: TransformerConfig) -> dict[str, Any]:
    return {
        "is_encoder_decoder": True,
        "decoder_attention_heads": config.block.heads,
        "decoder_ffn_dim": config.block.ffn_width,
        "tie_word_embeddings": config.tie in ("all", "target"),
        "forced_eos_token_id": None,
    }


def _side_keys(vocab: int) -> tuple[Key | KeyGroup, ...]:
    return (
        Key("source_vocab", "vocab_size", vocab),
        Key("encoder_depth", "encoder_layers", 12),
        Key("decoder_depth", "decoder_layers", 12),
        Key("max_length", "max_position_embeddings", 1024),
        Key("scale_embedding", "scale_embedding", False),
        Key("block.width", "d_model", 1024),
        Key("block.heads", "encoder_attention_heads", 16),
        Key("block.ffn_width", "encoder_ffn_dim", 4096),
        activation("activation_function", "gelu"),
        Key("block.dropout", "dropout", 0.1),
        Key("block.attention_dropout", "attention_dropout", 0.0),
        Key("block.ffn_dropout", "activation_dropout", 0.0),
        KeyGroup(read_sides, _write_sides),
    )


_TABLES = ("encoder.embed_tokens", "decoder.embed_tokens")


def _source_table(config: TransformerConfig) -> Rule:
    """Name the embeddings of the source, which may be one table with those of the target.

    transformers 4 wrote a table that both sides share even where the head has its own.
    """
    if config.tie == "all":
        return Rule(("shared",), also=_TABLES)
    return Rule(_TABLES[:1], instead=("shared",))


_TARGET_TABLE = Rule(_TABLES[1:], instead=("shared",))


SIDE_BLOCK: WeightNames = {
    **block(
        attention=("self_attn.{q,k,v}_proj", "self_attn.out_proj", "self_attn_layer_norm"),
        network=("fc1", "fc2", "final_layer_norm"),
    ),
    "cross.qkv": each("encoder_attn.{q,k,v}_proj"),
    "cross.out": "encoder_attn.out_proj",
    "around_cross.norm": "encoder_attn_layer_norm",
}
_SIDE_WEIGHTS: WeightNames = {
    "source.tokens": _source_table,
    "target.tokens": _TARGET_TABLE,
    **within("encoder.{}.", "encoder.layers.{}.", SIDE_BLOCK),
    **within("decoder.{}.", "decoder.layers.{}.", SIDE_BLOCK),
}
_SIDE_HEAD: WeightNames = {"head": "lm_head", "head.bias": Rule(("final_logits_bias",), "row")}


def _side_format(
    model_type: str,
    architectures: Mapping[str, Architecture],
    vocab: int,
    vocabulary: KeyGroup,
    weights: WeightNames = _SIDE_WEIGHTS,
    *,
    preset: str,
    **more: Any,
) -> Format:
    """Return a format with what the three share."""
    keys = _side_keys(vocab)
    return Format(
        model_type,
        "transformer",
        architectures,
        (*keys, vocabulary),
        weights,
        config=_preset(preset, keys),
        fixed={"normalize_before": False, "add_final_layer_norm": False},
        prefix="model.",
        tied=_TIED,
        harmless=(
            *("num_hidden_layers", "normalize_embedding", "static_position_embeddings"),
            *("extra_pos_embeddings", "add_bias_logits"),
        ),
        **{"template": _EOS_ONCE, "decoder_start": "pad", **more},
    )


# ---- BART


def _read_vocabulary(theirs: Theirs) -> dict[str, Any]:
    tie = "all" if _is_tied(theirs) else "none"
    return {"target_vocab": theirs.get("vocab_size") or 50265, "tie": tie}


BART = _side_format(
    "bart",
    {
        "BartForConditionalGeneration": Architecture("text", weights=_SIDE_HEAD),
        # without the class for writing there is no bias of the head either
        "BartModel": Architecture("text", {"head_bias": False}, weights=_SIDE_HEAD, base=True),
    },
    50265,
    KeyGroup(_read_vocabulary),
    {
        **_SIDE_WEIGHTS,
        "source.position.table": Rule(("encoder.embed_positions",), "skip2"),
        "target.position.table": Rule(("decoder.embed_positions",), "skip2"),
        "source.norm": "encoder.layernorm_embedding",
        "target.norm": "decoder.layernorm_embedding",
    },
    preset="bart",
    ignored=(r"^(model\.)?(encoder|decoder)\.version$",),
    template=ROBERTA_TEMPLATE,
    decoder_start="eos",
    forced_eos=2,
)

# ---- Marian


def _read_marian_vocabulary(theirs: Theirs) -> dict[str, Any]:
    shared = theirs.get("share_encoder_decoder_embeddings", True)
    source = theirs.get("vocab_size") or 58101
    target = theirs.get("decoder_vocab_size") or source
    if shared and target != source:
        raise UsageError(
            f"decoder_vocab_size={target!r:.40} but vocab_size={source!r:.40}; only one size can "
            "be read where share_encoder_decoder_embeddings is true"
        )
    tie = ("all" if shared else "target") if _is_tied(theirs) else "none"
    return {"target_vocab": target, "tie": tie}


def _write_marian_vocabulary(config: TransformerConfig) -> dict[str, Any]:
    shared = {"share_encoder_decoder_embeddings": config.tie == "all"}
    return {"decoder_vocab_size": config.target_vocab, **shared}


_MARIAN = _side_format(
    "marian",
    {"MarianMTModel": Architecture("translate", weights=_SIDE_HEAD)},
    58101,
    KeyGroup(_read_marian_vocabulary, _write_marian_vocabulary),
    preset="marian",
    ignored=(r"embed_positions\.weight$",),
    forced_eos=0,
)

# ---- Pegasus, whose norms come first: our own translators are written as such

_NEVER = -1e9  # the bias of a token that is not written
_POSITION_LAYOUT, _HEAD_BIAS = "regard_position_layout", "regard_head_bias"
# how many rows of one table are of what is read, and of what is written after them
_VOCABULARIES = "regard_vocabularies"


def vocabularies(theirs: Theirs) -> tuple[int, int] | None:
    """Return how many pieces the two languages have that share a table, if they do."""
    sizes = theirs.get(_VOCABULARIES)
    if sizes is None:
        return None
    good = isinstance(sizes, list) and len(sizes) == 2
    good = good and all(type(size) is int and size > 0 for size in sizes)
    if not good or sum(sizes) != theirs.get("vocab_size"):
        raise UsageError(
            f"{_VOCABULARIES}={sizes!r:.40}; expected two sizes whose sum is vocab_size="
            f"{theirs.get('vocab_size')!r:.40}"
        )
    return sizes[0], sizes[1]


def _read_pegasus(theirs: Theirs) -> dict[str, Any]:
    """Read what our own keys tell, which transformers reads from the weights.

    How sines and cosines are laid out, that there is no bias of the head, and how many rows of one
    table are of each language.
    """
    vocab = theirs.get("vocab_size") or 50265
    source, target = vocabularies(theirs) or (vocab, vocab)
    tie = "all" if _VOCABULARIES not in theirs else "target"
    layout = theirs.get(_POSITION_LAYOUT, "halves")
    lookup(_POSITION_LAYOUT, str(layout), dict.fromkeys(("halves", "pairs")))
    return {
        "vocab_size": source,
        "target_vocab": target,
        "tie": tie if _is_tied(theirs) else "none",
        "position_layout": layout,
        "head_bias": theirs.get(_HEAD_BIAS, True) is not False,
    }


def _write_pegasus(config: TransformerConfig) -> dict[str, Any]:
    theirs = {_POSITION_LAYOUT: config.position_layout, _HEAD_BIAS: config.head_bias}
    if config.tie != "target":
        return theirs
    if config.head_bias:
        raise UsageError("head_bias=True with two vocabularies")
    sizes = [config.source_vocab, config.target_vocab]
    return {**theirs, _VOCABULARIES: sizes, "vocab_size": sum(sizes)}


def _pegasus_table(number: int, config: TransformerConfig) -> Rule:
    """Name the rows of one table that are of a language, where each has its own."""
    if config.tie != "target":
        return _TARGET_TABLE if number else _source_table(config)
    rows = (config.source_vocab, config.target_vocab)
    return Rule(("shared",), rows=rows, also=_TABLES, part=(number, 2))


def _pegasus_constants(config: TransformerConfig) -> dict[str, Tensor]:
    """Return what transformers takes from the file: the sinusoids, and what is never written."""
    at = torch.arange(config.max_length).unsqueeze(-1)
    table = sinusoids(at, config.block.width, config.position_base, config.position_layout)
    made = {
        f"model.{side}.embed_positions.weight": table.float().clone()
        for side in ("encoder", "decoder")
    }
    if config.tie == "target":  # rows of what is read are never written
        bias = torch.zeros(1, config.source_vocab + config.target_vocab)
        bias[:, : config.source_vocab] = _NEVER
        made["final_logits_bias"] = bias
    return made


_PEGASUS = _side_format(
    "pegasus",
    {"PegasusForConditionalGeneration": Architecture("text", weights=_SIDE_HEAD)},
    50265,
    KeyGroup(_read_pegasus, _write_pegasus),
    {
        **_SIDE_WEIGHTS,
        "source.tokens": partial(_pegasus_table, 0),
        "target.tokens": partial(_pegasus_table, 1),
        "encoder_norm": "encoder.layer_norm",
        "decoder_norm": "decoder.layer_norm",
    },
    preset="transformer",
    ignored=(r"embed_positions\.weight$", r"^final_logits_bias$"),
    derived=_pegasus_constants,
    forced_eos=1,
)

# ---- T5

_T5_ACTIVATIONS = {
    "relu": "relu",
    "gated-gelu": "geglu_tanh",
    "gated-gelu_new": "geglu_tanh",
    "gated-silu": "swiglu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "silu": "swish",
}


def _read_t5(theirs: Theirs) -> dict[str, Any]:
    """Read how the head is scaled, and settings that have no keys of their own.

    Since transformers 5 a key tells whether the head is scaled, and before whether it is tied;
    where it is not, as in 1.1, there may be a head of its own.
    """
    tied = _is_tied(theirs)
    scaled = theirs.get("scale_decoder_outputs", tied)
    depth, dropout = theirs.get("num_decoder_layers"), theirs.get("dropout_rate", 0.1)
    return {
        "target_vocab": theirs.get("vocab_size", 32128),
        "decoder_depth": theirs.get("num_layers", 6) if depth is None else depth,
        "tie": "all" if scaled and tied else "embeddings",
        "scale_head": scaled,
        "block.attention_dropout": dropout,
        "block.ffn_dropout": dropout,
    }


def _write_mt5(config: TransformerConfig) -> dict[str, Any]:
    return {
        "is_encoder_decoder": True,
        "num_decoder_layers": config.decoder_depth,
        "tie_word_embeddings": config.tie == "all",
    }


def _write_t5(config: TransformerConfig) -> dict[str, Any]:
    return {**_write_mt5(config), "scale_decoder_outputs": config.scale_head}


def _inner(network: str, config: TransformerConfig) -> str:
    """Name the first product of a network, which is called otherwise beside a gate."""
    gated = config.block.feed_forward in ("geglu_tanh", "swiglu")
    return f"{network}.wi_1" if gated else f"{network}.wi"


def _t5_block(last: int) -> WeightNames:
    """Name the weights of a block, whose last sublayer is its feed-forward network."""
    network = f"{last}.DenseReluDense"
    return {
        **block(
            attention=("0.SelfAttention.{q,k,v}", "0.SelfAttention.o", "0.layer_norm"),
            network=(f"{network}.wi", f"{network}.wo", f"{last}.layer_norm"),
        ),
        "cross.qkv": each("1.EncDecAttention.{q,k,v}"),
        "cross.out": "1.EncDecAttention.o",
        "around_cross.norm": "1.layer_norm",
        "feed_forward.gate": f"{network}.wi_0",
        "feed_forward.inner": partial(_inner, network),
    }


_T5_KEYS = (
    Key("source_vocab", "vocab_size", 32128),
    Key("encoder_depth", "num_layers", 6),
    Key("max_length", "n_positions", 512),
    Key("block.width", "d_model", 512),
    Key("block.heads", "num_heads", 8),
    Key("block.head_width", "d_kv", 64, value=head_width),
    Key("block.ffn_width", "d_ff", 2048),
    Key("block.norm_eps", "layer_norm_epsilon", 1e-6),
    activation("feed_forward_proj", "relu", _T5_ACTIVATIONS),
    Key("block.dropout", "dropout_rate", 0.1),
)
_T5_HEAD: WeightNames = {"head": Rule(("lm_head",), instead=("shared",))}
_DISTANCES = "{}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
T5 = Format(
    "t5",
    "transformer",
    {
        "T5ForConditionalGeneration": Architecture("text", weights=_T5_HEAD),
        "T5WithLMHeadModel": Architecture("text", weights=_T5_HEAD),
    },
    (*_T5_KEYS, KeyGroup(_read_t5, _write_t5)),
    {
        "source.tokens": Rule(("shared",), also=_TABLES),
        "source.position.table": _DISTANCES.format("encoder"),
        "target.position.table": _DISTANCES.format("decoder"),
        **within("encoder.{}.", "encoder.block.{}.layer.", _t5_block(1)),
        **within("decoder.{}.", "decoder.block.{}.layer.", _t5_block(2)),
        "encoder_norm": "encoder.final_layer_norm",
        "decoder_norm": "decoder.final_layer_norm",
    },
    config=_preset("t5", _T5_KEYS),
    fixed={"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128},
    tied=_TIED,
    ignored=(r"EncDecAttention\.relative_attention_bias\.weight$",),
    harmless=("dense_act_fn", "is_gated_act"),
    template=_EOS_TWICE,
    decoder_start="pad",
)

# what mT5's config has where it says nothing, if that is not what T5's has
_MT5_DEFAULTS = {
    "vocab_size": 250112,
    "num_layers": 8,
    "num_heads": 6,
    "d_ff": 1024,
    "feed_forward_proj": "gated-gelu",
}
# T5 1.1: never scaled, with a head of its own if any
_MT5 = replace(
    T5,
    model_type="mt5",
    architectures={"MT5ForConditionalGeneration": Architecture("text", weights=_T5_HEAD)},
    keys=(*_T5_KEYS, KeyGroup(_read_t5, _write_mt5)),
    prepare=lambda theirs: {
        **_MT5_DEFAULTS,
        **theirs,
        "tie_word_embeddings": False,
        "scale_decoder_outputs": False,
    },
)

FORMATS = (T5, _MT5, BART, _MARIAN, _PEGASUS)
