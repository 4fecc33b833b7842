"""Data larger than memory: the same rows, splits and tokens as in memory, whatever is killed."""

import hashlib
import json
import multiprocessing
import os
import signal
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.data import documents, store, text_rows
from regard.data.batches import IndexBatches
from regard.data.documents import Texts, blocks, load_texts, read_whole, tokenise_texts
from regard.data.pairs import Corpus, Pair, load_pairs
from regard.data.parallel import PairBatches
from regard.data.split import hash_text
from regard.data.store import Store, gather, tokenised_parts
from regard.data.text_rows import TextRows, portions, spread
from regard.data.tokenize import SubwordTokenizer, train_tokenizer
from regard.data.windows import spans_of
from regard.errors import UsageError

LINES = [f"line {n} of Text, {'longer ' * (n % 7)}{chr(0xE9 + n % 5)} \u4f60" for n in range(400)]


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def in_parts(monkeypatch: Any, size: int = 2000, workers: int = 1) -> None:
    """Have little data written to disk, in many parts."""
    monkeypatch.setattr(store, "PART", size)
    monkeypatch.setattr(text_rows, "PART", size)
    monkeypatch.setattr(store, "usual_workers", lambda: workers)


def write(folder: Path, kind: str) -> Path:
    """The lines as documents or pairs of a kind."""
    path = folder / f"data.{kind}"
    pairs = [(line, line[::-1]) for line in LINES]
    if kind == "jsonl":
        rows = [{"text": a, "target": b} for a, b in pairs]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind in ("parquet", "arrow"):
        pa = pytest.importorskip("pyarrow")
        table = pa.table({"text": [a for a, _ in pairs], "target": [b for _, b in pairs]})
        if kind == "parquet":
            from pyarrow import parquet

            parquet.write_table(table, path, row_group_size=37)
        else:
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
                writer.write_table(table, max_chunksize=41)
    elif kind == "csv":
        path.write_text("text,target\n" + "".join(f'"{a}","{b}"\n' for a, b in pairs))
    else:
        path.write_text("text\ttarget\n" + "".join(f"{a}\t{b}\n" for a, b in pairs))
    return path


KINDS = ["jsonl", "parquet", "arrow", "csv", "tsv"]
LOADERS = {"texts": load_texts, "pairs": load_pairs}


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_on_disk_are_those_in_memory(tmp_path, own_cache, monkeypatch, kind, loader):
    path, load = write(tmp_path, kind), LOADERS[loader]
    few = load(path, valid="0.2", test="0.1")
    assert not own_cache.exists(), "small data leave nothing in the cache"
    in_parts(monkeypatch)
    for turn in range(2):
        many = load(path, valid="0.2", test="0.1")
        assert {name: list(rows) for name, rows in many.parts.items()} == few.parts, turn
        assert (many.sha, many.split, many.notes) == (few.sha, few.split, few.notes)
        assert many.part_sha("test") == few.part_sha("test")
        assert isinstance(many["train"].texts[0].ids.base, np.memmap)
    assert len(list(own_cache.glob("stores/*/store.json"))) == 1
    assert not list(own_cache.glob("stores/*/part*"))


def test_the_hash_of_data_is_that_of_lists(tmp_path):
    """By which a run that an older version began is known again."""
    pairs = load_pairs(write(tmp_path, "tsv"))
    digest = hashlib.sha256()
    for part in ("train", "valid"):
        for pair in pairs[part]:
            digest.update(f"{pair.source}\0{pair.target}\1".encode())
        digest.update(b"\2")
    assert pairs.sha == digest.hexdigest()
    texts = load_texts(write(tmp_path, "jsonl"))
    parts = [b"".join(text.encode() + b"\0" for text in texts[name]) for name in ("train", "valid")]
    told = ["documents", *(hashlib.sha256(part).hexdigest() for part in parts)]
    assert texts.sha == hashlib.sha256(b"".join(f"{x}\0".encode() for x in told)).hexdigest()
    (tmp_path / "a.txt").write_text("some words " * 100_000)
    running = load_texts(tmp_path / "a.txt")
    parts = ["".join(running[name]).encode() + b"\0" for name in ("train", "valid")]
    told = ["running", *(hashlib.sha256(part).hexdigest() for part in parts)]
    assert len(running["train"]) == 2, "blocks"
    assert running.sha == hashlib.sha256(b"".join(f"{x}\0".encode() for x in told)).hexdigest()


