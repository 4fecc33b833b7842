"""Public checkpoints as folders: a model with its config and tokenizer, in and out."""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard.errors import UsageError, lookup
from regard.files import write_atomically
from regard.models.bert import BertConfig
from regard.models.folder import FORMAT, STRANGE, build_hollow, give_weights
from regard.pretrained.generation import (
    FILE,
    HEAD,
    LONGEST,
    USUAL,
    shifted,
    vocabularies,
    write_generation,
)
from regard.pretrained.generation import KNOWN as GENERATION
from regard.pretrained.load import (
    architecture,
    compare,
    convert,
    find_format,
    fitting,
    shortened,
    to_theirs,
    unlike,
)
from regard.pretrained.mae import PAINTS, decoder_told, export_rest
from regard.pretrained.mean import as_modernbert, from_modernbert, with_gates
from regard.pretrained.parts import read_object
from regard.pretrained.shards import import_first, open_weights, write_shards
from regard.pretrained.tables import FORMATS, HARMLESS, HARMLESS_LIKE, Format
from regard.pretrained.talk import read_chat, write_chat
from regard.pretrained.vision import PREPARED, read_prepared, write_prepared
from regard.pretrained.vocabulary import read_tokenizers
from regard.weights import float_state

MOST_LABELS = 1_000_000
LONGEST_LABEL = 200
WRITES = ("running", "context")  # what a model of running text was trained on, for our own eyes
READ_AT_ONCE, CUT = ("classify", "tag"), "max_length"  # tasks that cut long texts, and where
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def is_foreign(folder: str | Path) -> bool:
    """Tell whether a folder holds a public checkpoint rather than a model of Regard's."""
    return read_any_config(folder)[1]


def read_any_config(folder: str | Path) -> tuple[dict[str, Any] | None, bool]:
    """Return what a folder's config.json holds, if there is one, and whether it is foreign."""
    path = Path(folder) / "config.json"
    if Path(folder).suffix == ".gguf" and Path(folder).is_file():
        raise import_first(Path(folder))
    if not path.is_file():
        return None, False
    config = read_object(path)
    theirs = bool({"model_type", "architectures"} & set(config))
    return config, theirs and "regard_format" not in config


def read_foreign(folder: str | Path) -> tuple[Format, str, Any]:
    """Read the config of a public checkpoint: its format, the name of its class, our config."""
    path = Path(folder) / "config.json"
    theirs = read_object(path)
    try:
        format = find_format(theirs.get("model_type"))
        named = _architecture(format, theirs.get("architectures"))
        settings = format.read_config(theirs, named)
        _known(format, theirs, settings, named)
        return format, named, settings
    except UsageError as mistake:
        raise UsageError(f"{path}: {mistake}") from None
    except STRANGE as error:
        raise UsageError(f"{path}: not a config of this model_type ({error!r:.100})") from error


def _known(format: Format, theirs: Mapping[str, Any], settings: Any, named: str) -> None:
    """Refuse keys that we do not know: an answer may depend on them.

    We know those that we would write ourselves for the same model, and those that change nothing.
    """
    written = format.write_config(format.settle(settings), format.architectures[named])
    known = {*written, *HARMLESS, *GENERATION, *format.harmless}
    for key, value in theirs.items():
        if key in known or HARMLESS_LIKE.search(key):
            continue
        if value not in (None, False, [], {}, ""):
            raise UsageError(
                f"{key!r:.60}={shortened(value)} is not known; "
                "take it out if no answer depends on it"
            )


def import_folder(
    folder: str | Path,
    device: str = "cpu",
    read: Callable[[Path], tuple[Any, Any]] = read_tokenizers,
) -> tuple[nn.Module, dict[str, Any], tuple[Any, Any]]:
    """Read a public checkpoint: a model, its config as in a folder of ours, and its tokenizers.

    The tokenizers are for what the model reads and for what it writes, mostly the same. Names and
    sizes are compared with the headers of the weights before any memory is taken.
    """
    folder = Path(folder)
    path = folder / "config.json"
    theirs = read_object(path)
    format, named, settings = read_foreign(folder)
    weights = open_weights(folder)
    model = build_hollow(format.family, settings, path, len(weights.shapes))
    try:
        known = compare(format, settings, weights.shapes, named)
    except UsageError as mistake:
        raise UsageError(f"{folder}: {mistake}") from None
    tokenizers: tuple[Any, Any] = (None, None)
    if format.reads != "images":
        tokenizers = read(folder)
        _fits(folder, settings, tokenizers)
    task = format.architectures[named]
    if task == "text" and theirs.get("regard_task") == "translate":  # one that we exported
        task = "translate"
    config = {
        "regard_format": FORMAT,
        "family": format.family,
        "task": task,
        "imported": {"model_type": format.model_type, "architecture": named},
        **_about(folder, theirs, task, settings),
        "model": dataclasses.asdict(settings),
    }
    tensors = convert(format, settings, weights, known, named)
    give_weights(model, {name: tensor.to(device) for name, tensor in tensors.items()})
    if format.model_type == "modernbert":  # one that we exported, perhaps
        model = from_modernbert(model).to(device)
        config["model"] = dataclasses.asdict(model.config)
    return model.eval(), config, tokenizers


