"""Small data sets and a tiny trained model for each task, made once a session for all workers."""

import fcntl
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from regard.data.pairs import Pair, PairReader
from tests.tones import RATE, sound_folders, spoken

SMALL = {"depth": 1, "width": 16, "heads": 2, "ffn_width": 32, "threads": 1}
WIDER = {**SMALL, "width": 32, "ffn_width": 64}

# ---- texts

WORDS = "a dog cat runs sits sees the big small red house tree in on under".split()  # noqa: SIM905


def turned(folder: Path) -> None:
    """Write sentences, and beside them the same words from the last to the first."""
    rng = random.Random(0)
    for part, count in (("train", 300), ("valid", 12), ("test", 5)):
        lines = [" ".join(rng.choices(WORDS, k=rng.randint(2, 9))) for _ in range(count)]
        (folder / f"{part}.en").write_text("".join(line + ".\n" for line in lines))
        backwards = (" ".join(reversed(line.split())) for line in lines)
        (folder / f"{part}.de").write_text("".join(line + "!\n" for line in backwards))


COLOURS = ["red", "green", "blue"]
OTHERS = ["a", "dog", "cat", "the", "house", "tree", "runs", "sits", "under", "big", "small"]


def read_pairs(path: str | Path, *, notes: list[str] | None = None, **settings: Any) -> list[Pair]:
    """All pairs of a table or of two aligned files, as a PairReader with these settings."""
    reader = PairReader(path, **settings)
    pairs = list(reader)
    if notes is not None:
        notes.extend(reader.notes)
    return pairs


def colour_rows(count: int, seed: int) -> list[tuple[str, str]]:
    """Texts with one colour, which is their label."""
    rng, rows = random.Random(seed), []
    for _ in range(count):
        words = rng.choices(OTHERS, k=rng.randint(2, 8))
        colour = rng.choice(COLOURS)
        words.insert(rng.randint(0, len(words)), colour)
        rows.append((" ".join(words), colour.upper()))
    return rows


def write_tsv(path: Path, rows: list[tuple[str, str]]) -> None:
    path.write_text("".join(f"{text}\t{label}\n" for text, label in rows))


def colours(folder: Path) -> None:
    for part, count in (("train", 300), ("valid", 40), ("test", 50)):
        write_tsv(folder / f"{part}.tsv", colour_rows(count, count))


NOUNS, VERBS = ["dog", "cat", "tree", "house"], ["runs", "sits", "sleeps"]


def tagged_sentence(rng: random.Random) -> list[tuple[str, str]]:
    """Words with tags; what `walk` is depends on the word before it."""
    found = [("the", "DET"), (rng.choice(NOUNS), "NOUN"), (rng.choice(VERBS), "VERB")]
    if rng.random() < 0.5:
        found += [("they", "PRON"), ("walk", "VERB")]
    if rng.random() < 0.5:
        found += [("a", "DET"), ("walk", "NOUN")]
    return [*found, (".", "PUNCT")]


def write_columns(path: Path, count: int, seed: int) -> None:
    rng = random.Random(seed)
    blocks = ["".join(f"{w}\t{t}\n" for w, t in tagged_sentence(rng)) for _ in range(count)]
    path.write_text("\n".join(blocks))


def walks(folder: Path) -> None:
    for part, count in (("train", 150), ("dev", 25), ("test", 30)):
        write_columns(folder / f"{part}.tsv", count, count)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


ERRAND_WORDS = ["red", "blue", "green", "dog", "cat", "tree"]