class Killed(Exception):
    """What ends a build in these tests."""


def killing(monkeypatch: Any, after: int) -> list[Path]:
    """Let a build end when it has written so many parts; return the parts as they are written."""
    written: list[Path] = []
    really = store.write_part

    def write_part(path: Path, *rest: Any) -> None:
        if len(written) == after:
            raise Killed
        really(path, *rest)
        written.append(path)

    monkeypatch.setattr(store, "write_part", write_part)
    return written


def files_of(own_cache: Path) -> dict[str, bytes]:
    return {str(p.relative_to(own_cache)): p.read_bytes() for p in sorted(own_cache.rglob("*.npy"))}


@pytest.mark.parametrize("after", [1, 3, 7])
@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_reading_goes_on_to_the_same_bytes(
    tmp_path, own_cache, monkeypatch, kind, loader, after
):
    path, load = write(tmp_path, kind), LOADERS[loader]
    in_parts(monkeypatch)
    monkeypatch.setattr("regard.data.table._HEADER_ROWS", 20)
    with monkeypatch.context() as other:
        other.setenv("REGARD_CACHE", str(tmp_path / "other"))
        whole = load(path)
    with monkeypatch.context() as one, pytest.raises(Killed):
        killing(one, after)
        load(path)
    written = killing(monkeypatch, -1)
    again = load(path)
    assert (again.sha, again.notes) == (whole.sha, whole.notes)
    assert files_of(own_cache) == files_of(tmp_path / "other")
    assert int(written[0].stem.rpartition("-")[2]) == after, "finished parts are not read again"


@pytest.mark.parametrize("ends", [("en", "de")])
def test_aligned_files_and_dropped_rows_go_on_too(tmp_path, own_cache, monkeypatch, ends):
    for end in ends:
        lines = [f"{end} {line}" if n % 50 else "" for n, line in enumerate(LINES, 1)]
        (tmp_path / f"train.{end}").write_text("\n".join(lines[:-1]) + "\nx\n")
    table = tmp_path / "bad.tsv"
    table.write_text(
        "".join(f"{line}\tb\n" if n % 9 else "alone\n" for n, line in enumerate(LINES))
    )
    aligned = {"source": ends[0], "target": ends[1]}
    for path, more in ((tmp_path, aligned), (table, {"columns": "1,2", "header": False})):
        whole = load_pairs(path, skip_bad=True, **more)
        with monkeypatch.context() as one:
            in_parts(one)
            with one.context() as two, pytest.raises(Killed):
                killing(two, 4)
                load_pairs(path, skip_bad=True, **more)
            again = load_pairs(path, skip_bad=True, **more)
        assert (again.sha, again.notes) == (whole.sha, whole.notes)
        assert "dropped" in again.notes[0] or path == tmp_path
        with pytest.raises(UsageError, match="skip_bad=true"), monkeypatch.context() as one:
            in_parts(one)
            load_pairs(path, **more)


def test_a_bad_line_far_inside_is_told_by_its_number(tmp_path, own_cache, monkeypatch):
    path = write(tmp_path, "jsonl")
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:350], '{"text": 3', *lines[350:]]))
    in_parts(monkeypatch)
    for _ in range(2):  # the second time, the finished parts before it are not read
        with pytest.raises(UsageError, match=r"data\.jsonl:351: not JSON"):
            load_texts(path)
    path.write_text("\n".join(lines))
    assert len(load_texts(path, need=("train",))["train"]) == len(LINES)


def test_other_data_under_the_same_name_are_read_anew(tmp_path, own_cache, monkeypatch):
    path = write(tmp_path, "tsv")
    in_parts(monkeypatch)
    before = load_pairs(path)
    at = path.stat()
    path.write_text(path.read_text().replace("line 7 ", "LINE 7 "))
    os.utime(path, ns=(at.st_atime_ns, at.st_mtime_ns))  # its time of change tells
    assert load_pairs(path).sha != before.sha


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_a_damaged_part_is_made_again(tmp_path, own_cache, monkeypatch, damage):
    path = write(tmp_path, "jsonl")
    whole = load_texts(path)
    in_parts(monkeypatch)
    with monkeypatch.context() as one, pytest.raises(Killed):
        killing(one, 5)
        load_texts(path)
    part = sorted(own_cache.glob("stores/*/part-*"))[3]
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 4
    part.write_bytes(data if damage == "flip" else data[:100])
    assert load_texts(path).sha == whole.sha


