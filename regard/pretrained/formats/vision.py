"""Image checkpoints: ViT, DeiT, ViT-MAE (its encoder), DINOv2, ResNet, Swin and Swin V2."""

import math
from dataclasses import replace
from typing import Any

from regard.errors import UsageError, lookup
from regard.models.resnet import ResNetConfig
from regard.models.swin import SwinConfig, side
from regard.models.vit import ViTConfig
from regard.pretrained.config_keys import (
    ACTIVATIONS,
    Key,
    KeyGroup,
    Theirs,
    activation,
    positive,
    sizes,
    without_nulls,
)
from regard.pretrained.format import Architecture, Format
from regard.pretrained.weight_names import Rule, WeightNames, block, each, half, within

_HARMLESS = (
    *("encoder_stride", "pooler_output_size", "pooler_act", "mask_ratio", "norm_pix_loss"),
    *("decoder_num_attention_heads", "decoder_hidden_size", "decoder_num_hidden_layers"),
    *("decoder_intermediate_size", "out_features", "out_indices", "stage_names"),
    *("drop_path_rate", "image_size", "num_layers", "hidden_size", "path_norm"),
    *("apply_layernorm", "reshape_hidden_states", "layerscale_value"),
)
_CLASSIFIER: WeightNames = {"head": "classifier"}
_LABELS = Key("labels", "num_labels", 2, value=lambda config: max(1, config.labels))


def square_sizes(theirs: Theirs) -> Theirs:
    """Return a config without nulls in which images and patches have one side."""
    made = dict(without_nulls(theirs))
    for key in ("image_size", "patch_size"):
        if isinstance(sides := made.get(key), list):
            if len(sides) != 2 or sides[0] != sides[1]:
                raise UsageError(f"{key}={str(sides)[:40]} is not supported; only squares are")
            made[key] = sides[0]
    return made


def _classifier(weights: WeightNames = _CLASSIFIER, **config: Any) -> Architecture:
    return Architecture("images", config, (_LABELS,), weights)


def _base(base: bool = True, **config: Any) -> Architecture:
    """Return a class without a head; one for pretraining keeps the prefix of its encoder."""
    return Architecture("pretrain", {"labels": 0, **config}, base=base)


# ---- ViT

_VIT_KEYS = (
    Key("channels", "num_channels", 3),
    Key("image", "image_size", 224),
    *sizes(depth=12, width=768, heads=12),
    Key("block.dropout", "hidden_dropout_prob", 0.0),
    Key("block.attention_dropout", "attention_probs_dropout_prob", 0.0),
)
_STEM: WeightNames = {
    "stem.project.weight": Rule(("embeddings.patch_embeddings.projection.weight",), "patches"),
    "stem.project.bias": "embeddings.patch_embeddings.projection.bias",
}
_QKV = "attention.attention.{query,key,value}"
VIT_BLOCK = block(
    attention=(_QKV, "attention.output.dense", "layernorm_before"),
    network=("intermediate.dense", "output.dense", "layernorm_after"),
)


def _vit_weights(tokens: tuple[str, ...], block: WeightNames) -> WeightNames:
    return {
        "tokens.weight": Rule(tuple(f"embeddings.{name}" for name in tokens), "row"),
        "position.table.weight": Rule(("embeddings.position_embeddings",), "row"),
        **_STEM,
        **within("blocks.{}.", "encoder.layer.{}.", block),
        "norm": "layernorm",
    }


def _canonical_vit(config: ViTConfig) -> ViTConfig:
    """Leave out how to pool for a head that is not there."""
    return replace(config, pool="first") if config.tokens and not config.labels else config


def _vit(
    model_type: str,
    architectures: dict[str, Architecture],
    *tokens: str,
    prefix: str = "vit.",
    ignored: str,
) -> Format:
    return Format(
        model_type,
        "vit",
        architectures,
        (
            *_VIT_KEYS,
            Key("patch", "patch_size", 16),
            Key("block.ffn_width", "intermediate_size", 3072),
            activation("hidden_act", "gelu"),
            Key("block.norm_eps", "layer_norm_eps", 1e-12),
        ),
        _vit_weights(tokens, VIT_BLOCK),
        config={"tokens": len(tokens)},
        fixed={"qkv_bias": True},
        prefix=prefix,
        ignored=(ignored, r"mask_token$"),
        harmless=_HARMLESS,
        prepare=square_sizes,
        canonical=_canonical_vit,
        inputs="images",
    )


