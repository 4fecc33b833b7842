"""What config.json and the small files beside it tell of a model's task, read and written."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from regard.errors import UsageError
from regard.files import read_json, write_json
from regard.models.bert import BertConfig
from regard.models.protocols import ImageModelConfig, ModelConfig
from regard.models.whisper import WhisperConfig
from regard.pretrained.chat_template import read_chat, write_chat
from regard.pretrained.config_keys import Theirs
from regard.pretrained.feature_extractor import read_extractor, write_extractor
from regard.pretrained.image_processor import read_processor, write_processor
from regard.pretrained.mae_decoder import read_decoder_config

_MOST_LABELS = 1_000_000
_LONGEST_LABEL = 200
# their problem_type: what the logits of labels mean
_ONE_LABEL, _MANY_LABELS = "single_label_classification", "multi_label_classification"
_VALUE = "regression"
_PROBLEM_TYPES = (None, _ONE_LABEL, _MANY_LABELS, _VALUE)
# how sentence-transformers names the ways to make one vector of many
_POOLINGS = {
    "pooling_mode_cls_token": "first",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
}
# of our config, kept in theirs as regard_KEY, which transformers keeps and does not ask
_KEPT = {
    "classify": ("max_length",),  # where long texts are cut
    "tag": ("max_length",),
    "language": ("running", "context"),  # what a model of running text was trained on
    "translate": ("from", "to"),
}


def read_task_config(
    folder: Path, theirs: Theirs, task: str, config: ModelConfig
) -> dict[str, Any]:
    """Return what a task knows beside the model, as the config.json of a folder of ours has it."""
    made: dict[str, Any] = {}
    for read in _READERS.get(task, ()):
        made |= read(folder, theirs, config)
    return made


def _kept(task: str) -> Callable[[Path, Theirs, Any], dict[str, Any]]:
    """Return a reader of what we keep in their config.json where we export."""
    return lambda folder, theirs, config: {
        key: theirs[f"regard_{key}"] for key in _KEPT[task] if f"regard_{key}" in theirs
    }


def _labels(theirs: Theirs) -> list[str]:
    """Return the names of the classes in their order."""
    names = theirs.get("id2label")
    if not isinstance(names, dict):
        count = theirs.get("num_labels", 2)
        count = count if isinstance(count, int) and 0 < count <= _MOST_LABELS else 2
        return [f"LABEL_{number}" for number in range(count)]
    if not 0 < len(names) <= _MOST_LABELS or set(names) != {str(n) for n in range(len(names))}:
        raise UsageError(f"config.json: id2label has {len(names)} classes; expected 0, 1 and so on")
    labels = [names[str(number)] for number in range(len(names))]
    for label in labels:
        if not isinstance(label, str) or len(label) > _LONGEST_LABEL:
            raise UsageError(f"config.json: the label {label!r:.40} is not a short text")
    return labels


def _problem_type(theirs: Theirs) -> str | None:
    kind = theirs.get("problem_type")
    if kind not in _PROBLEM_TYPES:
        known = ", ".join(_PROBLEM_TYPES[1:])
        raise UsageError(f"problem_type={kind!r:.40}; expected one of {known}")
    return kind


def _read_tags(folder: Path, theirs: Theirs, config: ModelConfig) -> dict[str, Any]:
    return {"labels": _labels(theirs)}


def _read_classes(folder: Path, theirs: Theirs, config: ModelConfig) -> dict[str, Any]:
    labels, kind = _labels(theirs), _problem_type(theirs)
    if kind == _VALUE and len(labels) > 1:
        raise UsageError(f"problem_type={kind} with {len(labels)} labels; only 1 is supported")
    given = {"problem_type": kind} if kind else {}
    return {"labels": labels, "several": kind == _MANY_LABELS, **given}


def _read_image_classes(folder: Path, theirs: Theirs, config: ModelConfig) -> dict[str, Any]:
    labels, kind = _labels(theirs), _problem_type(theirs)
    if kind not in (None, _ONE_LABEL) or len(labels) == 1:
        raise UsageError(
            f"problem_type={kind} with {len(labels)} labels is not supported for images; only one "
            "of several labels is"
        )
    return {"labels": labels}


def _read_images(folder: Path, theirs: Theirs, config: ImageModelConfig) -> dict[str, Any]:
    image = read_processor(folder, config.image, config.channels)
    return {"image": image, **read_decoder_config(theirs)}


def _read_sounds(folder: Path, theirs: Theirs, config: WhisperConfig) -> dict[str, Any]:
    return {"sound": read_extractor(folder, config.mels, 2 * config.max_frames)}


def _read_languages(folder: Path, theirs: Theirs, config: ModelConfig) -> dict[str, Any]:
    """Return the languages of a translator: of one that we exported, or of Marian's tokenizer."""
    path = folder / "tokenizer_config.json"
    if "regard_task" in theirs:
        sides = _kept("translate")(folder, theirs, config)
    else:
        settings = read_json(path) if path.is_file() else {}
        sides = {"from": settings.get("source_lang"), "to": settings.get("target_lang")}
    return {key: value for key, value in sides.items() if isinstance(value, str)}


