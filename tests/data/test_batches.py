"""Every example once an epoch, little padding, and the same batch whenever it is asked for."""

import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.data.batches import IndexBatches, Shuffled, pad
from regard.data.store import (
    ImageStore,
    Store,
    build_image_store,
    build_store,
    store_key,
    tokenised,
)
from regard.data.tokenize import train_tokenizer
from regard.errors import UsageError
from tests.steps import count_steps

DATA = Path(os.environ.get("REGARD_DATA", "../shared/data"))


def lengths(count=2000, seed=0):
    chance = np.random.default_rng(seed)
    target = chance.poisson(14, count) + 2
    return [np.maximum(target + chance.integers(-4, 5, count), 1), target]


def epoch_rows(batches, epoch):
    size = batches.len_epoch(epoch)
    return [batches[n] for n in range(epoch * size, (epoch + 1) * size)]


def padding(columns, rows):
    padded = sum(len(row) * int(column[row].max()) for row in rows for column in columns)
    return 1 - sum(int(column.sum()) for column in columns) / padded


def kept_company(first, second):
    """Share of the pairs of examples in one batch of the first epoch that meet in the second."""
    place = np.concatenate([np.full(len(row), i) for i, row in enumerate(second)])
    batch_of = place[np.argsort(np.concatenate(second))]
    again = sum(int((np.bincount(batch_of[row]) ** 2).sum()) for row in first)
    return again / sum(len(row) ** 2 for row in first)


def test_any_order_of_asking_gives_the_same_batches():
    columns = lengths()
    first = IndexBatches(columns, 500, seed=7)
    total = 6 * first.len_epoch()
    forward = [first[n].tolist() for n in range(total)]
    second = IndexBatches(columns, 500, seed=7)
    order = np.random.default_rng(1).permutation(total)
    assert all(second[int(n)].tolist() == forward[n] for n in order[:300])
    far = 10**7
    assert first[far].tolist() == second[far].tolist()


def test_epochs_and_seeds_differ_in_order_and_company():
    columns = lengths()
    one, other = IndexBatches(columns, 500, seed=1), IndexBatches(columns, 500, seed=2)
    assert [one[n].tolist() for n in range(9)] != [other[n].tolist() for n in range(9)]
    assert kept_company(epoch_rows(one, 0), epoch_rows(one, 1)) < 0.6
    assert kept_company(epoch_rows(one, 0), epoch_rows(other, 0)) < 0.6


shapes = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 60)),
    min_size=1,
    max_size=150,
)


@settings(max_examples=150, deadline=None)
@given(shapes, st.integers(1, 300), st.integers(-5, 2**70), st.none() | st.integers(1, 9))
def test_once_an_epoch_and_within_the_budget(shape, tokens, seed, max_rows):
    columns = [np.array(column) for column in zip(*shape, strict=True)]
    batches = IndexBatches(columns, tokens, seed, max_rows)
    for epoch in range(4):
        rows = epoch_rows(batches, epoch)
        assert sorted(np.concatenate(rows).tolist()) == list(range(len(shape)))
        for row in rows:
            widest = max(int(column[row].max()) for column in columns)
            assert len(row) == 1 or len(row) * widest <= tokens
            assert len(row) <= (max_rows or len(row))


def test_shuffled_examples_come_in_another_order_in_each_epoch_and_by_each_seed():
    orders = {tuple(Shuffled(10, 10, seed)[epoch]) for seed in (3, 4) for epoch in range(5)}
    assert len(orders) == 10


def test_a_plan_takes_steps_for_batches_not_for_examples():
    batches = IndexBatches(lengths(29_000), 1500, seed=1)
    for n in range(0, 3 * batches.len_epoch(), batches.len_epoch()):
        steps = count_steps(partial(batches.__getitem__, n))
        assert steps < 29_000 and steps < 60 * batches.len_epoch()


def test_what_batches_refuse():
    columns = lengths(10)
    for wrong in ([], [np.array([])], [columns[0], columns[1][:5]]):
        with pytest.raises(UsageError):
            IndexBatches(wrong, 100, 1)
    with pytest.raises(UsageError, match="batch_tokens=0"):
        IndexBatches(columns, 0, 1)
    with pytest.raises(UsageError, match="rows"):
        IndexBatches(columns, 10, 1, max_rows=0)
    with pytest.raises(IndexError):
        IndexBatches(columns, 100, 1)[-1]


