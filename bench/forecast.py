"""The forecast of `regard cost` against trainings that others have measured and published.

    python bench/forecast.py [--count] [--fit] [--quick]

Each row of regard/costs/measured.tsv is forecast; the ratio is forecast over truth. Half of the
rows, chosen by a hash of the row, have the constants fitted to them (--fit writes them into
regard/costs/fitted.json); the other half judges. LLaMA's and the Transformer's trainings are only
judged. --count counts the models of all rows again (minutes); without it the counts in the table
are taken, so --quick changes nothing.
"""

import argparse
import csv
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from math import exp, log
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from apart import machine  # noqa: E402

from regard.costs import accelerators  # noqa: E402
from regard.costs.accelerators import (  # noqa: E402
    JUDGED,
    Load,
    MeasuredTraining,
    fitted,
    measurements,
    seconds,
)
from regard.costs.forecast import loads, shards  # noqa: E402
from regard.costs.model import Reading, build, named  # noqa: E402

COSTS = Path(accelerators.__file__).parent

# width, heads, depth; vocabulary 50368 and learned positions (llm-foundry's yamls/pretrain)
MPT = {
    "125m": (768, 12, 12),
    "350m": (1024, 16, 24),
    "760m": (1536, 12, 24),
    "1b": (2048, 16, 24),
    "3b": (2560, 20, 32),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 56, 48),
    "70b": (8192, 64, 80),
}
# width, heads, key and value heads, feed-forward width, depth, vocabulary
LLAMA = {
    "llama-7b": (4096, 32, 32, 11008, 32, 32000),
    "llama-13b": (5120, 40, 40, 13824, 40, 32000),
    "llama-33b": (6656, 52, 52, 17920, 60, 32000),
    "llama-65b": (8192, 64, 64, 22016, 80, 32000),
    "llama2-34b": (8192, 64, 8, 22016, 48, 32000),
    "llama2-70b": (8192, 64, 8, 28672, 80, 32000),
    "llama3-8b": (4096, 32, 8, 14336, 32, 128256),
    "llama3-13b": (5120, 40, 8, 17920, 40, 128256),
    "llama3-70b": (8192, 64, 8, 28672, 80, 128256),
    "tinyllama-1.1b": (2048, 32, 4, 5632, 22, 32000),
}
BPE = 37_000  # the Transformer's vocabulary, shared by both languages


def configured(name: str, length: int) -> tuple[str, Any]:
    """Family and config of a model of the table."""
    family, _, size = name.partition("-")
    if family == "transformer":
        kind, config = named("transformer", size)
        return kind, replace(config, source_vocab=BPE, target_vocab=BPE)
    kind, config = named("gpt" if family == "mpt" else "llama")
    sizes: dict[str, Any] = {"max_length": length}
    if family == "mpt":
        width, heads, depth = MPT[size]
        block: dict[str, Any] = {"width": width, "heads": heads, "ffn_width": 4 * width}
        sizes |= {"vocab": 50368, "depth": depth}
    else:
        width, heads, kv, wide, depth, vocab = LLAMA[name]
        block = {"width": width, "heads": heads, "kv_heads": kv, "ffn_width": wide}
        sizes |= {"vocab": vocab, "depth": depth}
    return kind, replace(config, block=replace(config.block, **block), **sizes)


@cache
def counted(name: str, length: int, batch: int) -> tuple[Load, Load]:
    """What a batch asks of a device, and what recomputing adds."""
    kind, config = configured(name, length)
    return loads(build(kind, config), Reading(name, config, batch, {"length": length})())


@cache
def sharded(name: str, length: int, parallel: str, spread: int) -> tuple[int, int, int]:
    """Parameters, those that a device holds, and those that all hold."""
    model = build(*configured(name, length))
    total = sum(p.numel() for p in model.parameters())
    return (total, total, total) if parallel == "ddp" else (total, *shards(model, spread)[:2])


def recount(path: Path) -> None:
    """Write what is counted of the models into the table."""
    lines = path.read_text().splitlines()
    notes = [line for line in lines if line.startswith("#")]
    rows = list(csv.DictReader(lines[len(notes) :], delimiter="\t"))
    for row in rows:
        name, length, batch = row["model"], int(row["length"]), int(row["batch"])
        one, again = counted(name, length, batch)
        for prefix, load in (("", one), ("again_", again)):
            for key, value in load._asdict().items():
                row[prefix + key] = f"{value:.6g}"
        devices, near = int(row["devices"]), int(row["per_host"])
        spread = min(devices, near) if row["parallel"] == "hsdp" else devices
        parts = sharded(name, length, row["parallel"], spread)
        row |= dict(zip(("parameters", "held", "whole"), map(str, parts), strict=True))
        print(name, length, row["parameters"], row["held"], flush=True)
    text = [*notes, *("\t".join(map(str, line)) for line in [rows[0], *(r.values() for r in rows)])]
    path.write_text("\n".join(text) + "\n")


