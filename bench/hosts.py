"""Train on two hosts, cut one of them off, and compare the weights with those of one host.

    python bench/hosts.py            the bar's timeout=60
    python bench/hosts.py --quick    timeout=6

The hosts are two network namespaces with a name each, joined by a cable (a veth pair), and torchrun
starts a rank on both. It needs root and iproute2 (Linux), and says so where it cannot run.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from regard.files import sha256  # noqa: E402
from regard.training.checkpoint import checkpoints  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
PORT = 29400  # of the rendezvous; nobody else is in these networks
SETTINGS = {"width": 16, "heads": 2, "depth": 2, "ffn_width": 32, "batch_tokens": 64, "threads": 1}
SETTINGS |= {"tokenizer": "characters", "log": "none", "batches": 2, "dropout": 0.1, "steps": 300}
SETTINGS |= {"valid_every": 100, "save_every": 0.1, "ema": 0.9}


def ip(*words: str) -> None:
    """Run `ip` of iproute2."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Hosts:
    """Two network namespaces, joined by a cable."""

    def __init__(self):
        self.names = [f"regard{os.getpid()}{letter}" for letter in "ab"]
        self.addresses = ["10.213.7.1", "10.213.7.2"]

    def build(self) -> None:
        """Make the namespaces and the cable."""
        first, second = self.names
        for name in self.names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        cable = ["type", "veth", "peer", "name", "eth0", "netns", second]
        ip("-n", first, "link", "add", "eth0", *cable)
        for name, address in zip(self.names, self.addresses, strict=True):
            ip("-n", name, "addr", "add", f"{address}/30", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")

    def cut(self, state: str = "down") -> None:
        """Pull the cable out."""
        ip("-n", self.names[0], "link", "set", "eth0", state)

    def remove(self) -> None:
        """Take all away."""
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def start(self, number: int, words: list[str], said: Path, **env: str) -> subprocess.Popen[Any]:
        """Start one rank of a training by torchrun on a host, as its user would."""
        named = f'hostname node{number}; exec "$@"'
        inside = ["ip", "netns", "exec", self.names[number], "unshare", "--uts", "sh", "-c", named]
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self.addresses[0]}:{PORT}"]
        meeting += ["--rdzv-conf", f"is_host={int(number == 0)}", "--rdzv-id", "hosts"]
        meeting += [
            "--local-addr",
            self.addresses[number],
            "--nnodes",
            "2",
            "--nproc-per-node",
            "1",
        ]
        launcher = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "1",
            *meeting,
        ]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env}
        with open(said, "w") as file:
            return subprocess.Popen(
                [*inside, "sh", *launcher, *words],
                env={"GLOO_SOCKET_IFNAME": "eth0", **env},
                stdout=file,
                stderr=subprocess.STDOUT,
            )


def reason() -> str:
    """Why there can be no hosts here, or nothing."""
    if sys.platform != "linux" or shutil.which("ip") is None or shutil.which("unshare") is None:
        return "no iproute2 or util-linux here"
    try:
        with hosts():
            return ""
    except (subprocess.CalledProcessError, OSError) as error:
        return f"no right to network namespaces here ({getattr(error, 'stderr', error)!s:.80})"


@contextmanager
def hosts() -> Iterator[Hosts]:
    """Two hosts inside the context."""
    made = Hosts()
    try:
        made.build()
        yield made
    finally:
        made.remove()


def command(data: Path, out: Path, **more: Any) -> list[str]:
    """The words of a training after the interpreter."""
    given = {"data": data, "out": out, **SETTINGS, **more}
    return ["-m", "regard", "train", "language", *(f"{k}={v}" for k, v in given.items())]


def both(made: Hosts, words: list[str], home: Path) -> list[tuple[subprocess.Popen[Any], Path]]:
    """Start a rank on each host; the processes, and the files where they say something."""
    said = [home / f"node{number}.said" for number in range(2)]
    return [(made.start(number, words, said[number]), said[number]) for number in range(2)]


def end(processes: list[tuple[subprocess.Popen[Any], Path]], within: float) -> list[int]:
    """Wait for processes, and return their exit codes."""
    limit = time.monotonic() + within
    try:
        return [p.wait(max(0.1, limit - time.monotonic())) for p, _ in processes]
    finally:
        for process, _ in processes:
            process.kill()


def newest(out: Path) -> int:
    """Step of the newest checkpoint, or 0."""
    return max((step for step, _ in checkpoints(out / "checkpoints")), default=0)


def cut_off(made: Hosts, words: list[str], out: Path, timeout: int) -> list[float]:
    """Cut a host off in the middle; the seconds after which each host names the other."""
    running = both(made, [*words, f"timeout={timeout}"], out.parent)
    limit = time.monotonic() + 120
    while newest(out) < 20:
        assert time.monotonic() < limit and running[0][0].poll() is None, running[0][1].read_text()
        time.sleep(0.02)
    made.cut()
    cut, named = time.monotonic(), [0.0, 0.0]
    while not all(named) and time.monotonic() - cut < timeout + 60:
        for number, (_, said) in enumerate(running):
            if not named[number] and f"rank {number} ends: " in said.read_text():
                named[number] = time.monotonic() - cut
        time.sleep(0.05)
    for (_, said), seconds in zip(running, named, strict=True):
        assert seconds, said.read_text()
        line = next(line for line in said.read_text().splitlines() if " ends: " in line)
        print(f"  after {seconds:.1f} s: {line}", flush=True)
    made.cut("up")
    codes = end(running, 120)
    print(f"  torchrun ended with {codes} after {time.monotonic() - cut:.1f} s", flush=True)
    assert all(codes)
    return named


def trained(made: Hosts, words: list[str], out: Path) -> str:
    """Train on both hosts to the end; the hash of the weights."""
    running = both(made, words, out.parent)
    codes = end(running, 300)
    assert codes == [0, 0], "".join(said.read_text() for _, said in running)
    return sha256(out / "model.safetensors")


def main(words: list[str]) -> int:
    """Compare one host with two, also where one of these is cut off."""
    if why := reason():
        print(f"skipped: {why}")
        return 0
    timeout = 6 if "--quick" in words else 60
    with tempfile.TemporaryDirectory() as place, hosts() as made:
        home, wrong = Path(place), 0
        (home / "play.txt").write_text("To be, or not to be, that is the question.\n" * 60)
        for parallel in ("ddp", "fsdp"):
            one, two, cut = (home / f"{parallel}-{name}" for name in ("one", "two", "cut"))
            more = {"parallel": parallel}
            env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            here = command(home / "play.txt", one, **more, processes=2)
            subprocess.run([sys.executable, *here, "--quiet"], env=env, check=True)
            weights = sha256(one / "model.safetensors")
            same = trained(made, command(home / "play.txt", two, **more), two) == weights
            print(
                f"{parallel}: two hosts {'give' if same else 'DO NOT give'} the bits of one",
                flush=True,
            )
            again = command(home / "play.txt", cut, **more)
            late = max(cut_off(made, again, cut, timeout))
            resumed = trained(made, again, cut) == weights
            print(
                f"{parallel}: cut off, named within {late:.1f} s (bar {timeout + 30}), "
                f"resumed to {'the same' if resumed else 'OTHER'} bits",
                flush=True,
            )
            wrong += not same or not resumed or late > timeout + 30
    return int(wrong > 0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # takes the hosts away
    sys.exit(main(sys.argv[1:]))
