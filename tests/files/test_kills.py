"""A kill at any moment leaves nothing that is wrong, and nothing that stays."""

import importlib
import multiprocessing
import resource
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from regard.files import making, replacing, write_atomically
from regard.native import build
from regard.training import fit
from tests.native.test_native import compiler, copying, needs

fork = multiprocessing.get_context("fork")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
kills = importlib.import_module("kills")


def _write(path: Path, way, pipe) -> None:
    with way(path) as temporary:
        (temporary if way is replacing else temporary / "part").write_bytes(b"new")
        pipe.send("written")
        pipe.recv()


def _begin(path: Path, way):
    ours, theirs = fork.Pipe()
    writer = fork.Process(target=_write, args=(path, way, theirs), daemon=True)
    writer.start()
    theirs.close()
    assert ours.poll(60) and ours.recv() == "written"
    return writer, ours


@pytest.mark.parametrize("way", [replacing, making])
def test_what_is_half_written_stays_only_until_the_next_write(tmp_path: Path, way):
    (killed, _), (living, go_on) = _begin(tmp_path / "there", way), _begin(tmp_path / "there", way)
    assert len(list(tmp_path.iterdir())) == 2
    killed.kill()
    killed.join()
    assert len(list(tmp_path.iterdir())) == 2
    last, _ = _begin(tmp_path / "there", way)
    assert len(list(tmp_path.iterdir())) == 2, "that of the dead is gone, that of the living is not"
    go_on.send("on")
    living.join(60)
    assert living.exitcode == 0 and (tmp_path / "there").exists()
    last.kill()


def test_the_next_write_sweeps(tmp_path: Path):
    for stale in (".part.json.9-abc.tmp", ".part.json.9.tmp"):
        (tmp_path / stale).write_bytes(b"half")
    (tmp_path / ".other.json.9-abc.tmp").write_bytes(b"half")
    write_atomically(tmp_path / "part.json", b"{}")
    assert {path.name for path in tmp_path.iterdir()} == {"part.json", ".other.json.9-abc.tmp"}


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("kills")
    kills.make_home(home)
    return home


@pytest.mark.parametrize("verb", kills.VERBS)
def test_a_verb_that_was_killed_is_given_again(verb, home, tmp_path, monkeypatch):
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("REGARD_NATIVE", "0")
    moments = [1, 9] if verb in ("train", "dictionary") else [1]
    done, fault = kills.survives(lambda out: kills.words_of(verb, home, out), tmp_path, moments)
    assert not fault and done == len(moments)
    assert not kills.leftovers(tmp_path)


@needs
def test_compiling_that_was_killed_is_begun_anew(tmp_path: Path, monkeypatch):
    for name, value in compiler(tmp_path / "own", copying()).items():
        monkeypatch.setenv(name, value)
    cache = tmp_path / "own" / "cache"

    def compile_and_end() -> int:
        return 0 if build.built().exists() else 1

    nth = 0
    for nth in range(20):
        code = kills.killed(compile_and_end, nth)
        if code == 0:
            break
        assert code is None
        made = build.built()
        assert [path for path in cache.iterdir() if path.suffix != ".lock"] == [made]
        assert build._intact(made.with_name(made.stem.rpartition("-")[0])) == made
        made.unlink()
    assert nth > 4


# Disks that are full, and folders that are gone


@contextmanager
def small_files(most: int):
    """Let no file grow over so many bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("verb", ["export", "import", "dictionary", "train"])
def test_a_full_disk_is_told_in_one_line(verb, home, tmp_path, capsys):
    words = kills.words_of(verb, home, tmp_path / "out")
    with small_files(12_000):
        assert kills.command([*words, "--quiet"]) == 2
    told = capsys.readouterr().err
    assert f"{tmp_path / 'out'}" in told and told.endswith("file too large\n")
    assert told.count("\n") == 1 and not kills.leftovers(tmp_path)


def test_a_folder_that_is_deleted_while_it_trains(home, tmp_path, monkeypatch, capsys):
    out, step = tmp_path / "out", fit.one_step

    def deleting(model, task, settings, optimiser, n, lr):
        if n == 2:
            shutil.rmtree(out)
        return step(model, task, settings, optimiser, n, lr)

    monkeypatch.setattr(fit, "one_step", deleting)
    assert kills.command([*kills.words_of("train", home, out), "--quiet"]) == 2
    told = capsys.readouterr().err
    assert (
        told == f"regard: {out}: was deleted while training; give the command again to begin anew\n"
    )
    assert not out.exists()
