"""The same training on 1, 2 and 4 processes, whole or sharded, and resumed by another number.

    python bench/ranks.py [CASE ...] [--quick]        equality; cases that are noted are skipped
    python bench/ranks.py --speed BEFORE              times, in turn with another checkout

A case is TASK/PARALLEL/RANKS (200 steps, dropout, four batches a step; losses against one process)
or TASK/PARALLEL/SAVED-RESUMED (stopped after 20 steps, then 20 more by another number). Each is
noted in runs/ranks/cases.jsonl with its largest relative difference.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / "runs" / "ranks"
sys.path.insert(0, str(ROOT))

from apart import machine  # noqa: E402

from tests.zoo import ANIMALS  # noqa: E402

QUICK = "--quick" in sys.argv
STEPS, AFTER = (20, 5) if QUICK else (200, 20)
TASKS = ("translate", "language", "images", "transcribe")
SAME = {"dropout": 0.1, "batches": 4, "threads": 1, "log": "none", "save_every": 9999}
RESUMED = ((1, 2), (2, 1), (2, 4), (4, 2), (2, 2))
SIZED = {"width": 256, "heads": 4, "depth": 4, "batch_tokens": 2048, "context": 128}


def words(task: str, steps: int, **more: Any) -> list[str]:
    """Words of a training of a tiny model."""
    animal = ANIMALS["fill" if task == "language" else task]
    data = HOME / "data" / task
    if not data.exists():
        making = data.with_suffix(".tmp")
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(parents=True)
        animal.data(making)
        making.rename(data)
    given = {**animal.settings, **SAME, "valid_every": steps, "data": data, "steps": steps, **more}
    told = (f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in given.items())
    return ["train", animal.task, *told, "--quiet"]


def run(arguments: list[str], at: Path = ROOT) -> None:
    """Train, with the package of a checkout."""
    env = {**os.environ, "PYTHONPATH": str(at), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "regard", *arguments]
    done = subprocess.run(command, env=env, cwd=at, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)}\n{done.stderr}")


def column(out: Path, key: str = "loss") -> list[float]:
    """One number of each step of a run."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row[key] for row in rows if key in row]


def trained(name: str, task: str, **more: Any) -> Path:
    """A run of so many steps, which goes on if it was stopped."""
    out = HOME / ("quick" if QUICK else "full") / name
    steps = more.pop("steps", STEPS)
    run(words(task, steps, out=out, **more))
    return out


def largest(found: list[float], right: list[float]) -> float:
    """Largest relative difference."""
    assert len(found) == len(right)
    return max(abs(a - b) / abs(b) for a, b in zip(found, right, strict=True))


def same_losses(task: str, parallel: str, ranks: int) -> dict[str, float]:
    """Differences of losses and validations from one process."""
    one = trained(f"{task}-one", task)
    many = trained(f"{task}-{parallel}-{ranks}", task, parallel=parallel, processes=ranks)
    keys = ("loss", "grad_norm", "valid/loss")
    return {key: largest(column(many, key), column(one, key)) for key in keys}


def same_resumed(task: str, parallel: str, saved: int, resumed: int) -> dict[str, float]:
    """Differences of the losses after a checkpoint from those of the run that wrote it."""
    straight = trained(f"{task}-{parallel}-{saved}-on", task, parallel=parallel, processes=saved,
                       steps=2 * AFTER, valid_every=AFTER)  # fmt: skip
    again = straight.with_name(f"{task}-{parallel}-{saved}-{resumed}")
    shutil.rmtree(again, ignore_errors=True)
    shutil.copytree(straight, again)
    shutil.rmtree(again / "checkpoints" / f"step-{2 * AFTER}")
    trained(again.name, task, parallel=parallel, processes=resumed,
            steps=2 * AFTER, valid_every=AFTER)  # fmt: skip
    return {"loss": largest(column(again)[AFTER:], column(straight)[AFTER:])}


def cases() -> dict[str, Any]:
    """Every case by its name."""
    found: dict[str, Any] = {}
    for task, parallel, ranks in product(TASKS, ("ddp", "fsdp"), (1, 2, 4)):
        if ranks > 1:
            given = (task, parallel, ranks)
            found["/".join(map(str, given))] = lambda g=given: same_losses(*g)
    for task, parallel, (saved, again) in product(TASKS, ("ddp", "fsdp"), RESUMED):
        given = (task, parallel, saved, again)
        found[f"{task}/{parallel}/{saved}-{again}"] = lambda g=given: same_resumed(*g)
    return found


def equality(chosen: list[str]) -> None:
    """Run the cases that are not yet noted."""
    HOME.mkdir(parents=True, exist_ok=True)
    notes = HOME / ("quick.jsonl" if QUICK else "cases.jsonl")
    done = (
        {json.loads(line)["case"] for line in notes.read_text().splitlines()}
        if notes.exists()
        else set()
    )
    for name, case in cases().items():
        if name in done or (chosen and not any(name.startswith(one) for one in chosen)):
            continue
        row = {"case": name, **case()}
        with open(notes, "a") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)


def speed(before: Path) -> None:
    """Tokens a second of a language model, in turn."""
    text = HOME / "play.txt"
    HOME.mkdir(parents=True, exist_ok=True)
    if not text.exists():
        text.write_text("To be, or not to be, that is the question.\n" * 4000)
    given = {**SIZED, "data": text, "log": "none", "valid_every": 999, "steps": 12, "threads": 1}
    given |= {"tokenizer": "characters", "save_every": 9999, "batches": 2}
    ways = {
        "processes=2, before": (before, {"processes": 2}),
        "processes=2": (ROOT, {"processes": 2}),
        "one process, before": (before, {}),
        "one process": (ROOT, {}),
        "processes=2 parallel=fsdp": (ROOT, {"processes": 2, "parallel": "fsdp"}),
        "recompute=true": (ROOT, {"recompute": "true"}),
    }
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(2):
        for way, (at, more) in ways.items():
            out = HOME / "speed"
            shutil.rmtree(out, ignore_errors=True)
            told = [f"{k}={v}" for k, v in {**given, "out": out, **more}.items()]
            run(["train", "language", *told, "--quiet"], at)
            rates[way] += column(out, "tokens_per_second")[2:]
    found = {way: statistics.median(some) for way, some in rates.items()}
    for way, rate in found.items():
        print(f"{way}: {rate:,.0f} tokens/s")
    for name, way, base in (
        ("two processes against before", "processes=2", "processes=2, before"),
        ("one process against before", "one process", "one process, before"),
        ("fsdp against ddp", "processes=2 parallel=fsdp", "processes=2"),
        ("recompute", "recompute=true", "one process"),
    ):
        print(f"ratio {name} {found[way] / found[base]:.3f}")


if __name__ == "__main__":
    print(machine(), flush=True)
    if "--speed" in sys.argv:
        speed(Path(sys.argv[sys.argv.index("--speed") + 1]).resolve())
    else:
        equality([word for word in sys.argv[1:] if not word.startswith("-")])
