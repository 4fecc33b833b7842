"""Train and answer files by a real Slurm of two nodes, through kills and requeues.

    python bench/slurm.py                   all
    python bench/slurm.py steps requeued    some of: steps, requeued, late, array

Slurm (Debian's slurmctld, slurmd, slurm-client and munge) runs under a temporary folder, in
namespaces of its own, so that it needs no configuration, opens no port and leaves no process; that
takes root (Linux). Says why where it cannot run. Every result is compared with one process's.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from regard.cli import main as regard  # noqa: E402
from regard.files import sha256  # noqa: E402
from regard.training.checkpoint import checkpoints  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "sinfo", "unshare", "ip")
ADDRESS = "10.213.8.1"
INSIDE = "REGARD_SLURM_HOME"  # set in the namespaces
CONFIGURATION = """
ClusterName=bench
SlurmctldHost={host}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={home}/munge.socket
CommunicationParameters=NoInAddrAny
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool-%n
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd-%n.pid
SlurmctldLogFile={home}/slurmctld.log
SlurmdLogFile={home}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
JobRequeue=1
KillWait=10
MinJobAge=3600
SlurmctldTimeout=60
SlurmdTimeout=60
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,requeue_delay=0
NodeName=n1 NodeHostname={host} NodeAddr={address} Port=17001 CPUs={cpus} State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr={address} Port=17002 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""
TRAIN = "width=16 heads=2 depth=2 ffn_width=32 batch_tokens=64 threads=1 tokenizer=characters "
TRAIN += "log=none batches=2 dropout=0.1 steps=300 valid_every=100 save_every=0.1 ema=0.9 --quiet"


def reason() -> str:
    """Why there can be no Slurm here, or nothing."""
    lacking = [name for name in NEEDED if shutil.which(name) is None]
    if lacking:
        return f"{', '.join(lacking)} missing; Debian has munge, slurmctld, slurmd, slurm-client"
    made = subprocess.run([*namespaces(), "true"], capture_output=True, text=True)
    return f"no right to namespaces ({made.stderr.strip():.80})" if made.returncode else ""


def namespaces() -> list[str]:
    """Words before a command that give it processes, mounts, a name and a network of its own."""
    return [
        "unshare",
        "--net",
        "--mount",
        "--uts",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
    ]


def ask(*words: str) -> str:
    """What a command says."""
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, (words, done.stdout, done.stderr)
    return done.stdout.strip()


def wait_until(true: Callable[[], object], what: str, seconds: float = 300) -> None:
    """Wait for something."""
    limit = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < limit, f"waited {seconds:g} s for {what}"
        time.sleep(0.05)


def start_slurm(home: Path) -> None:
    """Start all daemons, and wait until both nodes are idle."""
    host = "bench"
    ask("hostname", host)
    ask("ip", "link", "set", "lo", "up")
    # getaddrinfo, as Slurm asks it, wants an address beside that of the loopback
    ask("ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth1")
    ask("ip", "addr", "add", f"{ADDRESS}/24", "dev", "eth0")
    for name in ("eth0", "eth1"):
        ask("ip", "link", "set", name, "up")
    (home / "hosts").write_text(f"127.0.0.1 localhost\n{ADDRESS} {host} n1 n2\n")
    ask("mount", "--bind", str(home / "hosts"), "/etc/hosts")
    (home / "slurm.conf").write_text(
        CONFIGURATION.format(home=home, host=host, address=ADDRESS, cpus=os.cpu_count() or 1)
    )
    (home / "key").write_bytes(os.urandom(128))
    (home / "key").chmod(0o400)
    os.environ["SLURM_CONF"] = str(home / "slurm.conf")
    for name in ("state", "spool-n1", "spool-n2"):
        (home / name).mkdir()
    munge = {"key-file": "key", "socket": "munge.socket", "pid-file": "munge.pid"}
    munge |= {"log-file": "munge.log", "seed-file": "munge.seed"}
    ask("munged", "--force", *(f"--{k}={home / v}" for k, v in munge.items()))
    daemons = [["slurmctld", "-D"], ["slurmd", "-D", "-N", "n1"], ["slurmd", "-D", "-N", "n2"]]
    for words in daemons:
        with open(home / f"{words[0]}{words[-1]}.said", "w") as said:
            subprocess.Popen(words, stdout=said, stderr=said)
    try:
        wait_until(lambda: nodes() == "idle idle", "idle nodes", 60)
    except AssertionError:
        for path in home.glob("*.log"):
            print(f"--- {path.name}", path.read_text()[-2000:], sep="\n")
        raise


