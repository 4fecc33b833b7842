"""Workers: the batches that they make are those of the training itself, and no fault is hidden."""

import os
import signal
import subprocess
import sys
import time
from multiprocessing import active_children
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import regard
from regard.cli import main
from regard.errors import UsageError
from regard.tasks import task
from regard.tasks.prepare import prepare
from regard.training.ahead import ahead
from regard.training.callbacks import Callback, StopTraining
from tests.zoo import ANIMALS

ROOT = Path(__file__).resolve().parents[2]


def bits(batch) -> list[bytes]:
    """All numbers of a batch."""
    if isinstance(batch, Tensor):
        return [str(batch.dtype).encode(), batch.numpy().tobytes()]
    if isinstance(batch, np.ndarray):
        return [batch.tobytes()]
    if isinstance(batch, tuple | list):
        return [part for one in batch for part in bits(one)]
    return [repr(batch).encode()]


@pytest.mark.parametrize("name", sorted(ANIMALS))
def test_batches_of_workers_are_those_without_to_the_bit(name, zoo, tmp_path):
    kind, _, settings = ANIMALS[name]
    values = {**settings, "data": str(zoo.data(name)), "out": str(tmp_path / "run")}
    values |= {"valid": str(values["valid"])} if "valid" in values else {}
    if kind == "classify" and name != "classify":
        kind = name
    run = prepare(task(kind), values)
    numbers = [5, 0, 1, 2, 40]
    state = torch.random.get_rng_state()
    with ahead(run.training, 2, numbers) as fed:
        found = [bits(fed.batch(n)) for n in numbers]
        assert fed.lr_scales == run.training.lr_scales
    assert torch.equal(torch.random.get_rng_state(), state)
    assert found == [bits(run.training.batch(n)) for n in numbers]


class Faulty:
    """A task with a broken file, or a worker that dies."""

    def batch(self, n: int) -> int:
        if n == 2:
            raise UsageError("x.png: broken; copy it again")
        if n == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return n


def test_a_mistake_in_a_worker_is_the_same_line_and_ends_them_all():
    before = set(active_children())
    with (
        pytest.raises(UsageError, match=r"^x\.png: broken; copy it again$"),
        ahead(Faulty(), 2, range(4)) as fed,  # type: ignore[arg-type]
    ):
        assert [fed.batch(n) for n in range(2)] == [0, 1]
        assert len(set(active_children()) - before) == 2
        fed.batch(2)
    assert not set(active_children()) - before


def test_a_worker_that_was_killed_is_one_line():
    with (
        pytest.raises(UsageError, match="a process that makes batches has ended") as told,
        ahead(Faulty(), 1, (3, 4, 5)) as fed,  # type: ignore[arg-type]
    ):
        for n in (3, 4, 5):
            fed.batch(n)
            time.sleep(0.2)
    assert "\n" not in str(told.value)


class Stop(Callback):
    """Stops a run after some steps."""

    def after_step(self, step: int, values: dict[str, float]) -> None:
        if step == 5:
            raise StopTraining


def test_a_run_with_workers_goes_on_to_the_same_bits(zoo, tmp_path):
    words = {**ANIMALS["images"].settings, "steps": 12, "valid_every": 4, "log": "none"}
    data, found = zoo.data("images"), []
    for name, cut, workers in (("a", 12, 0), ("b", 5, 2), ("b", 12, 1)):
        out = tmp_path / name
        values = {**words, "data": data, "out": out, "workers": workers}

        callbacks = [Stop()] if cut < 12 else []
        report = regard.train("images", quiet=True, callbacks=callbacks, **values)
        found.append((report.step, (out / "model.safetensors").read_bytes()))
    assert [step for step, _ in found] == [12, 5, 12]
    assert found[0][1] == found[2][1]


def children(pid: int) -> list[int]:
    told = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(word) for word in told.read_text().split()] if told.exists() else []


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGINT])
def test_no_worker_outlives_its_training(zoo, tmp_path, kill):
    settings = {**ANIMALS["images"].settings, "steps": 100_000, "valid_every": 50_000}
    words = [f"{key}={value}" for key, value in settings.items()]
    words += [f"data={zoo.data('images')}", f"out={tmp_path / 'run'}", "workers=2", "log=none"]
    command = [sys.executable, "-m", "regard", "train", "images", *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    told = tmp_path / "run" / "metrics.jsonl"
    child = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, start_new_session=True)
    try:
        for _ in range(600):
            if not (told.exists() and told.stat().st_size):
                time.sleep(0.1)
        workers = children(child.pid)
        assert len(workers) >= 2
        os.killpg(child.pid, kill) if kill == signal.SIGINT else child.kill()
        said = child.communicate(timeout=60)[1].decode()
        for _ in range(100):
            if any(map(alive, workers)):
                time.sleep(0.1)
        assert not any(map(alive, workers))
        if kill == signal.SIGINT:
            assert child.returncode == 130 and "Traceback" not in said, said
    finally:
        child.kill()


def test_workers_is_a_setting_of_every_training(capsys):
    assert main(["train", "transcribe", "--help"]) == 0
    assert "  workers " in capsys.readouterr().out
