"""Decoder-only checkpoints: GPT-2, LLaMA, Mistral and BLOOM as transformers writes them."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from regard.attention.positions import ALIASES, POSITIONS, Rotary, RotaryScaling
from regard.errors import UsageError, lookup
from regard.layers.block import ATTENTION_BIASES, BlockConfig
from regard.models.gpt import GPTConfig, windowed
from regard.pretrained.load import read_keys, write_keys
from regard.pretrained.tables import Format, Key, Rule, linear

PLAIN = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "quick_gelu": "gelu_quick",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "swish",
    "swish": "swish",
}
GATED = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "gelu_pytorch_tanh": "geglu_tanh",
    "gelu_new": "geglu_tanh",
}


def _ends(tie: bool, tokens: str) -> list[Rule]:
    """Name the embeddings and the head, which may be the same matrix."""
    if tie:
        return [Rule("embed.tokens.weight", (tokens,), also=("lm_head.weight",))]
    return [
        Rule("embed.tokens.weight", (tokens,)),
        Rule("head.weight", ("lm_head.weight",)),
    ]


# ---- GPT-2

GPT2_KEYS = (
    Key("vocab", "vocab_size", 50257),
    Key("depth", "n_layer", 12),
    Key("max_length", "n_positions", 1024),
    Key("tie", "tie_word_embeddings", True),
    Key("block.width", "n_embd", 768),
    Key("block.heads", "n_head", 12),
    Key("block.feed_forward", "activation_function", "gelu_new", PLAIN),
    Key("block.norm_eps", "layer_norm_epsilon", 1e-5),
    Key("block.dropout", "resid_pdrop", 0.1),
    Key("block.attention_dropout", "attn_pdrop", 0.1),
)
GPT2_FIXED = {
    "model_type": "gpt2",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}


def read_gpt2(theirs: Mapping[str, Any], architecture: str = "") -> GPTConfig:
    """Return our config for a GPT2Config."""
    lookup("activation_function", str(theirs.get("activation_function", "gelu_new")), PLAIN)
    width = theirs.get("n_embd", 768)
    inner = theirs.get("n_inner") or (4 * width if isinstance(width, int) else width)
    return read_keys(GPTConfig, theirs, GPT2_KEYS, {"block.ffn_width": inner}, GPT2_FIXED)


def write_gpt2(config: GPTConfig, task: str = "language") -> dict[str, Any]:
    """Return the GPT2Config for one of ours."""
    theirs = write_keys(config, GPT2_KEYS, GPT2_FIXED)
    drop = config.block.dropout
    ends = {"n_inner": config.block.ffn_width, "embd_pdrop": drop}
    return {"architectures": ["GPT2LMHeadModel"], **theirs, **ends}


def gpt2_rules(config: GPTConfig, architecture: str) -> list[Rule]:
    """Name all weights; matrices lie the other way round."""
    block = "transformer.h.{}."
    return [
        *_ends(config.tie, "transformer.wte.weight"),
        Rule("embed.position.table.weight", ("transformer.wpe.weight",)),
        *linear("blocks.{}.attention.qkv", block + "attn.c_attn", change="transpose"),
        *linear("blocks.{}.attention.out", block + "attn.c_proj", change="transpose"),
        *linear("blocks.{}.feed_forward.inner", block + "mlp.c_fc", change="transpose"),
        *linear("blocks.{}.feed_forward.outer", block + "mlp.c_proj", change="transpose"),
        *linear("blocks.{}.around_attention.norm", block + "ln_1"),
        *linear("blocks.{}.around_feed_forward.norm", block + "ln_2"),
        *linear("norm", "transformer.ln_f"),
    ]


# ---- LLaMA and Mistral

LLAMA_KEYS = (
    Key("vocab", "vocab_size", 32000),
    Key("depth", "num_hidden_layers", 32),
    Key("max_length", "max_position_embeddings", 2048),
    Key("tie", "tie_word_embeddings", False),
    Key("block.width", "hidden_size", 4096),
    Key("block.heads", "num_attention_heads", 32),
    Key("block.kv_heads", "num_key_value_heads", None),
    Key("block.head_width", "head_dim", None),
    Key("block.ffn_width", "intermediate_size", 11008),
    Key("block.feed_forward", "hidden_act", "silu", GATED),
    Key("block.norm_eps", "rms_norm_eps", 1e-6),
    Key("block.attention_dropout", "attention_dropout", 0.0),
)
LLAMA_PARTS = {"position": "rotary", "block.norm": "rms", "block.dropout": 0.0}


def read_llama(theirs: Mapping[str, Any], architecture: str = "") -> GPTConfig:
    """Return our config for a LlamaConfig."""
    bias = theirs.get("mlp_bias", False)
    lookup("hidden_act", str(theirs.get("hidden_act", "silu")), GATED)
    looks = read_bias(theirs.get("attention_bias", False), bias)
    parts = {**LLAMA_PARTS, **read_rotary(theirs), "block.bias": bias, **looks}
    return read_keys(GPTConfig, theirs, LLAMA_KEYS, parts, {"model_type": "llama"})


def read_bias(looks: Any, rest: Any) -> dict[str, str]:
    """Say whether attention has biases where the rest of a block has some or none."""
    if not isinstance(looks, bool):
        raise UsageError(f"attention_bias={str(looks)[:40]} is neither true nor false")
    name = "same" if looks == rest else "all" if looks is True else "none"
    return {"block.attention_bias": name}


def write_bias(block: BlockConfig) -> bool:
    """Return whether attention has biases, as a format says that has all of them or none."""
    qkv, out = ATTENTION_BIASES[block.attention_bias](block.bias)
    if qkv != out:
        raise UsageError(f"attention_bias='{block.attention_bias}'")
    return out


def write_llama(config: GPTConfig, task: str = "language") -> dict[str, Any]:
    """Return the LlamaConfig for one of ours."""
    more = {"attention_bias": write_bias(config.block), "mlp_bias": config.block.bias}
    more |= write_rotary(config)
    theirs = write_keys(config, LLAMA_KEYS, {"model_type": "llama"})
    return {"architectures": ["LlamaForCausalLM"], **theirs, **more}


MISTRAL_KEYS = (
    *(key for key in LLAMA_KEYS if key.ours not in ("block.ffn_width", "max_length")),
    Key("block.ffn_width", "intermediate_size", 14336),
    Key("max_length", "max_position_embeddings", 4096 * 32),
    Key("window", "sliding_window", 4096),
)


def read_mistral(theirs: Mapping[str, Any], architecture: str = "") -> GPTConfig:
    """Return our config for a MistralConfig."""
    lookup("hidden_act", str(theirs.get("hidden_act", "silu")), GATED)
    parts = {**LLAMA_PARTS, **read_rotary(theirs, 4096 * 32), "block.bias": False}
    theirs = {"num_key_value_heads": 8, **theirs}
    return read_keys(GPTConfig, theirs, MISTRAL_KEYS, parts, {"model_type": "mistral"})


def write_mistral(config: GPTConfig, task: str = "language") -> dict[str, Any]:
    """Return the MistralConfig for one of ours."""
    theirs = write_keys(config, MISTRAL_KEYS, {"model_type": "mistral"})
    return {"architectures": ["MistralForCausalLM"], **theirs, **write_rotary(config)}


# our kind -> the keys that it has beside rope_type: theirs and ours
ROTARY: dict[str, dict[str, str]] = {
    "none": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "original_max_position_embeddings": "original_length",
        "low_freq_factor": "low",
        "high_freq_factor": "high",
    },
    "yarn": {
        "factor": "factor",
        "original_max_position_embeddings": "original_length",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
    },
}


# beside those of ROTARY; None or what has no effect is let through
ROTARY_KEYS = ("rope_type", "type", "rope_theta", "truncate", "mscale", "mscale_all_dim")


def read_rotary(theirs: Mapping[str, Any], length: int = 2048) -> dict[str, Any]:
    """Return base and scaling, as transformers 5 writes them or as those before did.

    `length` is how far a model reaches where its file does not tell.
    """
    given = theirs.get("rope_scaling") or theirs.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise UsageError(f"rope_parameters={given!r} is not an object")
    kind = str(given.get("rope_type", given.get("type", "default")))
    kind = "none" if kind == "default" else kind
    keys = lookup("rope_type", kind, ROTARY)
    known = {*ROTARY_KEYS, *(key for each in ROTARY.values() for key in each)}
    part = given.get("partial_rotary_factor", theirs.get("partial_rotary_factor"))
    if part not in (None, 1):
        raise UsageError(f"partial_rotary_factor={part!r:.40} is not supported; only 1 is")
    for key, value in given.items():
        if key not in known and key != "partial_rotary_factor" and value is not None:
            raise UsageError(f"{key!r:.40} in rope_parameters is not supported; leave it out")
    values = {ours: given[key] for key, ours in keys.items() if given.get(key) is not None}
    if "original_length" in keys.values():
        values.setdefault("original_length", theirs.get("max_position_embeddings", length))
        if theirs.get("original_max_position_embeddings") is not None:  # it comes first in theirs
            values["original_length"] = theirs["original_max_position_embeddings"]
    if "factor" in keys and "factor" not in values:
        raise UsageError(f"rope_type={kind} has no factor; write by how much it reaches further")
    if given.get("truncate", True) is not True:
        raise UsageError(f"truncate={given['truncate']} is not supported; only true is")
    mscale = given.get("mscale"), given.get("mscale_all_dim")
    if kind == "yarn" and all(mscale) and "attention_factor" not in values:  # 0 is as none
        values["attention_factor"] = _deepseek(values["factor"], *mscale)
    for key in ("beta_fast", "beta_slow"):
        if values.get(key) == 0:
            del values[key]
    base = given.get("rope_theta", theirs.get("rope_theta", 10_000.0))
    scaling = {f"scaling.{key}": value for key, value in values.items()}
    return {"position_base": base, "scaling.kind": kind, **scaling}


def _deepseek(factor: Any, one: Any, other: Any) -> float:
    """Return how much DeepSeek's two numbers stretch scores."""
    if not all(isinstance(x, int | float) for x in (factor, one, other)):
        raise UsageError(f"mscale={one!r} and mscale_all_dim={other!r} are not both numbers")
    log = math.log(max(1.0, factor))
    return (0.1 * one * log + 1) / (0.1 * other * log + 1)


