"""Folders are answered in shards to the bytes of one process, through kills and bad inputs."""

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import regard
from regard.cli import main
from regard.cluster import Runner, Shard
from regard.errors import UsageError, as_json
from tests.zoo import WORDS, Zoo

# Shards


@pytest.mark.parametrize(
    ("asked", "environment", "shard"),
    [
        (None, {}, (0, 1)),
        ("3/8", {}, (3, 8)),
        ("3/8", {"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_COUNT": "9"}, (3, 8)),
        ("8", {"JOB_COMPLETION_INDEX": "7"}, (7, 8)),
        (None, {"SLURM_ARRAY_TASK_ID": "0", "SLURM_ARRAY_TASK_COUNT": "4"}, (0, 4)),
        ("4", {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "4"}, (3, 4)),
    ],
)
def test_a_shard_is_asked_for_or_told_by_the_scheduler(asked, environment, shard):
    found = Shard.asked(asked, environment)
    assert (found.number, found.count) == shard


def array(number: int, low: int, high: int, step: int, count: int) -> dict[str, str]:
    told = {"ID": number, "MIN": low, "MAX": high, "STEP": step, "COUNT": count}
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in told.items()}


def test_an_array_may_begin_anywhere_and_go_in_steps():
    found = [Shard.asked(None, array(n, 10, 18, 4, 3)).number for n in (10, 14, 18)]
    assert found == [0, 1, 2]


@pytest.mark.parametrize(
    ("asked", "environment", "message"),
    [
        ("8/8", {}, "0 to 7"),
        ("0/0", {}, "0 to 0"),
        ("-1/8", {}, "expected i/n"),
        ("a/b", {}, "expected i/n"),
        ("8", {}, "give shard=i/8"),
        ("8", {"JOB_COMPLETION_INDEX": "8"}, "0 to 7"),
        ("5", {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "4"}, "has 4 tasks"),
        (None, {"JOB_COMPLETION_INDEX": "2"}, "give shard=N"),
        (None, array(5, 1, 7, 1, 3), "have gaps"),  # --array=1,5,7
        (None, {"SLURM_ARRAY_TASK_ID": "1"}, "array of unknown tasks"),
    ],
)
def test_what_is_no_shard_is_refused_in_one_line(asked, environment, message):
    with pytest.raises(UsageError, match=message):
        Shard.asked(asked, environment)


# Folders


def texts(folder: Path, count: int, seed: int = 0) -> Path:
    """Small files of lines in folders, one of them packed, one JSON, one a table."""
    rng = np.random.default_rng(seed)
    for n in range(count):
        path = folder / str(n % 3) / f"{n}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(" ".join(rng.choice(WORDS, 4)) + "\n" for _ in range(3)))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".run.json"
    }


def run(model: Path | str, source: Path, out: Path, *words: str) -> int:
    return main(["--quiet", "run", str(model), f"in={source}", f"out={out}", "threads=1", *words])


def test_shards_with_a_process_killed_give_the_bytes_of_one_process(zoo: Zoo, tmp_path):
    source, model = texts(tmp_path / "in", 200), zoo.model("classify")
    assert run(model, source, tmp_path / "one") == 0
    out = tmp_path / "shards"
    words = ["-m", "regard", "run", str(model), f"in={source}", f"out={out}", "threads=1"]
    slow = "import regard.files as f, time, runpy, sys\nold = f.os.fsync\n"
    slow += "def late(n): time.sleep(0.05); old(n)\nf.os.fsync = late\n"
    slow += "sys.argv = ['regard', *sys.argv[1:]]; runpy.run_module('regard', run_name='__main__')"
    killed = subprocess.Popen([sys.executable, "-c", slow, *words[2:], "shard=0/2"])
    while len(contents(out)) < 5:  # it is in the middle of its files
        assert killed.poll() is None
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert 5 <= len(contents(out)) < 100
    (out / "0" / ".0.txt.1-abc.tmp").write_text("half a li")  # as one that is killed leaves it
    times = {path: path.stat().st_mtime_ns for path in out.rglob("*.txt") if path.name[0] != "."}
    for shard in ("1/2", "0/2"):
        assert run(model, source, out, f"shard={shard}") == 0
    assert contents(out) == contents(tmp_path / "one") and len(contents(out)) == 200
    assert {path: path.stat().st_mtime_ns for path in times} == times  # finished ones are skipped


