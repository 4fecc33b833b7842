"""Names of weights and config keys: ours on the left, theirs on the right.

`{}` stands for the number of a layer. Several of theirs for one of ours are joined along the rows.
"""

Names = dict[str, str | tuple[str, ...]]


def _both(names: Names) -> Names:
    """Give every part of a table its weight and its bias."""
    table: Names = {}
    for ours, theirs in names.items():
        for end in (".weight", ".bias"):
            joined = isinstance(theirs, tuple)
            table[ours + end] = tuple(t + end for t in theirs) if joined else theirs + end
    return table


def _attention(ours: str, theirs: str) -> Names:
    """Name the projections of one attention."""
    return {
        f"{ours}.qkv": tuple(f"{theirs}.{part}_proj" for part in "qkv"),
        f"{ours}.out": f"{theirs}.out_proj",
    }


# transformers' MarianMTModel, which the OPUS-MT models are
MARIAN: Names = {
    "source.tokens.weight": "model.encoder.embed_tokens.weight",
    "target.tokens.weight": "model.decoder.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "head.bias": "final_logits_bias",
    **_both(
        {
            **_attention("encoder.{}.attention", "model.encoder.layers.{}.self_attn"),
            "encoder.{}.around_attention.norm": "model.encoder.layers.{}.self_attn_layer_norm",
            "encoder.{}.feed_forward.inner": "model.encoder.layers.{}.fc1",
            "encoder.{}.feed_forward.outer": "model.encoder.layers.{}.fc2",
            "encoder.{}.around_feed_forward.norm": "model.encoder.layers.{}.final_layer_norm",
            **_attention("decoder.{}.attention", "model.decoder.layers.{}.self_attn"),
            "decoder.{}.around_attention.norm": "model.decoder.layers.{}.self_attn_layer_norm",
            **_attention("decoder.{}.cross", "model.decoder.layers.{}.encoder_attn"),
            "decoder.{}.around_cross.norm": "model.decoder.layers.{}.encoder_attn_layer_norm",
            "decoder.{}.feed_forward.inner": "model.decoder.layers.{}.fc1",
            "decoder.{}.feed_forward.outer": "model.decoder.layers.{}.fc2",
            "decoder.{}.around_feed_forward.norm": "model.decoder.layers.{}.final_layer_norm",
        }
    ),
}

MARIAN_CONFIG: dict[str, str] = {
    "encoder_depth": "encoder_layers",
    "decoder_depth": "decoder_layers",
    "source_vocab": "vocab_size",
    "target_vocab": "decoder_vocab_size",
    "max_length": "max_position_embeddings",
    "scale_embedding": "scale_embedding",
}
MARIAN_BLOCK: dict[str, str] = {
    "width": "d_model",
    "heads": "encoder_attention_heads",
    "ffn_width": "encoder_ffn_dim",
    "feed_forward": "activation_function",
    "dropout": "dropout",
    "attention_dropout": "attention_dropout",
    "ffn_dropout": "activation_dropout",
}