# Tokens


def tokenizer() -> SubwordTokenizer:
    return train_tokenizer(LINES, vocab=400)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", ["documents", "running", "conversations"])
def test_tokens_that_are_stored_in_parts_are_those_of_one_part(
    tmp_path, own_cache, monkeypatch, kind, workers
):
    path = tmp_path / ("a.txt" if kind == "running" else "a.jsonl")
    monkeypatch.setattr(documents, "CHUNK_CHARACTERS", 500)
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "you"}]
    more = [{"messages": chat}] if kind == "conversations" else []
    rows = [*({"text": line} for line in LINES), *more]
    text = (
        "".join(f"{json.dumps(row)}\n" for row in rows) if kind != "running" else "\n".join(LINES)
    )
    path.write_text(text)
    one = tokenise_texts(load_texts(path), tokenizer())
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "other"))
    in_parts(monkeypatch, workers=workers)
    many = tokenise_texts(load_texts(path), tokenizer())
    assert (one.bytes, one.running, list(one.learnt)) == (
        many.bytes,
        many.running,
        list(many.learnt),
    )
    for part in ("train", "valid"):
        a, b = one.columns[part], many.columns[part]
        assert a.ids.dtype == b.ids.dtype and np.array_equal(a.ids, b.ids)
        assert np.array_equal(a.offsets, b.offsets)
    assert all(np.array_equal(one.learnt[part], many.learnt[part]) for part in one.learnt)


@pytest.mark.parametrize("workers", [1, 2])
def test_pairs_that_are_stored_in_parts_make_the_same_batches(
    tmp_path, own_cache, monkeypatch, workers
):
    path, tokenizers = write(tmp_path, "tsv"), (tokenizer(), tokenizer())
    options: dict[str, Any] = {"tokens": 300, "longest": 60, "seed": 1, "bpe_dropout": 0.1}
    one = PairBatches(load_pairs(path), tokenizers, **options)
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "other"))
    in_parts(monkeypatch, workers=workers)
    many = PairBatches(load_pairs(path), tokenizers, **options)
    assert one.left_out == many.left_out > 0
    for n in (0, 1, 50):
        assert one[n].source.equal(many[n].source) and one[n].writes.equal(many[n].writes)
    with pytest.raises(UsageError, match="every pair is longer than max_length=1"):
        PairBatches(load_pairs(path), tokenizers, **{**options, "longest": 1})


def test_what_is_wrong_in_a_worker_is_told(own_cache, monkeypatch):
    in_parts(monkeypatch, workers=2)

    def rows(number: int) -> Iterator[Any]:
        if number == 3:
            raise UsageError("data:17: broken")
        yield ([number],)

    made = [lambda n=n: rows(n) for n in range(5)]
    with pytest.raises(UsageError, match="data:17: broken"):
        tokenised_parts(made, "key")

    def dies() -> Iterator[Any]:
        os.kill(os.getpid(), signal.SIGKILL)
        yield ([1],)

    with pytest.raises(UsageError, match="exit code -9"):
        tokenised_parts([*made[:3], dies], "other key")


def _build(path: Path) -> None:
    text_rows.PART = store.PART = 2000
    text_rows_sha = load_pairs(path).sha
    (path.parent / f"sha-{os.getpid()}").write_text(text_rows_sha)


