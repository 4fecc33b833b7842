"""Broken and hostile folders, images and texts: a clear line each, and never more.

    python bench/fuzz_folders.py [--quick] [--count 20000] [--seed 1] [--only llama,vit] [--jobs 2]

Each case changes something in a sound folder (a public checkpoint of any format, or one of ours),
an image or a table of texts, as chance has it, and reads it as a user would. It may be read or
refused. It is an error if anything else than a `UsageError` comes out of it, if it takes over 5 s
of processor time, or if what is said holds anything that cannot be printed. A case can be repeated:
its number and the seed say all about it.
"""

import argparse
import contextlib
import copy
import io
import json
import multiprocessing
import os
import random
import resource
import shutil
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import parity  # noqa: E402
import torch  # noqa: E402

import regard  # noqa: E402
from regard import native  # noqa: E402
from regard.api import starters  # noqa: E402
from regard.cli import main as command  # noqa: E402

SECONDS = 5.0  # of processor time for one case
BYTES = 3 * 2**30  # of memory beyond what is there when all is imported
SAID = 4000  # letters that a message may have
TEXT = "the king and a ring"
ODD: list[Any] = [None, True, False, 0, 1, -1, 2, 3, 7, 255, 2**31, 2**31 - 1, 2**53, 2**63, 10**18]
ODD += [
    -(2**63),
    10**400,
    0.5,
    -0.0,
    1e-320,
    1e308,
    float("inf"),
    float("nan"),
    1e9,
    4096,
    10**5,
    10**6,
    2**24,
]
ODD += ["", "x", "gelu", "0", "\x1b[31mred", "\x1b]0;title\x07", "\ud800", "a\udc80b", "‮evil", "\0"]
ODD += [
    "../../etc/passwd",
    "/dev/zero",
    "a" * 20_000,
    "a\nb\r\tc",
    "\u2028",
    "é" * 300,
    "{}",
    "%s%n",
]
ODD += [
    [],
    {},
    [[]],
    [None],
    ["x"],
    {"x": 1},
    [1, 2],
    [3, 3],
    [10**9] * 3,
    {"type": "x"},
    [0.5] * 9,
]


# ---- what is done to a file


def odd(chance: random.Random) -> Any:
    """Return something that is seldom meant."""
    return copy.deepcopy(chance.choice(ODD))


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Yield the ways to some values within a JSON value."""
    yield path
    if len(path) > 12:
        return
    if isinstance(value, dict):
        for key in list(value)[:60]:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list):
        for key in range(min(len(value), 8)):
            yield from places(value[key], (*path, key))


def change_json(value: Any, chance: random.Random) -> Any:
    """Change one or a few things in a JSON value."""
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        ways = list(places(value))
        way = chance.choice(ways)
        if not way:
            if chance.random() < 0.02:
                return odd(chance)
            continue
        inner = value
        for key in way[:-1]:
            inner = inner[key]
        last = way[-1]
        act = chance.random()
        number = inner[last]
        if act < 0.45:
            inner[last] = odd(chance)
        elif act < 0.65 and isinstance(number, int | float) and abs(number) < 1e30:
            inner[last] = chance.choice(
                [number + 1, number - 1, -number, number * 2, number * 1000]
            )
        elif act < 0.7 and isinstance(number, str):
            inner[last] = number + str(odd(chance))
        elif act < 0.8:
            if isinstance(inner, list):
                inner.pop(last)
            else:
                del inner[last]
        elif act < 0.9 and isinstance(inner, dict):
            inner[str(odd(chance))] = odd(chance)
        elif act < 0.95:
            deep: Any = odd(chance)
            for _ in range(chance.choice((2, 50, 3000))):
                deep = [deep]
            inner[last] = deep
        else:
            other = value
            for key in chance.choice(ways):
                other = other[key]
            inner[last] = json.loads(to_json(other))
    return value


def to_json(value: Any) -> str:
    """Write JSON, however deep it is."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        return json.dumps(value)
    finally:
        sys.setrecursionlimit(limit)


