"""The doctor takes any data, says what for, and forecasts only what can be trained."""

import json
import lzma
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import regard
from regard import native
from regard.cli import main
from regard.errors import UsageError
from regard.examine import doctor, forecast
from regard.examine.guess import guess_task
from regard.models import preset
from regard.tasks.text.classify import CLASSIFY, ClassifyTrain
from regard.training.step import one_step

UPOS = ("NOUN", "VERB")
WORDS = ["the", "dog", "sees", "a", "cat", "and", "runs", "home", "fast", "now"]


def sentence(i: int) -> str:
    return " ".join(WORDS[(i * k + k) % len(WORDS)] for k in range(3, 8)) + f" {i}"


def put_photos(folder: Path, names=("a", "b")) -> None:
    for n in range(24):
        place = folder / names[n % len(names)] if names else folder
        place.mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(n).integers(0, 255, (16, 16, 3), np.uint8)
        Image.fromarray(noise).save(place / f"{n}.png")


def put(folder: Path, kind: str) -> str:
    """Write some data of a kind and return where."""
    rows = range(80)
    texts = {
        "labels.csv": "body,team\n" + "".join(f'"{sentence(i)}, yes",t{i % 2}\n' for i in rows),
        "TREC.train": "".join(f"{('NUM', 'HUM')[i % 2]}:x {sentence(i)} ?\n" for i in rows),
        "pairs.tsv": "".join(f"{sentence(i)}\t{sentence(i + 1)} ja\n" for i in rows),
        "a.conllu": "".join(f"1\tdog{i}\tx\t{UPOS[i % 2]}\t_\t_\t0\t_\t_\t_\n\n" for i in rows),
        "columns.txt": "".join(f"dog{i}\tNOUN\nruns\tVERB\n\n" for i in rows),
        "running.txt": "\n".join(map(sentence, rows)),
        "documents.jsonl": "".join(json.dumps({"text": sentence(i)}) + "\n" for i in rows),
        "lists.jsonl": "".join(
            json.dumps({"tokens": ["a", f"x{i}"], "tags": ["D", "N"]}) + "\n" for i in rows
        ),
    }
    if kind in texts:
        (folder / kind).write_text(texts[kind])
        return str(folder / kind)
    put_photos(folder / "photos", () if kind == "loose" else ("a", "b"))
    if kind == "captions":
        files = sorted((folder / "photos").rglob("*.png"))
        table = "".join(f"{f.relative_to(folder)}\t{sentence(i)}\n" for i, f in enumerate(files))
        (folder / "captions.tsv").write_text(table)
        return str(folder / "captions.tsv")
    return str(folder / "photos")


KINDS = {
    "labels.csv": "classify",
    "TREC.train": "classify",
    "pairs.tsv": "translate",
    "a.conllu": "tag",
    "columns.txt": "tag",
    "lists.jsonl": "tag",
    "running.txt": "language",
    "documents.jsonl": "language",
    "photos": "images",
    "loose": "denoise",
    "captions": "caption",
}


@pytest.mark.parametrize(("kind", "task"), KINDS.items())
def test_any_data_are_examined_for_their_task(tmp_path: Path, kind: str, task: str, monkeypatch):
    made: list[int] = []
    monkeypatch.setattr(forecast, "one_step", lambda *how: (made.append(0), one_step(*how))[1])
    found = regard.doctor(put(tmp_path, kind))
    assert found.task == task and found.report.healthy
    assert f"taken for {task}: " in str(found)
    assert found.forecast is not None and found.forecast.task == task
    assert found.forecast.parameters > 1000 and found.forecast.minutes_an_epoch >= 0
    assert json.loads(json.dumps(found.to_dict()))["task"] == task
    assert 0 < len(made) <= forecast.MEASURED_STEPS + 1  # which tell the time of all


def test_a_task_that_is_told_is_looked_at(tmp_path: Path):
    found = regard.doctor(put(tmp_path, "pairs.tsv"), task="language", columns="1")
    assert found.task == "language" and "taken for" not in str(found)
    with pytest.raises(UsageError, match="unknown task 'nonsense'"):
        regard.doctor(put(tmp_path, "pairs.tsv"), task="nonsense")
    found = regard.doctor(put(tmp_path, "photos"), task="pretrain")
    assert found.task == "pretrain" and found.forecast is not None


def test_no_forecast_where_nothing_can_be_trained(tmp_path: Path, capsys):
    path = tmp_path / "a.csv"
    path.write_text("text,label\n")
    found = regard.doctor(str(path), task="classify")
    assert found.forecast is None and not found.report.healthy
    assert main(["doctor", str(path), "task=classify"]) == 1
    assert "forecast for" not in capsys.readouterr().out
    path.write_text("text,label\n" + "".join(f"row {i},same\n" for i in range(30)))
    found = regard.doctor(str(path))
    assert found.forecast is None and "only the label 'same'" in str(found)


