"""Further decoder-only checkpoints of transformers: Qwen2 and 3, GPT-NeoX, Gemma 1, 2 and 3."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from regard.errors import UsageError, lookup
from regard.models.gpt import GPTConfig, windowed
from regard.pretrained.gpt import (
    GATED,
    LLAMA_KEYS,
    LLAMA_NORMS,
    LLAMA_PARTS,
    PLAIN,
    llama_rules,
    read_bias,
    read_rotary,
    settle,
    write_bias,
    write_rotary,
)
from regard.pretrained.load import read_keys, write_keys
from regard.pretrained.tables import Format, Key, Rule, linear

Words = Mapping[str, Any]
NEAR, FAR = "sliding_attention", "full_attention"


def _keys(*changed: Key) -> tuple[Key, ...]:
    """Return LLaMA's keys with some of them changed or added."""
    names = {key.ours for key in changed}
    return (*(key for key in LLAMA_KEYS if key.ours not in names), *changed)


def _whole(theirs: Words, key: str, default: int) -> int:
    """Return a whole number of theirs that counts layers or tokens."""
    value = default if theirs.get(key) is None else theirs[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UsageError(f"{key}={str(value)[:40]} is not a whole number")
    return value


def _object(theirs: Words, key: str) -> Words:
    """Return an object of theirs, empty where there is none."""
    value = theirs.get(key) or {}
    if not isinstance(value, Mapping):
        raise UsageError(f"{key}={str(value)[:40]} is not an object")
    return value


def _windows(theirs: Words, window: Any, depth: int, usual: Any) -> dict[str, Any]:
    """Return the window and the layers that have it, `usual(i)` telling where no list does."""
    kinds = theirs.get("layer_types")
    if kinds is None:
        kinds = [NEAR if usual(i) else FAR for i in range(min(depth, 1000))]
    if not isinstance(kinds, list) or len(kinds) != depth:
        raise UsageError(
            f"layer_types={str(kinds)[:40]}; expected a kind for each of {depth} layers"
        )
    for kind in kinds:
        lookup("layer type", str(kind), dict.fromkeys((NEAR, FAR)))
    near = tuple(i for i, kind in enumerate(kinds) if kind == NEAR)
    if window is None or not near:
        return {"window": None, "window_layers": None}
    return {"window": window, "window_layers": None if len(near) == depth else near}


def _layer_types(config: GPTConfig) -> list[str]:
    near = windowed(config)
    return [NEAR if i in near else FAR for i in range(config.depth)]


# ---- Qwen2 and Qwen3

QWEN_KEYS = _keys(
    Key("vocab", "vocab_size", 151936),
    Key("max_length", "max_position_embeddings", 32768),
    Key("block.ffn_width", "intermediate_size", 22016),
)
QWEN3_KEYS = (
    *(key for key in QWEN_KEYS if key.ours != "block.head_width"),
    Key("block.head_width", "head_dim", 128),
)
QWEN_PARTS = {**LLAMA_PARTS, "block.bias": False}


def _read_qwen(model_type: str, theirs: Words, architecture: str) -> GPTConfig:
    """Return our config for a Qwen2Config or Qwen3Config."""
    lookup("hidden_act", str(theirs.get("hidden_act", "silu")), GATED)
    window = theirs.get("sliding_window", 4096) if theirs.get("use_sliding_window") else None
    first = _whole(theirs, "max_window_layers", 28)
    depth = _whole(theirs, "num_hidden_layers", 32)
    near = _windows(theirs, window, depth, lambda i: window is not None and i >= first)
    parts = {**QWEN_PARTS, **read_rotary({"max_position_embeddings": 32768, **theirs}), **near}
    if model_type == "qwen2":
        keys, parts["block.attention_bias"] = QWEN_KEYS, "qkv"
    else:
        keys, parts["block.head_norm"] = QWEN3_KEYS, "rms"
        parts |= read_bias(theirs.get("attention_bias", False), False)
    theirs = {"num_key_value_heads": 32, **theirs}
    return read_keys(GPTConfig, theirs, keys, parts, {"model_type": model_type})


def _write_qwen(model_type: str, config: GPTConfig, task: str) -> dict[str, Any]:
    """Return the Qwen2Config or Qwen3Config for one of ours."""
    block = config.block
    theirs = write_keys(config, QWEN_KEYS, {"model_type": model_type})
    if model_type == "qwen3":
        theirs["head_dim"] = block.head_width or block.width // block.heads
        theirs["attention_bias"] = write_bias(block)
    elif block.head_width is None:
        del theirs["head_dim"]
    return {
        **theirs,
        "use_sliding_window": config.window is not None,
        "sliding_window": config.window,
        "layer_types": _layer_types(config),
        **write_rotary(config),
    }


# ---- GPT-NeoX

NEOX_KEYS = (
    Key("vocab", "vocab_size", 50432),
    Key("depth", "num_hidden_layers", 44),
    Key("max_length", "max_position_embeddings", 2048),
    Key("tie", "tie_word_embeddings", False),
    Key("block.width", "hidden_size", 6144),
    Key("block.heads", "num_attention_heads", 64),
    Key("block.ffn_width", "intermediate_size", 24576),
    Key("block.feed_forward", "hidden_act", "gelu", PLAIN),
    Key("block.norm_eps", "layer_norm_eps", 1e-5),
    Key("block.order", "use_parallel_residual", True, {True: "parallel_norms", False: "pre"}),
    Key("block.dropout", "hidden_dropout", 0.0),
    Key("block.attention_dropout", "attention_dropout", 0.0),
)


def _read_neox(theirs: Words, architecture: str) -> GPTConfig:
    """Return our config for a GPTNeoXConfig, whose rotary keys had names of their own."""
    lookup("hidden_act", str(theirs.get("hidden_act", "gelu")), PLAIN)
    older = {"rope_theta": theirs.get("rotary_emb_base", 10_000), **theirs}
    share = theirs.get("rotary_pct", 0.25)
    given = theirs.get("rope_scaling") or theirs.get("rope_parameters")
    if isinstance(given, Mapping):
        share = given.get("partial_rotary_factor", share)
        older["rope_parameters"] = {k: v for k, v in given.items() if k != "partial_rotary_factor"}
        older.pop("rope_scaling", None)
    parts = {
        **read_rotary(older),
        "position": "rotary" if share == 1 else "rotary_part",
        "position_share": share,
        **read_bias(theirs.get("attention_bias", True), True),
    }
    return read_keys(GPTConfig, theirs, NEOX_KEYS, parts, {"model_type": "gpt_neox"})


def _write_neox(config: GPTConfig, task: str) -> dict[str, Any]:
    """Return the GPTNeoXConfig for one of ours."""
    if config.block.feed_forward not in PLAIN.values():
        raise UsageError(f"feed_forward='{config.block.feed_forward}'")
    rotary = write_rotary(config)
    rotary["rope_parameters"]["partial_rotary_factor"] = config.position_share
    older = {"rotary_pct": config.position_share, "rotary_emb_base": rotary.pop("rope_theta")}
    theirs = write_keys(config, NEOX_KEYS, {"model_type": "gpt_neox"})
    return {**theirs, "attention_bias": write_bias(config.block), **rotary, **older}


def neox_rules(config: GPTConfig, architecture: str) -> list[Rule]:
    """Name all weights; query, key and value of a head lie together."""
    layer = "gpt_neox.layers.{}."
    looks = config.block.attention_bias != "none"
    tokens, heads = "gpt_neox.embed_in.weight", ("embed_out.weight", "lm_head.weight")
    table = [
        Rule("embed.tokens.weight", (tokens,), also=heads if config.tie else ()),
        Rule("head.weight", heads[:1], also=heads[1:]),
    ]
    qkv = layer + "attention.query_key_value"
    norms = {"input_layernorm": "look", "post_attention_layernorm": "think"}
    parts = {"look": "around_attention.norm", "think": "around_feed_forward.norm"}
    if config.block.order == "parallel_norms":
        parts = {part: f"{part}_norm" for part in parts}
    return [
        *table,
        *linear("blocks.{}.attention.qkv", qkv, bias=looks, change="bloom_qkv"),
        *linear("blocks.{}.attention.out", layer + "attention.dense", bias=looks),
        *linear("blocks.{}.feed_forward.inner", layer + "mlp.dense_h_to_4h"),
        *linear("blocks.{}.feed_forward.outer", layer + "mlp.dense_4h_to_h"),
        *(
            rule
            for name, part in norms.items()
            for rule in linear(f"blocks.{{}}.{parts[part]}", layer + name)
        ),
        *linear("norm", "gpt_neox.final_layer_norm"),
    ]


# ---- Gemma

GEMMA_KEYS = _keys(
    Key("vocab", "vocab_size", 256000),
    Key("depth", "num_hidden_layers", 28),
    Key("max_length", "max_position_embeddings", 8192),
    Key("tie", "tie_word_embeddings", True),
    Key("block.width", "hidden_size", 3072),
    Key("block.heads", "num_attention_heads", 16),
    Key("block.kv_heads", "num_key_value_heads", 16),
    Key("block.head_width", "head_dim", 256),
    Key("block.ffn_width", "intermediate_size", 24576),
    # what the first files call gelu is the one by a hyperbolic tangent
    Key(
        "block.feed_forward",
        "hidden_act",
        "gelu_pytorch_tanh",
        {"gelu_pytorch_tanh": "geglu_tanh", **GATED, "gelu": "geglu_tanh"},
    ),
)


def _later(vocab: int, length: int) -> tuple[Key, ...]:
    """Return the keys of Gemma 2 and 3, which have names of their own and other sizes."""
    names = {key.ours for key in GEMMA_KEYS}
    changed = (
        Key("vocab", "vocab_size", vocab),
        Key("depth", "num_hidden_layers", 26),
        Key("max_length", "max_position_embeddings", length),
        Key("block.width", "hidden_size", 2304),
        Key("block.heads", "num_attention_heads", 8),
        Key("block.kv_heads", "num_key_value_heads", 4),
        Key("block.ffn_width", "intermediate_size", 9216),
        Key("block.feed_forward", "hidden_activation", "gelu_pytorch_tanh", GATED),
    )
    assert {key.ours for key in changed} <= names
    new = {key.ours: key for key in changed}
    return tuple(new.get(key.ours, key) for key in GEMMA_KEYS)


GEMMA2_KEYS, GEMMA3_KEYS = _later(256000, 8192), _later(262208, 131072)
GEMMA_PARTS = {
    **LLAMA_PARTS,
    "block.norm": "rms_plus1",
    "block.bias": False,
    "scale_embedding": True,
}
GEMMA_NORMS = {
    **LLAMA_NORMS,
    "blocks.{}.around_attention.after": "post_attention_layernorm",
    "blocks.{}.around_feed_forward.norm": "pre_feedforward_layernorm",
    "blocks.{}.around_feed_forward.after": "post_feedforward_layernorm",
}


def _causal(theirs: Words) -> dict[str, str]:
    """Refuse a model that looks ahead, and say which biases there are."""
    if theirs.get("use_bidirectional_attention"):
        raise UsageError("use_bidirectional_attention=true is not supported; only false is")
    return read_bias(theirs.get("attention_bias", False), False)


def _read_gemma(theirs: Words, architecture: str) -> GPTConfig:
    """Return our config for a GemmaConfig."""
    theirs = {key: value for key, value in theirs.items() if value is not None}
    lookup("hidden_act", str(theirs.get("hidden_act", "gelu_pytorch_tanh")), GATED)
    rotary = read_rotary({"max_position_embeddings": 8192, **theirs})
    parts = {**GEMMA_PARTS, **rotary, **_causal(theirs)}
    return read_keys(GPTConfig, theirs, GEMMA_KEYS, parts, {"model_type": "gemma"})


def _write_gemma(config: GPTConfig, task: str) -> dict[str, Any]:
    """Return the GemmaConfig for one of ours."""
    return {
        **_wide(write_keys(config, GEMMA_KEYS, {"model_type": "gemma"}), config),
        **write_rotary(config),
    }


def _wide(theirs: dict[str, Any], config: GPTConfig) -> dict[str, Any]:
    """Say what Gemma's configs do not work out: how wide heads are, and how many keys have."""
    block = config.block
    return theirs | {
        "head_dim": block.head_width or block.width // block.heads,
        "num_key_value_heads": block.kv_heads or block.heads,
        "attention_bias": write_bias(block),
    }


def _scored(theirs: Words, head_width: Any, cap: float | None) -> dict[str, Any]:
    """Return how scores are scaled and capped."""
    cap = theirs.get("attn_logit_softcapping", cap)
    wide = theirs.get("query_pre_attn_scalar", 256)
    if isinstance(wide, bool) or not isinstance(wide, int | float) or wide <= 0:
        raise UsageError(f"query_pre_attn_scalar={str(wide)[:40]} is not a number above 0")
    return {
        "block.score": "dot" if cap is None else "capped",
        "block.score_cap": cap,
        "block.score_scale": None if wide == head_width else wide**-0.5,
    }


def _read_gemma2(theirs: Words, architecture: str) -> GPTConfig:
    """Return our config for a Gemma2Config."""
    lookup("hidden_activation", str(theirs.get("hidden_activation", "gelu_pytorch_tanh")), GATED)
    depth = _whole(theirs, "num_hidden_layers", 26)
    window = theirs.get("sliding_window", 4096)
    parts = {
        **GEMMA_PARTS,
        **read_rotary({"max_position_embeddings": 8192, **theirs}),
        **_causal(theirs),
        **_windows(theirs, window, depth, lambda i: i % 2 == 0),
        **_scored(theirs, theirs.get("head_dim", 256), 50.0),
        "logit_cap": theirs.get("final_logit_softcapping", 30.0),
        "block.order": "sandwich",
    }
    return read_keys(GPTConfig, theirs, GEMMA2_KEYS, parts, {"model_type": "gemma2"})


def _write_gemma2(config: GPTConfig, task: str) -> dict[str, Any]:
    """Return the Gemma2Config for one of ours."""
    theirs = write_keys(config, GEMMA2_KEYS, {"model_type": "gemma2"})
    return {**_wide(theirs, config), **_write_scored(config), **write_rotary(config)}


def _write_scored(config: GPTConfig) -> dict[str, Any]:
    """Return how scores and logits are scaled and capped, and which layers have a window."""
    block, wide = config.block, config.block.head_width or config.block.width // config.block.heads
    if block.score_scale is not None:
        exact = block.score_scale**-2
        wide = round(exact)
        if abs(exact - wide) > 1e-6 * exact:
            raise UsageError(f"score_scale={block.score_scale}, which is no root of a whole number")
    return {
        "query_pre_attn_scalar": wide,
        "attn_logit_softcapping": block.score_cap,
        "final_logit_softcapping": config.logit_cap,
        "sliding_window": config.window or 4096,  # which must be there, used or not
        "layer_types": _layer_types(config),
    }


def _read_gemma3(theirs: Words, architecture: str) -> GPTConfig:
    """Return our config for a Gemma3TextConfig, whose near layers turn by another base."""
    lookup("hidden_activation", str(theirs.get("hidden_activation", "gelu_pytorch_tanh")), GATED)
    depth = _whole(theirs, "num_hidden_layers", 26)
    period = max(1, _whole(theirs, "sliding_window_pattern", 6))
    near = _windows(theirs, theirs.get("sliding_window", 4096), depth, lambda i: (i + 1) % period)
    given = _object(theirs, "rope_parameters")
    local, far = (_object(given, kind) for kind in (NEAR, FAR))
    length = {"max_position_embeddings": theirs.get("max_position_embeddings", 131072)}
    kind = read_rotary({**length, "rope_parameters": local})["scaling.kind"]
    if kind != "none":
        raise UsageError(f"rope_type={kind} of {NEAR} is not supported; only default is")
    far = {**far, **_object(theirs, "rope_scaling")}
    base = theirs.get("rope_theta", 1e6)
    rotary = read_rotary({**length, "rope_theta": base, "rope_parameters": far})
    local_base = local.get("rope_theta", theirs.get("rope_local_base_freq", 1e4))
    parts = {
        **GEMMA_PARTS,
        **rotary,
        **_causal(theirs),
        **near,
        "near_base": local_base if near["window"] is not None else None,
        **_scored(theirs, theirs.get("head_dim", 256), None),
        "logit_cap": theirs.get("final_logit_softcapping"),
        "block.order": "sandwich",
        "block.head_norm": "rms_plus1",
    }
    fixed = {"model_type": "gemma3_text", "attn_logit_softcapping": None}
    return read_keys(GPTConfig, theirs, GEMMA3_KEYS, parts, fixed)


def _write_gemma3(config: GPTConfig, task: str) -> dict[str, Any]:
    """Return the Gemma3TextConfig for one of ours."""
    far = write_rotary(config)["rope_parameters"]
    near = {"rope_type": "default", "rope_theta": config.near_base or config.position_base}
    if config.block.score_cap is not None:
        raise UsageError(f"score_cap={config.block.score_cap}, which only gemma2 has")
    theirs = _wide(write_keys(config, GEMMA3_KEYS, {"model_type": "gemma3_text"}), config)
    return {**theirs, **_write_scored(config), "rope_parameters": {FAR: far, NEAR: near}}


def _settle_gemma3(config: GPTConfig) -> GPTConfig:
    """Say what is rotary in one way, near layers having a base of their own."""
    config = settle(config)
    if windowed(config) and config.near_base is None and config.scaling.kind == "none":
        config = replace(config, near_base=config.position_base)
    return config


# keys that are read under other names, or that transformers does not read
HARMLESS = (
    *("rope_scaling", "original_max_position_embeddings", "rotary_pct", "rotary_emb_base"),
    *("max_window_layers", "use_sliding_window", "sliding_window_pattern", "rope_local_base_freq"),
    *("hidden_act", "hidden_activation", "rope_theta"),
)


def _format(model_type: str, name: str, read: Any, write: Any, rules: Any, **more: Any) -> Format:
    """Describe one of these formats, which all have one class for writing."""
    named = {"prefix": "model.", "settle": settle, "harmless": HARMLESS, **more}
    ignored = (r"rotary_emb\.inv_freq$", r"attention\.(bias|masked_bias)$")
    classes = {f"{name}ForCausalLM": "language"}
    return Format(model_type, classes, "gpt", read, write, rules, ignored=ignored, **named)


FORMATS = {
    **{
        kind: _format(
            kind,
            name,
            partial(_read_qwen, kind),
            partial(_write_qwen, kind),
            llama_rules,
        )
        for kind, name in {"qwen2": "Qwen2", "qwen3": "Qwen3"}.items()
    },
    "gpt_neox": _format(
        "gpt_neox", "GPTNeoX", _read_neox, _write_neox, neox_rules, prefix="gpt_neox."
    ),
    "gemma": _format("gemma", "Gemma", _read_gemma, _write_gemma, llama_rules),
    "gemma2": _format(
        "gemma2",
        "Gemma2",
        _read_gemma2,
        _write_gemma2,
        partial(llama_rules, norms=GEMMA_NORMS),
    ),
    "gemma3_text": _format(
        "gemma3_text",
        "Gemma3",
        _read_gemma3,
        _write_gemma3,
        partial(llama_rules, norms=GEMMA_NORMS),
        settle=_settle_gemma3,
    ),
}
