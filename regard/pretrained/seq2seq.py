"""Encoder-decoders of transformers: T5 (1.0 and 1.1), mT5, BART, and Marian (OPUS-MT)."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from regard.attention.positions import sinusoids
from regard.errors import UsageError, lookup
from regard.models.transformer import PRESETS, TransformerConfig
from regard.pretrained.generation import VOCABULARIES, vocabularies
from regard.pretrained.load import read_keys, write_keys
from regard.pretrained.tables import Format, Key, Rule, linear

# theirs -> ours; where several mean the same, the first is written
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
    "swish": "swish",
    "silu": "swish",
}
T5_NETWORKS = {
    "relu": "relu",
    "gated-gelu": "geglu_tanh",
    "gated-gelu_new": "geglu_tanh",
    "gated-silu": "swiglu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "silu": "swish",
}


def _keys(vocab: int) -> tuple[Key, ...]:
    """Return the keys of BART and Marian, which share all but the vocabulary's usual size."""
    return (
        Key("source_vocab", "vocab_size", vocab),
        Key("encoder_depth", "encoder_layers", 12),
        Key("decoder_depth", "decoder_layers", 12),
        Key("max_length", "max_position_embeddings", 1024),
        Key("scale_embedding", "scale_embedding", False),
        Key("block.width", "d_model", 1024),
        Key("block.heads", "encoder_attention_heads", 16),
        Key("block.ffn_width", "encoder_ffn_dim", 4096),
        Key("block.feed_forward", "activation_function", "gelu", ACTIVATIONS),
        Key("block.dropout", "dropout", 0.1),
        Key("block.attention_dropout", "attention_dropout", 0.0),
        Key("block.ffn_dropout", "activation_dropout", 0.0),
    )


BART_KEYS, MARIAN_KEYS = _keys(50265), _keys(58101)
T5_KEYS = (
    Key("source_vocab", "vocab_size", 32128),
    Key("encoder_depth", "num_layers", 6),
    Key("max_length", "n_positions", 512),
    Key("block.width", "d_model", 512),
    Key("block.heads", "num_heads", 8),
    Key("block.head_width", "d_kv", 64),
    Key("block.ffn_width", "d_ff", 2048),
    Key("block.norm_eps", "layer_norm_epsilon", 1e-6),
    Key("block.feed_forward", "feed_forward_proj", "relu", T5_NETWORKS),
    Key("block.dropout", "dropout_rate", 0.1),
)
FIXED = {"normalize_before": False, "add_final_layer_norm": False}
SIDES_HARMLESS = ("num_hidden_layers", "normalize_embedding", "static_position_embeddings")
SIDES_HARMLESS += ("extra_pos_embeddings", "add_bias_logits")
TABLES = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")
NEVER = -1e9  # the bias of a token that is not written
T5_FIXED = {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128}


def _parts(row: str, keys: Iterable[Key], **changes: Any) -> dict[str, Any]:
    """Return the settings of a row that no key tells, with some changes."""
    values = asdict(PRESETS[row])
    values |= {f"block.{name}": value for name, value in values.pop("block").items()}
    told = {key.ours for key in keys}
    return {name: value for name, value in values.items() if name not in told} | changes


def _write(
    config: TransformerConfig, keys: Iterable[Key], names: Mapping[str, str], more: Mapping
) -> dict[str, Any]:
    """Return their words for our config, unless they have none for its network."""
    if config.block.feed_forward not in names.values():
        raise UsageError(f"it has no feed_forward '{config.block.feed_forward}'")
    return write_keys(config, keys, {"is_encoder_decoder": True, **more})


def read_sides(
    row: str, keys: Iterable[Key], theirs: Mapping[str, Any], **changes: Any
) -> TransformerConfig:
    """Return our config for one of BART's or Marian's."""
    for one, other in (
        ("encoder_attention_heads", "decoder_attention_heads"),
        ("encoder_ffn_dim", "decoder_ffn_dim"),
    ):
        if theirs.get(one) != theirs.get(other):
            raise UsageError(
                f"{one}={theirs.get(one)!r:.40} but {other}={theirs.get(other)!r:.40}; "
                "only models with the same blocks on both sides can be read"
            )
    lookup("activation_function", str(theirs.get("activation_function", "gelu")), ACTIVATIONS)
    return read_keys(TransformerConfig, theirs, keys, _parts(row, keys, **changes), FIXED)


def _tied(theirs: Mapping[str, Any]) -> bool:
    """Tell whether the head is the table of the target's embeddings."""
    tied = theirs.get("tie_word_embeddings")
    if tied not in (None, True, False):
        raise UsageError(f"tie_word_embeddings={tied!r:.40} is neither true nor false")
    return tied is not False


