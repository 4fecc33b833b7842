"""An index finds what is nearest, in little memory, by its own model only."""

import json
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import regard
from regard import retrieval
from regard.errors import UsageError
from regard.retrieval import Index, fingerprint

TEXTS = [
    "The cat sleeps on the sofa.",
    "We meet on Tuesday at noon.",
    "Bread needs flour, water and salt.",
    "Tomorrow we travel to Paris by train.",
    "A dog barks at the mailman.",
]


@pytest.fixture(scope="module")
def notes(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("notes")
    (home / "a.txt").write_text("\n".join([*TEXTS[:2], "", TEXTS[2]]) + "\n")
    (home / "deeper").mkdir()
    (home / "deeper" / "b.jsonl").write_text(
        "".join(json.dumps({"text": t}) + "\n" for t in TEXTS[3:])
    )
    (home / "photo.png").write_bytes(b"no text")
    return home


@pytest.fixture(scope="module")
def made(notes, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("indices") / "notes"
    told = regard.index("embed", notes, out=out)
    assert (told.entries, told.width) == (5, 128) and told["path"] == str(out)
    return out


def test_every_text_finds_itself_and_tells_where_it_is(made, notes):
    for text in TEXTS:
        best = regard.search(made, text, n=1)[0]
        assert best.text == text and best.score == pytest.approx(1.0, abs=1e-5)
    assert regard.search(made, TEXTS[2])[0].where == f"{notes / 'a.txt'}:4"
    assert regard.search(made, TEXTS[4])[0].where == f"{notes / 'deeper' / 'b.jsonl'}:2"


def test_the_order_is_that_of_the_cosines(made):
    vectors = np.stack([one.vector for one in regard.load("embed", task="embed").run(TEXTS)])
    (query,) = (one.vector for one in regard.load("embed", task="embed").run(["a kitten naps"]))
    cosines = vectors @ query / np.linalg.norm(vectors, axis=1) / np.linalg.norm(query)
    found = regard.search(made, "a kitten naps", n=10)
    assert [one.text for one in found] == [TEXTS[i] for i in np.argsort(-cosines)]
    np.testing.assert_allclose([one.score for one in found], np.sort(cosines)[::-1], atol=1e-5)
    both = regard.search(made, ["a kitten naps", "rail"], n=2)
    assert [len(one) for one in both] == [2, 2]
    assert [one.text for one in both[0]] == [one.text for one in found[:2]]
    assert str(both).count("\n\n") == 1


def test_data_in_memory_and_tables_are_indexed_too(tmp_path):
    regard.index("embed", TEXTS, out=tmp_path / "list")
    assert regard.search(tmp_path / "list", TEXTS[1])[0].where == "row 2"
    (tmp_path / "t.csv").write_text("id,body\n1,a cat\n2,a train\n")
    regard.index("embed", tmp_path / "t.csv", columns="body", out=tmp_path / "table")
    assert regard.search(tmp_path / "table", "a train")[0].text == "a train"


def test_settings_of_the_vectors_hold_for_queries(tmp_path):
    regard.index("embed", TEXTS, pooling="max", out=tmp_path / "max")
    best = regard.search(tmp_path / "max", TEXTS[0])[0]
    assert best.score == pytest.approx(1.0, abs=1e-5)


def test_many_vectors_are_compared_some_at_a_time(made, tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    index = Index(made)
    table = rng.normal(size=(1000, 128)).astype(np.float32)
    table[700] = table[3]  # of equals the first comes first
    index.vectors, index.entries = table, 1000
    query = table[3:4]
    expected = np.lexsort((np.arange(1000), -(table @ query[0])))[:20]
    for rows in (7, 64, 1000):
        monkeypatch.setattr(retrieval, "_ROWS", rows)
        numbers, scores = index._exact(query, 20)
        assert numbers[0].tolist() == expected.tolist()
        np.testing.assert_allclose(scores[0], (table @ query[0])[expected], rtol=1e-5)


def test_a_million_vectors_are_searched_in_little_memory(made, tmp_path):
    index, path = Index(made), tmp_path / "many.npy"
    many = np.lib.format.open_memmap(path, "w+", np.float32, (1_000_000, 128))  # 512 MB
    many[654_321] = 1
    many.flush()
    index.vectors, index.entries = np.load(path, mmap_mode="r"), 1_000_000
    tracemalloc.start()
    numbers, _ = index._exact(np.ones((1, 128), np.float32), 5)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert numbers[0, 0] == 654_321 and most < 8e6


def test_an_approximate_index_finds_nearly_all(tmp_path, monkeypatch):
    pytest.importorskip("hnswlib", reason="pip install regard[hnsw]")
    texts = [
        f"{a} {b} {c}"
        for a in ["one", "two", "three", "four", "five", "six"]
        for b in ["red", "green", "blue", "grey"]
        for c in ["cats", "dogs", "trains", "loaves"]
    ]
    regard.index("embed", texts, method="hnsw", out=tmp_path / "index")
    near = regard.search(tmp_path / "index", texts[:20], n=10)
    exact = regard.search(tmp_path / "index", texts[:20], n=10, exact=True)
    same = [
        len({m.text for m in a} & {m.text for m in b}) for a, b in zip(near, exact, strict=True)
    ]
    assert np.mean(same) > 9.5
    monkeypatch.setitem(sys.modules, "hnswlib", None)
    with pytest.raises(UsageError, match=r"hnswlib is not installed; pip install regard\[hnsw\]"):
        regard.index("embed", texts, method="hnsw", out=tmp_path / "other")
    assert regard.search(tmp_path / "index", texts[3], exact=True)[0].text == texts[3]
    (tmp_path / "index" / "hnsw.bin").write_bytes(b"other")
    with pytest.raises(UsageError, match="damaged or missing"):
        regard.search(tmp_path / "index", "x")


def test_images_are_found_by_an_image(tmp_path):
    rng = np.random.default_rng(0)
    photos = tmp_path / "photos"
    photos.mkdir()
    for n in range(12):
        Image.fromarray(rng.integers(0, 255, (32, 32, 3), np.uint8)).save(photos / f"{n}.png")
    regard.train("pretrain", data=photos, out=tmp_path / "run", steps=2, size="tiny", quiet=True)
    regard.index(tmp_path / "run", photos, out=tmp_path / "index")
    best = regard.search(tmp_path / "index", str(photos / "7.png"))[0]
    assert best.text == best.where == str(photos / "7.png")
    with pytest.raises(UsageError, match="reads no texts; give the path"):
        regard.search(tmp_path / "index", "a dog")


def test_bad_input_is_told_in_one_line_and_leaves_nothing(made, notes, tmp_path):
    out = tmp_path / "index"
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.txt").write_text("\n \n")
    for match, model, data in (
        ("no texts in this folder", "embed", tmp_path / "empty"),
        ("nothing to index", "embed", tmp_path / "blank.txt"),
        ("no such file or folder", "embed", tmp_path / "absent"),
        ("makes no vectors of texts", "fashion", notes),
        ("neither a folder nor a starter", "embedd", notes),
    ):
        with pytest.raises(UsageError, match=match) as error:
            regard.index(model, data, out=out)
        assert "\n" not in str(error.value) and not out.exists()
    with pytest.raises(UsageError, match="out is missing"):
        regard.index("embed", notes)
    with pytest.raises(UsageError, match="is there already and not empty"):
        regard.index("embed", notes, out=made)
    with pytest.raises(UsageError, match="no index; make one with"):
        regard.search(notes, "x")
    with pytest.raises(UsageError, match="made by another model"):
        regard.search(made, "x", model="shakespeare")
    with pytest.raises(UsageError, match="QUERY is missing"):
        regard.search(made, [])
    with pytest.raises(UsageError, match="unknown key 'nn'"):
        regard.search(made, "x", nn=3)
    assert regard.search(made, TEXTS[0])[0].text == TEXTS[0]


def test_a_damaged_index_is_refused(made, tmp_path):
    for name, content in (
        ("vectors.npy", b"x"),
        ("offsets.npy", b""),
        ("index.json", b'{"entries": 5}'),
        (
            "index.json",
            (made / "index.json").read_bytes().replace(b'"entries": 5', b'"entries": 6'),
        ),
    ):
        folder = tmp_path / f"{name}{len(content)}"
        folder.mkdir()
        for path in made.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        (folder / name).write_bytes(content)
        with pytest.raises(UsageError, match="again"):
            regard.search(folder, "x")


def test_other_weights_have_another_fingerprint(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"a")
    first = fingerprint(tmp_path)
    (tmp_path / "recipe.json").write_text("{}")
    assert fingerprint(tmp_path) == first
    (tmp_path / "model.safetensors").write_bytes(b"b")
    assert fingerprint(tmp_path) != first
