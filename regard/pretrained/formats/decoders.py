"""Decoder-only checkpoints: GPT-2, BLOOM, GPT-NeoX, LLaMA, Mistral, Qwen2 and 3, Gemma 1 to 3."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from regard.errors import UsageError
from regard.layers.context import windowed
from regard.models.gpt import GPTConfig
from regard.pretrained.config_keys import (
    GATED_ACTIVATIONS,
    Key,
    KeyGroup,
    Theirs,
    activation,
    integer,
    positive,
    sizes,
    without_nulls,
)
from regard.pretrained.format import BOS_TEMPLATE, Architecture, Format
from regard.pretrained.formats.rope import (
    FULL,
    SLIDING,
    attention_bias,
    canonical,
    layer_types,
    read_layer_types,
    rope,
    rope_by_layer,
    window_settings,
    write_rope,
)
from regard.pretrained.weight_names import (
    Rule,
    WeightNames,
    block,
    each,
    head_width,
    kv_heads,
    qkv_rows,
    within,
)

_LM_HEAD: WeightNames = {"head": "lm_head"}
_TIED = {"head.weight": ("embed.tokens.weight",)}

# ---- GPT-2


def _read_n_inner(theirs: Theirs) -> dict[str, Any]:
    width = theirs.get("n_embd", 768)
    return {"block.ffn_width": theirs.get("n_inner") or _four_times(width)}


def _four_times(width: Any) -> Any:
    """Return the usual width of a feed-forward network; what is no number is refused later."""
    return 4 * width if isinstance(width, int) else width


GPT2 = Format(
    "gpt2",
    "gpt",
    {"GPT2LMHeadModel": Architecture("language", weights=_LM_HEAD)},
    (
        Key("vocab", "vocab_size", 50257),
        Key("depth", "n_layer", 12),
        Key("max_length", "n_positions", 1024),
        Key("tie", "tie_word_embeddings", True),
        Key("block.width", "n_embd", 768),
        Key("block.heads", "n_head", 12),
        activation("activation_function", "gelu_new"),
        Key("block.norm_eps", "layer_norm_epsilon", 1e-5),
        Key("block.dropout", "resid_pdrop", 0.1),
        Key("block.attention_dropout", "attn_pdrop", 0.1),
        KeyGroup(
            _read_n_inner,
            lambda c: {"n_inner": c.block.ffn_width, "embd_pdrop": c.block.dropout},
        ),
    ),
    {
        "embed.tokens": "wte",
        "embed.position.table": "wpe",
        **within(
            "blocks.{}.",
            "h.{}.",
            block(
                attention=("attn.c_attn", "attn.c_proj", "ln_1"),
                network=("mlp.c_fc", "mlp.c_proj", "ln_2"),
                change="transpose",
            ),
        ),
        "norm": "ln_f",
    },
    fixed={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    prefix="transformer.",
    tied=_TIED,
    ignored=(r"\.attn\.(bias|masked_bias)$",),
    harmless=("n_ctx", "predict_special_tokens", "reorder_and_upcast_attn"),
    canonical=canonical,
)

# ---- _BLOOM and GPT-NeoX, whose query, key and value of a head lie together


def _by_head(attention: str) -> WeightNames:
    names = block(
        attention=(f"{attention}.query_key_value", f"{attention}.dense", "input_layernorm"),
        network=("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", "post_attention_layernorm"),
    )
    return {**names, "attention.qkv": Rule((f"{attention}.query_key_value",), "by_head")}


def _prepare_bloom(theirs: Theirs) -> Theirs:
    """Let the older names of its keys count, as transformers does."""
    older = {"n_embed": "hidden_size", "num_attention_heads": "n_head"}
    older["num_hidden_layers"] = "n_layer"
    if theirs.get("slow_but_exact") and theirs.get("pretraining_tp", 1) not in (None, 1):
        raise UsageError(
            f"slow_but_exact with pretraining_tp={theirs['pretraining_tp']!r:.40} is not "
            "supported; only pretraining_tp=1 is"
        )
    return {**theirs, **{new: theirs[old] for old, new in older.items() if old in theirs}}


_BLOOM = Format(
    "bloom",
    "gpt",
    {"BloomForCausalLM": Architecture("language", weights=_LM_HEAD)},
    (
        Key("vocab", "vocab_size", 250880),
        Key("depth", "n_layer", 2),
        Key("max_length", "seq_length", 2048),
        Key("tie", "tie_word_embeddings", True),
        Key("block.width", "hidden_size", 64),
        Key("block.heads", "n_head", 8),
        Key("block.norm_eps", "layer_norm_epsilon", 1e-5),
        Key("block.dropout", "hidden_dropout", 0.0),
        Key("block.attention_dropout", "attention_dropout", 0.0),
        KeyGroup(lambda theirs: {"block.ffn_width": _four_times(theirs.get("hidden_size", 64))}),
    ),
    {
        "embed.tokens": "word_embeddings",
        "embed.norm": "word_embeddings_layernorm",
        **within("blocks.{}.", "h.{}.", _by_head("self_attention")),
        "norm": "ln_f",
    },
    config={"position": "alibi", "embed_norm": "layer", "block.feed_forward": "gelu_tanh"},
    fixed={"apply_residual_connection_post_layernorm": False},
    prefix="transformer.",
    tied=_TIED,
    harmless=(
        *("n_embed", "num_attention_heads", "num_hidden_layers", "n_inner", "slow_but_exact"),
        *("attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion"),
        *("offset_alibi", "skip_bias_add", "skip_bias_add_qkv"),
    ),
    prepare=_prepare_bloom,
    canonical=canonical,
)

# keys that are read under other names, or that transformers does not read
_ROPE_HARMLESS = (
    *("rope_scaling", "original_max_position_embeddings", "rotary_pct", "rotary_emb_base"),
    *("max_window_layers", "use_sliding_window", "sliding_window_pattern", "rope_local_base_freq"),
    *("hidden_act", "hidden_activation", "rope_theta"),
)
_ROPE_BUFFERS = (r"rotary_emb\.inv_freq$", r"attention\.(bias|masked_bias)$")


def _read_partial_rope(theirs: Theirs) -> dict[str, Any]:
    """Read GPT-NeoX's rotary positions, whose keys had names of their own."""
    older = {"rope_theta": theirs.get("rotary_emb_base", 10_000), **theirs}
    share = theirs.get("rotary_pct", 0.25)
    given = theirs.get("rope_scaling") or theirs.get("rope_parameters")
    if isinstance(given, Mapping):
        share = given.get("partial_rotary_factor", share)
        older["rope_parameters"] = {k: v for k, v in given.items() if k != "partial_rotary_factor"}
        older.pop("rope_scaling", None)
    position = "rotary" if share == 1 else "rotary_part"
    return {**rope().read(older), "position": position, "position_share": share}


