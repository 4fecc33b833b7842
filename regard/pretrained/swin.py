"""Swin and Swin V2 of transformers.

Of a model that was trained to fill in what is masked, only the encoder is read.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from regard.errors import UsageError
from regard.models.swin import SwinConfig, side
from regard.pretrained.gpt import PLAIN
from regard.pretrained.load import read_keys, write_keys
from regard.pretrained.tables import Format, Key, Rule, linear
from regard.pretrained.vision import COUNT, HARMLESS, told

Words = Mapping[str, Any]


@dataclass(frozen=True)
class Dialect:
    """How the two of them differ."""

    name: str  # with which their classes begin
    prefix: str
    parts: Words  # what our config always has
    keys: tuple[Key, ...]
    biased: tuple[str, ...]  # which projections have a bias
    own: Mapping[str, str]  # weights of the attention that only it has, ours -> theirs


DIALECTS = {
    "swin": Dialect(
        "Swin",
        "swin.",
        {},
        (),
        ("query", "key", "value"),
        {"position.table": "relative_position_bias_table"},
    ),
    "swinv2": Dialect(
        "Swinv2",
        "swinv2.",
        {
            "fit": "image",
            "position": "continuous",
            "key_bias": False,
            "merge": "norm_last",
            "block.order": "res_post",
            "block.score": "cosine_learned",
        },
        (Key("trained", "pretrained_window_sizes", ()),),
        ("query", "value"),
        {
            "score.factor": "logit_scale",
            "position.inner.weight": "continuous_position_bias_mlp.0.weight",
            "position.inner.bias": "continuous_position_bias_mlp.0.bias",
            "position.outer.weight": "continuous_position_bias_mlp.2.weight",
        },
    ),
}
# the end of their class's name -> our task; only the first of them has a head
TASKS = {
    "ForImageClassification": "images",
    "Model": "pretrain",
    "ForMaskedImageModeling": "pretrain",
}
LABELS = "ForImageClassification"

KEYS = (
    Key("channels", "num_channels", 3),
    Key("image", "image_size", 224),
    Key("patch", "patch_size", 4),
    Key("depths", "depths", (2, 2, 6, 2)),
    Key("heads", "num_heads", (3, 6, 12, 24)),
    Key("window", "window_size", 7),
    Key("drop_path", "drop_path_rate", 0.1),
    Key("block.width", "embed_dim", 96),
    Key("block.feed_forward", "hidden_act", "gelu", PLAIN),
    Key("block.norm_eps", "layer_norm_eps", 1e-5),
    Key("block.dropout", "hidden_dropout_prob", 0.0),
    Key("block.attention_dropout", "attention_probs_dropout_prob", 0.0),
)
FIXED = {"qkv_bias": True, "use_absolute_embeddings": False}


def _plain(config: SwinConfig) -> SwinConfig:
    """Say the same in the plainest words: nothing that is as it would be anyway."""
    heads = tuple(config.block.heads << n for n in range(len(config.depths)))
    return replace(
        config,
        window=side(config),
        heads=() if config.heads == heads else config.heads,
        trained=config.trained if any(config.trained) else (),
    )


def _read(dialect: Dialect, theirs: Words, architecture: str) -> SwinConfig:
    """Return our config for one of theirs."""
    theirs = told(theirs)
    labelled = architecture == dialect.name + LABELS
    keys = (*KEYS, *dialect.keys, *((COUNT,) if labelled else ()))
    parts = {**dialect.parts, **({} if labelled else {"labels": 0})}
    config = read_keys(SwinConfig, theirs, keys, parts, FIXED)
    if not config.heads:
        raise UsageError("num_heads is empty; expected a number for each stage")
    if not config.window:
        raise UsageError("window_size=0; expected at least 1")
    ratio = theirs.get("mlp_ratio", 4.0)
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio <= 1024:
        raise UsageError(f"mlp_ratio={str(ratio)[:40]} is not supported; expected a small number")
    width = config.block.width
    ffn_width = int(ratio * width)
    if any(int(ratio * (width << n)) != ffn_width << n for n in range(len(config.depths))):
        raise UsageError(
            f"mlp_ratio={ratio} is not supported; only a whole number of {width}ths is"
        )
    # pretraining's windows are listed for four stages even where there are fewer
    trained = config.trained if any(config.trained) else ()
    block = replace(config.block, heads=config.heads[0], ffn_width=max(1, ffn_width))
    return _plain(replace(config, block=block, trained=trained))


def _write(dialect: Dialect, model_type: str, config: SwinConfig, task: str) -> dict[str, Any]:
    """Return their config for one of ours."""
    if config.block.feed_forward not in PLAIN.values():
        raise UsageError(f"{model_type} has no feed_forward '{config.block.feed_forward}'")
    config, stages = _plain(config), len(config.depths)
    heads = config.heads or tuple(config.block.heads << n for n in range(stages))
    config = replace(config, heads=heads, trained=config.trained or (0,) * stages)
    end = next(end for end, ours in TASKS.items() if ours == task)
    keys = (*KEYS, *dialect.keys, *((COUNT,) if end == LABELS else ()))
    first = {"model_type": model_type, "architectures": [dialect.name + end]}
    theirs = write_keys(config, keys, {**first, **FIXED})
    ratio = config.block.ffn_width / config.block.width
    if int(ratio * config.block.width) < config.block.ffn_width:  # they cut off what is after it
        ratio = math.nextafter(ratio, math.inf)
    theirs = {key: list(x) if isinstance(x, tuple) else x for key, x in theirs.items()}
    return theirs | {"mlp_ratio": ratio}


def _rules(dialect: Dialect, config: SwinConfig, architecture: str) -> list[Rule]:
    """Name all weights."""
    base = "" if architecture == f"{dialect.name}Model" else dialect.prefix
    stem = f"{base}embeddings.patch_embeddings.projection"
    rules = [
        Rule("stem.project.weight", (f"{stem}.weight",), "patches"),
        Rule("stem.project.bias", (f"{stem}.bias",)),
        *linear("stem_norm", f"{base}embeddings.norm"),
        *linear("norm", f"{base}layernorm"),
        *linear("head", "classifier"),
    ]
    for stage, depth in enumerate(config.depths):
        there = f"{base}encoder.layers.{stage}"
        rules += linear(f"stages.{stage}.merge.norm", f"{there}.downsample.norm")
        rules += linear(f"stages.{stage}.merge.reduce", f"{there}.downsample.reduction", bias=False)
        for number in range(depth):
            ours = f"stages.{stage}.blocks.{number}"
            rules += _block(dialect, ours, f"{there}.blocks.{number}")
    return rules


def _block(dialect: Dialect, ours: str, theirs: str) -> list[Rule]:
    """Name the weights of a block."""
    inside, own = f"{ours}.attention.inside", f"{theirs}.attention.self"
    trio = tuple(f"{own}.{name}.weight" for name in ("query", "key", "value"))
    return [
        Rule(f"{inside}.qkv.weight", trio),
        Rule(f"{inside}.qkv.bias", tuple(f"{own}.{name}.bias" for name in dialect.biased)),
        *(Rule(f"{inside}.{part}", (f"{own}.{name}",)) for part, name in dialect.own.items()),
        *linear(f"{inside}.out", f"{theirs}.attention.output.dense"),
        *linear(f"{ours}.around_attention.norm", f"{theirs}.layernorm_before"),
        *linear(f"{ours}.feed_forward.inner", f"{theirs}.intermediate.dense"),
        *linear(f"{ours}.feed_forward.outer", f"{theirs}.output.dense"),
        *linear(f"{ours}.around_feed_forward.norm", f"{theirs}.layernorm_after"),
    ]


FORMATS = {
    model_type: Format(
        model_type,
        {dialect.name + end: task for end, task in TASKS.items()},
        "swin",
        partial(_read, dialect),
        partial(_write, dialect, model_type),
        partial(_rules, dialect),
        ignored=(
            r"relative_(position_index|coords_table)$",
            r"embeddings\.mask_token$",
            r"^decoder\.",
        ),
        prefix=dialect.prefix,
        settle=_plain,
        reads="images",
        harmless=HARMLESS,
    )
    for model_type, dialect in DIALECTS.items()
}
