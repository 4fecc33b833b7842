"""A run that is killed, stopped or damaged, and taken up again, is the same run to the last bit."""

import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import regard
from regard import api, native
from regard.errors import UsageError
from regard.files import sha256
from regard.tasks import prepare as frame_train
from regard.tasks.frame.recipe import RESUME_MAY_DIFFER
from regard.tasks.text.sequence import PairTrainSettings
from regard.training import checkpoint, fit
from tests.zoo import turned

STEPS, VALID_EVERY = 40, 10
SETTINGS = {
    "steps": STEPS,
    "depth": 1,
    "width": 32,
    "heads": 2,
    "ffn_width": 64,
    "pieces": 400,
    "batch_tokens": 200,
    "valid_every": VALID_EVERY,
    "valid_sentences": 4,
    "warmup": 8,
    "lr": 0.01,
    "ema": 0.9,
    "average": 2,
    "batches": 2,
    "bpe_dropout": 0.1,
    "save_every": 0.05,
    "threads": 1,
}
CALLS = ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir")  # all that changes a folder

# A process that has imported everything once and is forked for each run.
FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(
    # the optimiser imports torch._dynamo, which takes longer than the training here
    ["pytest", "regard.tasks.text.translate", "torch._dynamo", "torch.utils.tensorboard"]
)


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """Return a folder with data, which all runs of this file share."""
    folder = tmp_path_factory.mktemp("resume")
    (folder / "data").mkdir()
    turned(folder / "data")
    return folder


def command(home: Path, out: Path, **more: Any) -> list[str]:
    settings = {"data": home / "data", "out": out, "from": "en", "to": "de", **SETTINGS, **more}
    return ["train", "translate", *(f"{key}={value}" for key, value in settings.items())]


def child(words: list[str], said: Path, cache: str, pace: float, die_at: int, where: str) -> None:
    """Train as the command line does, slowly, and die at the n-th change of a folder."""
    from regard.cli import main

    os.environ["REGARD_CACHE"] = cache
    torch.set_num_threads(1)
    count = 0

    def deadly(function: Any) -> Any:
        def act(*arguments, **options):
            nonlocal count
            count += 1
            if count == die_at and where == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            mine = count
            try:
                return function(*arguments, **options)
            finally:  # also after one that fails, such as a folder that is there already
                if mine == die_at and where == "half":
                    truncate(arguments)
                if mine == die_at:
                    os.kill(os.getpid(), signal.SIGKILL)

        return act

    if where == "half":  # in the middle of the tensors
        checkpoint.save_file = deadly(checkpoint.save_file)
    else:
        for name in CALLS:
            setattr(os, name, deadly(getattr(os, name)))
    step = fit.one_step

    def slow(*arguments):
        time.sleep(pace)
        return step(*arguments)

    fit.one_step = slow
    with (
        open(said, "a") as file,
        contextlib.redirect_stdout(file),
        contextlib.redirect_stderr(file),
    ):
        code = main(words)
    os._exit(code)


