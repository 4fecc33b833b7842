"""Accuracy of ViT and ResNet by number of images: judges the runs of a comparison, and draws them.

    regard compare images data=cifar10 like=vit,resnet share=0.01,0.05,0.2,1.0 ... out=runs/v4
    python docs/vision.py runs/v4 docs/vision-data.png test

Each run is judged on the test part once: what is known stands in test.json beside its results. With
`valid` in its place, the accuracy on the validation part is drawn, which training has measured.
"""

import json
import sys
from pathlib import Path
from typing import Any

import regard
from regard.metrics.interval import Interval, interval
from regard.viewer import Plot, draw_plots
from regard.viewer.plot import set_ticks


def judged(home: Path) -> list[dict[str, Any]]:
    """Finished runs of a comparison with their accuracy on the test part."""
    runs = json.loads((home / "results.json").read_text())["runs"]
    path = home / "test.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    for run in runs:
        key = f"{run['name']} {run['seed']}"
        if run["finished"] and key not in known:
            folder = home / run["name"] / f"seed-{run['seed']}"
            found = regard.evaluate(folder, data="cifar10", part="test", threads=1)
            known[key] = float(found["accuracy"])
            path.write_text(json.dumps(known, indent=1))
            print(key, known[key], flush=True)
        run["test"] = known.get(key)
    return [run for run in runs if run["test"] is not None]


def main(home: Path, out: Path, part: str) -> None:
    """Print a table, and draw the curves."""
    known = json.loads((home / "results.json").read_text())["runs"]
    runs = judged(home) if part == "test" else known
    lines: dict[str, dict[int, Interval]] = {}
    for like in dict.fromkeys(run["variant"]["like"] for run in runs):
        mine = [run for run in runs if run["variant"]["like"] == like]
        for count in sorted({run["examples"] for run in mine}):
            some = [run for run in mine if run["examples"] == count]
            each = [run["test" if part == "test" else "scores"] for run in some]
            each = [one if part == "test" else one["accuracy"] for one in each]
            lines.setdefault(like, {})[count] = found = interval(each)
            told = ", ".join(f"{one:.2f}" for one in each)
            print(f"{like} {count}: {part} {found.mean:.2f} ± {found.half or 0:.2f} ({told})")
    counts = sorted({count for line in lines.values() for count in line})

    def paint(axes: Any) -> None:
        for like, line in lines.items():
            means = [found.mean for found in line.values()]
            bars = [found.half or 0.0 for found in line.values()]
            label = {"vit": "ViT", "resnet": "ResNet"}[like]
            axes.errorbar(list(line), means, bars, fmt="o-", markersize=4, capsize=3, label=label)
        axes.set_xscale("log")
        set_ticks(axes, counts, [f"{count:,}" for count in counts])
        axes.legend(fontsize=8)

    notes = [
        f"CIFAR-10, {part} part. 1,000 steps of 32 images, 0.3M parameters, flips and crops; the "
        "mean of three seeds with its 95% interval."
    ]
    plot = Plot(paint, "", "training images", "accuracy, %")
    title = "Accuracy by number of images, with the same number of steps"
    out.write_bytes(draw_plots(title, [[plot]], notes=notes, size=(6.2, 3.4)).png())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