def test_every_kind_of_file_has_its_answers(zoo: Zoo, tmp_path):
    model, source, out = zoo.model("classify"), tmp_path / "in", tmp_path / "out"
    source.mkdir()
    (source / "lines.txt").write_text("a red dog\n\nthe blue house\n")
    (source / "packed.txt.gz").write_bytes(gzip.compress(b"a red dog\n"))
    (source / "records.jsonl").write_text('{"text": "a red dog", "id": 7}\n')
    (source / "table.csv").write_text("id,text\n7,a red dog\n8,a green dog\n")
    (source / ".hidden").write_text("not read")
    assert run(model, source, out) == 0
    found = contents(out)
    assert list(found) == ["lines.txt", "packed.txt", "records.jsonl", "table.csv.jsonl"]
    assert found["lines.txt"].startswith(b"RED") and found["lines.txt"].split(b"\n")[1] == b""
    assert found["lines.txt"].split(b"\n")[2].startswith(b"BLUE")
    assert found["packed.txt"].splitlines() == found["lines.txt"].splitlines()[:1]
    rows = [json.loads(line) for line in found["table.csv.jsonl"].splitlines()]
    assert [(row["id"], row["prediction"]) for row in rows] == [("7", "RED"), ("8", "GREEN")]
    assert json.loads(found["records.jsonl"])["prediction"] == "RED"


@pytest.mark.parametrize("name", ["images", "sounds", "transcribe", "series", "caption", "denoise"])
def test_photos_sounds_and_series_are_answered_by_shards(name, zoo: Zoo, tmp_path):
    model, source = zoo.model(name), tmp_path / "in"
    loaded = regard.load(model)
    data = zoo.data(name)
    known = loaded.inputs.suffixes or {".ts"}
    home = data if data.is_dir() else data.parent
    files = sorted(path for path in home.rglob("*") if path.suffix in known)[:20]
    for n, path in enumerate(files):
        (source / str(n % 2)).mkdir(parents=True, exist_ok=True)
        shutil.copy(path, source / str(n % 2) / f"{n}{path.suffix}")
    bad = source / f"bad{files[0].suffix}"
    bad.write_bytes(b"neither a photo nor a sound")
    one, two = tmp_path / "one", tmp_path / "two"
    assert run(model, source, one) == 0
    for shard in ("0/2", "1/2"):
        assert run(model, source, two, f"shard={shard}") == 0
    errors = {path: told for path, told in contents(one).items() if path.startswith("errors")}
    (told,) = map(json.loads, errors["errors.jsonl"].splitlines())
    assert told["input"] == bad.name and "bad" in told["error"]
    answers = {path: told for path, told in contents(one).items() if path not in errors}
    assert len(answers) == len(files)
    assert {k: v for k, v in contents(two).items() if not k.startswith("errors")} == answers


