"""A million tiny images: from a folder and from tars, a second start, memory, and workers.

    python bench/media.py [--quick] [--home FOLDER] [--count N] [STAGE ...]

make writes 1,000,000 PNGs of 8 x 8 pixels (--quick: 20,000) in ten classes, and the same as tars;
index starts on both for the first time, which opens every file; measure starts again (each in a
process of its own, all files unchanged) and prints the seconds until the first batch is there, the
anonymous memory a file (what remains, and the peak on the way), and how fast batches are read from
files (not from what is kept decoded), in turn, and whether they are the same bits; workers trains
on JPEGs whose decoding is about a third of a step, with and without a worker, in turn. clean
removes all. Without a stage, all are done in this order. Times mean something on a quiet machine.
"""

import argparse
import hashlib
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from threading import Event, Thread
from typing import Any

from apart import machine

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
STAGES = ("make", "index", "measure", "workers", "clean")
CLASSES, SHARD = 10, 100_000
PHOTOS, PHOTO = 1500, 420  # JPEGs, and pixels of their sides


def make(home: Path, count: int) -> None:
    """Write tiny images as files, and the same as tars."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    (home / "tars").mkdir(parents=True)
    folders = [home / "folder" / f"class{c}" for c in range(CLASSES)]
    for folder in folders:
        folder.mkdir(parents=True)
    for shard in range(-(-count // SHARD)):
        with tarfile.open(home / "tars" / f"train-{shard:03}.tar", "w") as tar:
            for i in range(shard * SHARD, min(count, (shard + 1) * SHARD)):
                pixels, file = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8), io.BytesIO()
                Image.fromarray(pixels).save(file, "png", compress_level=1)
                name, content = f"class{i % CLASSES}/{i:07}.png", file.getvalue()
                (home / "folder" / name).write_bytes(content)
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def anonymous() -> int:
    """Bytes of memory of this process that no file holds."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def start(data: Path) -> dict[str, Any]:
    """Begin to train a classifier up to its first batch, and tell what it takes.

    Without the simple classifier beside it, which learns from 20,000 images of any set.
    """
    import torch

    from regard.modalities.image import IMAGE
    from regard.tasks import task
    from regard.tasks.prepare import settle

    torch.set_num_threads(1)
    values = {"data": str(data), "steps": 1, "size": "tiny", "image": 8, "patch": 4, "batch": 256}
    objective, settings, origin, _ = settle(task("images"), values)
    stop, peak, before = Event(), [0], anonymous()

    def watch() -> None:
        while not stop.wait(0.02):
            peak[0] = max(peak[0], anonymous())

    watcher = Thread(target=watch, daemon=True)
    watcher.start()
    began = time.perf_counter()
    found = objective.read(settings, origin)
    read = time.perf_counter() - began
    sha, format = found.sha, IMAGE.settle(found, None)
    batches = IMAGE.batches(found["train"], format, settings, len(found.classes))
    _ = batches[0]
    seconds = time.perf_counter() - began
    stop.set()
    watcher.join()
    files, held = sum(len(part) for part in found.parts.values()), anonymous() - before
    digest = hashlib.sha256()
    for n in range(20):
        batch = batches[n]
        digest.update(batch.inputs.numpy().tobytes() + batch.targets.numpy().tobytes())
    print(found.notes, f"read in {read:.1f} s", file=sys.stderr)
    peak_each = (peak[0] - before) / files
    told = {"files": files, "seconds": seconds, "bytes": held / files, "peak": peak_each}
    return {**told, "bits": digest.hexdigest(), "sha": sha}


