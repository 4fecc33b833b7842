"""Variants are trained alike, told apart by their scores alone, and never trained twice."""

import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch.nn import functional as F

import regard
from regard import cli
from regard.api import plan
from regard.errors import UsageError
from regard.lab import workers
from regard.lab.extrapolate import window_loss, with_yarn
from regard.lab.report import Compared
from regard.lab.trends import draw_trends, mean_of
from regard.lab.variants import grid, list_keys, varied_values
from regard.lab.workers import Worker, work
from regard.metrics.interval import critical, interval, paired, within
from regard.models import preset
from regard.models.folder import check_buildable
from regard.models.gpt import GPT
from regard.recipes import RECIPES, recipe, resolve_data
from regard.tasks import task as task_class
from regard.training import fit
from regard.viewer.plot import draw_curves, draw_scores
from tests.zoo import WORDS, turned

TINY: dict[str, Any] = {
    "from": "en",
    "to": "de",
    "depth": 1,
    "width": 16,
    "heads": 2,
    "ffn_width": 16,
    "pieces": 300,
    "batch_tokens": 150,
    "steps": 4,
    "valid_every": 2,
    "valid_sentences": 0,
    "warmup": 2,
    "threads": 1,
}
SMALL: dict[str, Any] = {
    "tokenizer": "characters",
    "context": 16,
    "depth": 1,
    "width": 16,
    "heads": 2,
    "ffn_width": 16,
    "batch_tokens": 64,
    "steps": 3,
    "warmup": 1,
    "threads": 1,
}


@pytest.fixture(scope="module")
def home(zoo) -> Path:
    """A folder with pairs of sentences and a text."""

    def write(folder: Path) -> None:
        (folder / "pairs").mkdir()
        turned(folder / "pairs")
        (folder / "text.txt").write_text(" ".join(random.Random(0).choices(WORDS, k=2000)))

    return zoo.once("compare", write)


def pairs(home: Path, out: Path, **more: Any) -> dict[str, Any]:
    given = {"data": str(home / "pairs"), "out": str(out), **TINY, "seeds": 2}
    return {**given, "position": "none,rotary", **more}


@pytest.fixture(scope="module")
def whole(home, tmp_path_factory) -> Path:
    """Return a comparison of two variants and two seeds that nothing interrupted."""
    out = tmp_path_factory.mktemp("whole") / "lab"
    regard.compare("translate", **pairs(home, out))
    return out


def results(out: Path) -> dict[str, Any]:
    return json.loads((out / "results.json").read_text())


def scores(out: Path) -> dict[tuple[str, int], Any]:
    return {(run["name"], run["seed"]): run.get("scores") for run in results(out)["runs"]}


class Steps:
    """Counts the steps of training, and does something before one of them."""

    def __init__(self, monkeypatch, at: int = 0, what=lambda: None):
        self.count, self.before = 0, fit.one_step

        def counted(*arguments):
            self.count += 1
            if self.count == at:
                what()
            return self.before(*arguments)

        monkeypatch.setattr(fit, "one_step", counted)


# How sure a mean is


def density(t: np.ndarray, freedom: int) -> np.ndarray:
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2))
    power = (1 + t**2 / freedom) ** (-(freedom + 1) / 2)
    return scale / math.sqrt(freedom * math.pi) * power


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 30, 101])
def test_student_s_law_is_the_integral_of_its_density(freedom):
    for t in (0.1, 1.0, 2.5, 12.7):
        points = np.linspace(-t, t, 200_001)
        area = float(np.trapezoid(density(points, freedom), points))
        assert within(t, freedom) == pytest.approx(area, abs=1e-8)


@pytest.mark.parametrize(
    ("freedom", "printed"), [(1, 12.706), (2, 4.303), (3, 3.182), (9, 2.262), (120, 1.980)]
)
def test_critical_values_are_those_of_printed_tables(freedom, printed):
    assert critical(freedom) == pytest.approx(printed, abs=5e-4)


