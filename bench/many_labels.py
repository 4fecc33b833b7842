"""Many labels: one output for each, or clusters of them; precision and the time of a prediction.

    python bench/many_labels.py /tmp/many data=../shared/data/multi30k [steps=1000] [clusters=32]
    python bench/many_labels.py --quick         times the heads alone

The labels of an English caption of Multi30k are the nouns of its German translation (words with a
capital letter, but for the first) that occur in five or more training pairs: about 2,000, three a
text. Both models are trained on the training pairs for as many steps, and judged on the validation
pairs, which neither has seen: where training needs to choose, it holds out a twentieth of its own.
Times are those of one thread of the processor, so that other work on the machine matters little. A
ratio is the time of the flat head over that of clusters: above 1, clusters are faster.
"""

import json
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from apart import machine

import regard
from regard.layers.heads import ClassificationHead, ClusterClassify
from regard.metrics.interval import interval

LEAST = 5  # training texts of a label
ROUNDS = 9  # of each time
WORD = re.compile(r"\w+")


def nouns(line: str) -> list[str]:
    """Return the different nouns of a German sentence, in their order."""
    words = WORD.findall(line)[1:]
    return list(dict.fromkeys(word for word in words if word[0].isupper() and len(word) > 1))


def read(path: Path, each: Callable[[str], Any]) -> list[Any]:
    """Return what is made of each line of a file."""
    with path.open() as lines:
        return [each(line) for line in lines]


def derive(source: Path, folder: Path) -> int:
    """Write texts with their labels as train and test, and return the number of labels."""
    folder.mkdir(parents=True, exist_ok=True)
    targets = {part: read(source / f"{part}.de", nouns) for part in ("train", "val")}
    counts = Counter(noun for row in targets["train"] for noun in row)
    known = {noun for noun, count in counts.items() if count >= LEAST}
    for part, name in (("train", "train"), ("val", "test")):
        texts = read(source / f"{part}.en", str.strip)
        rows = (
            {"text": text, "labels": [noun for noun in row if noun in known]}
            for text, row in zip(texts, targets[part], strict=True)
        )
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows if row["labels"])
        (folder / f"{name}.jsonl").write_text(lines)
    return len(known)


def seconds(what: str, *acts: Any) -> float:
    """Print the processor's milliseconds of two acts, done in turn, and return their ratio."""
    taken: list[list[float]] = [[] for _ in acts]
    for act in acts:
        act()
    for _ in range(ROUNDS):
        for act, some in zip(acts, taken, strict=True):
            start = time.process_time()
            act()
            some.append(1000 * (time.process_time() - start))
    flat, clustered = (interval(some) for some in taken)
    for name, one in (("flat", flat), ("clustered", clustered)):
        print(f"{what}, {name}: {one.mean:.2f} ± {one.half or 0:.2f} ms")
    return statistics.median(taken[0]) / statistics.median(taken[1])


def time_heads(width: int = 256, beam: int = 4) -> None:
    """Time the two heads alone, with random weights."""
    ratios = {}
    for labels, clusters in ((2_000, 32), (20_000, 128), (100_000, 256)):
        flat = ClassificationHead(width, labels, 0.0, "mean").eval()
        some = ClusterClassify(width, labels, 0.0, "mean", clusters=clusters, beam=beam).eval()
        for texts in (1, 32):
            x = torch.randn(texts, 1, width)
            with torch.inference_mode():
                acts = [lambda x=x, head=head: head(x) for head in (flat, some)]
                what = f"head alone, {labels:,} labels, {texts} texts"
                ratios[f"clusters_{labels}_labels_{texts}_texts"] = seconds(what, *acts)
    for name, value in ratios.items():
        print(f"ratio {name} {value:.3f}")


def main(out: Path, values: dict[str, str]) -> None:
    """Train both, judge them, and measure the time of predictions."""
    steps, clusters = int(values.get("steps", 1000)), int(values.get("clusters", 32))
    labels = derive(Path(values.get("data", "../shared/data/multi30k")), out / "data")
    print(f"{labels} labels, {clusters} clusters, {steps} steps")
    settings = {"data": out / "data", "valid": 0.05, "label_smoothing": 0.0, "steps": steps}
    settings |= {"valid_every": steps, "threads": 1, "quiet": True}
    for name, count in (("flat", 0), ("clustered", clusters)):
        report = regard.train("classify", out=out / name, clusters=count, **settings)
        print(name, report)
    data: dict[str, Any] = {"data": out / "data", "part": "test", "errors": 0}
    for name, other in (("flat", "clustered"), ("clustered", "flat")):
        judged: Any = regard.evaluate(out / name, against=out / other, **data)
        for score in judged.scores:
            print(name, score)
        for row in judged.comparison:
            print(f"{row.name}: {name} {row.ours:.2f}, {other} {row.theirs:.2f}, p {row.p:.3f}")
    for beam in (1, 2, 4, 8, clusters):
        found = regard.evaluate(out / "clustered", cluster_beam=beam, **data)
        print("beam", beam, *(f"{s.name} {s.value:.2f}" for s in found.scores))
    texts = read(out / "data" / "test.jsonl", lambda line: json.loads(line)["text"])[:128]
    models: list[Any] = [regard.load(out / name) for name in ("flat", "clustered")]
    for count in (1, 128):
        acts = [lambda m=m, n=count: m.run(texts[:n]) for m in models]
        seconds(f"{count} texts", *acts)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(machine(), flush=True)
    if sys.argv[1:] != ["--quick"]:
        main(Path(sys.argv[1]), dict(word.split("=", 1) for word in sys.argv[2:]))
    time_heads()
