"""CLIP as transformers writes it: both encoders, or one of them."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from regard.errors import UsageError, lookup
from regard.models.clip import ClipConfig
from regard.models.gpt import GPTConfig
from regard.models.vit import ViTConfig
from regard.pretrained.gpt import PLAIN, settle
from regard.pretrained.load import read_keys, write_keys
from regard.pretrained.tables import Format, Key, Rule, linear
from regard.pretrained.vision import told

Words = Mapping[str, Any]


def _keys(width: int, *more: Key) -> tuple[Key, ...]:
    """Return the keys that both sides have."""
    return (
        Key("depth", "num_hidden_layers", 12),
        Key("block.width", "hidden_size", width),
        Key("block.heads", "num_attention_heads", width // 64),
        Key("block.ffn_width", "intermediate_size", 4 * width),
        Key("block.feed_forward", "hidden_act", "quick_gelu", PLAIN),
        Key("block.norm_eps", "layer_norm_eps", 1e-5),
        Key("block.attention_dropout", "attention_dropout", 0.0),
        *more,
    )


TEXT_KEYS = _keys(
    512, Key("vocab", "vocab_size", 49408), Key("max_length", "max_position_embeddings", 77)
)
VISION_KEYS = _keys(
    768,
    Key("channels", "num_channels", 3),
    Key("image", "image_size", 224),
    Key("patch", "patch_size", 32),
)
TEXT_PARTS = {"block.dropout": 0.0, "tie": True, "start": "normal"}
VISION_PARTS = {
    "labels": 0,
    "stem": "patches_nobias",
    "embed_norm": "layer",
    "block.dropout": 0.0,
}
BEFORE = 2  # the end token that files had before it was known where it is used


def _read_text(theirs: Words, architecture: str = "") -> GPTConfig:
    """Return our config for a CLIPTextConfig."""
    theirs = {key: value for key, value in theirs.items() if value is not None}
    lookup("hidden_act", str(theirs.get("hidden_act", "quick_gelu")), PLAIN)
    return read_keys(GPTConfig, theirs, TEXT_KEYS, TEXT_PARTS, {})


def _read_vision(theirs: Words, architecture: str = "") -> ViTConfig:
    """Return our config for a CLIPVisionConfig."""
    return read_keys(ViTConfig, told(theirs), VISION_KEYS, VISION_PARTS, {})


def _write_side(
    model_type: str, keys: tuple[Key, ...], config: Any, task: str = ""
) -> dict[str, Any]:
    """Return the config of a side for one of ours."""
    if config.block.feed_forward not in PLAIN.values():
        raise UsageError(f"feed_forward='{config.block.feed_forward}'")
    return write_keys(config, keys, {"model_type": model_type})


_write_text = partial(_write_side, "clip_text_model", TEXT_KEYS)
_write_vision = partial(_write_side, "clip_vision_model", VISION_KEYS)


def _side(theirs: Words, name: str) -> Words:
    """Return what is said of one side, which older files say once more, and that counts."""
    again = theirs.get(f"{name}_dict")
    side = theirs.get(name) or {} if again is None else again
    if not isinstance(side, Mapping):
        raise UsageError(f"{name}={str(side)[:40]} is not an object")
    return side


def _read(theirs: Words, architecture: str) -> ClipConfig:
    """Return our config for a CLIPConfig."""
    text = _side(theirs, "text_config")
    end = text.get("eos_token_id", 49407)
    width = theirs.get("projection_dim", 512)
    for key, value in (("projection_dim", width), ("eos_token_id", end)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise UsageError(f"{key}={str(value)[:40]} is not a whole number")
    if not 0 < width <= 2**16:
        raise UsageError(f"projection_dim={width}; expected 1 to {2**16}")
    vision = _read_vision(_side(theirs, "vision_config"))
    return ClipConfig(vision, _read_text(text), width, None if end == BEFORE else end)


def _write(config: ClipConfig, task: str) -> dict[str, Any]:
    """Return the CLIPConfig for one of ours."""
    end = BEFORE if config.end is None else config.end
    return {
        "model_type": "clip",
        "projection_dim": config.width,
        "text_config": {**_write_text(config.text), "eos_token_id": end},
        "vision_config": _write_vision(config.vision),
    }


def _layers(ours: str, theirs: str) -> list[Rule]:
    """Name the weights of the blocks of a side."""
    layer, block = theirs + "encoder.layers.{}", ours + "blocks.{}"
    return [
        *linear(
            f"{block}.attention.qkv", *(f"{layer}.self_attn.{letter}_proj" for letter in "qkv")
        ),
        *linear(f"{block}.attention.out", f"{layer}.self_attn.out_proj"),
        *linear(f"{block}.around_attention.norm", f"{layer}.layer_norm1"),
        *linear(f"{block}.feed_forward.inner", f"{layer}.mlp.fc1"),
        *linear(f"{block}.feed_forward.outer", f"{layer}.mlp.fc2"),
        *linear(f"{block}.around_feed_forward.norm", f"{layer}.layer_norm2"),
    ]


def _text_rules(config: Any, architecture: str, ours: str = "") -> list[Rule]:
    base = "text_model."
    tables = {"tokens.weight": "token_embedding", "position.table.weight": "position_embedding"}
    return [
        *(
            Rule(f"{ours}embed.{one}", (f"{base}embeddings.{other}.weight",))
            for one, other in tables.items()
        ),
        *_layers(ours, base),
        *linear(f"{ours}norm", f"{base}final_layer_norm"),
    ]


def _vision_rules(config: Any, architecture: str, ours: str = "") -> list[Rule]:
    base = "vision_model."
    patches = f"{base}embeddings.patch_embedding.weight"
    return [
        Rule(f"{ours}tokens.weight", (f"{base}embeddings.class_embedding",), "row_of"),
        Rule(f"{ours}position.table.weight", (f"{base}embeddings.position_embedding.weight",)),
        Rule(f"{ours}stem.project.weight", (patches,), "patches"),
        *linear(f"{ours}embed_norm", f"{base}pre_layrnorm"),
        *_layers(ours, base),
        *linear(f"{ours}norm", f"{base}post_layernorm"),
    ]


def _rules(config: Any, architecture: str) -> list[Rule]:
    return [
        *_text_rules(config, architecture, "text."),
        *_vision_rules(config, architecture, "vision."),
        *linear("image_out", "visual_projection", bias=False),
        *linear("text_out", "text_projection", bias=False),
        Rule("sharpness", ("logit_scale",)),
    ]


IDS = (r"position_ids$",)
FORMATS = {
    "clip": Format(
        "clip",
        {"CLIPModel": "pretrain"},
        "clip",
        _read,
        _write,
        _rules,
        ignored=IDS,
        harmless=("logit_scale_init_value", "projection_dim"),
        reads="both",
    ),
    "clip_text_model": Format(
        "clip_text_model",
        {"CLIPTextModel": "embed"},
        "gpt",
        _read_text,
        _write_text,
        _text_rules,
        ignored=IDS,
        harmless=("logit_scale_init_value", "projection_dim"),
        prefix="text_model.",
        settle=settle,
    ),
    "clip_vision_model": Format(
        "clip_vision_model",
        {"CLIPVisionModel": "pretrain"},
        "vit",
        _read_vision,
        _write_vision,
        _vision_rules,
        ignored=IDS,
        harmless=("logit_scale_init_value", "projection_dim"),
        prefix="vision_model.",
        reads="images",
    ),
}
