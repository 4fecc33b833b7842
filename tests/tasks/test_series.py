"""Anything is tokens: chunks of arrays of any rank, and series of numbers from files to labels."""

import io
import json
import os
import random
import zipfile
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import regard
from regard.cli import main
from regard.data.augment import step_rng
from regard.data.series import SeriesFormat, SeriesSet, load_series, stack
from regard.data.series_augment import SERIES_AUGMENTS, SeriesAugment, resample
from regard.data.series_files import (
    COLUMN_ROLES,
    SeriesColumns,
    SeriesOptions,
    _array,
    holds_series,
    read_recordings,
    recording,
)
from regard.errors import UsageError
from regard.examine.files import examine_files
from regard.layers.block import BlockConfig
from regard.layers.chunks import Chunks, chunk_at
from regard.layers.patches import Patches, grid_at
from regard.modalities.series import SERIES
from regard.models.series import SeriesConfig, SeriesEncoder
from regard.models.vit import ViT, ViTConfig
from tests.zoo import TS_HEAD as HEAD
from tests.zoo import write_waves

BLOCK = BlockConfig(24, 2, 32, feed_forward="gelu", dropout=0.0)


def build(**changes) -> SeriesEncoder:
    """Return a small model whose weights are large enough that differences would show."""
    torch.manual_seed(0)
    small = {"labels": 5, "channels": 3, "chunk": (4,), "depth": 2, "block": BLOCK}
    model = SeriesEncoder(SeriesConfig(**{**small, **changes})).eval()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return model


# ---- chunks