@pytest.mark.parametrize("tokens", [4096, 1500])
def test_little_padding_on_multi30k(tokens, multi30k):
    batches = IndexBatches(multi30k, tokens, seed=1)
    epochs = [epoch_rows(batches, epoch) for epoch in range(5)]
    for rows in epochs:
        assert padding(multi30k, rows) < 0.07
        assert max(padding([column], rows) for column in multi30k) < 0.1
        widest = np.maximum(*multi30k)
        assert sum(len(row) * int(widest[row].max()) for row in rows) > 0.93 * tokens * len(rows)
    assert kept_company(epochs[0], epochs[1]) < 0.5


@pytest.fixture(scope="module")
def multi30k():
    if not (DATA / "multi30k" / "train.de").exists():
        pytest.skip(f"no {DATA / 'multi30k'}; set REGARD_DATA to the folder of data")
    sides = []
    for language in ("en", "de"):
        path = DATA / "multi30k" / f"train.{language}"
        sides.append(path.read_text(encoding="utf-8").rstrip("\n").split("\n"))
    tokenizer = train_tokenizer(sides[0] + sides[1], vocab=8000)
    return [np.array([len(ids) + 1 for ids in tokenizer.encode_batch(side)]) for side in sides]


def test_padding_fills_up_on_the_right():
    table, sizes = pad([np.array([5, 6], dtype=np.uint16), np.array([7]), np.array([], int)], 0)
    assert table.tolist() == [[5, 6], [7, 0], [0, 0]]
    assert sizes.tolist() == [2, 1, 0]
    assert table.dtype == sizes.dtype == torch.long
    assert pad([], 0)[0].shape == (0, 0)


@pytest.mark.parametrize("most", [9, 65535, 65536, 10**6])
def test_a_store_gives_its_rows_back(tmp_path, most):
    rows = [([1, 2, 3], [most]), ([], [4, 5]), ([6], [])]
    built = build_store(tmp_path / "store", iter(rows))
    for store in (built, Store.open(tmp_path / "store")):
        assert len(store) == len(store[0]) == 3
        assert [(store[0][i].tolist(), store[1][i].tolist()) for i in range(3)] == rows
        assert store.lengths(0).tolist() == [3, 0, 1]
        assert store[1].ids.dtype == (np.uint16 if most < 2**16 else np.int32)
        with pytest.raises(IndexError):
            store[0][3]
        with pytest.raises(IndexError):
            store[0][-1]


def test_a_store_of_an_empty_column_opens(tmp_path):
    assert build_store(tmp_path, [([], [1]), ([], [2])])[0][1].tolist() == []


def test_a_store_is_rebuilt_in_place(tmp_path):
    build_store(tmp_path, [([1, 2],), ([3],)])
    assert build_store(tmp_path, [([4],)])[0][0].tolist() == [4]
    assert not list(tmp_path.glob(".*"))


def test_what_a_store_refuses(tmp_path):
    with pytest.raises(UsageError, match="no examples"):
        build_store(tmp_path / "a", [])
    with pytest.raises(UsageError, match="row 2 has 1 columns"):
        build_store(tmp_path / "b", [([1], [2]), ([1],)])
    with pytest.raises(UsageError, match="no such file"):
        Store.open(tmp_path / "none")


@pytest.mark.parametrize(
    "name, data",
    [
        ("store.json", b"{"),
        ("store.json", b"[1]"),
        ("store.json", b'{"format": 2}'),
        ("store.json", b'{"format": 1, "columns": 10000000000, "rows": 2}'),
        ("store.json", b'{"format": 1, "columns": 1, "rows": "many"}'),
        ("store.json", b'{"format": 1, "columns": 1, "rows": 1}'),
        ("0.ids.npy", b""),
        ("0.ids.npy", b"nonsense"),
        ("0.offsets.npy", b"\x93NUMPY\x01\x00"),
    ],
)
def test_a_broken_store_is_refused(tmp_path, name, data):
    build_store(tmp_path, [([1, 2],), ([3],)])
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UsageError, match="a broken store"):
        Store.open(tmp_path)


def test_truncated_ids_and_wild_offsets_are_refused(tmp_path):
    build_store(tmp_path, [([1, 2, 3, 4],), ([3],)])
    ids = tmp_path / "0.ids.npy"
    whole = ids.read_bytes()
    ids.write_bytes(whole[:-2])
    with pytest.raises(UsageError, match="broken store"):
        Store.open(tmp_path)
    ids.write_bytes(whole)
    np.save(tmp_path / "0.offsets.npy", np.array([0, 10**12, 5]))
    with pytest.raises(UsageError, match="offsets"):
        Store.open(tmp_path)


def test_opening_a_store_sweeps_what_a_killed_builder_left(tmp_path):
    """Of several ranks that built it at once, one was killed and another finished."""
    build_store(tmp_path, [([1],)])
    (tmp_path / ".0.ids.npy.9-abc.tmp").write_bytes(b"half")
    assert Store.open(tmp_path)[0][0].tolist() == [1]
    assert not [*tmp_path.glob(".*")]


