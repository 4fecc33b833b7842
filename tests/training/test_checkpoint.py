"""Checkpoints are written by all that have parts of them, beside the training if so asked."""

import errno
import json
import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from regard.errors import UsageError
from regard.training import checkpoint, distributed, fit, sharding
from tests.training.test_distributed import together
from tests.training.test_train import BatchNormed, Line, Points, rows, same
from tests.training.test_train import fit as begin


def rank(number: int, size: int, told: list[dict[int, object]]) -> distributed.Group:
    """One of several processes, which are threads here."""

    class Threads(distributed.Group):
        def gather(self, value):
            own = json.loads(json.dumps(value))
            with LOCK:
                if not told or len(told[-1]) == size or number in told[-1]:
                    told.append({})
                row = next(row for row in told if number not in row)
                row[number] = own
            while len(row) < size:
                pass
            return [row[n] for n in range(size)]

    return Threads(number, size)


LOCK = threading.Lock()
WHOLE = {"a": torch.arange(14.0).view(7, 2), "b": torch.arange(3), "c": torch.tensor(2.5)}


def write(folder: Path, size: int) -> list[str]:
    """Save what several ranks have of the same tensors, and return what each says of errors."""
    errors, told = [""] * size, []

    def save(number: int) -> None:
        each = -(-7 // size)
        first = min(7, each * number)
        own = {} if number else dict(WHOLE)
        own["a"] = WHOLE["a"][first : first + each]
        by = rank(number, size, told)
        try:
            checkpoint.save_checkpoint(folder, 3, {"raw": own}, {"step": 3}, {"a": first}, by)
        except UsageError as error:
            errors[number] = str(error)

    threads = [threading.Thread(target=save, args=(n,)) for n in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_any_rows_are_read_from_the_parts_of_any_number_of_ranks(tmp_path, size):
    assert write(tmp_path, size) == [""] * size
    path = tmp_path / "step-3"
    assert checkpoint.is_complete(path)
    stored = checkpoint.load_checkpoint(path)[0]["raw"]
    assert same(dict(stored), WHOLE)
    for first, last in ((0, 7), (1, 3), (3, 4), (5, 7), (7, 7)):
        assert torch.equal(stored.rows("a", first, last), WHOLE["a"][first:last])
    for file in path.rglob("*.safetensors"):
        data = file.read_bytes()
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        assert not checkpoint.is_complete(path)
        file.unlink()
        assert not checkpoint.is_complete(path)
        file.write_bytes(data)
    assert checkpoint.is_complete(path)


def test_pytorch_reads_the_parts_and_nothing_is_pickled(tmp_path):
    write(tmp_path, 3)
    found = {name: torch.zeros_like(x) for name, x in WHOLE.items()}
    reader = HuggingFaceStorageReader(str(tmp_path / "step-3" / "raw"))
    load(found, storage_reader=reader, no_dist=True)
    assert same(found, WHOLE)
    kinds = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
    assert kinds == {".safetensors", ".json"}


def test_a_disk_that_refuses_one_part_is_told_by_all(tmp_path, monkeypatch):
    real = checkpoint.save_tensors

    def full(path, tensors, about=None):
        if path.name.startswith("00002"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path, tensors, about)

    monkeypatch.setattr(checkpoint, "save_tensors", full)
    errors = write(tmp_path, 3)
    assert len(set(errors)) == 1 and "no space left on device (rank 1)" in errors[0]
    assert not list(tmp_path.iterdir())


class Slow:
    """Writes files as usual, but only when it is let."""

    def __init__(self, monkeypatch):
        self.may, self.real = threading.Event(), checkpoint.save_tensors
        monkeypatch.setattr(checkpoint, "save_tensors", self)

    def __call__(self, *given):
        assert self.may.wait(30)
        self.real(*given)


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    straight, _ = begin(tmp_path / "straight", steps=8)
    straight.run()
    slow, steps = Slow(monkeypatch), []

    class Task(Points):
        def batch(self, n):
            steps.append(n)
            if n == 6:
                assert not (tmp_path / "out" / "checkpoints" / "step-4").exists()
                slow.may.set()
            return super().batch(n)

    one, _ = begin(tmp_path / "out", Task(), steps=8, async_=True)
    one.run()
    assert [n for n in steps if n < 8] == list(range(8)) and same(one.state, straight.state)
    for step in (4, 8):  # each has what was true at its step
        paths = [tmp_path / name / "checkpoints" / f"step-{step}" for name in ("out", "straight")]
        found, right = map(checkpoint.load_checkpoint, paths)
        assert checkpoint.is_complete(paths[0]) and found[1]["step"] == step
        assert all(same(dict(found[0][name]), dict(right[0][name])) for name in right[0])


def test_a_save_waits_for_the_one_before(tmp_path, monkeypatch):
    running, most, real = [0], [0], fit.save_checkpoint

    def counted(*given):
        running[0] += 1
        most[0] = max(most[0], running[0])
        real(*given)
        running[0] -= 1

    monkeypatch.setattr(fit, "save_checkpoint", counted)
    one, _ = begin(tmp_path, steps=12, async_=True, save_every=0.0)
    one.run()
    assert most == [1]
    assert [step for step, _ in checkpoint.checkpoints(tmp_path / "checkpoints")][:2] == [12, 11]


def test_an_error_beside_the_training_ends_it_with_its_words(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint, "save_tensors", full)
    one, _ = begin(tmp_path, steps=12, async_=True)
    with pytest.raises(UsageError, match=r"step-4: no space left on device"):
        one.run()
    assert not list((tmp_path / "checkpoints").iterdir())


@pytest.mark.parametrize("async_", [False, True])
def test_a_kill_while_a_file_is_written_leaves_the_last_complete_one(tmp_path, async_):
    straight, _ = begin(tmp_path / "straight", steps=12)
    straight.run()
    out = tmp_path / "out"
    pid = os.fork()
    if pid == 0:
        real = checkpoint.save_tensors

        def deadly(path, tensors, about=None):
            real(path, tensors, about)
            if "step-8" in str(path) and "optimiser" in path.name:
                os.truncate(path, 40)
                os.kill(os.getpid(), signal.SIGKILL)

        checkpoint.save_tensors = deadly
        begin(out, steps=12, async_=async_)[0].run()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    newest, damaged = checkpoint.newest_complete(out / "checkpoints")
    assert newest is not None and newest.name == "step-4" and not damaged
    again, _ = begin(out, steps=12, async_=async_)
    assert again.run().finished and same(again.state, straight.state)
    assert [row["loss"] for row in rows(out) if "loss" in row] == [
        row["loss"] for row in rows(tmp_path / "straight") if "loss" in row
    ]
    assert not list((out / "checkpoints").glob(".*"))


def shared_statistics(folder: str) -> None:
    with distributed.joined():
        one, _ = begin(Path(folder) / str(distributed.rank()), model=BatchNormed(), batches=4)
        one.folder = Path(folder)
        one.run()
        found = {
            name: one.state[f"seen.{name}"].tolist() for name in ("running_mean", "running_var")
        }
        print(json.dumps(found))


@pytest.mark.parametrize("count", [2, 4])
def test_running_statistics_are_those_of_one_process(tmp_path, count):
    """They were rank 0's, which has seen a share of the batches."""
    one, _ = begin(tmp_path / "one", model=BatchNormed(), batches=4)
    one.run()
    (tmp_path / "many").mkdir()
    run = "from tests.training.test_checkpoint import shared_statistics as s; s({!r})"
    told = together(["-c", run.format(str(tmp_path / "many"))], [], count)
    assert len(set(told)) == 1
    for name, found in json.loads(told[0]).items():
        torch.testing.assert_close(torch.tensor(found), one.state[f"seen.{name}"])
    scores = [
        [row["valid/loss"] for row in rows(tmp_path / n) if "valid/loss" in row]
        for n in ("one", "many")
    ]
    assert scores[1] == pytest.approx(scores[0], rel=1e-5) and scores[0]


def own_rows(folder: str) -> None:
    """Read a checkpoint into a model that is sharded, and say how much of it was read."""
    with distributed.joined():
        torch.manual_seed(distributed.rank())
        model = torch.nn.Sequential(torch.nn.ModuleList([Line(), Line()]))
        sharding.shard(model, "cpu")
        stored = checkpoint.load_checkpoint(Path(folder) / "step-1")[0]["raw"]
        real, read = stored.rows, []

        def rows(*given):
            read.append(found := real(*given))
            return found

        stored.rows = rows  # type: ignore[method-assign]
        for name, p in model.named_parameters():
            with torch.no_grad():
                sharding.local(p).copy_(stored.like(name, p))
        numbers = sum(x.numel() for x in read)
        assert numbers == sum(sharding.local(p).numel() for p in model.parameters())
        whole = {name: sharding.whole(p) for name, p in model.named_parameters()}
        assert same(whole, dict(checkpoint.load_checkpoint(Path(folder) / "step-1")[0]["raw"]))
        print(numbers)


def test_a_rank_reads_only_its_rows(tmp_path):
    model = torch.nn.Sequential(torch.nn.ModuleList([Line(), Line()]))
    state = {name: p.detach() for name, p in model.named_parameters()}
    checkpoint.save_checkpoint(tmp_path, 1, {"raw": state}, {})
    run = f"from tests.training.test_checkpoint import own_rows as o; o({str(tmp_path)!r})"
    told = [int(text) for text in together(["-c", run], [])]
    assert sum(told) == sum(p.numel() for p in state.values()) and max(told) < 0.6 * sum(told)
