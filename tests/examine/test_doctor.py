"""The doctor finds what is planted, tells its line, and stays quiet about good data."""

import gzip
import json
import os
import time
from pathlib import Path

import pytest

from regard.errors import UsageError
from regard.examine.pairs import SCRIPT_NAMES, scripts_of
from regard.examine.pairs import examine_pairs as examine
from regard.examine.report import DataReport
from regard.modalities.base import ExamineOptions, Finding

DATA = Path(os.environ.get("REGARD_DATA", Path(__file__).parents[3] / "shared" / "data"))


def rows(count: int = 200, start: int = 0) -> list[tuple[str, str]]:
    numbers = range(start, start + count)
    return [(f"A dog saw cat number {i}.", f"Ein Hund sah Katze Nummer {i}.") for i in numbers]


def write_tsv(path: Path, pairs: list[tuple[str, str]]) -> Path:
    path.write_bytes("".join(f"{a}\t{b}\n" for a, b in pairs).encode())
    return path


def found(report: DataReport, kind: str) -> Finding:
    kinds = {finding.kind: finding for finding in report.findings}
    assert kind in kinds, f"{kind} is not among {list(kinds)}"
    finding = kinds[kind]
    assert finding.remedy and finding.what and "\n" not in "".join(report.lines())
    return finding


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tsv(tmp_path / "train.tsv", rows())
    write_tsv(tmp_path / "valid.tsv", rows(20, 1000))
    write_tsv(tmp_path / "test.tsv", rows(20, 2000))
    return tmp_path


def test_good_data_has_no_findings(folder: Path) -> None:
    report = examine(folder)
    assert report.findings == [] and report.healthy
    assert {name: part.pairs for name, part in report.parts.items()} == {
        "train": 200,
        "valid": 20,
        "test": 20,
    }
    assert report.parts["valid"].source_words == 20 * 6
    assert report.lines()[-1] == "nothing found"


@pytest.mark.parametrize(
    "row, kind, level, line, words",
    [
        (b"K\xe4se\tcheese", "encoding", "error", 101, "byte 0xe4 at column 2"),
        (b"bin\0ary\tx", "binary", "error", 101, "NUL"),
        (b"\tnothing before it", "empty", "error", 101, "the source side is empty"),
        (b"nothing after it\t ", "empty", "error", 101, "the target side is empty"),
        (b"", "empty", "error", 101, "an empty line"),
        (b"one column", "columns", "error", 101, "1 column, expected at least 2"),
        (b"y" * 1_000_001 + b"\tx", "long", "error", 101, "over 1,000,000 characters"),
        (b"a long one " * 99 + b"\tein langer " * 99, "very_long", "warning", 101, "1 row over"),
        (b"It stays as it is.\tIt stays as  it IS.", "untranslated", "note", 101, "same text"),
        (b"A dog \x07 barks.\tEin Hund bellt.", "control", "warning", 101, "A dog \\x07 barks"),
        ("A dog\u2028 barks.\tEin Hund bellt.", "control", "warning", 101, "A dog\\u2028"),
        ("A dog\u200b barks.\tEin Hund bellt.", "invisible", "note", 101, "A dog\\u200b"),
        ("A bear.\tEin B\ufffdr hier.", "replaced", "warning", 101, "U+FFFD"),
        ("A bear barks.\tEin BÃ¤r bellt.", "garbled", "warning", 101, "Ã¤"),
        (b"You &amp; me here.\tDu und ich hier.", "markup", "note", 101, "&amp;"),
        ("A dog barks loudly.\t一只狗在大声叫。", "script", "warning", 101, "Han or kana"),
        (b"A cat.\t" + b"Viel zu viel Text " * 9, "length_ratio", "warning", 101, "6 to 162"),
        (
            b"A dog saw cat number 7.\tein hund  sah Katze nummer 7.",
            "duplicate_pair",
            "note",
            101,
            "8",
        ),
        (b"a dog saw cat number 7.\tAnders.", "duplicate_source", "note", 101, "train.tsv:8"),
    ],
)
def test_a_planted_fault_is_found(
    folder: Path, row: bytes | str, kind: str, level: str, line: int, words: str
) -> None:
    path = folder / "train.tsv"
    lines = path.read_bytes().splitlines(keepends=True)
    lines.insert(100, (row.encode() if isinstance(row, str) else row) + b"\n")
    path.write_bytes(b"".join(lines))
    report = examine(folder)
    finding = found(report, kind)
    assert finding.level == level and finding.where == f"{path}:{line}" and finding.count == 1
    assert words in finding.what
    assert report.parts["train"].pairs + report.parts["train"].bad == 201
    assert report.healthy == (level != "error")
    assert f"{level}: {finding.where}: {finding.what}" in report.lines()


