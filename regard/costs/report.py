"""The cost of a model: multiply-adds, memory, attention matrices, time, and how they grow."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention.watch import watch
from regard.costs.count import Counted, count, pretend
from regard.costs.forecast import FLOAT, TrainingForecast, TrainingSettings, forecast
from regard.costs.machine import Machine, machine
from regard.costs.model import Reading, build, described, named
from regard.errors import UsageError
from regard.metrics.results import Named
from regard.modalities import MODALITIES
from regard.models.folder import on_meta
from regard.settings import fill, setting

_MOMENTS = 4  # numbers for each weight in training: itself, its gradient and two moments
_GROWTH_FACTORS = (2, 4)  # larger inputs, by which growth is measured


@dataclass(frozen=True)
class CostSettings(TrainingSettings):
    """The size of the model, that of its input, and a training on accelerators."""

    size: str | None = setting(None, "size of a family, such as tiny")
    image: int | None = setting(None, "side of an image in pixels", min=1, max=2**14)
    length: int | None = setting(None, "tokens of a text, or frames of a sound", min=1, max=2**20)
    batch: int = setting(1, "images, texts or sounds at once", min=1, max=2**20)
    growth: bool = setting(True, "count 2 and 4 times as large, too")


@dataclass(frozen=True)
class Shape:
    """Attention matrices of one shape."""

    layers: int
    maps: int  # a layer: the batch, times its windows
    heads: int
    queries: int
    keys: int

    @property
    def matrices(self) -> int:
        """Number of matrices."""
        return self.layers * self.maps * self.heads

    @property
    def entries(self) -> int:
        """Number of their entries together."""
        return self.matrices * self.queries * self.keys

    def __str__(self) -> str:
        windows = f"{self.maps:,} x " if self.maps > 1 else ""
        return (
            f"{_many(self.layers, 'layer')} of {windows}{_many(self.heads, 'head')}, "
            f"{self.queries:,} x {self.keys:,}"
        )


@dataclass(frozen=True)
class Attention:
    """The matrices of attention: what they would take, and what is really written of them."""

    shapes: list[Shape]
    running: int  # bytes that a forward pass writes of them, or for them
    training: int  # and that of a training step

    @property
    def matrices(self) -> int:
        """Number of matrices."""
        return sum(shape.matrices for shape in self.shapes)

    @property
    def entries(self) -> int:
        """Number of their entries together."""
        return sum(shape.entries for shape in self.shapes)

    @property
    def bytes(self) -> int:
        """Bytes they would take if all were kept at once."""
        return FLOAT * self.entries


@dataclass(frozen=True)
class Larger:
    """The cost of an input of another size."""

    input: str
    amount: int  # pixels of an image, tokens of a text, or frames of a sound
    multiply_adds: int
    entries: int
    kept: int


@dataclass(frozen=True)
class Cost(Named):
    """What a model takes to read a batch, and to learn from it."""

    model: str
    family: str
    input: str
    batch: int
    parameters: int
    multiply_adds: int
    products: dict[str, int]  # the same by kind
    attending: int  # and those in blocks that attend
    modules: dict[str, int] = field(repr=False)  # and by module
    training_multiply_adds: int
    kept: int  # bytes of activations that a training step keeps
    attention: Attention
    machine: Machine
    running_seconds: float
    training_seconds: float
    growth: list[Larger]
    forecast: TrainingForecast | None = None

    @property
    def training_bytes(self) -> int:
        """Return the memory of a training step with Adam."""
        return self.kept + _MOMENTS * FLOAT * self.parameters

    @property
    def exponents(self) -> dict[str, float | None]:
        """Return by which power of its amount things grow, where the input is largest."""
        if len(self.growth) < 2:
            return {}
        small, large = self.growth[-2:]
        by = math.log(large.amount / small.amount)
        keys = ("multiply_adds", "entries", "kept")
        pairs = {key: (getattr(small, key), getattr(large, key)) for key in keys}
        return {key: math.log(b / a) / by if a and b else None for key, (a, b) in pairs.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        record = asdict(self)
        record.pop("modules")
        more = {name: getattr(self.attention, name) for name in ("matrices", "entries", "bytes")}
        record["attention"] |= more
        record["forecast"] = self.forecast and self.forecast.to_dict()
        return record | {"training_bytes": self.training_bytes, "exponents": self.exponents}

    def __str__(self) -> str:
        total, attention = max(1, self.multiply_adds), self.attention
        kinds = [f"{kind} {100 * n / total:.1f}%" for kind, n in self.products.items() if n]
        if self.attending:
            kinds.append(f"{100 * self.attending / total:.1f}% in blocks that attend")
        lines = [
            f"{self.model}: {self.input}, float32",
            "",
            f"parameters      {short(self.parameters)} ({self.parameters:,}), "
            f"{binary(FLOAT * self.parameters)}",
            f"multiply-adds   {short(self.multiply_adds)}: {', '.join(kinds)}",
            f"training step   {short(self.training_multiply_adds)} multiply-adds; "
            f"{binary(self.training_bytes)}, of which {binary(self.kept)} are activations",
        ]
        if attention.shapes:
            lines += [
                f"attention       {_many(attention.matrices, 'matrix', 'matrices')}, "
                f"{short(attention.entries)} entries",
                *(f"                {shape}" for shape in attention.shapes),
                f"  materialised  {binary(attention.bytes)}",
                f"  as computed   {binary(attention.running)} running, "
                f"{binary(attention.training)} training",
            ]
        lines += [
            f"time here       {seconds(self.running_seconds)} running, "
            f"{seconds(self.training_seconds)} a training step, at best ({self.machine})",
        ]
        return "\n".join([*lines, *self._grown(), *self._forecast()])

    def _forecast(self) -> list[str]:
        if self.forecast is None:
            return []
        told, setup = self.forecast, self.forecast.setup
        spent = ", ".join(f"{what} {seconds(s)}" for what, s in told.spent.items() if s >= 1e-4)
        room = ", ".join(f"{what} {binary(n)}" for what, n in told.memory.items() if n)
        length = f", {told.step_tokens:,} tokens" if told.step_tokens else ""
        more = ", recompute" if setup.recompute else ""
        lines = [
            "",
            f"forecast        {_many(setup.devices, setup.kind, setup.kind)}, {setup.parallel}, "
            f"{setup.dtype}{more}, {_many(setup.accumulate, 'batch', 'batches')} a step each",
            f"  step          {seconds(told.step_seconds)}{length}; {spent}",
            f"  bound by      {told.bound}",
            f"  memory        {binary(sum(told.memory.values()))} a device of "
            f"{binary(told.capacity)}: {room}",
            f"  traffic       {binary(told.from_host)} a device and step within a host, "
            f"{binary(told.from_network)} between hosts",
        ]
        if told.seconds and told.steps:
            lines.append(
                f"  training      {seconds(told.seconds)} for {told.steps:,} steps, "
                f"{told.seconds * setup.devices / 3600:,.0f} device hours"
            )
        return [
            *lines,
            "  from public measurements; no accelerator was at hand. Most alike: "
            f"{told.nearest}, whose forecast is {told.nearest_ratio:.2f} of the truth",
        ]

    def _grown(self) -> list[str]:
        if not self.growth:
            return []
        rows = [
            [row.input, short(row.multiply_adds), short(row.entries), binary(row.kept)]
            for row in self.growth
        ]
        powers = ["-" if x is None else f"{x:.2f}" for x in self.exponents.values()]
        per = self.growth[0].input.split()[-1]
        head = ["growth", "multiply-adds", "attention entries", "activations"]
        return ["", *table([head, *rows, [f"power of {per}", *powers]])]


def short(number: float) -> str:
    """Write a number of things with a decimal letter: 17.58G."""
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.2f}{letter}"
    return f"{number:.0f}"


def binary(number: float) -> str:
    """Write bytes with a binary unit: 112.5 MiB."""
    unit = "bytes"
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if number < 1024 or unit == "TiB":
            break
        number /= 1024
    return f"{number:.0f} {unit}" if unit == "bytes" else f"{number:.4g} {unit}"


def seconds(number: float) -> str:
    """Write a time in a fitting unit."""
    for size, unit, least in ((86400, "days", 2), (3600, "h", 1), (1, "s", 1)):
        if number >= size * least:
            return f"{number / size:.3g} {unit}"
    return f"{number * 1e3:.3g} ms"


def table(rows: list[list[str]]) -> list[str]:
    """Lay rows out in columns, the first to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    ]