def errands(folder: Path) -> None:
    """Write pairs of two tasks, to copy a word and to deny it, and plain text."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 400), ("valid", 40)):
        words = [str(rng.choice(ERRAND_WORDS)) for _ in range(count)]
        tasks = [("copy", word) if n % 2 else ("deny", "no") for n, word in enumerate(words)]
        rows = [
            {"task": task, "input": word, "output": said}
            for word, (task, said) in zip(words, tasks, strict=True)
        ]
        write_rows(folder / f"{part}.jsonl", rows)


def plain_text() -> str:
    """Sentences of six words."""
    rng = np.random.default_rng(0)
    return " ".join(" ".join(rng.choice(ERRAND_WORDS, 6)).capitalize() + "." for _ in range(600))


SENTENCES = ["the red dog sleeps.", "the red cat sleeps.", "a red dog runs.", "the cat runs home."]


def sentences(folder: Path) -> None:
    rows = [{"text": text} for text in SENTENCES * 20]
    write_rows(folder / "train.jsonl", rows)
    write_rows(folder / "valid.jsonl", rows[:8])


# ---- images

STRIPES = ("across", "down")


def stripe(kind: str, rng: np.random.Generator, size: int = 16) -> np.ndarray:
    """Noise with stripes that run across or down."""
    wave = 80 * np.sin(np.arange(size) * rng.uniform(1.0, 1.4) + rng.uniform(0, 6))
    lines = np.broadcast_to(wave, (size, size))
    found = (lines.T if kind == "across" else lines) + rng.normal(128, 15, (size, size))
    return found.clip(0, 255).astype(np.uint8)


def write_stripes(home: Path, counts: dict[str, int], kinds=STRIPES, size: int = 16) -> Path:
    rng = np.random.default_rng(len(kinds))
    for part, count in counts.items():
        for kind in kinds:
            (home / part / kind).mkdir(parents=True)
            for n in range(count):
                image = Image.fromarray(stripe(kind, rng, size)).convert("RGB")
                image.save(home / part / kind / f"{n}.png")
    return home


def stripes(folder: Path) -> None:
    write_stripes(folder, {"train": 80, "valid": 12, "test": 20})


PAINTS = {"red": (220, 40, 40), "green": (40, 200, 60), "blue": (40, 60, 220)}


def disc(colour: str, place: str, seed: int) -> Image.Image:
    """A disc on noise, at the top or at the bottom."""
    pixels = np.random.default_rng(seed).integers(90, 130, (24, 24, 3)).astype(np.uint8)
    y, x = np.mgrid[:24, :24]
    pixels[np.hypot(y - (6 if place == "top" else 17), x - 12) < 5] = PAINTS[colour]
    return Image.fromarray(pixels)


def discs(folder: Path) -> None:
    """Draw photos of coloured discs, with two or three captions each."""
    (folder / "images").mkdir()
    rng, number = np.random.default_rng(0), 0
    for part, count in (("train", 48), ("dev", 12)):
        rows = []
        for _ in range(count):
            colour, place = str(rng.choice(list(PAINTS))), str(rng.choice(["top", "bottom"]))
            disc(colour, place, number).save(folder / "images" / f"{number}.png")
            told = [f"A {colour} disc at the {place} .", f"a disc that is {colour}"]
            told += [f"at the {place} is a disc , left of nothing"] if number % 3 == 0 else []
            rows += [f"images/{number}.png\t{text}\n" for text in told]
            number += 1
        (folder / f"{part}.tsv").write_text("".join(rows))


def masked_discs(folder: Path) -> None:
    """Draw discs on noise, and beside each image a mask that says which colour is where."""
    rng, number = np.random.default_rng(0), 0
    y, x = np.mgrid[:24, :24]
    for part, count in (("train", 48), ("valid", 12), ("test", 12)):
        for kind in ("images", "masks"):
            (folder / kind / part).mkdir(parents=True)
        for _ in range(count):
            colour, place = int(rng.integers(3)), str(rng.choice(["top", "bottom"]))
            disc(list(PAINTS)[colour], place, number).save(folder / f"images/{part}/{number}.png")
            inside = np.hypot(y - (6 if place == "top" else 17), x - 12) < 5
            mask = Image.fromarray((inside * (1 + colour)).astype(np.uint8))
            mask.save(folder / f"masks/{part}/{number}.png")
            number += 1
    (folder / "classes.txt").write_text("\n".join(["background", *PAINTS]))


def bar(seed: int, size: tuple[int, int] = (40, 34)) -> np.ndarray:
    """An image of soft bars, which noise is easily told from."""
    rng = np.random.default_rng(seed)
    down, right = np.mgrid[: size[0], : size[1]] / rng.uniform(4, 9, 2)[:, None, None]
    return (128 + 100 * np.sin(down + right)).astype(np.uint8)


def bars(folder: Path) -> None:
    (folder / "more").mkdir()
    for n in range(24):  # of which the names could be those of mosaics
        Image.fromarray(bar(n)).save(folder / ("more" if n % 3 else ".") / f"test_{n:02}.png")


# ---- series

TS_HEAD = "@problemName toy\n@timeStamps false\n@missing true\n@univariate false\n"


def write_waves(path: Path, rows: int) -> Path:
    """Write slow and fast waves of several lengths, with two channels."""
    rng, lines = np.random.default_rng(rows), []
    for n in range(rows):
        steps = np.arange(int(rng.integers(10, 20)))
        kind = n % 2
        wave = [np.sin((0.4, 1.3)[kind] * steps + c + rng.normal()) for c in (0, 1)]
        noisy = [",".join(f"{x:.4f}" for x in w + rng.normal(0, 0.1, len(w))) for w in wave]
        lines.append(":".join([*noisy, ("slow", "fast")[kind]]) + "\n")
    path.write_text(TS_HEAD + "@classLabel true slow fast\n@data\n" + "".join(lines))
    return path


def waves(folder: Path) -> None:
    write_waves(folder / "train.ts", 60)
    write_waves(folder / "test.ts", 40)


# ---- models

HEARD = {**SMALL, "kernel": 7, "rate": RATE, "mels": 20, "dropout": 0.0, "lr": 0.01, "ema": 0}


class Animal(NamedTuple):
    """A task, what writes its data, and settings with which it is learnt in a second or some."""

    task: str
    data: Callable[[Path], object]
    settings: dict[str, Any]


LABELS = {**WIDER, "pieces": 400, "batch_tokens": 512, "warmup": 10, "lr": 0.01, "ema": 0.9}
LABELS |= {"dropout": 0.0, "label_smoothing": 0.02}
ANIMALS = {
    "translate": Animal(
        "translate",
        turned,
        {**SMALL, "pieces": 300, "steps": 2, "valid_every": 2, "vocabularies": "joint"},
    ),
    "classify": Animal(
        "classify", colours, {**LABELS, "steps": 80, "valid_every": 40, "linear": False}
    ),
    "tag": Animal("tag", walks, {**LABELS, "steps": 120, "valid_every": 60, "linear": False}),
    "text": Animal(
        "text",
        errands,
        {
            **{**WIDER, "pieces": 320, "batch_tokens": 512, "warmup": 20, "lr": 0.01},
            **{"valid_sentences": 40, "steps": 120, "valid_every": 120, "metric": "answers"},
        },
    ),
    "fill": Animal(
        "language",
        sentences,
        {
            **{**WIDER, "objective": "masked", "steps": 250, "valid_every": 250, "pieces": 300},
            **{"context": 16, "batch_tokens": 256, "lr": 0.01, "warmup": 10},
        },
    ),
    "images": Animal(
        "classify",
        stripes,
        {
            **{**WIDER, "depth": 2, "batch": 16, "warmup": 5, "lr": 0.003, "ema": 0.8},
            **{"steps": 60, "valid_every": 15, "augment": "crop", "linear": False},
        },
    ),
    "caption": Animal(
        "caption",
        discs,
        {
            **{"like": "cct", "image": 24, "patch": 4, "depth": 1, "width": 24, "heads": 2},
            **{"ffn_width": 48, "decoder_depth": 1, "decoder_width": 32, "decoder_heads": 2},
            **{"decoder_ffn_width": 64, "cell_width": 48, "pieces": 320, "batch": 16},
            **{"warmup": 10, "lr": 0.01, "ema": 0.0, "dropout": 0.0, "label_smoothing": 0.0},
            **{"augment": "flip", "max_length": 16, "steps": 100, "valid_every": 100},
        },
    ),
    "segment": Animal(
        "segment",
        masked_discs,
        {
            **{**SMALL, "patch": 4, "batch": 8, "warmup": 3, "lr": 0.01, "ema": 0},
            **{"steps": 60, "valid_every": 30},
        },
    ),
    "denoise": Animal(
        "denoise",
        bars,
        {
            **{**SMALL, "depth": 2, "ffn_width": 16, "every": 1, "window": 4, "image": 16},
            **{"batch": 8, "warmup": 3, "lr": 0.01, "ema": 0.8, "steps": 60, "valid_every": 15},
            **{"valid": "0.1"},
        },
    ),
    "series": Animal(
        "classify",
        waves,
        {
            **{"depth": 1, "width": 32, "chunk": 4, "steps": 60, "lr": 0.01, "valid_every": 60},
            **{"linear": False},
        },
    ),
    "sounds": Animal(
        "classify",
        lambda folder: sound_folders(folder, 90),
        {
            **{**HEARD, "model.channels": 8, "batch_seconds": 8, "time_masks": 1, "valid": 0.2},
            **{"frequency_masks": 0, "steps": 60, "valid_every": 30, "linear": False},
        },
    ),
    "transcribe": Animal(
        "transcribe",
        lambda folder: spoken(folder, 240),
        {
            **{**HEARD, **WIDER, "model.channels": 16, "subsampling": 2, "batch_seconds": 15},
            **{"speeds": 1, "time_masks": 0, "frequency_masks": 0, "valid": "0.2"},
            **{"steps": 100, "valid_every": 50},
        },
    ),
}


def spoilt(model: Path, to: Path, file: str = "config.json", /, **changes: Any) -> Path:
    """A copy of a model in which a file of JSON says something else, and no hash tells."""
    left_out = shutil.ignore_patterns("checkpoints", "SHA256SUMS")
    shutil.copytree(model, to, ignore=left_out, dirs_exist_ok=True)
    told = json.loads((model / file).read_text())
    (to / file).write_text(json.dumps({**told, **changes}))
    return to


class Zoo:
    """What is made for the tests of a session, by the first who asks for it."""

    def __init__(self, home: Path):
        self.home = home

    def once(self, name: str, make: Callable[[Path], object]) -> Path:
        """A folder that is filled once, whichever process asks first; it is not to be changed."""
        folder, done = self.home / name, self.home / f"{name}.done"
        with (self.home / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                make(folder)
                done.touch()
        return folder

    def data(self, name: str) -> Path:
        """The data that the model of a name is trained on."""
        folder = self.once(f"{name}-data", ANIMALS[name].data)
        named = [path for path in (folder / "letters", folder / "speech.tsv") if path.exists()]
        return named[0] if named else folder

    def model(self, name: str) -> Path:
        """A model that was trained, to be read."""
        import regard

        task, _, settings = ANIMALS[name]
        data = self.data(name)
        return self.once(
            name, lambda out: regard.train(task, data=data, out=out, quiet=True, **settings)
        )

    def copy(self, name: str, to: Path) -> Path:
        """A copy of a model, to be written to."""
        return shutil.copytree(self.model(name), to)
