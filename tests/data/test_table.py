"""Tables of any kind are data like any other, and a header never becomes an example."""

import csv
import gzip
import io
import json
import lzma
from pathlib import Path

import pytest

import regard
from regard.data.documents import load_texts
from regard.data.in_memory import on_disk
from regard.data.labelled import (
    ExampleFormat,
    ExampleReader,
    SentenceFormat,
    SentenceReader,
    load_labelled,
)
from regard.data.lines import LONGEST_LINE
from regard.data.pairs import load_pairs
from regard.data.table import Table
from regard.errors import UsageError
from tests.zoo import read_pairs

ROWS = [
    ("I like it, very much", "good"),
    ("Meh; what was\nthat?", "bad"),
    ('She said "no" twice', "bad"),
    ("Grüße — 你好", "good"),
]


def as_csv(rows, delimiter=",", end="\r\n", **how) -> str:
    file = io.StringIO()
    csv.writer(file, delimiter=delimiter, lineterminator=end, **how).writerows(rows)
    return file.getvalue()


def mistake(act) -> str:
    with pytest.raises(UsageError) as caught:
        act()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def examples(path: Path, **how):
    notes: list[str] = []
    found = ExampleReader(ExampleFormat(**how)).read(path, notes)
    return [(e.text, *e.labels) for e in found], notes


def arrow_table():
    pyarrow = pytest.importorskip("pyarrow")
    return pyarrow.table({"text": [a for a, _ in ROWS], "label": [b for _, b in ROWS]})


# CSV


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress, lzma.compress])
def test_csv_is_read_as_it_was_written(tmp_path: Path, delimiter, encoding, pack):
    end = {bytes: "", gzip.compress: ".gz", lzma.compress: ".xz"}[pack]
    path = tmp_path / f"a.csv{end}"
    path.write_bytes(pack(as_csv([("text", "label"), *ROWS], delimiter).encode(encoding)))
    found, notes = examples(path)
    assert found == ROWS
    assert any("between columns" in note for note in notes)
    assert [(p.source, p.target) for p in read_pairs(path)] == ROWS