def write_sides(config: TransformerConfig, keys: Iterable[Key], **more: Any) -> dict[str, Any]:
    """Return the config of BART or Marian for one of ours."""
    both = {
        "decoder_attention_heads": config.block.heads,
        "decoder_ffn_dim": config.block.ffn_width,
        "tie_word_embeddings": config.tie in ("all", "target"),
        "forced_eos_token_id": None,
    }
    return _write(config, keys, ACTIVATIONS, {**FIXED, **both, **more})


def side_rules(config: TransformerConfig) -> list[Rule]:
    """Name the weights that BART and Marian share."""
    tables = TABLES
    if config.tie == "all":
        also = (*tables, "lm_head.weight")
        table = [Rule("source.tokens.weight", ("model.shared.weight",), also=also)]
    else:
        # transformers 4 wrote a table that both sides share even where the head has its own
        shared = ("model.shared.weight",)
        also = ("lm_head.weight",) if config.tie == "target" else ()
        table = [
            Rule("source.tokens.weight", tables[:1], instead=shared),
            Rule("target.tokens.weight", tables[1:], also=also, instead=shared),
            Rule("head.weight", ("lm_head.weight",)),
        ]
    table.append(Rule("head.bias", ("final_logits_bias",), "row"))
    for side in ("encoder", "decoder"):
        theirs = f"model.{side}.layers.{{}}"
        for part, look in {"attention": "self_attn", "cross": "encoder_attn"}.items():
            names = [f"{theirs}.{look}.{letter}_proj" for letter in "qkv"]
            table += linear(f"{side}.{{}}.{part}.qkv", *names)
            table += linear(f"{side}.{{}}.{part}.out", f"{theirs}.{look}.out_proj")
            table += linear(f"{side}.{{}}.around_{part}.norm", f"{theirs}.{look}_layer_norm")
        table += linear(f"{side}.{{}}.feed_forward.inner", f"{theirs}.fc1")
        table += linear(f"{side}.{{}}.feed_forward.outer", f"{theirs}.fc2")
        table += linear(f"{side}.{{}}.around_feed_forward.norm", f"{theirs}.final_layer_norm")
    return table


# Marian


def read_marian(theirs: Mapping[str, Any], architecture: str = "") -> TransformerConfig:
    """Return our config for one of transformers' MarianConfig."""
    shared = theirs.get("share_encoder_decoder_embeddings", True)
    source = theirs.get("vocab_size") or 58101
    target = theirs.get("decoder_vocab_size") or source
    if shared and target != source:
        raise UsageError(
            f"decoder_vocab_size={target!r:.40} but vocab_size={source!r:.40}; only one size can "
            "be read where share_encoder_decoder_embeddings is true"
        )
    tie = ("all" if shared else "target") if _tied(theirs) else "none"
    return read_sides("marian", MARIAN_KEYS, theirs, target_vocab=target, tie=tie)


def write_marian(config: TransformerConfig, task: str = "translate") -> dict[str, Any]:
    """Return transformers' MarianConfig for one of ours."""
    return write_sides(
        config,
        MARIAN_KEYS,
        architectures=["MarianMTModel"],
        model_type="marian",
        decoder_vocab_size=config.target_vocab,
        share_encoder_decoder_embeddings=config.tie == "all",
    )


def marian_rules(config: TransformerConfig, architecture: str) -> list[Rule]:
    """Name all weights."""
    return side_rules(config)


# BART


def read_bart(theirs: Mapping[str, Any], architecture: str = "") -> TransformerConfig:
    """Return our config for one of transformers' BartConfig.

    Without the class for writing there is no bias of the head either.
    """
    vocab = theirs.get("vocab_size") or 50265
    bias = architecture != "BartModel"
    tie = "all" if _tied(theirs) else "none"
    return read_sides("bart", BART_KEYS, theirs, target_vocab=vocab, head_bias=bias, tie=tie)


def write_bart(config: TransformerConfig, task: str = "text") -> dict[str, Any]:
    """Return transformers' BartConfig for one of ours."""
    return write_sides(
        config,
        BART_KEYS,
        architectures=["BartForConditionalGeneration"],
        model_type="bart",
    )


def bart_rules(config: TransformerConfig, architecture: str) -> list[Rule]:
    """Name all weights."""
    table = side_rules(config)
    for ours, side in (("source", "model.encoder"), ("target", "model.decoder")):
        positions = f"{side}.embed_positions.weight"
        table.append(Rule(f"{ours}.position.table.weight", (positions,), "skip2"))
        table += linear(f"{ours}.norm", f"{side}.layernorm_embedding")
    return table


