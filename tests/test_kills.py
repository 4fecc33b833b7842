"""A kill at any moment leaves nothing that is wrong, and nothing that stays."""

import multiprocessing
from pathlib import Path

import pytest

from regard.files import making, replacing, write_atomically

fork = multiprocessing.get_context("fork")


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