def test_a_bad_line_is_told_and_keeps_its_place(zoo: Zoo, tmp_path):
    model, source, out = zoo.model("classify"), tmp_path / "in", tmp_path / "out"
    source.mkdir()
    (source / "a.txt").write_bytes(b"a red dog\ncaf\xe9\n" + b"x" * 1_000_001 + b"\na red dog\n")
    (source / "b.jsonl").write_text('{"text": "a red dog"}\n{"text": 3, "id": 4}\n{broken\n[]\n')
    (source / "c.txt.gz").write_bytes(gzip.compress(os.urandom(100_000))[:-500])
    assert run(model, source, out) == 0
    lines = (out / "a.txt").read_text().split("\n")
    assert lines[0] == lines[3] and "RED" in lines[0] and lines[1:3] == ["", ""]
    records = [json.loads(line) for line in (out / "b.jsonl").read_text().splitlines()]
    assert records[0]["prediction"] == "RED" and records[1]["id"] == 4
    assert ["error" in record for record in records] == [False, True, True, True]
    told = [json.loads(line) for line in (out / "errors.jsonl").read_text().splitlines()]
    where = [(row["input"], row.get("number")) for row in told]
    assert where[:5] == [("a.txt", 2), ("a.txt", 3), ("b.jsonl", 2), ("b.jsonl", 3), ("b.jsonl", 4)]
    assert not (out / "c.txt").exists() and ("c.txt.gz", None) in where
    before = (out / "errors.jsonl").read_bytes()
    assert run(model, source, out) == 0  # the broken file is tried again, and told of once
    after = (out / "errors.jsonl").read_bytes()
    assert [row for row in after.splitlines() if b"c.txt" not in row] == before.splitlines()[:5]
    assert after.count(b'"c.txt.gz"}') + after.count(b'"c.txt.gz", "error"') == 1
    (source / "c.txt.gz").write_bytes(gzip.compress(b"a red dog\n"))
    assert run(model, source, out) == 0
    assert (out / "c.txt").exists() and b"c.txt" not in (out / "errors.jsonl").read_bytes()


def test_an_input_that_only_the_model_refuses_does_not_stop_the_others(tmp_path):
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    pairs = ["Yes.\t是的。", "no pair at all", "Thank you.\t谢谢。"]
    (source / "pairs.txt").write_text("".join(f"{pair}\n" for pair in pairs))
    assert run("en-zh", source, out, "forced=true", "scores=true") == 0
    (told,) = map(json.loads, (out / "errors.jsonl").read_text().splitlines())
    assert (told["input"], told["number"]) == ("pairs.txt", 2)
    lines = (out / "pairs.txt").read_text().splitlines()
    assert lines[1] == "" and lines[0] and lines[2]


