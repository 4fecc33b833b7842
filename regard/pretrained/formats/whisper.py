"""Whisper checkpoints: spectrograms in, text out."""

from typing import Any

from regard.models.whisper import WhisperConfig
from regard.pretrained.config_keys import Key, KeyGroup, activation
from regard.pretrained.format import Architecture, Format
from regard.pretrained.formats.encoder_decoders import SIDE_BLOCK, read_sides
from regard.pretrained.weight_names import Rule, WeightNames, within


def _write_sides(config: WhisperConfig) -> dict[str, Any]:
    return {
        "is_encoder_decoder": True,
        "decoder_attention_heads": config.block.heads,
        "decoder_ffn_dim": config.block.ffn_width,
        # of older checkpoints; what is written by is in generation_config.json
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    }


def _without_key_bias(attention: str) -> Rule:
    """Name the biases of queries and values; keys have none, and softmax would cancel it."""
    return Rule((f"{attention}.q_proj.bias", "", f"{attention}.v_proj.bias"))


_BLOCK: WeightNames = {
    **SIDE_BLOCK,
    "attention.qkv.bias": _without_key_bias("self_attn"),
    "cross.qkv.bias": _without_key_bias("encoder_attn"),
}
_WHISPER = Format(
    "whisper",
    "whisper",
    {
        "WhisperForConditionalGeneration": Architecture("transcribe", weights={"head": "proj_out"}),
    },
    (
        Key("vocab", "vocab_size", 51865),
        Key("mels", "num_mel_bins", 80),
        Key("encoder_depth", "encoder_layers", 4),
        Key("decoder_depth", "decoder_layers", 4),
        Key("max_frames", "max_source_positions", 1500),
        Key("max_length", "max_target_positions", 448),
        Key("block.width", "d_model", 384),
        Key("block.heads", "encoder_attention_heads", 6),
        Key("block.ffn_width", "encoder_ffn_dim", 1536),
        activation("activation_function", "gelu"),
        Key("block.dropout", "dropout", 0.0),
        Key("block.attention_dropout", "attention_dropout", 0.0),
        Key("block.ffn_dropout", "activation_dropout", 0.0),
        KeyGroup(read_sides, _write_sides),
    ),
    {
        "stem.first": "encoder.conv1",
        "stem.second": "encoder.conv2",
        "stem.positions": "encoder.embed_positions.weight",
        **within("encoder.{}.", "encoder.layers.{}.", _BLOCK),
        "encoder_norm": "encoder.layer_norm",
        "target.tokens": "decoder.embed_tokens",
        "target.position.table": "decoder.embed_positions",
        **within("decoder.{}.", "decoder.layers.{}.", _BLOCK),
        "decoder_norm": "decoder.layer_norm",
    },
    config={"init": "normal", "full_window": True},
    fixed={"tie_word_embeddings": True, "median_filter_width": 7},
    prefix="model.",
    tied={"head.weight": ("target.tokens.weight",)},
    harmless=(
        "scale_embedding",  # which transformers keeps and never uses
        *("num_hidden_layers", "encoder_layerdrop", "decoder_layerdrop"),
        *("use_weighted_layer_sum", "classifier_proj_size", "apply_spec_augment"),
        *("mask_time_prob", "mask_time_length", "mask_time_min_masks"),
        *("mask_feature_prob", "mask_feature_length", "mask_feature_min_masks"),
    ),
    inputs="sound",
)

FORMATS = (_WHISPER,)
