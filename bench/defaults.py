"""Defaults against the best linear model: both learn from the same rows and are tested on others.

    python bench/defaults.py OUT [sets=trec,fsdd] [minutes=2] [seeds=1] [threads=1] [data=DATA]
    python bench/defaults.py --quick        two sets without an official test part, ten steps each

Regard is trained with nothing but `minutes=` (and what says how files are named) and judged by
`regard.evaluate`. The linear model is chosen by cross-validation within the training rows, and is
scikit-learn's alone: TF-IDF of words and characters, log energies of bands, pixels with histograms
of gradients, means and deviations of stretches of a series, or words with their neighbours for
tags. p is that of a paired bootstrap over test rows (sentences of tags). Seconds are the
processor's. Every result is kept in OUT/results.json, so that the same command goes on where it
stopped. A seed draws other training rows where a set has more of them (SST-2, UD, Fashion, CIFAR),
and begins other weights; all seeds are tested on the same rows, and the table has their mean, whose
p is of the same bootstrap over all of them. Phrases of SST-2 that are tested are of sentences that
no phrase learnt from is of.
The sets of series are those of the package aeon (`datasets/data`), looked for in DATA.
"""

import json
import lzma
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from apart import machine
from PIL import Image
from sklearn.linear_model import LogisticRegression, RidgeClassifier
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from sklearn.naive_bayes import MultinomialNB
from sklearn.pipeline import Pipeline, make_pipeline, make_union
from sklearn.preprocessing import StandardScaler
from sklearn.svm import LinearSVC

import regard
from regard.data.image_files import read_idx
from regard.files import write_json
from regard.metrics.score import paired_bootstrap

SAMPLES = 2000  # of a bootstrap
FOLDS = {1_000: 5, 10_000: 3}  # rows up to which so many parts are held out in turn; of more, 2
TESTED = 2_000  # rows of the larger test parts
RIGHT = "right.npz"  # how many of each unit were right, in the folder of a run


class Task(NamedTuple):
    """What is learnt: a task of Regard with its data, and the same rows for scikit-learn."""

    name: str  # of Regard's task
    settings: dict[str, Any]  # where its data are
    train: tuple[Any, Sequence[Any]]  # inputs as the linear model reads them, labels
    test: tuple[Any, Sequence[Any]]
    linear: str  # the row of LINEAR
    units: Sequence[int]  # test rows of each unit that a bootstrap draws, one after the other


# ---- linear models ------------------------------------------------------------------------------