def ratio(row: MeasuredTraining, constants: dict[str, float]) -> float:
    """TrainingForecast over truth."""
    return seconds(row.work, row.setup, constants)["step"] / row.step_seconds


# constant -> where the search begins; none but traffic is more than a share may be, which is 1
START = {
    "products_ampere": 0.75,
    "products_hopper": 0.6,
    "attention_ampere": 0.6,
    "attention_hopper": 0.5,
    "traffic": 1.2,
    "link": 0.6,
    "wire": 0.6,
    "exposed": 0.2,
}


def fit(rows: list[MeasuredTraining]) -> dict[str, float]:
    """Constants that bring the forecasts of rows nearest to the truth, by steps in one at a time.

    An error counts by the square of its logarithm; beyond a factor 1.2, by its size.
    """

    def loss(constants: dict[str, float]) -> float:
        errors = [abs(log(ratio(row, constants))) for row in rows]
        bend = log(1.2)
        return sum(e * e if e < bend else bend * (2 * e - bend) for e in errors)

    best, step = dict(START), 0.3
    least = loss(best)
    while step > 1e-3:
        before = least
        for name in START:
            for way in (step, -step):
                tried = best | {name: best[name] * exp(way)}
                if max(value for key, value in tried.items() if key != "traffic") > 1:
                    continue
                told = loss(tried)
                if told < least:
                    best, least = tried, told
        if least > before * (1 - 1e-4):
            step /= 2
    return {name: float(f"{value:.4g}") for name, value in best.items()}


def quantiles(name: str, ratios: Iterable[float]) -> None:
    """Print how far from the truth forecasts are."""
    errors = np.array([exp(abs(log(r))) for r in ratios])
    if not len(errors):
        return
    within = [f"{np.mean(errors <= bar):.1%} within {bar}" for bar in (1.1, 1.3, 1.5)]
    print(f"\n{name}: {len(errors)} rows, {', '.join(within)}")
    key = name.replace(" ", "_")
    for share in (0.5, 0.9, 1.0):
        print(f"ratio {key}_{share:.0%} {np.quantile(errors, share):.3f}")


def show(rows: list[MeasuredTraining], constants: dict[str, float]) -> None:
    """Print every row with its forecast."""
    for row in rows:
        told, s = seconds(row.work, row.setup, constants), row.setup
        part = {True: "fit", False: "judge"}[row.is_fitted]
        spent = " ".join(f"{v:.3g}" for k, v in told.items() if k != "step")
        truth, close = row.step_seconds, ratio(row, constants)
        print(
            f"{part:5} {row.source[:22]:22} {row.model:15} {row.length:6} {s.kind:9} {s.devices:4}"
            f" {s.dtype:8} {s.parallel[:5]:5} {row.batch:3}x{s.accumulate:<2} {s.recompute:3g}"
            f" {truth:9.4g} s, forecast {told['step']:9.4g} s  {close:.3f}"
            f"  ({spent})"
        )


def main() -> None:
    """Print all rows, then how far the forecasts are from the truth."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", action="store_true", help="count the models again")
    parser.add_argument("--fit", action="store_true", help="fit the constants again")
    parser.add_argument("--quick", action="store_true", help="changes nothing")
    options = parser.parse_args()
    print(machine(), flush=True)
    torch.set_num_threads(1)
    if options.count:
        recount(COSTS / "measured.tsv")
    rows = measurements()
    if options.fit:
        constants = fit([row for row in rows if row.is_fitted])
        (COSTS / "fitted.json").write_text(json.dumps(constants, indent=2) + "\n")
    else:
        constants = fitted()
    show(rows, constants)
    print(json.dumps(constants, indent=2))
    groups: dict[str, Callable[[MeasuredTraining], bool]] = {
        "fitted half": lambda row: row.is_fitted,
        "judging half": lambda row: not row.is_fitted and row.source not in JUDGED,
    }
    for source in JUDGED:
        groups[source] = lambda row, source=source: row.source == source
    for name, chosen in groups.items():
        quantiles(name, [ratio(row, constants) for row in rows if chosen(row)])


if __name__ == "__main__":
    main()