def settle(config: GPTConfig) -> GPTConfig:
    """Say what is rotary in one way, and drop what has no effect."""
    position, scaling = ALIASES.get(config.position, config.position), RotaryScaling()
    config = _settle_layers(config)
    if position == "rotary_part" and config.position_share == 1:
        position = "rotary"
    if position != "rotary_part":
        config = replace(config, position_share=1.0)
    if position not in ("rotary", "rotary_part", "yarn"):
        return replace(config, position=position, position_base=10_000.0, scaling=scaling)
    part = POSITIONS[position](head_width=2, scaling=config.scaling, max_length=config.max_length)
    given = cast(Rotary, part).scaling
    keys = lookup("rotary scaling", given.kind, ROTARY).values()
    scaling = replace(scaling, kind=given.kind, **{key: getattr(given, key) for key in keys})
    position = "rotary" if position == "yarn" else position
    return replace(config, position=position, scaling=scaling)


def _settle_layers(config: GPTConfig) -> GPTConfig:
    """Say in one way which layers see only what is near, and whether attention has biases."""
    near, block = windowed(config), config.block
    if not near:
        config = replace(config, window=None, window_layers=None, near_base=None)
    elif len(near) == config.depth:
        config = replace(config, window_layers=None)
    else:
        config = replace(config, window_layers=tuple(sorted(near)))
    if ATTENTION_BIASES[block.attention_bias](block.bias) == (block.bias, block.bias):
        config = replace(config, block=replace(block, attention_bias="same"))
    return config