# Pegasus, whose norms come first: our own translators are written as such


def read_pegasus(theirs: Mapping[str, Any], architecture: str = "") -> TransformerConfig:
    """Return our config for one of transformers' PegasusConfig.

    Three keys of ours tell what transformers reads from the weights: how sines and cosines lie,
    that there is no bias of the head, and how many rows of one table are of each language.
    """
    vocab = theirs.get("vocab_size") or 50265
    source, target = vocabularies(theirs) or (vocab, vocab)
    tied = _tied(theirs)
    tie = "none" if not tied else "all" if VOCABULARIES not in theirs else "target"
    layout = theirs.get("regard_position_layout", "halves")
    lookup("regard_position_layout", str(layout), dict.fromkeys(("halves", "pairs")))
    changes = {
        "target_vocab": target,
        "tie": tie,
        "position_layout": layout,
        "head_bias": theirs.get("regard_head_bias", True) is not False,
    }
    return read_sides("transformer", BART_KEYS, {**theirs, "vocab_size": source}, **changes)


def write_pegasus(config: TransformerConfig, task: str = "text") -> dict[str, Any]:
    """Return transformers' PegasusConfig for one of ours."""
    own: dict[str, Any] = {"regard_position_layout": config.position_layout}
    if config.tie == "target":
        if config.head_bias:
            raise UsageError("head_bias=True with two vocabularies")
        own[VOCABULARIES] = [config.source_vocab, config.target_vocab]
    theirs = write_sides(
        config,
        BART_KEYS,
        architectures=["PegasusForConditionalGeneration"],
        model_type="pegasus",
        regard_head_bias=config.head_bias,
        **own,
    )
    return theirs | ({"vocab_size": sum(own[VOCABULARIES])} if VOCABULARIES in own else {})


def pegasus_rules(config: TransformerConfig, architecture: str) -> list[Rule]:
    """Name all weights."""
    table = side_rules(config)
    if config.tie == "target":  # the rows of one table, which everything of theirs shares
        parts = (config.source_vocab, config.target_vocab)
        whole, *also = ("model.shared.weight", *TABLES, "lm_head.weight")
        own = [
            Rule(f"{side}.tokens.weight", (whole,), rows=parts, also=tuple(also), part=(n, 2))
            for n, side in enumerate(("source", "target"))
        ]
        table = [rule for rule in table if not rule.ours.endswith(".tokens.weight")] + own
    for side in ("encoder", "decoder"):
        table += linear(f"{side}_norm", f"model.{side}.layer_norm")
    return table


def pegasus_more(config: TransformerConfig) -> dict[str, Tensor]:
    """Return what transformers takes from the file: the sinusoids, and what is never written."""
    at = torch.arange(config.max_length).unsqueeze(-1)
    table = sinusoids(at, config.block.width, config.position_base, config.position_layout)
    found = {
        f"model.{side}.embed_positions.weight": table.float().clone()
        for side in ("encoder", "decoder")
    }
    if config.tie == "target":  # rows of what is read are never written
        bias = torch.zeros(1, config.source_vocab + config.target_vocab)
        bias[:, : config.source_vocab] = NEVER
        found["final_logits_bias"] = bias
    return found


# T5


def read_t5(theirs: Mapping[str, Any], architecture: str = "") -> TransformerConfig:
    """Return our config for one of transformers' T5Config.

    Whether the head is scaled is told by a key of its own since transformers 5, and before by
    whether it is tied; where it is not, as in 1.1, there may be a head of its own.
    """
    tied = _tied(theirs)
    scaled = theirs.get("scale_decoder_outputs", tied)
    depth = theirs.get("num_decoder_layers")
    dropout = theirs.get("dropout_rate", 0.1)
    lookup("feed_forward_proj", str(theirs.get("feed_forward_proj", "relu")), T5_NETWORKS)
    changes = {
        "target_vocab": theirs.get("vocab_size", 32128),
        "decoder_depth": theirs.get("num_layers", 6) if depth is None else depth,
        "tie": "all" if scaled and tied else "embeddings",
        "scale_head": scaled,
        "block.attention_dropout": dropout,
        "block.ffn_dropout": dropout,
    }
    parts = _parts("t5", T5_KEYS, **changes)
    return read_keys(TransformerConfig, theirs, T5_KEYS, parts, T5_FIXED)