def truncate(arguments: tuple) -> None:
    """Leave half of the file that was just written."""
    path = arguments[1]
    os.truncate(path, os.path.getsize(path) // 2)


def start(
    home: Path, out: Path, *, pace: float = 0.0, die_at: int = 0, where: str = "before", **more: Any
) -> ForkServerProcess:
    said = out.with_suffix(".said")
    words = command(home, out, **more)
    arguments = (words, said, os.environ["REGARD_CACHE"], pace, die_at, where)
    process = FORK.Process(target=child, args=arguments, daemon=True)
    process.start()
    return process


def end(process: ForkServerProcess) -> int:
    process.join(300)
    assert process.exitcode is not None
    return process.exitcode


def said(out: Path) -> str:
    return out.with_suffix(".said").read_text()


def wait_for(path: Path, process: ForkServerProcess, pattern: str | None = None) -> None:
    """Wait until a file is there, or something in a folder."""
    while process.is_alive() and not (any(path.glob(pattern)) if pattern else path.exists()):
        time.sleep(0.002)


def result(out: Path) -> dict[str, Any]:
    """Return all of a run that must not depend on how often it was interrupted."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    last = out / "checkpoints" / (out / "last").read_text().strip()
    counters = json.loads((last / "counters.json").read_text())
    counters.pop("seconds")
    found: dict[str, Any] = {
        "metrics": [
            {k: v for k, v in row.items() if k not in ("tokens_per_second", "seconds")}
            for row in rows
        ],
        "counters": counters,
        "checkpoints": sorted(path.name for path in (out / "checkpoints").iterdir()),
        "whole": checkpoint.is_complete(last),
        "left": sorted(path.name for path in out.glob(".*") if path.name != ".lock"),
    }
    recipe = json.loads((out / "recipe.json").read_text())
    recipe["settings"].pop("out")
    found["recipe"] = recipe
    for path in (*out.glob("*.*"), out / "best", *last.glob("*.safetensors")):
        if path.is_file() and path.name not in ("metrics.jsonl", "recipe.json"):
            found[str(path.relative_to(out))] = path.read_bytes()
    return found


def assert_same(one: dict[str, Any], two: dict[str, Any]) -> None:
    for key in one.keys() | two.keys():
        if key != "checkpoints":  # which ones stay hangs on the clock
            assert one.get(key) == two.get(key), key


@pytest.fixture(scope="module")
def reference(home) -> tuple[Path, dict[str, Any]]:
    """Return a run that nothing disturbed."""
    out = home / "reference"
    assert end(start(home, out)) == 0, said(out)
    assert f"finished after {STEPS} steps" in said(out)
    return out, result(out)


@pytest.fixture
def copied(reference, tmp_path) -> Path:
    """Return a copy of the run, to be spoilt."""
    out = tmp_path / "out"
    shutil.copytree(reference[0], out)
    return out


def test_the_run_that_all_are_compared_with(reference):
    out, found = reference
    steps = [row for row in found["metrics"] if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    scores = [row["step"] for row in found["metrics"] if "valid/bleu" in row]
    assert scores == list(range(VALID_EVERY, STEPS + 1, VALID_EVERY))
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert found["whole"] and found["left"] == []
    assert found["counters"]["step"] == STEPS
    names = {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"}
    assert names | {"README.md", "best"} <= found.keys()
    last = f"checkpoints/step-{STEPS}/"
    assert {last + "raw.safetensors", last + "ema.safetensors"} <= found.keys()
    assert found[last + "raw.safetensors"] != found[last + "ema.safetensors"]


def test_the_seed_matters(home, reference, tmp_path):
    """Or all that follows would prove nothing."""
    out = tmp_path / "out"
    assert end(start(home, out, seed=2)) == 0
    assert result(out)["model.safetensors"] != reference[1]["model.safetensors"]


def test_killed_at_random_moments(home, reference, tmp_path):
    out, chance = tmp_path / "out", random.Random(7)
    killed = 0
    for life in range(7):
        process = start(home, out, pace=0.01)
        if life > 1:  # the first two may die while data are read
            wait_for(out / "metrics.jsonl", process)
        time.sleep(chance.uniform(0, 0.35))
        process.kill()
        killed += end(process) == -signal.SIGKILL
    assert killed >= 4
    assert end(start(home, out)) == 0, said(out)
    assert_same(result(out), reference[1])


def test_killed_inside_a_save(home, reference, tmp_path):
    """At some of the calls that change a folder, and right after them, life after life."""
    out, chance = tmp_path / "out", random.Random(3)
    places = [2, 9, *(chance.randrange(14, 60) for _ in range(9))]
    died = 0
    for life, place in enumerate(places):
        where = ("before", "after")[life % 2]
        process = start(home, out, pace=0.02, die_at=place, where=where)
        died += end(process) == -signal.SIGKILL
    assert died >= 9
    assert end(start(home, out)) == 0, said(out)
    assert_same(result(out), reference[1])


def test_killed_with_half_the_tensors_written(home, reference, tmp_path):
    out = tmp_path / "out"
    for place in (1, 4, 6):
        assert end(start(home, out, die_at=place, where="half")) == -signal.SIGKILL
    assert end(start(home, out)) == 0
    assert_same(result(out), reference[1])


def test_killed_while_checkpoints_are_averaged(home, reference, copied):
    """All steps are done and saved, but not what comes after them."""
    last = copied / "checkpoints" / f"step-{STEPS}"
    counters = json.loads((last / "counters.json").read_text())
    assert counters.pop("averaged")
    rows = [row for row in reference[1]["metrics"] if "valid/better" in row]
    best = max(rows, key=lambda row: row["valid/better"])
    counters["best"] = best["valid/better"]
    (last / "counters.json").write_text(json.dumps(counters))
    manifest = json.loads((last / "manifest.json").read_text())
    manifest["counters.json"] = sha256(last / "counters.json")
    (last / "manifest.json").write_text(json.dumps(manifest))
    assert end(start(home, copied)) == 0
    assert result(copied)["model.safetensors"] == reference[1]["model.safetensors"]
    assert result(copied)["counters"]["averaged"]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("optimiser.safetensors", flip),
        ("ema.safetensors", shorten),
        ("raw.safetensors", Path.unlink),
        ("counters.json", flip),
        ("manifest.json", shorten),
    ],
)
def test_a_damaged_checkpoint_is_passed_over(home, reference, copied, capsys, name, spoil):
    newest = copied / "checkpoints" / f"step-{STEPS}"
    before = max(step for step, _ in checkpoint.checkpoints(newest.parent) if step < STEPS)
    spoil(newest / name)
    settings = {"data": home / "data", "from": "en", "to": "de", **SETTINGS}
    regard.train("translate", out=copied, **settings)
    assert f"{newest} is damaged and was passed over" in capsys.readouterr().err
    assert before >= VALID_EVERY
    assert_same(result(copied), reference[1])


def test_a_note_is_printed_without_commands_to_the_terminal(copied, home, capsys):
    strange = copied.rename(copied.with_name("r\x1b[31mun"))
    flip(strange / "checkpoints" / f"step-{STEPS}" / "raw.safetensors")
    settings = {"data": home / "data", "from": "en", "to": "de", **SETTINGS}
    regard.train("translate", out=strange, **settings)
    told = capsys.readouterr().err
    assert "r\\x1b[31mun" in told and "damaged and was passed over" in told and "\x1b" not in told


def test_with_all_checkpoints_damaged_the_run_begins_anew(home, reference, copied):
    for _, place in checkpoint.checkpoints(copied / "checkpoints"):
        flip(place / "raw.safetensors")
    assert end(start(home, copied)) == 0
    assert said(copied).count("is damaged and was passed over") >= 2
    assert_same(result(copied), reference[1])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_asked_to_stop_it_saves_and_says_how_to_go_on(home, reference, tmp_path, number):
    out = tmp_path / "out"
    process = start(home, out, pace=0.05)
    wait_for(out / "checkpoints", process, "step-*")
    if number == signal.SIGINT:
        second = start(home, out)
        assert end(second) == 2
        assert f"regard: {out}: another training is writing here; choose another out=" in said(out)
    assert process.pid is not None
    os.kill(process.pid, number)
    assert end(process) == 128 + number
    told = said(out)
    assert f"of {STEPS}; give the same command again to go on" in told
    stopped = int((out / "last").read_text().removeprefix("step-"))
    assert f"stopped and saved at step {stopped} of" in told
    assert 0 < stopped < STEPS
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == stopped  # no step was lost
    assert end(start(home, out)) == 0
    assert_same(result(out), reference[1])


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_finished_run_says_so_and_changes_nothing(home, reference):
    out, _ = reference
    before = files(out)
    settings = {"data": home / "data", "out": out, "from": "en", "to": "de", **SETTINGS}
    report = regard.train("translate", quiet=True, **settings)
    assert report.finished and report.step == STEPS
    first = next(line for line in said(out).splitlines() if "finished after" in line)
    assert str(report) == first
    assert files(out) == before


@pytest.mark.parametrize(
    ("key", "value", "was"),
    [
        ("lr", 0.02, "0.01"),
        ("seed", 5, "1"),
        ("steps", 50, "40"),
        ("bpe_dropout", 0.0, "0.1"),
        ("width", 64, "32"),
    ],
)
def test_other_settings_are_refused_by_name(home, reference, key, value, was):
    out, _ = reference
    before = files(out)
    settings = {"data": home / "data", "out": out, "from": "en", "to": "de", **SETTINGS, key: value}
    with pytest.raises(UsageError, match=rf"begun with (model\.block\.)?{key}={was}, not {value}"):
        regard.train("translate", quiet=True, **settings)
    assert files(out) == before


def test_settings_that_change_no_number_may_differ(home, reference):
    out, _ = reference
    settings = {"data": home / "data", "out": out, "from": "en", "to": "de", **SETTINGS}
    assert regard.train("translate", quiet=True, **settings | {"save_every": 9.0}).finished


@pytest.mark.parametrize("key", ["kernels", "torch"])
def test_what_rounds_otherwise_than_at_the_start_is_said(home, copied, capsys, key):
    settings = {"data": home / "data", "out": copied, "from": "en", "to": "de", **SETTINGS}
    regard.train("translate", **settings)
    assert "rounds otherwise" not in capsys.readouterr().err
    recipe = json.loads((copied / "recipe.json").read_text())
    assert recipe["kernels"] == native.status().enabled
    recipe[key] = not recipe[key] if key == "kernels" else "1.0"
    (copied / "recipe.json").write_text(json.dumps(recipe))
    regard.train("translate", **settings)
    assert capsys.readouterr().err.count("rounds otherwise") == 1


@pytest.mark.parametrize("part", ["train", "valid"])
def test_other_data_are_refused(home, reference, part):
    out, _ = reference
    path = home / "data" / f"{part}.de"
    text = path.read_text()
    settings = {"data": home / "data", "out": out, "from": "en", "to": "de", **SETTINGS}
    try:
        path.write_text(text.replace("dog", "god", 1))
        with pytest.raises(UsageError, match=r"begun with other data than data=.* holds now"):
            regard.train("translate", quiet=True, **settings)
    finally:
        path.write_text(text)


def test_minutes_are_planned_again_and_what_was_planned_is_kept(home, tmp_path, monkeypatch):
    """A run of minutes that was broken off is, from its first step, repeated by its recipe.json."""
    settings = {"data": home / "data", "from": "en", "to": "de", **SETTINGS, "schedule": "cosine"}
    del settings["steps"]
    timed, repeated = tmp_path / "timed", tmp_path / "repeated"

    class Broken(Exception):
        pass

    def broken(*arguments):
        if arguments[4] == 3 and not measuring:
            raise Broken
        return step(*arguments)

    def measure(*arguments):
        nonlocal measuring
        measuring = True
        try:
            return measured(*arguments)
        finally:
            measuring = False

    measuring, step, measured = False, fit.one_step, frame_train.measure
    with monkeypatch.context() as patch:
        patch.setattr(fit, "one_step", broken)
        patch.setattr(frame_train, "measure", measure)
        with pytest.raises(Broken):
            regard.train("translate", quiet=True, out=timed, minutes=0.03, **settings)
    begun = json.loads((timed / "recipe.json").read_text())["plans"]
    monkeypatch.delattr(frame_train, "measure")  # never again
    report = regard.train("translate", quiet=True, out=timed, minutes=0.03, **settings)
    recipe = json.loads((timed / "recipe.json").read_text())
    plans = recipe["plans"]
    assert plans[: len(begun)] == begun and len(plans) > 3
    assert report.finished and report.step == report.steps == recipe["steps"] == plans[-1]["steps"]
    repeated.mkdir()
    shutil.copy(timed / "recipe.json", repeated)
    for name in ("source_tokenizer.json", "target_tokenizer.json", "tokenizer.json"):
        if (timed / name).exists():
            shutil.copy(timed / name, repeated)
    monkeypatch.setattr(fit, "plan_again", None)  # all is known
    regard.train("translate", quiet=True, out=repeated, minutes=0.03, **settings)
    assert_same(result(timed), result(repeated))


def test_init_starts_from_the_weights_that_are_used(home, reference, tmp_path):
    """With a rate of zero nothing is learnt, so what comes out is what came in."""
    settings = {"data": home / "data", "from": "en", "to": "de", **SETTINGS, "steps": 2, "lr": 0.0}
    regard.train("translate", quiet=True, out=tmp_path / "out", init=reference[0], **settings)
    ours = load_file(tmp_path / "out" / "model.safetensors")
    theirs = load_file(reference[0] / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    tokenizers = [folder / "tokenizer.json" for folder in (tmp_path / "out", reference[0])]
    assert tokenizers[0].read_bytes() == tokenizers[1].read_bytes()


def test_init_knows_the_starters_by_name(home, reference, tmp_path, monkeypatch):
    monkeypatch.setattr(api, "starters", lambda: {"mini": reference[0]})
    settings = {"data": home / "data", "from": "en", "to": "de", **SETTINGS, "steps": 1, "lr": 0.0}
    regard.train("translate", quiet=True, out=tmp_path / "out", init="mini", **settings)
    paths = [folder / "model.safetensors" for folder in (tmp_path / "out", reference[0])]
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_a_start_from_init_that_died_early_is_taken_up(home, reference, tmp_path):
    """Between the recipe and the first checkpoint nothing may be missing."""
    out = tmp_path / "out"
    died = 0
    for place in (7, 10, 13):
        process = start(home, out, die_at=place, init=reference[0], steps=1, lr=0.0)
        died += end(process) == -signal.SIGKILL
    assert died == 3
    assert (out / "recipe.json").exists()
    assert end(start(home, out, init=reference[0], steps=1, lr=0.0)) == 0, said(out)
    ours, theirs = (load_file(f / "model.safetensors") for f in (out, reference[0]))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 64}, "block.width=32, but the new model has 64"),
        ({"depth": 2}, "encoder_depth=1, but the new model has 2"),
        ({"heads": 4}, "block.heads=2, but the new model has 4"),
        ({"position": "rotary"}, "position=sinusoidal, but the new model has rotary"),
        ({"model.tie": "none"}, "tie=all, but the new model has none"),
        ({"order": "post"}, "block.order=pre, but the new model has post"),
        ({"init": "nowhere"}, "nowhere"),
    ],
)
def test_init_of_another_shape_is_refused(home, reference, tmp_path, changes, message):
    settings = {"data": home / "data", "from": "en", "to": "de", "init": reference[0], **SETTINGS}
    with pytest.raises(UsageError) as mistake:
        regard.train("translate", quiet=True, out=tmp_path / "out", **settings | changes)
    assert message in str(mistake.value) and "\n" not in str(mistake.value)
    assert not (tmp_path / "out" / "recipe.json").exists()


def test_tokenizers_of_a_start_that_was_broken_off_are_not_used(home, tmp_path):
    """A run that died before its recipe was written leaves no trace in the next one."""
    settings = {"data": home / "data", "from": "en", "to": "de", **SETTINGS, "steps": 1}
    outs = [tmp_path / "fresh", tmp_path / "stale"]
    outs[1].mkdir()
    shutil.copy(home / "reference" / "tokenizer.json", outs[1] / "tokenizer.json")
    for out in outs:
        regard.train("translate", quiet=True, out=out, **settings, vocabularies="separate")
    assert not (outs[1] / "tokenizer.json").exists()
    assert_same(result(outs[0]), result(outs[1]))


def test_a_free_setting_is_one_that_the_settings_have():
    fields = PairTrainSettings.__dataclass_fields__.values()
    known = {item.metadata.get("key", item.name) for item in fields}
    assert known >= RESUME_MAY_DIFFER
