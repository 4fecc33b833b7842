"""Checkpoint folders of transformers: a model with its config and tokenizer, in and out."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard.errors import UsageError, lookup
from regard.files import errors_in, read_json, write_json
from regard.files.weights import float_state
from regard.models.ensemble import members_of
from regard.models.folder import FOLDER_FORMAT, STRANGE, assign_weights, build_on_meta
from regard.models.protocols import ModelConfig
from regard.models.vit import ViTConfig
from regard.pretrained.config_keys import Theirs, shortened
from regard.pretrained.format import Format
from regard.pretrained.formats import (
    FORMATS,
    find_format,
    fitting,
    is_huggingface,
    read_any_config,
    write_exactly,
)
from regard.pretrained.formats.encoder_decoders import vocabularies
from regard.pretrained.generation import KNOWN as GENERATION_KEYS
from regard.pretrained.generation import WRITING_TASKS, export_generation
from regard.pretrained.mae_decoder import ARCHITECTURE as MAE
from regard.pretrained.mae_decoder import export_with_decoder
from regard.pretrained.shards import open_weights, write_shards
from regard.pretrained.task_config import read_task_config, write_task_config
from regard.pretrained.tokenizer_folder import load_tokenizers
from regard.pretrained.weight_conversion import compare, convert, to_theirs

# how an image encoder without a head makes one vector of many, which their config does not say
_POOL, _POOLS = "regard_pool", {"first": "first", "mean": "mean"}
EXPORT_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# keys of any config.json that change no output of a model in use
_HARMLESS = (
    *("architectures", "model_type", "transformers_version", "torch_dtype", "dtype"),
    *("tokenizer_class", "processor_class", "auto_map", "is_encoder_decoder", "id2label"),
    *("label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params"),
    *("tie_encoder_decoder", "tie_word_embeddings", "name", "language", "license"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id"),
    *("mask_token_id", "unk_token_id", "decoder_start_token_id", "use_cache"),
    *("cache_implementation", "gradient_checkpointing", "torchscript", "use_bfloat16"),
    *("return_dict", "output_attentions", "output_hidden_states", "output_past"),
    *("attn_implementation", "pruned_heads", "chunk_size_feed_forward", "vocab_file"),
    *("model_max_length", "xla_device", "max_position_embeddings", "pretraining_tp"),
    *("unsloth_version", "unsloth_fixed", "adapters", "prefix"),
)
# and how they begin or what is in them: initialisation, and dropout in training
_HARMLESS_PATTERN = re.compile(r"^_|^regard_|^init|^summary_|drop")


def read_huggingface_config(folder: str | Path) -> tuple[Format, str, Any]:
    """Read config.json of a public checkpoint: its format, the name of its class, our config."""
    path = Path(folder) / "config.json"
    return _read_config(path, read_json(path))


def _read_config(path: Path, theirs: Theirs) -> tuple[Format, str, Any]:
    with errors_in(path):
        try:
            format = find_format(theirs.get("model_type"))
            named = _architecture(format, theirs.get("architectures"))
            config = format.read_config(theirs, named)
            _refuse_unknown_keys(format, theirs, config, named)
            return format, named, config
        except STRANGE as error:
            raise UsageError(f"not a config of this model_type ({error!r:.100})") from error


# their names until every task has moved
is_foreign, read_foreign = is_huggingface, read_huggingface_config
__all__ = ["export_weights", "import_folder", "is_huggingface", "read_any_config", "write_json"]


def _architecture(format: Format, named: Any) -> str:
    """Return which of a format's classes a config names, or the default one if it names none."""
    if named is None:
        return format.architecture()
    for name in named if isinstance(named, list) else [named]:
        if isinstance(name, str) and name in format.architectures:
            return name
    known = ", ".join(format.architectures)
    raise UsageError(f"architectures={named!r:.60}; known for {format.model_type} are {known}")


def _refuse_unknown_keys(format: Format, theirs: Theirs, config: ModelConfig, named: str) -> None:
    """Refuse keys that we do not know: an output may depend on them.

    We know those that we would write ourselves for the same model, and those that change nothing.
    """
    written = format.write_config(format.canonical(config), format.architectures[named].task)
    known = {*written, *_HARMLESS, *GENERATION_KEYS, *format.harmless}
    for key, value in theirs.items():
        if key in known or _HARMLESS_PATTERN.search(key):
            continue
        if value not in (None, False, [], {}, ""):
            raise UsageError(
                f"{key!r:.60}={shortened(value)} is not known; "
                "take it out if no output depends on it"
            )


