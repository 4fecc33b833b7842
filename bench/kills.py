"""Kill verbs at the moments when they write, give the command again, and look at what is there.

    python bench/kills.py                 every verb, at every moment
    python bench/kills.py dictionary look

A moment is a call by which a file is made durable, takes its name, or a compiler is started. A verb
survives if the same command then ends well, with the same weights and pictures as one that was not
killed, and no temporary file is left.
"""

import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from regard.cli import main as command  # noqa: E402

MOMENTS: tuple[tuple[Any, str], ...] = (
    (os, "fsync"),
    (os, "replace"),
    (os, "rename"),
    (subprocess, "run"),
)
COMPARED = (".safetensors", ".png", ".html")
TIMED = ("trends.png", "trends.html")  # pictures of seconds, which are others each time
NAMED = {"checkpoints", "tensorboard"}  # folders of which only what is temporary is looked at
TINY = "steps=4 valid_every=2 width=16 heads=2 depth=1 ffn_width=32"
# verb -> its words; {home} has a text, pairs and a photo, {out} is where it writes
VERBS = {
    "train": f"train language data={{home}}/play.txt out={{out}} save_every=0 {TINY}",
    "compare": f"compare language data={{home}}/play.txt lr=0.01,0.02 seeds=1 out={{out}} {TINY}",
    "dictionary": "dictionary shakespeare data={home}/play.txt at=blocks.0 width=48 k=4 batch=32 "
    "buffer=200 steps=8 shown=3 examples=2 batch_tokens=128 out={out}",
    "export": "export shakespeare format=huggingface out={out}",
    "import": "import {home}/exported out={out}",
    "eval": "eval shakespeare data={home}/play.txt outputs={out}.txt",
    "look": "look shakespeare To~be out={out}.png layers=0 heads=0",
    "page": "look shakespeare To~be out={out}.html layers=0 heads=0",
    "heads": "heads shakespeare repeated=8 examples=2 out={out}.png",
    "misconceptions": "misconceptions en-zh data={home}/pairs.tsv examples=2 out={out}.png",
    "superposition": "superposition n=3 m=2 sparsity=0.9 steps=20 out={out}.png",
    "show": "show scaling keys=16 out={out}.png",
    "filter": "filter bilateral {home}/photo.png out={out}.png",
}


def killed(act: Callable[[], int], nth: int) -> int | None:
    """Do something in a process that kills itself at a moment; its exit code if it lives on."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            count = itertools.count()
            for module, name in MOMENTS:
                setattr(module, name, _deadly(getattr(module, name), count, nth))
            with (
                open(os.devnull, "w") as nothing,
                redirect_stdout(nothing),
                redirect_stderr(nothing),
            ):
                code = act()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return None if code == -signal.SIGKILL else code


def _deadly(function: Callable[..., Any], count: Iterator[int], nth: int) -> Callable[..., Any]:
    def either(*given: Any, **more: Any) -> Any:
        if next(count) == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*given, **more)

    return either


def make_home(home: Path) -> None:
    """Write what the verbs read."""
    import numpy as np
    from PIL import Image

    (home / "play.txt").write_text("To be, or not to be, that is the question.\n" * 60)
    (home / "pairs.tsv").write_text("Good morning.\t早上好。\nI like tea.\t我喜欢茶。\n" * 6)
    rng = np.random.default_rng(1)
    Image.fromarray(rng.integers(0, 255, (12, 12, 3), dtype=np.uint8)).save(home / "photo.png")
    assert command(["export", "shakespeare", "format=huggingface", f"out={home / 'exported'}"]) == 0


def words_of(verb: str, home: Path, out: Path) -> list[str]:
    """Words of a verb that writes to a path."""
    words = VERBS[verb].format(home=home, out=out).split()
    return [word.replace("~", " ") for word in words]


def leftovers(*folders: Path) -> list[Path]:
    """Temporary files and folders that are still there."""
    every = (path for folder in folders for path in folder.rglob(".*"))
    return [path for path in every if path.name != ".lock" and path.suffix != ".lock"]


def results(folder: Path) -> dict[str, bytes]:
    """What a verb has written: the bytes of weights and pictures, of others that they are there."""
    found = {}
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if path.is_file() and not NAMED & set(inside.parts) and path.name != ".lock":
            compared = path.suffix in COMPARED and path.name not in TIMED
            found[str(inside)] = path.read_bytes() if compared else b""
    return found


def survives(
    words: Callable[[Path], list[str]], home: Path, moments: Iterable[int]
) -> tuple[int, str]:
    """Kill a verb at each of some moments, and do it again; the number of kills, and a fault."""
    (home / "whole").mkdir()
    if killed(lambda: command([*words(home / "whole" / "out"), "--quiet"]), -1) != 0:
        return 0, "it fails without a kill"
    whole, kills = results(home / "whole"), 0
    for nth in moments:
        broken = home / f"broken-{nth}"
        broken.mkdir()
        again = [*words(broken / "out"), "--quiet"]
        code = killed(lambda again=again: command(again), nth)
        if code == 0:  # it has no further moments
            break
        if code is not None:
            return kills, f"exit code {code} before moment {nth}"
        kills += 1
        code = killed(lambda again=again: command(again), -1)
        # a folder that is complete is not written again, and the user is told
        if code != 0 and not (code == 2 and (broken / "out").is_dir()):
            return kills, f"exit code {code} after a kill at moment {nth}"
        if left := leftovers(broken):
            return kills, f"{left[0].name} is left after a kill at moment {nth}"
        found = results(broken)
        if found != whole:
            wrong = sorted(k for k in {*found, *whole} if found.get(k) != whole.get(k))
            return kills, f"other {', '.join(wrong)} after a kill at moment {nth}"
        shutil.rmtree(broken)
    return kills, ""


def main(verbs: list[str]) -> int:
    """Kill each verb at every moment."""
    wrong = 0
    with tempfile.TemporaryDirectory() as place:
        os.environ["REGARD_CACHE"] = f"{place}/cache"
        os.environ["REGARD_NATIVE"] = "0"  # compiling is killed in tests/files/test_kills.py
        make_home(Path(place))
        for verb in verbs or VERBS:
            home = Path(place) / verb
            home.mkdir()
            every = itertools.count()
            kills, fault = survives(lambda out, v=verb: words_of(v, Path(place), out), home, every)
            print(f"{verb}: {kills} kills, {fault or 'survived'}", flush=True)
            wrong += bool(fault)
        left = leftovers(Path(place) / "cache")
        print(f"cache: {len(left)} temporary files left")
    return int(wrong > 0 or bool(left))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
