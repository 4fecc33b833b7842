"""Files and folders to run on; JSON lines keep what they bring; evaluations write answers."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import regard
from regard.answering import merge_record
from regard.cli import main
from regard.lab.variants import load_results


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    (folder / "inner").mkdir(parents=True)
    trousers = np.zeros((28, 28, 3), np.uint8)
    trousers[2:27, 8:20] = 200
    trousers[10:27, 13:15] = 0
    for name in ("b.png", "a.png", "inner/c.png"):
        Image.fromarray(trousers).save(folder / name)
    (folder / "notes.txt").write_text("no image")
    return folder


def said(capsys) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_a_file_is_answered_line_by_line_and_said_so(tmp_path, capsys):
    path = tmp_path / "in.txt"
    path.write_text("Thank you.\n\nYes.\n")
    one, two = map(str, regard.load("en-zh").run(["Thank you.", "Yes."]))
    assert main(["run", "en-zh", str(path)]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [one, "", two]
    assert "its lines are answered" in captured.err and "after --" in captured.err
    assert main(["run", "en-zh", "Yes.", str(path), "Thank you."]) == 0  # in their order
    assert said(capsys) == [two, one, "", two, one]


def test_the_name_of_a_file_can_be_answered_as_text(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("Yes").write_text("Thank you.\n")
    assert main(["run", "en-zh", "--", "Yes"]) == 0
    assert said(capsys) == [str(regard.load("en-zh").run("Yes"))]


def test_a_table_is_answered_row_by_row_beside_its_columns(tmp_path, capsys):
    (tmp_path / "in.csv").write_text('id;text\n7;"Yes."\n8;Thank you.\n')
    assert main(["run", "en-zh", str(tmp_path / "in.csv")]) == 0
    told = [json.loads(line) for line in said(capsys)]
    assert [row["id"] for row in told] == ["7", "8"]
    answers = regard.load("en-zh").run(["Yes.", "Thank you."])
    assert [row["prediction"] for row in told] == [str(answer) for answer in answers]
    (tmp_path / "in.tsv").write_text("Yes.\tJa.\n")
    assert main(["run", "en-zh", str(tmp_path / "in.tsv")]) == 2
    assert "name the one to read with columns=" in capsys.readouterr().err


def test_a_folder_of_texts_is_refused_with_the_remedy(tmp_path, capsys):
    assert main(["run", "en-zh", str(tmp_path)]) == 2
    assert "is a folder; name files" in capsys.readouterr().err


def test_a_folder_of_photos_is_answered_by_name(photos, capsys):
    assert main(["run", "fashion", str(photos)]) == 0
    rows = [line.split("\t") for line in said(capsys)]
    names = [str(photos / name) for name in ("a.png", "b.png", "inner/c.png")]
    assert [row[0] for row in rows] == names and {row[1] for row in rows} == {"trousers"}
    assert main(["--json", "run", "fashion", str(photos)]) == 0
    told = [json.loads(line) for line in said(capsys)]
    assert [row["image"] for row in told] == names and told[0]["prediction"] == "trousers"
    assert main(["run", "fashion", str(photos / "a.png")]) == 0
    assert [line.split("\t")[0] for line in said(capsys)] == ["trousers"]
    (photos / "list.txt").write_text("".join(f"{name}\n" for name in names))
    assert main(["run", "fashion", str(photos / "list.txt")]) == 0
    assert [line.split("\t")[0] for line in said(capsys)] == ["trousers"] * 3
    assert main(["run", "fashion", str(photos / "inner" / "..")]) == 0
    capsys.readouterr()
    (photos / "empty").mkdir()
    assert main(["run", "fashion", str(photos / "empty")]) == 2
    assert "no image in this folder" in capsys.readouterr().err


def test_nothing_that_was_brought_is_written_over():
    brought = {"text": "x", "label": "gold", "score": 5, "prediction": "old", "words": ["x"]}
    whole = merge_record(brought, {"prediction": "new", "score": 0.5, "words": ["x"], "more": 1})
    assert brought.items() <= whole.items()
    assert whole["prediction_prediction"] == "new" and whole["prediction_score"] == 0.5
    assert whole["more"] == 1 and "prediction_words" not in whole


def test_gold_translations_and_gold_labels_of_images_are_kept(photos, tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text('{"src": "Yes.", "tgt": "gold", "score": 3}\n')
    assert main(["run", "en-zh", str(tmp_path / "in.jsonl")]) == 0
    (told,) = map(json.loads, said(capsys))
    assert told["tgt"] == "gold" and told["score"] == 3 and told["prediction_score"] < 0
    assert told["prediction"] == str(regard.load("en-zh").run("Yes."))
    line = json.dumps({"image": str(photos / "a.png"), "label": "coat"})
    (tmp_path / "images.jsonl").write_text(line + "\n")
    assert main(["run", "fashion", str(tmp_path / "images.jsonl")]) == 0
    (told,) = map(json.loads, said(capsys))
    assert (told["label"], told["prediction"]) == ("coat", "trousers")


def test_a_pair_that_is_only_judged_has_no_prediction(tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text('{"src": "Yes.", "tgt": "是的。"}\n')
    assert main(["run", "en-zh", str(tmp_path / "in.jsonl"), "forced=true"]) == 0
    (told,) = map(json.loads, said(capsys))
    assert told["tgt"] == "是的。" and "prediction" not in told and told["score"] < 0


def test_evaluations_write_what_was_answered(photos, tmp_path):
    (tmp_path / "pairs.tsv").write_text("Yes.\t是的。\nThank you.\t谢谢。\n")
    out = tmp_path / "out.jsonl"
    regard.evaluate(regard.load("en-zh"), data=str(tmp_path / "pairs.tsv"), outputs=out)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["source"] for row in rows] == ["Yes.", "Thank you."] and rows[0]["prediction"]
    (tmp_path / "book.txt").write_text("To be, or not to be, that is the question.\n" * 20)
    how = {"data": str(tmp_path / "book.txt"), "context": 64}
    result = regard.evaluate(regard.load("shakespeare"), **how, outputs=out)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    total = sum(row["loss"] * row["tokens"] for row in rows)
    assert len(rows) > 1
    assert total / sum(row["tokens"] for row in rows) == pytest.approx(result["loss"], rel=1e-5)
    home = tmp_path / "data" / "test"
    for label in ("trousers", "coat"):
        (home / label).mkdir(parents=True)
        Image.open(photos / "a.png").save(home / label / f"{label}.png")
    result = regard.evaluate(regard.load("fashion"), data=str(tmp_path / "data"), outputs=out)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert result["accuracy"] == 50.0
    assert {(row["label"], row["prediction"]) for row in rows} == {
        ("trousers", "trousers"),
        ("coat", "trousers"),
    }


def test_shares_that_were_kept_by_an_older_comparison_become_percent(tmp_path):
    run = {"name": "a", "seed": 1, "finished": True}
    run["scores"] = {"loss": 2.0, "perplexity": 7.4, "accuracy": 0.25, "better": -2.0}
    (tmp_path / "results.json").write_text(json.dumps({"runs": [run]}))
    assert load_results(tmp_path)["a", 1]["scores"]["accuracy"] == 25.0
    (tmp_path / "results.json").write_text(json.dumps({"accuracy_in": "percent", "runs": [run]}))
    assert load_results(tmp_path)["a", 1]["scores"]["accuracy"] == 0.25


@pytest.mark.parametrize("lines", [0, 1, 4, 5])
def test_a_model_is_asked_for_lines_alone(lines, tmp_path, capsys, monkeypatch):
    """Neither before a file nor after it is a model given nothing to answer."""
    asked = []
    model = regard.load("en-zh")
    monkeypatch.setattr(type(model), "answer", watched(type(model).answer, asked))
    monkeypatch.setattr("regard.answering.CHUNK_LINES", 4)
    file = tmp_path / "lines.txt"
    file.write_text("Yes.\n" * lines)
    assert main(["run", "en-zh", str(file), "Thank you.", "--quiet"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == lines + 1
    assert sum(asked) == lines + 1 and min(asked) > 0


def watched(answer, asked):
    """A method of a model that notes how many inputs it is given."""

    def note(self, texts, *more, **keys):
        asked.append(len(texts))
        return answer(self, texts, *more, **keys)

    return note