def test_a_file_is_never_held_whole(zoo: Zoo, tmp_path):
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    (source / "huge.txt").write_text("\n" * 200_000)
    code = f"""
import regard, resource
from regard.cli import main
def most():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model = {str(zoo.model("classify"))!r}
regard.load(model).run(["a red dog", *[""] * 511])
start = most()
assert main(["--quiet", "run", model, "in={source}", "out={out}", "threads=1"]) == 0
print(most() - start)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout.splitlines()[-1]) < 12_000  # KB; its lines and answers would be 40,000
    assert (out / "huge.txt").stat().st_size == 200_000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["in=IN"], "out is missing"),
        (["in=nowhere", "out=OUT"], "no such folder"),
        (["in=IN", "out=IN"], "one lies within the other"),
        (["in=IN", "out=IN/inner"], "one lies within the other"),
        (["in=IN", "out=OUT", "shard=2/2"], "0 to 1"),
        (["shard=0/2", "Yes."], "add in=FOLDER out=FOLDER"),
        (["Yes.", "in=IN", "out=OUT"], "give one of them"),
        (["in=IN/empty", "out=OUT"], "no file to answer"),
        (["in=IN/twice", "out=OUT"], "would both be answered"),
        (["in=IN/errors", "out=OUT"], "rename it"),
        (["in=IN", "out=FILE"], "a file; expected a folder"),
        (["in=IN", "out=OUT", "device=nope"], "device='nope' cannot be used"),
        (["Yes.", "device=cuda:7"], "device='cuda:7' cannot be used"),
        (["in=IN", "out=OUT", "beem=3"], "unknown key 'beem'"),
    ],
)
def test_a_wrong_call_is_refused_before_anything_is_written(words, message, tmp_path, capsys):
    source, out = tmp_path / "in", tmp_path / "out"
    for name in ("empty", "twice", "errors"):
        (source / name).mkdir(parents=True)
    for name in ("a.txt", "twice/a.txt", "twice/a.txt.gz", "errors/errors.jsonl"):
        (source / name).write_text("")
    (tmp_path / "file").write_text("")
    named = {"IN": str(source), "OUT": str(out), "FILE": str(tmp_path / "file")}
    for key, path in named.items():
        words = [word.replace(f"={key}", f"={path}") for word in words]
    assert main(["run", "en-zh", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not out.exists()


def test_answers_by_other_settings_or_models_are_not_mixed(zoo: Zoo, tmp_path, capsys):
    source, out, model = texts(tmp_path / "in", 2), tmp_path / "out", zoo.model("classify")
    assert run(model, source, out) == 0
    assert run(model, source, out, "scores=true") == 2
    assert "holds answers by scores=" in capsys.readouterr().err
    assert run("tag", source, out) == 2
    assert "choose another out=" in capsys.readouterr().err
    assert run(model, source, out, "device=cpu") == 0  # the machine changes nothing


def test_a_device_is_chosen_for_run_eval_and_look(zoo: Zoo, tmp_path, capsys):
    model = str(zoo.model("classify"))
    for words in (
        ["run", model, "a"],
        ["eval", model, f"data={zoo.data('classify')}"],
        ["look", model, "a"],
    ):
        assert main([*words, "device=nowhere"]) == 2
        assert "device='nowhere' cannot be used" in capsys.readouterr().err
    assert main(["run", model, "a red dog", "device=cpu"]) == 0
    assert "RED" in capsys.readouterr().out


# Ray


def test_a_batch_of_rows_has_its_answers_beside_it(zoo: Zoo):
    runner = Runner(zoo.model("classify"))
    batch = {"id": np.array([1, 2, 3]), "text": np.array(["a red dog", None, "blue"], dtype=object)}
    told = runner(batch)
    assert told["prediction"] == ["RED", None, "BLUE"] and told["id"] == [1, 2, 3]
    assert [error is None for error in told["error"]] == [True, False, True]
    assert runner({"text": []}) == {}


def actors(function: str) -> list[int]:
    """Process ids of Ray's actors that map batches by a class."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            told = path.read_bytes()
            if told.startswith(b"ray::") and f"MapBatches({function})".encode() in told:
                found.append(int(path.parent.name))
    return found


def test_ray_with_a_worker_killed_gives_the_bytes_of_one_process(tmp_path):
    ray = pytest.importorskip("ray", reason="ray is not installed: pip install regard[ray]")
    source, rng = tmp_path / "in", np.random.default_rng(0)
    source.mkdir()
    for n in range(200):
        rows = [{"id": 2 * n + k, "text": " ".join(rng.choice(WORDS, 3))} for k in range(2)]
        (source / f"{n:03}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run("en-zh", source, tmp_path / "one") == 0
    ray.init(num_cpus=2, include_dashboard=False)
    try:
        ray.data.DataContext.get_current().enable_progress_bars = False
        read = ray.data.read_json(str(source), include_paths=True)
        one = ray.data.ActorPoolStrategy(size=1)
        made = read.map_batches(Runner, fn_constructor_args=("en-zh",), batch_size=8, compute=one)
        answered, killed = [], []
        for row in made.iter_rows():
            answered.append(row)
            if len(answered) == 100:
                killed = actors("RowRunner")
                os.kill(killed[0], signal.SIGKILL)
        assert killed and len(answered) == 400
    finally:
        ray.shutdown()
    files: dict[str, list[str]] = {}
    for row in sorted(answered, key=lambda row: row["id"]):
        assert row.pop("error") is None
        files.setdefault(Path(row.pop("path")).name, []).append(as_json(row) + "\n")
    assert {name: "".join(rows).encode() for name, rows in files.items()} == contents(
        tmp_path / "one"
    )