def test_the_first_line_of_a_row_is_told(tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_text(as_csv([("text", "label"), *ROWS, ("x", "")]))
    assert f"{path}:7: the label is empty" in mistake(lambda: examples(path))


def test_unicode_text_of_excel(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_bytes(as_csv([("text", "label"), *ROWS], "\t").encode("utf-16"))
    assert examples(path)[0] == ROWS


def test_windows_letters_are_kept(tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_bytes("text;label\r\n“Käse” – 5 €;gut\r\nnein;böse\r\n".encode("cp1252"))
    found, notes = examples(path)
    assert found == [("“Käse” – 5 €", "gut"), ("nein", "böse")]
    assert any("cp1252" in note for note in notes)
    assert "not UTF-8" in mistake(lambda: read_pairs(path))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("text,label\na, b,good\nc,bad\n", ":2: 3 columns, expected 2; put quotes around cells"),
        ('text,label\n"a" b,good\nc,bad\nd,bad\n', ":2: not CSV"),
        ('text,label\na,good\n"b,bad\nc,bad\nd,bad\n', ":3: not CSV"),
        ("a, b; c\nd, e; f\n", "whether commas or semicolons part its columns is not clear"),
        ('text,label\n"' + "yy\n" * (LONGEST_LINE // 2 + 2) + '",good\n', "of over 1,000,000 char"),
    ],
)
def test_bad_csv_is_refused_by_line(tmp_path: Path, text, words):
    path = tmp_path / "a.csv"
    path.write_text(text)
    message = mistake(lambda: examples(path))
    assert words in message and len(message) < 400


def test_excel_says_what_parts_columns(tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_text("sep=;\na, b;good\nd, e;bad\n")
    assert examples(path)[0] == [("a, b", "good"), ("d, e", "bad")]


# Headers


UNKNOWN = [(f"please look at ticket {i}, it fails", ("red", "blue")[i % 2]) for i in range(20)]


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_an_unknown_header_is_no_example(tmp_path: Path, suffix):
    path = tmp_path / f"a.{suffix}"
    path.write_text(as_csv([("body", "team"), *UNKNOWN], "," if suffix == "csv" else "\t"))
    found, notes = examples(path)
    assert found == UNKNOWN and any("row 1 is a header" in note for note in notes)
    assert examples(path, header=False)[0] == [("body", "team"), *UNKNOWN]
    for columns in ("body,team", "1,2"):
        assert examples(path, columns=columns)[0] == UNKNOWN
    assert examples(path, columns="team,body")[0] == [(b, a) for a, b in UNKNOWN]


def test_what_may_be_a_header_is_asked_about(tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_text(as_csv([("Ticket body", "Our team"), *UNKNOWN]))
    message = mistake(lambda: examples(path))
    assert "header=true or header=false" in message
    assert examples(path, header=True)[0] == UNKNOWN
    assert len(examples(path, header=False)[0]) == 21


def test_a_header_is_known_by_the_numbers_below(tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_text("utterance,stars\n" + "".join(f"a film,{i % 5}\n" for i in range(9)))
    assert len(examples(path)[0]) == 9
    path.write_text("nr,words,team\n" + "".join(f"{i},a long text,red\n" for i in range(9)))
    assert "which of its columns nr, words, team? Name two with columns=" in mistake(
        lambda: examples(path)
    )
    assert examples(path, columns="words,team")[0] == [("a long text", "red")] * 9


def test_labels_before_their_texts_are_asked_about(tmp_path: Path):
    path = tmp_path / "a.tsv"
    path.write_text(as_csv([(b, a) for a, b in UNKNOWN], "\t"))
    assert "Set columns=, such as columns=2,1" in mistake(lambda: examples(path))
    assert examples(path, columns="2,1")[0] == UNKNOWN


def test_a_rare_label_first_is_no_header(tmp_path: Path):
    path = tmp_path / "a.tsv"
    rows = [("I want my money back, now!", "refund"), *UNKNOWN]
    path.write_text(as_csv(rows, "\t"))
    assert examples(path)[0] == rows


def test_a_header_of_pairs(tmp_path: Path):
    path = tmp_path / "a.tsv"
    rows = [(f"this is sentence number {i}", f"das ist Satz Nummer {i}") for i in range(8)]
    path.write_text(as_csv([("long", "short"), *rows], "\t"))
    assert [(p.source, p.target) for p in read_pairs(path)] == rows
    words = [("dog", "Hund"), ("cat", "Katze")] * 5
    path.write_text(as_csv(words, "\t"))
    assert len(read_pairs(path)) == 10


# Parquet, Arrow, datasets


@pytest.mark.parametrize("kind", ["parquet", "feather", "stream", "parquet.gz"])
def test_arrow_tables_are_data(tmp_path: Path, kind):
    table = arrow_table()
    import pyarrow
    from pyarrow import feather, parquet

    path = tmp_path / f"train.{'arrow' if kind == 'stream' else kind}"
    if kind == "feather":
        feather.write_feather(table, path)
    elif kind == "stream":
        with pyarrow.ipc.new_stream(str(path), table.schema) as stream:
            stream.write_table(table)
    else:
        sink = pyarrow.BufferOutputStream()
        parquet.write_table(table, sink)
        data = sink.getvalue().to_pybytes()
        path.write_bytes(gzip.compress(data) if kind.endswith("gz") else data)
    assert examples(path)[0] == ROWS
    assert [(p.source, p.target) for p in load_pairs(path).parts["train"]]
    texts = load_texts(tmp_path, need=("train",))
    assert texts.parts["train"] == [a for a, _ in ROWS] and not texts.running
    assert examples(path, columns="2,1")[0] == [(b, a) for a, b in ROWS]


def saved(folder: Path, table) -> None:
    """Write a table as datasets' save_to_disk does."""
    import pyarrow

    folder.mkdir(parents=True)
    names = [f"data-{n:05}-of-00002.arrow" for n in range(2)]
    for n, name in enumerate(names):
        part = table.slice(2 * n, 2)
        with pyarrow.ipc.new_stream(str(folder / name), part.schema) as stream:
            stream.write_table(part)
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")


def numbered():
    """A table as datasets keeps it: labels are numbers, their names are in the metadata."""
    import pyarrow

    table = arrow_table()
    features = {
        "text": {"dtype": "string", "_type": "Value"},
        "label": {"names": ["bad", "good"], "_type": "ClassLabel"},
    }
    numbers = pyarrow.array([["bad", "good"].index(b) for _, b in ROWS])
    note = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    return table.set_column(1, "label", numbers).replace_schema_metadata(note)


def test_saved_datasets_are_data(tmp_path: Path):
    pytest.importorskip("pyarrow")
    saved(tmp_path / "one", numbered())
    found = load_labelled(str(tmp_path / "one"), ExampleReader(ExampleFormat()), need=("test",))
    assert [(e.text, *e.labels) for e in found.parts["test"]] == ROWS
    for name in ("train", "validation"):
        saved(tmp_path / "both" / name, numbered())
    (tmp_path / "both" / "dataset_dict.json").write_text('{"splits": ["train", "validation"]}')
    both = load_labelled(str(tmp_path / "both"), ExampleReader(ExampleFormat()))
    assert [len(both.parts[name]) for name in ("train", "valid")] == [4, 4]
    assert len(load_pairs(tmp_path / "both").parts["valid"]) == 4
    assert len(load_texts(tmp_path / "both").parts["valid"]) == 4


def test_a_saved_dataset_cannot_name_files_elsewhere(tmp_path: Path):
    pytest.importorskip("pyarrow")
    saved(tmp_path / "a", arrow_table())
    state = tmp_path / "a" / "state.json"
    for bad in ('{"_data_files": [{"filename": "../../x"}]}', "[]", "{", '{"_data_files": []}'):
        state.write_text(bad)
        assert "state.json" in mistake(lambda: list(Table(tmp_path / "a")))


def test_shards_are_one_set(tmp_path: Path):
    table = arrow_table()
    from pyarrow import parquet

    for n in range(2):
        parquet.write_table(table.slice(2 * n, 2), tmp_path / f"train-{n:05}-of-00002.parquet")
    found = load_labelled(str(tmp_path), ExampleReader(ExampleFormat()), need=("train",))
    assert [(e.text, *e.labels) for e in found.parts["train"]] == ROWS
    (tmp_path / "train-00001-of-00002.parquet").unlink()
    with pytest.raises(UsageError, match="no such file"):
        load_labelled(str(tmp_path), ExampleReader(ExampleFormat()), need=("train",))


def test_damaged_parquet_is_refused(tmp_path: Path):
    table = arrow_table()
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(table, path)
    data = path.read_bytes()
    for at in range(4, len(data), 97):
        path.write_bytes(data[:at] + bytes([data[at] ^ 255]) + data[at + 1 :])
        try:
            list(Table(path))
        except UsageError as refused:
            assert "\n" not in str(refused)


def test_without_pyarrow_the_remedy_is_named(tmp_path: Path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1" + bytes(20))
    assert "pip install 'regard[arrow]'" in mistake(lambda: list(Table(path)))


def test_tags_from_tables(tmp_path: Path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    features = {"pos": {"feature": {"names": ["DET", "NOUN"], "_type": "ClassLabel"}}}
    note = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    table = pyarrow.table({"forms": [["a", "dog"], ["cats"]], "pos": [[0, 1], [1]]})
    path = tmp_path / "a.parquet"
    parquet.write_table(table.replace_schema_metadata(note), path)
    found = SentenceReader(SentenceFormat(columns="forms,pos")).read(path, [])
    assert [(s.words, s.tags) for s in found] == [
        (("a", "dog"), ("DET", "NOUN")),
        (("cats",), ("NOUN",)),
    ]


# Data in memory


def str_or(x) -> str:
    return x if type(x) is str else ""


def frames():
    dicts = [{"text": a, "label": b} for a, b in ROWS]
    yield "dicts", dicts
    yield "tuples", ROWS
    yield "columns", {"text": [a for a, _ in ROWS], "label": [b for _, b in ROWS]}
    yield "pandas", lambda: pytest.importorskip("pandas").DataFrame(dicts)
    yield "polars", lambda: pytest.importorskip("polars").DataFrame(dicts)
    yield "lazy", lambda: pytest.importorskip("polars").DataFrame(dicts).lazy()
    yield "arrow", arrow_table


@pytest.mark.parametrize(("name", "data"), list(frames()), ids=str_or)
def test_data_in_memory_are_files_like_others(tmp_path: Path, monkeypatch, name, data):
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path))
    data = data() if callable(data) else data
    path = on_disk(data)
    assert examples(Path(path))[0] == ROWS
    assert on_disk(data) == path, "the same data are the same file"
    whole = Path(path).read_bytes()
    for damaged in (b"", whole.replace(b"a", b"b"), whole[:-5]):
        Path(path).write_bytes(damaged)
        assert Path(on_disk(data)).read_bytes() == whole, "what is in memory is what is read"
    parts = on_disk({"train": data, "validation": data})
    assert len(load_pairs(parts).parts["valid"]) == 4
    assert not [name for name in (tmp_path / "tables").iterdir() if name.name.startswith(".")]


def test_missing_values_of_a_frame_are_no_texts():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"text": ["a", None], "label": ["x", "y"]})
    assert "the text is empty" in mistake(lambda: examples(Path(on_disk(frame))))


@pytest.mark.parametrize("data", [7, [], [7], [{"text": b"x"}], {"text": "abc"}, b"text"])
def test_what_is_no_data_is_refused(data):
    mistake(lambda: on_disk(data))


SMALL = {"depth": 1, "width": 16, "heads": 2, "ffn_width": 16, "pieces": 300, "quiet": True}


def test_training_on_rows_in_memory_goes_on(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("regard.data.in_memory.cache_folder", lambda: tmp_path / "cache")
    rows = [
        {"body": f"{w} thing number {i}", "team": w} for i in range(30) for w in ("red", "blue")
    ]
    how = {"columns": "body,team", "steps": 2, "valid_every": 2, "out": str(tmp_path / "run")}
    first = regard.train("classify", data=rows, **how, **SMALL)
    again = regard.train("classify", data=list(rows), **how, **SMALL)
    assert first.finished and again.step == 2
    recipe = json.loads((tmp_path / "run" / "recipe.json").read_text())
    assert recipe["settings"]["data"].endswith("train.jsonl")
    with pytest.raises(UsageError, match="other data"):
        regard.train("classify", data=rows[:50], **how, **SMALL)
    scores = regard.evaluate(str(tmp_path / "run"), data=rows[:10], columns="body,team")
    assert scores.sentences == 10


# Images in tables


def test_images_in_parquet_are_images(tmp_path: Path):
    pyarrow = pytest.importorskip("pyarrow")
    from PIL import Image
    from pyarrow import parquet

    from regard.data.image_files import holds_images
    from regard.data.images import load_images

    def packed(i: int) -> bytes:
        file = io.BytesIO()
        Image.new("RGB", (8, 8), (i, 2 * i, 0)).save(file, "PNG")
        return file.getvalue()

    features = {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}
    note = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    images = [{"bytes": packed(i), "path": None} for i in range(40)]
    table = pyarrow.table({"image": images, "label": [i % 2 for i in range(40)]})
    path = tmp_path / "train.parquet"
    parquet.write_table(table.replace_schema_metadata(note), path)
    assert holds_images(str(path)) and holds_images(str(tmp_path))
    data = load_images(str(tmp_path))
    assert data.classes == ["cat", "dog"] and sum(map(len, data.parts.values())) == 40
    first = data.parts["train"]
    number = int(first.where(0).rpartition(":")[2]) - 1
    assert first.read([0])[0, :, 0, 0].tolist() == [number, 2 * number, 0]
    assert first.labels[0] == number % 2
    bad = pyarrow.table({"image": [{"bytes": b"no image", "path": ""}], "label": ["a"]})
    parquet.write_table(bad, path)
    assert "train.parquet:1" in mistake(lambda: load_images(str(path)))


# Hostile files


def test_damaged_tables_are_read_or_refused_in_one_line(tmp_path: Path):
    table = arrow_table()
    import random

    import pyarrow
    from pyarrow import feather, parquet

    parquet.write_table(table, tmp_path / "a.parquet")
    feather.write_feather(table, tmp_path / "a.feather")
    with pyarrow.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as stream:
        stream.write_table(table)
    (tmp_path / "a.csv").write_text(as_csv(ROWS, ";"))
    (tmp_path / "b.csv").write_bytes(as_csv(ROWS, "\t").encode("utf-16"))
    chance = random.Random(5)
    for path in sorted(tmp_path.iterdir()):
        whole = path.read_bytes()
        for _ in range(60):
            data = bytearray(whole)
            for _ in range(chance.randint(1, 4)):
                at = chance.randrange(len(data))
                data[at : at + chance.choice((0, 1, 9))] = chance.randbytes(
                    chance.choice((0, 1, 3))
                )
            path.write_bytes(bytes(data))
            for read in (lambda at: list(Table(at)), examples, load_texts):
                try:
                    read(path)
                except UsageError as refused:
                    assert "\n" not in str(refused)