def _architecture(format: Format, named: Any) -> str:
    """Return which of a format's models a config names, or the usual one if it names none."""
    if named is None:
        return architecture(format)
    names = named if isinstance(named, list) else [named]
    for name in names:
        if isinstance(name, str) and name in format.architectures:
            return name
    known = ", ".join(format.architectures)
    raise UsageError(f"architectures={named!r:.60}; known for {format.model_type} are {known}")


def _fits(folder: Path, settings: Any, tokenizers: tuple[Any, Any]) -> None:
    """Refuse a tokenizer with more pieces than the model has rows for."""
    sizes = [getattr(settings, f"{side}_vocab", None) for side in ("source", "target")]
    for tokenizer, size in zip(tokenizers, sizes, strict=True):
        size = settings.vocab if size is None else size
        if tokenizer.vocab > size:
            raise UsageError(
                f"{folder}: the tokenizer has {tokenizer.vocab} pieces, the model only {size}; "
                "use the tokenizer that belongs to it"
            )


def _about(folder: Path, theirs: Mapping[str, Any], task: str, settings: Any) -> dict[str, Any]:
    """Return what a task wants to know beside the model."""
    if task in ("images", "pretrain"):
        labels = {"labels": _labels(theirs)} if task == "images" else {}
        kind = _problem(theirs)
        if labels and (kind not in ("", ONE) or len(labels["labels"]) == 1):
            raise UsageError(
                f"problem_type={kind or None} with {len(labels['labels'])} labels is not supported "
                "for images; only one of several labels is"
            )
        image = read_prepared(folder, settings.image, settings.channels)
        return {**labels, "image": image, **decoder_told(theirs)}
    if task == "classify":
        labels, kind = _labels(theirs), _problem(theirs)
        if kind == VALUE and len(labels) > 1:
            raise UsageError(f"problem_type={kind} with {len(labels)} labels; only 1 is supported")
        told = {"problem_type": kind} if kind else {}
        return {"labels": labels, "several": kind == SEVERAL, **told, **_cut(theirs)}
    if task == "tag":
        return {"labels": _labels(theirs), **_cut(theirs)}
    if task == "embed":
        last = {"pooling": "last"} if theirs.get("model_type") == "clip_text_model" else {}
        return {**last, **_pooling(folder, settings.max_length)}
    if task == "translate" and "regard_task" in theirs:
        sides = {key: theirs.get(f"regard_{key}") for key in ("from", "to")}
        return {key: value for key, value in sides.items() if isinstance(value, str)}
    if task == "translate" and (folder / "tokenizer_config.json").is_file():
        settings = read_object(folder / "tokenizer_config.json")
        sides = {"from": settings.get("source_lang"), "to": settings.get("target_lang")}
        return {key: value for key, value in sides.items() if isinstance(value, str)}
    if task == "language":
        found = {key: theirs[f"regard_{key}"] for key in WRITES if f"regard_{key}" in theirs}
        talk = read_chat(folder)
        return found if talk is None else {**found, "chat": talk}
    return {}