def test_faults_are_counted_and_nothing_stops_the_doctor(folder: Path) -> None:
    bad = b"\xff\t1\nok row here\tgute Zeile hier\n\xfe\t2\n\0\t3\nlonely\n\n\n\tx\n"
    (folder / "train.tsv").write_bytes(b"".join(f"{a}\t{b}\n".encode() for a, b in rows()) + bad)
    report = examine(folder)
    counts = {finding.kind: finding.count for finding in report.findings}
    assert counts == {"encoding": 2, "binary": 1, "columns": 1, "empty": 3}
    assert report.parts["train"].pairs == 201 and report.parts["train"].bad == 7
    levels = [finding.level for finding in report.findings]
    assert levels == sorted(levels)


def test_leaks(folder: Path) -> None:
    write_tsv(
        folder / "valid.tsv",
        [
            *rows(5, 1000),
            ("A DOG saw cat  number 3.", "ein Hund sah Katze Nummer 3."),
            *rows(5, 1100),
        ],
    )
    write_tsv(
        folder / "test.tsv",
        [*rows(5, 2000), ("a dog saw cat number 9.", "Etwas anderes hier."), *rows(1, 1000)],
    )
    report = examine(folder)
    finding = found(report, "leak_pair")
    leaks = [finding for finding in report.findings if finding.kind.startswith("leak")]
    assert [(f.kind, f.where.rpartition("/")[2], f.count) for f in leaks] == [
        ("leak_pair", "valid.tsv:6", 1),
        ("leak_source", "test.tsv:6", 1),
        ("leak_pair", "test.tsv:7", 1),
    ]
    assert "train.tsv:4" in leaks[0].what and "train.tsv:10" in leaks[1].what
    assert finding.level == "warning" and "remove them from" in finding.remedy


def test_a_reversed_pair_is_no_copy_and_a_copy_is_counted_once(folder: Path) -> None:
    once = [("Yes.", "Ja."), ("Ja.", "Yes."), ("No.", "Nein.")]
    path = write_tsv(folder / "train.tsv", [*rows(), *once, ("No.", "Nee."), ("No.", "Nee.")])
    counts = {f.kind: (f.where, f.count) for f in examine(path).findings}
    assert counts["duplicate_pair"] == (f"{path}:205", 1)
    assert counts["duplicate_source"] == (f"{path}:204", 1)


