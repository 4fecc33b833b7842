"""How long a step of training takes on accelerators, by data sheets and public measurements."""

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import NamedTuple

SIZES = {"float32": 4, "bfloat16": 2}  # bytes of an activation and a gathered weight
# how often a layer's weights are gathered for a batch
GATHERS = {"ddp": 0, "fsdp": 2, "hsdp": 2, "shard_grad_op": 1}
_OPTIMISER = 28  # bytes a weight: AdamW reads four numbers and writes three
_CALL = 5e-6  # seconds to begin an operation; an assumption: no measured training is bound by it
_GIB = 2**30
# trainings to which nothing is fitted: LLaMA, Llama 2, the Transformer
JUDGED = ("arXiv:2302.13971", "meta-llama/llama", "arXiv:1706.03762")


@dataclass(frozen=True)
class Accelerator:
    """An accelerator as its data sheet has it.

    Args:
        rates: operations a second in dense products, by data type.
        memory: bytes that a program can have.
        bandwidth: bytes a second from and to memory.
        link: bytes a second to devices of the same host, in one direction.
        network: bytes a second to other hosts, in one direction.
        like: family of chips whose measured shares of these rates it takes.
    """

    rates: dict[str, float]
    memory: float
    bandwidth: float
    link: float
    network: float
    like: str


_AMPERE = {"float32": 19.5e12, "bfloat16": 312e12}
_HOPPER = {"float32": 67e12, "bfloat16": 989.5e12}
# NVIDIA's data sheets (SXM, without sparsity); the P100 is the PCIe card, as its rate is nearest to
# the 9.5 TFLOPS of Vaswani et al. 2017.
# Networks are those of the clusters measured: 200 and 400 Gbit/s a device.
ACCELERATORS = {
    "p100": Accelerator({"float32": 9.3e12}, 15.9 * _GIB, 732e9, 16e9, 12.5e9, "ampere"),
    "a100-40gb": Accelerator(_AMPERE, 39.4 * _GIB, 1555e9, 300e9, 25e9, "ampere"),
    "a100": Accelerator(_AMPERE, 79.1 * _GIB, 2039e9, 300e9, 25e9, "ampere"),
    "h100": Accelerator(_HOPPER, 79.1 * _GIB, 3350e9, 450e9, 50e9, "hopper"),
    "h200": Accelerator(_HOPPER, 139.8 * _GIB, 4800e9, 450e9, 50e9, "hopper"),
}


class Load(NamedTuple):
    """What a computation asks of a device."""

    linear: float  # multiply-adds of products with weights
    attention: float  # and of attention
    traffic: float  # bytes that operations read and write, in float32
    calls: float


class Work(NamedTuple):
    """What a device computes for a batch, and the weights behind it."""

    batch: Load
    again: Load  # what recomputing every layer adds
    parameters: int
    held: int  # those that a device has
    whole: int  # and which of them every device has


class Setup(NamedTuple):
    """The devices of a training, and how they share it."""

    kind: str
    devices: int
    per_host: int
    dtype: str
    parallel: str
    accumulate: int  # batches that a device reads in a step
    recompute: float = 0.0  # share of the layers


class MeasuredTraining(NamedTuple):
    """A row of the table: a training that somebody has measured."""

    source: str
    model: str
    length: int
    batch: int
    setup: Setup
    work: Work
    tokens_per_second: float  # of one device

    @property
    def is_fitted(self) -> bool:
        """Whether constants are fitted to it: about half, by a hash of what was trained."""
        told = "|".join(map(str, (self.source, self.model, self.length, self.batch, *self.setup)))
        return self.source not in JUDGED and sha256(told.encode()).digest()[0] % 2 == 0

    @property
    def title(self) -> str:
        """Name it in words."""
        setup = self.setup
        return f"{self.model}, length {self.length:,}, {setup.devices} {setup.kind} ({self.source})"

    @property
    def step_seconds(self) -> float:
        """Seconds of a step."""
        return self.length * self.batch * self.setup.accumulate / self.tokens_per_second


