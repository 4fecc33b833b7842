"""The decoder of ViT-MAE, which predicts masked patches; its encoder is a ViT."""

import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from regard.errors import UsageError
from regard.files import errors_in
from regard.files.weights import float_state
from regard.models.folder import build_rest
from regard.models.masked import MAEConfig
from regard.models.vit import ViTConfig
from regard.pretrained.config_keys import (
    Key,
    Theirs,
    activation,
    read_keys,
    without_nulls,
    write_keys,
)
from regard.pretrained.format import Architecture, Format, differing
from regard.pretrained.formats.vision import VIT_BLOCK, VIT_MAE
from regard.pretrained.shards import open_weights
from regard.pretrained.weight_conversion import compare, convert, to_theirs
from regard.pretrained.weight_names import Rule, within

ARCHITECTURE = "ViTMAEForPreTraining"
_KEYS = (
    Key("mask_share", "mask_ratio", 0.75),
    Key("target", "norm_pix_loss", False, {False: "pixels", True: "normalised"}),
    Key("depth", "decoder_num_hidden_layers", 8),
    Key("block.width", "decoder_hidden_size", 512),
    Key("block.heads", "decoder_num_attention_heads", 16),
    Key("block.ffn_width", "decoder_intermediate_size", 2048),
)
# as in the encoder, which writes them
_ENCODER_KEYS = (
    activation("hidden_act", "gelu"),
    Key("block.norm_eps", "layer_norm_eps", 1e-12),
    Key("block.dropout", "hidden_dropout_prob", 0.0),
    Key("block.attention_dropout", "attention_probs_dropout_prob", 0.0),
)
_DECODER = Format(
    "vit_mae",
    "mae",
    {ARCHITECTURE: Architecture("pretrain")},
    _KEYS,
    {
        "enter": "decoder_embed",
        "mask.weight": Rule(("mask_token",), "row"),
        "position.table.weight": Rule(("decoder_pos_embed",), "row"),
        **within("blocks.{}.", "decoder_layers.{}.", VIT_BLOCK),
        "norm": "decoder_norm",
        "paint": "decoder_pred",
    },
    prefix="decoder.",
    ignored=(r"^(?!decoder\.)",),  # the encoder's
)
# some versions of transformers write the layers by another name
_LAYERS, _OTHER_LAYERS = (
    "decoder.decoder_layers.",
    re.compile(r"^decoder\.decoder_encoder\.layer\."),
)


def _read(theirs: Theirs) -> MAEConfig:
    return read_keys(MAEConfig, without_nulls(theirs), (*_KEYS, *_ENCODER_KEYS), {})


def read_decoder_config(theirs: Theirs) -> dict[str, Any]:
    """Return what config.json says of the decoder of a public checkpoint, if it has one."""
    if ARCHITECTURE not in (theirs.get("architectures") or []):
        return {}
    return {"pretraining": {"by": "mae", **asdict(_read(theirs))}}


def import_decoder(folder: Path, encoder: nn.Module, known: Any) -> Any:
    """Build the decoder of a public checkpoint around its encoder."""
    weights = open_weights(folder)
    names = {_OTHER_LAYERS.sub(_LAYERS, name): name for name in weights}
    shapes = {name: weights.entries[own].shape for name, own in names.items()}

    def read(wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with errors_in(folder):
            places = compare(_DECODER, None, wanted, shapes)
        places = {name: names[place] for name, place in places.items()}
        return convert(_DECODER, None, wanted, weights, places)

    return build_rest(folder, encoder, known, read)


def export_with_decoder(
    whole: Any, encoder: ViTConfig
) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """Return config and weights of a decoder and its encoder, if one class of theirs holds both."""
    plain = VIT_MAE.canonical(encoder)
    try:
        theirs = {**VIT_MAE.write_config(plain, "pretrain"), **write_keys(whole.config, _KEYS)}
        again = VIT_MAE.read_config(theirs, ARCHITECTURE)
        if differing(plain, again) or differing(whole.config, _read(theirs)):
            return None
    except UsageError:
        return None
    rest = {n: p for n, p in float_state(whole).items() if not n.startswith("encoder.")}
    inner = to_theirs(VIT_MAE, plain, float_state(whole.encoder), ARCHITECTURE)
    return theirs, {**inner, **to_theirs(_DECODER, None, rest)}