def _many(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def learned(model: nn.Module) -> int:
    """Count the parameters of a model."""
    return sum(p.numel() for p in model.parameters())


def looked(model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[list[Shape], list[str], Counted]:
    """Return the shapes of all attention matrices, which modules attend, and what it took."""
    with pretend(), torch.no_grad(), watch(model.eval()) as maps:
        counted = count(lambda: model(*inputs))
    calls = [call.shape for name in maps for call in maps.calls(name)]
    return [Shape(n, *shape) for shape, n in Counter(calls).items()], maps.names(), counted


def forward(model: nn.Module, inputs: tuple[Tensor, ...]) -> Counted:
    """Count a forward pass."""
    with pretend(), torch.no_grad():
        return count(lambda: model.eval()(*inputs), model=model)


def training(model: nn.Module, inputs: tuple[Tensor, ...], *, backward: bool) -> Counted:
    """Count a forward pass that is trained, and with `backward` the whole step."""
    for parameter in model.parameters():
        parameter.grad = None
    try:
        with pretend(), torch.enable_grad():
            return count(lambda: model.train()(*inputs), model=model, backward=backward)
    except ValueError as error:  # a batch norm has nothing to compare a single pixel with
        raise UsageError(
            f"a training step cannot be made of an input {tuple(inputs[0].shape)} "
            f"({str(error)[:60]}); choose batch=2 or a larger image"
        ) from None


def block_of(name: str) -> str:
    """Return the block that a module is in: what is nearest above it and has a number."""
    parts = name.split(".")
    last = next((n for n in range(len(parts), 0, -1) if parts[n - 1].isdecimal()), len(parts))
    return ".".join(parts[:last])


def attending(counted: Counted, names: list[str]) -> int:
    """Return the multiply-adds in blocks that attend."""
    blocks = {block_of(name) for name in names}
    outer = [b for b in blocks if not any(b.startswith(other + ".") for other in blocks)]
    return sum(counted.modules[block] for block in outer)


def cost(name: str, folder: Path | None, settings: Mapping[str, Any]) -> Cost:
    """Count what the model of a folder, or of a name, takes to read and to learn."""
    own = {key: value for key, value in settings.items() if not key.startswith("model.")}
    options = fill(CostSettings, own)
    if folder is not None and options.size is not None:
        raise UsageError(f"size={options.size}: {name} has a size of its own; leave it out")
    kind, config = named(name, options.size) if folder is None else described(folder)
    changes = {key[len("model.") :]: settings[key] for key in settings if key not in own}
    config = fill(type(config), changes, base=config, where="model")
    return measure(name, kind, build(kind, config), options)


def cost_of(model: object, settings: Mapping[str, Any]) -> Cost:
    """Count what a model in memory, or one that was loaded to run, takes."""
    model = getattr(model, "model", model)
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise UsageError(
            f"{type(model).__name__} is no model; give a name, a folder or a loaded one"
        )
    options = fill(CostSettings, settings)
    name = type(model).__name__
    if options.size is not None:
        raise UsageError(f"size={options.size}: this {name} has a size of its own; leave it out")
    with on_meta():
        alike = type(model)(model.config)
    return measure(name, name, alike, options)


def measure(name: str, kind: str, model: nn.Module, options: CostSettings) -> Cost:
    """Count what a model on the meta device takes."""
    setup = options.setup()
    keys = {each.size_key for each in MODALITIES.values()}
    given = {key: getattr(options, key, None) for key in keys}
    read = Reading(name, model.config, options.batch, given)
    run, step = forward(model, read()), training(model, read(), backward=True)
    shapes, names, _ = looked(model, read())
    roof = machine()
    entries = sum(shape.entries for shape in shapes)
    grown = [Larger(read.show(), read.amount(), run.multiply_adds, entries, step.kept)]
    if options.growth and not setup:
        grown += [_larger(model, read, times) for times in _GROWTH_FACTORS]
    return Cost(
        model=name,
        family=kind,
        input=f"{_many(options.batch, read.one, read.many)} of {read.show()}",
        batch=options.batch,
        parameters=learned(model),
        multiply_adds=run.multiply_adds,
        products=dict(run.products.most_common()),
        attending=attending(run, names),
        modules=dict(run.modules),
        training_multiply_adds=step.multiply_adds,
        kept=step.kept,
        attention=Attention(shapes, run.weights, step.weights),
        machine=roof,
        running_seconds=run.seconds(roof.rate, roof.bandwidth, roof.call),
        training_seconds=step.seconds(roof.rate, roof.bandwidth, roof.call),
        growth=grown if grown[1:] else [],
        forecast=forecast(model, read(), setup, options) if setup else None,
    )


def _larger(model: nn.Module, read: Reading, times: int) -> Larger:
    inputs = read(times)
    shapes, _, counted = looked(model, inputs)
    return Larger(
        read.show(times),
        read.amount(times),
        counted.multiply_adds,
        sum(shape.entries for shape in shapes),
        training(model, inputs, backward=False).kept,
    )