def _read_chat(folder: Path, theirs: Theirs, config: ModelConfig) -> dict[str, Any]:
    chat = read_chat(folder)
    return {} if chat is None else {"chat": chat}


def _read_pooling(folder: Path, theirs: Theirs, config: BertConfig) -> dict[str, Any]:
    """Return how a sentence-embedding model makes one vector of many, if it says so."""
    made: dict[str, Any] = {}
    path = folder / "1_Pooling" / "config.json"
    if path.is_file():
        modes = [key for key, on in read_json(path).items() if key[:13] == "pooling_mode_" and on]
        if len(modes) != 1 or modes[0] not in _POOLINGS:
            raise UsageError(f"{path}: {str(modes)[:80]}; expected one of {', '.join(_POOLINGS)}")
        made["pooling"] = _POOLINGS[modes[0]]
    path = folder / "modules.json"
    if path.is_file():
        with open(path, encoding="utf-8", errors="replace") as file:
            kinds = set(re.findall(r'"sentence_transformers\.([\w.]{1,80})"', file.read(100_000)))
        modules = {kind.rpartition(".")[2] for kind in kinds}
        if more := modules - {"Transformer", "Pooling", "Normalize"}:
            raise UsageError(f"{path}: a module {min(more)}, which is not supported")
        made["normalise"] = "Normalize" in modules
    path = folder / "sentence_bert_config.json"
    if path.is_file():
        longest = read_json(path).get("max_seq_length")
        if isinstance(longest, int) and longest > 0:
            made["max_length"] = min(longest, config.max_length)
    return made


# task -> what is read for it
_READERS: dict[str, tuple[Callable[[Path, Theirs, Any], dict[str, Any]], ...]] = {
    "images": (_read_image_classes, _read_images),
    "pretrain": (_read_images,),
    "classify": (_read_classes, _kept("classify")),
    "tag": (_read_tags, _kept("tag")),
    "embed": (_read_pooling,),
    "translate": (_read_languages,),
    "transcribe": (_read_sounds,),
    "language": (_kept("language"), _read_chat),
}


# ---- and out


def write_task_config(
    folder: Path, config: Mapping[str, Any], task: str, model_config: Any
) -> dict[str, Any]:
    """Write the small files of a model of ours; return what config.json is to say beside it.

    `task` is the one that their class is for: a translator may be written as a model for texts;
    `model_config` is that of the model.
    """
    if config["task"] == "tag" and config.get("join", "first") != "first":
        raise UsageError(
            f"join={config['join']} has no counterpart: others label a word by its first piece; "
            "train with join=first to export"
        )
    if config.get("features", "none") != "none":
        raise UsageError(
            f"features={config['features']!r:.40} have no counterpart in a public format; "
            "train with features=none to export"
        )
    theirs: dict[str, Any] = {}
    labels = config.get("labels")
    if isinstance(labels, list):
        theirs["id2label"] = {str(number): label for number, label in enumerate(labels)}
        theirs["label2id"] = {label: number for number, label in enumerate(labels)}
        kind = config.get("problem_type", _MANY_LABELS if config.get("several") is True else None)
        theirs |= {"problem_type": kind} if kind else {}
    if config["task"] != "translate" or task != "translate":
        kept = _KEPT.get(config["task"], ())
        theirs |= {
            f"regard_{key}": config[key] for key in kept if config.get(key) not in (None, "")
        }
    if config["task"] != task:
        theirs["regard_task"] = config["task"]
    write_chat(folder, config)
    if "pooling" in config:
        _write_pooling(folder, config, model_config.block.width)
    if isinstance(config.get("image"), dict):
        write_processor(folder, config["image"])
    if isinstance(config.get("sound"), dict):
        write_extractor(folder, config["sound"], 2 * model_config.max_frames)
    return theirs


def _write_pooling(folder: Path, config: Mapping[str, Any], width: int) -> None:
    """Write how one vector is made of many, as sentence-transformers has it."""
    modes = {key: ours == config["pooling"] for key, ours in _POOLINGS.items()}
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": width, **modes})
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    modules += [("2_Normalize", "Normalize")] if config.get("normalise") else []
    listed = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (path, kind) in enumerate(modules)
    ]
    write_json(folder / "modules.json", listed)
    if "max_length" in config:
        longest = {"max_seq_length": config["max_length"], "do_lower_case": False}
        write_json(folder / "sentence_bert_config.json", longest)
