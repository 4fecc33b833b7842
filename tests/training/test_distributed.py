"""Processes that train together add up their gradients wherever they run."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from regard.training.optim import build_optimiser
from regard.training.step import LoopSettings, one_step

ROOT = Path(__file__).resolve().parents[2]
NUMBERS = 1_500_000  # of float32, with two rows and a sum 18 MB
ADD_UP = f"""
import os, resource, sys
if sys.argv[1] != "none":
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
import torch
from regard.training import distributed
with distributed.joined():
    own = [torch.full(({NUMBERS},), 1.0 + distributed.rank()), torch.tensor([0.5])]
    for _ in range(2):
        sums, long = distributed.all_reduce_grads(own)
        assert float(sums[0].min()) == float(sums[0].max()) == 3.0 and float(sums[1]) == 1.0
        assert abs(long - (9 * {NUMBERS} + 1) ** 0.5) < 1e-2, long
    assert distributed.all_reduce(2.0, 1.0 + distributed.rank()) == [4.0, 3.0]
    boards = [board for board in distributed._SHARED.values()]
    print("shared" if all(boards) else "sockets" if not any(boards) else "both")
"""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def together(words: list[str], before: list[str], count: int = 2) -> list[str]:
    """Run the same words as processes that know each other, and return what they say."""
    port = str(free_port())
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    env |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "PYTHONPATH": str(ROOT)}
    children = [
        subprocess.Popen(
            [*before, sys.executable, *words],
            env={**env, "RANK": str(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(count)
    ]
    told = [child.communicate(timeout=120) for child in children]
    assert [child.returncode for child in children] == [0] * count, told
    return [out.strip() for out, _ in told]


UNUSED = """
import torch
from torch import nn
from regard.training import distributed
from regard.training.optim import build_optimiser
from regard.training.step import LoopSettings, one_step
from tests.training.test_distributed import Halves
with distributed.joined():
    model, task = nn.ParameterList(torch.ones(3) for _ in range(3)), Halves()
    optimiser = build_optimiser(model, lr=0.1)
    for n in range(2):
        one_step(model, task, LoopSettings(batches=2), optimiser, n, 0.1)
    print([p.tolist() for p in model])
"""


class Halves:
    """Of three parameters, even batches use the first, odd ones the second, none the third."""

    def batch(self, n):
        return n

    def count(self, batch):
        return 1, 1

    def loss(self, model, batch):
        return (model[batch % 2] ** 2).sum()


def test_a_rank_without_a_gradient_counts_as_zero():
    """It had no place in the sum, so that others were added up in its stead."""
    told = together(["-c", UNUSED], [])
    model, task = torch.nn.ParameterList(torch.ones(3) for _ in range(3)), Halves()
    optimiser = build_optimiser(model, lr=0.1)
    for n in range(2):
        one_step(model, task, LoopSettings(batches=2), optimiser, n, 0.1)  # type: ignore[arg-type]
    assert told == [str([p.tolist() for p in model])] * 2
    assert model[0][0] < 0.9 and model[2].tolist() == [1.0] * 3


def test_no_thread_of_a_group_is_left_when_python_ends():
    """One that was in a call of the store then aborted a process whose work was done."""
    told = "import threading; from regard.training.distributed import joined\n"
    told += (
        "with joined(timeout=6): print(threading.active_count())\nprint(threading.active_count())"
    )
    assert together(["-c", told], []) == ["3\n1", "3\n1"]


@pytest.mark.parametrize("most,way", [("none", "shared"), (str(2**20), "both")])
def test_sums_are_right_with_shared_memory_and_without(most, way):
    """A limit on the size of files lets the room for the gradients be refused."""
    assert together(["-c", ADD_UP, most], []) == [way, way]


def small_shm() -> list[str]:
    """Return the words before a command that give it 1 MB of /dev/shm."""
    mount = 'mount -t tmpfs -o size=1m none /dev/shm && exec "$@"'
    return ["unshare", "-m", "sh", "-c", mount, "sh"]


def may_unshare() -> bool:
    tool = shutil.which("unshare")
    return tool is not None and not subprocess.run([*small_shm(), "true"]).returncode


@pytest.mark.skipif(not may_unshare(), reason="no right to a /dev/shm of one's own here")
def test_a_container_with_a_small_shm_is_large_enough():
    """With 64 MB of /dev/shm, as containers have, gradients of 5.6M numbers ended in SIGBUS."""
    assert together(["-c", ADD_UP, "none"], small_shm()) == ["shared", "shared"]