_VIT = _vit(
    "vit",
    {"ViTForImageClassification": _classifier(pool="first"), "ViTModel": _base(pool="first")},
    "cls_token",
    ignored=r"^(vit\.)?pooler\.",
)
_DEIT = _vit(
    "deit",
    {
        "DeiTForImageClassification": _classifier(pool="first"),
        "DeiTForImageClassificationWithTeacher": _classifier(
            {"head.label": "cls_classifier", "head.teacher": "distillation_classifier"},
            pool="both",
        ),
        "DeiTModel": _base(pool="first"),
    },
    "cls_token",
    "distillation_token",
    prefix="deit.",
    ignored=r"^(deit\.)?pooler\.",
)
# of one that was pretrained we take what is kept, the encoder; mae.py reads its decoder
VIT_MAE = _vit(
    "vit_mae",
    {
        "ViTMAEModel": _base(pool="first"),
        "ViTMAEForPreTraining": _base(base=False, pool="first"),
    },
    "cls_token",
    ignored=r"^decoder\.",
)

# ---- DINOv2, a ViT whose sublayers are scaled channel by channel

_MAX_RATIO = 64


def _inner_width(width: int, ratio: float, gated: bool) -> int:
    """Return how wide the network is: gated, two thirds of that, up to a multiple of 8."""
    inner = int(width * ratio)
    return (int(inner * 2 / 3) + 7) // 8 * 8 if gated else inner


def _read_dinov2_network(theirs: Theirs) -> dict[str, Any]:
    ratio, width = positive(theirs, "mlp_ratio", 4), positive(theirs, "hidden_size", 768)
    gated = theirs.get("use_swiglu_ffn", False) is True
    act = lookup("hidden_act", str(theirs.get("hidden_act", "gelu")), ACTIVATIONS)
    return {
        "block.ffn_width": _inner_width(int(width), ratio, gated),
        "block.feed_forward": "swiglu" if gated else act,
        "block.attention_bias": "same" if theirs.get("qkv_bias", True) else "out",
    }


def _write_dinov2_network(config: ViTConfig) -> dict[str, Any]:
    block, names = config.block, {ours: name for name, ours in reversed(ACTIVATIONS.items())}
    gated = block.feed_forward == "swiglu"
    if not gated and block.feed_forward not in names:
        raise UsageError(f"feed_forward='{block.feed_forward}'")
    ratios = range(1, _MAX_RATIO + 1)
    fitting = [n for n in ratios if _inner_width(block.width, n, gated) == block.ffn_width]
    if not fitting:
        raise UsageError(f"ffn_width={block.ffn_width}, which no whole mlp_ratio gives")
    return {
        "mlp_ratio": fitting[0],
        "use_swiglu_ffn": gated,
        "hidden_act": names.get(block.feed_forward, "gelu"),
        "qkv_bias": block.attention_bias == "same",
        "use_mask_token": False,  # which only training has a use for
    }


def _gated(gated: Rule, plain: str) -> Any:
    """Name a part of the network, whose first two products are one where it is gated."""
    return lambda config: gated if config.block.feed_forward == "swiglu" else Rule((plain,))