@pytest.mark.parametrize("kind", ["store", "table"])
def test_whatever_bit_is_flipped_the_rows_are_those_of_the_data(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path))
    images, draw = np.arange(24, dtype=np.uint8).reshape(4, 2, 3), random.Random(1)
    folder, made = tmp_path / "images", []

    def rows():
        made.append(1)
        return [([1, 2], [3]), ([4], [5, 6])]

    def read() -> list:
        if kind == "store":
            store = tokenised(rows, "data")
            return [store[column][row].tolist() for column in (0, 1) for row in (0, 1)]
        try:
            table = ImageStore.open(folder, images.shape)
        except UsageError:
            made.append(1)
            table = build_image_store(folder, images.shape, [images[0], "gone", *images[2:]])
        return [table.rows.tolist(), table.gaps, table.why]

    whole = read()
    paths = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    for path in 8 * paths:
        data = bytearray(path.read_bytes())
        place = draw.randrange(8 * len(data))
        data[place // 8] ^= 1 << place % 8
        path.write_bytes(data)
        before = len(made)
        assert read() == whole and len(made) == before + 1, (path, place)
    assert read() == whole and len(made) == 8 * len(paths) + 1


def _build(folder: Path, kind: str) -> None:
    rows = [([1, 2, 3], [70000]), ([], [4, 5]), ([6], [])]
    image = np.arange(24, dtype=np.uint8).reshape(4, 2, 3)
    for _ in range(150):
        if kind == "table":
            try:
                table = ImageStore.open(folder, (4, 2, 3))
            except UsageError:
                table = build_image_store(folder, (4, 2, 3), [image[0], "gone", *image[2:]])
            assert table.gaps == [1] and np.array_equal(table.rows[2:], image[2:])
            continue
        try:
            store = Store.open(folder)
        except UsageError:
            store = build_store(folder, iter(rows))
        assert [(store[0][i].tolist(), store[1][i].tolist()) for i in range(3)] == rows


def _delete(folder: Path) -> None:
    while True:
        shutil.rmtree(folder.parent, ignore_errors=True)
        time.sleep(0.001)


@pytest.mark.parametrize("kind", ["store", "table"])
def test_processes_share_a_cache_that_is_filled_and_deleted(tmp_path, kind):
    fork, folder = multiprocessing.get_context("fork"), tmp_path / "stores" / "key"
    builders = [fork.Process(target=_build, args=(folder, kind)) for _ in range(3)]
    deleter = fork.Process(target=_delete, args=(folder,), daemon=True)
    for one in (deleter, *builders):
        one.start()
    for one in builders:
        one.join()
    deleter.kill()
    assert [one.exitcode for one in builders] == [0, 0, 0]


def test_a_missing_image_is_no_deleted_cache(tmp_path):
    def rows():
        yield np.zeros((2, 3), np.uint8)
        try:
            (tmp_path / "missing").read_bytes()
        except OSError as error:
            raise UsageError("missing: no such file") from error

    with pytest.raises(UsageError, match="missing"):
        build_image_store(tmp_path / "t", (2, 2, 3), rows())


SMALL = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=1m none "$0" && exec "$@"']


@pytest.mark.skipif(
    not shutil.which("unshare") or subprocess.run([*SMALL, "/mnt", "true"]).returncode != 0,
    reason="no right to mount a small disk here",
)
def test_a_full_disk_is_told_and_ends_no_process(tmp_path):
    """The room of a table is taken before it is filled."""
    program = f"""
import numpy as np
from regard.data.store import build_image_store as build
build({str(tmp_path / "t")!r}, (100, 3, 100, 100), [np.ones((3, 100, 100), np.uint8)] * 100)
"""
    words = [*SMALL, str(tmp_path), sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 1 and "rows.npy: no space left on device" in done.stderr, done.stderr


def test_keys_tell_all_they_depend_on():
    keys = {store_key("a", "b"), store_key("ab", ""), store_key("a", "b", 1), store_key("a")}
    assert len(keys) == 4
    assert store_key("a", 1) == store_key("a", 1)


def test_rows_are_encoded_only_where_no_store_is_there(tmp_path, monkeypatch):
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path))
    made = []

    def rows():
        made.append(1)
        return [([1, 2], [3]), ([4], [5, 6])]

    first, again = tokenised(rows, "data", "tokenizer", 8), tokenised(rows, "data", "tokenizer", 8)
    assert len(made) == 1 and len(first) == len(again) == 2
    assert all(np.array_equal(first[c].ids, again[c].ids) for c in (0, 1))
    tokenised(rows, "data", "tokenizer", 9)
    assert len(made) == 2, "another key is another store"