def test_interval_covers_the_true_mean_as_often_as_it_says():
    chance = random.Random(1)
    samples = [interval([chance.gauss(5, 2) for _ in range(3)]) for _ in range(4000)]
    covered = sum(abs(one.mean - 5) <= one.half for one in samples if one.half is not None)
    assert covered / 4000 == pytest.approx(0.95, abs=0.012)


def test_one_number_has_no_interval_and_equal_ones_a_narrow_one():
    assert interval([3.0]).half is None
    assert interval([3.0, 3.0]).half == 0
    assert interval([1.0, 2.0, 3.0]).half == pytest.approx(4.302653 / math.sqrt(3))


def test_paired_test_sees_what_seeds_share():
    ours, theirs = [1.0, 5.0, 9.0], [1.2, 5.21, 9.19]  # far apart by seed, alike in difference
    found = paired(ours, theirs)
    assert found is not None and found.mean == pytest.approx(-0.2) and found.p < 0.01
    spread = float(np.std([-0.2, -0.21, -0.19], ddof=1)) / math.sqrt(3)
    t = np.linspace(0.2 / spread, 2000, 2_000_001)
    assert found.p == pytest.approx(2 * float(np.trapezoid(density(t, 2), t)), rel=0.01)
    assert paired([1.0], [2.0]) is None and paired([], []) is None
    assert paired([1.0, 2.0], [1.0, 2.0]) == (0, 0, 1)


# What is varied


def test_commas_vary_a_key_unless_they_belong_to_it(home, tmp_path):
    lists = list_keys("translate")
    assert varied_values("position", "none, rotary", lists) == ["none", "rotary"]
    assert varied_values("columns", "2,1", lists) == ["2,1"]
    assert varied_values("lr", 0.1, lists) == [0.1]
    assert varied_values("lr", [0.1, 0.2], lists) == [0.1, 0.2]
    (tmp_path / "a,b").mkdir()
    assert varied_values("data", str(tmp_path / "a,b"), lists) == [str(tmp_path / "a,b")]
    assert varied_values("data", "a,b", lists) == ["a", "b"]
    with pytest.raises(UsageError, match="an empty value"):
        varied_values("position", "none,,rotary", lists)
    with pytest.raises(UsageError, match="twice"):
        varied_values("position", "none,none", lists)