def apart(home: Path, data: str) -> dict[str, Any]:
    """Start in a process of its own."""
    words = [sys.executable, __file__, "--home", str(home), "--start", data]
    done = subprocess.run(words, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def read_in_turn(home: Path, rounds: int, batches: int) -> float:
    """How much faster batches are read from the files in tars than from those in a folder."""
    import numpy as np

    from regard.data.images import Images, load_images
    from regard.files import cache_folder

    sets = []
    for name in ("folder", "tars"):
        train = load_images(str(home / name), cache=cache_folder(), need=("train",))["train"]
        sets.append(Images(train.files, train.rows, train.labels, train.format, None))
    rng, ratios = np.random.default_rng(1), []
    for _ in range(rounds):
        picked = rng.integers(0, len(sets[0]), (batches, 256))
        seconds, found = [], []
        for images in sets:
            began = time.perf_counter()
            found.append([images.read(rows) for rows in picked])
            seconds.append(time.perf_counter() - began)
        assert all(a.equal(b) for a, b in zip(*found, strict=True)), "other pixels from a tar"
        ratios.append(seconds[0] / seconds[1])
        print(f"folder {seconds[0]:.2f} s, tars {seconds[1]:.2f} s", file=sys.stderr)
    return statistics.median(ratios)


def measure(home: Path, rounds: int, batches: int) -> None:
    """Start again on both, and read from both in turn."""
    found = {name: apart(home, name) for name in ("folder", "tars")}
    for name, one in found.items():
        print(f"{name}: {one['files']:,} files, {one['seconds']:.1f} s until the first batch")
        print(f"ratio {name}_start_of_20_s {20 / one['seconds']:.2f}")
        print(f"ratio {name}_bytes_of_300 {300 / one['bytes']:.2f}")
        print(f"bytes {name} {one['bytes']:.0f} peak {one['peak']:.0f}")
    same = found["folder"]["bits"] == found["tars"]["bits"]
    same &= found["folder"]["sha"] == found["tars"]["sha"]
    print(f"same_bits {same}")
    assert same
    print(f"ratio tars_over_folder {read_in_turn(home, rounds, batches):.2f}")


def workers(home: Path, steps: int, rounds: int) -> None:
    """Train on JPEGs with and without a worker, in turn; the images are not kept decoded."""
    import numpy as np
    import torch
    from PIL import Image

    import regard.data.images as images
    from regard.tasks import task as task_named
    from regard.tasks.prepare import prepare
    from regard.training.ahead import ahead
    from regard.training.optim import build_optimiser
    from regard.training.step import batch_numbers, one_step

    torch.set_num_threads(1)
    folder = home / "photos"
    rng = np.random.default_rng(0)
    for i in range(PHOTOS if not folder.exists() else 0):
        path = folder / f"class{i % 2}" / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        rough = Image.fromarray(rng.integers(0, 256, (30, 30, 3), dtype=np.uint8))
        rough.resize((PHOTO, PHOTO), Image.Resampling.BICUBIC).save(path, quality=90)
    images.MOST_STORED = 0  # as of a set that is too large to be kept decoded
    out = home / "photos_run"
    shutil.rmtree(out, ignore_errors=True)
    values = {"data": str(folder), "out": str(out), "steps": 1, "size": "tiny", "image": 64}
    values |= {"batch": 32, "linear": False, "depth": 2, "width": 128, "heads": 4, "patch": 8}
    run = prepare(task_named("images"), values)
    model, task, settings = run.runner.model, run.training, run.settings
    optimiser, ratios, shares = build_optimiser(model, lr=0.0), [], []

    def seconds(count: int) -> float:
        numbers = (i for n in range(10**9) for i in batch_numbers(settings, n))
        with ahead(task, count, numbers) as fed:
            for n in range(3):
                one_step(model, fed, settings, optimiser, n, 0.0)
            began = time.perf_counter()
            for n in range(3, steps + 3):
                one_step(model, fed, settings, optimiser, n, 0.0)
            return time.perf_counter() - began

    for _ in range(rounds):
        began = time.perf_counter()
        for n in range(3, steps + 3):
            task.batch(n)
        making = time.perf_counter() - began
        alone, helped = seconds(0), seconds(1)
        shares.append(making / alone)
        ratios.append(alone / helped)
        print(f"alone {alone:.2f} s, making {making:.2f}, helped {helped:.2f}", file=sys.stderr)
    print(f"share_of_making {statistics.median(shares):.2f}")
    print(f"ratio one_worker {statistics.median(ratios):.2f}")


def main() -> None:
    """Do the stages that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stages", nargs="*", default=STAGES)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--home", type=Path, default=Path(tempfile.gettempdir()) / "regard-media")
    parser.add_argument("--count", type=int, help="how many images, if others than a million")
    parser.add_argument("--start")
    given = parser.parse_args()
    home = given.home
    os.environ["REGARD_CACHE"] = str(home / "cache")
    if given.start:
        print(json.dumps(start(home / given.start)))
        return
    print(machine(), flush=True)
    quick = given.quick
    for stage in given.stages:
        if stage == "make":
            make(home, given.count or (20_000 if quick else 1_000_000))
        elif stage == "index":
            for name in ("folder", "tars"):
                one = apart(home, name)
                print(f"{name}: first start {one['seconds']:.1f} s")
        elif stage == "measure":
            measure(home, 3 if quick else 5, 10 if quick else 20)
        elif stage == "workers":
            workers(home, 12 if quick else 30, 3)
        elif stage == "clean":
            shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main()