def write_t5(config: TransformerConfig, task: str = "text") -> dict[str, Any]:
    """Return transformers' T5Config for one of ours."""
    block = config.block
    more = {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "num_decoder_layers": config.decoder_depth,
        "tie_word_embeddings": config.tie == "all",
        "scale_decoder_outputs": config.scale_head,
    }
    theirs = _write(config, T5_KEYS, T5_NETWORKS, {**T5_FIXED, **more})
    return theirs | {"d_kv": block.head_width or block.width // block.heads}


# what mT5's config has where it says nothing, if that is not what T5's has
MT5_USUAL = {
    "vocab_size": 250112,
    "num_layers": 8,
    "num_heads": 6,
    "d_ff": 1024,
    "feed_forward_proj": "gated-gelu",
}


def read_mt5(theirs: Mapping[str, Any], architecture: str = "") -> TransformerConfig:
    """Return our config for an MT5Config: T5 1.1, never scaled, with a head of its own if any."""
    never = {"tie_word_embeddings": False, "scale_decoder_outputs": False}
    return read_t5({**MT5_USUAL, **theirs, **never}, architecture)


def write_mt5(config: TransformerConfig, task: str = "text") -> dict[str, Any]:
    """Return transformers' MT5Config for one of ours."""
    named = {"architectures": ["MT5ForConditionalGeneration"], "model_type": "mt5"}
    theirs = write_t5(config, task) | named
    del theirs["scale_decoder_outputs"]
    return theirs


def t5_rules(config: TransformerConfig, architecture: str) -> list[Rule]:
    """Name all weights."""
    tables = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    head = () if config.tie == "embeddings" else ("lm_head.weight",)
    table = [
        Rule("source.tokens.weight", ("shared.weight",), also=(*tables, *head)),
        Rule("head.weight", ("lm_head.weight",), instead=("shared.weight",)),
    ]
    sides = {
        "encoder": ("attention", "feed_forward"),
        "decoder": ("attention", "cross", "feed_forward"),
    }
    looks = {"attention": "SelfAttention", "cross": "EncDecAttention"}
    gated = {"gate": "wi_0", "inner": "wi_1"}
    plain = {"inner": "wi"}
    for side, parts in sides.items():
        for number, part in enumerate(parts):
            theirs = f"{side}.block.{{}}.layer.{number}"
            table += linear(f"{side}.{{}}.around_{part}.norm", f"{theirs}.layer_norm", bias=False)
            if part in looks:
                look = f"{theirs}.{looks[part]}"
                names = [f"{look}.{letter}" for letter in "qkv"]
                table += linear(f"{side}.{{}}.{part}.qkv", *names, bias=False)
                table += linear(f"{side}.{{}}.{part}.out", f"{look}.o", bias=False)
                continue
            network = gated if config.block.feed_forward in ("geglu_tanh", "swiglu") else plain
            for ours, name in {**network, "outer": "wo"}.items():
                name = f"{theirs}.DenseReluDense.{name}"
                table += linear(f"{side}.{{}}.{part}.{ours}", name, bias=False)
        table += linear(f"{side}_norm", f"{side}.final_layer_norm", bias=False)
    for ours, side in (("source", "encoder"), ("target", "decoder")):
        name = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        table.append(Rule(f"{ours}.position.table", (name,)))
    return table


FORMATS = {
    "t5": Format(
        "t5",
        {"T5ForConditionalGeneration": "text", "T5WithLMHeadModel": "text"},
        "transformer",
        read_t5,
        write_t5,
        t5_rules,
        ignored=(r"EncDecAttention\.relative_attention_bias\.weight$",),
        harmless=("dense_act_fn", "is_gated_act"),
    ),
    "mt5": Format(
        "mt5",
        {"MT5ForConditionalGeneration": "text"},
        "transformer",
        read_mt5,
        write_mt5,
        t5_rules,
        ignored=(r"EncDecAttention\.relative_attention_bias\.weight$",),
        harmless=("dense_act_fn", "is_gated_act"),
    ),
    "bart": Format(
        "bart",
        {"BartForConditionalGeneration": "text", "BartModel": "text"},
        "transformer",
        read_bart,
        write_bart,
        bart_rules,
        ignored=(r"^(model\.)?(encoder|decoder)\.version$",),
        prefix="model.",
        harmless=SIDES_HARMLESS,
    ),
    "marian": Format(
        "marian",
        {"MarianMTModel": "translate"},
        "transformer",
        read_marian,
        write_marian,
        marian_rules,
        ignored=(r"embed_positions\.weight$",),
        harmless=SIDES_HARMLESS,
    ),
    "pegasus": Format(
        "pegasus",
        {"PegasusForConditionalGeneration": "text"},
        "transformer",
        read_pegasus,
        write_pegasus,
        pegasus_rules,
        ignored=(r"embed_positions\.weight$", r"^final_logits_bias$"),
        harmless=SIDES_HARMLESS,
        more=pegasus_more,
    ),
}
