"""GGUF files as checkpoint folders of transformers: config, weight names and tokenizer."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from regard.errors import UsageError, lookup
from regard.files import read_json, write_json
from regard.models.gpt import GPTConfig
from regard.pretrained import sentencepiece_model as spm
from regard.pretrained.formats import FORMATS
from regard.pretrained.imported_tokenizer import TokenFrame
from regard.pretrained.shards import INDEX, Weights, read_header
from regard.pretrained.tokenizer_checks import (
    GPT2_PATTERN,
    LLAMA3_PATTERN,
    MOST_BYTES,
    QWEN_PATTERN,
    TEKKEN_PATTERN,
)
from regard.pretrained.tokenizer_folder import as_template
from regard.pretrained.weight_names import as_rule

Words = Mapping[str, Any]
_ARCHITECTURES: dict[str, None] = dict.fromkeys(("llama", "qwen2", "qwen3", "gpt2"))
# GGUF's name -> our module, whose name in transformers the format knows
_TENSORS = {
    "token_embd": "embed.tokens",
    "position_embd": "embed.position.table",
    "output_norm": "norm",
    "output": "head",
    "attn_norm": "blocks.{}.around_attention.norm",
    "ffn_norm": "blocks.{}.around_feed_forward.norm",
    **dict.fromkeys(("attn_qkv", "attn_q", "attn_k", "attn_v"), "blocks.{}.attention.qkv"),
    "attn_q_norm": "blocks.{}.attention.q_norm",
    "attn_k_norm": "blocks.{}.attention.k_norm",
    "attn_output": "blocks.{}.attention.out",
    "ffn_gate": "blocks.{}.feed_forward.gate",
    "ffn_up": "blocks.{}.feed_forward.inner",
    "ffn_down": "blocks.{}.feed_forward.outer",
}
_PROJECTIONS = ("attn_q", "attn_k", "attn_v")
# keys below the architecture -> theirs in config.json
_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_GPT2_KEYS = {
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "block_count": "n_layer",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}
# that say nothing which these do not, or are compared with them
_OTHERS = ("vocab_size", "attention.value_length", "rope.dimension_count", "tensor_data_layout")
_OTHERS += ("rope.scaling.finetuned",)
_SCALING = {"rope.scaling.type": "rope_type", "rope.scaling.factor": "factor"}
_FREQS = "rope_freqs.weight"
_BESIDE = ("tokenizer.json", "vocab.json", "tokenizer.model")  # files in which a tokenizer may lie


def as_folder(raw: Path, folder: Path) -> None:
    """Write config.json, weights and tokenizer for what the reader of a GGUF file has written."""
    metadata = read_json(raw / "raw.json", MOST_BYTES)
    kind = str(metadata.get("general.architecture"))
    lookup("general.architecture", kind[:60], _ARCHITECTURES)
    files = [read_header(path) for path in sorted(raw.glob("*.safetensors"))]
    tensors = Weights({name: entry for file in files for name, entry in file.items()})
    config = _config(metadata, kind, tensors)
    write_json(folder / "config.json", config)
    if not any((folder / name).exists() for name in _BESIDE):
        _write_tokenizer(metadata, folder)
    places: dict[str, str] = {}
    for number, file in enumerate(files, 1):  # one after the other, as each takes its memory
        named = dict(
            _converted(name, x, kind, config) for name, x in Weights(file).items() if name != _FREQS
        )
        path = folder / f"model-{number:05}-of-{len(files):05}.safetensors"
        save_file(named, path)
        places |= dict.fromkeys(named, path.name)
    write_json(folder / INDEX, {"metadata": {}, "weight_map": places})


def _config(metadata: Words, kind: str, tensors: Weights) -> dict[str, Any]:
    """Return the config.json of transformers; a key that is not known is refused."""
    keys = _GPT2_KEYS if kind == "gpt2" else _KEYS
    given = {
        key.removeprefix(f"{kind}."): x for key, x in metadata.items() if key.startswith(f"{kind}.")
    }
    for key in given:
        if key not in keys and key not in _OTHERS and (kind == "gpt2" or key not in _SCALING):
            raise UsageError(f"{kind}.{key}={given[key]!s:.40} is not supported")
    for key in keys:
        if key not in given and key not in (
            "attention.key_length",
            "rope.freq_base",
            "attention.head_count_kv",
        ):
            raise UsageError(f"{kind}.{key} is missing; the file is damaged or too old")
    theirs = {keys[key]: value for key, value in given.items() if key in keys}
    for key, value in theirs.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UsageError(f"{key}={value!s:.40} is not a number")
    table = tensors.shapes.get("token_embd.weight", (0,))
    if kind != "gpt2":
        theirs |= _attention(given, theirs, tensors)
    if kind == "llama":
        for part in ("attention", "mlp"):
            names = {"attention": "attn_q", "mlp": "ffn_up"}
            theirs[f"{part}_bias"] = f"blk.0.{names[part]}.bias" in tensors
    if kind == "qwen3":
        theirs["attention_bias"] = "blk.0.attn_q.bias" in tensors
    ids = {
        f"{role}_token_id": metadata[f"tokenizer.ggml.{key}_token_id"]
        for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
        if isinstance(metadata.get(f"tokenizer.ggml.{key}_token_id"), int)
    }
    turn = metadata.get("tokenizer.ggml.eot_token_id")
    if isinstance(turn, int) and turn != ids.get("eos_token_id", turn):
        ids["eos_token_id"] = [ids["eos_token_id"], turn]
    return {
        "model_type": kind,
        "architectures": [FORMATS[kind].architecture()],
        "vocab_size": table[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": None,
        "eos_token_id": None,
        **theirs,
        **ids,
    }


def _attention(given: Words, theirs: Words, tensors: Weights) -> dict[str, Any]:
    """Return the keys of head sizes and rotary positions."""
    heads, width = theirs["num_attention_heads"], theirs["hidden_size"]
    if not isinstance(heads, int) or not isinstance(width, int) or heads < 1:
        raise UsageError(f"attention.head_count={heads} with embedding_length={width}")
    size = theirs.get("head_dim", width // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if given.get(key, size) != size:
            raise UsageError(f"{key}={given[key]!s:.40} is not supported; only {size} is")
    made: dict[str, Any] = {"head_dim": size, "num_key_value_heads": heads, "rope_theta": 10_000.0}
    made |= {key: theirs[key] for key in made if key in theirs}
    scaling: dict[str, Any] = {"rope_type": "default"}
    kind, factor = given.get("rope.scaling.type", "linear"), given.get("rope.scaling.factor", 0)
    if kind not in ("none", "linear"):
        raise UsageError(f"rope.scaling.type={kind!s:.40} is not supported; only linear is")
    if kind == "linear" and factor not in (0, 1):  # which is what llama.cpp takes it for
        scaling = {"rope_type": "linear", "factor": factor}
    if _FREQS in tensors:
        scaling = _llama3(tensors[_FREQS], size, made["rope_theta"])
    return {**made, "rope_parameters": {**scaling, "rope_theta": made["rope_theta"]}}


def _llama3(factors: Tensor, size: int, base: float) -> dict[str, Any]:
    """Find the setting of LLaMA 3 by which rates are divided by these factors."""
    rates = base ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    turns = 8192 * rates / (2 * torch.pi)
    for factor in (8.0, 32.0, 16.0, 4.0, 2.0):
        keep = ((turns - 1) / 3).clamp(0, 1)
        right = 1 / ((1 - keep) / factor + keep)
        if factors.shape == right.shape and torch.allclose(factors.double(), right, rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
    raise UsageError(f"{_FREQS} stretches positions in a way that is not known")


def _converted(name: str, x: Tensor, kind: str, config: Words) -> tuple[str, Tensor]:
    """Return a tensor as transformers has it: its name, rotary pairs as halves, or transposed."""
    match = re.fullmatch(r"(?:blk\.(\d{1,4})\.)?([a-z_]+)\.(weight|bias)", name)
    ours, table = _TENSORS.get(match[2], "") if match else "", FORMATS[kind].weight_table()
    rule = as_rule(table[ours], GPTConfig()) if ours in table else None
    part = _PROJECTIONS.index(match[2]) if match and match[2] in _PROJECTIONS else None
    if (
        match is None
        or rule is None
        or ("{}" in ours) != (match[1] is not None)
        or (len(rule.theirs) > 1) != (part is not None)
    ):
        raise UsageError(f"a tensor {name!r:.60}, which {kind} does not have")
    if rule.change == "transpose" and x.ndim == 2:
        x = x.mT.contiguous()
    elif kind == "llama" and part in (0, 1):
        heads = config["num_key_value_heads" if part else "num_attention_heads"]
        if not isinstance(heads, int) or heads < 1 or len(x) % (2 * heads):
            raise UsageError(f"{name} has {len(x)} rows, which {heads!s:.20} heads do not share")
        x = x.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()
    return f"{rule.theirs[part or 0].format(match[1])}.{match[3]}", x


# ---- tokenizers


@dataclass(frozen=True)
class Splits:
    """How a byte-level tokenizer splits a text, as llama.cpp knows it by a name."""

    pattern: str = GPT2_PATTERN
    digits: bool = False  # each alone, beforehand
    nfc: bool = False
    whole: bool = False  # a part that is a piece is not merged, and a text begins by a token


_DIGITS = Splits(digits=True)
_SPLITS: dict[str, Splits] = {  # by tokenizer.ggml.pre
    "gpt-2": Splits(),
    **dict.fromkeys(("smollm", "starcoder", "refact"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), Splits(LLAMA3_PATTERN, whole=True)),
    "smaug-bpe": Splits(LLAMA3_PATTERN),
    "qwen2": Splits(QWEN_PATTERN, nfc=True),
    "deepseek-r1-qwen": Splits(QWEN_PATTERN),
    "tekken": Splits(TEKKEN_PATTERN, whole=True),
}
_UNUSED = 5  # a type of pieces
_REMEDY = "put the model's tokenizer.json and tokenizer_config.json beside it and import the folder"


def _write_tokenizer(metadata: Words, folder: Path) -> None:
    """Write the tokenizer that the metadata describe, if that can be done exactly."""
    pieces, types = (metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    if not isinstance(pieces, list) or not isinstance(types, list) or len(pieces) != len(types):
        raise UsageError(f"it has no tokenizer; {_REMEDY}")
    readers = {"gpt2": _byte_level, "llama": _sentencepiece}
    model = metadata.get("tokenizer.ggml.model")
    if not isinstance(model, str) or model not in readers:
        raise UsageError(f"tokenizer.ggml.model={model!s:.40} cannot be rebuilt exactly; {_REMEDY}")
    file = readers[model](metadata, list(map(str, pieces)), types)
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {role: metadata.get(f"tokenizer.ggml.{key}_token_id") for role, key in roles.items()}
    ids = {role: n for role, n in ids.items() if type(n) is int and 0 <= n < len(pieces)}
    settings |= {f"{role}_token": pieces[number] for role, number in ids.items()}
    splits = _SPLITS.get(str(metadata.get("tokenizer.ggml.pre")), Splits())
    usual = {"bos": model == "llama" or splits.whole, "eos": False}
    before, after = (
        [ids[role]]
        if role in ids and metadata.get(f"tokenizer.ggml.add_{role}_token", flag)
        else []
        for role, flag in usual.items()
    )
    one, other = ((*before, text, *after) for text in "AB")
    frame = TokenFrame(one, one + other, (0,) * len(one) + (1,) * len(other))
    file["post_processor"] = as_template(frame, pieces)
    if isinstance(template := metadata.get("tokenizer.chat_template"), str):
        settings["chat_template"] = template
    write_json(folder / "tokenizer.json", file)
    write_json(folder / "tokenizer_config.json", settings)


def _byte_level(metadata: Words, pieces: list[str], types: list[Any]) -> dict[str, Any]:
    """Describe a byte-level BPE tokenizer."""
    name = metadata.get("tokenizer.ggml.pre")
    if not isinstance(name, str) or name not in _SPLITS:
        raise UsageError(f"tokenizer.ggml.pre={name!s:.40} cannot be rebuilt exactly; {_REMEDY}")
    splits = _SPLITS[name]
    bytes_only = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    cut = [{"type": "Digits", "individual_digits": True}] * splits.digits
    pattern = {"pattern": {"Regex": splits.pattern}, "behavior": "Isolated", "invert": False}
    cut += [{"type": "Split"} | pattern]
    cut += [bytes_only | {"use_regex": False}]
    return {
        "version": "1.0",
        "added_tokens": [
            spm.special(i, piece) | {"special": kind == spm.CONTROL}
            for i, (piece, kind) in enumerate(zip(pieces, types, strict=True))
            if kind in (spm.CONTROL, spm.USER)
        ],
        "normalizer": {"type": "NFC"} if splits.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": cut},
        "decoder": bytes_only | {"use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {
                piece: i
                for i, (piece, kind) in enumerate(zip(pieces, types, strict=True))
                if kind != _UNUSED
            },
            "merges": metadata.get("tokenizer.ggml.merges"),
            "ignore_merges": splits.whole,
        },
    }


def _sentencepiece(metadata: Words, pieces: list[str], types: list[Any]) -> dict[str, Any]:
    """Describe a SentencePiece BPE tokenizer with bytes for what it has no piece for."""
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(pieces):
        raise UsageError(f"its tokenizer has no scores; {_REMEDY}")
    if "tokenizer.ggml.precompiled_charsmap" in metadata or spm.USER in types:
        raise UsageError(
            f"a character map or pieces of a user cannot be rebuilt exactly; {_REMEDY}"
        )
    model = spm.SentencePieceModel(
        [(piece, float(s), k) for piece, s, k in zip(pieces, scores, types, strict=True)],
        spm.BPE,
        byte_fallback=spm.BYTE in types,
        add_prefix=metadata.get("tokenizer.ggml.add_space_prefix", True) is True,
        strip=metadata.get("tokenizer.ggml.remove_extra_whitespaces", False) is True,
    )
    if len(model.of(spm.UNKNOWN)) != 1:
        raise UsageError(f"its tokenizer has not one piece for what is unknown; {_REMEDY}")
    return spm.as_tokenizer_json(model)
