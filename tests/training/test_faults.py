"""A training of several processes ends, goes on or is named as lost as a whole."""

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from regard.files import sha256
from regard.training.launch import adopt_slurm
from tests.training.test_distributed import ROOT, free_port

sys.path.insert(0, str(ROOT / "bench"))
hosts = importlib.import_module("hosts")

STEPS = 100
SETTINGS = {"width": 16, "heads": 2, "depth": 1, "ffn_width": 32, "batch_tokens": 64, "threads": 1}
SETTINGS |= {"valid_every": 50, "save_every": 0.1, "tokenizer": "characters", "log": "none"}


@pytest.fixture(scope="module")
def play(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("faults") / "play.txt"
    path.write_text("To be, or not to be, that is the question.\n" * 60)
    return path


def words(play: Path, out: Path, **more: Any) -> list[str]:
    given = {"data": play, "out": out, "steps": STEPS, **SETTINGS, **more}
    return ["-m", "regard", "train", "language", *(f"{k}={v}" for k, v in given.items())]


def begin(before: list[str], command: list[str], **env: str) -> subprocess.Popen[str]:
    """Start a command in a session of its own."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *before, *command], env=env, **pipes)


def workers(out: Path) -> dict[int, int]:
    """Process ids by rank of what trains in a folder."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            given = (path / "cmdline").read_bytes()
            env = (path / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        own = [int(one[5:]) for one in env if one.startswith(b"RANK=")]
        if f"out={out}".encode() in given and own and b"torch.distributed.run" not in given:
            found[own[0]] = int(path.name)
    return found


def wait_for_step(out: Path, step: int) -> dict[int, int]:
    """Wait until a run has saved itself after a step, and return its workers."""
    for _ in range(6000):
        saved = [int(path.name[5:]) for path in (out / "checkpoints").glob("step-*")]
        if max(saved, default=0) >= step:
            return workers(out)
        time.sleep(0.02)
    raise AssertionError("it does not train")


def is_gone(pids: dict[int, int], within: float) -> bool:
    for _ in range(int(within / 0.05)):
        states = [Path(f"/proc/{pid}/stat") for pid in pids.values()]
        if not any(path.exists() and ") Z " not in path.read_text() for path in states):
            return True
        time.sleep(0.05)
    return False


def losses(out: Path) -> list[float]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.fixture(scope="module")
def whole(play) -> Path:
    """Return a run of two processes that nothing disturbed."""
    out = play.parent / "whole"
    process = begin([], words(play, out, processes=2))
    told = process.communicate(timeout=120)
    assert process.returncode == 0, told
    return out


def test_a_group_of_which_one_is_killed_goes_on_to_the_same_bits(play, whole, tmp_path):
    out = tmp_path / "out"
    process = begin([], words(play, out, processes=2, restarts=2))
    seen: set[int] = set()
    for step, rank in ((3, 1), (20, 0)):
        while (pids := wait_for_step(out, step)).get(rank) in {None, *seen}:
            time.sleep(0.02)  # those of the attempt before are ending
        seen |= {*pids.values()}
        os.kill(pids[rank], signal.SIGKILL)
        assert is_gone(pids, 20), "the others wait for the one that was killed"
    told, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert f"finished after {STEPS} steps" in told
    assert "started again, 0 more times" in errors and "rank 0 was ended by SIGKILL" in errors
    assert losses(out) == losses(whole)
    assert sha256(out / "model.safetensors") == sha256(whole / "model.safetensors")


def test_an_error_of_use_is_not_repeated(play, tmp_path):
    process = begin([], words(play, tmp_path / "out", processes=2, restarts=3, heads=3))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2 and "started again" not in errors
    assert errors.count("regard:") == 1 and "Traceback" not in errors


def test_batches_that_processes_cannot_share_are_refused_before_they_start(play, tmp_path):
    process = begin([], words(play, tmp_path / "out", processes=3, batches=4))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2 and "batches=4, which 3 processes cannot share" in errors
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("start", ["processes", "torchrun"])
def test_no_process_outlives_its_launcher(play, tmp_path, start):
    out, torchrun = tmp_path / "out", ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    given = {"processes": 2} if start == "processes" else {}
    process = begin(torchrun if start == "torchrun" else [], words(play, out, steps=9999, **given))
    pids = wait_for_step(out, 2)
    assert sorted(pids) == [0, 1]
    process.kill()
    process.communicate()
    assert is_gone(pids, 5)


def test_a_launcher_that_is_asked_to_stop_has_saved(play, tmp_path):
    out = tmp_path / "out"
    process = begin([], words(play, out, steps=9999, processes=2, save_every=9999))
    for _ in range(3000):
        if not (out / "metrics.jsonl").exists():
            time.sleep(0.02)
    pids = workers(out)
    process.send_signal(signal.SIGTERM)
    told, errors = process.communicate(timeout=60)
    assert process.returncode == 143 and "stopped and saved at step" in told, errors
    assert any((out / "checkpoints").glob("step-*")) and is_gone(pids, 1)
    assert "closing signal" not in errors  # torch's launcher keeps silent


def test_a_rank_that_is_stopped_is_named_and_the_run_goes_on(play, whole, tmp_path):
    out = tmp_path / "out"
    process = begin(
        [], words(play, out, processes=2, timeout=2), TORCH_ELASTIC_SHUTDOWN_TIMEOUT="1"
    )
    pids = wait_for_step(out, 3)
    os.kill(pids[0], signal.SIGSTOP)
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 1, errors
    assert "rank 1 ends: rank 0 on " in errors and "silent for 2 s" in errors
    assert is_gone(pids, 1)
    process = begin([], words(play, out, processes=2))
    told, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert sha256(out / "model.safetensors") == sha256(whole / "model.safetensors")


def test_tasks_of_srun_find_each_other(play, whole, tmp_path):
    out = tmp_path / "out"
    slurm = {"SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_NODES": "1", "SLURM_NTASKS": "2"}
    slurm |= {"SLURM_JOB_ID": "7", "MASTER_PORT": str(free_port())}
    tasks = [
        begin([], words(play, out), **slurm, SLURM_PROCID=str(n), SLURM_LOCALID=str(n))
        for n in range(2)
    ]
    told = [task.communicate(timeout=120) for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], told
    assert sha256(out / "model.safetensors") == sha256(whole / "model.safetensors")
    assert json.loads((out / "recipe.json").read_text())["world_size"] == 2


@pytest.mark.parametrize(
    "nodes, first",
    [("n7", "n7"), ("gpu[03-05,9],x1", "gpu03"), ("a,b", "a"), ("r1-n[2,4].net", "r1-n2.net")],
)
def test_the_first_host_of_a_slurm_list_is_the_meeting_place(monkeypatch, nodes, first):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in {
        "STEP_NODELIST": nodes,
        "NTASKS": "4",
        "PROCID": "3",
        "LOCALID": "1",
    }.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    adopt_slurm()
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("3", "4")
    assert os.environ["MASTER_ADDR"] == first and "LOCAL_WORLD_SIZE" not in os.environ


def test_a_script_of_sbatch_is_no_task(monkeypatch):
    for name, value in {"NTASKS": "4", "PROCID": "0", "LOCALID": "0", "JOB_ID": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.delenv("SLURM_STEP_NODELIST", raising=False)
    adopt_slurm()
    assert "WORLD_SIZE" not in os.environ


def test_a_group_that_was_stopped_as_a_whole_goes_on(play, whole, tmp_path):
    """As by `scontrol suspend` or Ctrl-Z: each ended, since all others had been silent."""
    out = tmp_path / "out"
    process = begin([], words(play, out, processes=2, timeout=4))
    pids = wait_for_step(out, 3)
    for number, pause in ((signal.SIGSTOP, 8), (signal.SIGCONT, 0)):
        for pid in pids.values():
            os.kill(pid, number)
        time.sleep(pause)
    told = process.communicate(timeout=120)
    assert process.returncode == 0, told
    assert sha256(out / "model.safetensors") == sha256(whole / "model.safetensors")


@pytest.mark.skipif(bool(why := hosts.reason()), reason=why or "there can be hosts here")
def test_a_host_that_is_cut_off_is_named_by_both_and_two_hosts_give_the_bits_of_one(
    play, whole, tmp_path
):
    out = tmp_path / "out"
    with hosts.hosts() as made:
        assert max(hosts.cut_off(made, words(play, out), out, 3)) < 33
        assert hosts.trained(made, words(play, out), out) == sha256(whole / "model.safetensors")


def test_a_signal_to_one_process_stops_and_saves_all(play, tmp_path):
    """As when one pod of a Job is evicted."""
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    out = tmp_path / "out"
    ranks = [begin([], words(play, out, steps=9999), **env, RANK=str(rank)) for rank in range(2)]
    wait_for_step(out, 2)
    ranks[1].send_signal(signal.SIGTERM)
    told = [rank.communicate(timeout=60) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [143, 143], told
    assert "stopped and saved at step" in told[0][0] and any((out / "checkpoints").glob("step-*"))


def test_hosts_that_share_no_folder_are_refused_when_they_resume(play, whole, tmp_path):
    """Rank 1 began anew beside a rank 0 that went on, and their gradients were added up."""
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    stale = shutil.ignore_patterns("checkpoints")
    outs = [shutil.copytree(whole, tmp_path / "0"), tmp_path / "1"]
    shutil.copytree(whole, outs[1], ignore=stale)
    ranks = [
        begin([], words(play, out, steps=STEPS), **env, RANK=str(rank), LOCAL_WORLD_SIZE="2")
        for rank, out in enumerate(outs)
    ]
    told = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert ranks[1].returncode == 2 and ranks[0].returncode, told
    assert "rank 1 finds step 0 here, rank 0 step 100; give an out= that all" in told[1]


@pytest.mark.parametrize("share", [0, 1])
def test_groups_that_are_killed_anywhere_come_to_the_same_bits(share, tmp_path):
    """Thirty kills each: 6 tasks, ddp and fsdp, 1 to 4 ranks, inside saves, restarts, stores."""
    path = tmp_path / "rows"
    cases = f"range({share}, 68, 2), pathlib.Path({str(path)!r}), 'few'"
    code = f"import sys, pathlib, kill_groups as k; sys.exit(k.run({cases}))"
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'bench'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 34 and sum(row["kills"] for row in rows) >= 30
