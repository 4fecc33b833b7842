"""A task is one file and one row: the frame trains, resumes, runs, judges and shows it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import regard
from regard.cli import main
from regard.examine.doctor import examiner_of
from regard.tasks import TASKS, TaskEntry, task

HERE = Path(__file__).parents[1]
EXAMPLES = ("regard train count data=texts.tsv", "regard train count data=texts.tsv steps=10")
ROW = TaskEntry("toy_task", "COUNT", EXAMPLES)
# a command line that knows the task, in a process of its own
COMMAND = [
    sys.executable,
    "-c",
    "import sys; from regard.tasks import TASKS, TaskEntry; "
    f"TASKS['count'] = TaskEntry('toy_task', 'COUNT', {EXAMPLES!r}); "
    "from regard.cli import main; sys.exit(main())",
]


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(TASKS, "count", ROW)
    monkeypatch.syspath_prepend(str(HERE))


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("toy") / "texts.tsv"
    words = [f"{'a' * (i % 5)}{'b' * (i % 3)}{'cd'[i % 2]}{i:03}" for i in range(300)]
    path.write_text("".join(f"{word}\t{word.count('a')}\n" for word in words))
    return path


def start(*words: str, **more) -> subprocess.Popen:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)])}
    return subprocess.Popen([*COMMAND, *words], env=env, text=True, **more)


def test_it_is_a_small_file():
    lines = (HERE / "toy_task.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) <= 80


def test_it_trains_runs_is_judged_and_looked_at_by_the_command_line(texts, tmp_path, capsys):
    run = str(tmp_path / "run")
    assert main(["train", "count", f"data={texts}", f"out={run}", "steps=60", "--quiet"]) == 0
    model = regard.load(run)
    assert str(model.run("aab")) == str(model.run(["aab"])[0])
    assert main(["run", run, "aab", "c"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[0] == str(model.run("aab"))
    assert main(["run", run, "--json", "aab"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row == {"src": "aab", "prediction": pytest.approx(model.run("aab").value)}
    assert main(["eval", run, f"data={texts}", "part=valid", "--json"]) == 0
    judged = json.loads(capsys.readouterr().out)
    assert judged["scores"][0]["name"] == "error" and judged["scores"][0]["value"] < 2.0
    other = ["eval", run, f"data={texts}", "part=valid", f"against={run}"]
    assert main(other) == 0 and f"error of {run}" in capsys.readouterr().out
    page = tmp_path / "look.html"
    assert main(["look", run, "aab", f"out={page}"]) == 0 and "aab" in page.read_text()
    with regard.watch(model) as maps:
        model.run("aab")
    assert maps["blocks.0.attention"].weights().shape[-1] == 5


def test_it_resumes_to_the_bit_after_a_kill(texts, tmp_path):
    words = ["train", "count", f"data={texts}", "steps=120", "valid_every=10", "save_every=0"]
    first = start(*words, f"out={tmp_path / 'a'}", stderr=subprocess.DEVNULL)
    place = tmp_path / "a" / "checkpoints"
    for _ in range(600):
        if len(list(place.glob("step-*"))) > 1 or first.poll() is not None:
            break
        time.sleep(0.1)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert first.returncode == -signal.SIGKILL
    done = {"out": subprocess.DEVNULL, "err": subprocess.DEVNULL}
    for name in ("a", "b"):
        run = start(*words, f"out={tmp_path / name}", stdout=done["out"], stderr=done["err"])
        assert run.wait() == 0
    both = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b")]
    assert both[0] == both[1]


def test_the_doctor_examines_its_data_and_forecasts_it(texts, tmp_path, capsys):
    assert main(["doctor", str(texts), "task=count", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["task"] == found["forecast"]["task"] == "count" and found["healthy"]
    assert found["parts"]["train"]["rows"] == 300 and not found["parts"]["train"]["labels"]
    (tmp_path / "bad.tsv").write_text("aab\t2\nab\n")
    assert main(["doctor", str(tmp_path / "bad.tsv"), "task=count"]) == 1
    assert main(["doctor", str(texts), "task=fill"]) == 2
    assert "task=fill is not trained" in capsys.readouterr().err


def test_every_task_that_is_trained_is_known_to_the_doctor():
    for name in TASKS:
        kind = task(name)
        assert (kind.target is None) == (kind.objective is None), name
        assert kind.objective is None or callable(examiner_of(kind))


def test_help_lists_its_keys_and_examples_and_mistakes_are_one_line(texts, tmp_path, capsys):
    assert main(["train", "count", "--help"]) == 0
    page = capsys.readouterr().out
    assert EXAMPLES[0] in page and "batch " in page and "texts a batch" in page
    assert main(["train", "count", f"data={texts}", "bach=3", f"out={tmp_path / 'x'}"]) == 2
    assert "did you mean 'batch'" in capsys.readouterr().err
    assert main(["train", "count", f"out={tmp_path / 'x'}"]) == 2
    assert "with texts and numbers" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
