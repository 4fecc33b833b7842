"""Wrong calls: each is refused in one clear line with exit code 2, and nothing is lost."""

import io
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from regard.cli import main
from tests.zoo import ANIMALS

SMALL = [f"{key}={value}" for key, value in ANIMALS["translate"].settings.items()]


@pytest.fixture
def place(zoo, tmp_path, monkeypatch) -> Path:
    """Data and a model trained on them, to be spoilt, in the current folder."""
    shutil.copytree(zoo.data("translate"), tmp_path / "data")
    without = shutil.ignore_patterns("SHA256SUMS")  # which would notice every change first
    shutil.copytree(zoo.model("translate"), tmp_path / "model", ignore=without)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def all_files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def put(path: str, content: bytes | str | None) -> Callable[[], None]:
    """Return what gives a file other content, or takes it away."""

    def spoil() -> None:
        if content is None:
            Path(path).unlink()
        else:
            Path(path).write_bytes(content.encode() if isinstance(content, str) else content)

    return spoil


def cut(path: str, share: float) -> Callable[[], None]:
    """Return what leaves only the first part of a file."""

    def spoil() -> None:
        data = Path(path).read_bytes()
        Path(path).write_bytes(data[: int(share * len(data))])

    return spoil


def add(path: str, line: bytes) -> Callable[[], None]:
    """Return what puts a line in the place of the second of a file."""

    def spoil() -> None:
        lines = Path(path).read_bytes().split(b"\n")
        lines[1] = line
        Path(path).write_bytes(b"\n".join(lines))

    return spoil


def fine() -> None:
    """Spoil nothing: the words alone are wrong."""


TRAIN = ["train", "translate", "data=data", "out=new", *SMALL]
RUN = ["run", "model", "a dog"]
EVAL = ["eval", "model", "data=data"]
LOOK = ["look", "model", "a dog", "out=a.html"]
EXPORT = ["export", "model", "format=ctranslate2"]

