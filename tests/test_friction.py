"""What is typed or left behind every day is met by the right word: keys, folders, logs, lists."""

import json
import random
import re
from pathlib import Path

import pytest

import regard
from regard.cli import main
from regard.errors import UsageError
from regard.settings import ALIASES, describe
from regard.tasks import TASKS
from regard.tasks import task as task_class
from regard.training import progress
from regard.training.run_folder import locked


@pytest.fixture
def table(tmp_path: Path) -> Path:
    chance = random.Random(1)
    colours = chance.choices(["red", "blue"], k=60)
    path = tmp_path / "colours.tsv"
    path.write_text("".join(f"the {c} dog {n}\t{c}\n" for n, c in enumerate(colours)))
    return path


@pytest.mark.parametrize(
    "typed, right",
    [
        ("learning_rate=0.1", "'lr'"),
        ("batch_size=32", "'batch_tokens'"),
        ("gpu=true", "'device', such as device=cuda"),
        ("num_workers=4", "'threads' (batches are made in the training itself"),
        ("max_steps=10", "'steps'"),
        ("lr_scheduler=cosine", "'schedule'"),
        ("num_train_epochs=3", "'epochs'"),
        ("output_dir=x", "'out'"),
        ("num_layers=3", "'depth'"),
    ],
)
def test_keys_of_other_tools_are_answered_by_the_right_key(table, capsys, typed, right):
    assert main(["train", "classify", f"data={table}", typed]) == 2
    assert f"here it is {right}" in capsys.readouterr().err


def test_epochs_are_understood_and_batches_of_images_are_counted(capsys):
    known = {row.key for row in describe(task_class("classify").Train)}
    assert "epochs" in known
    with pytest.raises(UsageError, match="here it is 'batch'"):
        task_class("images").resolve({"data": "x", "batch_size": 3})


def test_every_alias_is_no_key_and_leads_to_one():
    known: set[str] = set()
    for kind in map(task_class, TASKS):
        if kind.objective is None:
            continue
        settings, short = kind.Train, kind.short
        known |= {row.key for row in describe(settings)} | set(short)
    for alias, keys in ALIASES.items():
        assert any(key in known or key in ("beam", "outputs") for key in keys), alias


def test_an_unfinished_folder_is_told_with_the_way_on(tmp_path, capsys):
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    (folder / ".lock").touch()
    assert main(["run", str(folder), "x"]) == 2
    assert f"{folder}: an empty folder; train a model into it" in capsys.readouterr().err
    (folder / "recipe.json").write_text('{"task": "classify"}')
    (folder / "config.json").write_text('{"regard_format": 1, "task": "classify"}')
    assert main(["run", str(folder), "x"]) == 2
    told = capsys.readouterr().err
    assert "no model yet" in told and f"regard train classify ... out={folder}" in told
    assert told.count(str(folder)) == 2  # whose folder, and in the command


def test_a_failed_training_leaves_no_empty_folder(tmp_path, capsys):
    out = tmp_path / "runs" / "mine"
    assert main(["train", "classify", f"data={tmp_path / 'none.tsv'}", f"out={out}"]) == 2
    assert not (tmp_path / "runs").exists()
    out.mkdir(parents=True)  # what was there stays there
    assert main(["train", "classify", f"data={tmp_path / 'none.tsv'}", f"out={out}"]) == 2
    assert out.is_dir()
    with pytest.raises(ValueError), locked(tmp_path / "new" / "run"):
        (tmp_path / "new" / "run" / "recipe.json").touch()
        raise ValueError
    assert (tmp_path / "new" / "run" / "recipe.json").exists()


def test_a_log_tells_the_time_left(table, tmp_path, capsys):
    out = tmp_path / "run"
    how = {"data": str(table), "steps": 4, "valid_every": 2, "size": "tiny", "pieces": 300}
    regard.train("classify", out=str(out), **how)
    err = capsys.readouterr().err
    assert re.search(r"^step 2 of 4  .*about \d+ s left$", err, re.MULTILINE)
    assert re.search(r"^step 4 of 4  .*\d$", err, re.MULTILINE)


def test_a_line_comes_every_half_minute_where_there_is_no_terminal(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    with progress.Progress("train", 1000) as bar:
        for _ in range(100):
            now[0] += 1
            bar.update(1, loss=2.5, tokens=10)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert lines[0] == "train 30 of 1,000  loss 2.500  10 tokens/s  about 16 min left"
    with progress.Progress("train", 1000, quiet=True) as bar:
        now[0] += 100
        bar.update(1)
    assert capsys.readouterr().err == ""


def test_recipes_are_a_table_that_fits(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert sum(line.startswith(f"{name} ") for name in ("sst2", "fashion") for line in lines) == 2
    assert any("Gives: " in line for line in lines) and any("Takes: " in line for line in lines)
    assert main(["--json", "recipes"]) == 0
    assert "Command:" in json.loads(capsys.readouterr().out)["sst2"]


def test_nothing_is_written_to_stderr_at_exit(tmp_path):
    """Neither a leak report of another library nor a warning follows an answer."""
    import subprocess
    import sys

    words = [sys.executable, "-m", "regard", "--quiet", "look", "en-zh", "Yes."]
    made = subprocess.run(
        [*words, f"out={tmp_path / 'x.png'}"], capture_output=True, text=True, timeout=300
    )
    assert (made.returncode, made.stderr) == (0, "")


def test_binary_files_are_not_said_to_be_text(tmp_path, capsys):
    path = tmp_path / "data.tsv"
    path.write_bytes(b"PK\x03\x04\x00\x00" * 10)
    assert main(["train", "classify", f"data={path}", f"out={tmp_path / 'run'}"]) == 2
    told = capsys.readouterr().err
    assert "tr -d" not in told and "not text" in told
