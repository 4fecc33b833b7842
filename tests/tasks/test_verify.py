"""Whether resuming keeps every bit, as a user has it proved on a run."""

import json
import shutil
from pathlib import Path

import pytest

from regard.cli import main
from regard.tasks.prepare import Training


@pytest.fixture
def data(zoo, tmp_path: Path) -> Path:
    shutil.copytree(zoo.data("classify"), tmp_path / "data")
    return tmp_path / "data"


@pytest.fixture
def run(data: Path, tmp_path: Path) -> Path:
    words = ["steps=6", "valid_every=2", "depth=1", "width=16", "heads=2", "ffn_width=16"]
    out = tmp_path / "run"
    assert main(["train", "classify", f"data={data}", *words, f"out={out}", "--quiet"]) == 0
    return out


def test_it_goes_on_from_the_newest_checkpoint_with_enough_steps_left(run, capsys):
    assert main(["verify", str(run), "steps=2"]) == 0
    said = capsys.readouterr().out
    assert "steps 5 to 6, stopped after 5 and resumed, are the same bits" in said
    assert "so are the losses of the run itself" in said and said.count("\n") == 1


def test_a_training_that_reads_other_rows_once_it_is_resumed_is_found(run, capsys, monkeypatch):
    batch, first = Training.batch, {}

    def forgetful(self, n):
        start = first.setdefault(id(self), n)  # what was drawn before is forgotten
        return batch(self, n - start)

    monkeypatch.setattr(Training, "batch", forgetful)
    assert main(["verify", str(run), "steps=6", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert any(name.startswith("raw ") for name in told["differing"])
    assert any(name.startswith("optimiser ") for name in told["differing"])
    assert any(name.startswith("metrics of step") for name in told["differing"])
    assert main(["verify", str(run), "steps=6"]) == 1
    assert "differ in" in capsys.readouterr().out


def test_data_that_are_gone_or_changed_are_refused_in_one_line(run, data, capsys):
    train = next(data.glob("train*"))
    train.write_text(train.read_text() + "another row\tred\n")
    assert main(["verify", str(run)]) == 2
    said = capsys.readouterr().err
    assert f"{run} was begun with other data" in said and said.count("\n") == 1
    shutil.rmtree(data)
    assert main(["verify", str(run)]) == 2
    said = capsys.readouterr().err
    assert str(data) in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["nowhere"], "nowhere: no run of regard train"),
        (["en-zh"], "en-zh: no run of regard train"),
        (["RUN", "steps=1"], "steps=1"),
        (["RUN", "stepps=4"], "stepps"),
    ],
)
def test_what_cannot_be_verified_is_refused(words, why, run, capsys):
    assert main(["verify", *(str(run) if word == "RUN" else word for word in words)]) == 2
    said = capsys.readouterr().err
    assert why in said and said.count("\n") == 1