# what is spoilt, the words, and what the one line must say
TABLE = {
    # the model
    "no such model": (fine, ["run", "nowhere", "x"], "no model 'nowhere'"),
    "a starter misspelt": (fine, ["run", "models", "x"], "no model 'models'"),
    "a file for a model": (fine, ["run", "data/train.en", "x"], "no model 'data/train.en'"),
    "a folder without a model": (
        fine,
        ["run", "data", "x"],
        "data: no config.json, so there is no",
    ),
    "config is no JSON": (put("model/config.json", "{"), RUN, "model/config.json: not JSON"),
    "weights truncated": (cut("model/model.safetensors", 0.7), RUN, "damaged or cut short"),
    # how to run it
    "unknown key": (fine, [*RUN, "baem=3"], "unknown key 'baem'; did you mean 'beam'?"),
    "text that looks like a setting": (fine, ["run", "model", "E=mc2"], "goes after --"),
    "beam of nothing": (fine, [*RUN, "beam=0"], "beam=0 is too small; it must be at least 1"),
    "beam below nothing": (fine, [*RUN, "--beam", "-3"], "beam=-3 is too small"),
    "beam without bounds": (fine, [*RUN, "beam=1000000000"], "beam=1000000000 is too large"),
    "more answers than hypotheses": (fine, [*RUN, "beam=2", "n_best=3"], "n_best"),
    "no length": (fine, [*RUN, "max_length=0"], "max_length=0 is too small"),
    # what to train on
    "unknown task": (fine, ["train", "translat"], "unknown task or recipe 'translat'"),
    "data in an empty folder": (lambda: Path("empty").mkdir(), [*TRAIN[:2], "data=empty"], "empty"),
    "languages not there": (fine, [*TRAIN, "from=fr", "to=de"], "fr"),
    "uneven files": (cut("data/train.de", 0.6), TRAIN, "data/train"),
    # how to train
    "no steps": (fine, [*TRAIN[:4], "steps=0"], "steps=0 is too small"),
    "no time": (fine, [*TRAIN[:4], "minutes=-1"], "minutes=-1.0 is too small"),
    "no rate": (fine, [*TRAIN, "lr=-1"], "lr=-1.0 is too small"),
    "all dropped": (fine, [*TRAIN, "dropout=1.5"], "dropout=1.5 is too large"),
    "unknown device": (fine, [*TRAIN, "device=abacus"], "device"),
    "unknown dtype": (fine, [*TRAIN, "dtype=float99"], "dtype"),
    "no threads": (fine, [*TRAIN[:4], "threads=0"], "threads=0 is too small"),
    "no width": (fine, [*TRAIN[:4], "steps=1", "width=0"], "width=0 is too small"),
    "heads that do not divide": (fine, [*TRAIN[:4], "width=10", "heads=3"], "heads=3"),
    "negative vocabulary": (fine, [*TRAIN[:4], "pieces=-5"], "pieces=-5 is too small"),
    "no budget": (fine, [*TRAIN, "batch_tokens=0"], "batch_tokens=0 is too small"),
    "the task by its inner name": (fine, [*TRAIN, "task_or_recipe=x"], "key 'task_or_recipe'"),
    "init missing": (fine, [*TRAIN, "init=nowhere"], "nowhere"),
    "init of another shape": (
        fine,
        ["train", "translate", "data=data", "out=new", "steps=1", "init=model", "depth=7"],
        "init=model",
    ),
    # judging
    "judged without a test part": (
        lambda: [path.unlink() for path in Path("data").glob("test.*")],
        ["eval", "model", "data=data"],
        "test",
    ),
    "judged against nobody": (fine, [*EVAL, "against=nobody"], "no model 'nobody'"),
    "judged by name twice": (fine, [*EVAL, "model=other"], "unknown key 'model'"),
    # looking
    "a layer that is not there": (fine, [*LOOK, "layers=9"], "9"),
    "a head that is not there": (fine, [*LOOK, "heads=77"], "77"),
    "heads in words": (fine, [*LOOK, "heads=all,most"], "heads"),
    "a picture of an unknown kind": (fine, [*LOOK[:-1], "out=a.xyz"], "unknown kind of picture"),
    "a picture under a file": (fine, [*LOOK[:-1], "out=data/train.en/a.html"], "not a directory"),
    "a picture where nobody may write": (fine, [*LOOK[:-1], "out=/proc/a.html"], "/proc/a.html"),
    "a picture of nothing": (fine, ["look", "model", "", "out=a.html"], "nothing to look at"),
    "a look with an unknown key": (fine, [*LOOK, "layer=1"], "unknown key 'layer'"),
    "two texts for a look": (fine, [*LOOK, "texts=b"], "unknown key 'texts'"),
    # examining
    "an examination of nothing": (fine, ["doctor", "nowhere"], "nowhere"),
    "an examination of an empty folder": (
        lambda: Path("empty").mkdir(),
        ["doctor", "empty"],
        "empty",
    ),
    "an examination for an unknown size": (fine, ["doctor", "data", "size=huge"], "size 'huge'"),
    "an examination with an unknown key": (fine, ["doctor", "data", "sise=tiny"], "key 'sise'"),
    # exporting
    "an unknown format": (fine, ["export", "model", "format=onxx", "out=x"], "format 'onxx'"),
    "an export to nowhere": (fine, ["export", "model", "format=ctranslate2"], "out is missing"),
    "an export under a file": (fine, [*EXPORT, "out=data/train.en/x"], "not a directory"),
    "an export with an unknown key": (fine, [*EXPORT, "out=x", "bits=8"], "unknown key 'bits'"),
    "an export in an unknown precision": (fine, [*EXPORT, "out=x", "quantization=int3"], "int3"),
    # lists
    "a list with a setting": (fine, ["models", "size=big"], "unknown key 'size'"),
    # where to write
    "out under a file": (fine, [*TRAIN[:3], "out=data/train.en/new", *SMALL], "not a directory"),
    "out where nobody may write": (fine, [*TRAIN[:3], "out=/proc/new", *SMALL], "/proc/new"),
    "going on with other settings": (
        fine,
        [*TRAIN[:3], "out=model", *SMALL, "lr=0.5"],
        "model was begun with lr=",
    ),
    "going on with other data": (
        add("data/train.en", b"another line"),
        [*TRAIN[:3], "out=model", *SMALL],
        "model was begun with other data",
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_a_wrong_call_costs_one_line_and_nothing_else(name, place, capsys, monkeypatch):
    spoil, words, message = TABLE[name]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    spoil()
    before = all_files(place)
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert err.startswith("regard: ")
    assert err.count("\n") == 1, err
    assert message in err
    assert len(err) < 400, err
    assert out == ""
    after = all_files(place)
    assert "new/recipe.json" not in after  # nothing was begun that would refuse the right call
    assert {path: after.get(path) for path in before} == before


def run_lines(data: bytes, capsys, monkeypatch, *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    code = main(["run", "model", "max_length=4", *words])
    return code, *capsys.readouterr()


def test_lines_before_a_bad_one_are_answered(place, capsys, monkeypatch):
    start = b"a dog\n\nthe cat\n"
    code, alone, _ = run_lines(start, capsys, monkeypatch)
    assert code == 0
    assert alone.count("\n") == 3
    assert alone.split("\n")[1] == ""
    code, out, err = run_lines(start + b"caf\xe9\nthe end\n", capsys, monkeypatch)
    assert code == 2
    assert out == alone
    assert "standard input:4: not UTF-8" in err and err.count("\n") == 1


def test_an_empty_line_is_an_empty_line(place, capsys, monkeypatch):
    assert run_lines(b"\n\n", capsys, monkeypatch) == (0, "\n\n", "")
    assert run_lines(b"\n", capsys, monkeypatch, "n_best=2", "scores=true") == (0, "\n\n", "")
    assert run_lines(b"", capsys, monkeypatch) == (0, "", "")


def test_a_wrong_setting_is_refused_before_a_line_is_read(place, capsys, monkeypatch):
    code, out, err = run_lines(b"", capsys, monkeypatch, "beam=0")
    assert (code, out) == (2, "")
    assert "beam=0 is too small" in err


def limited(
    words: list[str], place: Path, bytes: int, **options
) -> subprocess.CompletedProcess[str]:
    """Run the command with no file allowed to be longer than this."""
    return subprocess.run(
        [sys.executable, "-m", "regard", *words],
        cwd=place,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (bytes, bytes)),
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_a_disk_that_fills_while_training_loses_nothing(place):
    before = all_files(place / "model")
    more = [word for word in SMALL if not word.startswith("steps")]
    words = ["train", "translate", "data=data", "init=model", "steps=3", "out=new", *more]
    answer = limited([*words, "--quiet"], place, 20_000)
    assert answer.returncode == 2
    assert answer.stderr.startswith("regard: ") and answer.stderr.count("\n") == 1, answer.stderr
    assert "file too large" in answer.stderr.lower()
    assert all_files(place / "model") == before
    assert not [path for path in (place / "new").rglob("*.tmp")]
    assert (
        main([*words[: -len(more) - 1], f"out={place}/new", *more]) == 0
    )  # room again: it goes on