def _write_partial_rope(config: GPTConfig) -> dict[str, Any]:
    share, rotary = config.position_share, write_rope(config)
    rotary["rope_parameters"]["partial_rotary_factor"] = share
    older = {"rotary_pct": share, "rotary_emb_base": rotary.pop("rope_theta")}
    return {**rotary, **older}


_NEOX = Format(
    "gpt_neox",
    "gpt",
    {
        "GPTNeoXForCausalLM": Architecture(
            "language", weights={"head": Rule(("embed_out",), also=("lm_head",))}
        )
    },
    (
        *sizes(
            vocab=50432, depth=44, width=6144, heads=64, ffn_width=24576, length=2048, tie=False
        ),
        activation("hidden_act", "gelu"),
        Key("block.norm_eps", "layer_norm_eps", 1e-5),
        Key("block.order", "use_parallel_residual", True, {True: "parallel_norms", False: "pre"}),
        Key("block.dropout", "hidden_dropout", 0.0),
        Key("block.attention_dropout", "attention_dropout", 0.0),
        attention_bias(True, rest=True),
        KeyGroup(_read_partial_rope, _write_partial_rope),
    ),
    {
        "embed.tokens": "embed_in",
        **within("blocks.{}.", "layers.{}.", _by_head("attention")),
        # where attention and network are parallel, each has a norm of the block's
        "blocks.{}.look_norm": "layers.{}.input_layernorm",
        "blocks.{}.think_norm": "layers.{}.post_attention_layernorm",
        "norm": "final_layer_norm",
    },
    prefix="gpt_neox.",
    tied=_TIED,
    ignored=_ROPE_BUFFERS,
    harmless=_ROPE_HARMLESS,
    canonical=canonical,
)

