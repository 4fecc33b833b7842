"""How public checkpoints name things: a format is a table of their weights and config keys."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rule:
    """One of our weights and where it stands in theirs; `{}` is the number of a layer.

    Several of theirs are joined along the rows: evenly, unless `rows` tells how many each has.
    `also` are names under which the same weight may be written once more, or instead: two that
    differ are refused. `instead` are names that are read only where its own is missing. Where
    theirs holds several of ours, `part` is which of how many parts of its rows is this one, evenly
    unless `rows` tells.
    """

    ours: str
    theirs: tuple[str, ...]
    change: str = "same"
    rows: tuple[int, ...] = ()
    also: tuple[str, ...] = ()
    instead: tuple[str, ...] = ()
    part: tuple[int, int] = (0, 1)


class Change(NamedTuple):
    """How one of their tensors becomes ours under a config, and back."""

    read: Callable[[Tensor, Any], Tensor]
    write: Callable[[Tensor, Any], Tensor]


def _by_head(x: Tensor, config: Any) -> Tensor:
    """Part (h 3 d) rows, with query, key and value of a head together, into (3 h d)."""
    return x.unflatten(0, (config.block.heads, 3, -1)).transpose(0, 1).flatten(0, 2)


def _by_part(x: Tensor, config: Any) -> Tensor:
    """Put (3 h d) rows together by head, (h 3 d)."""
    return x.unflatten(0, (3, config.block.heads, -1)).transpose(0, 1).flatten(0, 2)


def _after_two(x: Tensor, config: Any) -> Tensor:
    """Put two rows that nobody reads before a table."""
    return torch.cat([x.new_zeros(2, *x.shape[1:]), x])


def _as_convolution(x: Tensor, config: Any) -> Tensor:
    """Lay the weight of a product with patches out as that of a convolution."""
    return x.unflatten(1, (config.channels, config.patch, config.patch))


CHANGES: dict[str, Change] = {
    "same": Change(lambda x, config: x, lambda x, config: x),
    # transformers' Conv1D keeps its matrix the other way round
    "transpose": Change(lambda x, config: x.mT, lambda x, config: x.mT),
    # positions of RoBERTa and BART begin in the third row
    "skip2": Change(lambda x, config: x[2:], _after_two),
    # a vector written as a matrix of one row
    "row": Change(lambda x, config: x.flatten(), lambda x, config: x.unsqueeze(0)),
    # a matrix of one row written as a vector
    "row_of": Change(lambda x, config: x.unsqueeze(0), lambda x, config: x.flatten()),
    "bloom_qkv": Change(_by_head, _by_part),
    # a convolution whose patches do not overlap is a product with them
    "patches": Change(lambda x, config: x.flatten(1), _as_convolution),
}


@dataclass(frozen=True)
class Key:
    """One of our settings (`block.width`), the key of theirs that holds it, and their default.

    `names` gives our name of a value where it differs from theirs; of several for one of ours, the
    first is written.
    """

    ours: str
    theirs: str
    default: Any = None
    names: Mapping[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Format:
    """All there is to know about one kind of public checkpoint."""

    model_type: str  # as their config.json has it
    architectures: Mapping[str, str]  # their class -> our task; the first one is meant by default
    family: str  # key of MODELS
    read_config: Callable[[Mapping[str, Any], str], Any]  # their config, architecture -> ours
    write_config: Callable[[Any, str], dict[str, Any]]  # our config, task -> theirs
    rules: Callable[[Any, str], list[Rule]]  # our config, architecture -> all weights
    ignored: tuple[str, ...] = ()  # patterns of their keys that are no weights
    prefix: str = ""  # of their base model's keys, there or not
    settle: Callable[[Any], Any] = lambda config: config  # the same model in the plainest words
    holds: Callable[[Any, str], bool] = lambda config, architecture: True  # which of their classes
    reads: str = "text"  # or images, which have no tokenizer, or both
    harmless: tuple[str, ...] = ()  # keys of their config that change no answer
    more: Callable[[Any], dict[str, Tensor]] = lambda config: {}  # of theirs that we compute


# keys of any config.json that change no answer of a model in use
HARMLESS = frozenset(
    [
        "architectures",
        "model_type",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "tokenizer_class",
        "processor_class",
        "auto_map",
        "is_encoder_decoder",
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "finetuning_task",
        "task_specific_params",
        "tie_encoder_decoder",
        "tie_word_embeddings",
        "name",
        "language",
        "license",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "cls_token_id",
        "mask_token_id",
        "unk_token_id",
        "decoder_start_token_id",
        "use_cache",
        "cache_implementation",
        "gradient_checkpointing",
        "torchscript",
        "use_bfloat16",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "output_past",
        "attn_implementation",
        "pruned_heads",
        "chunk_size_feed_forward",
        "vocab_file",
        "model_max_length",
        "xla_device",
        "max_position_embeddings",
        "pretraining_tp",
        "unsloth_version",
        "unsloth_fixed",
        "adapters",
        "prefix",
    ]
)
# and how they begin or what is in them: how a model starts, and what is left out in training
HARMLESS_LIKE = re.compile(r"^_|^regard_|^init|^summary_|drop")


# model_type -> the module whose FORMATS has it; imported only when asked for
FORMATS: dict[str, str] = {
    "gpt2": "regard.pretrained.gpt",
    "llama": "regard.pretrained.gpt",
    "mistral": "regard.pretrained.gpt",
    "bloom": "regard.pretrained.gpt",
    "qwen2": "regard.pretrained.decoders",
    "qwen3": "regard.pretrained.decoders",
    "gpt_neox": "regard.pretrained.decoders",
    "gemma": "regard.pretrained.decoders",
    "gemma2": "regard.pretrained.decoders",
    "gemma3_text": "regard.pretrained.decoders",
    "bert": "regard.pretrained.bert",
    "roberta": "regard.pretrained.bert",
    "albert": "regard.pretrained.bert",
    "deberta-v2": "regard.pretrained.bert",
    "xlm-roberta": "regard.pretrained.bert",
    "camembert": "regard.pretrained.bert",
    "distilbert": "regard.pretrained.bert",
    "electra": "regard.pretrained.bert",
    "mpnet": "regard.pretrained.bert",
    "modernbert": "regard.pretrained.bert",
    "esm": "regard.pretrained.bert",
    "t5": "regard.pretrained.seq2seq",
    "mt5": "regard.pretrained.seq2seq",
    "bart": "regard.pretrained.seq2seq",
    "marian": "regard.pretrained.seq2seq",
    "pegasus": "regard.pretrained.seq2seq",
    "dinov2": "regard.pretrained.dino",
    "clip": "regard.pretrained.clip",
    "clip_text_model": "regard.pretrained.clip",
    "clip_vision_model": "regard.pretrained.clip",
    "vit": "regard.pretrained.vision",
    "deit": "regard.pretrained.vision",
    "vit_mae": "regard.pretrained.vision",
    "resnet": "regard.pretrained.vision",
    "swin": "regard.pretrained.swin",
    "swinv2": "regard.pretrained.swin",
}


def linear(ours: str, *theirs: str, bias: bool = True, **settings: Any) -> list[Rule]:
    """Name the weight and, where there is one, the bias of a linear map or a norm.

    A transposed weight has a bias as any other.
    """
    weight = Rule(f"{ours}.weight", tuple(f"{name}.weight" for name in theirs), **settings)
    if not bias:
        return [weight]
    if settings.get("change") == "transpose":
        settings = {**settings, "change": "same"}
    return [weight, Rule(f"{ours}.bias", tuple(f"{name}.bias" for name in theirs), **settings)]