def test_names_in_latin_letters_leave_a_text_its_script() -> None:
    han, latin = (SCRIPT_NAMES.index(name) for name in ("Han or kana", "Latin"))
    assert scripts_of("汤姆去了New York。") % 16 == han
    assert scripts_of("We ate 饺子 yesterday.") % 16 == latin
    assert {scripts_of(text) // 16 for text in ("汤姆去了New York。", "We ate 饺子.")} == {han}


def test_swapped_sides(folder: Path) -> None:
    pairs = [(f"I have {i} dogs.", f"我有{i}只狗。") for i in range(100)]
    pairs[50] = (pairs[50][1], pairs[50][0])
    pairs[60] = ("Tom saw Mary and John.", "Tom、Mary、John看")
    path = write_tsv(folder / "train.tsv", pairs)
    report = examine(path)
    assert found(report, "swapped").where == f"{path}:51"
    assert "script" not in [finding.kind for finding in report.findings]


@pytest.mark.parametrize("end", ["", ".gz"])
def test_uneven_and_faulty_aligned_files(tmp_path: Path, end: str) -> None:
    def write(name: str, data: bytes) -> None:
        (tmp_path / (name + end)).write_bytes(gzip.compress(data) if end else data)

    sources, targets = ([side.encode() for side in sides] for sides in zip(*rows(), strict=True))
    targets[10] = b"M\xe4use"
    sources[10] = b"\xff mice"
    targets[20] = b""
    targets[30] = b"Ein\tHund sah Katze Nummer 30."
    write("train.en", b"\n".join(sources))
    write("train.de", b"\n".join(targets[:150]) + b"\n")
    report = examine(tmp_path, source="en", target="de")
    places = {(f.kind, f.where.rpartition("/")[2]) for f in report.findings}
    assert places == {
        ("uneven", f"train.en{end}:151"),
        ("encoding", f"train.en{end}:11"),
        ("encoding", f"train.de{end}:11"),
        ("empty", f"train.de{end}:21"),
        ("tab", f"train.de{end}:31"),
        ("no_valid", tmp_path.name),
    }
    # The other file is the broken one, and is the one named.
    (tmp_path / f"train.de{end}").write_bytes(gzip.compress(b"text\n")[:12])
    broken = found(examine(tmp_path, source="en", target="de"), "unreadable")
    assert broken.where.endswith(f"train.de{end}")
    assert "150 lines, not 200" in found(report, "uneven").what
    assert report.parts["train"].pairs == 148


def test_files_that_cannot_be_read_to_the_end(folder: Path) -> None:
    data = gzip.compress((folder / "train.tsv").read_bytes())
    (folder / "train.tsv").unlink()
    (folder / "train.tsv.gz").write_bytes(data[: len(data) // 2])
    report = examine(folder)
    finding = found(report, "unreadable")
    assert "ends too early" in finding.what and finding.remedy == "fetch it again"
    assert report.parts["valid"].pairs == 20
    (folder / "train.tsv.gz").write_bytes(gzip.compress(b"\n\n"))
    assert found(examine(folder), "no_pairs").level == "error"


def test_jsonl_faults(tmp_path: Path) -> None:
    good = [json.dumps({"translation": {"en": a, "de": b}}) for a, b in rows()]
    lines = [*good[:9], "{oops", *good[9:20], "[1]", '{"translation": {"en": "x"}}', *good[20:]]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    report = examine(tmp_path)
    assert (report.source, report.target) == ("en", "de")
    assert found(report, "json").where.endswith(":10") and found(report, "json").count == 2
    assert found(report, "columns").where.endswith(":23")


def test_labels_are_not_taken_for_translations(folder: Path) -> None:
    pairs = [(a * (1 + i % 9), "good" if i % 2 else "bad") for i, (a, _) in enumerate(rows())]
    pairs[3] = ("Good", "good")
    path = write_tsv(folder / "films.tsv", pairs)
    assert {finding.kind for finding in examine(path).findings} == {"no_valid"}


def test_mistakes_of_the_user_stay_mistakes(folder: Path) -> None:
    for given in (ExamineOptions(columns="0,1"), ExamineOptions(valid="nope.tsv")):
        with pytest.raises(UsageError):
            examine(folder, given)
    with pytest.raises(UsageError):
        examine(folder, source="en", target="en")
    with pytest.raises(UsageError, match="no such file"):
        examine(folder / "nothing")
    (folder / "empty").mkdir()
    with pytest.raises(UsageError, match="no train, valid or test part"):
        examine(folder / "empty")
    assert found(examine(folder, ExamineOptions(columns="a,b")), "unreadable").level == "error"


def test_the_report_is_plain_json(folder: Path) -> None:
    write_tsv(folder / "valid.tsv", rows(3))
    report = examine(folder, source="en", target="de")
    again = json.loads(json.dumps(report.to_dict()))
    assert again["parts"]["train"]["pairs"] == 200 and again["healthy"] is True
    assert again["findings"][0]["kind"] == "leak_pair" and again["findings"][0]["count"] == 3
    assert report.lines()[0].endswith("(en to de)")


def test_the_doctor_is_linear(tmp_path: Path) -> None:
    path = write_tsv(tmp_path / "a.tsv", rows(50_000) + rows(50_000))
    start = time.process_time()
    report = examine(path)
    assert time.process_time() - start < 10
    assert found(report, "duplicate_pair").count == 50_000
    assert found(report, "duplicate_pair").level == "warning"


def test_real_data() -> None:
    if not (DATA / "multi30k").exists() or not (DATA / "tatoeba-en-zh").exists():
        pytest.skip("multi30k and tatoeba-en-zh are not in REGARD_DATA")
    report = examine(DATA / "multi30k", source="en", target="de")
    assert report.healthy
    assert found(report, "tab").where.endswith("train.de:7366")
    report = examine(DATA / "tatoeba-en-zh", source="en", target="zh")
    assert report.healthy and {finding.level for finding in report.findings} == {"note"}
    assert not [finding for finding in report.findings if finding.kind.startswith("leak")]
