"""What of a model becomes an ONNX file: functions of arrays, with inputs to try them on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.attention.masks import Padding
from regard.data.rows import TextBatch, collate
from regard.errors import UsageError
from regard.tasks.runner import Runner

Axes = tuple[str | int, ...]  # a word for an axis of any length, a number for one that is fixed
_LONGEST_TRIED = 512  # tokens, frames or steps of the longest input that is compared


class ExportedPart(nn.Module):
    """A function of a model and arrays as a module of its own."""

    def __init__(self, model: nn.Module, function: Callable[..., Any]):
        super().__init__()
        self.model, self.function = model, function

    def forward(self, *inputs: Tensor) -> Any:
        """What the function makes of the inputs."""
        return self.function(self.model, *inputs)


@dataclass(frozen=True)
class Program:
    """A part of a model that is one file.

    Args:
        name: of the file, before .onnx.
        part: the module.
        inputs: names of its inputs in order, with their axes.
        outputs: names of its outputs in order, with their axes.
        sample: inputs of so many rows and of a length, padded where it is more than one row.
        longest: length of the longest input that is tried.
    """

    name: str
    part: nn.Module
    inputs: Mapping[str, Axes]
    outputs: Mapping[str, Axes]
    sample: Callable[[int, int], tuple[Tensor, ...]]
    longest: int = 1

    @torch.no_grad()
    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Outputs of the module for inputs."""
        made = self.part(*inputs)
        return made if isinstance(made, tuple) else (made,)


@dataclass(frozen=True)
class Greedy:
    """How a text is written token by token with an encoder and a decoder.

    Args:
        begin: tokens that a text is written after.
        end: token that ends it.
        never: tokens that are never written.
        most: tokens of the longest text.
    """

    begin: Sequence[int]
    end: int
    never: Sequence[int]
    most: int


@dataclass(frozen=True)
class Exported:
    """All that the folder of a model holds beside README.md.

    Args:
        programs: the files, the encoder before the decoder.
        about: what onnx.json says.
        tokenizers: of what is read and of what is written, if it is text.
        greedy: how a text is written, of a model that writes.
    """

    programs: Sequence[Program]
    about: Mapping[str, Any]
    tokenizers: tuple[Any, Any] | None = None
    greedy: Greedy | None = None
    notes: Sequence[str] = field(default_factory=tuple)