def _cut(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return where a model that we exported cuts texts, if it says so."""
    key = f"regard_{CUT}"
    return {CUT: theirs[key]} if key in theirs else {}


# their words for what the logits of labels mean
ONE, SEVERAL = "single_label_classification", "multi_label_classification"
VALUE = "regression"


def _problem(theirs: Mapping[str, Any]) -> str:
    """Return what the logits of labels mean, or nothing if the config does not tell."""
    kind = theirs.get("problem_type")
    if kind not in (None, ONE, SEVERAL, VALUE):
        raise UsageError(f"problem_type={kind!r:.40}; expected one of {ONE}, {SEVERAL}, {VALUE}")
    return kind or ""


def _labels(theirs: Mapping[str, Any]) -> list[str]:
    """Return the names of the classes in their order."""
    names = theirs.get("id2label")
    if not isinstance(names, dict):
        count = theirs.get("num_labels", 2)
        count = count if isinstance(count, int) and 0 < count <= MOST_LABELS else 2
        return [f"LABEL_{number}" for number in range(count)]
    if not 0 < len(names) <= MOST_LABELS or set(names) != {str(n) for n in range(len(names))}:
        raise UsageError(f"config.json: id2label has {len(names)} classes; expected 0, 1 and so on")
    labels = [names[str(number)] for number in range(len(names))]
    for label in labels:
        if not isinstance(label, str) or len(label) > LONGEST_LABEL:
            raise UsageError(f"config.json: the label {label!r:.40} is no short text")
    return labels


# how sentence-transformers names the ways to make one vector of many
POOLINGS = {
    "pooling_mode_cls_token": "first",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
}


def _pooling(folder: Path, most: int) -> dict[str, Any]:
    """Return how a sentence-embedding model makes one vector of many, if it says so."""
    found: dict[str, Any] = {}
    path = folder / "1_Pooling" / "config.json"
    if path.is_file():
        told = read_object(path)
        modes = [key for key, value in told.items() if key[:13] == "pooling_mode_" and value]
        if len(modes) != 1 or modes[0] not in POOLINGS:
            raise UsageError(f"{path}: {str(modes)[:80]}; expected one of {', '.join(POOLINGS)}")
        found["pooling"] = POOLINGS[modes[0]]
    if (folder / "modules.json").is_file():
        with open(folder / "modules.json", encoding="utf-8", errors="replace") as file:
            kinds = set(re.findall(r'"sentence_transformers\.([\w.]{1,80})"', file.read(100_000)))
        parts = {kind.rpartition(".")[2] for kind in kinds}
        if more := parts - {"Transformer", "Pooling", "Normalize"}:
            raise UsageError(
                f"{folder / 'modules.json'}: a part {min(more)}, which is not supported"
            )
        found["normalise"] = "Normalize" in parts
    path = folder / "sentence_bert_config.json"
    if path.is_file():
        longest = read_object(path).get("max_seq_length")
        if isinstance(longest, int) and longest > 0:
            found["max_length"] = min(longest, most)
    return found


# ---- and out


def export_weights(
    model: Any,
    config: Mapping[str, Any],
    tokenizers: tuple[Any, Any],
    folder: Path,
    *,
    dtype: str = "float32",
    max_shard: int | None = None,
    whole: Any = None,
) -> str:
    """Write a model's config.json and weights as transformers has them; return its model_type.

    `whole` is an encoder of images with what paints for it, written too where they have a word.
    """
    kind = lookup("dtype", dtype, DTYPES)
    task = str(config["task"])
    if whole is not None and (found := export_rest(whole, model.config)):
        theirs, tensors = found
        sizes = {} if max_shard is None else {"max_shard": max_shard}
        write_shards(folder, {name: x.detach().to(kind) for name, x in tensors.items()}, **sizes)
        write_json(folder / "config.json", theirs | {"architectures": [PAINTS], "dtype": dtype})
        write_json(folder / PREPARED, write_prepared(config["image"]))
        return str(theirs["model_type"])
    try:
        format, theirs = _format(config, model.config, task)
    except UsageError:
        alike = with_gates(model.config) if isinstance(model.config, BertConfig) else None
        if alike is None:
            raise
        if dtype == "float16":
            raise UsageError(
                "dtype=float16 is too coarse for the head of a classifier with pool=mean; "
                "choose float32 or bfloat16"
            ) from None
        format, theirs = fitting(str(config["family"]), alike, task)
        model = as_modernbert(model, alike)
    named = architecture(format, task, model.config)
    ids = _ids(theirs, tokenizers) if format.reads == "text" else {}
    for key, number in ids.items():
        if theirs.get(key, number) != number:  # RoBERTa counts positions from that of its padding
            raise UsageError(
                f"{format.model_type} needs {key}={theirs[key]}, the tokenizer has {number}; "
                "only a model that came in this format can be written in it"
            )
    tensors = to_theirs(format, model.config, float_state(model), named)
    tensors |= format.more(model.config)
    sizes = {} if max_shard is None else {"max_shard": max_shard}
    write_shards(folder, {name: x.detach().to(kind) for name, x in tensors.items()}, **sizes)
    theirs |= {"architectures": [named], "dtype": dtype}
    labels = config.get("labels")
    if isinstance(labels, list):
        theirs["id2label"] = {str(number): label for number, label in enumerate(labels)}
        theirs["label2id"] = {label: number for number, label in enumerate(labels)}
        kind = config.get("problem_type", SEVERAL if config.get("several") is True else None)
        theirs |= {"problem_type": kind} if kind else {}
    if task == "translate" and format.architectures[named] == "text":
        theirs["regard_task"] = task
        theirs |= {f"regard_{side}": config[side] for side in ("from", "to") if config.get(side)}
    if task == "tag" and config.get("join", "first") != "first":
        raise UsageError(
            f"join={config['join']} has no counterpart: others label a word by its first piece; "
            "train with join=first to export"
        )
    if config.get("features", "none") != "none":
        raise UsageError(
            f"features={config['features']!r:.40} have no counterpart in a public format; "
            "train with features=none to export"
        )
    if task in READ_AT_ONCE and CUT in config:
        theirs[f"regard_{CUT}"] = config[CUT]
    if task == "language":  # which transformers keeps and does not ask
        theirs |= {f"regard_{key}": config[key] for key in WRITES if key in config}
    write_json(folder / "config.json", theirs | ids)
    if task in ("language", "text", "translate"):
        how = config.get("generation") or {}
        told = write_generation(how, list(tokenizers[1].never))
        if task == "translate" and not {"max_length", "max_new_tokens"} & set(told):
            told |= {"max_new_tokens": LONGEST, USUAL: True}  # others would stop after 20
        if isinstance(how.get("alignment_head"), str):
            told[HEAD] = how["alignment_head"]
        sizes = vocabularies(theirs)
        write_json(folder / FILE, {**ids, **shifted(told, sizes[0] if sizes else 0)})
    write_chat(folder, config)
    if "pooling" in config:
        _write_pooling(folder, config, model.config.block.width)
    if isinstance(config.get("image"), dict):
        write_json(folder / PREPARED, write_prepared(config["image"]))
    return format.model_type


def _write_pooling(folder: Path, config: Mapping[str, Any], width: int) -> None:
    """Write how one vector is made of many, as sentence-transformers has it."""
    modes = {key: ours == config["pooling"] for key, ours in POOLINGS.items()}
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": width, **modes})
    parts = [("", "Transformer"), ("1_Pooling", "Pooling")]
    parts += [("2_Normalize", "Normalize")] if config.get("normalise") else []
    modules = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (path, kind) in enumerate(parts)
    ]
    write_atomically(folder / "modules.json", json.dumps(modules, indent=2) + "\n")
    if "max_length" in config:
        longest = {"max_seq_length": config["max_length"], "do_lower_case": False}
        write_json(folder / "sentence_bert_config.json", longest)


def _format(config: Mapping[str, Any], settings: Any, task: str) -> tuple[Format, dict[str, Any]]:
    """Return the format that a model came in, if it still fits, or one that does."""
    told = config.get("imported")
    came = told.get("model_type") if isinstance(told, dict) else None
    if isinstance(came, str) and came in FORMATS:
        format = find_format(came)
        theirs = format.write_config(settings, task)
        named = architecture(format, task, settings)
        if not unlike(settings, format.read_config(theirs, named)):
            return format, theirs
    return fitting(str(config["family"]), settings, task)


def _ids(theirs: Mapping[str, Any], tokenizers: tuple[Any, Any]) -> dict[str, Any]:
    """Return the ids of special tokens in their words."""
    target = tokenizers[1]
    ids: dict[str, Any] = {
        f"{role}_token_id": target.specials.get(role) for role in ("bos", "eos", "pad")
    }
    if len(target.ends) > 1:
        ids["eos_token_id"] = list(target.ends)
    if theirs.get("is_encoder_decoder"):
        ids["decoder_start_token_id"] = target.begin
    if sizes := vocabularies(theirs):  # padding is that of what is read
        ids = {key: n + sizes[0] if key != "pad_token_id" else n for key, n in ids.items()}
    return ids


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object for people to read."""
    write_atomically(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