def write_rotary(config: GPTConfig) -> dict[str, Any]:
    """Return base and scaling in the words of transformers 5, and the base in older ones too."""
    config = settle(config)
    scaling, base = config.scaling, config.position_base
    kind = scaling.kind
    values = {key: getattr(scaling, ours) for key, ours in ROTARY.get(kind, {}).items()}
    values = {key: value for key, value in values.items() if value is not None}
    named = {"rope_type": "default" if kind == "none" else kind, "rope_theta": base}
    return {"rope_theta": base, "rope_parameters": {**named, **values}}


LLAMA_NORMS = {
    "blocks.{}.around_attention.norm": "input_layernorm",
    "blocks.{}.around_feed_forward.norm": "post_attention_layernorm",
    "blocks.{}.attention.q_norm": "self_attn.q_norm",
    "blocks.{}.attention.k_norm": "self_attn.k_norm",
}


def llama_rules(
    config: GPTConfig,
    architecture: str,
    norms: Mapping[str, str] = LLAMA_NORMS,
) -> list[Rule]:
    """Name all weights; queries, keys and values are three matrices."""
    block, bias = config.block, config.block.bias
    qkv_bias, out_bias = ATTENTION_BIASES[block.attention_bias](bias)
    width = block.head_width or block.width // block.heads
    rows = tuple(n * width for n in (block.heads, *[block.kv_heads or block.heads] * 2))
    layer = "model.layers.{}."
    qkv = [f"{layer}self_attn.{letter}_proj" for letter in "qkv"]
    return [
        *_ends(config.tie, "model.embed_tokens.weight"),
        *linear("blocks.{}.attention.qkv", *qkv, bias=qkv_bias, rows=rows),
        *linear("blocks.{}.attention.out", layer + "self_attn.o_proj", bias=out_bias),
        *linear("blocks.{}.feed_forward.gate", layer + "mlp.gate_proj", bias=bias),
        *linear("blocks.{}.feed_forward.inner", layer + "mlp.up_proj", bias=bias),
        *linear("blocks.{}.feed_forward.outer", layer + "mlp.down_proj", bias=bias),
        *(
            rule
            for ours, theirs in norms.items()
            for rule in linear(ours, layer + theirs, bias=False)
        ),
        *linear("norm", "model.norm", bias=False),
    ]


