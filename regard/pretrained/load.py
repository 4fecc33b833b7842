"""Public checkpoints: their names and config keys to ours."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from regard.errors import Mistake
from regard.layers.block import BlockConfig
from regard.models.transformer import TransformerConfig
from regard.pretrained.tables import MARIAN, MARIAN_BLOCK, MARIAN_CONFIG, Names

ACTIVATIONS = {"silu": "swish"}  # theirs -> ours, where the names differ


def marian_config(theirs: Mapping[str, Any]) -> TransformerConfig:
    """Return our config for one of transformers' MarianConfig."""
    for one, other in (
        ("encoder_attention_heads", "decoder_attention_heads"),
        ("encoder_ffn_dim", "decoder_ffn_dim"),
    ):
        if theirs[one] != theirs[other]:
            raise Mistake(
                f"{one}={theirs[one]} but {other}={theirs[other]}; "
                "only models with the same blocks on both sides can be read"
            )
    block = {ours: theirs[key] for ours, key in MARIAN_BLOCK.items()}
    block["feed_forward"] = ACTIVATIONS.get(block["feed_forward"], block["feed_forward"])
    sizes = {ours: theirs[key] for ours, key in MARIAN_CONFIG.items()}
    sizes["target_vocab"] = sizes["target_vocab"] or sizes["source_vocab"]
    shared = theirs.get("share_encoder_decoder_embeddings", True)
    return TransformerConfig(
        block=BlockConfig(order="post", **block),
        tie="all" if shared else "target",
        position_layout="halves",
        head_bias=True,
        **sizes,
    )


def to_ours(
    theirs: Mapping[str, Tensor], wanted: Mapping[str, Tensor], table: Names = MARIAN
) -> dict[str, Tensor]:
    """Return the weights that a model wants, by name and shape, from theirs."""
    return {
        name: torch.cat([_find(n, theirs) for n in _names(name, table)]).reshape(like.shape)
        for name, like in wanted.items()
    }


def _names(name: str, table: Names) -> list[str]:
    """Return their names for one of ours; the table knows it without the number of its layer."""
    found = re.search(r"\.(\d+)\.", name)
    key = name if found is None else name.replace(found[0], ".{}.", 1)
    if key not in table:
        raise Mistake(f"weight '{name}' has no counterpart in that format")
    names = table[key]
    names = names if isinstance(names, tuple) else (names,)
    return [n.format(found[1]) if found else n for n in names]


def _find(name: str, theirs: Mapping[str, Tensor]) -> Tensor:
    """Return one of their weights; embeddings that all share may be there under one name only."""
    for known in (name, "model.shared.weight") if "embed_tokens" in name else (name,):
        if known in theirs:
            return theirs[known]
    raise Mistake(f"weight '{name}' is missing from the checkpoint")
