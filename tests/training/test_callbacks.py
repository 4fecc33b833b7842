"""Callbacks see a run and leave its bits alone; one that fails loses nothing."""

import csv
import random
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import regard
from regard import cli
from regard.errors import UsageError
from regard.training.callbacks import LOGGERS, Callback, Started, StopTraining
from tests.training.test_train import fit, rows, same
from tests.zoo import SENTENCES, write_rows


class Notes(Callback):
    """Writes down what it is told."""

    def __init__(self):
        self.seen: list[tuple[Any, ...]] = []

    def begin(self, run: Started) -> None:
        self.seen.append(("begin", run.step, run.steps))

    def after_step(self, step: int, values: dict[str, float]) -> None:
        self.seen.append(("step", step, values["train/loss"]))
        values.clear()
        torch.rand(3), np.random.rand(3), random.random()

    def after_validation(self, step: int, scores: dict[str, float]) -> None:
        self.seen.append(("validation", step, scores["valid/loss"]))

    def after_save(self, step: int, checkpoint: Path) -> None:
        assert (checkpoint / "counters.json").exists()
        self.seen.append(("save", step))

    def end(self) -> None:
        self.seen.append(("end",))


class Failing(Callback):
    """Fails in one of its methods."""

    def __init__(self, where: str):
        def fail(*arguments: Any) -> None:
            raise ValueError("no more\nroom")

        setattr(self, where, fail)


class Leaving(Callback):
    """Stops the run after a validation."""

    def after_validation(self, step: int, scores: dict[str, float]) -> None:
        raise StopTraining


def with_callbacks(folder: Path, *callbacks: Callback, **settings: Any) -> Any:
    one, _ = fit(folder, **settings)
    one.callbacks.members += callbacks
    return one


def test_callbacks_are_told_all_in_order_and_change_no_bit(tmp_path):
    plain, _ = fit(tmp_path / "plain", log=None, average=2)
    plain.run()
    first, second = Notes(), Notes()
    seen = with_callbacks(tmp_path / "seen", first, second, log=("csv", "tensorboard"), average=2)
    seen.run()
    assert same(plain.state, seen.state)
    assert first.seen == second.seen  # although each cleared the values it was given
    kinds = [one[0] for one in first.seen]
    assert first.seen[0] == ("begin", 0, 12) and kinds[-1] == "end" and kinds.count("end") == 1
    losses = [row["loss"] for row in rows(tmp_path / "seen") if "loss" in row]
    assert [one[2] for one in first.seen if one[0] == "step"] == losses
    assert [one[1] for one in first.seen if one[0] == "validation"] == [4, 8, 12]
    assert [one[1] for one in first.seen if one[0] == "save"] == [4, 8, 12, 12]
    assert not (tmp_path / "plain" / "tensorboard").exists()


@pytest.mark.parametrize("where", ["begin", "after_step", "after_validation", "after_save", "end"])
def test_a_run_goes_on_without_a_callback_that_fails(tmp_path, where):
    plain, _ = fit(tmp_path / "plain")
    plain.run()
    notes = Notes()
    one = with_callbacks(tmp_path / "run", Failing(where), notes)
    outcome = one.run()
    assert outcome.finished and same(plain.state, one.state)
    (note,) = outcome.notes
    assert note == f"the callback Failing failed in {where}: no more; the run goes on without it"
    assert len([1 for seen in notes.seen if seen[0] == "step"]) == 12


@pytest.mark.parametrize("where", ["begin", "after_step", "after_validation", "after_save"])
def test_or_it_is_saved_and_ends_in_one_line_and_goes_on_later(tmp_path, where):
    plain, _ = fit(tmp_path / "plain")
    plain.run()
    one = with_callbacks(tmp_path / "run", Failing(where), callback_error="stop")
    with pytest.raises(UsageError) as told:
        one.run()
    assert "\n" not in str(told.value) and f"failed in {where}: no more; saved at step" in str(
        told.value
    )
    assert one.counters["step"] == {"begin": 0, "after_step": 1, "after_validation": 4}.get(
        where, 5
    )
    again, _ = fit(tmp_path / "run")
    assert again.run().finished and same(plain.state, again.state)


def test_a_callback_can_stop_a_run_which_then_goes_on_to_the_bit(tmp_path):
    plain, _ = fit(tmp_path / "plain")
    plain.run()
    outcome = with_callbacks(tmp_path / "run", Leaving()).run()
    assert (outcome.step, outcome.finished, outcome.signal) == (4, False, None)
    again, _ = fit(tmp_path / "run")
    assert again.run().finished and same(plain.state, again.state)


def table(path: Path) -> list[dict[str, str]]:
    with open(path) as file:
        return list(csv.DictReader(file))


