"""Reading text: what is read, and the one line that each bad file is told with."""

import gzip
import io
import json
import lzma
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.cli import main
from regard.data import lines as lines_module
from regard.data.lines import LONGEST_LINE, read_lines, read_stream, scan_lines
from regard.data.pairs import Pair, PairReader, find_parts, load_pairs
from regard.data.sentences import join_sentences, split_sentences
from regard.errors import UsageError
from tests.zoo import read_pairs

DATA = Path(os.environ.get("REGARD_DATA", Path(__file__).parents[3] / "shared" / "data"))
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
}


def real(name: str) -> Path:
    if not (DATA / name).exists():
        pytest.skip(f"{name} is not in REGARD_DATA")
    return DATA / name


def write(path: Path, data: bytes | str) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def mistake(function: Callable[[], object]) -> str:
    with pytest.raises(UsageError) as caught:
        function()
    message = str(caught.value)
    assert "\n" not in message
    return message


def texts(pairs: list[Pair]) -> list[tuple[str, str]]:
    return [(pair.source, pair.target) for pair in pairs]


# Lines


def test_only_newlines_end_a_line(tmp_path: Path) -> None:
    text = "\ufeffa\u2028b\x0b\x85c\r\nd\re\n\nf\r"
    path = write(tmp_path / "a.txt", text)
    expected = [(1, "a\u2028b\x0b\x85c"), (2, "d\re"), (3, ""), (4, "f\r")]
    assert list(read_lines(path)) == expected
    assert list(read_lines(write(tmp_path / "empty", ""))) == []


@pytest.mark.parametrize("end", PACKERS)
@pytest.mark.parametrize("named", [True, False])
def test_packed_files_are_known_by_their_bytes(tmp_path: Path, end: str, named: bool) -> None:
    path = write(tmp_path / ("a.txt" + (end if named else "")), PACKERS[end](b"eins\nzwei"))
    assert list(read_lines(path)) == [(1, "eins"), (2, "zwei")]