def change_bytes(whole: bytes, chance: random.Random) -> bytes:
    """Flip, cut, repeat or put in some bytes."""
    data = bytearray(whole)
    for _ in range(chance.choice((1, 1, 2, 8))):
        at = chance.randrange(len(data) + 1)
        act = chance.randrange(6)
        if act == 0 and at < len(data):
            data[at] ^= 1 << chance.randrange(8)
        elif act == 1:
            del data[at : at + chance.choice((1, 2, 8, 100, 10**9))]
        elif act == 2:
            data[at:at] = chance.randbytes(chance.choice((1, 4, 100)))
        elif act == 3:
            data[at:at] = data[at : at + chance.choice((1, 16, 300))]
        elif act == 4 and at < len(data):
            data[at] = chance.choice((0, 9, 10, 13, 27, 34, 127, 128, 255))
        else:
            data[at:at] = str(odd(chance)).encode("utf-8", "surrogatepass")[:200]
    return bytes(data)


def change_header(data: bytes, chance: random.Random) -> bytes:
    """Change what the header of a file of weights says."""
    (length,) = struct.unpack("<Q", data[:8])
    header = change_json(json.loads(data[8 : 8 + length]), chance)
    told = to_json(header).encode("utf-8", "surrogatepass")
    claimed = len(told) if chance.random() < 0.9 else chance.choice((0, 1, 2**20, 2**40, 2**63))
    return struct.pack("<Q", claimed) + told + data[8 + length :]


def change_file(path: Path, chance: random.Random) -> None:
    """Change a file, or what is at its place."""
    data = path.read_bytes()
    path.unlink()  # it may have other names
    act = chance.random()
    if act < 0.02:
        return
    if act < 0.03:
        path.mkdir()
    elif act < 0.04:
        os.mkfifo(path)
    elif act < 0.05:
        path.symlink_to(chance.choice(("/dev/zero", "/etc/hostname", "nowhere", path.name)))
    elif path.suffix == ".json" and act < 0.85:
        try:
            path.write_text(to_json(change_json(json.loads(data), chance)))
        except (ValueError, RecursionError):
            path.write_bytes(change_bytes(data, chance))
    elif path.suffix == ".safetensors" and act < 0.6:
        try:
            path.write_bytes(change_header(data, chance))
        except (ValueError, RecursionError, struct.error):  # it was changed before
            path.write_bytes(change_bytes(data, chance))
    else:
        path.write_bytes(change_bytes(data, chance))


# ---- what is read


Case = tuple[str, Callable[[random.Random, Path], None]]


def copied(seed: Path, place: Path) -> Path:
    """Copy a folder, its files under a second name each, which costs nothing."""
    shutil.copytree(seed, place, copy_function=os.link)
    return place


def fuzz_folder(seed: Path, chance: random.Random, place: Path) -> None:
    """Change a folder of a model and use it."""
    folder = copied(seed, place / "m")
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != "SHA256SUMS")
    weight = [
        8 if p.name == "config.json" else 1 if p.suffix != ".safetensors" else 2 for p in files
    ]
    for _ in range(chance.choice((1, 1, 1, 2))):
        path = chance.choices(files, weight)[0]
        if path.is_file() and not path.is_symlink():
            change_file(path, chance)
    sums = folder / "SHA256SUMS"
    if sums.exists():
        if chance.random() < 0.03:
            change_file(sums, chance)
        else:
            sums.unlink()
    told = folder / "config.json"
    ours = told.is_file() and not told.is_symlink() and b"regard_format" in told.read_bytes()
    if not ours and chance.random() < 0.5:
        command(["import", str(folder), f"out={place / 'new'}"])
        return
    words = [str(folder), TEXT]
    if (folder / "preprocessor_config.json").exists() or seed.name.startswith("images-"):
        Path(place / "a.png").write_bytes(PNG)
        words = [str(folder), str(place / "a.png")]
    short = ["max_length=4"] if seed.name.startswith(("language-", "text-", "shakes")) else []
    command(["run", *words, *short])


def fuzz_image(seed: Path, chance: random.Random, place: Path) -> None:
    """Change an image and give it to a model and a filter."""
    path = place / seed.name
    path.write_bytes(change_bytes(seed.read_bytes(), chance))
    if chance.random() < 0.5:
        command(["filter", "gaussian", str(path), f"out={place / 'out.png'}"])
        return
    for part, count in (("train", 2), ("valid", 1)):
        for label in ("a", "b"):
            (place / "d" / part / label).mkdir(parents=True)
            for number in range(count):
                shutil.copy(path, place / "d" / part / label / f"{number}{path.suffix}")
    quietly(lambda: regard_images(str(place / "d")))