# ---- BLOOM

BLOOM_KEYS = (
    Key("vocab", "vocab_size", 250880),
    Key("depth", "n_layer", 2),
    Key("max_length", "seq_length", 2048),
    Key("tie", "tie_word_embeddings", True),
    Key("block.width", "hidden_size", 64),
    Key("block.heads", "n_head", 8),
    Key("block.norm_eps", "layer_norm_epsilon", 1e-5),
    Key("block.dropout", "hidden_dropout", 0.0),
    Key("block.attention_dropout", "attention_dropout", 0.0),
)
BLOOM_PARTS = {"position": "alibi", "embed_norm": "layer", "block.feed_forward": "gelu_tanh"}
BLOOM_HARMLESS = (
    *("n_embed", "num_attention_heads", "num_hidden_layers", "n_inner", "slow_but_exact"),
    *("attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion"),
    *("offset_alibi", "skip_bias_add", "skip_bias_add_qkv"),
)
BLOOM_FIXED = {"model_type": "bloom", "apply_residual_connection_post_layernorm": False}


def read_bloom(theirs: Mapping[str, Any], architecture: str = "") -> GPTConfig:
    """Return our config for a BloomConfig, which has had two names for some of its keys."""
    older = {
        "n_embed": "hidden_size",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }
    theirs = {**theirs, **{new: theirs[old] for old, new in older.items() if old in theirs}}
    if theirs.get("slow_but_exact") and theirs.get("pretraining_tp", 1) not in (None, 1):
        raise UsageError(
            f"slow_but_exact with pretraining_tp={theirs['pretraining_tp']!r:.40} is not "
            "supported; only pretraining_tp=1 is"
        )
    width = theirs.get("hidden_size", 64)
    inner = 4 * width if isinstance(width, int) else width
    parts = {**BLOOM_PARTS, "block.ffn_width": inner}
    return read_keys(GPTConfig, theirs, BLOOM_KEYS, parts, BLOOM_FIXED)


def write_bloom(config: GPTConfig, task: str = "language") -> dict[str, Any]:
    """Return the BloomConfig for one of ours."""
    theirs = write_keys(config, BLOOM_KEYS, BLOOM_FIXED)
    return {"architectures": ["BloomForCausalLM"], **theirs}


def bloom_rules(config: GPTConfig, architecture: str) -> list[Rule]:
    """Name all weights; query, key and value of a head lie together."""
    block = "transformer.h.{}."
    qkv = block + "self_attention.query_key_value"
    return [
        *_ends(config.tie, "transformer.word_embeddings.weight"),
        *linear("embed.norm", "transformer.word_embeddings_layernorm"),
        *linear("blocks.{}.attention.qkv", qkv, change="bloom_qkv"),
        *linear("blocks.{}.attention.out", block + "self_attention.dense"),
        *linear("blocks.{}.feed_forward.inner", block + "mlp.dense_h_to_4h"),
        *linear("blocks.{}.feed_forward.outer", block + "mlp.dense_4h_to_h"),
        *linear("blocks.{}.around_attention.norm", block + "input_layernorm"),
        *linear("blocks.{}.around_feed_forward.norm", block + "post_attention_layernorm"),
        *linear("norm", "transformer.ln_f"),
    ]


FORMATS = {
    "gpt2": Format(
        "gpt2",
        {"GPT2LMHeadModel": "language"},
        "gpt",
        read_gpt2,
        write_gpt2,
        gpt2_rules,
        ignored=(r"\.attn\.(bias|masked_bias)$",),
        harmless=("n_ctx", "predict_special_tokens", "reorder_and_upcast_attn"),
        prefix="transformer.",
        settle=settle,
    ),
    "llama": Format(
        "llama",
        {"LlamaForCausalLM": "language"},
        "gpt",
        read_llama,
        write_llama,
        llama_rules,
        ignored=(r"rotary_emb\.inv_freq$",),
        harmless=("rope_scaling", "original_max_position_embeddings", "partial_rotary_factor"),
        prefix="model.",
        settle=settle,
    ),
    "mistral": Format(
        "mistral",
        {"MistralForCausalLM": "language"},
        "gpt",
        read_mistral,
        write_mistral,
        llama_rules,
        ignored=(r"rotary_emb\.inv_freq$",),
        harmless=("rope_scaling", "original_max_position_embeddings", "partial_rotary_factor"),
        prefix="model.",
        settle=settle,
    ),
    "bloom": Format(
        "bloom",
        {"BloomForCausalLM": "language"},
        "gpt",
        read_bloom,
        write_bloom,
        bloom_rules,
        prefix="transformer.",
        harmless=BLOOM_HARMLESS,
        settle=settle,
    ),
}
