"""Text and pairs larger than memory: stored in parts, killed in the middle, and trained on.

    python bench/large.py --quick            # 100 MB of each kind
    python bench/large.py --kind jsonl --mb 5000
    python bench/large.py --kind pairs --rows 20000000

Generates data, trains `language` or `translate` for a few steps, kills it (SIGKILL) while text is
read and while tokens are stored, and gives the same command again. Printed are the time of all
tries, from the first to the trained model, and the most anonymous memory that any of the processes
had (RssAnon). With `--whole` an uninterrupted run follows, whose stores must have the same bytes.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from apart import machine  # noqa: E402

KINDS = ("jsonl", "parquet", "txt", "pairs")
_SMALL = ["depth=1", "width=32", "heads=2", "ffn_width=64", "pieces=4000"]


def sentences(count: int, seed: int) -> list[str]:
    """Sentences of made-up words, whose frequencies are those of a language."""
    rng = np.random.default_rng(seed)
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    sizes = rng.integers(2, 10, 50_000)
    shares = 1 / np.arange(1, 27)
    drawn = rng.choice(letters, int(sizes.sum()), p=shares / shares.sum())
    words = ["".join(word) for word in np.split(drawn, np.cumsum(sizes)[:-1])]
    picks = np.minimum(rng.zipf(1.2, 12 * count) - 1, len(words) - 1).reshape(count, 12)
    return [" ".join(words[i] for i in row).capitalize() + "." for row in picks.tolist()]


def documents(size: int) -> Iterator[str]:
    """Yield different documents of about a kilobyte until they have so many bytes."""
    pool, rng, number = sentences(50_000, 0), np.random.default_rng(1), 0
    while size > 0:
        for row in rng.integers(0, len(pool), (1000, 15)).tolist():
            text = f"Document {number}. " + " ".join([pool[i] for i in row])
            number, size = number + 1, size - len(text)
            yield text
            if size <= 0:
                return


def generate(kind: str, size: int, rows: int, path: Path) -> None:
    """Write data of a kind."""
    if kind == "pairs":
        left, right = sentences(50_000, 2), sentences(50_000, 3)
        rng = np.random.default_rng(4)
        with open(path, "w") as file:
            for start in range(0, rows, 1000):
                picked = rng.integers(0, 50_000, 1000).tolist()
                for number, i in enumerate(picked[: rows - start], start):
                    file.write(f"{number} {left[i]}\t{right[i]} {number}\n")
    elif kind == "parquet":
        import pyarrow
        from pyarrow import parquet

        schema, batch = pyarrow.schema([("text", pyarrow.string())]), []
        with parquet.ParquetWriter(path, schema) as writer:
            for text in documents(size):
                batch.append(text)
                if len(batch) == 10_000:
                    writer.write_table(pyarrow.table({"text": batch}, schema))
                    batch = []
            if batch:
                writer.write_table(pyarrow.table({"text": batch}, schema))
    else:
        with open(path, "w") as file:
            for text in documents(size):
                file.write((json.dumps({"text": text}) if kind == "jsonl" else text) + "\n")


def family(root: int) -> list[int]:
    """Process with all that it has begun."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            parents.setdefault(parent, []).append(int(entry.name))
    found = [root]
    for process in found:
        found += parents.get(process, [])
    return found


def anonymous(process: int) -> int:
    """Anonymous memory of a process in bytes, 0 if it is gone."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon")), 0)


def train(
    kind: str, data: Path, home: Path, kills: list[int], steps: int, processes: int
) -> dict[str, float]:
    """Train, killed once when so many parts were written since the last kill, each time."""
    task, own = ("translate", []) if kind == "pairs" else ("language", ["context=128"])
    command = [sys.executable, "-m", "regard", "train", task, f"data={data}", f"out={home / 'run'}"]
    command += [*_SMALL, *own, f"steps={steps}", f"valid_every={steps}", "--json"]
    command += [f"processes={processes}"] if processes > 1 else []
    command += ["valid_sentences=20"] if kind == "pairs" else ["valid_tokens=50000"]
    env = {**os.environ, "XDG_CACHE_HOME": str(home / "cache")}
    most, tries, begun, known = 0, 0, time.perf_counter(), set()
    marks: dict[str, float] = {}
    while True:
        tries += 1
        with open(home / "log", "a") as log:
            child = subprocess.Popen(command, env=env, stdout=log, stderr=log)
        killed = False
        while child.poll() is None:
            most = max(most, *map(anonymous, family(child.pid)))
            stores = home / "cache" / "regard" / "stores"
            known |= {str(path) for path in stores.glob("*/part-*.npz")}
            for store in stores.glob("*/store.json"):
                marks.setdefault(store.parent.name, time.perf_counter() - begun)
            if kills and len(known) >= kills[0]:
                child.send_signal(signal.SIGKILL)
                kills, killed = kills[1:], True
            time.sleep(0.1)
        if not killed:
            break
    if child.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {child.returncode}; see {home / 'log'}")
    seconds = time.perf_counter() - begun
    stored = max(marks.values(), default=0.0)
    return {
        "seconds": seconds,
        "stored": stored,
        "memory": most,
        "tries": tries,
        "parts": len(known),
    }


def stores(home: Path) -> dict[str, str]:
    """Hashes of all files of the finished stores, by their paths."""
    root = home / "cache" / "regard" / "stores"
    return {
        str(path.relative_to(root)): hashlib.file_digest(open(path, "rb"), "sha256").hexdigest()
        for path in sorted(root.rglob("*.npy"))
    }


def main() -> None:
    """Generate, train and tell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--kind", choices=KINDS, nargs="*", default=KINDS)
    parser.add_argument("--mb", type=int, default=500)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--whole", action="store_true", help="compare with an uninterrupted run")
    parser.add_argument("--home", type=Path, default=Path("/tmp/regard-large"))
    asked = parser.parse_args()
    print(machine(), flush=True)
    size, rows = (100, 1_000_000) if asked.quick else (asked.mb, asked.rows)
    for kind in asked.kind:
        home = asked.home / kind
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        data = home / f"data.{'tsv' if kind == 'pairs' else kind}"
        generate(kind, size << 20, rows, data)
        text = data.stat().st_size if kind != "parquet" else size << 20
        parts = max(1, text // (1 << 25))  # of text, then about as many of tokens
        told = train(
            kind, data, home, [max(1, parts // 2), parts + parts // 2], asked.steps, asked.processes
        )
        what = f"{rows:,} pairs" if kind == "pairs" else f"{size:,} MB of text"
        print(
            f"{kind}: {what}, {data.stat().st_size / 2**20:,.0f} MB on disk: stored after "
            f"{told['stored']:.0f} s, trained {asked.steps} steps after {told['seconds']:.0f} s in "
            f"{told['tries']:.0f} tries; at most {told['memory'] / 2**20:,.0f} MB of anonymous "
            f"memory a process; {told['parts']:.0f} parts"
        )
        print(f"ratio large-{kind}-gigabytes-of-memory {told['memory'] / 2**30:.3f}")
        print(f"ratio large-{kind}-minutes {told['seconds'] / 60:.2f}", flush=True)
        if asked.whole or asked.quick:
            again = home / "whole"
            again.mkdir()
            train(kind, data, again, [], asked.steps, asked.processes)
            same = stores(home) == stores(again)
            print(f"{kind}: the bytes of an uninterrupted run: {'the same' if same else 'OTHERS'}")
            if not same:
                raise SystemExit(1)
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main()
