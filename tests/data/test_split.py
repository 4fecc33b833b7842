"""What is held out is enough, even, free of copies, stable, and what a model is judged on."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import regard
from regard.data.documents import load_texts
from regard.data.images import load_images
from regard.data.labelled import Example, ExampleFormat, ExampleReader, load_labelled
from regard.data.pairs import Pair, load_pairs
from regard.data.split import RowSplitter, Split, keys_of, plan_split, shares_of, usual_share
from regard.errors import UsageError

SMALL = {"depth": 1, "width": 16, "heads": 2, "ffn_width": 16, "pieces": 300, "quiet": True}
ONCE = {"steps": 2, "valid_every": 2, "warmup": 1, **SMALL}


def examples(count: int, labels: str = "ab", start: int = 0) -> list[Example]:
    names = [labels[i % len(labels)] for i in range(start, start + count)]
    return [Example(f"text {start + i}", (name,), f"a:{i}") for i, name in enumerate(names)]


def split(items, **shares):
    return RowSplitter("rows").split(items, shares or {"valid": None}, "a", [])


@pytest.mark.parametrize(
    ("rows", "held"),
    [(10, 2), (262, 52), (1821, 200), (5000, 500), (20_000, 500), (60_000, 1200), (10**6, 2000)],
)
def test_the_usual_part_is_large_enough(rows, held):
    assert round(rows * usual_share(rows)) == held


@pytest.mark.parametrize("count", [2, 3, 30, 500, 5000])
def test_nothing_is_lost_and_each_label_has_its_share(count):
    items = examples(count, "aaaaaabbbc")
    parts, _ = split(items, valid=0.1, test=0.2) if count > 3 else split(items)
    assert sorted(i for some in parts.values() for i in some) == sorted(items)
    assert all(parts.values()), "no part is empty"
    if count >= 500:
        for name, share in (("valid", 0.1), ("test", 0.2)):
            for label, many in Counter(item.labels[0] for item in items).items():
                got = sum(item.labels[0] == label for item in parts[name])
                assert got == pytest.approx(share * many, rel=0.27, abs=1)


def test_many_rare_labels_are_held_out_by_their_share():
    items = [Example(f"t {i}", (f"label {i // 4}",), "a:1") for i in range(400)]
    parts, _ = split(items, valid=0.1)
    assert len(parts["valid"]) == pytest.approx(40, abs=25)
    assert {i.labels for i in parts["train"]} == {i.labels for i in items}, "train knows all labels"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["A", "a", "b", "C", "c", "d", "e", "f", "g", "h"]),
            st.sampled_from("xyz"),
        )
    ),
    st.sampled_from([None, 0.1, 0.5]),
    st.booleans(),
)
def test_copies_stay_together(rows, share, test):
    items = [Example(f"word {text}", (label,), f"a:{i}") for i, (text, label) in enumerate(rows)]
    shares = {"valid": share, **({"test": 0.2} if test else {})}
    try:
        parts, _ = split(items, **shares)
    except UsageError as refused:
        assert "too few different" in str(refused) or not items
        return
    except IndexError:
        assert not items
        return
    found = [set(keys_of(some)) for some in parts.values()]
    assert sum(map(len, found)) == len(set().union(*found))
    assert sum(map(len, parts.values())) == len(items)


@pytest.mark.parametrize("labels", ["", "ab", "aaaaaaaab"])
def test_rows_that_are_added_leave_the_others_where_they_were(labels):
    def make(count):
        if labels:
            return examples(count, labels)
        return [Pair(f"text {i}", "x", f"a:{i}") for i in range(count)]

    before, after = (split(make(n), valid=0.1, test=0.1)[0] for n in (2000, 2600))
    for part in ("valid", "test"):
        old, new = ({i.source for i in some[part]} for some in (before, after))
        kept = {s for s in new if int(s.split()[1]) < 2000}
        assert len(old ^ kept) <= 6, "but for a few near a border"
    again = {i.source for i in split(make(2000)[::-1], valid=0.1, test=0.1)[0]["valid"]}
    assert again == {i.source for i in before["valid"]}, "whatever their order"


def test_the_same_on_every_machine():
    parts, _ = split([Pair(f"sentence {i}", "x", "a:1") for i in range(5000)], valid=0.02)
    assert parts["valid"][0].source == "sentence 67"


def test_a_split_survives_its_recipe():
    items = examples(300)
    keys, labels = keys_of(items), [item.labels[0] for item in items]
    made = plan_split(keys, labels, {"valid": None, "test": 0.1}, "a").noting(keys)
    assert Split.from_json(json.loads(json.dumps(made.to_json()))) == made
    for bad in (None, 7, [], {}, {"by": 1, "sample": 7}, {"by": "", "valid": [], "sample": ""}):
        assert Split.from_json(bad) is None


@pytest.mark.parametrize(("valid", "test"), [("0", None), ("1.5", ""), ("0.5", "0.5"), ("nan", "")])
def test_shares_that_make_no_sense(valid, test):
    with pytest.raises(UsageError):
        shares_of(valid, test)


# Every kind of data


def test_every_kind_of_data_is_split_by_shares(tmp_path: Path):
    table = tmp_path / "a.tsv"
    table.write_text("".join(f"text {i}\t{'ab'[i % 2]}\n" for i in range(100)))
    text = tmp_path / "a.txt"
    text.write_text("abcdefghij" * 100)
    documents = tmp_path / "a.jsonl"
    documents.write_text("".join(f'{{"text": "document {i}"}}\n' for i in range(100)))
    for n in range(40):
        (tmp_path / "photos" / "ab"[n % 2]).mkdir(parents=True, exist_ok=True)
        pixels = np.full((8, 8, 3), n, np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / "ab"[n % 2] / f"{n}.png")
    how = {"valid": "0.2", "test": "0.1"}
    reader = ExampleReader(ExampleFormat())
    for loaded, total in (
        (load_pairs(table, **how), 100),
        (load_labelled(str(table), reader, **how), 100),
        (load_texts(documents, **how), 100),
        (load_images(str(tmp_path / "photos"), **how), 40),
    ):
        sizes = {name: len(loaded.parts[name]) for name in ("train", "valid", "test")}
        assert sum(sizes.values()) == total
        assert sizes["valid"] == pytest.approx(0.2 * total, rel=0.3)
        assert sizes["test"] == pytest.approx(0.1 * total, rel=0.5)
    running = load_texts(text, **how)
    assert [len(running.parts[name][0]) for name in ("train", "valid", "test")] == [700, 200, 100]
    assert (
        "".join(t for n in ("train", "valid", "test") for t in running.parts[n]) == text.read_text()
    )


# Judging on what was held out


@pytest.fixture(scope="module")
def labeller(tmp_path_factory) -> tuple[Path, Path]:
    home = tmp_path_factory.mktemp("held")
    data = home / "a.csv"
    rows = [
        f"this is {'good' if i % 3 else 'bad'} number {i},{'pos' if i % 3 else 'neg'}"
        for i in range(300)
    ]
    data.write_text("\n".join(["text,label", *rows]) + "\n")
    regard.train("classify", data=str(data), test=0.1, out=str(home / "run"), **ONCE)
    return home / "run", data


def test_valid_of_the_training_file_is_what_was_held_out(labeller):
    run, data = labeller
    found = regard.evaluate(str(run), data=str(data), part="valid")
    scores = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert found["accuracy"] == pytest.approx(scores["valid/accuracy"])
    held = found.sentences
    assert 45 <= held <= 75
    told = f"trained on this file; judged on the {held} of its 300"
    assert any(told in note for note in found.notes)
    assert "held out" in str(found)
    test = regard.evaluate(str(run), data=str(data))
    assert test.sentences == pytest.approx(30, abs=8)
    assert any("held out (test)" in note for note in test.notes)


def test_the_rows_of_another_order_or_more_are_known_too(labeller, tmp_path: Path):
    run, data = labeller
    header, *rows = data.read_text().splitlines()
    (tmp_path / "b.csv").write_text("\n".join([header, *rows[::-1], "brand new,pos"]) + "\n")
    found = regard.evaluate(str(run), data=str(tmp_path / "b.csv"), part="valid")
    held = regard.evaluate(str(run), data=str(data), part="valid").sentences
    assert found.sentences in (held, held + 1)


def test_new_rows_are_judged_whole_and_without_a_word(labeller, tmp_path: Path):
    run, _ = labeller
    rows = [f"another {i},{'pos' if i % 2 else 'neg'}" for i in range(50)]
    (tmp_path / "c.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    found = regard.evaluate(str(run), data=str(tmp_path / "c.csv"), part="valid")
    assert found.sentences == 50 and not any("trained" in note for note in found.notes)


@pytest.mark.parametrize("labels", ["a", "abc"])
@pytest.mark.parametrize("shares", [{}, {"valid": None}, {"valid": 0.1, "test": 0.2}])
@pytest.mark.parametrize("rows", [300, 6000, 40_000])
def test_about_what_share_was_trained_on_is_true(rows, shares, labels):
    """Of all rows, of a mixture with new ones, and of none, whatever was held out."""
    splitter, items = RowSplitter("rows"), examples(rows, labels)
    parts = splitter.split(items, shares, "a", []) if shares else ({"train": items}, Split())
    train, trained = parts[0]["train"], splitter.sampled(parts[1], parts[0]["train"])
    new = examples(3 * rows, labels, start=10**6)
    for judged in (items, [*items, *new], [*train[: rows // 8], *new], new):
        truth = len({*train} & {*judged}) / len(judged)
        notes: list[str] = []
        splitter.held_out(judged, "other", trained, "a", notes)
        if not truth:
            assert not notes
            continue
        (note,) = notes
        told = float(note.partition("about ")[2].partition("%")[0]) / 100
        assert told == pytest.approx(truth, rel=0.15 if rows < 10_000 else 0.3)


def test_scores_on_training_rows_come_with_a_warning(tmp_path: Path):
    data = tmp_path / "a.tsv"
    data.write_text("".join(f"hello {i}\thallo {i}\n" for i in range(60)))
    regard.train("translate", data=str(data), out=str(tmp_path / "run"), **ONCE)
    found = regard.evaluate(str(tmp_path / "run"), data=str(data), beam=1)
    assert found.sentences == 60
    assert any("were trained on, so the scores are too good" in note for note in found.notes)
    assert any("part=valid" in note for note in found.notes)
    found = regard.evaluate(str(tmp_path / "run"), data=str(data), part="valid", beam=1)
    assert 9 <= found.sentences <= 15


def test_the_end_of_a_running_text_is_what_is_judged_on(tmp_path: Path):
    data = tmp_path / "a.txt"
    data.write_text(" ".join(f"word{i % 50}" for i in range(2000)))
    how = {**ONCE, "tokenizer": "characters", "context": 16}
    how.pop("pieces")
    regard.train("language", data=str(data), valid=0.05, out=str(tmp_path / "run"), **how)
    size = len(data.read_text())
    found = regard.evaluate(str(tmp_path / "run"), data=str(data), part="valid")
    assert found.sentences == pytest.approx(0.05 * size, abs=2)
    found = regard.evaluate(str(tmp_path / "run"), data=str(data))
    assert any("warning" in note and "part=valid" in note for note in found.notes)


def test_a_run_that_was_split_otherwise_is_refused_by_name(labeller, tmp_path: Path):
    run, data = labeller
    recipe = json.loads((run / "recipe.json").read_text())
    old = {key: value for key, value in recipe.items() if key != "split"}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.json").write_text(json.dumps({**old, "data": "other"}))
    with pytest.raises(UsageError, match="which split a smaller validation part off"):
        regard.train("classify", data=str(data), test=0.1, out=str(tmp_path / "run"), **ONCE)


def test_of_equal_scores_the_lower_loss_is_best():
    from regard.training.fit import Fit

    fit = Fit.__new__(Fit)
    fit.counters = {"best": 80.0, "scores": {"better": 80.0, "loss": 0.5}}
    assert fit._is_better({"better": 80.0, "loss": 0.4})
    assert not fit._is_better({"better": 80.0, "loss": 0.5})
    assert not fit._is_better({"better": 79.9, "loss": 0.1})
    assert fit._is_better({"better": 80.1, "loss": 0.9})
    assert not fit._is_better({"better": 80.0})


@pytest.mark.parametrize("seed", range(40))
def test_every_label_keeps_a_row_to_learn_from_in_whatever_order_rows_come(seed: int):
    chance = np.random.default_rng(seed)
    labels = [chr(97 + n) for n, size in enumerate(chance.integers(2, 7, 3)) for _ in range(size)]
    keys = chance.integers(0, 2**63, len(labels)).tolist()
    keys, labels = keys + keys[:4], labels + ["b"] * 4  # copies with other labels
    rows = list(zip(keys, labels, strict=True))
    held = []
    for some in (rows, rows[::-1]):
        split = plan_split(*zip(*some, strict=True), {"valid": 0.45, "test": 0.45}, "x")
        parts = split.parts(*zip(*some, strict=True))
        assert sorted(i for some in parts.values() for i in some) == list(range(len(rows)))
        held.append({part: {some[i][0] for i in numbers} for part, numbers in parts.items()})
        if "" not in {label for borders in split.bounds.values() for label in borders}:
            own = {key: min(one for k, one in rows if k == key) for key in keys}
            assert {own[key] for key in held[-1]["train"]} == set(own.values())
        assert held[-1]["train"]
    assert held[0] == held[1]