# ---- LLaMA and those that follow it


def _llama_keys(
    act: Key, shared: int | None, head_dim: int | None = None, **defaults: Any
) -> tuple[Key, ...]:
    """Return the keys that all of them have, with the defaults in which they differ.

    Where the default is no number of its own, `shared` key-value heads and the width of a head
    follow from other sizes, and are written only where they do not.
    """
    return (
        *sizes(**defaults),
        Key("block.kv_heads", "num_key_value_heads", shared, value=kv_heads if shared else None),
        Key("block.head_width", "head_dim", head_dim, value=head_width if head_dim else None),
        act,
        Key("block.norm_eps", "rms_norm_eps", 1e-6),
        Key("block.attention_dropout", "attention_dropout", 0.0),
    )


_SILU = activation("hidden_act", "silu", GATED_ACTIVATIONS)
_LLAMA_SIZES = {"vocab": 32000, "depth": 32, "width": 4096, "heads": 32, "tie": False}
_LLAMA_CONFIG = {"position": "rotary", "block.norm": "rms", "block.dropout": 0.0}
_NO_BIAS = {**_LLAMA_CONFIG, "block.bias": False}
_LLAMA_BLOCK: WeightNames = {
    **block(
        attention=("self_attn.{q,k,v}_proj", "self_attn.o_proj", "input_layernorm"),
        network=("mlp.up_proj", "mlp.down_proj", "post_attention_layernorm"),
    ),
    "attention.qkv": lambda config: Rule(each("self_attn.{q,k,v}_proj"), rows=qkv_rows(config)),
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "feed_forward.gate": "mlp.gate_proj",
}
_SANDWICH_BLOCK: WeightNames = {
    **_LLAMA_BLOCK,
    "around_attention.after": "post_attention_layernorm",
    "around_feed_forward.norm": "pre_feedforward_layernorm",
    "around_feed_forward.after": "post_feedforward_layernorm",
}


def _like_llama(
    model_type: str,
    name: str,
    *keys: Key | KeyGroup,
    config: Mapping[str, Any] = _NO_BIAS,
    block: WeightNames = _LLAMA_BLOCK,
    harmless: tuple[str, ...] = _ROPE_HARMLESS,
    **more: Any,
) -> Format:
    """Return a format with LLaMA's weight names."""
    return Format(
        model_type,
        "gpt",
        {f"{name}ForCausalLM": Architecture("language", weights=_LM_HEAD)},
        keys,
        {
            "embed.tokens": "embed_tokens",
            **within("blocks.{}.", "layers.{}.", block),
            "norm": "norm",
        },
        config=config,
        prefix="model.",
        tied=_TIED,
        ignored=_ROPE_BUFFERS,
        harmless=harmless,
        **{"canonical": canonical, **more},
    )


_SCALED = ("rope_scaling", "original_max_position_embeddings", "partial_rotary_factor")
_LLAMA = _like_llama(
    "llama",
    "Llama",
    *_llama_keys(_SILU, None, **_LLAMA_SIZES, ffn_width=11008, length=2048),
    Key("block.bias", "mlp_bias", False),
    attention_bias(rest="mlp_bias"),
    rope(),
    config=_LLAMA_CONFIG,
    harmless=_SCALED,
    template=BOS_TEMPLATE,
)
_MISTRAL = _like_llama(
    "mistral",
    "Mistral",
    *_llama_keys(_SILU, 8, **_LLAMA_SIZES, ffn_width=14336, length=4096 * 32),
    Key("window", "sliding_window", 4096),
    rope(4096 * 32),
    harmless=_SCALED,
    template=BOS_TEMPLATE,
)