def test_why_kernels_are_off_is_told(tmp_path: Path, capsys, monkeypatch):
    path = tmp_path / "a.csv"
    path.write_text("text,label\n")
    status = native.Status(False, "there is no C compiler")
    monkeypatch.setattr(doctor, "status", lambda: status)
    assert main(["doctor", str(path), "task=classify"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "C kernels: off, PyTorch computes instead: there is no C compiler"
    assert main(["doctor", str(path), "task=classify", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)["kernels"]
    assert told == {"enabled": False, "reason": "there is no C compiler", "ready": False}


def test_faults_of_rows_with_labels(tmp_path: Path):
    (tmp_path / "train.csv").write_text(
        "text,label\n" + "".join(f"row {i},{'ab'[i % 2]}\n" for i in range(60)) + "row 1,a\nx,\n"
    )
    (tmp_path / "test.csv").write_text("text,label\nROW  1,b\nnew,c\n")
    report = regard.doctor(str(tmp_path)).report
    kinds = {finding.kind: finding for finding in report.findings}
    assert {"bad_rows", "torn_label", "leak", "unknown_label", "no_valid"} <= set(kinds)
    assert "train.csv:63" in kinds["bad_rows"].what
    assert all(finding.remedy for finding in report.findings)


def test_rows_in_memory_are_examined(monkeypatch, tmp_path: Path):
    monkeypatch.setattr("regard.data.in_memory.cache_folder", lambda: tmp_path)
    rows = [{"text": sentence(i), "label": "ab"[i % 2]} for i in range(40)]
    found = regard.doctor(rows)
    assert found.task == "classify" and found.forecast is not None


def test_large_data_are_sampled_unless_all_is_asked_for(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("regard.examine.doctor.MOST", 50)
    path = tmp_path / "a.tsv"
    path.write_text("".join(f"{sentence(i)}\t{sentence(i + 1)}\n" for i in range(1000)))
    part = regard.doctor(str(path)).report.parts["train"]
    assert part.pairs == 50 and part.total == pytest.approx(1000, rel=0.1)
    assert "in all" in str(part)
    assert regard.doctor(str(path), full=True).report.parts["train"].pairs == 1000
    path.write_text("text\tlabel\n" + "".join(f"{sentence(i)}\t{i % 3}\n" for i in range(1000)))
    part = regard.doctor(str(path)).report.parts["train"]
    assert part.rows == 50 and part.total == pytest.approx(1000, rel=0.2)


def test_aligned_files_are_pairs(tmp_path: Path):
    for name in ("train.en", "train.de"):
        (tmp_path / name).write_text("".join(sentence(i) + "\n" for i in range(30)))
    assert guess_task(str(tmp_path)).task == "translate"
    with pytest.raises(UsageError, match="no such file"):
        guess_task(str(tmp_path / "nothing"))


@pytest.mark.parametrize("end", ["", ".xz"])
@pytest.mark.parametrize("task", ["translate", "classify", "language"])
def test_the_forecast_is_for_all_rows(task, end, tmp_path: Path, monkeypatch):
    """However much of a row nobody reads, and whether or not the file is compressed."""
    monkeypatch.setattr("regard.examine.doctor.MOST", 50)
    monkeypatch.setattr("regard.examine.rows.MOST_READ", 500)
    rows = [f"{sentence(i)}\t{sentence(i + 1)}\tby somebody, somewhere, {i}" for i in range(1000)]
    if task == "classify":
        rows = ["text\tlabel\tnote", *(f"{row}\t{i % 2}\t{row}" for i, row in enumerate(rows))]
        rows = [row.replace("\t", " ", 2) if i else row for i, row in enumerate(rows)]
    name, text = "a.txt" if task == "language" else "a.tsv", "\n".join(rows) + "\n"
    path = tmp_path / (name + end)
    (lzma.open if end else open)(path, "wb").write(text.encode())  # noqa: SIM115
    part = regard.doctor(str(path), task=task).report.parts["train"]
    total = len(text.encode()) if task == "language" else 1000
    assert part.total == pytest.approx(total, rel=0.02)


def put_reviews(path: Path, count: int) -> Path:
    words = np.random.default_rng(0).choice(WORDS, (count, 6))
    rows = (
        f"{' '.join(row)} {('bad', 'good')[i % 2]} {i}\t{i % 2}\n" for i, row in enumerate(words)
    )
    path.write_text("".join(rows))
    return path


@pytest.mark.parametrize("given", [{}, {"size": "small"}, {"valid": "held.tsv"}])
def test_the_model_of_few_texts_is_forecast_and_told(tmp_path: Path, given, capsys):
    """The doctor forecasts the model that is trained, and everything says what was chosen."""
    data, out = put_reviews(tmp_path / "t.tsv", 1500), tmp_path / "run"
    put_reviews(tmp_path / "held.tsv", 40)
    given = {k: str(tmp_path / v) if k == "valid" else v for k, v in given.items()}
    expected = regard.doctor(str(data), task="classify", **given).forecast
    regard.train("classify", data=data, out=out, minutes=0.01, threads=1, **given)
    recipe = json.loads((out / "recipe.json").read_text())
    assert expected.parameters == recipe["parameters"]
    chosen = recipe["chosen"]["settings"]
    assert chosen["tokenizer"] == recipe["settings"]["tokenizer"] == "unigram"
    told = capsys.readouterr().err, (out / "README.md").read_text(), str(expected)
    for text in told:
        assert "few texts (1," in text and "few=false" in text
        assert all(f"{key}={value}" in text for key, value in chosen.items())


def test_few_can_be_switched_off(tmp_path: Path, capsys):
    data = put_reviews(tmp_path / "t.tsv", 300)
    how = {"data": data, "steps": 1, "threads": 1, "linear": False}
    regard.train("classify", few=False, out=tmp_path / "a", **how)
    assert "few" not in capsys.readouterr().err
    recipe = json.loads((tmp_path / "a" / "recipe.json").read_text())
    assert "chosen" not in recipe
    whole = ClassifyTrain()  # as size=tiny says
    assert recipe["settings"]["tokenizer"] == whole.tokenizer
    assert recipe["settings"]["model.depth"] == preset("bert", "tiny").depth


def test_many_texts_are_forecast_by_a_sample_with_the_model_of_many(tmp_path: Path, monkeypatch):
    data = put_reviews(tmp_path / "t.tsv", 1500)
    monkeypatch.setitem(vars(CLASSIFY), "few_rows", 500)  # so that these are many
    found = regard.doctor(str(data), task="classify").forecast
    assert "few" not in found.chosen and found.parameters > 200_000