def test_two_gzip_members_are_one_text(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gz", gzip.compress(b"one\n", mtime=0) + gzip.compress(b"two\n"))
    assert [line for _, line in read_lines(path)] == ["one", "two"]


@pytest.mark.parametrize(
    "name, data, words",
    [
        ("a", b"good\nK\xc3\xa4se \xff x\n", "a:2: not UTF-8 (byte 0xff at column 6); convert"),
        ("a", b"cut \xe4\xbd", "a:1: not UTF-8 (byte 0xe4 at column 5)"),
        ("a", b"surrogate \xed\xa0\x80\n", "a:1: not UTF-8"),
        ("a", "Gr\u00fc\u00dfe\n".encode("utf-16") + b"x", "a: broken UTF-16"),
        ("a", b"text\nbin\x00ary\n", "a:2: a NUL byte at byte 4"),
        ("a", b"\x89PNG\r\n\x1a\n\x00\x00", "a:1: not UTF-8"),
        ("a", b"x\n" + b"y" * (LONGEST_LINE + 1), "a:2: a line of over 1,000,000 characters"),
        ("a", b"y" * 9_000_000 + b"\nx", "a:1: a line of over 1,000,000 characters"),
        ("a.gz", gzip.compress(b"text\n" * 99, mtime=0)[:-12], "ends too early"),
        ("a.gz", gzip.compress(b"text\n" * 99, mtime=0)[:-8] + b"\0" * 8, "damaged"),
        ("a.xz", lzma.compress(b"text\n" * 99)[:-14], "ends too early"),
        ("a.xz", lzma.compress(b"text\n").replace(b"text", b"tent"), "damaged"),
        ("a.gz", b"plain text\n", "not .gz data"),
        ("a.xz", b"", "not .xz data"),
    ],
)
def test_bad_files_are_told_in_one_line(tmp_path: Path, name: str, data: bytes, words: str) -> None:
    path = write(tmp_path / name, data)
    message = mistake(lambda: list(read_lines(path)))
    assert words in message and str(path) in message


@pytest.mark.parametrize("end", [end for end in PACKERS if end])
def test_what_no_text_is_packed_to_is_not_unpacked(tmp_path: Path, monkeypatch, end: str) -> None:
    monkeypatch.setattr(lines_module, "LEAST_UNPACKED", 2**20)
    bomb = write(tmp_path / f"a{end}", PACKERS[end](b"y" * 2**23))
    told = mistake(lambda: list(scan_lines(bomb)))
    assert f"{bomb}: {bomb.stat().st_size:,} bytes unpack to over 1 MB" in told
    dense = write(tmp_path / f"b{end}", PACKERS[end](os.urandom(2**21).hex().encode()))
    assert [fault and fault.kind for *_, fault in scan_lines(dense)] == ["long"]
    assert main(["doctor", str(bomb)]) == 2


def test_a_line_without_end_is_not_skipped(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(lines_module, "MOST_SKIPPED", 2**23)
    path = write(tmp_path / "a", b"x\n" + b"y" * 2**24)
    assert f"{path}:2: a line of over 8 MB" in mistake(lambda: list(scan_lines(path)))


def test_missing_files_folders_and_locked_files(tmp_path: Path) -> None:
    write(tmp_path / "train.en", "a\n")
    assert "Did you mean 'train.en'?" in mistake(lambda: list(read_lines(tmp_path / "trian.en")))
    assert "nor the folder" in mistake(lambda: list(read_lines(tmp_path / "no" / "file")))
    assert "is a folder" in mistake(lambda: list(read_lines(tmp_path)))
    assert "too long" in mistake(lambda: list(read_lines(tmp_path / ("x" * 300))))
    if os.getuid():
        (tmp_path / "train.en").chmod(0)
        assert "permission denied" in mistake(lambda: list(read_lines(tmp_path / "train.en")))


def test_the_longest_line_is_allowed(tmp_path: Path) -> None:
    path = write(tmp_path / "a", "\u4f60" * LONGEST_LINE + "\r\nx\n")
    assert [len(line) for _, line in read_lines(path)] == [LONGEST_LINE, 1]


def test_scanning_goes_on_after_each_fault(tmp_path: Path) -> None:
    path = write(tmp_path / "a", b"a\n\xff\n\0\n" + b"y" * 9_000_000 + b"\nb\n")
    found = [(number, fault and fault.kind) for number, _, fault in scan_lines(path)]
    assert found == [(1, None), (2, "encoding"), (3, "binary"), (4, "long"), (5, None)]


def test_an_open_stream_is_read_and_named() -> None:
    assert list(read_stream(io.BytesIO(b"a\nb"))) == [(1, "a"), (2, "b")]
    assert "standard input:1: not UTF-8" in mistake(lambda: list(read_stream(io.BytesIO(b"\xe4"))))


def test_a_pipe_is_read_once_from_front_to_back() -> None:
    code = "from regard.data.pairs import *; print(len(list(PairReader('/dev/stdin'))))"
    done = subprocess.run([sys.executable, "-c", code], input=b"a\tb\n" * 3, capture_output=True)
    assert done.stdout == b"3\n", done.stderr


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\n"), max_size=20))
@settings(max_examples=100, deadline=None)
def test_any_line_comes_back(line: str) -> None:
    data = f"x\n{line}\n".encode()
    expected = line[:-1] if line.endswith("\r") else line
    assert list(read_stream(io.BytesIO(data)))[1] == (2, expected)


# Pairs

ROWS = [("Hello.", "Hallo."), ("A \u2028 b", "Ein\x85 b"), ("Bye", "Tsch\u00fcss")]


@pytest.mark.parametrize("end", PACKERS)
def test_pairs_of_every_kind(tmp_path: Path, end: str) -> None:
    pack = PACKERS[end]
    left = write(tmp_path / f"t.en{end}", pack("\n".join(a for a, _ in ROWS).encode()))
    right = write(tmp_path / f"t.de{end}", pack("\r\n".join(b for _, b in ROWS).encode()))
    tsv = write(tmp_path / f"t.tsv{end}", pack("".join(f"{a}\t{b}\tx\n" for a, b in ROWS).encode()))
    objects = [json.dumps({"src": a, "tgt": b, "id": 1}) + "\n" for a, b in ROWS]
    jsonl = write(tmp_path / f"t.jsonl{end}", pack("".join(objects).encode()))
    bare = write(tmp_path / f"bare{end}", pack("".join(objects).encode()))
    assert read_pairs(left, target_path=right)[2] == Pair(*ROWS[2], f"{left}:3")
    for pairs in (
        read_pairs(left, target_path=right),
        read_pairs(tsv),
        read_pairs(jsonl),
        read_pairs(bare),
        list(PairReader(tsv)),
    ):
        assert texts(pairs) == ROWS


@pytest.mark.parametrize(
    "header, columns, languages, expected",
    [
        ("source\ttarget", None, (None, None), ("1", "2")),
        ("tgt\tsrc", None, (None, None), ("2", "1")),
        ("id\tText \tLabel", None, (None, None), ("2", "3")),
        ("sentence\tlabel", None, (None, None), ("1", "2")),
        ("audio\ttext", None, (None, None), ("1", "2")),
        ("image\tcaption", None, (None, None), ("1", "2")),
        ("English\tGerman", None, (None, None), ("1", "2")),
        ("en\tde\tfr", None, ("fr", "en"), ("3", "1")),
        ("zh-CN\ten_US", None, ("en", "zh"), ("2", "1")),
        ("en\tde\tfr", None, (None, "fr"), ("1", "3")),
        ("label\tid\ttext", "3,1", (None, None), ("3", "1")),
        ("a\tb\tc", "C, a", (None, None), ("3", "1")),
        ("a\tb\tc", ["2", "c"], (None, None), ("2", "3")),
    ],
)
def test_a_header_is_known_by_its_names(
    tmp_path: Path,
    header: str,
    columns: str | list[str] | None,
    languages: tuple[str | None, str | None],
    expected: tuple[str, str],
) -> None:
    path = write(tmp_path / "a.tsv", f"{header}\n1\t2\t3\n")
    notes: list[str] = []
    source, target = languages
    pairs = read_pairs(path, columns=columns, source=source, target=target, notes=notes)
    assert texts(pairs) == [expected]
    assert "row 1 is a header" in notes[0]


def test_what_is_no_header_is_data(tmp_path: Path) -> None:
    for first in ("The source\tDie Quelle", "text\tTexte", "Hi\tHallo", "label\tEtikett"):
        path = write(tmp_path / "a.tsv", f"{first}\nx\ty\n")
        assert len(read_pairs(path)) == 2
    path = write(tmp_path / "b.tsv", "1\t2\t3\n")
    assert texts(read_pairs(path, columns="2,1")) == [("2", "1")]
    assert texts(read_pairs(path, columns=(3, 1))) == [("3", "1")]


@pytest.mark.parametrize(
    "line, settings, expected",
    [
        ({"source": "a", "target": "b"}, {}, ("a", "b")),
        ({"text": "a", "label": 1}, {}, ("a", "1")),
        ({"text": "a", "label": True}, {}, ("a", "true")),
        ({"image": "a.png", "caption": "b"}, {}, ("a.png", "b")),
        ({"audio": "a.ogg", "text": "b"}, {}, ("a.ogg", "b")),
        ({"translation": {"en": "a", "de": "b"}}, {}, ("a", "b")),
        ({"translation": {"en": "a", "de": "b"}}, {"source": "de", "target": "en"}, ("b", "a")),
        ({"en": "a", "de": "b", "fr": "c"}, {"source": "fr", "target": "de"}, ("c", "b")),
        ({"q": "a", "z": {"x": "b"}}, {"columns": "q,z.x"}, ("a", "b")),
        ({"src": "two\nlines", "tgt": "b"}, {}, ("two\nlines", "b")),
    ],
)
def test_keys_of_json(tmp_path: Path, line: dict, settings: dict, expected: tuple) -> None:
    path = write(tmp_path / "a.jsonl", json.dumps(line) + "\n")
    assert texts(read_pairs(path, **settings)) == [expected]


GOOD = '{"src": "a", "tgt": "b"}\n'


@pytest.mark.parametrize(
    "name, data, words",
    [
        ("a.tsv", "a\tb\nc\n", ":2: 1 column, expected at least 2; put a TAB"),
        ("a.tsv", "a\tb\n\t\nc\td\n", ":2: an empty line"),
        ("a.tsv", "a\tb\nc\t \n", ":2: the target side is empty"),
        ("a.tsv", "a\tb\n\td\n", ":2: the source side is empty"),
        ("a.tsv", "a\tb\n\nc\td\n", ":2: an empty line"),
        ("a.csv", "a,b\nc,d\ne,f\ng\n", ":4: 1 column, expected 2; put quotes around cells"),
        ("a.jsonl", GOOD + "{nope}\n", ":2: not JSON (Expecting property name"),
        ("a.jsonl", GOOD + "[1]\n", ":2: a JSON list, expected an object"),
        ("a.jsonl", GOOD + "7\n", ":2: a JSON int, expected an object"),
        ("a.jsonl", GOOD + '{"src": "a"}\n', ":2: no key 'tgt' (found: src)"),
        ("a.jsonl", GOOD + '{"src": "a", "tgt": null}\n', ":2: the target side is empty"),
        ("a.jsonl", GOOD + '{"src": "a", "tgt": ["b"]}\n', ":2: key 'tgt' holds a list"),
        ("a.jsonl", GOOD + '{"src": "a", "tgt": "\\ud800"}\n', ":2: key 'tgt' holds a NUL or"),
        ("a.jsonl", GOOD + '{"src": "\\u0000", "tgt": "b"}\n', ":2: key 'src' holds a NUL or"),
        ("a.jsonl", GOOD + "[" * 200_000 + "\n", ":2: not JSON (too deep"),
        ("a.jsonl", '{"what": 1, "ever": 2}\n', ":1: no pair of keys among what, ever; name them"),
        ("a.json", "[\n" + GOOD + "]\n", ":1: one JSON array; make it one object a line"),
        ("a.tsv", b"a\tb\nc\xe4\td\n", ":2: not UTF-8 (byte 0xe4 at column 2)"),
    ],
)
def test_bad_rows_are_refused_or_dropped(
    tmp_path: Path, name: str, data: str | bytes, words: str
) -> None:
    path = write(tmp_path / name, data)
    message = mistake(lambda: read_pairs(path))
    assert f"{path}{words}" in message and message.endswith("skip_bad=true")
    notes: list[str] = []
    read_pairs(path, skip_bad=True, notes=notes)
    assert any(f"dropped; the first: {path}{words}" in note for note in notes)


def test_dropped_rows_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", b"a\tb\nx\n\n\n\xff\t1\n\t2\nc\td\n\n")
    notes: list[str] = []
    assert texts(read_pairs(path, skip_bad=True, notes=notes)) == [("a", "b"), ("c", "d")]
    assert notes[0].startswith(f"5 bad rows of {path} dropped")


@pytest.mark.parametrize(
    "columns, words",
    [
        ("0,1", "is not two columns"),
        ("1", "is not two columns"),
        ("1,2,3", "is not two columns"),
        ("-1,2", "is not two columns"),
        ("1,", "is not two columns"),
        ("1," + "9" * 5000, "is not two columns"),
        ("1,4", "3 columns, expected at least 4"),
        ("text,label", "no column 'text' in the header row; found one, two, three"),
    ],
)
def test_bad_columns(tmp_path: Path, columns: str, words: str) -> None:
    path = write(tmp_path / "a.tsv", "one\ttwo\tthree\n")
    assert words in mistake(lambda: read_pairs(path, columns=columns))


def test_a_header_of_other_languages_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "en\tfr\na\tb\n")
    message = mistake(lambda: read_pairs(path, source="en", target="de"))
    assert "no columns for from=en to=de" in message


@pytest.mark.parametrize(
    "left, right, words",
    [
        ("a\nb\nc\n", "x\n", "a.en:2: no such line in {0}/a.de, which has 1 lines, not 3"),
        ("a\n", "x\ny\nz", "a.de:2: no such line in {0}/a.en, which has 1 lines, not 3"),
        ("a\n", "x\n\nz", "a.de:3: no such line in {0}/a.en, which has 1 lines, not 3"),
        ("a\n\n", "x\ny\n", "a.en:2: an empty line, but {0}/a.de has text there"),
        ("a\nb\nc", "x\n \ny\n", "a.de:2: an empty line, but {0}/a.en has text there"),
        ("a\n\nc\n", "x\n\nz\n", "a.en:2: an empty line"),
    ],
)
def test_aligned_files_that_do_not_fit(tmp_path: Path, left: str, right: str, words: str) -> None:
    paths = write(tmp_path / "a.en", left), write(tmp_path / "a.de", right)
    message = mistake(lambda: read_pairs(paths[0], target_path=paths[1]))
    assert f"{tmp_path}/{words.format(tmp_path)}" in message
    if "no such line" in words:
        # Dropping rows cannot mend files that may be shifted against each other.
        assert message == mistake(lambda: read_pairs(paths[0], target_path=paths[1], skip_bad=True))
    else:
        assert len(read_pairs(paths[0], target_path=paths[1], skip_bad=True)) >= 1


def test_blank_lines_at_the_end_are_tolerated(tmp_path: Path) -> None:
    left, right = write(tmp_path / "a.en", "a\n\n \n\n"), write(tmp_path / "a.de", "x\n\n")
    assert texts(read_pairs(left, target_path=right)) == [("a", "x")]
    assert texts(read_pairs(write(tmp_path / "a.tsv", "a\tx\n\n\n"))) == [("a", "x")]
    assert texts(read_pairs(write(tmp_path / "a.jsonl", GOOD + "\n"))) == [("a", "b")]
    assert "leave columns= out" in mistake(
        lambda: read_pairs(left, target_path=right, columns="1,2")
    )


# Parts of a folder


def fill(folder: Path, names: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names.split():
        write(folder / name, "a\tb\n")
    return folder


def names(folder: Path, **settings: str) -> dict[str, str]:
    parts = find_parts(folder, **settings)
    return {name: " ".join(file.name for file in part.files) for name, part in parts.items()}


@pytest.mark.parametrize(
    "files, settings, expected",
    [
        ("train.tsv dev.tsv test.tsv", {}, "train.tsv dev.tsv test.tsv"),
        ("train.jsonl.gz val.jsonl.xz", {}, "train.jsonl.gz val.jsonl.xz"),
        ("train.en train.de", {}, "train.de train.en"),
        ("train.en train.de", {"source": "en"}, "train.en train.de"),
        ("train.en train.de", {"target": "de"}, "train.en train.de"),
        ("train.tgt train.src valid.src valid.tgt", {}, "train.src train.tgt valid.src valid.tgt"),
        (
            "train.en train.de train.fr val.en val.fr",
            {"source": "fr", "target": "en"},
            "train.fr train.en val.fr val.en",
        ),
        (
            "train.en train.de train.fr val.en val.de",
            {"source": "fr", "target": "en"},
            "train.fr train.en",
        ),
        ("train.en train.en.gz train.de.xz", {"source": "en"}, "train.en train.de.xz"),
        ("train.tsv train.en train.de", {"source": "en", "target": "de"}, "train.en train.de"),
        ("train.tsv dev.tsv", {"source": "en", "target": "zh"}, "train.tsv dev.tsv"),
        ("train.en-de.en train.en-de.de", {"source": "en"}, "train.en-de.en train.en-de.de"),
        ("train.tsv trainer.tsv README.md", {}, "train.tsv"),
    ],
)
def test_parts_are_found(tmp_path: Path, files: str, settings: dict, expected: str) -> None:
    assert " ".join(names(fill(tmp_path, files), **settings).values()) == expected


def test_several_test_files(tmp_path: Path) -> None:
    fill(tmp_path, "train.tsv test_2017.tsv test_2016.tsv")
    expected = {"train": "train.tsv", "test": "test_2016.tsv", "test_2017": "test_2017.tsv"}
    assert names(tmp_path) == expected
    assert names(tmp_path, test="test_2017")["test"] == "test_2017.tsv"
    assert names(tmp_path, test="test_2017.tsv")["test"] == "test_2017.tsv"
    fill(tmp_path, "test.tsv")
    assert names(tmp_path)["test"] == "test.tsv"
    corpus = load_pairs(tmp_path, valid=tmp_path / "test_2016.tsv")
    assert any("testing on test; also there: test_2016, test_2017" in note for note in corpus.notes)


def test_single_files_stems_and_two_files(tmp_path: Path) -> None:
    fill(tmp_path, "one.tsv c.en c.de d.en d.de d.fr")
    assert names(tmp_path / "one.tsv") == {"train": "one.tsv"}
    assert names(tmp_path / "c") == {"train": "c.de c.en"}
    assert names(tmp_path / "c.en", source="en", target="de") == {"train": "c.en c.de"}
    assert names(tmp_path / "one.tsv", source="en", target="de") == {"train": "one.tsv"}
    assert names(tmp_path / "d", source="fr", target="de") == {"train": "d.fr d.de"}
    both = f"{tmp_path}/d.fr,{tmp_path}/d.en"
    assert find_parts(both)["train"].source == "fr" and names(Path(both))["train"] == "d.fr d.en"
    found = names(tmp_path / "d", source="en", target="de", valid=str(tmp_path / "c"))
    assert found == {"train": "d.en d.de", "valid": "c.en c.de"}


@pytest.mark.parametrize(
    "files, settings, words",
    [
        ("train.en train.de train.fr", {}, "which languages? Found train.de, train.en, train.fr"),
        ("train.en train.de train.fr", {"source": "en"}, "set from= and to="),
        ("train.en train.de", {"source": "en", "target": "xx"}, "no train.xx; found train.de"),
        ("train.en train.de", {"source": "en", "target": "en"}, "the same language"),
        ("train_a.tsv train_b.tsv", {}, "several files to train on (train_a, train_b)"),
        (
            "foo.tsv",
            {},
            "no train part; expected train or training with .tsv, .csv, .jsonl or",
        ),
        ("", {}, "found nothing"),
        ("train.tsv", {"valid": "vald.tsv"}, "vald.tsv: no such file"),
        ("train.tsv", {"need": ("train", "test")}, "no test part; expected test"),
    ],
)
def test_folders_that_do_not_fit(tmp_path: Path, files: str, settings: dict, words: str) -> None:
    fill(tmp_path, files)
    message = mistake(lambda: load_pairs(tmp_path, **settings))
    assert words in message


def test_data_that_is_not_there(tmp_path: Path) -> None:
    assert "no such file" in mistake(lambda: load_pairs(tmp_path / "nothing"))
    assert "data= is empty" in mistake(lambda: load_pairs(""))
    assert "no such file" in mistake(lambda: load_pairs("x" * 5000))
    empty = write(tmp_path / "a.tsv", "\n")
    assert "no pairs in it" in mistake(lambda: load_pairs(empty))
    bad = write(tmp_path / "b.tsv", "x\ny\n")
    message = mistake(lambda: load_pairs(bad, skip_bad=True))
    assert "no pairs in it; 2 bad rows" in message and "1 column" in message
    one = write(tmp_path / "c.tsv", "a\tb\nA \tc\n")
    assert "give one with valid=" in mistake(lambda: load_pairs(one))
    assert "a single file has no test part" in mistake(
        lambda: load_pairs(one, need=("train", "test"))
    )


# The split


def make_pairs(count: int) -> list[Pair]:
    return [Pair(f"sentence {i}", "x", f"a:{i}") for i in range(count)]


def test_loading_splits_and_says_so(tmp_path: Path) -> None:
    write(tmp_path / "train.tsv", "".join(f"s {i}\tt\n" for i in range(500)))
    corpus = load_pairs(tmp_path, source="en", target="de")
    assert list(corpus.parts) == ["train", "valid"]
    count = len(corpus.parts["valid"])
    told = f"of 500 pairs, {count} to validate on were split off train"
    assert 75 <= count <= 125 and any(told in note for note in corpus.notes)
    assert load_pairs(tmp_path, need=("valid",)).parts["valid"] == corpus.parts["valid"]
    write(tmp_path / "dev.tsv", "v\tw\n")
    corpus = load_pairs(tmp_path)
    assert len(corpus.parts["train"]) == 500 and texts(corpus.parts["valid"]) == [("v", "w")]
    assert list(load_pairs(tmp_path / "dev.tsv", need=("test",)).parts) == ["test"]
    corpus = load_pairs(tmp_path / "train.tsv", valid="dev.tsv")
    assert len(corpus.parts["valid"]) == 1


def test_languages_are_found(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", '{"translation": {"cs": "a", "fr": "b"}}\n' * 3)
    write(tmp_path / "valid.jsonl", '{"translation": {"fr": "b", "cs": "a"}}\n')
    corpus = load_pairs(tmp_path)
    assert (corpus.source, corpus.target) == ("cs", "fr")
    assert texts(corpus.parts["valid"]) == [("a", "b")]
    fill(tmp_path / "b", "train.de train.en val.de val.en")
    corpus = load_pairs(tmp_path / "b")
    assert (corpus.source, corpus.target) == ("de", "en")
    assert "languages taken from the file names: from=de to=en" in corpus.notes


# Real data


def test_multi30k() -> None:
    corpus = load_pairs(real("multi30k"), source="en", target="de")
    sizes = {name: len(pairs) for name, pairs in corpus.parts.items()}
    assert sizes == {"train": 29_000, "valid": 1_014, "test": 1_000}
    pair = corpus.parts["train"][7365]
    assert pair.where.endswith("train.en:7366") and "\tWasserfont\u00e4ne" in pair.target
    assert "set from= and to=" in mistake(lambda: load_pairs(real("multi30k")))
    french = load_pairs(real("multi30k"), source="cs", target="fr")
    assert list(french.parts) == ["train", "valid"]


def test_tatoeba_and_sst2() -> None:
    corpus = load_pairs(real("tatoeba-en-zh"), source="en", target="zh")
    sizes = {name: len(pairs) for name, pairs in corpus.parts.items()}
    assert sizes == {"train": 27_089, "valid": 691, "test": 718}
    assert texts(corpus.parts["train"][:2]) == [("Hi.", "嗨。"), ("Hi.", "你好。")]
    assert texts(read_pairs(real("tatoeba-en-zh/dev.tsv"), columns="2,1"))[0][1] == "Call us."
    films = load_pairs(real("sst2"))
    assert {name: len(pairs) for name, pairs in films.parts.items()} == {
        "train": 67_349,
        "valid": 872,
    }
    assert {pair.target for pair in films.parts["valid"]} == {"0", "1"}


def test_latin_text_is_refused_by_line() -> None:
    assert "TREC.train:" in mistake(lambda: list(read_lines(real("trec/TREC.train"))))


def test_reading_is_linear(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "the quick brown fox\tder schnelle braune Fuchs\n" * 200_000)
    start = time.process_time()
    assert sum(1 for _ in PairReader(path)) == 200_000
    assert time.process_time() - start < 5  # 10 million lines in a few minutes, at worst
    write(path, "\n" * 200_000 + "a\tb\n")
    assert len(read_pairs(path, skip_bad=True)) == 1


# Sentences


@pytest.mark.parametrize(
    "text, expected",
    [
        ("Hello there. How are you? Fine!", ["Hello there.", "How are you?", "Fine!"]),
        ("Mr. Smith met Dr. Jones. They ate.", ["Mr. Smith met Dr. Jones.", "They ate."]),
        ("The U.S. Army came. It left.", ["The U.S. Army came.", "It left."]),
        ("I live in the U.S. He does not.", ["I live in the U.S.", "He does not."]),
        ("J. K. Rowling wrote it. Yes.", ["J. K. Rowling wrote it.", "Yes."]),
        ("Use fruit, e.g. Apples. Or not.", ["Use fruit, e.g. Apples.", "Or not."]),
        ("Pi is 3.14 or so. See regard.org now.", ["Pi is 3.14 or so.", "See regard.org now."]),
        ('"Really?" he said. "Yes." She left.', ['"Really?" he said.', '"Yes."', "She left."]),
        ("Well... maybe not… I think so.", ["Well... maybe not…", "I think so."]),
        ("Am 3. Oktober kam er. Dann ging er.", ["Am 3. Oktober kam er.", "Dann ging er."]),
        ("Das war z.B. Hans. „Ja.“ Er ging.", ["Das war z.B. Hans.", "„Ja.“", "Er ging."]),
        ("1. Buy milk. 2. Go home.", ["1. Buy milk.", "2. Go home."]),
        ("It was 1990. Then it was not.", ["It was 1990.", "Then it was not."]),
        ("你好。你叫什么名字？我很好！再见", ["你好。", "你叫什么名字？", "我很好！", "再见"]),
        ("他说：“你好。”然后走了。", ["他说：“你好。”", "然后走了。"]),
        ("我……不知道。“好。”", ["我……不知道。", "“好。”"]),
        ("One line\nanother line", ["One line", "another line"]),
        ("What?! No way!!! Ok.", ["What?!", "No way!!!", "Ok."]),
        ("no end", ["no end"]),
        ("", []),
    ],
)
def test_sentences(text: str, expected: list[str]) -> None:
    assert split_sentences(text)[0::2] == expected


@given(
    st.text(st.sampled_from(list("aZ1 .!?…。！？\"'”)\n\t\u3000你")) | st.characters(), max_size=60)
)
@settings(max_examples=300, deadline=None)
def test_cutting_sentences_loses_nothing(text: str) -> None:
    pieces = split_sentences(text)
    assert "".join(pieces) == text
    sentences, separators = pieces[0::2], pieces[1::2]
    assert len(sentences) == len(separators)
    assert not any(separator.strip() for separator in separators)
    assert not any("\n" in sentence for sentence in sentences)
    assert all(sentences[1:]), "only what stands before all text may be empty"


@pytest.mark.parametrize(
    "unit", ["a. ", ".", " ", "。", "A.", "你", "\n", ".'", "Mr. ", "1. ", "1. Mai "]
)
def test_cutting_is_linear(unit: str) -> None:
    start = time.process_time()
    assert "".join(split_sentences(unit * 100_000)) == unit * 100_000
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    "translations, separators, language, expected",
    [
        (["Hello.", "Bye."], ["", ""], "en", "Hello. Bye."),
        (["你好。", "再见。"], [" ", ""], "zh", "你好。再见。"),
        (["你好。", "再见。"], ["\n\n", "\n"], "zh-CN", "你好。\n\n再见。\n"),
        (["你好。", "再见。"], ["  ", ""], None, "你好。再见。"),
        (["OK.", "Bye."], [" ", ""], "zh", "OK. Bye."),
        (["Eins.", "Zwei."], ["\u3000", ""], "de", "Eins. Zwei."),
        (["", "Eins."], ["  ", " "], "de", "  Eins. "),
        (["Hola.", "", "Adios."], ["", "\n", ""], None, "Hola.\nAdios."),
        (["안녕.", "잘 가."], [" ", ""], "ko", "안녕. 잘 가."),
        ([], [], "en", ""),
    ],
)
def test_joining(
    translations: list[str], separators: list[str], language: str | None, expected: str
) -> None:
    assert join_sentences(translations, separators, language) == expected


def test_a_paragraph_put_together_again() -> None:
    text = "\n Mr. Smith came.  He sat down.\n\nThen he left.\tWhy?\n"
    pieces = split_sentences(text)
    assert join_sentences(pieces[0::2], pieces[1::2], "en") == text