def test_tables_have_every_step_once_even_after_a_kill(tmp_path):
    fit(tmp_path, log=("csv",), steps=4)[0].run()
    with open(tmp_path / "steps.csv", "a") as file:
        file.write("5,1,2,3,4\n6,1,")  # written after the last checkpoint, when it was killed
    fit(tmp_path, log=("csv",))[0].run()
    losses = {row["step"]: row["loss"] for row in rows(tmp_path) if "loss" in row}
    steps = table(tmp_path / "steps.csv")
    assert {int(row["step"]): float(row["train/loss"]) for row in steps} == losses
    assert [row["step"] for row in table(tmp_path / "validations.csv")] == ["4", "8", "12"]


def records(path: Path) -> Iterator[bytes]:
    """Records of a .wandb file: blocks of 32 KB, in which each part has its length and kind."""
    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:  # no room for another head
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def test_weights_and_biases_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="pip install regard[wandb]")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.delenv("WANDB_MODE", raising=False)
    plain, _ = fit(tmp_path / "plain")
    plain.run()
    fit(tmp_path / "run", log=("wandb",), steps=4)[0].run()
    one, _ = fit(tmp_path / "run", log=("wandb",))
    assert one.run().finished and not one.notes and same(plain.state, one.state)
    parts = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(parts) == 2 and len({part.stem for part in parts}) == 1  # of one run
    seen: dict[str, set[int]] = {}
    for part in parts:
        ended = False
        for _ in range(200):  # a process of its own writes the file
            if ended:
                break
            time.sleep(0.1)
            for data in records(part):
                record = wandb_internal_pb2.Record()
                record.ParseFromString(data)
                ended |= record.HasField("exit")
                for item in record.history.item:
                    key = item.key or ".".join(item.nested_key)
                    seen.setdefault(key, set()).add(record.history.step.num)
    assert seen["train/loss"] == set(range(1, 13)) and seen["valid/loss"] == {4, 8, 12}


def test_mlflow_in_files(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="pip install regard[mlflow]")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    plain, _ = fit(tmp_path / "plain")
    plain.run()
    fit(tmp_path / "run", log=("mlflow",), steps=4)[0].run()
    one, _ = fit(tmp_path / "run", log=("mlflow",))
    assert one.run().finished and not one.notes and same(plain.state, one.state)
    uri = (tmp_path / "run" / "mlruns").as_uri()
    client = mlflow.MlflowClient(tracking_uri=uri)
    number = (tmp_path / "run" / "mlruns" / "run_id").read_text().strip()
    history = client.get_metric_history(number, "train/loss")
    losses = {row["step"]: row["loss"] for row in rows(tmp_path / "run") if "loss" in row}
    assert {point.step: point.value for point in history} == losses
    assert [p.step for p in client.get_metric_history(number, "valid/loss")] == [4, 8, 12]
    run = client.get_run(number)
    assert run.info.status == "FINISHED" and run.data.params["lr"] == "0.05"


@pytest.fixture
def texts(tmp_path) -> Path:
    rows = [{"text": f"{text} {n}", "label": "ab"[n % 2]} for n, text in enumerate(SENTENCES * 4)]
    write_rows(tmp_path / "texts.jsonl", rows)
    return tmp_path / "texts.jsonl"


TINY: dict[str, Any] = {"depth": 1, "width": 16, "heads": 2, "steps": 2}


def test_both_doors_of_a_real_training(texts, tmp_path, capsys):
    notes = Notes()
    how = {"data": str(texts), "out": str(tmp_path / "run"), **TINY}
    regard.train("classify", **how, log="csv", callbacks=[notes], quiet=True)
    assert [one for one in notes.seen if one[0] == "begin"] == [("begin", 0, 2)]
    assert len(table(tmp_path / "run" / "steps.csv")) == 2
    words = [f"{key}={value}" for key, value in {**how, "out": tmp_path / "line"}.items()]
    assert cli.main(["train", "classify", *words, "log=csv,tensorboard", "--quiet"]) == 0
    assert (tmp_path / "line" / "tensorboard").is_dir()
    assert table(tmp_path / "line" / "validations.csv")[-1]["step"] == "2"
    capsys.readouterr()


def test_what_cannot_be_called_is_refused_before_anything_is_written(
    texts, tmp_path, capsys, monkeypatch
):
    how = {"data": str(texts), "out": str(tmp_path / "run"), **TINY}
    with pytest.raises(UsageError, match="is no callback; give an object of a subclass"):
        regard.train("classify", **how, callbacks=[print])  # type: ignore[list-item]
    with pytest.raises(UsageError, match="callbacks cannot follow processes=2"):
        regard.train("classify", **how, callbacks=[Notes()], processes=2)
    words = [f"{key}={value}" for key, value in how.items()]
    assert cli.main(["train", "classify", *words, "log=wandbb"]) == 2
    assert "wandb" in capsys.readouterr().err
    for name, kind in LOGGERS.items():
        if name in ("wandb", "mlflow"):
            monkeypatch.setitem(sys.modules, kind.package, None)
            with pytest.raises(UsageError, match=rf"pip install regard\[{name}\]"):
                regard.train("classify", **how, log=name)
    assert not (tmp_path / "run").exists()
