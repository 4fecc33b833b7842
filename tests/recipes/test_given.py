"""A file of keys, and a run that is repeated, train what the same words would have trained."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import regard
from regard import cli
from regard.errors import UsageError
from tests.zoo import SENTENCES, write_rows

TINY: dict[str, Any] = {"depth": 1, "width": 16, "heads": 2, "steps": 3, "seed": 5}


@pytest.fixture
def data(tmp_path) -> str:
    rows = [{"text": f"{text} {n}", "label": "ab"[n % 2]} for n, text in enumerate(SENTENCES * 4)]
    write_rows(tmp_path / "texts.jsonl", rows)
    return str(tmp_path / "texts.jsonl")


def weights(folder: Path) -> bytes:
    assert load_file(folder / "model.safetensors")
    return (folder / "model.safetensors").read_bytes()


def settings(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "recipe.json").read_text())["settings"]


def test_a_file_and_a_repeated_run_give_the_bits_of_the_same_words(data, tmp_path, capsys):
    regard.train("classify", data=data, out=tmp_path / "words", quiet=True, **TINY)
    file = tmp_path / "recipe.toml"
    file.write_text(
        f'task = "classify"\ndata = "{data}"\nsteps = 3\nseed = 4\nwidth = 16\n'
        "[model]\ndepth = 1\nblock.heads = 2\n"
    )
    assert cli.main(["train", str(file), "seed=5", f"out={tmp_path / 'file'}", "--quiet"]) == 0
    assert weights(tmp_path / "file") == weights(tmp_path / "words")
    again = f"out={tmp_path / 'again'}"
    assert cli.main(["train", "--from", str(tmp_path / "words"), again, "--quiet"]) == 0
    assert weights(tmp_path / "again") == weights(tmp_path / "words")
    changed = {"out": tmp_path / "changed", "lr": 0.5, "model.depth": 2, "epochs": 1}
    regard.train(str(tmp_path / "words"), quiet=True, **changed)
    found = settings(tmp_path / "changed")
    assert (found["lr"], found["model.depth"], found["epochs"]) == (0.5, 2, 1)
    assert found["steps"] is None and found["seed"] == 5 and found["model.block.width"] == 16
    capsys.readouterr()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('task = "classify"\nlrr = 1', "recipe.toml: unknown key 'lrr'; did you mean 'lr'"),
        ('task = "classify"\nsteps = "x"', "recipe.toml: steps='x' is not a whole number"),
        ('task = "classify"\nuse = "mine.py"', "recipe.toml: unknown key 'use'"),
        ("lr = 1", "recipe.toml: it must say what to train"),
        ("lr = = 1", "recipe.toml: not TOML"),
        ('task = "clasify"', "unknown task or recipe 'clasify'"),
    ],
)
def test_what_a_file_says_wrongly_is_told_with_its_name(data, tmp_path, capsys, text, told):
    (tmp_path / "recipe.toml").write_text(text)
    words = [f"data={data}", f"out={tmp_path / 'run'}"]
    assert cli.main(["train", str(tmp_path / "recipe.toml"), *words]) == 2
    said = capsys.readouterr().err
    assert told in said and said.count("\n") == 1 and not (tmp_path / "run").exists()


def test_what_cannot_be_repeated_is_refused(data, tmp_path):
    with pytest.raises(UsageError, match="no such file"):
        regard.train(str(tmp_path / "none.toml"))
    run = tmp_path / "run"
    run.mkdir()
    old = {"task": "classify", "settings": {"lr": 0.1}}
    (run / "recipe.json").write_text(json.dumps(old))
    with pytest.raises(UsageError, match="out is missing; add out=FOLDER"):
        regard.train(str(run), lr=0.2)
    with pytest.raises(UsageError, match="size= cannot change in it"):
        regard.train(str(run), size="base", out=tmp_path / "other")
    (run / "recipe.json").write_text("{}")
    with pytest.raises(UsageError, match="does not say what was trained"):
        regard.train(str(run), out=tmp_path / "other")
