"""Data and inputs in whatever a user holds them: answered as a list would be, or refused."""

import io
import json
import re
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
from PIL import Image

import regard
from regard.api import materialise_data, plan
from regard.cli import main
from regard.errors import UsageError
from regard.tasks import task as task_class

DOCS = Path(__file__).parents[2] / "docs" / "library.md"
SMALL = {"steps": 1, "depth": 1, "width": 16, "heads": 2, "quiet": True}
COLOURS = ((250, 20, 20), (20, 20, 250))


# ---- one small set for each task, as records


def wav(samples: np.ndarray, rate: int = 16_000) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes((samples * 32767).astype("<i2").tobytes())
    return file.getvalue()


def tone(hertz: float, rate: int = 16_000, seconds: float = 0.5) -> np.ndarray:
    time = np.arange(int(rate * seconds)) / rate
    return (0.5 * np.sin(2 * np.pi * hertz * time)).astype(np.float32)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Write images and sounds, and keep tables that lay in memory beside them."""
    folder = tmp_path_factory.mktemp("containers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("regard.data.in_memory.cache_folder", lambda: folder / "cache")
        patch.chdir(folder)
        rng = np.random.default_rng(0)
        (folder / "photos").mkdir()
        (folder / "masks").mkdir()
        for n in range(8):
            noise = rng.integers(-20, 20, (32, 32, 3))
            pixels = np.clip(np.array(COLOURS[n % 2]) + noise, 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / "photos" / f"{n}.png")
            mask = (pixels[..., 0] > 128).astype(np.uint8)
            Image.fromarray(mask).save(folder / "masks" / f"{n}.png")
            (folder / f"{n}.wav").write_bytes(wav(tone((300, 900)[n % 2] + 20 * n)))
            np.savetxt(folder / f"{n}.csv", rng.normal(n % 2, 0.1, (6, 2)), delimiter=",")
        yield folder


TEXTS = ["Good [MASK].", "Thank [MASK].", "Yes, of course.", "I like tea."]
READS = {
    **dict.fromkeys(("translate", "prefix", "text", "language"), "text"),
    **dict.fromkeys(("classify", "tag", "fill", "embed"), "text"),
    **dict.fromkeys(("images", "caption", "pretrain", "denoise", "segment"), "image"),
    **dict.fromkeys(("sounds", "transcribe"), "sound"),
    "series": "series",
}
STARTERS = {"translate": "en-zh", "language": "shakespeare", "tag": "tag", "fill": "fill"}
STARTERS |= {"embed": "embed", "images": "fashion", "sounds": "digits", "transcribe": "letters"}


def records(task: str, home: Path) -> list[dict[str, Any]]:
    """Return rows as `train` takes them, or refuses them in this task."""
    texts = [f"{text} {n}" for n, text in enumerate(TEXTS * 4)]
    labels = ["ab"[n % 2] for n in range(len(texts))]
    photos = [str(home / "photos" / f"{n % 8}.png") for n in range(len(texts))]
    match task:
        case "translate" | "prefix" | "text":
            return [{"source": text, "target": text.lower()} for text in texts]
        case "language" | "fill" | "embed":
            return [{"text": text} for text in texts]
        case "classify":
            return [{"text": t, "label": y} for t, y in zip(texts, labels, strict=True)]
        case "tag":
            return [
                {"words": t.split(), "tags": ["XY"[n % 2] for n in range(len(t.split()))]}
                for t in texts
            ]
        case "images":
            return [{"image": p, "label": y} for p, y in zip(photos, labels, strict=True)]
        case "segment":
            return [{"image": p, "mask": p.replace("photos", "masks")} for p in photos]
        case "caption" | "pretrain" | "denoise":
            return [{"image": p, "caption": t} for p, t in zip(photos, texts, strict=True)]
        case "sounds" | "transcribe":
            target = {"sounds": "label", "transcribe": "text"}[task]
            sounds = [str(home / f"{n % 8}.wav") for n in range(len(texts))]
            return [{"audio": p, target: y} for p, y in zip(sounds, labels, strict=True)]
    rng = np.random.default_rng(0)
    values = [rng.normal(n % 2, 0.1, (6, 2)).round(3).tolist() for n in range(len(texts))]
    return [{"series": x, "label": y} for x, y in zip(values, labels, strict=True)]


TRAINED: dict[str, dict[str, Any]] = {
    "classify": {"pieces": 300, "batch_tokens": 200},
    "text": {"pieces": 300, "batch_tokens": 200},
    "prefix": {"pieces": 300, "batch_tokens": 200},
    "series": {},
    "caption": {"pieces": 300},
    "pretrain": {"data": "photos"},
    "denoise": {"data": "photos", "steps": 1, "depth": None},
    "segment": {},
}


@pytest.fixture(scope="module")
def load(home) -> Callable[[str], Any]:
    """Return what loads the model of a task, a starter or one of a single step."""
    loaded: dict[str, Any] = {}

    def one(task: str) -> Any:
        if task not in loaded and task in STARTERS:
            loaded[task] = regard.load(STARTERS[task])
        if task not in loaded:
            given = {"data": records(task, home), **SMALL, **TRAINED[task]}
            given = {key: value for key, value in given.items() if value is not None}
            regard.train(task, out=home / task, **given)
            loaded[task] = regard.load(home / task)
        return loaded[task]

    return one


# ---- containers


def cells(kind: str, home: Path) -> list[Any]:
    """Return two inputs, as plainly as they can be given: texts or paths."""
    if kind == "text":
        return TEXTS[:2]
    ends = {"image": "photos/{}.png", "sound": "{}.wav", "series": "{}.csv"}
    return [str(home / ends[kind].format(n)) for n in range(2)]


def in_rows(kind: str, home: Path) -> tuple[str, list[Any]]:
    """Return the name of a column, and its cells."""
    if kind == "series":
        return "series", [np.loadtxt(path, delimiter=",").tolist() for path in cells(kind, home)]
    return {"text": "text", "image": "image", "sound": "audio"}[kind], cells(kind, home)


def array_of(kind: str, home: Path) -> Any:
    """Return the first input as an array: all texts, or its pixels, samples or steps."""
    first = cells(kind, home)[0]
    if kind == "text":
        return np.array(cells(kind, home))
    if kind == "image":
        return np.asarray(Image.open(first))
    if kind == "sound":
        return np.frombuffer(Path(first).read_bytes()[44:], "<i2")
    return np.loadtxt(first, delimiter=",")


def frame(make: Callable[[dict[str, list[Any]]], Any]) -> Callable[[str, Path], Any]:
    def table(kind: str, home: Path) -> Any:
        name, values = in_rows(kind, home)
        return make({name: values, "number": [7, 8]})

    return table


def dataset(columns: dict[str, list[Any]]) -> Any:
    return pytest.importorskip("datasets").Dataset.from_dict(columns)


def opened(kind: str, home: Path) -> Any:
    if kind == "text":
        return io.StringIO("\n".join(TEXTS[:2]) + "\n")
    return Path(cells(kind, home)[0]).open("rb")


def as_tensor(kind: str, home: Path) -> Any:
    return torch.zeros(3) if kind == "text" else torch.tensor(array_of(kind, home))


# a container as the table of docs/library.md calls it -> how it holds inputs of a kind
CONTAINERS: dict[str, Callable[[str, Path], Any]] = {
    "str": lambda kind, home: cells(kind, home)[0],
    "Path": lambda kind, home: Path(cells(kind, home)[0]),
    "bytes": lambda kind, home: (
        TEXTS[0].encode() if kind == "text" else Path(cells(kind, home)[0]).read_bytes()
    ),
    "list": cells,
    "tuple": lambda kind, home: tuple(cells(kind, home)),
    "generator": lambda kind, home: (one for one in cells(kind, home)),
    "dict of columns": frame(lambda columns: columns),
    "one record": frame(lambda columns: {name: some[0] for name, some in columns.items()}),
    "list of records": frame(lambda columns: pd.DataFrame(columns).to_dict("records")),
    "NumPy array": array_of,
    "pandas": frame(pd.DataFrame),
    "polars": frame(pl.DataFrame),
    "Arrow": frame(pa.table),
    "datasets.Dataset": frame(dataset),
    "torch tensor": as_tensor,
    "PIL image": lambda kind, home: Image.open(home / "photos" / "0.png"),
    "file object": opened,
}


def table_in_docs() -> dict[str, dict[str, str]]:
    """Return the table of docs/library.md: container -> kind of input -> what becomes of it."""
    rows = [re.split(r" *\| *", line)[1:-1] for line in DOCS.read_text().splitlines()]
    rows = [row for row in rows if len(row) == 6]
    head, rows = rows[0][1:], rows[2:]
    names = [head[0].split()[-1], *head[1:-1], "data"]
    return {row[0].replace("`", ""): dict(zip(names, row[1:], strict=True)) for row in rows}


def outcome(model: Any, given: Any, **settings: Any) -> tuple[str, list[str]]:
    """Return how inputs are taken, and the answers."""
    try:
        answers = model.run(given, **settings)
    except UsageError as refused:
        assert "\n" not in str(refused)
        return "refused", [str(refused)]
    several = isinstance(answers, list)
    return ("several" if several else "one"), list(map(str, answers if several else [answers]))


MORE: dict[str, dict[str, Any]] = {
    "language": {"max_length": 8},
    "sounds": {"rate": 16_000},
    "transcribe": {"rate": 16_000},
}


@pytest.mark.parametrize("task", READS)
def test_run_answers_every_container_as_a_list_or_refuses_it(task, load, home):
    kind, more, model = READS[task], MORE.get(task, {}), load(task)
    _, right = outcome(model, cells(kind, home), **more)
    assert len(right) == 2
    found = {}
    for name, make in CONTAINERS.items():
        try:
            how, answers = outcome(model, make(kind, home), **more)
        except pytest.skip.Exception:  # of a package that is not there
            how, answers = table_in_docs()[name][kind], right
        found[name] = how
        if how != "refused":
            assert answers == (right if how == "several" else right[:1]), name
    assert found == {name: row[kind] for name, row in table_in_docs().items()}


# ---- train and evaluate


def of_records(make: Callable[[list[dict[str, Any]]], Any]) -> Callable[..., Any]:
    return lambda rows, path: make(rows)


def columns_of(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


DATA: dict[str, Callable[[list[dict[str, Any]], Path], Any]] = {
    "str": lambda rows, path: str(path),
    "Path": lambda rows, path: path,
    "bytes": lambda rows, path: path.read_bytes(),
    "list": of_records(list),
    "tuple": of_records(tuple),
    "generator": of_records(iter),
    "dict of columns": of_records(columns_of),
    "one record": of_records(lambda rows: rows[0]),
    "list of records": of_records(list),
    "NumPy array": of_records(np.array),
    "pandas": of_records(pd.DataFrame),
    "polars": of_records(pl.DataFrame),
    "Arrow": of_records(pa.Table.from_pylist),
    "datasets.Dataset": of_records(lambda rows: dataset(columns_of(rows))),
    "torch tensor": of_records(lambda rows: torch.zeros(3)),
    "PIL image": of_records(lambda rows: Image.new("RGB", (8, 8))),
    "file object": lambda rows, path: path.open(),
}
TRAINS = [task for task in READS if task not in ("fill", "embed")]


def data_read(task: str, given: Any, model: Any) -> tuple[str, str]:
    """Return the hashes of what a training and an evaluation would read."""
    name, values, _ = plan(task, {"data": given})
    kind = task_class(name)
    settings = kind.resolve(values)
    trained = kind.learning.read(settings, None).sha
    if model is None:
        return trained, ""
    asked = model.eval_settings(materialise_data({"data": given}))
    return trained, str(model.task.judge.read(model, asked).part_sha(asked.part))


@pytest.mark.parametrize("task", TRAINS)
def test_train_and_evaluate_read_every_container_alike_or_refuse_it(task, home, load):
    rows = records(task, home)
    path = home / f"{task}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    # starters know other labels than these
    model = load(task) if task in ("translate", "language", *TRAINED) else None
    right, found = data_read(task, rows, model), {}
    for name, make in DATA.items():
        try:
            read = data_read(task, make(rows, path), model if name != "generator" else None)
            if name not in ("str", "Path", "file object"):  # a file of another name
                assert read[0] == right[0] and read[1] in ("", right[1]), name
            found[name] = "read"
        except pytest.skip.Exception:
            found[name] = "read"
        except UsageError as refused:
            assert "\n" not in str(refused), name
            found[name] = "refused"
    told = {name: row["data"] for name, row in table_in_docs().items()}
    assert found == told


# ---- sounds with their rate


def test_a_sound_is_the_same_at_every_rate_and_in_every_dress(load, home, capsys):
    model = load("sounds")
    heard = model.format.rate
    right = model.run(wav(tone(440, heard), heard)).probabilities
    near = {"atol": 0.02}
    for rate in (heard, 44_100, 48_000):
        samples = tone(440, rate)
        given = [(samples, rate), (rate, samples), (torch.tensor(samples), rate)]
        given += [{"array": samples, "sampling_rate": rate, "path": None}]
        capsys.readouterr()
        for one in given:
            assert np.allclose(model.run(one).probabilities, right, **near)
        answers = model.run(given)
        assert len(answers) == len(given)
        frame = pd.DataFrame({"audio": [{"array": samples, "sampling_rate": rate}]})
        assert np.allclose(model.run(frame)[0].probabilities, right, **near)
        assert np.allclose(model.run(samples, rate=rate).probabilities, right, **near)
        assert capsys.readouterr().err == ""
    model.run(tone(440, heard))
    assert f"taken for {heard:,} a second" in capsys.readouterr().err
    for bad in ((tone(440), 3), (tone(440), 10**9)):
        with pytest.raises(UsageError, match="sampling rate in Hz"):
            model.run(bad)


# ---- the columns of a training


@pytest.fixture(scope="module")
def reviewer(home) -> Path:
    """Train on a table whose columns have names of their own."""
    rows = ["stars,remark,sentence"]
    rows += [f"{n % 2},{('bad', 'fine')[n % 2]} thing {n},noise" for n in range(40)]
    (home / "reviews.csv").write_text("\n".join(rows) + "\n")
    more = {"columns": "remark,stars", "pieces": 300, "out": home / "reviewer"}
    regard.train("classify", data=home / "reviews.csv", **{**SMALL, **more})
    return home / "reviewer"


def test_a_model_reads_the_columns_that_it_was_trained_on(reviewer, home, capsys):
    model = regard.load(reviewer)
    assert json.loads((reviewer / "config.json").read_text())["columns"] == ["remark", "stars"]
    texts = ["bad thing", "fine thing"]
    right = [one.probabilities.tolist() for one in model.run(texts)]

    def told(answers: Any) -> list[Any]:
        return [one.probabilities.tolist() for one in answers]

    frame = pd.DataFrame({"sentence": ["x", "y"], "remark": texts, "note": texts[::-1]})
    assert told(model.run(frame)) == right
    assert told(model.run(frame, columns="note")) == right[::-1]
    assert told(model.run(frame, columns="2")) == right
    with pytest.raises(UsageError, match="no such column"):
        model.run(frame, columns="nothing")
    with pytest.raises(UsageError, match="which of the columns a, b"):
        model.run({"a": texts, "b": texts})
    with pytest.raises(UsageError, match="row 2: nothing in 'remark'"):
        model.run(pd.DataFrame({"remark": ["a", None], "n": [1, 2]}))
    frame.to_csv(home / "monday.csv", index=False)
    for words, order in (([], texts), (["columns=note"], texts[::-1])):
        assert main(["run", str(reviewer), str(home / "monday.csv"), *words, "--quiet"]) == 0
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        labels = [str(model.run(text)) for text in order]
        assert [row["prediction"] for row in rows] == labels
    judged = regard.evaluate(model, data=home / "reviews.csv", part="train")
    asked = {"part": "train", "columns": "remark,stars"}
    assert judged.accuracy == regard.evaluate(model, data=home / "reviews.csv", **asked).accuracy


def test_records_are_no_conversation_and_a_conversation_is_no_table(load):
    model, how = load("language"), {"max_length": 4}
    texts = ["O Romeo", "Good morrow"]
    rows = [{"text": text, "n": 1} for text in texts]
    assert list(map(str, model.run(rows, **how))) == list(map(str, model.run(texts, **how)))
    talk = [{"role": "user", "content": "Good morrow"}]
    for one in (talk, {"messages": talk}):
        assert not isinstance(model.run(one, **how), list)
    assert len(model.run({"messages": [talk, talk]}, **how)) == 2


@pytest.mark.parametrize("given", [{"a", "b"}, 5, None, np.array("a"), {}, [["a"]], [5], b"ab"])
def test_what_is_no_input_is_refused_in_a_line(given, load):
    with pytest.raises(UsageError) as refused:
        load("translate").run(given)
    assert "\n" not in str(refused.value)


# ---- paths in tables


@pytest.mark.parametrize("task", ["images", "caption", "sounds", "transcribe", "series"])
def test_relative_paths_of_a_table_in_memory_begin_where_the_program_runs(task, home, monkeypatch):
    whole = records(task, home)
    if task == "series":
        whole = [{"path": str(home / f"{n}.csv"), "label": "ab"[n % 2]} for n in range(8)]
    relative = [{key: value.replace(f"{home}/", "") for key, value in row.items()} for row in whole]
    up = [{key: value.replace(f"{home}/", "../") for key, value in row.items()} for row in whole]
    assert relative != whole
    wanted = regard.doctor(whole, task=task)
    assert regard.doctor(relative, task=task).report.parts == wanted.report.parts
    monkeypatch.chdir(home / "photos")
    assert regard.doctor(up, task=task).report.parts == wanted.report.parts
    with pytest.raises(UsageError, match="no such file|found 0|0 "):
        regard.train(task, data=relative, out=home / "none", **SMALL)
