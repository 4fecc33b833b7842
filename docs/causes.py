"""How well maps of attention rank what an answer depends on, in text, image and sound.

For each input every token is cut, and Spearman's correlation of a map with the size of the effects
is taken; the mean over inputs comes with its 95% interval. Draws causes.png, the example of the
page, and with out= a plot of what was measured.

    python docs/causes.py [data=../shared/data] [count=60] [out=docs/causes_measured.png]
"""

import gzip
import sys
from pathlib import Path

import numpy as np
from PIL import Image

import regard
from regard.insight.causes import find_causes
from regard.metrics.interval import interval
from regard.metrics.results import markdown
from regard.viewer.plot import draw_scores

MAPS = ("last layer", "all layers", "rollout")


def sentences(data: Path, count: int) -> list[str]:
    """Return English sentences of Tatoeba's test part."""
    lines = (data / "tatoeba-en-zh" / "test.tsv").read_text("utf-8").splitlines()
    texts = [line.split("\t")[0] for line in lines]  # the shortest first
    return texts[:: max(1, len(texts) // count)][:count]


def plays(data: Path, count: int) -> list[str]:
    """Return openings of speeches near the end of Shakespeare, which the starter never read."""
    text = (data / "tinyshakespeare" / "input.txt").read_text("utf-8")
    speeches = [part for part in text[-50_000:].split("\n\n")[1:] if len(part) > 40]
    return [part[:32] for part in speeches[:count]]


def photos(data: Path, count: int) -> list[np.ndarray]:
    """Return test images of Fashion-MNIST."""
    packed = (data / "fashion-mnist" / "t10k-images-idx3-ubyte.gz").read_bytes()
    raw = gzip.decompress(packed)
    images = np.frombuffer(raw, np.uint8, offset=16).reshape(-1, 28, 28)[:count]
    return [np.asarray(Image.fromarray(each).convert("RGB")) for each in images]


def digits(data: Path, count: int) -> list[str]:
    """Return spoken digits of the test part: takes 0 to 4."""
    files = sorted((data / "fsdd" / "recordings").glob("*_[0-4].*"))
    step = max(1, len(files) // count)
    return [str(file) for file in files[::step]][:count]


def speech(data: Path, count: int) -> list[str]:
    """Return recordings of AN4's part for validation."""
    lines = (data / "an4" / "dev.tsv").read_text("utf-8").splitlines()
    step = max(1, len(lines) // count)
    return [str(data / "an4" / line.split("\t")[0]) for line in lines[::step]][:count]


SETS = {
    "en-zh (sentences)": ("en-zh", sentences, {}),
    "shakespeare (prompts)": ("shakespeare", plays, {"max_length": 8}),
    "fashion (images)": ("fashion", photos, {}),
    "digits (sounds)": ("digits", digits, {}),
    "letters (speech)": ("letters", speech, {}),
}


def main(data: str = "../shared/data", count: str = "60", only: str = "", out: str = "") -> None:
    """Draw the example; measure all sets, print a table and draw it."""
    regard.look("shakespeare", "ROMEO: I love", cause=True, max_length=6, out="docs/causes.png")
    rows, found = [["starter", "inputs", *MAPS]], {name: [] for name in MAPS}
    chosen = {name: one for name, one in SETS.items() if not only or one[0] in only.split(",")}
    for name, (starter, read, settings) in chosen.items():
        model = regard.load(starter)
        asked = model.look_settings(settings)
        values = {each: [] for each in MAPS}
        for given in read(Path(data), int(count)):
            with model.using(asked):
                causes, _ = find_causes(model, given, asked, ("tokens",))
            if len(causes.tokens) < 4 or not np.isfinite(list(causes.correlations.values())).all():
                continue
            for each in MAPS:
                values[each].append(causes.correlations[each])
        means = [interval(values[each]) for each in MAPS]
        for each, mean in zip(MAPS, means, strict=True):
            found[each].append(mean)
        cells = [f"{one.mean:+.2f} ± {one.half:.2f}" for one in means]
        rows.append([name, str(len(values[MAPS[0]])), *cells])
        print(markdown(rows[:1] + rows[-1:]), flush=True)
    print(markdown(rows))
    title = "Rank correlation of attention with the effect of cutting each token"
    if out:
        draw_scores(out, title, list(chosen), found)


if __name__ == "__main__":
    main(**dict(word.split("=", 1) for word in sys.argv[1:]))
