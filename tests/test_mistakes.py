"""Wrong calls: each is refused in one clear line with exit code 2, and nothing is lost."""

import gzip
import io
import json
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


def config(**changes) -> Callable[[], None]:
    """Return what changes config.json, with `block_` for what lies in the block."""

    def spoil() -> None:
        path = Path("model/config.json")
        whole = json.loads(path.read_text())
        for key, value in changes.items():
            if key.startswith("block_"):
                whole["model"]["block"][key.removeprefix("block_")] = value
            elif key in whole["model"] or key.startswith("model_"):
                whole["model"][key.removeprefix("model_")] = value
            else:
                whole[key] = value
        path.write_text(json.dumps(whole))

    return spoil


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
    "config is a list": (put("model/config.json", "[1]"), RUN, "expected a JSON object"),
    "config is nested without end": (put("model/config.json", "[" * 99_999), RUN, "not JSON"),
    "config is empty": (put("model/config.json", ""), RUN, "model/config.json: not JSON"),
    "config is binary": (put("model/config.json", b"\xff\xfe\0"), RUN, "not JSON"),
    "config of the future": (config(regard_format=99), RUN, "regard_format is 99"),
    "config of an unknown family": (config(family="rnn"), RUN, "unknown family 'rnn'"),
    "config of a strange family": (config(family=["a"]), RUN, "unknown family ['a']"),
    "config of an unknown task": (config(task="cook"), RUN, "unknown task 'cook'"),
    "config of a strange task": (config(task={}), RUN, "unknown task {}"),
    "config with an unknown key": (config(model_wdith=3), RUN, "unknown key 'wdith'"),
    "config with a wrong type": (config(block_width="wide"), RUN, "block.width='wide' is not a"),
    "config with half a head": (config(block_heads=1.5), RUN, "heads=1.5 is not a whole number"),
    "config with no width": (config(block_width=0), RUN, "block.width=0 is too small"),
    "config with negative depth": (config(encoder_depth=-1), RUN, "encoder_depth=-1 is too small"),
    "config whose heads do not divide": (config(block_heads=3), RUN, "heads=3"),
    "config of a trillion parameters": (
        config(block_width=100_000, block_ffn_width=400_000, block_heads=4, encoder_depth=20),
        RUN,
        "parameters",
    ),
    "config of a million layers": (config(encoder_depth=10**6), RUN, "encoder_depth=1000000 is"),
    "config with an unknown norm": (config(block_norm="rmss"), RUN, "unknown norm 'rmss'"),
    "config with an unknown position": (config(position="roap"), RUN, "unknown position 'roap'"),
    "weights missing": (put("model/model.safetensors", None), RUN, "model.safetensors: no such"),
    "weights empty": (put("model/model.safetensors", ""), RUN, "damaged or cut short"),
    "weights truncated": (cut("model/model.safetensors", 0.7), RUN, "damaged or cut short"),
    "weights cut in the header": (cut("model/model.safetensors", 0.01), RUN, "damaged or cut"),
    "weights are noise": (put("model/model.safetensors", b"\xff" * 4096), RUN, "damaged or cut"),
    "weights of another model": (config(block_ffn_width=48), RUN, "does not fit config.json"),
    "tokenizer missing": (put("model/tokenizer.json", None), RUN, "tokenizer.json: no such file"),
    "tokenizer broken": (cut("model/tokenizer.json", 0.5), RUN, "model/tokenizer.json"),
    "tokenizer of something else": (put("model/tokenizer.json", "{}"), RUN, "tokenizer.json"),
    "generation broken": (put("model/generation_config.json", "{"), RUN, "not JSON"),
    # how to run it
    "unknown key": (fine, [*RUN, "baem=3"], "unknown key 'baem'; did you mean 'beam'?"),
    "text that looks like a setting": (fine, ["run", "model", "E=mc2"], "goes after --"),
    "beam of nothing": (fine, [*RUN, "beam=0"], "beam=0 is too small; it must be at least 1"),
    "beam below nothing": (fine, [*RUN, "--beam", "-3"], "beam=-3 is too small"),
    "beam in words": (fine, [*RUN, "beam=five"], "beam='five' is not a whole number"),
    "beam without bounds": (fine, [*RUN, "beam=1000000000"], "beam=1000000000 is too large"),
    "more answers than hypotheses": (fine, [*RUN, "beam=2", "n_best=3"], "n_best"),
    "no length": (fine, [*RUN, "max_length=0"], "max_length=0 is too small"),
    "scores perhaps": (fine, [*RUN, "scores=perhaps"], "scores='perhaps' is not true or false"),
    "alignments of a pyramid": (fine, [*RUN, "alignments=cheops"], "unknown alignments 'cheops'"),
    "unknown penalty": (fine, [*RUN, "length_penalty=gmnt"], "Did you mean 'gnmt'?"),
    "penalty without end": (fine, [*RUN, "alpha=inf"], "alpha='inf' is not a finite number"),
    # what to train on
    "unknown task": (fine, ["train", "translat"], "unknown task or recipe 'translat'"),
    "no data": (fine, ["train", "translate"], "data is missing; add data="),
    "data missing": (fine, [*TRAIN[:2], "data=date"], "date"),
    "data in an empty folder": (lambda: Path("empty").mkdir(), [*TRAIN[:2], "data=empty"], "empty"),
    "languages not there": (fine, [*TRAIN, "from=fr", "to=de"], "fr"),
    "uneven files": (cut("data/train.de", 0.6), TRAIN, "data/train"),
    "an empty side": (add("data/train.de", b""), TRAIN, "data/train.de:2:"),
    "bad UTF-8": (add("data/train.en", b"caf\xe9"), TRAIN, "data/train.en:2: not UTF-8"),
    "a binary file": (add("data/train.en", b"a\0b"), TRAIN, "data/train.en:2: a NUL byte"),
    "broken UTF-16": (
        put("data/train.en", "a dog\n".encode("utf-16") + b"x"),
        TRAIN,
        "data/train.en: broken UTF-16",
    ),
    "a line of a million characters": (
        add("data/train.en", b"x" * 1_000_001),
        TRAIN,
        "data/train.en:2: a line of over 1,000,000 characters",
    ),
    "empty files": (
        lambda: (put("data/train.en", "")(), put("data/train.de", "")()),
        TRAIN,
        "data/train",
    ),
    "one column": (put("pairs.tsv", "one\ntwo\n"), [*TRAIN[:2], "data=pairs.tsv"], "pairs.tsv:1"),
    "broken JSON lines": (put("x.jsonl", '{"src'), [*TRAIN[:2], "data=x.jsonl"], "x.jsonl:1"),
    "a cut gzip file": (
        put("x.tsv.gz", gzip.compress(os.urandom(9999).hex().encode())[:5000]),
        [*TRAIN[:2], "data=x.tsv.gz"],
        "x.tsv.gz",
    ),
    # how to train
    "unknown setting": (fine, [*TRAIN, "dropuot=0"], "unknown key 'dropuot'; did you mean"),
    "steps in words": (fine, [*TRAIN[:4], "steps=ten"], "steps='ten' is not a whole number"),
    "no steps": (fine, [*TRAIN[:4], "steps=0"], "steps=0 is too small"),
    "no time": (fine, [*TRAIN[:4], "minutes=-1"], "minutes=-1.0 is too small"),
    "time without end": (fine, [*TRAIN[:4], "minutes=inf"], "minutes='inf' is not a finite"),
    "no rate": (fine, [*TRAIN, "lr=-1"], "lr=-1.0 is too small"),
    "rate of no number": (fine, [*TRAIN, "lr=nan"], "lr='nan' is not a finite number"),
    "all dropped": (fine, [*TRAIN, "dropout=1.5"], "dropout=1.5 is too large"),
    "unknown size": (fine, [*TRAIN, "size=huge"], "unknown size 'huge'; choose from"),
    "unknown norm": (fine, [*TRAIN, "norm=rmss"], "unknown norm 'rmss'; choose from"),
    "unknown position": (fine, [*TRAIN, "position=roap"], "unknown position 'roap'"),
    "unknown schedule": (fine, [*TRAIN, "schedule=steep"], "unknown schedule 'steep'"),
    "unknown tokenizer": (fine, [*TRAIN, "tokenizer=word"], "'word'"),
    "unknown device": (fine, [*TRAIN, "device=abacus"], "device"),
    "unknown dtype": (fine, [*TRAIN, "dtype=float99"], "dtype"),
    "no threads": (fine, [*TRAIN[:4], "threads=0"], "threads=0 is too small"),
    "no width": (fine, [*TRAIN[:4], "steps=1", "width=0"], "width=0 is too small"),
    "heads that do not divide": (fine, [*TRAIN[:4], "width=10", "heads=3"], "heads=3"),
    "negative vocabulary": (fine, [*TRAIN[:4], "pieces=-5"], "pieces=-5 is too small"),
    "no budget": (fine, [*TRAIN, "batch_tokens=0"], "batch_tokens=0 is too small"),
    "quiet as a setting": (fine, [*TRAIN, "quiet=yes"], "unknown key 'quiet'; write --quiet"),
    "the task by its inner name": (fine, [*TRAIN, "task_or_recipe=x"], "key 'task_or_recipe'"),
    "a setting twice": (fine, [*TRAIN, "steps=3"], "steps is given twice"),
    "init missing": (fine, [*TRAIN, "init=nowhere"], "nowhere"),
    "init of another shape": (
        fine,
        ["train", "translate", "data=data", "out=new", "steps=1", "init=model", "depth=7"],
        "init=model",
    ),
    # judging
    "judged on nothing": (fine, ["eval", "model"], "data is missing; add data="),
    "judged on missing data": (fine, ["eval", "model", "data=nowhere"], "nowhere"),
    "judged without a test part": (
        lambda: [path.unlink() for path in Path("data").glob("test.*")],
        ["eval", "model", "data=data"],
        "test",
    ),
    "judged on an unknown part": (fine, [*EVAL, "part=tset"], "tset"),
    "judged by an unknown measure": (fine, [*EVAL, "tokenise=14a"], "unknown tokenise '14a'"),
    "judged against nobody": (fine, [*EVAL, "against=nobody"], "no model 'nobody'"),
    "judged with an unknown key": (fine, [*EVAL, "baem=3"], "unknown key 'baem'; did you mean"),
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


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"caf\xe9", "standard input:4: not UTF-8 (byte 0xe9 at column 4)"),
        (b"a\0b", "standard input:4: a NUL byte"),
        (b"x" * 1_000_001, "standard input:4: a line of over 1,000,000 characters"),
    ],
)
def test_lines_before_a_bad_one_are_answered(place, capsys, monkeypatch, line, message):
    start = b"a dog\n\nthe cat\n"
    code, alone, _ = run_lines(start, capsys, monkeypatch)
    assert code == 0
    assert alone.count("\n") == 3
    assert alone.split("\n")[1] == ""
    code, out, err = run_lines(start + line + b"\nthe end\n", capsys, monkeypatch)
    assert code == 2
    assert out == alone
    assert message in err and err.count("\n") == 1