def test_processes_that_read_the_same_data_build_one_store(tmp_path, own_cache):
    path, fork = write(tmp_path, "jsonl"), multiprocessing.get_context("fork")
    whole = load_pairs(path)
    children = [fork.Process(target=_build, args=(path,)) for _ in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert {sha.read_text() for sha in tmp_path.glob("sha-*")} == {whole.sha}
    assert len(list(tmp_path.glob("sha-*"))) == 4
    assert len(list(own_cache.glob("stores/*/store.json"))) == 1


def test_a_build_that_is_really_killed_leaves_no_process_and_goes_on(
    tmp_path, own_cache, monkeypatch
):
    path, fork = tmp_path / "a.jsonl", multiprocessing.get_context("fork")
    path.write_text(
        "".join(json.dumps({"text": f"{n} " + LINES[n % 400]}) + "\n" for n in range(9000))
    )
    whole = tokenise_texts(load_texts(path), tokenizer()).columns["train"]
    kept = np.array(whole.ids), np.array(whole.offsets)
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "other"))

    def build() -> None:
        os.setpgid(0, 0)
        store.PART = text_rows.PART = 10_000
        store.usual_workers = lambda: 2
        made = tokenise_texts(load_texts(path), tokenizer()).columns["train"]
        same = np.array_equal(made.ids, kept[0]) and np.array_equal(made.offsets, kept[1])
        (tmp_path / "made").write_text(str(same))

    for turn in range(12):
        child = fork.Process(target=build)
        child.start()
        child.join(0.15 * (turn + 1))
        if child.exitcode is not None:
            break
        child.kill()
        child.join()
    else:
        child = fork.Process(target=build)
        child.start()
        child.join()
    assert child.exitcode == 0 and (tmp_path / "made").read_text() == "True"
    for _ in range(100):  # workers of the killed end within a thousand rows
        try:
            os.killpg(child.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError("a worker has outlived its build")


def test_documents_that_are_joined_are_not_taken_for_others_of_the_same_letters(own_cache):
    made = tokenizer()
    for rows in (["line 1", "2 of"], ["line", " 12 of"]):
        texts = Texts({"valid": rows}, running=False)
        column = tokenise_texts(texts, made, ("valid",), joined=True).columns["valid"]
        assert column.ids.tolist() == [i for row in rows for i in made.encode_parts([row])[0]]
        assert len(column) == 1


# Memory


def _peak(path: Path) -> int:
    """Most memory that Python has while texts are read, split and tokenised."""
    made = tokenizer()
    tracemalloc.start()
    texts = load_texts(path)
    assert texts.sha
    tokenise_texts(texts, made)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_a_store_of_any_number_of_rows_takes_bounded_memory(tmp_path, own_cache, monkeypatch):
    in_parts(monkeypatch, 1 << 16)
    monkeypatch.setattr(text_rows, "_AT_ONCE_BYTES", 1 << 14)
    peaks, rows = [], (3000, 12_000)
    for count in rows:
        path = tmp_path / f"{count}.jsonl"
        with open(path, "w") as file:
            for n in range(count):
                file.write(json.dumps({"text": f"{n} " + LINES[n % 400] * 8}) + "\n")
        peaks.append(_peak(path))
    each = path.stat().st_size / rows[1]
    # beside its parts, some 60 bytes a row: hashes, places and the order of a split
    assert peaks[1] - peaks[0] < 100 * (rows[1] - rows[0]) < each / 3 * (rows[1] - rows[0])


def test_a_tokenizer_is_learnt_from_a_bounded_even_sample():
    rows = TextRows.of(gather([(f"{n:08}".encode(), b"\0" * 16) for n in range(5000)]), _first)
    assert spread(rows, 40_000) is rows, "all where that is all"
    some = spread(rows, 4000)
    numbers = [int(text) for text in some]
    assert 400 < len(some) <= 500 and numbers == sorted(set(numbers))
    assert numbers[0] == 0 and numbers[-1] == 4999
    assert max(np.diff(numbers)) <= 13
    assert list(spread(rows, 4000)) == list(some)


def _first(texts: list[str], number: int) -> str:
    return texts[0]


def test_portions_cover_all_rows_once(monkeypatch):
    in_parts(monkeypatch, 100)
    for sizes in ([], [5], [300], [10] * 100, [1000, 1, 1, 1000], [0, 0, 250, 0]):
        rows = TextRows.of(gather([(b"x" * size, b"\0" * 16) for size in sizes]), _first)
        cut = portions(rows)
        assert [n for some in cut for n in some] == list(range(len(sizes)))
        assert portions(["a", "b"]) == [range(2)]


def test_rows_are_a_sequence():
    rows = TextRows.of(gather([(line.encode(), b"\0" * 16) for line in LINES]), _first)
    assert rows == LINES and rows[3] == LINES[3] and rows[-1] == LINES[-1]
    assert rows[5:9] == LINES[5:9] and rows[::-7] == LINES[::-7] and rows[5:5] == []
    assert rows.pick([7, 2]).pick([1]) == [LINES[2]]
    assert LINES[9] in rows and rows.sizes.tolist() == [len(line.encode()) for line in LINES]
    with pytest.raises(IndexError):
        rows[len(LINES)]


# Running text


@settings(deadline=None, max_examples=150)
@given(st.text("a \n\u00e9\U0001f600", max_size=60), st.lists(st.integers(1, 9)), st.integers(2, 9))
def test_blocks_do_not_depend_on_the_pieces_a_text_comes_in(text, cuts, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "CHUNK_CHARACTERS", size)
        pieces, rest = [], text
        for cut in cuts:
            pieces.append(rest[:cut])
            rest = rest[cut:]
        made = list(blocks([*pieces, rest]))
        assert made == list(blocks([text])) and "".join(made) == text
        assert all(0 < len(block) <= size for block in made)


@settings(deadline=None, max_examples=150)
@given(st.text("ab \n\u00e9\U0001f600", min_size=1, max_size=60), st.data())
def test_a_running_text_is_cut_at_any_character(text, data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "CHUNK_CHARACTERS", data.draw(st.integers(2, 9)))
        made = [(b.encode(), np.array([len(b), 0], np.uint64).tobytes()) for b in blocks([text])]
        rows = TextRows.of(gather(made), _first)
        begin, end = sorted(data.draw(st.tuples(*[st.integers(0, len(text))] * 2)))
        some = documents._cut(rows, begin, end)
        assert list(some) == list(blocks([text[begin:end]]))
        assert documents._characters(some) == end - begin
        assert documents._hash_start(rows, end) == hash_text(text[:end])


@pytest.mark.parametrize("size", [5, 7, 64])
def test_a_text_that_is_read_in_pieces_is_whole(tmp_path, monkeypatch, size):
    monkeypatch.setattr(documents, "_READ", size)
    text = (
        "one\r\ntwo \u00e9\u00e9\u00e9\u00e9\u4f60\u4f60\U0001f600\U0001f600 three\r\n\r\n\rlast\r"
    )
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert "".join(read_whole(tmp_path / "a.txt")) == text.replace("\r\n", "\n")
    for bad, what in (
        (b"ab\n\nc\xffd\n", ":3: not UTF-8 .byte 0xff at column 2"),
        (b"a\nb\0", ":2: a NUL"),
    ):
        (tmp_path / "b.txt").write_bytes(bad)
        with pytest.raises(UsageError, match=what):
            list(read_whole(tmp_path / "b.txt"))


# Plans of batches


@pytest.mark.parametrize("count", [1, 9, 3000])
def test_the_order_of_examples_is_that_of_one_sort_by_all_keys(count):
    """As the versions before sorted them, so that a run that they began goes on."""
    draw = np.random.default_rng(count)
    lengths = [draw.integers(0, 50, count), draw.integers(0, 40, count)]
    made = IndexBatches(lengths, 400, 7)
    for epoch, noise in ((0, 1.0), (3, 1.0), (1, 0.0)):
        rng = made._rng(epoch)
        ties = rng.permutation(count)
        source = lengths[0] + noise * rng.uniform(-0.7, 0.7, count)
        target = lengths[1] + (rng.random(count) < 0.1 * noise)
        source = np.where(target % 2 == 0, source, -source)
        assert np.array_equal(
            made._order(made._rng(epoch), noise), np.lexsort((ties, source, target))
        )


@given(st.lists(st.integers(0, 12), max_size=8), st.integers(1, 5))
def test_spans_predict_every_token_but_the_first_of_a_row_once(lengths, length):
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    spans = []
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        for start in range(begin, max(begin + 1, end - 1), length):
            spans.append((start, min(end, start + length + 1)))
    wanted = [span for span in spans if span[1] - span[0] > 1]
    assert list(map(tuple, spans_of(offsets, length).tolist())) == wanted


def test_lists_of_pairs_are_a_source_of_rows(own_cache):
    pairs = [Pair(line, line, f"a:{n}") for n, line in enumerate(LINES)]
    made = tokenizer()
    batches = PairBatches(
        Corpus({"train": pairs}, None, None), (made, made), tokens=300, longest=200, seed=1
    )
    assert len(batches.store) == len(pairs) and isinstance(batches.store, Store)