def regard_images(data: str) -> None:
    """Read a set of images, all of them."""
    from regard.data.images import load_images

    found = load_images(data)
    for part in found.parts.values():
        part.read(torch.arange(len(part.labels)))


def fuzz_text(seed: Path, chance: random.Random, place: Path) -> None:
    """Change a table or a text and read it as data for tasks."""
    from regard.data.documents import load_texts
    from regard.data.labelled import ExampleFormat, ExampleReader, load_labelled
    from regard.data.pairs import load_pairs

    path = place / seed.name
    data = seed.read_bytes()
    for _ in range(chance.choice((1, 3, 20))):
        data = change_bytes(data, chance)
    path.write_bytes(data)
    readers: list[Callable[[], Any]] = [
        lambda: load_pairs(path),
        lambda: load_texts(path),
        lambda: load_labelled(str(path), ExampleReader(ExampleFormat())),
    ]
    quietly(chance.choice(readers))


def quietly(read: Callable[[], Any]) -> None:
    """Read something; what is refused is told as the command line tells it."""
    try:
        read()
    except regard.UsageError as mistake:
        print(f"regard: {mistake}", file=sys.stderr)


# ---- what is sound

PNG = b""
ROWS = [("a dog runs", "good"), ("the cat, asleep", "bad"), ('a "quoted" text', "good")] * 12


def write_texts(home: Path) -> list[Path]:
    """Write tables and texts of all kinds."""
    home.mkdir()
    kinds = {
        "a.tsv": "".join(f"{a}\t{b}\n" for a, b in ROWS),
        "b.tsv": "text\tlabel\n" + "".join(f"{a}\t{b}\n" for a, b in ROWS),
        "c.csv": "text,label\n"
        + "".join(f'"{a.replace(chr(34), chr(34) * 2)}",{b}\n' for a, b in ROWS),
        "d.jsonl": "".join(json.dumps({"text": a, "label": b}) + "\n" for a, b in ROWS),
        "e.jsonl": "".join(json.dumps({"src": a, "tgt": b}) + "\n" for a, b in ROWS),
        "f.txt": "".join(f"{a}\n" for a, _ in ROWS),
        "g.json": json.dumps([{"text": a, "label": b} for a, b in ROWS]),
    }
    for name, text in kinds.items():
        (home / name).write_text(text)
    import gzip

    (home / "h.tsv.gz").write_bytes(gzip.compress(kinds["a.tsv"].encode()))
    (home / "i.csv").write_bytes(kinds["c.csv"].encode("utf-16"))
    return sorted(home.iterdir())


def write_images(home: Path) -> list[Path]:
    """Write a small image in the usual formats."""
    from PIL import Image

    home.mkdir()
    picture = Image.effect_noise((24, 20), 60).convert("RGB")
    for name in ("a.png", "b.jpg", "c.gif", "d.bmp", "e.webp", "f.tiff"):
        with contextlib.suppress(OSError, KeyError):
            picture.save(home / name)
    return sorted(home.iterdir())


def sound(home: Path, only: set[str], each: int) -> list[Case]:
    """Write all that is sound, and return what can be done with it."""
    global PNG
    native.library()  # compiled before there are limits of memory and time
    cases: list[Case] = []
    for path in write_images(home / "images"):
        PNG = PNG or path.read_bytes()
        if not only or "images" in only:
            cases.append((f"image {path.name}", lambda c, p, s=path: fuzz_image(s, c, p)))
    for path in write_texts(home / "texts"):
        if not only or "texts" in only:
            cases.append((f"text {path.name}", lambda c, p, s=path: fuzz_text(s, c, p)))
    folders = [] if only else list(starters().values())
    for model_type, format in parity.CASES.items():
        if only and model_type not in only:
            continue
        for number in range(each):
            seed = home / f"{format.kind}-{model_type.replace('/', '-')}-{number}"
            with parity.quiet_transformers():
                parity.make(model_type, number, seed)
            folders.append(seed)
            ours = home / f"{format.kind}-ours-{model_type}-{number}"
            with (
                contextlib.redirect_stderr(io.StringIO()),
                contextlib.redirect_stdout(io.StringIO()),
            ):
                if number < 2 and command(["import", str(seed), f"out={ours}"]) == 0:
                    folders.append(ours)
    for seed in folders:
        cases.append((seed.name, lambda c, p, s=seed: fuzz_folder(s, c, p)))
    return cases


# ---- one case after the other


