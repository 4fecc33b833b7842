"""A published folder names the hash of what it is loaded from, and a flipped bit is noticed."""

import json
import os
import random
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

import regard
from regard.api import starters
from regard.data.documents import Texts
from regard.errors import UsageError
from regard.files import hashes, sha256, write_atomically
from regard.files.hashes import SUMS, seal, verify

SETTINGS = {"steps": 4, "valid_every": 2, "width": 16, "heads": 2, "depth": 1, "ffn_width": 32}


def train(place: Path, **more) -> regard.api.Any:
    data, out = str(place / "a.txt"), str(place / "out")
    return regard.train("language", quiet=True, data=data, out=out, **SETTINGS, **more)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("trained")
    (place / "a.txt").write_text("to be or not to be that is the question\n" * 100)
    train(place)
    return place


@pytest.fixture
def place(trained, tmp_path) -> Path:
    shutil.copytree(trained, tmp_path / "copy")
    recipe = tmp_path / "copy" / "out" / "recipe.json"
    recipe.write_text(recipe.read_text().replace(str(trained), str(tmp_path / "copy")))
    return tmp_path / "copy"


def parts(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def flip(path: Path, bit: int) -> bytes:
    data = bytearray(path.read_bytes())
    whole = bytes(data)
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    return whole


def test_every_flipped_bit_is_noticed(place):
    out, draw = place / "out", random.Random(1)
    regard.load(out)
    names = ["model.safetensors"] * 150 + ["tokenizer.json", "config.json"] * 50
    for name in [*names, *["generation_config.json", SUMS] * 20]:
        path = out / name
        whole = flip(path, draw.randrange(8 * path.stat().st_size))
        with pytest.raises(UsageError) as found:
            regard.load(out)
        assert f"{out / name}" in str(found.value) or name == SUMS
        path.write_bytes(whole)
    regard.load(out)


def test_what_is_told(place):
    out = place / "out"
    flip(out / "model.safetensors", 8 * (out / "model.safetensors").stat().st_size - 3)
    with pytest.raises(UsageError) as found:
        regard.load(out)
    told = str(found.value)
    assert told.startswith(f"{out / 'model.safetensors'}: damaged, or not as it was published")
    assert "give its regard train command again to publish it again from its checkpoint" in told
    shutil.rmtree(out / "checkpoints")
    with pytest.raises(UsageError, match="copy it again from where it came"):
        regard.load(out)


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="there is no sha256sum")
def test_the_usual_tool_reads_it(place):
    out = place / "out"
    done = subprocess.run(
        ["sha256sum", "--strict", "-c", SUMS], cwd=out, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def test_what_people_may_change(place):
    out = place / "out"
    (out / "README.md").write_text("mine")
    (out / "notes.txt").write_text("mine")
    regard.load(out)
    generation = json.loads((out / "generation_config.json").read_text())
    (out / "generation_config.json").write_text(json.dumps({**generation, "top_k": 7}))
    with pytest.raises(UsageError, match="changed on purpose, delete its line in SHA256SUMS"):
        regard.load(out)
    lines = (out / SUMS).read_text().splitlines(keepends=True)
    (out / SUMS).write_text("".join(line for line in lines if "generation" not in line))
    assert regard.load(out).config["generation"]["top_k"] == 7
    (out / SUMS).unlink()  # an older folder
    regard.load(out)


def test_the_same_command_publishes_again(place, capsys):
    out = place / "out"
    before = parts(out)
    for name in ("model.safetensors", "tokenizer.json", "generation_config.json", "config.json"):
        flip(out / name, 8 * len(before[name]) - 30)
    train(place)
    after = parts(out)
    assert {name: after[name] for name in before if name != "metrics.jsonl"} == {
        name: data for name, data in before.items() if name != "metrics.jsonl"
    }
    assert {name for name in after if name not in before} == {
        f"{name}.damaged" for name in (*hashes_of(out), "SHA256SUMS") if name != SUMS
    }
    regard.load(out)
    (out / "model.safetensors").unlink()
    train(place)
    assert (out / "model.safetensors").read_bytes() == before["model.safetensors"]
    for nonsense in ("nonsense\n", ""):
        (out / SUMS).write_text(nonsense)
        told = f"SHA256SUMS:1: {nonsense.strip()!r} is not a SHA-256 hash and a name"
        with pytest.raises(UsageError, match=told):
            regard.load(out)
        train(place)
        assert (out / SUMS).read_bytes() == before[SUMS]


def hashes_of(folder: Path) -> list[str]:
    return list(hashes.listed(folder))


def test_an_average_is_published_again(place):
    shutil.rmtree(place / "out")
    train(place, average=2)
    out = place / "out"
    before = (out / "model.safetensors").read_bytes()
    last = max((out / "checkpoints").glob("step-*"), key=lambda p: int(p.name[5:]))
    counters = json.loads((last / "counters.json").read_text())
    assert counters["averaged"] and counters["published"]
    flip(out / "model.safetensors", 8 * len(before) - 1)
    train(place, average=2)
    assert (out / "model.safetensors").read_bytes() == before


def test_without_a_checkpoint_it_says_so(place):
    out = place / "out"
    shutil.rmtree(out / "checkpoints" / "step-2")
    last = out / "checkpoints" / "step-4"
    counters = json.loads((last / "counters.json").read_text())
    (last / "counters.json").write_text(json.dumps({**counters, "published": [2]}))
    manifest = json.loads((last / "manifest.json").read_text())
    manifest["counters.json"] = sha256(last / "counters.json")
    (last / "manifest.json").write_text(json.dumps(manifest))
    train(place)  # nothing is lost yet
    (out / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="damaged or missing, so its weights cannot be published"):
        train(place)


def test_a_tokenizer_of_other_data_is_no_remedy(place, monkeypatch):
    from regard.tasks.text import language

    learn, other = language.learn_tokenizer, Texts({"train": ["other"]}, running=False)
    monkeypatch.setattr(language, "learn_tokenizer", lambda texts, how: learn(other, how))
    flip(place / "out" / "tokenizer.json", 99)
    with pytest.raises(UsageError, match="tokenizer.json: was damaged and cannot be made again"):
        train(place)


@pytest.mark.parametrize("name", sorted(starters()))
def test_the_starters_are_as_they_were_made(name, tmp_path):
    folder = starters()[name]
    before = (folder / SUMS).read_bytes()
    shutil.copytree(folder, tmp_path / name)
    seal(tmp_path / name)
    assert (tmp_path / name / SUMS).read_bytes() == before
    assert "install Regard again" in hashes.remedy(folder)
    weights = tmp_path / name / "model.safetensors"
    flip(weights, 8 * weights.stat().st_size // 2)
    with pytest.raises(UsageError, match="model.safetensors: damaged"):
        regard.load(tmp_path / name)


def test_a_model_published_again_while_it_is_read_is_read_again(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    seal(tmp_path)
    real, once = hashes.damaged, []

    def meanwhile(folder, names):
        if not once:
            once.append(1)
            (tmp_path / "config.json").write_text('{"new": 1}')
            found = real(folder, names)
            seal(tmp_path)
            return found
        return real(folder, names)

    monkeypatch.setattr(hashes, "damaged", meanwhile)
    verify(tmp_path)
    assert once


def test_hostile_lists(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    zeros = "0" * 64
    for text in (f"{zeros}  ../config.json\n", f"{zeros} a.json\n", "\0\n", "x" * 10**6 + "\n"):
        (tmp_path / SUMS).write_text(text)
        with pytest.raises(UsageError, match="SHA256SUMS:1"):
            verify(tmp_path)
    (tmp_path / SUMS).write_text("".join(f"{zeros}  {n}\n" for n in range(10**4)))
    with pytest.raises(UsageError, match="SHA256SUMS:1001"):
        verify(tmp_path)
    os.mkfifo(tmp_path / "pipe.json")
    os.truncate(os.open(tmp_path / "huge.json", os.O_CREAT | os.O_WRONLY), 2**40)
    (tmp_path / SUMS).write_text(f"{zeros}  pipe.json\n")
    with pytest.raises(UsageError, match="pipe.json: damaged"):
        verify(tmp_path)
    (tmp_path / SUMS).write_text(f"{zeros}  huge.json\n")
    with pytest.raises(UsageError, match="over 1024 MB"):
        verify(tmp_path)


def test_a_running_model_is_never_found_damaged_while_another_is_published(tmp_path):
    """Whoever loads a folder while a training publishes into it sees one of the two."""
    from regard.files.hashes import unseal

    (tmp_path / "model.safetensors").write_bytes(b"0" * 10**5)
    (tmp_path / "config.json").write_text("{}")
    seal(tmp_path)
    stop = threading.Event()

    def publish() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            unseal(tmp_path)
            write_atomically(tmp_path / "model.safetensors", str(number).encode() * 10**5)
            seal(tmp_path)

    writer = threading.Thread(target=publish)
    writer.start()
    try:
        for _ in range(300):
            verify(tmp_path, "model.safetensors")
            verify(tmp_path)
    finally:
        stop.set()
        writer.join()
