"""Every task answers the same questions: it trains, resumes, runs, is judged and looked at."""

import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import regard
from regard.cli import main
from regard.errors import UsageError
from regard.settings import describe
from regard.tasks import TASKS, task
from regard.tasks.prepare import Training
from regard.tasks.runner import Runner
from regard.training.step import LoopSettings
from tests.tones import write_tones
from tests.zoo import SENTENCES, SMALL, disc, write_rows

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
kills = importlib.import_module("kills")


def documents(folder: Path) -> None:
    rows = [". ".join(SENTENCES[(n * k) % 4] for k in range(1, 2 + n % 5)) for n in range(120)]
    write_rows(folder / "texts.jsonl", [{"text": f"{text} {n}"} for n, text in enumerate(rows)])


def wave(folder: Path) -> str:
    np.savetxt(folder / "asked.csv", np.sin(np.arange(24)).reshape(12, 2), delimiter=",")
    return str(folder / "asked.csv")


def photo(folder: Path) -> str:
    disc("red", "top", 999).resize((16, 16)).save(folder / "asked.png")
    return str(folder / "asked.png")


def sound(folder: Path) -> str:
    return str(write_tones(folder / "asked.wav", "AB C"))


SEEN = {**SMALL, "image": 16, "patch": 4, "batch": 8}
HEARD = {**SMALL, "kernel": 7, "rate": 4000, "mels": 20, "batch_seconds": 4, "valid": 0.2}
HEARD["model.channels"] = 8
WRITES = {**SMALL, "pieces": 300}
READS = {**WRITES, "context": 16, "batch_tokens": 64}


@dataclass(frozen=True)
class Case:
    """How a task is asked: its data, small settings, and an input."""

    data: str  # of the zoo
    settings: dict[str, Any]
    asks: Callable[[Path], str] = lambda folder: "the red dog"
    train: str = ""  # the task that trains it, if not itself
    exports: bool = True
    # what else of a training is random or kept between steps, so that resuming is hardest
    resumed: dict[str, Any] = field(default_factory=dict)


FEATURES = {"feature_rows": 64, "feature_dropout": 0.2, "bpe_dropout": 0.3, "word_dropout": 0.2}
FEATURES |= {"dropout": 0.1, "ema": 0.9}
AUGMENTED = {"augment": "flip+crop+trivial", "erase": 0.3, "mixup": 0.2, "cutmix": 1.0}
AUGMENTED |= {"drop_path": 0.2, "dropout": 0.1, "layer_decay": 0.8, "batches": 2, "share": 0.9}

CASES = {
    "translate": Case("translate", {**WRITES, "vocabularies": "joint"}),
    "prefix": Case("translate", WRITES, exports=False),
    "text": Case("translate", WRITES),
    "language": Case("language", READS),
    "fill": Case(
        "fill", {**READS, "objective": "masked"}, lambda folder: "the [MASK] dog", "language"
    ),
    "classify": Case(
        "classify",
        WRITES,
        exports=False,
        resumed={**FEATURES, "features": "bigrams", "r_drop": 1.0},
    ),
    "tag": Case(
        "tag",
        WRITES,
        exports=False,
        resumed={**FEATURES, "features": "affixes", "max_length": 12, "join": "mean"},
    ),
    "images": Case("images", SEEN, photo, resumed=AUGMENTED),
    "pretrain": Case("images", SEEN, photo),
    "caption": Case(
        "caption",
        {**SEEN, "pieces": 300, "valid_images": 4},
        photo,
        exports=False,
        resumed={"decoder": "recurrent", "normalise": "sample", "dropout": 0.1},
    ),
    "series": Case("series", {**SMALL, "batch": 8}, wave, exports=False),
    "transcribe": Case(
        "transcribe", {**HEARD, "decoder_depth": 1, "subsampling": 2}, sound, exports=False
    ),
    "sounds": Case("sounds", HEARD, sound, exports=False),
    "segment": Case(
        "segment",
        {**SEEN, "image": 24},
        photo,
        exports=False,
        resumed={"augment": "flip+crop", "decoder": "up", "dropout": 0.1, "drop_path": 0.2},
    ),
    "denoise": Case(
        "denoise",
        {**SMALL, "depth": 2, "image": 16, "batch": 4, "valid": 0.2},
        photo,
        exports=False,
    ),
}
# it has no training: any encoder of texts runs as it
ONLY_RUNS = {"embed"}


def test_every_task_is_asked():
    assert set(CASES) | ONLY_RUNS == set(TASKS)


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("tasks")