def wrong_with(kind: str, act: Callable, chance: random.Random) -> str:
    """Do one case and return what is wrong with how it ended, nothing if nothing is."""
    told = io.StringIO()
    started = time.process_time()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as place:
        try:
            with contextlib.redirect_stderr(told), contextlib.redirect_stdout(io.StringIO()):
                act(chance, Path(place))
        except BaseException:
            return traceback.format_exc()
    took = time.process_time() - started
    if took > SECONDS:
        return f"took {took:.1f} s of processor time"
    said = told.getvalue()
    lines = [line for line in said.splitlines() if line.startswith("regard: ")]
    if "out of memory" in said:
        return f"asked for over {BYTES >> 30} GB of memory: {said[:300]}"
    if len(said) > SAID:
        return f"said {len(said)} letters: {said[:300]!r}"
    if len(lines) > 1 or not "".join(said.split("\n")).isprintable():
        return f"not one printable line: {said[:300]!r}"
    return ""


def work(cases: list[Case], seed: int, numbers: range, at: Any, found: Any) -> None:
    """Do cases, noting the one at hand so that one that does not end can be told."""
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    os.chdir(tempfile.gettempdir())
    for number in numbers:
        chance = random.Random(f"{seed} {number}")
        kind, act = chance.choice(cases)
        at[:] = number, time.process_time(), time.time()
        if wrong := wrong_with(kind, act, chance):
            found.put((number, kind, wrong))
    at[0] = -1


def run(cases: list[Case], seed: int, count: int, jobs: int, show: bool = True) -> list[tuple]:
    """Do all cases in some processes and return those that went wrong."""
    fork = multiprocessing.get_context("fork")
    found, wrong = fork.SimpleQueue(), []

    def take() -> None:
        while not found.empty():
            wrong.append(found.get())
            if show:
                number, kind, said = wrong[-1]
                print(f"\n--- case {number}, {kind}\n{said}", flush=True)

    todo = [range(job, count, jobs) for job in range(jobs)]
    running: list[tuple[Any, Any, range]] = []
    while todo or running:
        while todo and len(running) < jobs:
            numbers = todo.pop()
            at = fork.Array("d", [-2.0, 0.0, time.time()])
            child = fork.Process(target=work, args=(cases, seed, numbers, at, found), daemon=True)
            child.start()
            running.append((child, at, numbers))
        time.sleep(0.1)
        take()
        for child, at, numbers in list(running):
            number = int(at[0])
            took = processor_time(child.pid) - at[1]
            waits = time.time() - at[2] > 12 * SECONDS and took < SECONDS / 5  # for a pipe, say
            hangs = child.is_alive() and number >= 0 and (waits or took > 3 * SECONDS)
            if hangs:
                child.kill()
            if hangs or not child.is_alive():
                child.join()
                running.remove((child, at, numbers))
                if number != -1 and (hangs or child.exitcode):
                    why = "does not end" if hangs else f"ended the process with {child.exitcode}"
                    name = random.Random(f"{seed} {number}").choice(cases)[0]
                    found.put((number, name, why))
                    rest = range(number + numbers.step, numbers.stop, numbers.step)
                    todo += [rest] if rest else []
    take()
    return wrong


def processor_time(pid: int | None) -> float:
    """Return how many seconds of processor time a process has taken."""
    try:
        told = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(told[11]) + int(told[12])) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--quick", action="store_true", help="400 cases")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="formats, images or texts")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--each", type=int, default=4, help="folders of a format")
    parser.add_argument("--case", type=int, help="only this one")
    how = parser.parse_args()
    count = 400 if how.quick else how.count
    with tempfile.TemporaryDirectory(prefix="sound-") as home:
        os.environ["REGARD_CACHE"] = f"{home}/cache"
        started = time.time()
        cases = sound(Path(home), set(filter(None, how.only.split(","))), how.each)
        print(f"{len(cases)} sound folders, images and texts; {count} cases", flush=True)
        if how.case is not None:
            chance = random.Random(f"{how.seed} {how.case}")
            kind, act = chance.choice(cases)
            print(kind, wrong_with(kind, act, chance) or "as it should be")
            return 0
        wrong = run(cases, how.seed, count, how.jobs)
    kinds = Counter(said.strip().splitlines()[-1][:120] for _, _, said in wrong)
    for said, many in kinds.most_common():
        print(f"{many:6}  {said}")
    print(f"{count} cases, {len(wrong)} wrong, {time.time() - started:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