def _text(name: str) -> str:
    return files("regard.costs").joinpath(name).read_text("utf-8")


@cache
def fitted() -> dict[str, float]:
    """Read the constants that `bench/forecast.py` has fitted to half of the measurements."""
    return json.loads(_text("fitted.json"))


@cache
def measurements() -> list[MeasuredTraining]:
    """Read the measurements, with what was counted of their models."""
    lines = _text("measured.tsv").splitlines()
    rows = csv.DictReader((line for line in lines if line[:1] != "#"), delimiter="\t")
    return [_row(row) for row in rows]


def _row(row: dict[str, str]) -> MeasuredTraining:
    def number(name: str) -> int:
        return int(row[name])

    load = Load(*(float(row[name]) for name in Load._fields))
    again = Load(*(float(row["again_" + name]) for name in Load._fields))
    work = Work(load, again, number("parameters"), number("held"), number("whole"))
    setup = Setup(
        *(row["kind"], number("devices"), number("per_host"), row["dtype"], row["parallel"]),
        *(number("accumulate"), float(row["recompute"])),
    )
    speed = float(row["tokens_per_second"])
    return MeasuredTraining(
        row["source"], row["model"], number("length"), number("batch"), setup, work, speed
    )


def traffic(work: Work, setup: Setup) -> tuple[float, float]:
    """Count the bytes that a device receives in a step, from its host and from other hosts."""
    hosts = -(-setup.devices // setup.per_host)
    near, size = min(setup.devices, setup.per_host), SIZES[setup.dtype]
    sharded = work.held - work.whole
    spread = near if setup.parallel == "hsdp" else setup.devices
    # gathered for every batch; gradients are added up once a step
    moved = (setup.accumulate * GATHERS[setup.parallel] + 1) * sharded * spread * size
    everywhere = 8 * work.whole  # all-reduce of float32: added up, and spread again
    local = (moved + everywhere) * (near - 1) / near
    outside = everywhere if setup.parallel == "hsdp" else moved + everywhere
    # all devices of a host fetch a part each, and pass it on
    remote = outside * (hosts - 1) / hosts / near
    if setup.parallel == "hsdp":  # shards of gradients are added up over hosts
        remote += 2 * size * sharded * (hosts - 1) / hosts
    return local, remote


def seconds(work: Work, setup: Setup, constants: Mapping[str, float]) -> dict[str, float]:
    """TrainingForecast the seconds of a step, and what it is spent on, of which a part is at once.

    Args:
        work: what a batch takes.
        setup: the devices.
        constants: those that `fitted` returns: shares of data sheets' rates that products of
            matrices, attention, links in a host and wires between hosts reach; `traffic`, bytes
            moved for each that was counted; `exposed`, the part of an exchange that products
            do not hide, or the reverse.
    """
    kind = ACCELERATORS[setup.kind]
    batch = [a + setup.recompute * b for a, b in zip(work.batch, work.again, strict=True)]
    linear, attention, moved, calls = (setup.accumulate * x for x in batch)
    compute = linear / constants[f"products_{kind.like}"]
    compute += attention / constants[f"attention_{kind.like}"]
    compute *= 2 / kind.rates[setup.dtype]
    memory = moved * constants["traffic"] / kind.bandwidth
    optimiser = _OPTIMISER * work.held / kind.bandwidth
    busy = max(compute + memory, calls * _CALL)
    host, outside = traffic(work, setup)
    network = max(
        host / (kind.link * constants["link"]), outside / kind.network / constants["wire"]
    )
    step = max(busy, network) + constants["exposed"] * min(busy, network) + optimiser
    spent = {"compute": compute, "memory bandwidth": memory + optimiser, "network": network}
    return {"step": step, **spent, "calls": calls * _CALL}