def of_texts() -> tuple[Pipeline, list[dict[str, Any]]]:
    """TF-IDF of words, or of words and characters, and what learns from it."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=r"\S+")
    spelt = TfidfVectorizer(ngram_range=(2, 5), sublinear_tf=True, analyzer="char_wb")
    pipe = Pipeline([("read", words), ("learn", LinearSVC())])
    learners: list[Any] = [MultinomialNB(alpha=a) for a in (0.1, 0.3, 1.0)]
    learners += [LinearSVC(C=c) for c in (0.1, 0.3, 1.0)]
    return pipe, [{"read": [words, make_union(words, spelt)], "learn": learners}]


def of_vectors() -> tuple[Pipeline, list[dict[str, Any]]]:
    """Standardised vectors, and what learns from them."""
    learners: list[Any] = [LogisticRegression(C=c, max_iter=300) for c in (0.001, 0.01, 0.1, 1)]
    learners += [RidgeClassifier(alpha=a) for a in (10, 100, 1000)]
    pipe = Pipeline([("scale", StandardScaler()), ("learn", LogisticRegression())])
    return pipe, [{"learn": learners}]


def of_words() -> tuple[Pipeline, list[dict[str, Any]]]:
    """A linear SVM of a word, its ends and its neighbours."""
    from sklearn.feature_extraction import FeatureHasher

    return make_pipeline(FeatureHasher(), LinearSVC()), [{"linearsvc__C": [0.1, 0.3]}]


LINEAR: dict[str, Callable[[], Any]] = {"texts": of_texts, "vectors": of_vectors, "words": of_words}


def fit_linear(task: Task) -> tuple[np.ndarray, str]:
    """Labels that the best linear model gives to the test rows, and which it is."""
    pipe, grid = LINEAR[task.linear]()
    rows = len(task.train[1])
    folds = next((folds for most, folds in FOLDS.items() if rows <= most), 2)
    mixed = StratifiedKFold(folds, shuffle=True, random_state=0)  # files are sorted by speaker
    search = GridSearchCV(pipe, grid, cv=mixed).fit(*task.train)
    chosen = search.best_params_
    read = {"read": "characters, too" if "FeatureUnion" in str(chosen.get("read")) else "words"}
    told = [f"{value}" for value in ({**chosen, **read} if "read" in chosen else chosen).values()]
    return search.predict(task.test[0]), ", ".join(told)


def gradients(images: np.ndarray, cell: int = 4, bins: int = 8) -> np.ndarray:
    """Pixels of images (n, h, w, c), with histograms of gradients in cells (Dalal, Triggs 2005)."""
    grey = images.astype(np.float32).mean(-1) / 255
    down, across = np.gradient(grey, axis=(1, 2))
    size = np.hypot(down, across)
    turn = ((np.arctan2(down, across) % np.pi) / np.pi * bins).astype(int) % bins
    n, h, w = (len(grey), grey.shape[1] // cell, grey.shape[2] // cell)
    table = (size[..., None] * np.eye(bins, dtype=np.float32)[turn])[:, : h * cell, : w * cell]
    table = table.reshape(n, h, cell, w, cell, bins).sum((2, 4))
    table /= np.sqrt((table**2).sum(-1, keepdims=True)) + 0.1
    return np.hstack([images.reshape(n, -1) / 255, table.reshape(n, -1)])


def bands(sound: np.ndarray, count: int = 20, parts: int = 12) -> np.ndarray:
    """Log energies of bands, evenly spaced in mel, in stretches of a sound, and its length."""
    sound = np.pad(sound, (0, max(0, 256 - len(sound))))
    frames = np.lib.stride_tricks.sliding_window_view(sound, 256)[::80] * np.hanning(256)
    power = np.abs(np.fft.rfft(frames)) ** 2
    edges = 700 * (np.exp(np.linspace(0, np.log(1 + 4000 / 700), count + 1)) - 1)
    places = np.unique(np.round(edges / 4000 * 128).astype(int))[:-1]
    logs = np.log(np.add.reduceat(power, places, axis=1) + 1e-6)
    return np.append(stretches(logs, parts), np.log(len(sound)))


def stretches(values: np.ndarray, parts: int) -> np.ndarray:
    """Means of values (n, c) over so many stretches, one after the other."""
    ends = np.arange(parts + 1) * len(values) // parts
    return np.concatenate(
        [values[a : max(b, a + 1)].mean(0) for a, b in zip(ends, ends[1:], strict=False)]
    )


# ---- sets ---------------------------------------------------------------------------------------


def of_rows(folder: Path, train: Sequence[Any], test: Sequence[Any]) -> Task:
    """Texts with labels, written as train.tsv and test.tsv."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("test", test)):
        lines = "".join(f"{text}\t{label}\n" for text, label in rows)
        (folder / f"{name}.tsv").write_text("text\tlabel\n" + lines)
    both = [([text for text, _ in rows], [label for _, label in rows]) for rows in (train, test)]
    return Task("classify", {"data": folder}, both[0], both[1], "texts", [1] * len(test))


def trec(data: Path, folder: Path, rows: int, seed: int) -> Task:
    """Questions of TREC with their coarse labels, and its official test part."""
    parts = []
    for name in ("TREC.train", "TREC.test"):
        lines = (data / "trec" / name).read_text(encoding="latin-1").splitlines()
        split = [line.split(" ", 1) for line in lines if line]
        parts.append([(text.strip(), label.split(":")[0]) for label, text in split])
    return of_rows(folder, parts[0][:rows], parts[1])


def sst2(data: Path, folder: Path, rows: int, seed: int) -> Task:
    """Phrases of SST-2's train; those that are tested are of other sentences, in any size."""
    found, home = phrases(data)
    drawn = np.random.default_rng(seed).permutation(sorted(home))
    learnt = [text for text in drawn if all(n % 4 for n in home[text])][:rows]
    mixed = np.random.default_rng(0).permutation(sorted(home))
    tested = [text for text in mixed if not any(n % 4 for n in home[text])][:TESTED]
    return of_rows(folder, *([(text, found[text]) for text in some] for some in (learnt, tested)))


