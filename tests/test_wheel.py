"""The wheel brings its kernels along: they are on where there is no compiler, and agree.

Building takes a minute, so this runs only with REGARD_SLOW=1.
"""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from ast import literal_eval
from pathlib import Path

import pytest
import torch

import regard
from regard import native
from regard.native import build, ready

ROOT = Path(__file__).resolve().parent.parent
pytestmark = [
    pytest.mark.skipif(os.environ.get("REGARD_SLOW") != "1", reason="slow; set REGARD_SLOW=1"),
    pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="x86-64"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no compiler"),
]
LINES = ["How are you?", "Where is the station?", "I like green tea.", "He went home early."]
PROGRAM = """
import shutil, regard
from regard import native
assert "site-packages" in regard.__file__, regard.__file__
assert shutil.which("gcc") is None and shutil.which("cc") is None
assert native.library() is None and native.plain() is not None, native.status()
print(native.status())
print(regard.doctor("en-zh").search or "natively")
for line in {lines!r}:
    print(regard.load("en-zh").run(line), regard.load("en-zh").run(line, quantise="int8"))
writer = regard.load({writer!r})
with native.fast(writer.model, frozen=True):
    print(writer.model.continue_texts([[5, 6, 7], [8]], [6, 9]))
print(regard.doctor({writer!r}).search or "natively")
print([str(one) for one in writer.run({lines!r}, temperature=0, max_length=12)])
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    words = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    if done.returncode and "hatchling" in done.stderr:
        pytest.skip("hatchling cannot be had here")
    assert done.returncode == 0, done.stderr
    (made,) = folder.glob("*.whl")
    return made


def test_the_wheel_has_a_library_for_each_level_and_its_tag(wheel: Path):
    assert "-py3-none-manylinux_2_" in wheel.name and wheel.name.endswith("_x86_64.whl")
    with zipfile.ZipFile(wheel) as inside:
        found = [info for info in inside.infolist() if info.filename.endswith(".so")]
    assert {Path(info.filename).name for info in found} == {
        f"x86_64-{level}.so" for level in ready.LEVELS["x86_64"]
    }
    assert sum(info.file_size for info in found) < 1.2e6


def test_kernels_are_on_where_the_wheel_is_installed_without_a_compiler(wheel: Path, tmp_path):
    home = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    (packages,) = home.glob("lib/python*/site-packages")
    # everything but regard itself comes from where the tests run
    (packages / "others.pth").write_text(sysconfig.get_paths()["purelib"])
    with zipfile.ZipFile(wheel) as inside:
        inside.extractall(packages)
    env = {
        "PATH": str(home / "bin"),
        "REGARD_CACHE": str(tmp_path / "cache"),
        "HOME": str(tmp_path),
    }
    writer = tmp_path / "writer"
    data = tmp_path / "text.txt"
    data.write_text("".join(f"{n} {line}\n" for n in range(50) for line in LINES))
    words = {"like": "llama", "width": 32, "depth": 2, "heads": 4, "pieces": 1100, "context": 64}
    regard.train("language", data=data, out=str(writer), steps=5, quiet=True, **words)
    program = PROGRAM.format(lines=LINES, writer=str(writer))
    done = subprocess.run(
        [home / "bin" / "python", "-c", program],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    told, how, *texts, continued, how_written, written = done.stdout.splitlines()
    assert told.startswith("C kernels: on for decoding and filters") and how == "natively"
    model = regard.load("en-zh")
    assert texts == [f"{model.run(x)} {model.run(x, quantise='int8')}" for x in LINES]
    model = regard.load(writer)
    with native.fast(model.model, frozen=True):
        wanted = model.model.continue_texts([[5, 6, 7], [8]], [6, 9])
    for (ids, steps), (tokens, likely) in zip(literal_eval(continued), wanted, strict=True):
        assert ids == tokens and steps == pytest.approx(likely, abs=1e-5)
    assert how_written == "natively"
    texts = [str(one) for one in model.run(LINES, temperature=0, max_length=12)]
    assert literal_eval(written) == texts


def test_int8_has_the_same_bits_with_and_without_vnni(tmp_path, monkeypatch):
    found = {}
    for library in ready.build("gcc", tmp_path / "ready"):
        if not ready._works(library, "", None):
            continue
        made = build._typed(ready.load(library), build.PLAIN_KERNELS)
        monkeypatch.setattr(native, "plain", lambda made=made: made)
        model = regard.load("en-zh")
        answers = model.run(LINES, quantise="int8", n_best=3, scores=True)
        engine = model.predictor.decoder.engine
        assert engine.library is made and engine.dtype == torch.int8
        writer = regard.load("shakespeare")
        told = {"quantise": "int8", "max_length": 30, "scores": True}
        answers += [writer.run("ROMEO:", temperature=t, **told) for t in (0.0, 0.8)]
        found[library.name] = answers
    v4 = found.get("x86_64-v4.so")
    assert found.get("x86_64-v4-vnni.so", v4) == v4
    # AVX2 multiplies and adds in another order
    for one, other in zip(found["x86_64-v3.so"], v4 or found["x86_64-v3.so"], strict=True):
        assert str(one) == str(other)
        assert one.score == pytest.approx(other.score, abs=1e-5)


def test_a_library_that_fails_its_trial_is_not_used(tmp_path, monkeypatch):
    (tmp_path / "x86_64-v3.so").write_bytes(b"no library")
    assert ready.chosen(tmp_path) is None
    source, made = tmp_path / "wrong.c", tmp_path / "x86_64-v4.so"
    source.write_text("long regard_try(void) { __builtin_trap(); return 1; }")
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(made)], check=True)
    assert not ready._works(made, "", None)