def _lengths(rows: int, length: int) -> Tensor:
    """Lengths of rows: the longest first, then ever shorter ones."""
    return torch.tensor([max(1, length * (rows - n) // rows) for n in range(rows)])


def _numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _ids(most: int, *shape: int) -> Tensor:
    return torch.randint(0, most, shape, generator=torch.Generator().manual_seed(sum(shape)))


def _text_inputs(runner: Runner[Any]) -> tuple[dict[str, Axes], Callable[..., Any], int]:
    """Inputs of an encoder of texts, samples of them, and the longest."""
    codec, config = runner.codec, runner.model.config
    given = collate(codec.encoder.texts(["a"], 8), codec.tokenizer.pad).inputs
    if other := given.keys() - {"ids", "lengths", "types"}:
        raise UsageError(f"ONNX export knows no input '{min(other)}' of an encoder; leave it out")
    inputs: dict[str, Axes] = {"ids": ("batch", "length"), "lengths": ("batch",)}
    kinds = given["types"].shape[2:] if "types" in given else None
    if kinds is not None:
        inputs["types"] = ("batch", "length", *kinds)

    def sample(rows: int, length: int) -> tuple[Tensor, ...]:
        both = _ids(codec.tokenizer.vocab, rows, length), _lengths(rows, length)
        return both if kinds is None else (*both, _ids(config.types, rows, length, *kinds))

    longest = runner.config.get("max_length") or config.max_length
    return inputs, sample, min(longest, _LONGEST_TRIED)


def _arguments(ids: Tensor, lengths: Tensor, types: Tensor | None = None) -> dict[str, Tensor]:
    return TextBatch(ids, lengths, types).inputs


def _texts(runner: Runner[Any], part: nn.Module, outputs: Mapping[str, Axes]) -> Exported:
    """An encoder of texts with one output for each text or token."""
    inputs, sample, longest = _text_inputs(runner)
    codec = runner.codec
    most = runner.config.get("max_length") or runner.model.config.max_length
    about = {"max_length": most, "pad": codec.tokenizer.pad, **_labels(runner)}
    notes = []
    if codec.encoder.features is not None:
        notes.append("`types` are features of words, as features.json numbers them.")
    program = Program("model", part, inputs, outputs, sample, longest)
    return Exported([program], about, (codec.tokenizer, codec.tokenizer), notes=notes)


def _labels(runner: Runner[Any]) -> dict[str, Any]:
    if not runner.labels:
        return {}
    several = getattr(getattr(runner.codec, "decision", None), "several", False)
    return {"labels": runner.labels, "several": several}


def _classify(runner: Runner[Any]) -> Exported:
    part = ExportedPart(runner.model, lambda model, *texts: model(**_arguments(*texts)))
    return _texts(runner, part, {"logits": ("batch", len(runner.labels))})


def _tag(runner: Runner[Any]) -> Exported:
    model, join = runner.model, getattr(runner.codec, "join", "first")
    if join != "first" and not isinstance(model.head.transform, nn.Identity):
        raise UsageError(
            f"join={join} before a head of several layers has no ONNX form from us; train with "
            "join=first to export"
        )
    part = ExportedPart(model, lambda model, *texts: model(**_arguments(*texts)))
    made = _texts(runner, part, {"logits": ("batch", "length", len(runner.labels))})
    return Exported(made.programs, {**made.about, "join": join}, made.tokenizers, notes=made.notes)


def _embed(runner: Runner[Any]) -> Exported:
    settings, predictor = runner.check({}), runner.predictor

    def vectors(
        model: nn.Module, ids: Tensor, lengths: Tensor, types: Tensor | None = None
    ) -> Tensor:
        pooled = predictor.pooled(TextBatch(ids, lengths, types), settings)
        return F.normalize(pooled, dim=-1) if settings.normalise else pooled

    (vector,) = runner.predictor.vectors(["a"], settings)[0]
    made = _texts(runner, ExportedPart(runner.model, vectors), {"vectors": ("batch", len(vector))})
    about = {**made.about, "pooling": settings.pooling, "normalise": settings.normalise}
    return Exported(made.programs, about, made.tokenizers, notes=made.notes)


def _images(runner: Runner[Any]) -> Exported:
    format = runner.codec.format
    part = ExportedPart(runner.model, lambda model, pixels: model(format.normalise(pixels)))
    shape = format.channels, format.size, format.size
    program = Program(
        "model",
        part,
        {"pixels": ("batch", *shape)},
        {"logits": ("batch", len(runner.labels))},
        lambda rows, length: (_ids(256, rows, *shape).to(torch.uint8),),
    )
    about = {**_labels(runner), "image": asdict(format)}
    return Exported([program], about)


def _sounds(runner: Runner[Any]) -> Exported:
    format = runner.codec.format
    program = Program(
        "model",
        ExportedPart(runner.model, lambda model, sound, frames: model(sound, frames)),
        {"spectrograms": ("batch", "length", format.mels), "lengths": ("batch",)},
        {"logits": ("batch", len(runner.labels))},
        lambda rows, length: (_numbers(rows, length, format.mels), _lengths(rows, length)),
        min(runner.model.config.max_frames, _LONGEST_TRIED),
    )
    return Exported([program], {**_labels(runner), "sound": asdict(format)})


def _series(runner: Runner[Any]) -> Exported:
    format, config = runner.codec.format, runner.model.config
    if format.axes > 1:
        raise UsageError(
            f"ONNX takes series of one axis from us, not arrays of {format.axes}; export is for "
            "series of steps"
        )
    mean, std = (
        torch.tensor(numbers, dtype=torch.float32) for numbers in (format.mean, format.std)
    )

    def logits(model: nn.Module, series: Tensor, lengths: Tensor) -> Tensor:
        normal = (series - mean) / std
        return model(torch.where(normal.isnan(), 0.0, normal), lengths)

    program = Program(
        "model",
        ExportedPart(runner.model, logits),
        {"series": ("batch", "length", format.channels), "lengths": ("batch",)},
        {"logits": ("batch", len(runner.labels))},
        lambda rows, length: (_numbers(rows, length, format.channels), _lengths(rows, length)),
        min(config.max_length, _LONGEST_TRIED),
    )
    return Exported([program], {**_labels(runner), "channels": format.channels})


def _decoder(part: nn.Module, width: int, vocab: int, longest: int) -> Program:
    """A decoder over a memory of vectors of a width."""

    def sample(rows: int, length: int) -> tuple[Tensor, ...]:
        read = _numbers(rows, length + 2, width), _lengths(rows, length + 2)
        return (_ids(vocab, rows, length), *read)

    return Program(
        "decoder",
        part,
        {
            "ids": ("batch", "length"),
            "memory": ("batch", "source_length", width),
            "lengths": ("batch",),
        },
        {"logits": ("batch", "length", vocab)},
        sample,
        min(longest, _LONGEST_TRIED - 2),
    )


def _translate(runner: Runner[Any]) -> Exported:
    model, codec, decoder = runner.model, runner.codec, runner.predictor.decoder
    if runner.family != "transformer":
        raise UsageError(
            f"ONNX takes a transformer for {runner.name} from us, not a {runner.family}, which "
            "reads and writes step by step"
        )
    config = model.config

    def encode(model: Any, ids: Tensor, lengths: Tensor) -> Tensor:
        return model.encode(ids, Padding.of(lengths, ids.shape[1]))

    def decode(model: Any, ids: Tensor, memory: Tensor, lengths: Tensor) -> Tensor:
        mask = Padding.of(lengths, memory.shape[1])
        x = model.decoder(model.target, ids, memory, mask)
        return model.head(model.before_head(model.decoder_norm(x)))

    width, longest = config.block.width, min(config.max_length, _LONGEST_TRIED)
    encoder = Program(
        "encoder",
        ExportedPart(model, encode),
        {"ids": ("batch", "length"), "lengths": ("batch",)},
        {"memory": ("batch", "length", width)},
        lambda rows, length: (
            _ids(codec.source.vocab, rows, length),
            _lengths(rows, length),
        ),
        longest,
    )
    both = [encoder, _decoder(ExportedPart(model, decode), width, config.target_vocab, longest)]
    greedy = Greedy([decoder.begin], codec.target.eos, decoder.never, config.max_length - 1)
    about = {"max_length": config.max_length, "pad": codec.source.pad, **asdict(greedy)}
    return Exported(both, about, codec.tokenizers, greedy)


def _transcribe(runner: Runner[Any]) -> Exported:
    model, codec, decoder = runner.model, runner.codec, runner.predictor.decoder
    config, format = model.config, codec.format
    outputs: dict[str, Axes] = {
        "memory": ("batch", "frames", model.out_width),
        "memory_lengths": ("batch",),
    }
    if config.ctc:
        outputs["ctc"] = ("batch", "frames", config.vocab)

    def encode(model: Any, sound: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        memory, counts = model.encode(sound, lengths)
        return (memory, counts, model.ctc_logits(memory)) if config.ctc else (memory, counts)

    most = config.max_frames * (model.stride if hasattr(config, "full_window") else 1)
    encoder = Program(
        "encoder",
        ExportedPart(model, encode),
        {"spectrograms": ("batch", "length", format.mels), "lengths": ("batch",)},
        outputs,
        lambda rows, length: (_numbers(rows, length, format.mels), _lengths(rows, length)),
        min(most, _LONGEST_TRIED),
    )
    about = {"sound": asdict(format), "max_frames": most}
    tokenizers = (codec.tokenizer, codec.tokenizer)
    if not config.decoder_depth:
        return Exported([encoder], {**about, "blank": 0}, tokenizers)

    def decode(model: Any, ids: Tensor, memory: Tensor, lengths: Tensor) -> Tensor:
        return model.head(model.decode(memory, lengths, ids))

    part = ExportedPart(model, decode)
    program = _decoder(part, model.out_width, config.vocab, config.max_length)
    begin = decoder.prompt_of(_numbers(10, format.mels), runner.check({}))
    greedy = Greedy(begin, codec.tokenizer.eos, decoder.never, config.max_length - len(begin))
    about |= {"max_length": config.max_length, **asdict(greedy)}
    return Exported([encoder, program], about, tokenizers, greedy)


# task -> what of its models is exported
PROGRAMS: dict[str, Callable[[Runner[Any]], Exported]] = {
    "classify": _classify,
    "tag": _tag,
    "embed": _embed,
    "images": _images,
    "sounds": _sounds,
    "series": _series,
    "translate": _translate,
    "text": _translate,
    "transcribe": _transcribe,
}