@pytest.fixture(scope="module", params=sorted(CASES))
def case(request, zoo, home) -> tuple[str, Case, Path, list[str]]:
    """A task, how it is asked, its data, and the words that train it."""
    name, case = request.param, CASES[request.param]
    (home / name).mkdir()
    data = zoo.once("documents", documents) if name == "language" else zoo.data(case.data)
    settings = {"steps": 4, "valid_every": 2, "seed": 3, **case.settings}
    words = ["train", case.train or name, f"data={data}"]
    return name, case, data, [*words, *(f"{key}={value}" for key, value in settings.items())]


@pytest.fixture(scope="module")
def run(case, home) -> Path:
    name, _, _, words = case
    assert main([*words, f"out={home / name / 'run'}", "--quiet"]) == 0
    return home / name / "run"


def test_it_trains_into_a_folder_that_says_what_it_is(case, run):
    name = case[0]
    config = json.loads((run / "config.json").read_text())
    recipe = json.loads((run / "recipe.json").read_text())
    assert config["task"] == name and recipe["steps"] == 4 and recipe["settings"]["seed"] == 3
    assert {"model.safetensors", "README.md", "SHA256SUMS", "best"} <= {
        p.name for p in run.iterdir()
    }
    loaded = regard.load(run)
    assert isinstance(loaded, Runner) and loaded.name == name and name in repr(loaded)


def test_it_resumes_to_the_bit(case, run, home, monkeypatch):
    name, asked, _, words = case
    batch, whole, out = Training.batch, run, home / name / "again"
    words = [*words, "--quiet"]
    if asked.resumed:
        harder = {**asked.resumed, **({"teacher": run} if name == "images" else {})}
        words += [f"{key}={value}" for key, value in harder.items()]
        whole = home / name / "whole"
        assert main([*words, f"out={whole}"]) == 0

    def stopping(self, n):
        if n == 3 * asked.resumed.get("batches", 1):
            raise KeyboardInterrupt
        return batch(self, n)

    monkeypatch.setattr(Training, "batch", stopping)
    assert main([*words, f"out={out}"]) == 130
    monkeypatch.undo()
    assert (out / "last").read_text().strip() in ("step-2", "step-3")
    assert main([*words, f"out={out}"]) == 0
    one, two = ((folder / "model.safetensors").read_bytes() for folder in (whole, out))
    assert one == two
    assert main([*words, f"out={out}", "lr=0.5"]) == 2  # another training


