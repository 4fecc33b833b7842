"""DINOv2 as transformers writes it: a ViT whose sublayers are scaled channel by channel."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from regard.errors import UsageError, lookup
from regard.models.vit import ViTConfig
from regard.pretrained.gpt import PLAIN
from regard.pretrained.load import read_keys, write_keys
from regard.pretrained.tables import Format, Key, Rule, linear
from regard.pretrained.vision import COUNT, HARMLESS, KEYS, told

TASKS = {"Dinov2ForImageClassification": "images", "Dinov2Model": "pretrain"}
USUAL = {"image": 224, "patch": 14, "block.norm_eps": 1e-6}
DINO_KEYS = (
    *(
        replace(key, default=USUAL.get(key.ours, key.default))
        for key in KEYS
        if key.ours not in ("block.ffn_width", "block.feed_forward")
    ),
    Key("drop_path", "drop_path_rate", 0.0),
)
MOST_RATIO = 64


def inner_width(width: int, ratio: float, gated: bool) -> int:
    """Return how wide the network is: gated, two thirds of that, up to a multiple of 8."""
    inner = int(width * ratio)
    return (int(inner * 2 / 3) + 7) // 8 * 8 if gated else inner


def _read(theirs: Mapping[str, Any], architecture: str) -> ViTConfig:
    """Return our config for a Dinov2Config."""
    theirs = told(theirs)
    ratio, width = theirs.get("mlp_ratio", 4), theirs.get("hidden_size", 768)
    for key, value in (("mlp_ratio", ratio), ("hidden_size", width)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 2**20:
            raise UsageError(f"{key}={str(value)[:40]} is not a number above 0")
    gated = theirs.get("use_swiglu_ffn", False) is True
    act = str(theirs.get("hidden_act", "gelu"))
    top = architecture != "Dinov2Model"
    parts = {
        "block.order": "scaled",
        "block.ffn_width": inner_width(int(width), ratio, gated),
        "block.feed_forward": "swiglu" if gated else lookup("hidden_act", act, PLAIN),
        "block.attention_bias": "same" if theirs.get("qkv_bias", True) else "out",
        "pool": "first_mean" if top else "first",
    }
    keys = (*DINO_KEYS, COUNT) if top else DINO_KEYS
    parts |= {} if top else {"labels": 0}
    return read_keys(ViTConfig, theirs, keys, parts, {"model_type": "dinov2"})


def _write(config: ViTConfig, task: str) -> dict[str, Any]:
    """Return the Dinov2Config for one of ours."""
    block, names = config.block, {ours: name for name, ours in reversed(PLAIN.items())}
    gated = block.feed_forward == "swiglu"
    if not gated and block.feed_forward not in names:
        raise UsageError(f"feed_forward='{block.feed_forward}'")
    ratios = range(1, MOST_RATIO + 1)
    found = [n for n in ratios if inner_width(block.width, n, gated) == block.ffn_width]
    if not found:
        raise UsageError(f"ffn_width={block.ffn_width}, which no whole mlp_ratio gives")
    keys = (*DINO_KEYS, COUNT) if config.labels else DINO_KEYS
    return write_keys(config, keys, {"model_type": "dinov2"}) | {
        "mlp_ratio": found[0],
        "use_swiglu_ffn": gated,
        "hidden_act": names.get(block.feed_forward, "gelu"),
        "qkv_bias": block.attention_bias == "same",
        "use_mask_token": False,  # which only learning has a use for
    }


def _rules(config: ViTConfig, architecture: str) -> list[Rule]:
    """Name all weights; a gated network's first two matrices are one."""
    base = "" if architecture == "Dinov2Model" else "dinov2."
    layer, patches = base + "encoder.layer.{}", f"{base}embeddings.patch_embeddings.projection"
    qkv = [f"{layer}.attention.attention.{part}" for part in ("query", "key", "value")]
    rules = [
        Rule("tokens.weight", (f"{base}embeddings.cls_token",), "row"),
        Rule("position.table.weight", (f"{base}embeddings.position_embeddings",), "row"),
        Rule("stem.project.weight", (f"{patches}.weight",), "patches"),
        Rule("stem.project.bias", (f"{patches}.bias",)),
        *linear("blocks.{}.attention.qkv", *qkv),
        *linear("blocks.{}.attention.out", f"{layer}.attention.output.dense"),
        *linear("norm", f"{base}layernorm"),
        *linear("head", "classifier"),
    ]
    for number, part in enumerate(("attention", "feed_forward"), 1):
        scale = f"{layer}.layer_scale{number}.lambda1"
        rules.append(Rule(f"blocks.{{}}.around_{part}.scale", (scale,)))
        rules += linear(f"blocks.{{}}.around_{part}.norm", f"{layer}.norm{number}")
    if config.block.feed_forward == "swiglu":
        for number, part in enumerate(("gate", "inner")):
            joined = f"{layer}.mlp.weights_in"
            rules += linear(f"blocks.{{}}.feed_forward.{part}", joined, part=(number, 2))
        return rules + linear("blocks.{}.feed_forward.outer", f"{layer}.mlp.weights_out")
    rules += linear("blocks.{}.feed_forward.inner", f"{layer}.mlp.fc1")
    return rules + linear("blocks.{}.feed_forward.outer", f"{layer}.mlp.fc2")


def _settle(config: ViTConfig) -> ViTConfig:
    """Return a config without what nothing depends on: how to pool for a head that is not there."""
    return replace(config, pool="first") if not config.labels else config


FORMATS = {
    "dinov2": Format(
        "dinov2",
        TASKS,
        "vit",
        _read,
        _write,
        _rules,
        ignored=(r"mask_token$",),
        prefix="dinov2.",
        settle=_settle,
        holds=lambda config, name: (name == "Dinov2Model") == (not config.labels),
        reads="images",
        harmless=HARMLESS,
    )
}
