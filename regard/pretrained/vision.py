"""The image models of transformers: ViT, DeiT, the encoder of ViT-MAE, and ResNet."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from regard.errors import UsageError, lookup
from regard.models.resnet import ResNetConfig
from regard.models.vit import ViTConfig
from regard.pretrained.gpt import PLAIN
from regard.pretrained.load import read_keys, write_keys
from regard.pretrained.parts import read_object
from regard.pretrained.tables import Format, Key, Rule, linear

Words = Mapping[str, Any]

# what stands on top of one of their classes -> our task, our pool, our head and theirs
LABELS, TWICE, NOTHING = "labels", "twice", "nothing"
TASKS = {LABELS: "images", TWICE: "images", NOTHING: "pretrain"}
POOLS = {LABELS: "first", TWICE: "both", NOTHING: "first"}
HEADS: dict[str, dict[str, str]] = {
    LABELS: {"head": "classifier"},
    TWICE: {"head.label": "cls_classifier", "head.teacher": "distillation_classifier"},
    NOTHING: {},
}


@dataclass(frozen=True)
class Dialect:
    """How one of these families says what all of them say."""

    prefix: str
    tops: Mapping[str, str]  # their class -> what stands on top
    tokens: tuple[str, ...]  # before the patches
    ignored: str  # weights that we have no use for


DIALECTS = {
    "vit": Dialect(
        "vit.",
        {"ViTForImageClassification": LABELS, "ViTModel": NOTHING},
        ("cls_token",),
        r"^(vit\.)?pooler\.",
    ),
    "deit": Dialect(
        "deit.",
        {
            "DeiTForImageClassification": LABELS,
            "DeiTForImageClassificationWithTeacher": TWICE,
            "DeiTModel": NOTHING,
        },
        ("cls_token", "distillation_token"),
        r"^(deit\.)?pooler\.",
    ),
    # of one that was pretrained we take what is kept, the encoder
    "vit_mae": Dialect(
        "vit.",
        {"ViTMAEModel": NOTHING, "ViTMAEForPreTraining": NOTHING},
        ("cls_token",),
        r"^decoder\.",
    ),
}

KEYS = (
    Key("channels", "num_channels", 3),
    Key("image", "image_size", 224),
    Key("patch", "patch_size", 16),
    Key("depth", "num_hidden_layers", 12),
    Key("block.width", "hidden_size", 768),
    Key("block.heads", "num_attention_heads", 12),
    Key("block.ffn_width", "intermediate_size", 3072),
    Key("block.feed_forward", "hidden_act", "gelu", PLAIN),
    Key("block.norm_eps", "layer_norm_eps", 1e-12),
    Key("block.dropout", "hidden_dropout_prob", 0.0),
    Key("block.attention_dropout", "attention_probs_dropout_prob", 0.0),
)
FIXED = {"qkv_bias": True}
HARMLESS = (
    *("encoder_stride", "pooler_output_size", "pooler_act", "mask_ratio", "norm_pix_loss"),
    *("decoder_num_attention_heads", "decoder_hidden_size", "decoder_num_hidden_layers"),
    *("decoder_intermediate_size", "out_features", "out_indices", "stage_names"),
    *("drop_path_rate", "image_size", "num_layers", "hidden_size", "path_norm"),
    *("apply_layernorm", "reshape_hidden_states", "layerscale_value"),
)
COUNT = Key("labels", "num_labels", 2)

_LAYER = "~encoder.layer.{}"
NAMES: dict[str, str | tuple[str, ...]] = {
    "blocks.{}.attention.qkv": tuple(
        f"{_LAYER}.attention.attention.{part}" for part in ("query", "key", "value")
    ),
    "blocks.{}.attention.out": f"{_LAYER}.attention.output.dense",
    "blocks.{}.around_attention.norm": f"{_LAYER}.layernorm_before",
    "blocks.{}.feed_forward.inner": f"{_LAYER}.intermediate.dense",
    "blocks.{}.feed_forward.outer": f"{_LAYER}.output.dense",
    "blocks.{}.around_feed_forward.norm": f"{_LAYER}.layernorm_after",
    "norm": "~layernorm",
}


def told(theirs: Words) -> dict[str, Any]:
    """Return their config without what says nothing, its labels counted, square sizes as one."""
    theirs = {key: value for key, value in theirs.items() if value is not None}
    if isinstance(names := theirs.get("id2label"), Mapping):
        theirs["num_labels"] = len(names)
    for key in ("image_size", "patch_size"):
        if isinstance(sides := theirs.get(key), list):
            if len(sides) != 2 or sides[0] != sides[1]:
                raise UsageError(f"{key}={str(sides)[:40]} is not supported; only squares are")
            theirs[key] = sides[0]
    if "hidden_act" in theirs:
        lookup("hidden_act", str(theirs["hidden_act"]), PLAIN)
    return theirs


def _read(dialect: Dialect, theirs: Words, architecture: str) -> ViTConfig:
    """Return our config for one of theirs."""
    top = dialect.tops[architecture]
    parts: dict[str, Any] = {"tokens": len(dialect.tokens), "pool": POOLS[top]}
    keys = KEYS if top == NOTHING else (*KEYS, COUNT)
    parts |= {"labels": 0} if top == NOTHING else {}
    return read_keys(ViTConfig, told(theirs), keys, parts, FIXED)


def _write(model_type: str, config: ViTConfig, task: str) -> dict[str, Any]:
    """Return their config for one of ours."""
    if config.block.feed_forward not in PLAIN.values():
        raise UsageError(f"{model_type} has no feed_forward '{config.block.feed_forward}'")
    keys = (*KEYS, COUNT) if config.labels else KEYS
    return write_keys(config, keys, {"model_type": model_type, **FIXED})


def _rules(dialect: Dialect, config: ViTConfig, architecture: str) -> list[Rule]:
    """Name all weights."""
    top = dialect.tops[architecture]
    base = "" if architecture.endswith("Model") else dialect.prefix
    embeddings = f"{base}embeddings"
    tokens = tuple(f"{embeddings}.{name}" for name in dialect.tokens)
    patches = f"{embeddings}.patch_embeddings.projection"
    rules = [
        Rule("tokens.weight", tokens, "row"),
        Rule("position.table.weight", (f"{embeddings}.position_embeddings",), "row"),
        Rule("stem.project.weight", (f"{patches}.weight",), "patches"),
        Rule("stem.project.bias", (f"{patches}.bias",)),
    ]
    for ours, theirs in {**NAMES, **HEADS[top]}.items():
        names = theirs if isinstance(theirs, tuple) else (theirs,)
        rules += linear(ours, *(name.replace("~", base) for name in names))
    return rules


def _settle(config: ViTConfig) -> ViTConfig:
    """Return a config without what nothing depends on: how to pool for a head that is not there."""
    return replace(config, pool="first") if config.tokens and not config.labels else config


def _holds(dialect: Dialect, config: ViTConfig, architecture: str) -> bool:
    """Tell whether a class of theirs has as many heads as one of our models."""
    return (dialect.tops[architecture] == TWICE) == (config.pool == "both")


FORMATS = {
    model_type: Format(
        model_type,
        {name: TASKS[top] for name, top in dialect.tops.items()},
        "vit",
        partial(_read, dialect),
        partial(_write, model_type),
        partial(_rules, dialect),
        ignored=(dialect.ignored, r"mask_token$"),
        prefix=dialect.prefix,
        settle=_settle,
        holds=partial(_holds, dialect),
        reads="images",
        harmless=HARMLESS,
    )
    for model_type, dialect in DIALECTS.items()
}

# ---- ResNet

RESNET = {"ResNetForImageClassification": LABELS, "ResNetModel": NOTHING}
RESNET_KEYS = (
    Key("channels", "num_channels", 3),
    Key("stem_width", "embedding_size", 64),
    Key("widths", "hidden_sizes", (256, 512, 1024, 2048)),
    Key("depths", "depths", (3, 4, 6, 3)),
    Key("kind", "layer_type", "bottleneck"),
)
RESNET_FIXED = {
    "hidden_act": "relu",
    "downsample_in_first_stage": False,
    "downsample_in_bottleneck": False,
}


def _read_resnet(theirs: Words, architecture: str) -> ResNetConfig:
    """Return our config for one of theirs."""
    top = RESNET[architecture]
    keys = RESNET_KEYS if top == NOTHING else (*RESNET_KEYS, COUNT)
    parts = {"labels": 0} if top == NOTHING else {}
    return read_keys(ResNetConfig, told(theirs), keys, parts, RESNET_FIXED)


def _write_resnet(config: ResNetConfig, task: str) -> dict[str, Any]:
    """Return their config for one of ours."""
    keys = (*RESNET_KEYS, COUNT) if config.labels else RESNET_KEYS
    theirs = write_keys(config, keys, {"model_type": "resnet", **RESNET_FIXED})
    return {
        key: list(value) if isinstance(value, tuple) else value for key, value in theirs.items()
    }


def _convolution(ours: str, theirs: str) -> list[Rule]:
    """Name the weights of a convolution and its norm."""
    rules = [Rule(f"{ours}.convolution.weight", (f"{theirs}.convolution.weight",))]
    return rules + [
        Rule(f"{ours}.norm.{name}", (f"{theirs}.normalization.{name}",))
        for name in ("weight", "bias", "running_mean", "running_var")
    ]


def _rules_resnet(config: ResNetConfig, architecture: str) -> list[Rule]:
    """Name all weights."""
    base = "" if architecture == "ResNetModel" else "resnet."
    rules = _convolution("stem.first", f"{base}embedder.embedder")
    for stage, depth in enumerate(config.depths):
        for block in range(depth):
            ours, theirs = f"stages.{stage}.{block}", f"{base}encoder.stages.{stage}.layers.{block}"
            rules += _convolution(f"{ours}.short", f"{theirs}.shortcut")
            for layer in range(3):
                rules += _convolution(f"{ours}.layers.{layer}", f"{theirs}.layer.{layer}")
    return rules + linear("head", "classifier.1")


def _settle_resnet(config: ResNetConfig) -> ResNetConfig:
    """Return a config without what only attention reads, if there is none; it fits any image."""
    if any(config.attention):
        return config
    plain = ResNetConfig()
    names = ("image", "attention", "head_width", "ffn_times", "position")
    return replace(config, **{name: getattr(plain, name) for name in names})


FORMATS["resnet"] = Format(
    "resnet",
    {name: TASKS[top] for name, top in RESNET.items()},
    "resnet",
    _read_resnet,
    _write_resnet,
    _rules_resnet,
    ignored=(r"num_batches_tracked$",),
    prefix="resnet.",
    settle=_settle_resnet,
    reads="images",
    harmless=HARMLESS,
)

# ---- how images are prepared

PREPARED = "preprocessor_config.json"
# Pillow's numbers of the ways to resize
RESAMPLES = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
MOST_SIZE = 4096


def read_prepared(folder: str | Path, image: int, channels: int) -> dict[str, Any]:
    """Return how a public checkpoint wants its images, in our words.

    A model without such a file was made for images of a size, with numbers from -1 to 1.
    """
    path = Path(folder) / PREPARED
    theirs = read_object(path) if path.is_file() else {}
    rescale = theirs.get("rescale_factor", 1 / 255)
    if theirs.get("do_rescale", True) is not True or not _near(rescale, 1 / 255):
        raise UsageError(
            f"{path}: rescale_factor={str(rescale)[:40]} is not supported; only 1/255 is"
        )
    facts: dict[str, Any] = {"size": image, "channels": channels, "fit": "stretch"}
    size = theirs.get("size")
    if theirs.get("do_center_crop") is True:
        square = isinstance(size, Mapping) and "shortest_edge" not in size
        if size is not None:  # the middle is cut out of what it was brought to
            facts["edge"] = _side(size, path)
        size = theirs.get("crop_size", size)
        facts["fit"] = "stretch" if square else "crop"
    elif isinstance(size, Mapping) and "shortest_edge" in size:
        facts["fit"] = "crop"
    if size is not None and theirs.get("do_resize", True) is not False:
        facts["size"] = _side(size, path)
    resample = 2 if theirs.get("resample") is None else theirs["resample"]
    if type(resample) is not int or resample not in RESAMPLES:
        known = ", ".join(f"{number} ({name})" for number, name in RESAMPLES.items())
        raise UsageError(
            f"{path}: resample={str(resample)[:40]} is not supported; known are {known}"
        )
    facts["resample"] = RESAMPLES[resample]
    if theirs.get("do_normalize", True) is not False:
        for ours, key in (("mean", "image_mean"), ("std", "image_std")):
            values = theirs.get(key, [0.5] * channels)
            values = values if isinstance(values, list) else [values] * channels
            numbers = [value for value in values if isinstance(value, int | float)]
            least = 0 if ours == "mean" else 1e-6
            if len(numbers) != channels or not all(least <= abs(x) <= 1000 for x in numbers):
                raise UsageError(f"{path}: {key}={str(values)[:60]}; expected {channels} numbers")
            facts[ours] = [float(number) for number in numbers]
    return facts


def _near(value: Any, right: float) -> bool:
    return isinstance(value, int | float) and abs(value) < 1 and abs(value - right) < 1e-6


def _side(size: Any, path: Path) -> int:
    """Return the side of the square to which images are brought."""
    if isinstance(size, Mapping):
        sides = [size[key] for key in ("height", "width", "shortest_edge") if key in size]
    else:
        sides = [size]
    side = sides[0] if sides else None
    if any(other != side for other in sides) or not isinstance(side, int) or isinstance(side, bool):
        raise UsageError(f"{path}: size={str(size)[:60]} is not supported; only squares are")
    if not 0 < side <= MOST_SIZE:
        raise UsageError(f"{path}: size={side}; expected 1 to {MOST_SIZE} pixels")
    return side


def write_prepared(image: Words) -> dict[str, Any]:
    """Return their words for how images are prepared."""
    side = image.get("size")
    square = {"height": side, "width": side}
    back = {ours: number for number, ours in RESAMPLES.items()}
    crop, edge = image.get("fit", "stretch") == "crop", image.get("edge") or side
    cut = crop or image.get("edge") is not None
    theirs: dict[str, Any] = {
        "image_processor_type": "BitImageProcessor" if cut else "ViTImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": edge} if crop else {"height": edge, "width": edge},
        "resample": back.get(str(image.get("resample")), 2),
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": bool(image.get("mean")),
    }
    if cut:
        theirs |= {"do_center_crop": True, "crop_size": square}
    if image.get("mean"):
        theirs |= {"image_mean": list(image["mean"]), "image_std": list(image["std"])}
    return theirs