def convolution(axes: int):
    return {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[axes]


@pytest.mark.parametrize(
    ("chunk", "stride", "padding", "shape"),
    [
        ((4,), None, 0, (13,)),
        ((5,), 2, 1, (13,)),
        ((2, 3), None, 0, (7, 9)),
        ((3, 3), 1, 1, (5, 4)),
        ((2, 2, 3), None, 0, (4, 5, 7)),
        ((2, 3, 2), (1, 2, 2), (1, 0, 1), (4, 5, 7)),
    ],
)
def test_chunks_are_a_convolution_of_any_rank(chunk, stride, padding, shape):
    torch.manual_seed(0)
    part = Chunks(3, 10, chunk, stride=stride, padding=padding).double()
    x = torch.randn(2, 3, *shape, dtype=torch.float64)
    weight = part.project.weight.view(10, 3, *chunk)
    right = convolution(len(chunk))(x, weight, part.project.bias, part.stride, padding)
    assert part.grid(shape) == tuple(right.shape[2:])
    torch.testing.assert_close(part(x), right.flatten(2).mT)
    torch.testing.assert_close(part._product(x), right.movedim(1, -1))  # what any rank can do


def test_chunks_of_four_axes_equal_a_loop():
    part = Chunks(2, 6, (2, 1, 2, 2), partial=True).double()
    x = torch.randn(1, 2, 3, 2, 4, 5, dtype=torch.float64)
    full, tokens = F.pad(x, (0, 1, 0, 0, 0, 0, 0, 1)), part(x)
    places = chunk_at(part.grid(x.shape[2:]))
    assert tokens.shape == (1, 2 * 2 * 2 * 3, 6) and len(places) == tokens.shape[1]
    for token, (a, b, c, d) in zip(tokens[0], places.tolist(), strict=True):
        piece = full[0, :, 2 * a : 2 * a + 2, b : b + 1, 2 * c : 2 * c + 2, 2 * d : 2 * d + 2]
        torch.testing.assert_close(token, part.project(piece.flatten()))


def test_patches_of_an_image_are_chunks_with_the_same_weights():
    torch.manual_seed(0)
    vit = ViT(ViTConfig(labels=3, image=12, patch=4, depth=1, block=BLOCK))
    chunks = Chunks(3, 24, (4, 4))
    chunks.load_state_dict(vit.stem.state_dict())
    images = torch.randn(2, 3, 14, 12)
    assert isinstance(vit.stem, Patches) and torch.equal(chunks(images), vit.stem(images))
    assert torch.equal(chunk_at((3, 3)), grid_at(3, 3))
    assert chunk_at((2, 2, 2)).tolist()[:3] == [[0, 0, 0], [0, 0, 1], [0, 1, 0]]


def test_a_series_model_on_images_equals_vit_with_the_same_weights():
    torch.manual_seed(0)
    parts = {"labels": 3, "channels": 3, "depth": 2, "block": BLOCK}
    same = {**parts, "position": "sinusoidal", "pool": "mean"}
    vit = ViT(ViTConfig(image=12, patch=4, tokens=0, **same)).eval()
    series = SeriesEncoder(SeriesConfig(chunk=(4, 4), **same)).eval()
    weights = {k.replace("stem.", "chunks."): v for k, v in vit.state_dict().items()}
    weights = {k.replace("head.", "head.out."): v for k, v in weights.items()}
    series.load_state_dict(weights)
    images = torch.randn(2, 3, 12, 8)
    torch.testing.assert_close(series(images.movedim(1, -1)), vit(images))


def test_what_is_no_array_of_these_chunks_is_refused():
    for made, told in (
        (lambda: Chunks(1, 4, ()), "expected a length for each axis"),
        (lambda: Chunks(1, 4, (2, 2), stride=(1,)), "one for each axis"),
        (lambda: Chunks(1, 4, (2,), stride=3), "1 to the chunk's"),
        (lambda: Chunks(1, 4, (2,))(torch.zeros(1, 2, 8)), "with 1 channels"),
        (lambda: Chunks(1, 4, (9,))(torch.zeros(1, 1, 8)), "smaller than a chunk"),
        (lambda: build(chunk=(2, 2), position="alibi"), "unknown position"),
        (lambda: build(chunk=(2,) * 5), "10 divides"),
    ):
        with pytest.raises(UsageError, match=told):
            made()


# ---- padding and neighbours


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"chunk": (3,), "stride": (2,), "position": "rotary", "pool": "attention"},
        {"chunk": (1,), "position": "alibi", "pool": "max"},
        {"chunk": (5,), "position": "learned"},
        {"chunk": (2, 3), "pool": "convolution"},
    ],
    ids=lambda changes: str(list(changes.values())),
)
def test_padding_and_neighbours_never_matter(changes):
    model, axes = build(**changes), len(changes.get("chunk", (4,)))
    rest = (7,) * (axes - 1)
    rand = torch.Generator().manual_seed(1)
    for turn in range(20):
        lengths = torch.randint(1, 14, (4,), generator=rand)
        lengths[turn % 4] = 14
        x = torch.randn(4, 14, *rest, 3, generator=rand)
        out = model(x, lengths)
        for i, n in enumerate(lengths.tolist()):
            other = torch.randn(x.shape, generator=rand) * 1e3
            for row, m in zip(other, lengths.tolist(), strict=True):
                row[m:] = (torch.nan, torch.inf, 1e30)[turn % 3]
            other[i, :n] = x[i, :n]
            assert torch.equal(model(other, lengths)[i], out[i])  # to the last bit
            torch.testing.assert_close(model(x[i : i + 1, :n])[0], out[i], atol=1e-5, rtol=1e-5)


def test_padding_never_matters_to_a_gradient():
    model, lengths = build(pool="attention"), torch.tensor([5, 9])
    x = torch.randn(2, 9, 3)
    grads = []
    for filler in (0.0, torch.nan):
        model.zero_grad()
        x[0, 5:] = filler
        model(x, lengths).square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    for (name, _), one, other in zip(model.named_parameters(), *grads, strict=True):
        assert torch.equal(one, other) and one.abs().max() > 0, name


def test_a_series_is_the_same_in_longer_batches():
    model = build(channels=2)
    x = torch.randn(1, 6, 2)
    long = F.pad(x, (0, 0, 0, 50), value=7.0)
    torch.testing.assert_close(model(long, torch.tensor([6])), model(x), atol=1e-5, rtol=1e-5)


# ---- files


def values(path: Path, **options) -> dict[str, list]:
    found = read_recordings(path, SeriesOptions(**options), [])
    return {f"{one.label} {n}": one.values.tolist() for n, one in enumerate(found)}


TS = HEAD + "@classLabel true a b\n@data\n1,2,3:4,5,?:a\n% a remark\n7:8:b\n"
EXPECTED = {"a 0": [[1, 4], [2, 5], [3, None]], "b 1": [[7, 8]]}