# ---- Qwen


def _read_qwen_window(theirs: Theirs) -> dict[str, Any]:
    window = theirs.get("sliding_window", 4096) if theirs.get("use_sliding_window") else None
    first = integer(theirs, "max_window_layers", 28, 0)
    depth = integer(theirs, "num_hidden_layers", 32, 0)
    local = read_layer_types(theirs, depth, lambda i: window is not None and i >= first)
    return window_settings(window, local, depth)


def _write_qwen_window(config: GPTConfig) -> dict[str, Any]:
    return {
        "use_sliding_window": config.window is not None,
        "sliding_window": config.window,
        "layer_types": layer_types(config),
    }


_QWEN_SIZES = {**_LLAMA_SIZES, "vocab": 151936, "ffn_width": 22016, "length": 32768}
_QWEN_POSITIONS = (KeyGroup(_read_qwen_window, _write_qwen_window), rope(32768))
_QWEN2 = _like_llama(
    "qwen2",
    "Qwen2",
    *_llama_keys(_SILU, 32, **_QWEN_SIZES),
    *_QWEN_POSITIONS,
    config={**_NO_BIAS, "block.attention_bias": "qkv"},
)
_QWEN3 = _like_llama(
    "qwen3",
    "Qwen3",
    *_llama_keys(_SILU, 32, 128, **_QWEN_SIZES),
    *_QWEN_POSITIONS,
    attention_bias(),
    config={**_NO_BIAS, "block.head_norm": "rms"},
)

# ---- Gemma


def _refuse_bidirectional(theirs: Theirs) -> Theirs:
    if theirs.get("use_bidirectional_attention"):
        raise UsageError("use_bidirectional_attention=true is not supported; only false is")
    return theirs


def _prepare_gemma(theirs: Theirs) -> Theirs:
    return _refuse_bidirectional(without_nulls(theirs))


_GEMMA_CONFIG = {**_NO_BIAS, "block.norm": "rms_plus1", "scale_embedding": True}
_TANH = "gelu_pytorch_tanh"
# what the first files call gelu is the one by a hyperbolic tangent
_GEMMA_ACTIVATIONS = {_TANH: "geglu_tanh", **GATED_ACTIVATIONS, "gelu": "geglu_tanh"}
_GEMMA_SIZES = {"vocab": 256000, "depth": 28, "width": 3072, "heads": 16, "ffn_width": 24576}
_GEMMA = _like_llama(
    "gemma",
    "Gemma",
    *_llama_keys(
        activation("hidden_act", _TANH, _GEMMA_ACTIVATIONS),
        16,
        256,
        **_GEMMA_SIZES,
        length=8192,
        tie=True,
    ),
    attention_bias(),
    rope(8192),
    config=_GEMMA_CONFIG,
    prepare=_prepare_gemma,
    template=BOS_TEMPLATE,
)


def _scores(cap: float | None, logit_cap: float | None) -> KeyGroup:
    """Return the keys of how scores and logits are scaled and capped."""

    def read(theirs: Theirs) -> dict[str, Any]:
        scalar = positive(theirs, "query_pre_attn_scalar", 256)
        scale = None if scalar == theirs.get("head_dim", 256) else scalar**-0.5
        most = theirs.get("attn_logit_softcapping", cap)
        return {
            "block.score": "dot" if most is None else "capped",
            "block.score_cap": most,
            "block.score_scale": scale,
            "logit_cap": theirs.get("final_logit_softcapping", logit_cap),
        }

    def write(config: GPTConfig) -> dict[str, Any]:
        block, scalar = config.block, head_width(config)
        if block.score_scale is not None:
            exact = block.score_scale**-2
            scalar = round(exact)
            if abs(exact - scalar) > 1e-6 * exact:
                raise UsageError(
                    f"score_scale={block.score_scale}, which is not the root of a whole number"
                )
        return {
            "query_pre_attn_scalar": scalar,
            "attn_logit_softcapping": block.score_cap,
            "final_logit_softcapping": config.logit_cap,
        }

    return KeyGroup(read, write)