def import_folder(
    folder: str | Path,
    device: str = "cpu",
    read: Callable[[Path], tuple[Any, Any]] = load_tokenizers,
) -> tuple[nn.Module, dict[str, Any], tuple[Any, Any]]:
    """Read a public checkpoint: a model, its config as in a folder of ours, and its tokenizers.

    The tokenizers are for what the model reads and for what it writes, mostly the same. Names and
    sizes are compared with the headers of the weights before any memory is taken.
    """
    folder = Path(folder)
    path = folder / "config.json"
    theirs = read_json(path)
    format, named, settings = _read_config(path, theirs)
    if _POOL in theirs and isinstance(settings, ViTConfig):  # an encoder that we exported
        settings = dataclasses.replace(settings, pool=lookup(_POOL, str(theirs[_POOL]), _POOLS))
    weights = open_weights(folder)
    model = build_on_meta(format.family, settings, path, len(weights.shapes))
    empty = float_state(model)
    with errors_in(folder):
        places = compare(format, settings, empty, weights.shapes, named)
    tokenizers: tuple[Any, Any] = (None, None)
    if format.inputs != "images":
        tokenizers = read(folder)
        _check_vocabulary(folder, settings, tokenizers)
    architecture = format.architectures[named]
    task = architecture.task
    if task == "text" and theirs.get("regard_task") == "translate":  # one that we exported
        task = "translate"
    config = {
        "regard_format": FOLDER_FORMAT,
        "family": format.family,
        "task": task,
        "imported": {"model_type": format.model_type, "architecture": named},
        **architecture.about,
        **read_task_config(folder, theirs, task, settings),
        "model": dataclasses.asdict(settings),
    }
    tensors = convert(format, settings, empty, weights, places, named)
    assign_weights(model, {name: tensor.to(device) for name, tensor in tensors.items()})
    return model.eval(), config, tokenizers


def _check_vocabulary(folder: Path, settings: Any, tokenizers: tuple[Any, Any]) -> None:
    """Refuse a tokenizer with more pieces than the model has rows for."""
    sizes = [getattr(settings, f"{side}_vocab", None) for side in ("source", "target")]
    for tokenizer, size in zip(tokenizers, sizes, strict=True):
        size = settings.vocab if size is None else size
        if tokenizer.vocab > size:
            raise UsageError(
                f"{folder}: the tokenizer has {tokenizer.vocab} pieces, the model only {size}; "
                "use the tokenizer that belongs to it"
            )


# ---- and out


def export_weights(
    model: Any,
    config: Theirs,
    tokenizers: tuple[Any, Any],
    folder: Path,
    *,
    dtype: str = "float32",
    max_shard: int | None = None,
    whole: Any = None,
) -> str:
    """Write a model's config.json and weights as transformers has them; return its model_type.

    `whole` is an image encoder with the decoder it was trained with, written too where one class of
    theirs holds both.
    """
    kind = lookup("dtype", dtype, EXPORT_DTYPES)
    if (members := len(members_of(model))) > 1:
        raise UsageError(f"members={members}: public formats hold one model; train with members=1")
    task = str(config["task"])
    if whole is not None and (both := export_with_decoder(whole, model.config)):
        (theirs, tensors), format, named = both, find_format("vit_mae"), MAE
    else:
        format, theirs = _choose_format(config, model.config)
        named = format.architecture(task, model.config)
        tensors = to_theirs(format, model.config, float_state(model), named)
        tensors |= format.derived(model.config)
    writes = format.inputs in ("text", "sound")
    ids = _special_ids(theirs, tokenizers[1]) if writes else {}
    for key, number in ids.items():
        if theirs.get(key, number) != number:  # RoBERTa counts positions from that of its padding
            raise UsageError(
                f"{format.model_type} needs {key}={theirs[key]}, the tokenizer has {number}; "
                "only a model that came in this format can be written in it"
            )
    sizes = {} if max_shard is None else {"max_shard": max_shard}
    write_shards(folder, {name: x.detach().to(kind) for name, x in tensors.items()}, **sizes)
    theirs |= {"architectures": [named], "dtype": dtype}
    if task == "pretrain" and isinstance(model.config, ViTConfig) and model.config.pool == "mean":
        theirs[_POOL] = model.config.pool  # which transformers keeps and does not ask
    theirs |= write_task_config(folder, config, format.architectures[named].task, model.config)
    write_json(folder / "config.json", theirs | ids)
    if task in WRITING_TASKS:
        export_generation(folder, config, tokenizers[1], ids, vocabularies(theirs))
    return format.model_type


def _choose_format(config: Theirs, settings: ModelConfig) -> tuple[Format, dict[str, Any]]:
    """Return a format that holds a model of these settings, and its config.json.

    It is the format that the model came in, if it still fits, or another one.
    """
    task, came = str(config["task"]), config.get("imported")
    came = came.get("model_type") if isinstance(came, dict) else None
    if isinstance(came, str) and came in FORMATS:
        theirs, lost = write_exactly(FORMATS[came], settings, task)
        if not lost:
            return FORMATS[came], theirs
    return fitting(str(config["family"]), settings, task)


def _special_ids(theirs: Theirs, tokenizer: Any) -> dict[str, Any]:
    """Return the ids of special tokens under their keys."""
    ids: dict[str, Any] = {
        f"{role}_token_id": tokenizer.specials.get(role) for role in ("bos", "eos", "pad")
    }
    if len(tokenizer.ends) > 1:
        ids["eos_token_id"] = list(tokenizer.ends)
    if theirs.get("is_encoder_decoder"):
        ids["decoder_start_token_id"] = tokenizer.begin
    if sizes := vocabularies(theirs):  # padding is that of what is read
        ids = {key: n + sizes[0] if key != "pad_token_id" else n for key, n in ids.items()}
    return ids
