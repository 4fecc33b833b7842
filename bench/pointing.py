"""How often captions of drawn scenes are right, and whether a word looks at the object it names.

    python bench/scenes.py out=runs/scenes-data
    python bench/pointing.py model=scenes data=runs/scenes-data part=valid

A caption is right if it is one of the scene's own, to the letter. In the right ones, a colour or a
shape points at its object if the middle of the place that has most of the word's attention lies in
the object's mask (the pointing game, Zhang et al. 2018, without its tolerance). `chance` is the
share of pixels that an object covers: what pointing anywhere scores.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from scenes import COLOURS, SHAPES

import regard
from regard.data.tokenizer import words_of_pieces
from regard.viewer.image import caption_views

NAMES = {**dict.fromkeys(COLOURS, "colour"), **dict.fromkeys(SHAPES, "shape")}


def points_at(model: Any, image: Path, caption: str, objects: np.ndarray) -> list[tuple[str, bool]]:
    """For each colour and shape of a caption, what it is and whether it points at its object.

    `objects` is 1 where the object is that the caption names first, 2 where its second one is.
    """
    writer = model.predictor
    ids = writer.tokenizer.encode(caption)
    pixels = torch.from_numpy(writer.codec.format.read(image)).unsqueeze(0)
    maps, _ = writer.maps(writer.codec.format.normalise(pixels), ids)
    words, of = words_of_pieces(writer.tokenizer.pieces(ids))
    size = (pixels.shape[2], pixels.shape[3])
    view = caption_views(model.model.encoder, maps, size, words, of)[-1]
    high, wide = model.model.encoder.grid(size)
    found, named = [], 0
    for number, word in enumerate(words):
        kind = NAMES.get(word.strip())
        named += kind == "colour"
        if kind is None:
            continue
        place = int(view.weights.mean(0)[number].argmax())
        row, column = (place // wide + 0.5) / high, (place % wide + 0.5) / wide
        at = objects[int(row * len(objects)), int(column * objects.shape[1])]
        found.append((kind, bool(at == named)))
    return found


def judged(model: str, data: Path, part: str, **how: str) -> dict[str, list[float]]:
    """Which captions are right, which colours and shapes of these point, and what objects cover."""
    captioner = regard.load(model)
    captions: dict[str, list[str]] = {}
    for line in (data / f"{part}.tsv").read_text().splitlines():
        captions.setdefault(line.split("\t")[0], []).append(line.split("\t")[1])
    written = captioner.run([str(data / name) for name in captions], **how)
    found: dict[str, list[float]] = {"right": [], "colour": [], "shape": [], "covered": []}
    for (name, true), said in zip(captions.items(), map(str, written), strict=True):
        found["right"].append(said in true)
        if said not in true:
            continue
        objects = np.asarray(Image.open(data / name.replace("images/", "objects/", 1)))
        seen = np.where(objects > 0, 3 - objects, 0) if true.index(said) else objects
        for kind, hit in points_at(captioner, data / name, said, seen):
            found[kind].append(hit)
        found["covered"] += [float((objects == n).mean()) for n in range(1, 1 + objects.max())]
    return found


def main(model: str, data: Path, part: str, **how: str) -> None:
    """Print the share of right captions, and of words that point at their object."""
    found = judged(model, data, part, **how)
    both = [*found["colour"], *found["shape"]]
    print(
        f"{part}: {np.mean(found['right']):.3f} of {len(found['right']):,} captions exactly right"
    )
    print(
        f"pointing game {np.mean(both):.3f} of {len(both):,} words (colours "
        f"{np.mean(found['colour']):.3f}, shapes {np.mean(found['shape']):.3f}); "
        f"chance {np.mean(found['covered']):.3f}"
    )


if __name__ == "__main__":
    told = dict(word.split("=", 1) for word in sys.argv[1:])
    folder = Path(told.pop("data", "runs/scenes-data"))
    main(told.pop("model", "scenes"), folder, told.pop("part", "valid"), **told)