_DINOV2 = Format(
    "dinov2",
    "vit",
    {
        "Dinov2ForImageClassification": _classifier(pool="first_mean"),
        "Dinov2Model": _base(pool="first"),
    },
    (
        *_VIT_KEYS,
        Key("patch", "patch_size", 14),
        Key("block.norm_eps", "layer_norm_eps", 1e-6),
        Key("drop_path", "drop_path_rate", 0.0),
        KeyGroup(_read_dinov2_network, _write_dinov2_network),
    ),
    _vit_weights(
        ("cls_token",),
        {
            **block(
                attention=(_QKV, "attention.output.dense", "norm1"),
                network=("mlp.fc1", "mlp.fc2", "norm2"),
            ),
            "around_attention.scale": "layer_scale1.lambda1",
            "around_feed_forward.scale": "layer_scale2.lambda1",
            "feed_forward.gate": half("mlp.weights_in", 0),
            "feed_forward.inner": _gated(half("mlp.weights_in", 1), "mlp.fc1"),
            "feed_forward.outer": _gated(Rule(("mlp.weights_out",)), "mlp.fc2"),
        },
    ),
    config={"block.order": "scaled"},
    prefix="dinov2.",
    ignored=(r"mask_token$",),
    harmless=_HARMLESS,
    prepare=square_sizes,
    canonical=lambda config: config if config.labels else replace(config, pool="first"),
    inputs="images",
)

# ---- ResNet


def _convolution(ours: str, theirs: str) -> WeightNames:
    """Name the weights of a convolution and its batch norm."""
    return {
        f"{ours}.convolution": f"{theirs}.convolution",
        f"{ours}.norm": f"{theirs}.normalization",
    }


def _canonical_resnet(config: ResNetConfig) -> ResNetConfig:
    """Leave out what only attention reads, if there is none; it fits any image."""
    if any(config.attention):
        return config
    plain = ResNetConfig()
    names = ("image", "attention", "head_width", "ffn_times", "position")
    return replace(config, **{name: getattr(plain, name) for name in names})


_RESNET = Format(
    "resnet",
    "resnet",
    {
        "ResNetForImageClassification": _classifier({"head": "classifier.1"}),
        "ResNetModel": _base(),
    },
    (
        Key("channels", "num_channels", 3),
        Key("stem_width", "embedding_size", 64),
        Key("widths", "hidden_sizes", (256, 512, 1024, 2048)),
        Key("depths", "depths", (3, 4, 6, 3)),
        Key("kind", "layer_type", "bottleneck"),
    ),
    {
        **_convolution("stem.first", "embedder.embedder"),
        **_convolution("stages.{}.{}.short", "encoder.stages.{}.layers.{}.shortcut"),
        **_convolution("stages.{}.{}.layers.{}", "encoder.stages.{}.layers.{}.layer.{}"),
    },
    fixed={
        "hidden_act": "relu",
        "downsample_in_first_stage": False,
        "downsample_in_bottleneck": False,
    },
    prefix="resnet.",
    ignored=(r"num_batches_tracked$",),
    harmless=_HARMLESS,
    prepare=without_nulls,
    canonical=_canonical_resnet,
    inputs="images",
)

# ---- Swin and Swin V2; of one that was trained on masked images only the encoder is read


def _doubled(config: SwinConfig) -> tuple[int, ...]:
    """Return the heads of the stages, twice as many in each as before."""
    return tuple(config.block.heads << n for n in range(len(config.depths)))


def _canonical_swin(config: SwinConfig) -> SwinConfig:
    """Return the config of the same model, without what is as it would be anyway."""
    return replace(
        config,
        window=side(config),
        heads=() if config.heads == _doubled(config) else config.heads,
        trained=config.trained if any(config.trained) else (),
    )


def _read_stages(theirs: Theirs) -> dict[str, Any]:
    """Read the heads of the first stage and the widths of the networks."""
    heads, depths = theirs.get("num_heads", [3]), theirs.get("depths", [2, 2, 6, 2])
    if not heads:
        raise UsageError("num_heads is empty; expected a number for each stage")
    if theirs.get("window_size", 7) == 0:
        raise UsageError("window_size=0; expected at least 1")
    ratio, width = positive(theirs, "mlp_ratio", 4.0), theirs.get("embed_dim", 96)
    if ratio > 1024:
        raise UsageError(f"mlp_ratio={ratio} is not supported; expected a small number")
    if not isinstance(heads, list) or not isinstance(depths, list) or type(width) is not int:
        return {}  # which their own keys refuse
    ffn_width = int(ratio * width)
    if any(int(ratio * (width << n)) != ffn_width << n for n in range(len(depths))):
        raise UsageError(
            f"mlp_ratio={ratio} is not supported; only a whole number of {width}ths is"
        )
    return {"block.heads": heads[0], "block.ffn_width": max(1, ffn_width)}