def test_its_resuming_is_verified_on_a_copy(case, run, capsys):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert main(["verify", str(run), "steps=3", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["first"], told["stop"], told["last"]) == (0, 1, 3)
    assert told["differing"] == [] and told["compared"] > 10 and told["repeated"]
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_it_is_killed_and_goes_on(case, run, home):
    name, _, _, words = case
    out = home / name / "killed"
    again = [*words, f"out={out}", "--quiet", "save_every=0"]
    for nth in (3, 25):  # while it begins, and while it saves
        assert kills.killed(lambda: main(again), nth) is None
    assert main(again) == 0
    assert not kills.leftovers(out)
    one, two = ((folder / "model.safetensors").read_bytes() for folder in (run, out))
    assert one == two


def test_it_runs_lines_and_json(case, run, home, capsys):
    name, asked, data, _ = case
    given = asked.asks(home / name)
    assert main(["run", str(run), given]) == 0
    printed = capsys.readouterr().out
    model = regard.load(run)
    answer = model.run(given)
    assert printed == "".join(f"{line}\n" for line in answer.lines(model.check({})))
    assert main(["run", str(run), "--json", given]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row[model.inputs.key] == given and len(row) > 1
    (again,) = model.run([given])
    assert str(again) == str(answer)
    assert model.run([]) == []


def test_it_is_judged_alone_and_against_itself(case, run, capsys):
    name, asked, data, _ = case
    words = [f"data={data}", "part=valid"]
    if name == "pretrain":
        words.append("probe=knn")
    assert main(["eval", str(run), *words, "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone["scores"] and all(np.isfinite(score["value"]) for score in alone["scores"])
    assert {"data", "part", "data_hash", "commit", "threads"} <= set(alone["made_with"])
    assert main(["eval", str(run), *words, f"against={run}", "--json"]) == 0
    both = json.loads(capsys.readouterr().out)
    if both["comparison"]:  # nothing differs from itself
        assert all(row["ours"] == row["theirs"] for row in both["comparison"])
    else:
        assert len(both["scores"]) == 2 * len(alone["scores"])
    assert (run / "scores.jsonl").read_text().count("\n") == 2


def test_it_is_looked_at(case, run, home):
    name, asked, data, _ = case
    for suffix in ("html", "png"):
        page = home / name / f"look.{suffix}"
        assert main(["look", str(run), asked.asks(home / name), f"out={page}"]) == 0
        assert page.stat().st_size > 1000


def test_its_answer_has_causes_or_no_probability(case, run, home, capsys):
    name, asked, data, _ = case
    given = asked.asks(home / name)
    words = ["look", str(run), given, f"out={home / name / 'causes.png'}", "--json"]
    code = main([*words, "cause=tokens"])
    told = capsys.readouterr()
    if name in ("pretrain", "denoise", "segment"):
        assert code == 2 and ("no probability" in told.err or "unknown key 'cause'" in told.err)
        return
    if code == 2:  # trained for a moment, it may have written nothing at all
        assert "nothing" in told.err
        return
    (found,) = json.loads(told.out)["findings"]
    assert len(found["effects"]) == len(found["tokens"]) and found["logprob"] < 0
    assert all(len(map) == len(found["tokens"]) for map in found["attention"].values())
    assert main([*words, "lens=true"]) == 0
    (lens,) = json.loads(capsys.readouterr().out)["findings"]
    assert abs(lens["answer_logprobs"][-1] - found["logprob"]) < 1e-3
    assert main(["look", str(run), given, given, words[3], "patch=true", "--json"]) == 0
    (patched,) = json.loads(capsys.readouterr().out)["findings"]
    assert np.abs(patched["effects"]).max() < 1e-3  # with its own


def test_watching_changes_nothing(case, run, home):
    name, asked, *_ = case
    given = asked.asks(home / name)
    model = regard.load(run)
    plain = str(model.run(given))
    with regard.watch(model) as maps:
        assert str(model.run(given)) == plain
    assert len(maps.names()) > 0


def test_it_is_exported_or_refused_by_name(case, run, home, capsys):
    name, asked, data, _ = case
    out = home / name / "exported"
    code = main(["export", str(run), "format=huggingface", f"out={out}"])
    if code == 0:
        given = asked.asks(home / name)
        assert str(regard.load(out).run(given)) == str(regard.load(run).run(given))
    else:
        error = capsys.readouterr().err
        assert code == 2 and error.count("\n") == 1 and not out.exists()
    assert (code == 0) == asked.exports or name in (
        "images",
        "pretrain",
        "text",
        "language",
        "fill",
    )


def test_mistakes_cost_one_line_and_leave_nothing(case, run, home, capsys):
    name, asked, data, words = case
    out = home / name / "nothing"
    wrong: list[list[str]] = [
        [*words, f"out={out}", "stepz=3"],
        [*words, f"out={out}", "lr=fast"],
        [*(word for word in words if not word.startswith("data=")), f"out={out}"],
        [*words[:2], "data=nowhere.tsv", f"out={out}"],
        ["run", str(run), "x", "beem=3"],
        ["eval", str(run)],
        ["eval", str(run), "data=nowhere.tsv"],
        ["eval", str(run), f"data={data}", "part=tset"],
        ["look", str(run)],
        ["look", str(run), asked.asks(home / name), "candidates=many"],
    ]
    for line in wrong:
        capsys.readouterr()
        assert main(line) == 2, line
        error = capsys.readouterr().err
        assert error.startswith("regard: ") and error.count("\n") == 1, (line, error)
        assert not out.exists(), line
    assert not (home / name / "nothing").exists()


def test_help_of_every_verb_lists_its_keys(case, run, capsys):
    name = case[0]
    for verb, key in (("run", "threads"), ("eval", "part"), ("look", "layers")):
        if name == "denoise" and verb == "look":
            key = "piece"
        assert main([verb, str(run), "--help"]) == 0
        assert f"  {key} " in capsys.readouterr().out, verb


@pytest.mark.parametrize("name", [n for n in TASKS if task(n).objective is not None])
def test_no_setting_of_a_task_has_the_name_of_another_one_of_the_loop(name: str):
    """Else the loop would read a colour where it asks whether to write in the background."""
    own = {one.name: (one.type, one.metadata.get("key")) for one in fields(task(name).Train)}
    for one in fields(LoopSettings):
        assert own[one.name] == (one.type, one.metadata.get("key")), one.name


@pytest.mark.parametrize("name", [n for n in TASKS if task(n).target is not None])
def test_a_wrong_part_is_refused_before_data_are_read_and_leaves_nothing(name: str, tmp_path: Path):
    kind, asked = task(name), 0
    keys = {*kind.short, *(row.key for row in describe(kind.Train))}
    for key in ("norm", "position", "order", "feed_forward"):
        if key not in keys:
            continue
        asked += 1
        with pytest.raises(UsageError, match=f"{key}.*fo"):
            given = {"data": str(tmp_path / "nothing"), "out": str(tmp_path / "run"), key: "fo"}
            regard.train(name, **given)
        assert not (tmp_path / "run").exists()
    assert asked or name == "pretrain"