@cache
def phrases(data: Path) -> tuple[dict[str, str], dict[str, list[int]]]:
    """Labels of the phrases of SST-2, and the sentences that each is a part of."""
    with lzma.open(data / "sst2" / "train.tsv.xz", "rt", encoding="utf-8") as lines:
        read = [line.rstrip("\n").split("\t") for line in lines][1:]
    found = {text.strip(): label for text, label in read}
    return found, sentences(found)


def sentences(texts: Iterable[str]) -> dict[str, list[int]]:
    """Numbers of the sentences that each phrase of two or more words is a part of.

    A sentence is a phrase that is no part of another one.
    """
    home: dict[str, list[int]] = {}
    whole: list[str] = []
    having: dict[str, list[int]] = defaultdict(list)
    for text in sorted(texts, key=lambda text: (-len(text), text)):
        words = text.split()
        if len(words) < 2:
            continue
        fewest = min((having[word] for word in words), key=len)
        home[text] = [n for n in fewest if f" {text} " in f" {whole[n]} "]
        if not home[text]:
            home[text] = [len(whole)]
            for word in set(words):
                having[word].append(len(whole))
            whole.append(text)
    return home


def fsdd(data: Path, folder: Path, rows: int, seed: int) -> Task:
    """Spoken digits; takes 0 to 4 of each digit and speaker are the official test part."""
    import soundfile

    files = sorted((data / "fsdd" / "recordings").iterdir())
    tested = [file for file in files if int(file.stem.split("_")[2]) < 5]
    learnt = [file for file in files if int(file.stem.split("_")[2]) >= 5][:: 2700 // rows]
    for part, some in (("train", learnt), ("test", tested)):
        for file in some:
            place = folder / part / file.name.split("_")[0] / file.name
            place.parent.mkdir(parents=True, exist_ok=True)
            if not place.exists():
                place.write_bytes(file.read_bytes())
    both = [
        (np.stack([bands(soundfile.read(file)[0]) for file in some]), [f.name[0] for f in some])
        for some in (learnt, sorted(tested, key=lambda file: (file.name[0], file.name)))
    ]
    return Task("sounds", {"data": folder}, both[0], both[1], "vectors", [1] * len(tested))


def of_images(folder: Path, train: Any, test: Any) -> Task:
    """Images (n, h, w, c) with labels, written as folders of classes."""
    both = []
    for part, (images, labels) in (("train", train), ("test", test)):
        order = np.argsort(labels, kind="stable")
        images, labels = images[order], labels[order]
        for n, (image, label) in enumerate(zip(images, labels, strict=True)):
            place = folder / part / str(label) / f"{n:05}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            if not place.exists():
                Image.fromarray(image.squeeze()).save(place)
        both.append((gradients(images), [str(label) for label in labels]))
    return Task("images", {"data": folder}, both[0], both[1], "vectors", [1] * len(test[1]))


def fashion(data: Path, folder: Path, rows: int, seed: int) -> Task:
    """Images of Fashion-MNIST's train: some are learnt, the last are tested."""
    place = data / "fashion-mnist"
    images = read_idx(place / "train-images-idx3-ubyte.gz")[..., None]
    labels = read_idx(place / "train-labels-idx1-ubyte.gz")
    drawn = np.random.default_rng(seed).permutation(len(images) - TESTED)[:rows]
    parts = (drawn, slice(-TESTED, None))
    return of_images(folder, *((images[some], labels[some]) for some in parts))


def cifar(data: Path, folder: Path, rows: int, seed: int) -> Task:
    """Images of CIFAR-10's train: some of each class are learnt, others are tested."""
    parts: list[list[Any]] = [[], []]
    for file in sorted((data / "cifar10").glob("train_*.jpg")):
        tiles = np.array(Image.open(file)).reshape(-1, 32, 50, 32, 3).transpose(0, 2, 1, 3, 4)
        tiles, label = tiles.reshape(-1, 32, 32, 3), file.stem.split("_")[1]
        mixed = tiles[np.random.default_rng(0).permutation(len(tiles))]  # names are sorted
        drawn = np.random.default_rng(seed).permutation(mixed[: -TESTED // 10])[: rows // 10]
        for part, some in zip(parts, (drawn, mixed[-TESTED // 10 :]), strict=True):
            part += [(image, label) for image in some]
    both = ([np.stack([x for x, _ in part]), np.array([y for _, y in part])] for part in parts)
    return of_images(folder, *both)


def ud(data: Path, folder: Path, rows: int, seed: int) -> Task:
    """Sentences of English EWT with the parts of speech of their words; dev is tested."""
    folder.mkdir(parents=True, exist_ok=True)
    both, units = [], []
    for name, part, count in (("train", "train", rows), ("dev", "test", TESTED)):
        with lzma.open(data / "ud-en-ewt" / f"en_ewt-ud-{name}.conllu.xz", "rt") as lines:
            sentences = lines.read().strip().split("\n\n")
        if part == "train":
            sentences = np.random.default_rng(seed).permutation(sentences).tolist()
        sentences = sentences[:count]
        (folder / f"{part}.conllu").write_text("\n\n".join(sentences) + "\n\n")
        cells = [[line.split("\t") for line in one.split("\n")] for one in sentences]
        words = [[row for row in one if row[0].isdecimal()] for one in cells]
        inputs = [x for one in words for x in windows([row[1] for row in one])]
        both.append((inputs, [row[3] for one in words for row in one]))
        units = [len(one) for one in words]
    return Task("tag", {"data": folder}, both[0], both[1], "words", units)


def windows(words: list[str]) -> Iterator[dict[str, Any]]:
    """What a linear tagger reads of each word of a sentence."""
    around = ["", "", *words, "", ""]
    for n, word in enumerate(words):
        found: dict[str, Any] = {f"{i}": around[n + 2 + i].lower() for i in range(-2, 3)}
        found |= {f"end{k}": word[-k:].lower() for k in (1, 2, 3)}
        shape = ("A" if c.isupper() else "0" if c.isdigit() else "" for c in word)
        found["shape"] = "".join(shape)[:3]
        yield found | {"first": n == 0, "pair": f"{around[n + 1]} {word}".lower()}


def series(name: str) -> Callable[[Path, Path, int, int], Task]:
    """A set of series that the package aeon has in it, with its own test part."""

    def read(data: Path, folder: Path, rows: int, seed: int) -> Task:
        folder.mkdir(parents=True, exist_ok=True)
        both = []
        for part in ("TRAIN", "TEST"):
            text = (data / name / f"{name}_{part}.ts").read_text()
            (folder / f"{part.lower()}.ts").write_text(text)
            lines = text.split("@data")[1].split()
            cells = [line.split(":") for line in lines]
            values = [np.array([c.split(",") for c in one[:-1]], float).T for one in cells]
            flat = [
                np.append(stretches(x, 12), [x.std(0), np.diff(x, axis=0).std(0)]) for x in values
            ]
            both.append((np.stack(flat), [one[-1] for one in cells]))
        return Task("series", {"data": folder}, both[0], both[1], "vectors", [1] * len(both[1][1]))

    return read


SETS: dict[str, tuple[Callable[[Path, Path, int, int], Task], int]] = {
    "trec": (trec, 5_452),
    **{f"sst2-{rows}": (sst2, rows) for rows in (200, 2_000, 8_000, 20_000)},
    "ud-2000": (ud, 2_000),
    "fsdd": (fsdd, 2_700),
    "fashion-1000": (fashion, 1_000),
    "cifar-1000": (cifar, 1_000),
    "motions": (series("BasicMotions"), 40),
    "vowels": (series("JapaneseVowels"), 270),
}


# ---- what is measured ---------------------------------------------------------------------------


def measure(task: Task, out: Path, how: dict[str, Any]) -> dict[str, Any]:
    """Train and fit both, and compare them on the test rows."""
    began = time.process_time()
    regard.train(task.name, out=out, **task.settings, **how)
    ours_took = time.process_time() - began
    judged = regard.evaluate(out, **task.settings, part="test", outputs=out / "answers.txt")
    text = (out / "answers.txt").read_text()
    answers = text.split() if task.name == "tag" else text.splitlines()
    began = time.process_time()
    theirs, chosen = fit_linear(task)
    took = time.process_time() - began
    wanted = np.array(task.test[1])
    ours, theirs = np.array([x.rpartition("/")[2] for x in answers]) == wanted, theirs == wanted
    if abs(100 * ours.mean() - judged["accuracy"]) > 0.01:
        raise RuntimeError(f"{100 * ours.mean():.3f} of answers, but eval {judged['accuracy']:.3f}")
    starts = np.append(0, np.cumsum(task.units)[:-1])
    size = np.array(task.units)
    right = [np.add.reduceat(both.astype(int), starts) for both in (ours, theirs)]
    np.savez(out / RIGHT, ours=right[0], linear=right[1], size=size)
    found = compared([out])
    recipe = json.loads((out / "recipe.json").read_text())
    told = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {
        **{"rows": len(task.train[1]), "tested": len(wanted), "ours": found.ours},
        **{"linear": found.theirs, "p": found.p, "ours_seconds": ours_took},
        **{"linear_seconds": took, "linear_model": chosen, "inside": recipe.get("linear", "")},
        "valid": [{k: v for k, v in row.items() if "valid/" in k} for row in told][-1],
        "steps": max(row["step"] for row in told),
    }


def compared(runs: Sequence[Path]) -> Any:
    """Mean accuracies of runs that were tested on the same rows, and p of their difference."""
    kept = [dict(np.load(run / RIGHT)) for run in runs]
    size = kept[0]["size"]

    def share(of: str) -> Callable[[np.ndarray], np.ndarray]:
        sums = np.mean([one[of] for one in kept], 0)
        return lambda rows: 100 * np.sum(sums[rows], -1) / size[rows].sum(-1)

    both = {"accuracy": (share("ours"), share("linear"))}
    return paired_bootstrap(both, len(size), SAMPLES, "paired bootstrap")[0]


def table(results: dict[str, dict[str, Any]], out: Path) -> str:
    """Results as a Markdown table: of each set the mean over seeds."""
    rows = ["| set, budget | rows learnt / tested | Regard | linear | by seed | p | seconds |"]
    rows += ["|---|---|---|---|---|---|---|"]
    for name in dict.fromkeys(key.rpartition(", ")[0] for key in results):
        some = {key: one for key, one in results.items() if key.rpartition(", ")[0] == name}
        found, first = compared([out / place_of(key) for key in some]), next(iter(some.values()))
        seeds = " ".join(f"{one['ours'] - one['linear']:+.2f}" for one in some.values())
        took = [
            np.mean([one[f"{of}_seconds"] for one in some.values()]) for of in ("ours", "linear")
        ]
        shown = f"{first['rows']:,} / {first['tested']:,} | {found.ours:.2f} | {found.theirs:.2f}"
        rows.append(
            f"| {name} | {shown} | {seeds} | {found.p:.3f} | {took[0]:.0f}, {took[1]:.1f} |"
        )
    return "\n".join(rows)


def place_of(key: str) -> str:
    """Folder of a run."""
    return key.replace(", ", "-").replace(" ", "")


def main(out: Path, values: dict[str, str], most: int | None = None, **how: Any) -> None:
    """Measure what is not measured yet, and print the table."""
    data = Path(values.get("data", "../shared/data"))
    minutes = values.get("minutes", "2")
    names = values.get("sets", ",".join(SETS)).split(",")
    kept = out / "results.json"
    results = json.loads(kept.read_text()) if kept.exists() else {}
    how = how or {"minutes": float(minutes)}
    how |= {"threads": int(values.get("threads", 1))}
    for name in names:
        make, rows = SETS[name]
        for seed in range(1, int(values.get("seeds", 1)) + 1):
            key = f"{name}, {'quick' if most else f'{minutes} min'}, {seed}"
            if key in results:
                continue
            print(key, flush=True)
            task = make(data, out / "data" / f"{name}-{seed}", min(rows, most or rows), seed)
            results[key] = measure(task, out / place_of(key), {**how, "seed": seed})
            write_json(kept, results)
            print(json.dumps(results[key]), flush=True)
    print(table(results, out))


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(machine(), flush=True)
    if sys.argv[1:] == ["--quick"]:
        with tempfile.TemporaryDirectory() as folder:
            main(Path(folder), {"sets": "sst2-200,fashion-1000"}, most=200, steps=10)
    else:
        main(Path(sys.argv[1]), dict(word.split("=", 1) for word in sys.argv[2:]))