def nodes() -> str:
    """States of the nodes."""
    told = subprocess.run(["sinfo", "-Nho", "%T"], capture_output=True, text=True)
    return " ".join(told.stdout.split())


def newest(out: Path) -> int:
    """Step of the newest checkpoint, or 0."""
    return max((step for step, _ in checkpoints(out / "checkpoints")), default=0)


def state(job: str) -> str:
    """State of a job, such as COMPLETED."""
    told = ask("scontrol", "show", "job", job)
    return " ".join(word[9:] for word in told.split() if word.startswith("JobState="))


def at_once(job: str) -> None:
    """Let a job that goes back into the queue start again without the two minutes of waiting."""

    def back() -> bool:
        told = ask("scontrol", "show", "job", job)
        return "Restarts=0" not in told and "JobState=PENDING" in told

    wait_until(back, f"{job} in the queue again")
    ask("scontrol", "update", f"JobId={job}", "StartTime=now")


class Trials:
    """What is shown, one after another."""

    def __init__(self, home: Path):
        self.home, self.failed = home, 0
        (home / "play.txt").write_text("To be, or not to be, that is the question.\n" * 60)
        os.environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        os.chdir(home)
        self.regard = f"{sys.executable} -m regard"
        told = subprocess.run([*self.train("whole"), "processes=2"], capture_output=True, text=True)
        assert told.returncode == 0, told.stderr
        self.weights = sha256(home / "whole" / "model.safetensors")

    def train(self, out: str, *more: str) -> list[str]:
        """The command of a training."""
        where = f"train language data={self.home}/play.txt out={self.home / out} {TRAIN}"
        return [*self.regard.split(), *where.split(), *more]

    def tell(self, what: str, well: bool) -> None:
        """Say what came out."""
        self.failed += not well
        print(f"{'ok  ' if well else 'FAIL'} {what}", flush=True)

    def same(self, out: str) -> bool:
        """True if a run has the weights of one host."""
        path = self.home / out / "model.safetensors"
        return path.exists() and sha256(path) == self.weights

    def script(self, name: str, text: str) -> str:
        """Write a script and give it to sbatch; the number of the job."""
        (self.home / name).write_text("#!/bin/bash\n" + text)
        return ask("sbatch", "--parsable", "--open-mode=append", f"--output={name}.said", name)

    def ends(self, job: str, name: str) -> bool:
        """Wait for the end of a job; True if it ended well."""
        ended = {"COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL"}
        wait_until(lambda: {*state(job).split()} <= ended, f"the end of {name}")
        if state(job).split() != ["COMPLETED"] * len(state(job).split()):
            print(state(job), (self.home / f"{name}.said").read_text()[-3000:], sep="\n")
            return False
        return True

    def steps(self) -> None:
        """srun on two nodes, and again after one task was killed."""
        srun = ["srun", "--nodes=2", "--ntasks=2", "--label"]
        done = subprocess.run([*srun, *self.train("srun")], capture_output=True, text=True)
        well = done.returncode == 0 and self.same("srun")
        self.tell("srun --nodes=2 --ntasks=2: the bits of two processes on one host", well)
        if not well:
            print(done.stderr[-3000:])
        again = [*srun, *self.train("killed")]
        running = subprocess.Popen(again, stderr=subprocess.PIPE, text=True)
        wait_until(lambda: newest(self.home / "killed") >= 20, "a step to be killed at")
        (task,) = (pid for pid in processes(f"out={self.home}/killed", "SLURM_PROCID=1"))
        os.kill(task, 9)
        begun, (_, told) = time.monotonic(), running.communicate(timeout=120)
        lost = [line for line in told.splitlines() if " ends: " in line]
        took = time.monotonic() - begun
        self.tell(f"a killed task ends the step in {took:.1f} s: {lost}", running.returncode != 0)
        done = subprocess.run(again, capture_output=True, text=True)
        self.tell("the same command goes on to the same bits", self.same("killed"))

    def requeued(self) -> None:
        """A job that is requeued in the middle goes on."""
        text = "#SBATCH --nodes=2 --ntasks-per-node=1 --requeue\nsrun "
        job = self.script("requeued.sh", text + " ".join(self.train("requeued")) + "\n")
        wait_until(lambda: newest(self.home / "requeued") >= 20, "a step to be requeued at")
        ask("scontrol", "requeue", job)
        at_once(job)
        well = self.ends(job, "requeued.sh")
        told = ask("scontrol", "show", "job", job)
        again = "Restarts=1" in told and len(rows(self.home / "requeued")) == 300
        self.tell(
            "sbatch --requeue, requeued once: the same bits",
            well and again and self.same("requeued"),
        )

    def late(self) -> None:
        """A job that comes near its limit of time saves, puts itself back, and goes on."""
        slow = [f"steps={10**6}" if word == "steps=300" else word for word in self.train("late")]
        text = "#SBATCH --nodes=2 --ntasks-per-node=1 --requeue --time=2 --signal=TERM@60\n"
        text += f"[ $SLURM_RESTART_COUNT ] && touch twice && exit\nsrun {' '.join(slow)}\n"
        text += "code=$?\n[ $code -eq 143 ] && scontrol requeue $SLURM_JOB_ID\nexit $code\n"
        job = self.script("late.sh", text)
        at_once(job)
        wait_until(lambda: (self.home / "twice").exists(), "the second start of late.sh")
        saved = newest(self.home / "late")
        told = (self.home / "late.sh.said").read_text()
        self.tell(f"--signal=TERM@60: saved at step {saved}, requeued by its script", saved > 0)
        if "Traceback" in told or not saved:
            print(told[-2000:])
        self.ends(job, "late.sh")

    def array(self) -> None:
        """An array answers 200 files, one task requeued, to the bytes of one process."""
        source = self.home / "in"
        source.mkdir()
        lines = ["How are you?", "I like green tea.", "Where is the station?", "Good morning."]
        for n in range(200):
            told = [lines[(n + k * k) % 4].replace("tea", f"tea {n + k}") for k in range(20)]
            (source / f"{n}.txt").write_text("\n".join(told) + "\n")
        assert regard(["--quiet", "run", "en-zh", f"in={source}", f"out={self.home}/one"]) == 0
        words = f"{self.regard} --quiet run en-zh in={source} out={self.home}/many threads=1"
        text = f"#SBATCH --array=0-3 --requeue\nexec {words}\n"
        job = self.script("array.sh", text)
        share = {f"{name}.txt" for name in sorted(map(str, range(200)))}
        wait_until(lambda: len(answers(self.home / "many")) >= 5, "some answers")
        task = next(f"{job}_{n}" for n in range(4) if "RUNNING" in state(f"{job}_{n}"))
        ask("scontrol", "requeue", task)
        before = len(answers(self.home / "many"))
        at_once(task)
        well = self.ends(job, "array.sh")
        told = ask("scontrol", "show", "job", task)
        same = answers(self.home / "many") == answers(self.home / "one")
        well = well and same and {*answers(self.home / "one")} == share and "Restarts=1" in told
        self.tell(
            f"200 files by an array of 4, {task} requeued after {before}: the same bytes", well
        )


