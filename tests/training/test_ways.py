"""Other ways to compute the same training: several processes, compiled, in half precision."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import regard
from regard.cli import main
from regard.tasks.prepare import Training

STEPS = 12
SETTINGS = {
    "from": "en",
    "to": "de",
    "steps": STEPS,
    "depth": 1,
    "width": 32,
    "heads": 2,
    "ffn_width": 64,
    "pieces": 400,
    "batch_tokens": 200,
    "valid_every": STEPS,
    "valid_sentences": 4,
    "warmup": 4,
    "lr": 0.01,
    "clip": 0.5,
    "dropout": 0.0,  # each process has its own dice
    "threads": 1,
}


@pytest.fixture(scope="module")
def data(zoo) -> Path:
    return zoo.data("translate")


def losses(out: Path) -> list[float]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.fixture(scope="module")
def plain(data, tmp_path_factory) -> list[float]:
    """Return the losses of one process that adds two batches up."""
    out = tmp_path_factory.mktemp("plain") / "out"
    regard.train("translate", quiet=True, data=str(data), out=str(out), batches=2, **SETTINGS)
    return losses(out)


def train_by_command(data: Path, out: Path, *start: str, **more: object) -> None:
    settings = {"data": data, "out": out, **SETTINGS, **more}
    words = ["train", "translate", *(f"{key}={value}" for key, value in settings.items())]
    done = subprocess.run([sys.executable, *start, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if "-m" in start and "regard" in start[-1:]:
        assert f"finished after {settings['steps']} steps" in done.stdout


@pytest.mark.parametrize(
    "start, more",
    [
        (["-m", "regard"], {"processes": 2}),
        (["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "regard"], {}),
    ],
    ids=["processes=2", "torchrun"],
)
def test_two_processes_are_one_that_accumulates(data, plain, tmp_path, start, more):
    train_by_command(data, tmp_path / "out", *start, **more)
    together = losses(tmp_path / "out")
    assert len(together) == STEPS
    assert together == pytest.approx(plain, abs=2e-4)
    assert plain[0] - plain[-1] > 0.3  # there was something to learn, and something to cut
    rows = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert max(json.loads(row).get("grad_norm", 0.0) for row in rows) > SETTINGS["clip"]
    answer = regard.load(tmp_path / "out").run(["a dog runs."], beam=2)
    assert len(answer) == 1


def test_batches_that_processes_accumulate_are_read_once_each(data, tmp_path):
    """Two processes that add two batches up read the four that one process adds up."""
    few = {"steps": 3, "valid_every": 3}
    settings = {**SETTINGS, **few, "batches": 4}
    regard.train("translate", quiet=True, data=str(data), out=str(tmp_path / "one"), **settings)
    train_by_command(data, tmp_path / "two", "-m", "regard", processes=2, batches=4, **few)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=2e-4)


def test_compiled_is_the_same_training(data, plain, tmp_path):
    out = tmp_path / "out"
    settings = {**SETTINGS, "batches": 2, "compile": True, "steps": 3, "warmup": 4}
    regard.train("translate", quiet=True, data=str(data), out=str(out), **settings)
    assert losses(out) == pytest.approx(plain[:3], abs=2e-4)


@pytest.mark.usefixtures("bfloat16")
def test_half_precision_learns_as_well(data, plain, tmp_path):
    out = tmp_path / "out"
    settings = {**SETTINGS, "batches": 2, "dtype": "bfloat16"}
    regard.train("translate", quiet=True, data=str(data), out=str(out), **settings)
    half = losses(out)
    assert half != plain
    assert half == pytest.approx(plain, abs=0.05)


def test_a_run_goes_on_with_any_number_of_processes_that_share_its_batches(
    data, plain, tmp_path, monkeypatch, capsys
):
    """Dropout is on: what is random depends on the batch, not on who reads it."""
    words = {"data": data, "batches": 2, **SETTINGS, "dropout": 0.2, "save_every": 0}
    for name, stop in (("whole", STEPS * 2), ("part", 2 * 5)):
        read = Training.batch

        def stopping(self, n, stop=stop, read=read):
            if n == stop:
                raise KeyboardInterrupt
            return read(self, n)

        monkeypatch.setattr(Training, "batch", stopping)
        given = [f"{key}={value}" for key, value in {**words, "out": tmp_path / name}.items()]
        assert main(["train", "translate", *given, "--quiet"]) == (0 if name == "whole" else 130)
        monkeypatch.undo()
    capsys.readouterr()
    given = [f"{key}={value}" for key, value in {**words, "out": tmp_path / "part"}.items()]
    again = [sys.executable, "-m", "regard", "train", "translate", *given]
    three = subprocess.run([*again, "processes=3"], capture_output=True, text=True)
    assert three.returncode == 2 and "divide 2" in three.stderr, three.stderr
    two = subprocess.run([*again, "processes=2"], capture_output=True, text=True)
    assert two.returncode == 0, two.stderr
    whole, part = losses(tmp_path / "whole"), losses(tmp_path / "part")
    assert len(whole) == len(part) == STEPS
    assert part == pytest.approx(whole, rel=1e-5)
    assert whole != pytest.approx(plain, rel=1e-3)  # dropout does something
