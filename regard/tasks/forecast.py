"""What a training would take, before it is begun."""

import time
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch.nn import functional as F

from regard.costs.count import count as count_of
from regard.data.doctor import Counts, ImageCounts, Report
from regard.data.image import ImageFormat
from regard.errors import choose
from regard.results import Named
from regard.tasks import images
from regard.tasks.run import parameters
from regard.tasks.translate import SIZES, build, make_batch, resolve
from regard.training.loop import one_step
from regard.training.optim import build_optimiser


@dataclass(frozen=True)
class DoctorSettings:
    """What to examine."""

    source: str | None = field(default=None, metadata={"key": "from", "help": "language read"})
    target: str | None = field(default=None, metadata={"key": "to", "help": "language written"})
    columns: str | None = None
    valid: str | None = None
    test: str | None = None
    size: str = field(default="tiny", metadata={"help": "size to forecast"})


@dataclass(frozen=True)
class Forecast:
    """Time and memory of a training of a size on this machine."""

    size: str
    parameters: int
    a_second: float
    of: str  # tokens or images
    minutes_an_epoch: float
    memory_mb: float
    threads: int

    def __str__(self) -> str:
        return (
            f"forecast for size={self.size}: {self.parameters:,} parameters, about "
            f"{self.a_second:,.0f} {self.of}/s on {self.threads} threads, "
            f"{self.minutes_an_epoch:.1f} minutes an epoch, {self.memory_mb:,.0f} MB of memory"
        )


class _Made:
    """Batches of random tokens, as long as the user's sentences."""

    def __init__(self, tokenizer: Any, rows: int, lengths: tuple[int, int]):
        self.tokenizer, self.rows, self.lengths = tokenizer, rows, lengths

    def batch(self, n: int):
        """Return a batch of random tokens."""
        chance = np.random.default_rng(n)
        source, target = (
            [chance.integers(4, self.tokenizer.vocab, length) for _ in range(self.rows)]
            for length in self.lengths
        )
        return make_batch(source, target, self.tokenizer, self.tokenizer)

    def count(self, batch) -> tuple[int, int]:
        """Return what the loss counts, and all that is read."""
        return batch.tokens, batch.read

    def loss(self, model, batch):
        """Return the translation loss."""
        from regard.tasks.translate import translation_loss

        return translation_loss(model, batch, 0.1, 0.0)


@dataclass(frozen=True)
class _Vocabulary:
    """Only the numbers of a tokenizer."""

    vocab: int
    pad: int = 0
    bos: int = 1
    eos: int = 2


def _speed(model: Any, task: Any, settings: Any) -> float:
    """Return how much of what a task counts as read some steps read in a second."""
    model.train()
    optimiser = build_optimiser(model, lr=1e-4)
    speeds = []
    started = time.perf_counter()
    for n in range(6):
        begun = time.perf_counter()
        _, _, read, _ = one_step(model, task, settings, optimiser, n, 1e-4)
        speeds.append(read / (time.perf_counter() - begun))
        if n > 1 and time.perf_counter() - started > 20:
            break
    return sorted(speeds[1:])[len(speeds[1:]) // 2]


class _Drawn:
    """Batches of noise for pictures of a format, under labels by chance."""

    def __init__(self, batch: int, shape: tuple[int, int, int], labels: int):
        self.rows, self.shape, self.labels = batch, shape, labels

    def batch(self, n: int) -> images.Batch:
        """Return a batch of noise."""
        chance = torch.Generator().manual_seed(n)
        targets = torch.randint(self.labels, (self.rows,), generator=chance)
        pixels = torch.randn(self.rows, *self.shape, generator=chance)
        return images.Batch(pixels, F.one_hot(targets, self.labels).float())

    def count(self, batch: images.Batch) -> tuple[int, int]:
        """Return what the loss counts, and what is read."""
        return len(batch.images), len(batch.images)

    def loss(self, model: Any, batch: images.Batch) -> torch.Tensor:
        """Return the loss of labels."""
        return images.soft_loss(model(batch.images), batch.targets)


def forecast_images(report: Report, size: str) -> Forecast:
    """Measure some steps of a size on noise in the format of the user's images."""
    choose("size", size, images.SIZES)
    train = cast(ImageCounts, report.parts["train"])
    settings = images.resolve({"data": report.data, "size": size})
    format = ImageFormat(train.image, train.channels)
    labels = list(train.classes)
    model = images.build_classifier(settings, format, labels)
    shape = (train.channels, train.image, train.image)
    speed = _speed(model, _Drawn(settings.batch, shape, len(labels)), settings)
    count, two = parameters(model), torch.zeros(2, *shape)
    kept = count_of(lambda: model(two), model=model).kept / 2
    # weights, gradient, two moments and an average; what an image leaves for the backward pass
    memory = 4 * 5 * count + settings.batch * kept
    return Forecast(
        size,
        count,
        round(speed, 1),
        "images",
        round(train.images / speed / 60, 3),
        round(memory / 2**20 + 300, 1),
        torch.get_num_threads(),
    )


def forecast(report: Report, size: str) -> Forecast:
    """Measure some steps of a size on made-up sentences as long as the user's."""
    choose("size", size, SIZES)
    settings = resolve({"data": report.data, "size": size})
    vocabulary = _Vocabulary(settings.pieces)
    train = cast(Counts, report.parts["train"])
    # a piece is about four characters in languages with spaces, and one and a half without
    sides = []
    for characters, words in (
        (train.source_characters, train.source_words),
        (train.target_characters, train.target_words),
    ):
        spaced = characters / max(1, words) < 15
        each = characters / max(1, train.pairs) / (4.0 if spaced else 1.5)
        sides.append(max(1, round(each)))
    lengths = (sides[0], sides[1])
    rows = max(1, settings.batch_tokens // (max(lengths) + 1))
    model = build(settings, (vocabulary, vocabulary))  # type: ignore[arg-type]
    speed = _speed(model, _Made(vocabulary, rows, lengths), settings)
    tokens = train.pairs * (sum(lengths) + 2)
    count = parameters(model)
    block = settings.model.block
    depth = settings.model.encoder_depth + settings.model.decoder_depth
    # weights, gradient, two moments and an average; activations of about 14 vectors a block
    memory = 4 * (
        5 * count + settings.batch_tokens * depth * (14 * block.width + 2 * block.ffn_width)
    )
    return Forecast(
        size,
        count,
        round(speed, 1),
        "tokens",
        round(tokens / speed / 60, 3),
        round(memory / 2**20 + 300, 1),
        torch.get_num_threads(),
    )


@dataclass(frozen=True)
class Examined(Named):
    """A report of data with its forecast."""

    report: Report
    forecast: Forecast | None

    def __str__(self) -> str:
        return "\n".join([*self.report.lines(), *([str(self.forecast)] if self.forecast else [])])

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            **self.report.to_dict(),
            "forecast": asdict(self.forecast) if self.forecast else None,
        }