def _read_window(is_local: Callable[[Theirs, int], Any], theirs: Theirs) -> dict[str, Any]:
    depth = integer(theirs, "num_hidden_layers", 26, 0)
    local = read_layer_types(theirs, depth, lambda i: is_local(theirs, i))
    return window_settings(theirs.get("sliding_window", 4096), local, depth)


def _write_window(config: GPTConfig) -> dict[str, Any]:
    """Return which layers have a window, whose size must be there, used or not."""
    return {"sliding_window": config.window or 4096, "layer_types": layer_types(config)}


def _gemma3_window(theirs: Theirs, i: int) -> int:
    return (i + 1) % max(1, integer(theirs, "sliding_window_pattern", 6, 0))


def _later_keys(vocab: int, length: int) -> tuple[Key | KeyGroup, ...]:
    """Return the keys of Gemma 2 and 3, whose activation has another name."""
    act = activation("hidden_activation", _TANH, GATED_ACTIVATIONS)
    sizes = {"depth": 26, "width": 2304, "heads": 8, "ffn_width": 9216, "tie": True}
    keys = _llama_keys(act, 4, 256, vocab=vocab, length=length, **sizes)
    return (*keys, attention_bias())


_GEMMA2 = _like_llama(
    "gemma2",
    "Gemma2",
    *_later_keys(256000, 8192),
    _scores(50.0, 30.0),
    KeyGroup(partial(_read_window, lambda theirs, i: i % 2 == 0), _write_window),
    rope(8192),
    config={**_GEMMA_CONFIG, "block.order": "sandwich"},
    block=_SANDWICH_BLOCK,
    prepare=_refuse_bidirectional,
    template=BOS_TEMPLATE,
)


def _read_gemma3_layers(theirs: Theirs) -> dict[str, Any]:
    """Read windows and rotary positions, which have a base of their own in sliding layers."""
    window = _read_window(_gemma3_window, theirs)
    local_base, base = theirs.get("rope_local_base_freq", 1e4), theirs.get("rope_theta", 1e6)
    settings, near = rope_by_layer(theirs, local_base, base, 131072)
    return {**window, **settings, "near_base": None if window["window"] is None else near}


def _write_gemma3_layers(config: GPTConfig) -> dict[str, Any]:
    local = {"rope_type": "default", "rope_theta": config.near_base or config.position_base}
    if config.block.score_cap is not None:
        raise UsageError(f"score_cap={config.block.score_cap}, which only gemma2 has")
    full = write_rope(config)["rope_parameters"]
    return {**_write_window(config), "rope_parameters": {FULL: full, SLIDING: local}}


def _canonical_gemma3(config: GPTConfig) -> GPTConfig:
    """Return the config of the same model, its sliding layers with a base of their own."""
    config = canonical(config)
    if windowed(config) and config.near_base is None and config.scaling.kind == "none":
        config = replace(config, near_base=config.position_base)
    return config


_GEMMA3 = _like_llama(
    "gemma3_text",
    "Gemma3",
    *_later_keys(262208, 131072),
    _scores(None, None),
    KeyGroup(_read_gemma3_layers, _write_gemma3_layers),
    config={**_GEMMA_CONFIG, "block.order": "sandwich", "block.head_norm": "rms_plus1"},
    block=_SANDWICH_BLOCK,
    fixed={"attn_logit_softcapping": None},
    prepare=_refuse_bidirectional,
    canonical=_canonical_gemma3,
    template=BOS_TEMPLATE,
)

FORMATS = (GPT2, _LLAMA, _MISTRAL, _BLOOM, _QWEN2, _QWEN3, _NEOX, _GEMMA, _GEMMA2, _GEMMA3)
