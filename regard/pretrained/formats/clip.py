"""CLIP checkpoints: both encoders, or one of them."""

from typing import Any

from regard.models.clip import ClipConfig
from regard.pretrained.config_keys import (
    Key,
    KeyGroup,
    Theirs,
    activation,
    integer,
    mapping,
    sizes,
    without_nulls,
)
from regard.pretrained.format import Architecture, Format, TokenTemplate
from regard.pretrained.formats.rope import canonical
from regard.pretrained.formats.vision import square_sizes
from regard.pretrained.weight_names import Rule, WeightNames, block, within

_TEMPLATE = TokenTemplate(("bos", "A", "eos"), ("bos", "A", "eos", "eos", "B", "eos"), (0,) * 6)
_IGNORED = (r"position_ids$",)
_HARMLESS = ("logit_scale_init_value", "projection_dim")
_KEYS = (
    activation("hidden_act", "quick_gelu"),
    Key("block.norm_eps", "layer_norm_eps", 1e-5),
    Key("block.attention_dropout", "attention_dropout", 0.0),
)
_BLOCKS: WeightNames = within(
    "blocks.{}.",
    "encoder.layers.{}.",
    block(
        attention=("self_attn.{q,k,v}_proj", "self_attn.out_proj", "layer_norm1"),
        network=("mlp.fc1", "mlp.fc2", "layer_norm2"),
    ),
)
_TEXT = Format(
    "clip_text_model",
    "gpt",
    {"CLIPTextModel": Architecture("embed", about={"pooling": "last"})},
    (
        *_KEYS,
        *sizes(vocab=49408, depth=12, width=512, heads=8, ffn_width=2048, length=77),
    ),
    {
        "embed.tokens": "embeddings.token_embedding",
        "embed.position.table": "embeddings.position_embedding",
        **_BLOCKS,
        "norm": "final_layer_norm",
    },
    config={"block.dropout": 0.0, "tie": True, "init": "normal"},
    prefix="text_model.",
    ignored=_IGNORED,
    harmless=_HARMLESS,
    prepare=without_nulls,
    canonical=canonical,
    template=_TEMPLATE,
)
_VISION = Format(
    "clip_vision_model",
    "vit",
    {"CLIPVisionModel": Architecture("pretrain")},
    (
        *_KEYS,
        *sizes(depth=12, width=768, heads=12, ffn_width=3072),
        Key("channels", "num_channels", 3),
        Key("image", "image_size", 224),
        Key("patch", "patch_size", 32),
    ),
    {
        "tokens.weight": Rule(("embeddings.class_embedding",), "row_of"),
        "position.table": "embeddings.position_embedding",
        "stem.project.weight": Rule(("embeddings.patch_embedding.weight",), "patches"),
        "embed_norm": "pre_layrnorm",
        **_BLOCKS,
        "norm": "post_layernorm",
    },
    config={"labels": 0, "stem": "patches_nobias", "embed_norm": "layer", "block.dropout": 0.0},
    prefix="vision_model.",
    ignored=_IGNORED,
    harmless=_HARMLESS,
    prepare=square_sizes,
    inputs="images",
)

_OLD_END = 2  # the end token that files had before it was known where it is used


def _side(theirs: Theirs, name: str) -> Theirs:
    """Return the config of one side, which older files have once more, and that counts."""
    again = f"{name}_dict"
    return mapping(theirs, name if theirs.get(again) is None else again)


def _read_sides(theirs: Theirs) -> dict[str, Any]:
    text = _side(theirs, "text_config")
    end = integer({"eos_token_id": 49407, **text}, "eos_token_id", -1, 0)
    return {
        "vision": _VISION.read_config(_side(theirs, "vision_config")),
        "text": _TEXT.read_config(text),
        "end": None if end == _OLD_END else end,
    }


def _write_sides(config: ClipConfig) -> dict[str, Any]:
    text, vision = _TEXT.write_config(config.text), _VISION.write_config(config.vision)
    del text["architectures"], vision["architectures"]
    end = _OLD_END if config.end is None else config.end
    return {"text_config": {**text, "eos_token_id": end}, "vision_config": vision}


CLIP = Format(
    "clip",
    "clip",
    {"CLIPModel": Architecture("pretrain")},
    (Key("width", "projection_dim", 512), KeyGroup(_read_sides, _write_sides)),
    {
        **within("text.", _TEXT.prefix, _TEXT.weights),
        **within("vision.", _VISION.prefix, _VISION.weights),
        "image_out": "visual_projection",
        "text_out": "text_projection",
        "sharpness": "logit_scale",
    },
    ignored=_IGNORED,
    harmless=_HARMLESS,
    inputs="both",
    template=_TEMPLATE,
)

FORMATS = (CLIP, _TEXT, _VISION)