def as_table(found: dict) -> dict:
    return {k: [[None if x != x else x for x in step] for step in v] for k, v in found.items()}


def write_npz(path: Path, **arrays) -> Path:
    np.savez(path, **arrays)
    return path


def test_all_files_hold_the_same_series(tmp_path):
    (tmp_path / "a.ts").write_text(TS)
    x = np.array([[[1, 4], [2, 5], [3, np.nan]], [[7, 8], [9, 9], [9, 9]]])
    write_npz(tmp_path / "b.npz", x=x, y=np.array(["a", "b"]), lengths=np.array([3, 1]))
    long = "case,time,label,left,right\n0,10,a,2,5\n1,1,b,7,8\n0,9,a,1,4\n0,11,a,3,\n"
    (tmp_path / "c.csv").write_text(long)
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "one.csv").write_text("time,left,right\n0,1,4\n1,2,5\n2,3,?\n")
    np.save(tmp_path / "d" / "two.npy", np.array([[7, 8]]))
    (tmp_path / "d.tsv").write_text("path\tlabel\nd/one.csv\ta\nd/two.npy\tb\n")
    rows = [{"series": [[1, 4], [2, 5], [3, None]], "label": "a"}]
    rows += [{"series": [[7, 8]], "label": "b"}]
    (tmp_path / "e.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("a.ts", "b.npz", "c.csv", "d.tsv", "e.jsonl"):
        assert as_table(values(tmp_path / name)) == EXPECTED, name
        assert holds_series(tmp_path / name), name


def test_a_row_is_a_series_with_its_label_first_or_by_name(tmp_path):
    (tmp_path / "a.tsv").write_text("2\t0.5\t1\t-3e1\n1\t1\t2\t3\n")
    (tmp_path / "b.csv").write_text("t0,t1,t2,class\n0.5,1,-30,2\n1,2,,1\n")
    assert values(tmp_path / "a.tsv") == {"2 0": [[0.5], [1], [-30]], "1 1": [[1], [2], [3]]}
    assert values(tmp_path / "b.csv") == {"2 0": [[0.5], [1], [-30]], "1 1": [[1], [2]]}
    (tmp_path / "c.csv").write_text("a,b,c,kind\n1,2,3,x\n4,5,6,y\n")
    assert values(tmp_path / "c.csv", columns="kind") == values(tmp_path / "c.csv", columns="4")


WORDS = sorted(
    {word for words in COLUMN_ROLES.values() for word in words} - {"id", "time", "label"}
)


@pytest.mark.parametrize("names", [["x", "y"], ["x", "y", "z"], WORDS], ids=str)
def test_what_a_channel_is_called_never_matters(names, tmp_path):
    rows = np.round(np.random.default_rng(0).normal(size=(6, len(names))), 3)

    def table(names: list[str]) -> tuple[dict, str]:
        lines = [",".join(["id", "time", *names, "label"])]
        for n, row in enumerate(rows):
            lines.append(",".join(map(str, [n // 3, n % 3, *row, "ab"[n // 3]])))
        (tmp_path / "a.csv").write_text("\n".join(lines) + "\n")
        notes: list[str] = []
        found = read_recordings(tmp_path / "a.csv", SeriesOptions(), notes)
        return {one.label: one.values.tolist() for one in found}, notes[0]

    found, told = table(names)
    assert found == table([f"c{n}" for n in range(len(names))])[0]
    assert np.allclose(found["a"] + found["b"], rows)
    assert "id is id, time is time, label is label" in told and f"channels are {names[0]}" in told


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("id,time,x,y\n0,0,1,1\n0,1,2,1\n", "no label; .* columns="),  # y is a channel
        ("a,b,c,d\n1,2,3,4\n5,6,7,8\n", "is the label\\? Name it with columns="),
        ("time,x,y,label\n0,1,2,a\n1,3,4,a\n", "time but no id"),  # its rows are steps
    ],
)
def test_what_may_mean_something_else_is_asked(text, told, tmp_path):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(UsageError, match=told):
        read_recordings(tmp_path / "a.csv", SeriesOptions(), [])


def test_columns_are_found_by_name_in_whatever_order(tmp_path):
    lines = ['{"label": "a", "series": [1, 2]}\n', '{"series": [3], "label": "b"}\n']
    (tmp_path / "a.jsonl").write_text("".join(lines))
    assert values(tmp_path / "a.jsonl") == {"a 0": [[1], [2]], "b 1": [[3]]}
    (tmp_path / "one.csv").write_text("t,left,right\n0,1,4\n")
    (tmp_path / "two.csv").write_text("right,left,t\n8,7,0\n")
    (tmp_path / "set.tsv").write_text("path\tlabel\none.csv\ta\ntwo.csv\tb\n")
    assert values(tmp_path / "set.tsv") == {"a 0": [[1, 4]], "b 1": [[7, 8]]}


def test_arrays_of_any_rank_are_read(tmp_path):
    x = np.arange(48).reshape(2, 4, 3, 2)
    found = values(write_npz(tmp_path / "a.npz", x=x, y=np.array([3, 4])))
    assert found == {"3 0": x[0].tolist(), "4 1": x[1].tolist()}
    assert values(write_npz(tmp_path / "b.npz", x=x[:, :, 0, 0]), labelled=False) == {
        f" {n}": x[n, :, 0, :1].tolist() for n in range(2)
    }


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def zipped(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in members.items():
            file.writestr(name + ".npy", data)
    return path


HOSTILE: dict[str, tuple[bytes | str, str]] = {
    "empty.ts": ("", "no @data"),
    "data.ts": (HEAD + "@data\n", "no series"),
    "times.ts": (TS.replace("@timeStamps false", "@timeStamps True"), "@timeStamps true"),
    "brackets.ts": (HEAD + "@classLabel true a\n@data\n(0,1),(1,2):a\n", "times in brackets"),
    "target.ts": (HEAD + "@targetLabel true\n@data\n1,2:0.5\n", "@targetLabel"),
    "unlabelled.ts": (HEAD + "@classLabel false\n@data\n1,2\n", "no label"),
    "label.ts": (TS.replace(":b\n", ":c\n"), "'c' is not in @classLabel"),
    "uneven.ts": (TS.replace("4,5,?", "4,5"), "dimensions of 2 and 3 values"),
    "channels.ts": (TS.replace("7:8:b", "7:b"), "only the first axis may differ"),
    "letters.ts": (TS.replace("1,2,3", "1,two,3"), "'two' is not a number"),
    "infinite.ts": (TS.replace("1,2,3", "1,inf,3"), "an infinite number"),
    "large.ts": (TS.replace("1,2,3", "1,1e300,3"), "an infinite number"),
    "binary.ts": (b"\x93\x00\xff\xfe" * 9, "not UTF-8"),
    "early.ts": ("1,2,3:a\n", "before @data"),
    "text.npz": ("hello", "no NPZ"),
    "text.npy": ("hello", "no array that can be read"),
    "words.csv": ("text,label\nhello,a\nthere,b\n", "no table of series"),
    "torn.csv": ("id,time,label,x\n1,0,a,3\n1,1,b,3\n", "unlike the first step"),
    "twice.csv": ("id,time,label,x\n1,0,a,3\n1,0,a,3\n", "is there twice"),
    "letters.csv": ("a,1,2,3\n" * 30 + "b,1,x,3\n", "'x' is not a number"),
    "outside.csv": ("path,label\n../outside.csv,a\n", "lies outside"),
    "absolute.csv": ("path,label\n/etc/hosts.csv,a\n", "lies outside"),
    "absent.csv": ("path,label\nnothing.csv,a\n", "no such file"),
    "lists.jsonl": ('{"series": [[1, 2], [3]], "label": "a"}\n', "no array of numbers"),
    "deep.jsonl": (
        '{"series": ' + "[" * 40 + "1" + "]" * 40 + ', "label": "a"}\n',
        "no array of numbers|expected .steps",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_in_one_line(name, tmp_path, capsys):
    content, told = HOSTILE[name]
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError, match=told):
        read_recordings(tmp_path / name, SeriesOptions(), [])
    out = tmp_path / "run"
    assert main(["train", "series", f"data={tmp_path / name}", f"out={out}"]) == 2
    assert capsys.readouterr().err.count("\n") == 1 and not out.exists()


def test_arrays_that_lie_or_hold_objects_are_refused(tmp_path):
    good, path = npy(np.zeros((2, 3, 1))), tmp_path / "a.npz"
    labels = npy(np.array([0, 1]))
    bomb = npy(np.zeros(1)).replace(b"(1,)", b"(99999999999,)")
    for members, told in (
        ({"x": npy(np.array([{}, []], dtype=object)), "y": labels}, "expected numbers"),
        ({"x": good, "y": npy(np.array(["a", None], dtype=object))}, "expected numbers"),
        ({"x": good.replace(b"(2, 3, 1)", b"(9, 9, 9)"), "y": labels}, "promised in"),
        ({"x": good.replace(b"(2, 3, 1)", b"(-2,3, 1)"), "y": labels}, "expected|no array"),
        ({"x": bomb, "y": labels}, "no array|promised"),
        ({"x": good[:-9], "y": labels}, "promised in"),
        ({"y": labels}, "no array x"),
        ({"x": good, "y": npy(np.zeros(3))}, "and n labels"),
        ({"x": npy(np.zeros(4)), "y": labels}, "expected numbers"),
        ({"x": good, "y": labels, "lengths": npy(np.array([1, 4]))}, "expected 1 to 3"),
        ({"x": good, "y": labels, "lengths": npy(np.array([1.0, 2.0]))}, "lengths are"),
    ):
        with pytest.raises(UsageError, match=told):
            read_recordings(zipped(path, **members), SeriesOptions(), [])
    data = zipped(path, x=good, y=labels).read_bytes()
    for cut in range(0, len(data), 37):
        path.write_bytes(data[:cut])
        with pytest.raises(UsageError):
            read_recordings(path, SeriesOptions(), [])


def test_noise_in_files_is_read_or_refused(tmp_path):
    rng, whole = np.random.default_rng(0), TS.encode()
    data = {".ts": whole, ".csv": b"id,time,label,x\n1,0,a,3\n1,1,a,3\n2,0,b,3\n"}
    data[".npz"] = zipped(tmp_path / "a.npz", x=npy(np.zeros((2, 3, 1)))).read_bytes()
    for suffix, whole in data.items():
        for turn in range(60):
            noisy = bytearray(whole)
            for place in rng.integers(0, len(whole), 1 + turn % 4):
                noisy[place] = rng.integers(0, 256)
            (path := tmp_path / f"noisy{suffix}").write_bytes(noisy)
            try:
                read_recordings(path, SeriesOptions(labelled=False), [])
            except UsageError as error:
                assert "\n" not in str(error)


# ---- parts, normalisation, augmentation


def test_parts_are_split_by_hash_evenly_and_stay_when_rows_are_added(tmp_path):
    data = load_series(str(write_waves(tmp_path / "train.ts", 60)), valid="0.25")
    train, valid = data.parts["train"], data.parts["valid"]
    assert len(train) + len(valid) == 60 and abs(int((valid.labels == 0).sum()) - 7) <= 1
    assert any("split off train by hash" in note for note in data.notes)
    path = tmp_path / "more.ts"
    lines = (tmp_path / "train.ts").read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:7], *reversed(lines[7:])]))
    again = load_series(str(path), valid="0.25")
    assert {i.source for i in again.parts["valid"].items} == {i.source for i in valid.items}


def test_channels_are_normalised_by_train_and_what_is_missing_is_the_mean():
    rng = np.random.default_rng(0)
    arrays = [rng.normal((3, -7), (2, 0.1), (n, 2)) for n in (40, 90)]
    arrays[0][3, 0] = np.nan
    items = [recording(x, "a", str(n)) for n, x in enumerate(arrays)]
    format = SeriesFormat.of(SeriesSet(items), SeriesColumns("ts"))
    flat = np.concatenate(arrays)
    assert np.allclose(format.mean, np.nanmean(flat, 0), rtol=1e-4)
    assert np.allclose(format.std, np.nanstd(flat, 0), rtol=1e-4)
    made = [format.take(item.values) for item in items]
    assert made[0][3, 0] == 0 and torch.cat(made).std() == pytest.approx(1, rel=0.05)
    with pytest.raises(UsageError, match="expected .steps, 2 channels"):
        format.take(np.zeros((4, 3)))
    constant = SeriesFormat.of(
        SeriesSet([recording(np.full((9, 1), 5.0), "a", "")]), SeriesColumns("ts")
    )
    assert constant.take(np.full((3, 1), 5.0)).tolist() == [[0], [0], [0]]


def test_augmentation_is_a_function_of_seed_and_step_and_never_sees_padding():
    names = "+".join(SERIES_AUGMENTS)
    augment = SeriesAugment(names, 3, mixup=0.4, smoothing=0.1)
    x, lengths = stack([torch.randn(n, 2) for n in (9, 4, 12, 7)])
    labels = torch.tensor([0, 1, 2, 1])
    one, again = (augment(x, lengths, labels, step_rng(3, 5)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    assert not torch.equal(one[0], augment(x, lengths, labels, step_rng(3, 6))[0])
    torch.testing.assert_close(one[2].sum(1), torch.ones(4))
    noisy = x.clone()
    noisy[1, 4:] = 1e6
    for name in SERIES_AUGMENTS:
        alone = SeriesAugment(name, 3)
        a, b = (alone(y, lengths, labels, step_rng(1, 1)) for y in (x, noisy))
        assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]), name
        assert a[1].min() >= 1 and a[1].max() <= a[0].shape[1]
        for row, n in zip(a[0], a[1].tolist(), strict=True):
            assert not row[n:].any(), name
        arrays = alone(torch.randn(4, 12, 5, 2), lengths, labels, step_rng(1, 1))
        assert arrays[0].shape[2:] == (5, 2) and arrays[0].isfinite().all()


def test_what_is_drawn_of_a_series_does_not_depend_on_how_far_it_is_padded():
    x, lengths = stack([torch.randn(n, 2) for n in (9, 4, 12, 7)])
    wider = F.pad(x, (0, 0, 0, 50))
    for name, n in product(("scale", "mask", "stretch", "warp"), range(20)):
        alone = SERIES_AUGMENTS[name]
        a, b = (alone(y, lengths, step_rng(1, n), 1.0) for y in (x, wider))
        assert torch.equal(a[1], b[1])
        for row, other, size in zip(a[0], b[0], a[1].tolist(), strict=True):
            assert torch.equal(row[:size], other[:size]), name


def test_a_mixed_series_is_as_long_as_the_longer_of_both():
    x, lengths = stack([torch.randn(n, 2) for n in (9, 4, 12, 7)])
    mixed, sizes, _ = SeriesAugment("none", 3, mixup=0.4)(
        x, lengths, torch.tensor([0, 1, 2, 1]), step_rng(1, 1)
    )
    assert sizes.tolist() == [9, 9, 12, 12]
    for row, size in zip(mixed, sizes.tolist(), strict=True):
        assert row[:size].any(1).all() and not row[size:].any()


def test_resampling_is_linear_interpolation():
    x, lengths = torch.tensor([[[0.0], [2.0], [4.0], [99.0]]]), torch.tensor([3])
    found = resample(x, lengths, torch.tensor([[0.0, 0.5, 1.75, 2.0, 9.0]]))
    assert found.flatten().tolist() == [0.0, 1.0, 3.5, 4.0, 4.0]


# ---- the task


@pytest.fixture(scope="module")
def run(zoo) -> Path:
    """A model of waves, by way of classify, which finds that the data are series."""
    return zoo.model("series")


@pytest.fixture(scope="module")
def waves(zoo) -> Path:
    return zoo.data("series")


def test_it_learns_and_is_judged_beside_its_baselines(run, waves):
    assert json.loads((run / "config.json").read_text())["task"] == "series"
    told = regard.evaluate(run, data=waves)
    assert told["accuracy"] >= 95
    assert set(told.baselines) == {"the commonest label", "a linear model of means and kernels"}
    assert told.baselines["the commonest label"]["accuracy"] < 90


def test_it_runs_files_rows_and_arrays(run, waves, tmp_path, capsys):
    model = regard.load(run, task="series")
    path = waves / "test.ts"
    assert main(["run", str(run), str(path)]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 40 and lines[2][0] == f"{path}:9"
    found = SERIES.recordings(path)
    together = model.run(found)
    for (where, label, _), one, answer in zip(lines, found, together, strict=True):
        assert where == one.where and label == answer.label
    alone = model.run(found[2].values)
    assert alone.label == together[2].label == model.run(f"{path}:9").label
    assert np.allclose(alone.probabilities, together[2].probabilities, atol=1e-5)
    np.savetxt(tmp_path / "one.csv", found[2].values, delimiter=",")
    assert np.allclose(model.run(tmp_path / "one.csv").probabilities, alone.probabilities)
    row = json.dumps({"series": found[2].values.tolist(), "name": "two"})
    (tmp_path / "rows.jsonl").write_text(row + "\n")
    assert main(["run", str(run), str(tmp_path / "rows.jsonl"), "--quiet"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["prediction"] == alone.label and told["name"] == "two"
    for given, why in (
        (path, "40 series; name one of them"),
        (f"{path}:3", "0 series; name one"),
        ("nothing.ts", "no such file"),
        (np.zeros((3, 5)), "2 channels"),
        ([["a"]], "no series"),
    ):
        with pytest.raises(UsageError, match=why):
            model.run([given])


def test_attention_is_shown_over_chunks_of_steps(run, waves):
    model = regard.load(run)
    picture = model.picture(f"{waves / 'test.ts'}:9")
    steps = len(SERIES.recordings(waves / "test.ts")[2].values)
    view = picture.views[0]
    assert view.row_tokens[0] == "0-3" and len(view.row_tokens) == -(-steps // 4)
    assert view.row_tokens[-1].split("-")[-1] == str(steps - 1)
    chunks = Chunks(1, 4, (4, 2), stride=(2, 2), partial=True)
    assert chunks.names((5, 3)) == ["0-3,0-1", "0-3,2", "2-4,0-1", "2-4,2"]


def test_arrays_in_memory_of_any_rank_are_trained_on(tmp_path):
    rng = np.random.default_rng(0)
    rows = [{"x": rng.normal(n % 2, 0.3, (6, 6, 1)), "y": n % 2} for n in range(40)]
    small = {"depth": 1, "width": 16, "heads": 2, "steps": 30, "lr": 0.01, "quiet": True}
    regard.train("series", data=rows, valid=0.2, out=tmp_path / "run", **small)
    model = regard.load(tmp_path / "run")
    assert model.model.config.chunk == (1, 1) and model.format.axes == 2
    assert [model.run(row["x"]).label for row in rows[:6]] == ["0", "1"] * 3


@pytest.fixture(scope="module")
def sensors(tmp_path_factory) -> Path:
    """Train on a table of steps, of which only the channel x tells the label."""
    home = tmp_path_factory.mktemp("sensors")
    rng = np.random.default_rng(0)
    lines = ["id,time,x,y,label"]
    for n in range(40):
        for t in range(8):
            lines.append(
                f"{n},{t},{2 * (n % 2) + rng.normal(0, 0.3):.3f},{rng.normal():.3f},k{n % 2}"
            )
    (home / "sensors.csv").write_text("\n".join(lines) + "\n")
    words = ["train", "series", f"data={home / 'sensors.csv'}", f"out={home / 'run'}", "steps=60"]
    words += ["linear=false"]  # constant series are far from what a linear model has seen
    assert main([*words, "lr=0.01", "depth=1", "width=16", "heads=2", "--quiet"]) == 0
    return home / "run"


def test_a_model_remembers_the_columns_of_its_table(sensors, tmp_path, capsys):
    values = {"k0": (0, 1), "k1": (2, -1)}  # x tells, whatever y says
    steps = {key: [f"{t},{x},{y}" for t in range(8)] for key, (x, y) in values.items()}
    for key, rows in steps.items():
        turned = [",".join(row.split(",")[::-1]) for row in rows]
        for header, lines in (("time,x,y", rows), ("y,x,time", turned), ("Y,X,z", turned)):
            monday = tmp_path / "monday.csv"
            monday.write_text("\n".join([header, *lines]) + "\n")
            assert main(["run", str(sensors), str(monday)]) == 0
            assert capsys.readouterr().out.split("\t")[0] == key, header
    assert main(["look", str(sensors), str(monday), f"out={tmp_path / 'a.html'}"]) == 0
    both = [f"{key},{row}" for key, rows in steps.items() for row in rows]
    (tmp_path / "two.csv").write_text("\n".join(["case,when,x,y", *both]) + "\n")
    assert main(["run", str(sensors), str(tmp_path / "two.csv"), "columns=case,when,case"]) == 0
    told = [line.split("\t")[1] for line in capsys.readouterr().out.splitlines()[-2:]]
    assert told == ["k0", "k1"]
    (tmp_path / "other.csv").write_text("time,a,b\n0,1,2\n")
    assert main(["run", str(sensors), str(tmp_path / "other.csv")]) == 2
    assert "no column 'x'" in capsys.readouterr().err


def test_the_doctor_tells_how_a_table_is_read(sensors, tmp_path):
    told = regard.doctor(sensors.parent / "sensors.csv")
    assert told.task == "series" and told.report.parts["train"].channels == 2
    assert "channels are x, y" in str(told)
    (tmp_path / "a.csv").write_text(
        "kind,a,b,c\n" + "".join(f"{n % 2},1,2,{n}\n" for n in range(9))
    )
    assert regard.doctor(tmp_path / "a.csv", columns="kind").task == "series"


def test_texts_and_images_stay_where_they_were(tmp_path):
    (tmp_path / "texts.csv").write_text("text,label\nhello,a\nthere,b\n")
    (tmp_path / "numbers.csv").write_text("3,a\n4,b\n")
    assert not holds_series(tmp_path / "texts.csv") and not holds_series(tmp_path / "numbers.csv")
    assert not holds_series(tmp_path) and not holds_series(tmp_path / "nothing.ts")
    (tmp_path / "train.ts").write_text(TS)
    assert holds_series(tmp_path)


# ---- the archives' own sets


def archive(name: str) -> Path:
    folder = Path(os.environ.get("REGARD_SERIES", Path("..") / "scratch/series/data")) / name
    if not folder.is_dir():
        pytest.skip(f"no {folder}; set REGARD_SERIES to the data folder of aeon")
    return folder


@pytest.mark.parametrize(("name", "rows", "channels"), [("JapaneseVowels", (270, 370), 12)])
def test_an_archive_is_read_as_it_says(name, rows, channels):
    for part, number in zip(("TRAIN", "TEST"), rows, strict=True):
        path = archive(name) / f"{name}_{part}.ts"
        found = read_recordings(path, SeriesOptions(), [])
        assert len(found) == number and {one.values.shape[1] for one in found} == {channels}
        assert {one.label for one in found} == set("123456789")


def test_a_damaged_header_is_told_in_one_line():
    draw, kinds = random.Random(1), set()
    for version in ((1, 0), (2, 0), (3, 0)):
        stream = io.BytesIO()
        np.lib.format.write_array(stream, np.arange(12.0).reshape(3, 4), version=version)
        for _ in range(400):
            data = bytearray(stream.getvalue())
            place = draw.randrange(130)
            data[place] = draw.choice([data[place] ^ 1 << draw.randrange(8), *b"'(){}[],:# "])
            try:
                kinds.add(type(_array(bytes(data), "x.npy")))
            except UsageError as mistake:
                kinds.add(UsageError)
                assert str(mistake).startswith("x.npy: ")
    assert kinds == {np.ndarray, UsageError}


def test_the_doctor_finds_planted_faults(tmp_path):
    (tmp_path / "set").mkdir()
    lines = write_waves(tmp_path / "set" / "train.ts", 60).read_text().splitlines(keepends=True)
    write_waves(tmp_path / "set" / "test.ts", 40)
    data = str(tmp_path / "set")
    assert not {f.kind for f in examine_files(data, SERIES).findings} - {"no_valid"}
    torn = lines[6].replace("slow", "fast")
    gap = lines[7].replace(lines[7].split(",")[3], "?")
    (tmp_path / "set" / "train.ts").write_text("".join([*lines, lines[6], torn, gap]))
    with open(tmp_path / "set" / "test.ts", "a") as file:
        file.write(lines[8])
    found = examine_files(data, SERIES)
    kinds = {finding.kind for finding in found.findings}
    assert {"duplicate_series", "torn_label", "missing", "leak_series"} <= kinds and found.healthy
    (tmp_path / "set" / "test.ts").write_text(TS)
    kinds = {finding.kind: finding for finding in examine_files(data, SERIES).findings}
    assert "unknown_label" in kinds and kinds["unknown_label"].where.endswith("test.ts:7")
    told = regard.doctor(str(tmp_path / "set" / "train.ts"))
    assert told.task == "series" and told.forecast is not None and told.forecast.a_second > 0