def _write_stages(config: SwinConfig) -> dict[str, Any]:
    block = config.block
    ratio = block.ffn_width / block.width
    if int(ratio * block.width) < block.ffn_width:  # they cut off what is after the point
        ratio = math.nextafter(ratio, math.inf)
    return {"mlp_ratio": ratio, "window_size": side(config)}


_SWIN_KEYS = (
    Key("channels", "num_channels", 3),
    Key("image", "image_size", 224),
    Key("patch", "patch_size", 4),
    Key("depths", "depths", (2, 2, 6, 2)),
    Key("heads", "num_heads", (3, 6, 12, 24), value=lambda c: c.heads or _doubled(c)),
    Key("window", "window_size", 7),
    Key("drop_path", "drop_path_rate", 0.1),
    Key("block.width", "embed_dim", 96),
    activation("hidden_act", "gelu"),
    Key("block.norm_eps", "layer_norm_eps", 1e-5),
    Key("block.dropout", "hidden_dropout_prob", 0.0),
    Key("block.attention_dropout", "attention_probs_dropout_prob", 0.0),
    KeyGroup(_read_stages, _write_stages),
)


def _swin_weights(biased: str, own: WeightNames) -> WeightNames:
    """Name all weights; `own` are those of attention that only one of the two has."""
    inside: WeightNames = {
        "qkv.weight": each("{query,key,value}.weight"),
        "qkv.bias": each(biased),
        **own,
    }
    names: WeightNames = {
        **VIT_BLOCK,
        **within("attention.inside.", "attention.self.", inside),
        "attention.inside.out": "attention.output.dense",
    }
    return {
        **_STEM,
        "stem_norm": "embeddings.norm",
        **within("stages.{}.blocks.{}.", "encoder.layers.{}.blocks.{}.", names),
        "stages.{}.merge.norm": "encoder.layers.{}.downsample.norm",
        "stages.{}.merge.reduce": "encoder.layers.{}.downsample.reduction",
        "norm": "layernorm",
    }


def _swin_architectures(name: str) -> dict[str, Architecture]:
    return {
        f"{name}ForImageClassification": _classifier(),
        f"{name}Model": _base(),
        f"{name}ForMaskedImageModeling": _base(base=False),
    }


_SWIN = Format(
    "swin",
    "swin",
    _swin_architectures("Swin"),
    _SWIN_KEYS,
    _swin_weights("{query,key,value}.bias", {"position.table": "relative_position_bias_table"}),
    fixed={"qkv_bias": True, "use_absolute_embeddings": False},
    prefix="swin.",
    ignored=(
        r"relative_(position_index|coords_table)$",
        r"embeddings\.mask_token$",
        r"^decoder\.",
    ),
    harmless=_HARMLESS,
    prepare=square_sizes,
    canonical=_canonical_swin,
    inputs="images",
)
_SWINV2 = replace(
    _SWIN,
    model_type="swinv2",
    architectures=_swin_architectures("Swinv2"),
    keys=(
        *_SWIN_KEYS,
        Key(
            "trained",
            "pretrained_window_sizes",
            (0, 0, 0, 0),
            value=lambda config: config.trained or (0,) * len(config.depths),
        ),
    ),
    weights=_swin_weights(
        "{query,value}.bias",
        {
            "score.factor": "logit_scale",
            "position.inner": "continuous_position_bias_mlp.0",
            "position.outer": "continuous_position_bias_mlp.2",
        },
    ),
    config={
        "fit": "image",
        "position": "continuous",
        "key_bias": False,
        "merge": "norm_last",
        "block.order": "res_post",
        "block.score": "cosine_learned",
    },
    prefix="swinv2.",
)

FORMATS = (_DINOV2, _VIT, _DEIT, VIT_MAE, _RESNET, _SWIN, _SWINV2)