def test_several_keys_make_a_grid_with_a_folder_for_each():
    found = grid("translate", {"position": ["none", "t5"], "data": ["a/b", "a:b", "A_B"]})
    assert [variant.values["data"] for variant in found] == ["a/b", "a:b", "A_B"] * 2
    names = [variant.name for variant in found]
    assert names[0] == "none-a_b" and len({name.lower() for name in names}) == 6
    assert all("/" not in name and "=" not in name for name in names)
    assert [variant.name for variant in grid("translate", {})] == ["translate"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"position": "none,rotry"}, "Did you mean 'rotary'"),
        ({"norm": "layer,rmss"}, "Did you mean 'rms'"),
        ({"positon": "none,rotary"}, "unknown key 'positon'; did you mean 'position'"),
        ({"lr": "0.1,fast"}, "lr='fast' is not a number"),
        ({"schedule": "cosine,cosin"}, "unknown schedule 'cosin'"),
        ({"heads": "2,3"}, "heads"),
        ({"tokenizer": "bpe,unigrm"}, "Did you mean 'unigram'"),
        ({"seed": "1,2", "seeds": 3}, "keep one"),
        ({"seed": "one"}, "not a whole number"),
        ({"seeds": 0}, "at least 1"),
        ({"lengths": "1,2"}, "only for language models"),
        ({"counted": "some"}, "all, last"),
        (
            {"lr": ",".join(map(str, range(1, 200))), "warmup": ",".join(map(str, range(99)))},
            "runs",
        ),
        ({"data": None}, "data is missing"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_wrong_is_refused_before_anything_is_trained(home, tmp_path, more, said):
    out = tmp_path / "lab"
    with pytest.raises(UsageError, match=said):
        regard.compare("translate", **pairs(home, out, **{"seeds": 2, **more}))
    assert not out.exists()


def test_unknown_names_are_refused():
    with pytest.raises(UsageError, match="Did you mean 'translate'"):
        regard.compare("translat", lr="1,2")
    with pytest.raises(UsageError, match="no training of its own"):
        regard.compare("embed", lr="1,2")


@pytest.mark.parametrize("name", [name for name in RECIPES if name.endswith("_lab")])
def test_every_position_can_be_compared_by_the_lab(name, home):
    found = recipe(name)
    for position in regard.POSITIONS:
        if position == "disentangled":  # has a score of its own
            continue
        values = {**found.SETTINGS, "data": str(home / "text.txt"), "position": position}
        check_buildable(task_class(found.TASK).resolve(values).model)


# What is trained


def test_every_run_has_the_same_data_and_budget_and_only_its_own_settings(whole):
    recipes = {
        (run["name"], run["seed"]): json.loads((Path(run["folder"]) / "recipe.json").read_text())
        for run in results(whole)["runs"]
    }
    assert list(recipes) == [("none", 1), ("rotary", 1), ("none", 2), ("rotary", 2)]
    assert len({one["data"] for one in recipes.values()}) == 1
    assert len({json.dumps(one["tokenizers"]) for one in recipes.values()}) == 1
    assert {one["steps"] for one in recipes.values()} == {4}
    first = recipes["none", 1]["settings"]
    for one in recipes.values():
        changed = {key for key, value in one["settings"].items() if value != first[key]}
        assert changed <= {"model.position", "seed", "out"}


def test_a_run_of_compare_is_the_run_of_train(home, whole, tmp_path):
    values = {key: value for key, value in pairs(home, tmp_path / "run").items() if key != "seeds"}
    regard.train("translate", quiet=True, **{**values, "position": "rotary", "seed": 2})
    ours, theirs = (
        load_file(folder / "model.safetensors")
        for folder in (whole / "rotary" / "seed-2", tmp_path / "run")
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_table_tells_means_intervals_and_the_best(whole):
    found = results(whole)
    losses = {
        name: [s["loss"] for (n, _), s in scores(whole).items() if n == name]
        for name in ("none", "rotary")
    }
    best = min(losses, key=lambda name: sum(losses[name]))
    text = (whole / "table.md").read_text()
    head, _, *rows = [line for line in text.splitlines() if line.startswith("|")]
    columns = [cell.strip() for cell in head.strip("|").split("|")]
    assert columns[0] == "position" and {"steps", "tokens", "seconds", "parameters"} <= {*columns}
    for row in rows:
        cells = dict(zip(columns, (c.strip() for c in row.strip("|").split("|")), strict=True))
        values = losses[cells["position"]]
        mean, half = np.mean(values), 12.7062 * np.std(values, ddof=1) / math.sqrt(2)
        shown = f"**{mean:.3f}**" if cells["position"] == best else f"{mean:.3f}"
        assert cells["loss"] == f"{shown} ± {half:.3f}"
        assert cells["runs"] == "2" and cells["steps"] == "4"
    assert found["finished"] and not found["stopped"]
    (pair,) = found["pairs"]
    apart = np.subtract(losses["none"], losses["rotary"])
    assert found["main"] == "loss" and pair["mean"] == pytest.approx(apart.mean())


def test_high_scores_are_best_where_they_should_be_high():
    variants = grid("classify", {"lr": [1, 2, 3]})
    made = Compared("classify", "out", {"lr": [1, 2, 3]}, variants, [1, 2], "all", "")
    for number, (accuracy, loss) in enumerate([(0.7, 0.5), (0.9, 0.6), (None, None)]):
        for seed in (1, 2):
            told = {"loss": loss, "accuracy": accuracy, "better": accuracy}
            about = {"name": variants[number].name, "variant": variants[number].values}
            numbers = {"steps": 10 + seed, "tokens": 5, "seconds": 1.0, "parameters": 1000}
            rest = {"seed": seed, "finished": True, "tokenizers": [], "lengths": None}
            made.runs.append({**about, **numbers, **rest, "scores": told})
    assert made.main == "accuracy"  # by which training chose
    head, *rows = made.table()
    assert head[:4] == ["lr", "accuracy", "loss", "accuracy against best"]
    assert [row[1].split(" ")[0] for row in rows] == ["0.700", "**0.900**", "-"]
    assert [row[2].split(" ")[0] for row in rows] == ["**0.500**", "0.600", "-"]
    assert rows[0][3].startswith("-0.200") and rows[0][5] == "11 to 12"
    assert json.loads(json.dumps(made.to_dict()))["variants"][2]["scores"]["loss"] is None


def test_plots_are_png_of_a_sensible_size(whole, tmp_path):
    labels = [f"variant number {n} with a name that is too long to be shown" for n in range(14)]
    draw_scores(tmp_path / "plot.png", "$title", labels, {"loss": [interval([1.0, 2.0])] * 14})
    lines = {f"$line{n}": [(64.0, interval([1.0])), (128.0, interval([n, 2.0]))] for n in range(14)}
    lines["none at all"] = []
    draw_curves(tmp_path / "curve.png", "title", lines, ("x", "y"), 64)
    for path in (whole / "plot.png", tmp_path / "plot.png", tmp_path / "curve.png"):
        with Image.open(path) as image:
            assert image.format == "PNG"
            assert 300 < image.width < 2000 and 150 < image.height < 2000
            assert len(image.convert("RGB").getcolors(2**20) or ()) > 20


def test_a_mean_in_trends_is_of_a_number_that_every_run_has():
    assert mean_of([{"speed": 4.0}, {"speed": 8.0}], "speed") == 6.0
    assert mean_of([{"speed": 4.0}, {"speed": None}], "speed") is None
    assert mean_of([{"speed": 4.0}, {}], "speed") is mean_of([], "speed") is None


def test_trends_are_by_the_number_that_is_varied_by_time_and_by_speed(tmp_path):
    varied = {"like": ["vit", "resnet"], "share": ["0.1", "1"]}
    variants = grid("images", varied)
    made = Compared("images", "out", varied, variants, [1, 2], "all", "")
    for number, variant in enumerate(variants):
        for seed in (1, 2):
            told = {"accuracy": 70.0 + 5 * number + seed, "better": 70.0 + 5 * number + seed}
            share = float(variant.values["share"])
            progress = [{"seconds": 10.0 * n, "accuracy": 60.0 + n} for n in (1, 2)]
            rest = {"examples": int(1000 * share), "speed": 50.0 + number, "progress": progress}
            about = {"name": variant.name, "variant": variant.values, "seed": seed}
            made.runs.append({**about, **rest, "finished": True, "scores": told})
    drawn = draw_trends(made, "images: like, share")
    assert drawn is not None
    assert drawn.numbers == {
        "vit": {
            "accuracy, 100 training examples": 71.5,
            "accuracy, 1,000 training examples": 76.5,
            "seconds": 20.0,
            "examples a second": 51.0,  # of the variant that saw all
        },
        "resnet": {
            "accuracy, 100 training examples": 81.5,
            "accuracy, 1,000 training examples": 86.5,
            "seconds": 20.0,
            "examples a second": 53.0,
        },
    }
    assert drawn.save(tmp_path / "trends.png").read_bytes().startswith(b"\x89PNG")
    assert "1,000 training examples" in drawn.save(tmp_path / "trends.html").read_text()
    made.varied = {"like": ["vit", "resnet"]}
    for run in made.runs:
        run["speed"] = None
    assert draw_trends(made, "") is None  # no number, and no speed was asked for


def test_speed_is_measured_of_what_was_trained(home, tmp_path):
    given = {"data": home / "text.txt", "out": tmp_path, **SMALL, "lr": "0.001,0.01"}
    found = regard.compare("language", speed=True, seeds=1, lengths=1, quiet=True, **given)
    assert all(run["speed"] > 0 and run["progress"][-1]["seconds"] > 0 for run in found.runs)
    assert found.table()[0][-1] == "speed" and "trends.html" in str(found)
    assert "accuracy" not in found.main and (tmp_path / "trends.png").exists()


def test_speed_can_be_measured_later_without_training_anew(home, tmp_path, monkeypatch):
    given = {"data": home / "text.txt", "out": tmp_path, **SMALL, "lr": "0.001,0.01"}
    given |= {"seeds": 1, "lengths": 1, "quiet": True}
    before = regard.compare("language", **given)
    steps = Steps(monkeypatch)
    monkeypatch.setattr("regard.lab.variants.train", None)  # nor are its data read
    after = regard.compare("language", speed=True, **given)
    assert steps.count == 0 and after.to_dict()["finished"]
    for one, other in zip(before.runs, after.runs, strict=True):
        assert one["speed"] is None and other["speed"] > 0
        assert {**other, "speed": None} == one


# Going on


def test_what_is_finished_is_not_trained_again_and_more_can_be_added(
    home, whole, tmp_path, monkeypatch
):
    before = (whole / "results.json").read_bytes()
    steps = Steps(monkeypatch)
    again = regard.compare("translate", **pairs(home, whole))
    assert steps.count == 0 and (whole / "results.json").read_bytes() == before
    assert "rotary" in str(again)
    out = shutil.copytree(whole, tmp_path / "lab")
    more = regard.compare("translate", **pairs(home, out, position="none,rotary,alibi"))
    assert steps.count == 2 * TINY["steps"] and more.to_dict()["finished"]
    with pytest.raises(UsageError, match="begun with steps=4, not 5"):
        regard.compare("translate", **pairs(home, whole, steps=5))


FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(
    ["regard.tasks.text.translate", "torch._dynamo", "torch.utils.tensorboard", "PIL.Image"]
)


def killed(given: dict[str, Any], cache: str, at: int) -> None:
    """Compare until a step, and die before it."""
    os.environ["REGARD_CACHE"] = cache
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        Steps(patch, at, lambda: os.kill(os.getpid(), signal.SIGKILL))
        regard.compare("translate", **given)


def test_killed_comparison_goes_on_and_ends_the_same(home, whole, tmp_path, monkeypatch):
    out = tmp_path / "lab"
    given = pairs(home, out, save_every=0)
    process = FORK.Process(target=killed, args=(given, os.environ["REGARD_CACHE"], 7))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert [key for key, found in scores(out).items() if found] == [("none", 1)]
    steps = Steps(monkeypatch)
    regard.compare("translate", **given)
    assert steps.count == 16 - 6  # the sixth was done and saved, the seventh was not
    assert scores(out) == scores(whole)


def test_ctrl_c_saves_says_how_to_go_on_and_loses_nothing(home, whole, tmp_path, monkeypatch):
    out = tmp_path / "lab"
    given = pairs(home, out)
    steps = Steps(monkeypatch, 6, lambda: os.kill(os.getpid(), signal.SIGINT))
    stopped = regard.compare("translate", **given)
    assert stopped.stopped and steps.count == 6
    said = str(stopped)
    assert "3 of 4 runs left" in said and f"out={out}" in said
    words = said.splitlines()[-1].split()
    assert words[:3] == ["regard", "compare", "translate"] and "position=none,rotary" in words
    assert stopped.exit_code == 128 + signal.SIGINT
    assert cli.main([*words[1:], "--quiet"]) == 0
    assert steps.count == 16
    assert scores(out) == scores(whole)


def test_a_comparison_on_few_texts_can_be_given_again(tmp_path, monkeypatch):
    """Settings that follow from the data are not taken for others than those it began with."""
    rows = [f"{'fine' if i % 2 else 'awful'} film {i}\t{i % 2}\n" for i in range(80)]
    (tmp_path / "texts.tsv").write_text("".join(rows))
    given = {"data": tmp_path / "texts.tsv", "dropout": [0.0, 0.1], "seeds": 1, "steps": 3}
    given |= {"threads": 1, "quiet": True, "out": tmp_path / "lab"}
    first = regard.compare("classify", **given)
    recipe = json.loads((tmp_path / "lab" / "0.0" / "seed-1" / "recipe.json").read_text())
    assert recipe["settings"]["ema"] == 0.99  # what few texts get
    steps = Steps(monkeypatch)
    assert scores(tmp_path / "lab") and regard.compare("classify", **given).runs == first.runs
    assert steps.count == 0
    with pytest.raises(UsageError, match="was begun with steps=3, not 4"):
        regard.compare("classify", **{**given, "steps": 4})


def test_a_run_that_diverges_is_told_and_the_others_go_on(home, tmp_path, monkeypatch):
    given = pairs(home, tmp_path / "lab")

    def diverge():
        raise UsageError("the loss is not finite")

    Steps(monkeypatch, 6, diverge)  # in the second run
    made = regard.compare("translate", **given)
    assert [run["name"] for run in made.failed] == ["rotary"] and len(made.done) == 3
    assert "the loss is not finite" in str(made) and "try them again" in str(made)
    assert regard.compare("translate", **given).to_dict()["finished"]


def test_runs_on_other_data_are_not_mixed(home, tmp_path):
    data = tmp_path / "pairs"
    data.mkdir()
    for file in (home / "pairs").iterdir():
        (data / file.name).write_text(file.read_text())
    given = pairs(home, tmp_path / "lab", data=str(data), steps=1, position="none")
    regard.compare("translate", **{**given, "seeds": 1})
    for name in ("train.en", "train.de"):
        (data / name).write_text((data / name).read_text() + "one more\n")
    with pytest.raises(UsageError, match="learnt from other data"):
        regard.compare("translate", **given)


def test_results_that_are_not_ours_are_refused(home, tmp_path):
    (tmp_path / "results.json").write_text('{"runs": [1]}')
    with pytest.raises(UsageError, match="not written by compare"):
        regard.compare("translate", **pairs(home, tmp_path))


# Several at once


def test_workers_do_every_job_and_one_that_dies_takes_only_its_own():
    jobs = [[1], [1, 2], 3, [1, 2, 3]]
    done = {json.dumps(job): result for job, result in work("builtins:len", jobs, 2)}
    died = done.pop("3")
    assert done == {"[1]": 1, "[1, 2]": 2, "[1, 2, 3]": 3}
    assert isinstance(died, RuntimeError) and "TypeError" in str(died)


def test_ctrl_c_reaches_the_workers(monkeypatch):
    made: list[Worker] = []
    give, ready = Worker.give, workers.ready

    def ring(some):
        monkeypatch.setattr(workers, "ready", ready)
        raise KeyboardInterrupt

    monkeypatch.setattr(Worker, "give", lambda self, job: (made.append(self), give(self, job)))
    monkeypatch.setattr(workers, "ready", ring)
    with pytest.raises(KeyboardInterrupt):
        list(work("time:sleep", [60, 60, 60], 2))
    # those that had begun were ended before they were done, and the third never began
    assert len(made) == 2 and all(one.process.returncode for one in made)


def test_workers_do_not_outlive_who_started_them():
    code = (
        "import os, signal; from regard.lab.workers import Worker; w = Worker('time:sleep')\n"
        "w.give(600); print(w.process.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    said = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True).stdout
    status = Path(f"/proc/{int(said)}/status")
    for _ in range(600):
        if not status.exists() or "State:\tZ" in status.read_text():
            return
        time.sleep(0.05)
    pytest.fail("the worker is still there")


def test_a_worker_that_is_killed_says_so():
    worker = Worker("time:sleep")
    worker.give(600)
    worker.process.kill()
    _, result = worker.take()
    worker.close()
    assert "signal 9" in str(result)


def test_in_parallel_the_results_are_the_same(home, whole, tmp_path):
    regard.compare("translate", **pairs(home, tmp_path / "lab", seeds=1, parallel=2))
    assert scores(tmp_path / "lab") == {k: v for k, v in scores(whole).items() if k[1] == 1}


# Loss against length


@pytest.fixture(scope="module")
def lengths(home, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("lengths") / "lab"
    given = {"data": str(home / "text.txt"), "out": str(out), **SMALL, "seeds": 2}
    regard.compare("language", **given, position="learned,rotary,alibi")
    return out


def test_losses_by_length_are_told_and_a_table_of_positions_ends(lengths):
    found = results(lengths)
    for run in found["runs"]:
        rows = [row for row in run["lengths"] if row["way"] == ""]
        assert [row["length"] for row in rows] == [16, 32, 64, 128]
        assert len({row["tokens"] for row in rows}) == 1  # the same ones at every length
        ends = run["name"] == "learned"
        assert [row["loss"] is None for row in rows] == [False, ends, ends, ends]
        assert ("yarn" in {row["way"] for row in run["lengths"]}) == (run["name"] == "rotary")
    text = (lengths / "table.md").read_text()
    row = next(line for line in text.split("16 tokens")[1].splitlines() if "learned" in line)
    assert [cell.strip() for cell in row.strip("|").split("|")][2:] == ["-", "-", "-"]
    means = found["lengths"]["alibi"]["64"]
    each = [r["loss"] for run in found["runs"] for r in run["lengths"] if run["name"] == "alibi"]
    assert means["mean"] == pytest.approx((each[2] + each[6]) / 2)
    with Image.open(lengths / "curve.png") as image:
        assert image.format == "PNG" and image.width > 600


def test_other_lengths_are_measured_without_training_again(home, lengths, monkeypatch):
    steps = Steps(monkeypatch)
    given = {"data": str(home / "text.txt"), "out": str(lengths), **SMALL, "seeds": 2}
    given["position"] = "learned,rotary,alibi"
    before = results(lengths)["lengths"]["alibi"]["64"]["mean"]
    made = regard.compare("language", **given, lengths="1,4", counted="last")
    assert steps.count == 0
    assert list(made.curves()["alibi"]) == [16, 64]
    told = made.curves()["alibi"][64]
    assert told is not None and told.mean != before  # of the last quarter, that is


@torch.no_grad()
def test_window_loss_is_that_of_each_window_by_itself():
    torch.manual_seed(0)
    model = GPT(preset("gpt", "tiny")).eval()
    ids = np.random.default_rng(0).integers(0, 1000, 400)
    starts, length = np.array([3, 50, 111]), 40
    found = window_loss(model, ids, starts, length)
    each = []
    for start in starts:
        some = torch.from_numpy(ids[start : start + length + 1])
        logits = model(some[None, :-1])[0]
        each.append(F.cross_entropy(logits, some[1:], reduction="none"))
    losses = torch.stack(each)
    assert found == pytest.approx((losses.mean().item(), losses[:, -10:].mean().item()), rel=1e-5)


@torch.no_grad()
def test_rotary_stretched_to_its_own_length_is_itself():
    torch.manual_seed(0)
    model = GPT(preset("gpt", "tiny", "llama")).eval()
    ids = torch.randint(0, 1000, (1, 24))
    assert torch.allclose(with_yarn(model, 1, 24)(ids), model(ids), atol=1e-5)
    assert not torch.allclose(with_yarn(model, 4, 24)(ids), model(ids), atol=1e-5)


# The command line


def test_json_and_silence(home, whole, capsys):
    words = [f"{key}={value}" for key, value in pairs(home, whole).items()]
    assert cli.main(["compare", "translate", *words, "--json"]) == 0
    told = capsys.readouterr()
    found = json.loads(told.out)
    assert found["varied"] == {"position": ["none", "rotary"]} and len(found["runs"]) == 4
    assert told.err.splitlines() == [f"4 runs in {whole}, 4 of them done"]
    assert cli.main(["compare", "translate", *words]) == 0
    assert "| position |" in capsys.readouterr().out


def test_a_set_of_data_may_be_named_where_no_such_path_is_here(tmp_path, monkeypatch):
    (tmp_path / "sets" / "mine").mkdir(parents=True)
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("REGARD_DATA", str(tmp_path / "sets"))
    monkeypatch.chdir(tmp_path / "here")
    ours = str(tmp_path / "sets" / "mine")
    assert resolve_data("mine") == plan("language", {"data": "mine"})[1]["data"] == ours
    assert resolve_data("other") == "other"  # what is nowhere is told by whoever reads it
    assert resolve_data("../mine") == "../mine" and resolve_data(None) is None
    Path("mine").mkdir()
    assert resolve_data("mine") == "mine"