def test_an_empty_line_is_an_empty_line(place, capsys, monkeypatch):
    assert run_lines(b"\n\n", capsys, monkeypatch) == (0, "\n\n", "")
    assert run_lines(b"\n", capsys, monkeypatch, "n_best=2", "scores=true") == (0, "\n\n", "")
    assert run_lines(b"", capsys, monkeypatch) == (0, "", "")


def test_a_wrong_setting_is_refused_before_a_line_is_read(place, capsys, monkeypatch):
    code, out, err = run_lines(b"", capsys, monkeypatch, "beam=0")
    assert (code, out) == (2, "")
    assert "beam=0 is too small" in err


def test_json_lines_keep_what_they_bring(place, capsys, monkeypatch):
    lines = [{"id": 7, "src": "a dog", "tgt": "god a"}, {"src": "", "more": [1, {"a": None}]}]
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    code, out, err = run_lines(data, capsys, monkeypatch, "n_best=2", "scores=yes")
    assert (code, err) == (0, "")
    answers = [json.loads(line) for line in out.splitlines()]
    assert (answers[0]["id"], answers[0]["src"], answers[0]["tgt"]) == (7, "a dog", "god a")
    assert answers[0]["prediction"] == answers[0]["n_best"][0]["prediction"]
    scores = [each["score"] for each in answers[0]["n_best"]]
    assert scores == sorted(scores, reverse=True) and len(scores) == 2
    assert (answers[1]["prediction"], answers[1]["more"]) == ("", [1, {"a": None}])


def test_answers_have_as_many_lines_as_were_asked_for(place, capsys, monkeypatch):
    code, out, _ = run_lines(b"a dog\nthe cat\n", capsys, monkeypatch, "n_best=3", "scores=true")
    assert code == 0
    rows = [line.split(" ||| ") for line in out.split("\n")[:-1]]
    assert [len(row) for row in rows] == [2] * 6
    assert all(float(one[1]) >= float(two[1]) for one, two in zip(rows[:2], rows[1:3], strict=True))


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