def processes(word: str, variable: str) -> list[int]:
    """Python's processes with a word in their command and a variable."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            given = (path / "cmdline").read_bytes().split(b"\0")
            environment = (path / "environ").read_bytes().split(b"\0")
            if given[0].decode() == sys.executable and word.encode() in given:
                found += [int(path.name)] * (variable.encode() in environment)
    return found


def rows(out: Path) -> list[dict[str, object]]:
    """Rows of the steps of a run."""
    every = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row for row in every if "loss" in row]


def answers(out: Path) -> dict[str, bytes]:
    """Bytes of the files that are answered."""
    return {path.name: path.read_bytes() for path in out.glob("[!.]*")}


def main(names: list[str]) -> int:
    """Set Slurm up, and show everything."""
    if INSIDE not in os.environ:
        if why := reason():
            print(f"skipped: {why}")
            return 0
        with tempfile.TemporaryDirectory(prefix="slurm-") as home:
            words = [*namespaces(), sys.executable, __file__, *names]
            return subprocess.run(words, env={**os.environ, INSIDE: home}).returncode
    home = Path(os.environ.pop(INSIDE))
    start_slurm(home)
    print(ask("sinfo", "--version"), "with", nodes().replace(" ", " and "), "nodes", flush=True)
    trials = Trials(home)
    for name in names or ("steps", "requeued", "late", "array"):
        try:
            getattr(trials, name)()
        except AssertionError as error:
            said = "".join(
                f"{path.name}: {path.read_text()[-2000:]}" for path in home.glob("*.said")
            )
            trials.tell(f"{name}: {error}\n{said}{ask('scontrol', 'show', 'jobs')}", False)
            ask("scancel", "--user=root")
    return int(trials.failed > 0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # takes the daemons away
    sys.exit(main(sys.argv[1:]))
