"""Transformers for CTranslate2, the fast inference engine in C++."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from regard.attention.multihead import MultiHead
from regard.attention.positions import POSITION_ALIASES
from regard.errors import UsageError, lookup
from regard.files import making
from regard.layers.feedforward import GatedFeedForward
from regard.models.transformer import Transformer, TransformerConfig
from regard.pretrained.imported_tokenizer import ImportedTokenizer

if TYPE_CHECKING:
    from regard.data.tokenize import SubwordTokenizer

# Our name -> CTranslate2's name of the activation; the gated one is told apart by its class.
_ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "swish": "SWISH", "swiglu": "SWISH"}
_NORMS = ("layer", "rms")
_POSITIONS = ("none", "sinusoidal", "learned", "rotary")
QUANTIZATIONS = ("int8", "int8_float32", "int8_float16", "int8_bfloat16", "int16")
QUANTIZATIONS += ("float16", "bfloat16", "float32")


def export_ctranslate2(
    model: nn.Module,
    source_tokenizer: "SubwordTokenizer",
    target_tokenizer: "SubwordTokenizer",
    folder: str | Path,
    quantization: str | None = None,
) -> Path:
    """Write a folder that CTranslate2 opens, with the weights of a Transformer and its pieces."""
    try:
        import ctranslate2  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "the package ctranslate2 is not installed; pip install regard[ctranslate2]"
        ) from error
    if not isinstance(model, Transformer):
        raise UsageError(
            f"CTranslate2 takes a transformer from us, not a {type(model).__name__.lower()}"
        )
    if quantization is not None:
        lookup("quantization", quantization, dict.fromkeys(QUANTIZATIONS))
    _check(model.config, source_tokenizer, target_tokenizer)
    spec = _specification(model.config)
    with torch.no_grad():
        _fill(spec, model)
    spec.config.layer_norm_epsilon = model.config.block.norm_eps
    # Regard's sources end with </s> and its targets begin with <s>.
    spec.config.bos_token = spec.config.decoder_start_token = "<s>"
    spec.config.eos_token, spec.config.unk_token = "</s>", "<unk>"
    spec.config.add_source_eos = True
    spec.register_source_vocabulary(_pieces(source_tokenizer, model.config.source_vocab))
    spec.register_target_vocabulary(_pieces(target_tokenizer, model.config.target_vocab))
    spec.validate()
    spec.optimize(quantization=quantization)
    return _save(spec, source_tokenizer, target_tokenizer, Path(folder))


def _check(
    config: TransformerConfig, source: "SubwordTokenizer", target: "SubwordTokenizer"
) -> None:
    """Refuse by name what CTranslate2 cannot hold."""
    if isinstance(source, ImportedTokenizer) or isinstance(target, ImportedTokenizer):
        raise UsageError(
            "CTranslate2 gets only models with a tokenizer of ours; "
            "convert the original folder with its own ct2-transformers-converter"
        )
    block = config.block
    position = POSITION_ALIASES.get(config.position, config.position)
    for kind, name, known in (
        ("norm", block.norm, _NORMS),
        ("feed_forward", block.feed_forward, _ACTIVATIONS),
        ("position", position, _POSITIONS),
        ("score", block.score, ("dot",)),
        ("order", block.order, ("pre", "post")),
        ("embed_norm", config.embed_norm, ("none",)),
        ("scale_head", str(config.scale_head).lower(), ("false",)),
    ):
        if name not in known:
            raise UsageError(
                f"CTranslate2 has no {kind} '{name}'; it can hold {', '.join(known)}: "
                f"train with one of these to export"
            )
    for side, vocab, tokenizer in (
        ("source", config.source_vocab, source),
        ("target", config.target_vocab, target),
    ):
        if vocab < tokenizer.vocab:
            raise UsageError(
                f"the tokenizer has {tokenizer.vocab} {side} pieces, the model only {vocab}; "
                "export with the tokenizer that it was trained with"
            )


def _specification(config: TransformerConfig) -> Any:
    """Make the empty form of a model that CTranslate2 wants filled in."""
    from ctranslate2.specs import TransformerSpec, common_spec, transformer_spec

    block = config.block
    rotary = POSITION_ALIASES.get(config.position, config.position) == "rotary"
    settings: dict[str, Any] = {
        "num_heads": block.heads,
        "pre_norm": block.order == "pre",
        "activation": common_spec.Activation[_ACTIVATIONS[block.feed_forward]],
        "ffn_glu": block.feed_forward == "swiglu",
        "rms_norm": block.norm == "rms",
        "head_dim": block.head_width,
        "rotary_dim": 0 if rotary else None,  # 0 means all of a head
        "rotary_interleave": False,
        "rotary_base": config.position_base,
    }
    encoder = transformer_spec.TransformerEncoderSpec(config.encoder_depth, **settings)
    decoder = transformer_spec.TransformerDecoderSpec(config.decoder_depth, **settings)
    encoder.scale_embeddings = decoder.scale_embeddings = config.scale_embedding
    return TransformerSpec(encoder, decoder)


def _fill(spec: Any, model: Any) -> None:
    """Put every weight of the model into its place."""
    encoder, decoder = spec.encoder, spec.decoder
    encoder.embeddings[0].weight = _array(model.source.tokens.weight)
    decoder.embeddings.weight = _array(model.target.tokens.weight)
    for side, embed in ((encoder, model.source), (decoder, model.target)):
        if POSITION_ALIASES.get(model.config.position, model.config.position) != "rotary":
            # Always written out, also where CTranslate2 could compute one: its own sinusoids are
            # laid out in another order. No position is a table of zeros.
            at = torch.arange(model.config.max_length).unsqueeze(-1)
            nothing = torch.zeros(1, len(at), model.config.block.width)
            side.position_encodings.encodings = _array(embed.position.embed(nothing, at)[0])
    for layer, block in zip(decoder.layer, model.decoder, strict=True):
        _cross_attention(layer.attention, block.cross)
        _norm(layer.attention.layer_norm, block.around_cross.norm)
    blocks = [*model.encoder, *model.decoder]
    for layer, block in zip([*encoder.layer, *decoder.layer], blocks, strict=True):
        _self_attention(layer.self_attention, block.attention)
        _norm(layer.self_attention.layer_norm, block.around_attention.norm)
        _feed_forward(layer.ffn, block.feed_forward)
        _norm(layer.ffn.layer_norm, block.around_feed_forward.norm)
    if model.config.block.order == "pre":
        _norm(encoder.layer_norm, model.encoder_norm)
        _norm(decoder.layer_norm, model.decoder_norm)
    _linear(decoder.projection, model.head.weight, model.head.bias)


def _array(tensor: Tensor) -> Any:
    """Copy a tensor into plain memory: CTranslate2 rounds to 8 bits in place."""
    return tensor.detach().to("cpu", torch.float32, copy=True).contiguous().numpy()


def _linear(spec: Any, weight: Tensor, bias: Tensor | None) -> None:
    spec.weight = _array(weight)
    if bias is not None:
        spec.bias = _array(bias)


def _norm(spec: Any, norm: Any) -> None:
    spec.gamma = _array(norm.weight)
    if hasattr(spec, "beta"):
        spec.beta = _array(norm.bias)


def _feed_forward(spec: Any, network: Any) -> None:
    gated = isinstance(network, GatedFeedForward)
    first = network.gate if gated else network.inner
    _linear(spec.linear_0, first.weight, first.bias)
    _linear(spec.linear_1, network.outer.weight, network.outer.bias)
    if gated:
        _linear(spec.linear_0_noact, network.inner.weight, network.inner.bias)


def _self_attention(spec: Any, attention: MultiHead) -> None:
    (q, q_bias), (kv, kv_bias) = _projections(attention)
    bias = None if q_bias is None or kv_bias is None else torch.cat([q_bias, kv_bias])
    _linear(spec.linear[0], torch.cat([q, kv]), bias)
    _linear(spec.linear[1], attention.out.weight, attention.out.bias)


def _cross_attention(spec: Any, attention: MultiHead) -> None:
    queries, memory = _projections(attention)
    _linear(spec.linear[0], *queries)
    _linear(spec.linear[1], *memory)
    _linear(spec.linear[2], attention.out.weight, attention.out.bias)


Projection = tuple[Tensor, Tensor | None]


def _projections(attention: MultiHead) -> tuple[Projection, Projection]:
    """Return the projections to queries, and to keys and values, one of each for every head.

    Heads that share keys and values get copies of their own, which changes no output.
    """
    heads, shared, width = attention.heads, attention.kv_heads, attention.head_width
    sizes = [heads * width, shared * width, shared * width]

    def split(x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = x.split(sizes)
        k, v = (
            part.unflatten(0, (shared, width)).repeat_interleave(heads // shared, 0).flatten(0, 1)
            for part in (k, v)
        )
        return q, torch.cat([k, v])

    q, kv = split(attention.qkv.weight)
    q_bias, kv_bias = (None, None) if attention.qkv.bias is None else split(attention.qkv.bias)
    return (q, q_bias), (kv, kv_bias)


def _pieces(tokenizer: "SubwordTokenizer", vocab: int) -> list[str]:
    """Return the spelling of every piece in the order of their numbers, filled up to a number."""
    pieces = [str(tokenizer.library.id_to_token(number)) for number in range(tokenizer.vocab)]
    return pieces + [f"<unused{number}>" for number in range(tokenizer.vocab, vocab)]


def _save(spec: Any, source: "SubwordTokenizer", target: "SubwordTokenizer", folder: Path) -> Path:
    """Write everything under another name, then give it its own."""
    with making(folder) as partial:
        spec.save(str(partial))
        if source.sha == target.sha:
            source.save(partial / "tokenizer.json")
        else:
            source.save(partial / "source_tokenizer.json")
            target.save(partial / "target_tokenizer.json")
    return folder
