"""Draw scenes with their masks and captions: shapes, textures, shadows, occlusion and clutter.

    python bench/scenes.py out=runs/scenes-data
    python bench/scenes.py out=runs/scenes-data train=20000 valid=500 test=1000 size=48 seed=1

A scene has two shapes, of which one may hide a part of the other, or sometimes one shape, before a
background with a texture and grey clutter. In the folder are, under the same name, images/, masks/
(of which kind each pixel is; the kinds are in classes.txt) and objects/ (1 where the object is that
the caption names first, 2 where its second one is). train.tsv, valid.tsv and test.tsv hold the
captions, "a red circle left of a blue square"; with captions=2 a scene of two shapes has "a blue
square right of a red circle" as well. Scene n of a part is a function of seed, part and n.
Everything that is drawn is in the public domain (CC0 1.0).
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

FINE = 4  # sub-pixels to a side of a pixel, from which edges are smoothed
COLOURS = {
    "red": (214, 40, 40),
    "green": (46, 160, 67),
    "blue": (38, 84, 214),
    "yellow": (240, 205, 40),
    "purple": (140, 50, 180),
    "white": (242, 242, 242),
}
ALONE = 0.15  # share of scenes with one shape
KINDS = ("images", "masks", "objects")
RELATIONS = {"left of": "right of", "above": "below"}
Points = list[tuple[float, float]]


def circle(turn: float) -> Points:
    """Outline of a circle of radius 1."""
    return [(math.cos(a), math.sin(a)) for a in np.linspace(0, 2 * math.pi, 48)]


def polygon(corners: int, start: float) -> Callable[[float], Points]:
    """Outline of a regular polygon, turned a little."""

    def outline(turn: float) -> Points:
        steps = [start + turn + 2 * math.pi * n / corners for n in range(corners)]
        return [(1.1 * math.cos(a), 1.1 * math.sin(a)) for a in steps]

    return outline


def star(turn: float) -> Points:
    """Outline of a star with five points."""
    steps = [turn - math.pi / 2 + math.pi * n / 5 for n in range(10)]
    return [
        (r * math.cos(a), r * math.sin(a))
        for n, a in enumerate(steps)
        for r in [1.2 - n % 2 * 0.72]
    ]


def cross(turn: float) -> Points:
    """Outline of a cross."""
    near, far = 0.36, 1.05
    arm = [(near, near), (far, near), (far, -near)]
    points = []
    for quarter in range(4):
        a = turn - quarter * math.pi / 2
        points += [
            (x * math.cos(a) - y * math.sin(a), x * math.sin(a) + y * math.cos(a)) for x, y in arm
        ]
    return points


SHAPES: dict[str, Callable[[float], Points]] = {
    "circle": circle,
    "square": polygon(4, math.pi / 4),
    "triangle": polygon(3, -math.pi / 2),
    "star": star,
    "cross": cross,
}
CLASSES = ("background", *SHAPES)
PALETTE = [(0, 0, 0), (230, 60, 60), (60, 120, 230), (60, 190, 90), (245, 200, 50), (170, 80, 200)]


def plain(x: Any, y: Any, rng: np.random.Generator) -> Any:
    """The same everywhere."""
    return np.zeros(x.shape)


def striped(x: Any, y: Any, rng: np.random.Generator) -> Any:
    """Stripes of any direction and width."""
    turn, wide = rng.uniform(0, math.pi), rng.uniform(0.09, 0.2)
    return np.sign(np.sin((x * math.cos(turn) + y * math.sin(turn)) * 2 * math.pi / wide))


def checked(x: Any, y: Any, rng: np.random.Generator) -> Any:
    """A checkerboard."""
    wide = rng.uniform(0.09, 0.2)
    return np.sign(np.sin(x * math.pi / wide) * np.sin(y * math.pi / wide))


def sloped(x: Any, y: Any, rng: np.random.Generator) -> Any:
    """Light that comes from one side."""
    turn = rng.uniform(0, 2 * math.pi)
    return 2 * (x * math.cos(turn) + y * math.sin(turn)) - 0.5


TEXTURES = (plain, striped, checked, sloped)


@dataclass
class Thing:
    """A shape of a colour: its centre, and the sub-pixels that it covers."""

    colour: str
    shape: str
    x: float
    y: float
    covers: Any

    def __str__(self) -> str:
        return f"a {self.colour} {self.shape}"


@dataclass
class Scene:
    """A drawn scene: the image, the kind and the object of each pixel, and its captions."""

    image: Image.Image
    mask: Image.Image
    objects: Image.Image
    captions: list[str]


def cover(points: Points, x: float, y: float, radius: float, side: int) -> Any:
    """Which sub-pixels a shape covers."""
    picture = Image.new("1", (side, side))
    ImageDraw.Draw(picture).polygon([(x + radius * u, y + radius * v) for u, v in points], fill=1)
    return np.asarray(picture)


def drawn_thing(rng: np.random.Generator, side: int) -> Thing:
    """Any shape of any colour anywhere."""
    radius = side * rng.uniform(0.12, 0.19)
    x, y = rng.uniform(1.25 * radius, side - 1.25 * radius, 2)
    shape, colour = rng.choice(list(SHAPES)), rng.choice(list(COLOURS))
    outline = SHAPES[shape](rng.uniform(-0.25, 0.25))
    return Thing(colour, shape, x, y, cover(outline, x, y, radius, side))


def relation(first: Thing, second: Thing, side: int) -> str:
    """Where the first is as seen from the second, or nothing if it is neither of RELATIONS."""
    across, down = second.x - first.x, second.y - first.y
    if across > 0.18 * side and across > 1.6 * abs(down):
        return "left of"
    return "above" if down > 0.18 * side and down > 1.6 * abs(across) else ""


def chosen_things(rng: np.random.Generator, side: int) -> list[Thing]:
    """One thing, or two of which each can be recognised and whose relation is plain."""
    if rng.random() < ALONE:
        return [drawn_thing(rng, side)]
    while True:
        one, two = drawn_thing(rng, side), drawn_thing(rng, side)
        both = (one.covers & two.covers).sum()
        hidden = both / min(one.covers.sum(), two.covers.sum())
        same = (one.colour, one.shape) == (two.colour, two.shape)
        if not same and hidden < 0.25 and relation(one, two, side):
            return [one, two]


def textured(colour: Any, strength: float, rng: np.random.Generator, side: int) -> Any:
    """A plane of a colour (side, side, 3) with a texture of some strength."""
    y, x = np.mgrid[:side, :side] / side
    texture = TEXTURES[rng.integers(len(TEXTURES))](x, y, rng)[..., None]
    return np.asarray(colour, np.float64) + strength * texture


def clutter(picture: Any, rng: np.random.Generator) -> Any:
    """A picture with grey lines and specks, which no caption names."""
    side, image = len(picture), Image.fromarray(picture.clip(0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(image)
    for _ in range(rng.integers(0, 7)):
        x, y, across, down = rng.uniform(0, side, 2).tolist() + rng.uniform(-0.2, 0.2, 2).tolist()
        grey = (int(rng.integers(40, 170)),) * 3
        if rng.random() < 0.5:
            draw.line((x, y, x + across * side, y + down * side), fill=grey, width=side // 48)
        else:
            radius = rng.uniform(0.008, 0.025) * side
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=grey)
    return np.asarray(image, np.float64)


def draw_scene(rng: np.random.Generator, size: int) -> Scene:
    """A scene of size x size pixels."""
    side = size * FINE
    things = chosen_things(rng, side)
    grey = rng.uniform(70, 150) + rng.uniform(-12, 12, 3)
    picture = clutter(textured(grey, rng.uniform(4, 16), rng, side), rng)
    objects = np.zeros((side, side), np.uint8)
    light = rng.uniform(-0.05, 0.05, 2) * side
    for number in rng.permutation(len(things)):  # what is drawn later hides what is there
        thing = things[number]
        shade = Image.fromarray(np.roll(thing.covers, light.astype(int), (0, 1)))
        blurred = shade.convert("L").filter(ImageFilter.GaussianBlur(0.02 * side))
        picture *= 1 - 0.45 * np.asarray(blurred, np.float64)[..., None] / 255
        colour = np.array(COLOURS[thing.colour]) * rng.uniform(0.85, 1.08)
        picture[thing.covers] = textured(colour, rng.uniform(4, 22), rng, side)[thing.covers]
        objects[thing.covers] = number + 1
    picture = picture.reshape(size, FINE, size, FINE, 3).mean((1, 3)) + rng.normal(
        0, 3, (size, size, 3)
    )
    middle = objects[FINE // 2 :: FINE, FINE // 2 :: FINE]
    kinds = np.array([0, *(CLASSES.index(thing.shape) for thing in things)], np.uint8)
    captions = [str(things[0])]
    if len(things) == 2:
        where = relation(things[0], things[1], side)
        captions = [
            f"{things[0]} {where} {things[1]}",
            f"{things[1]} {RELATIONS[where]} {things[0]}",
        ]
    return Scene(
        Image.fromarray(picture.clip(0, 255).round().astype(np.uint8)),
        indexed(kinds[middle]),
        indexed(middle),
        captions,
    )


def indexed(values: Any) -> Image.Image:
    """A PNG whose numbers are those given, shown in colours."""
    image = Image.fromarray(np.ascontiguousarray(values), "P")
    image.putpalette([value for colour in PALETTE for value in colour])
    return image


def main(out: Path, *, size: int = 48, seed: int = 1, captions: int = 1, **parts: int) -> None:
    """Write scenes of each part into a folder."""
    counts = {"train": 20000, "valid": 500, "test": 1000, **parts}
    for folder in (out / kind / part for kind in KINDS for part in counts):
        folder.mkdir(parents=True, exist_ok=True)
    for number, (part, count) in enumerate(counts.items()):
        rows = []
        for n in range(count):
            scene, name = (
                draw_scene(np.random.default_rng([seed, number, n]), size),
                f"{part}/{n:05}.png",
            )
            for kind, picture in zip(KINDS, (scene.image, scene.mask, scene.objects), strict=True):
                picture.save(out / kind / name)
            rows += [f"images/{name}\t{caption}\n" for caption in scene.captions[:captions]]
        (out / f"{part}.tsv").write_text("".join(rows))
    (out / "classes.txt").write_text("".join(f"{name}\n" for name in CLASSES))
    (out / "LICENCE").write_text("Drawn by bench/scenes.py of Regard; public domain, CC0 1.0.\n")
    print(f"{', '.join(f'{count:,} scenes to {part}' for part, count in counts.items())}: {out}")


if __name__ == "__main__":
    told = dict(word.split("=", 1) for word in sys.argv[1:])
    folder = Path(told.pop("out", "runs/scenes-data"))
    main(folder, **{key: int(value) for key, value in told.items()})
