"""The decoder of transformers' ViT-MAE, which paints what is masked; its encoder is a ViT."""

import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import UsageError
from regard.models.folder import build_rest
from regard.models.masked import MAEConfig
from regard.models.vit import ViTConfig
from regard.pretrained.gpt import PLAIN
from regard.pretrained.load import find_format, read_keys, to_theirs, unlike, write_keys
from regard.pretrained.shards import open_weights
from regard.pretrained.tables import Format, Key, Rule, linear
from regard.pretrained.vision import told
from regard.weights import float_state

PAINTS = "ViTMAEForPreTraining"
OWN = (
    Key("mask_share", "mask_ratio", 0.75),
    Key("target", "norm_pix_loss", False, {False: "pixels", True: "normalised"}),
    Key("depth", "decoder_num_hidden_layers", 8),
    Key("block.width", "decoder_hidden_size", 512),
    Key("block.heads", "decoder_num_attention_heads", 16),
    Key("block.ffn_width", "decoder_intermediate_size", 2048),
)
# as in the encoder
SHARED = (
    Key("block.feed_forward", "hidden_act", "gelu", PLAIN),
    Key("block.norm_eps", "layer_norm_eps", 1e-12),
    Key("block.dropout", "hidden_dropout_prob", 0.0),
    Key("block.attention_dropout", "attention_probs_dropout_prob", 0.0),
)
LAYER = "decoder.decoder_layers.{}"
NAMES: dict[str, tuple[str, ...]] = {
    "enter": ("decoder.decoder_embed",),
    "blocks.{}.attention.qkv": tuple(
        f"{LAYER}.attention.attention.{part}" for part in ("query", "key", "value")
    ),
    "blocks.{}.attention.out": (f"{LAYER}.attention.output.dense",),
    "blocks.{}.around_attention.norm": (f"{LAYER}.layernorm_before",),
    "blocks.{}.feed_forward.inner": (f"{LAYER}.intermediate.dense",),
    "blocks.{}.feed_forward.outer": (f"{LAYER}.output.dense",),
    "blocks.{}.around_feed_forward.norm": (f"{LAYER}.layernorm_after",),
    "norm": ("decoder.decoder_norm",),
    "paint": ("decoder.decoder_pred",),
}
RULES = [
    Rule("mask.weight", ("decoder.mask_token",), "row"),
    Rule("position.table.weight", ("decoder.decoder_pos_embed",), "row"),
    *(rule for ours, theirs in NAMES.items() for rule in linear(ours, *theirs)),
]
# some versions of transformers write the layers by another name
OTHERWISE = re.compile(r"^decoder\.decoder_encoder\.layer\.")


def _read(theirs: Mapping[str, Any], architecture: str = PAINTS) -> MAEConfig:
    return read_keys(MAEConfig, told(theirs), (*OWN, *SHARED), {}, {})


def _write(config: MAEConfig, task: str = "") -> dict[str, Any]:
    return write_keys(config, OWN, {})


DECODER = Format("vit_mae", {PAINTS: "pretrain"}, "", _read, _write, lambda *_: RULES)


def decoder_told(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what config.json says of the decoder of a public checkpoint, if it has one."""
    if PAINTS not in (theirs.get("architectures") or []):
        return {}
    return {"pretraining": {"by": "mae", **asdict(_read(theirs))}}


def import_rest(folder: Path, encoder: nn.Module, known: Any) -> Any:
    """Build the decoder of a public checkpoint around its encoder."""
    weights = open_weights(folder)
    there = {OTHERWISE.sub("decoder.decoder_layers.", name): name for name in weights.shapes}

    def read(wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        ours: dict[str, Tensor] = {}
        for name, like in wanted.items():
            parts = to_theirs(DECODER, None, {name: like})
            for theirs, part in parts.items():
                found = weights.shapes.get(there.get(theirs, ""))
                if found is None or tuple(found) != tuple(part.shape):
                    told = "missing" if found is None else f"{list(found)}"
                    raise UsageError(
                        f"{folder}: the weights do not fit the config: {theirs} is {told}, not "
                        f"{list(part.shape)}"
                    )
            joined = torch.cat([weights[there[theirs]] for theirs in parts])
            ours[name] = joined.reshape(like.shape).float().contiguous()
        return ours

    return build_rest(folder, encoder, known, read)


def export_rest(whole: Any, encoder: ViTConfig) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """Return their config and weights of a decoder and its encoder, if their class holds both."""
    format = find_format("vit_mae")
    plain = format.settle(encoder)
    try:
        theirs = {**format.write_config(plain, "pretrain"), **_write(whole.config)}
        if unlike(plain, format.read_config(theirs, PAINTS)) or unlike(whole.config, _read(theirs)):
            return None
    except UsageError:
        return None
    rest = {n: p for n, p in float_state(whole).items() if not n.startswith("encoder.")}
    inner = to_theirs(format, plain, float_state(whole.encoder), PAINTS)
    return theirs, {**inner, **to_theirs(DECODER, None, rest)}
