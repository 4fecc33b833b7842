"""One model for many jobs: the data of the recipe text_many, and how well it does each job.

    python bench/text_many.py out=runs/text-many            makes the data
    regard train text_many data=runs/text-many out=runs/many
    python bench/text_many.py out=runs/text-many train      one model a job, a fifth of the steps
    python bench/text_many.py out=runs/text-many judge=runs/many part=valid

A column `task` has the prefix of each row: translation (Multi30k), the sentiment of a phrase
(SST-2), the type of a question (TREC), the title of an article from the first words of its first
paragraph (WikiText-2), and questions about the table of a made-up world, whose answer stands in the
text after the question. out/ has all jobs, of which small ones are there several times; a folder
in it has one job alone. Each model of one job is trained like the one of all, for a fifth of its
steps, so that all five take about as long as the one. SST-2 has no labelled test part: its dev part
is the test here, and some training sentences are held out for validation, with all phrases that are
part of them; so are some of TREC's questions.
"""

import lzma
import random
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import regard
from regard.recipes import data_folder, text_many

PARTS = ("train", "valid", "test")
TYPES = {
    "ABBR": "abbreviation",
    "DESC": "description",
    "ENTY": "entity",
    "HUM": "human",
    "LOC": "location",
    "NUM": "number",
}
FIRST_WORDS = 60  # of an article
VALID = 100  # rows of each job by which a training chooses
Rows = list[tuple[str, str]]


class Job(NamedTuple):
    """A job: its prefix, its rows by part, how often each is there, and its metric."""

    prefix: str
    rows: Callable[[], dict[str, Rows]]
    times: int
    metric: str
    score: str


def lines(path: Path, encoding: str = "utf-8") -> list[str]:
    """Lines of a file, without tabs."""
    text = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    return text.decode(encoding).replace("\r", "").split("\n")[:-1]


def held_out(rows: Rows, share: float) -> dict[str, Rows]:
    """Training rows without a share for validation; rows of the same source stay together."""
    chosen = random.Random(1).sample(sorted({source for source, _ in rows}), round(share))
    apart = set(chosen)
    return {
        "train": [row for row in rows if row[0] not in apart],
        "valid": [row for row in rows if row[0] in apart],
    }


def translations() -> dict[str, Rows]:
    """Captions in English and German."""
    folder = Path(data_folder("multi30k"))
    names = zip(PARTS, ("train", "val", "test_2016_flickr"), strict=True)
    return {
        part: [
            (english.replace("\t", " "), german.replace("\t", " "))
            for english, german in zip(
                lines(folder / f"{name}.en"), lines(folder / f"{name}.de"), strict=True
            )
        ]
        for part, name in names
    }


def sentiments() -> dict[str, Rows]:
    """Phrases of film reviews, and whether they are for or against the film."""
    folder, names = Path(data_folder("sst2")), ("negative", "positive")

    def read(path: Path) -> Rows:
        cells = (line.split("\t") for line in lines(path)[1:])
        return [(text.strip(), names[int(label)]) for text, label in cells]

    rows = read(folder / "train.tsv.xz")
    # training rows are phrases of sentences: one that holds a held-out phrase is left out
    whole = [row for row in rows if len(row[0].split()) >= 12]
    valid = random.Random(1).sample(whole, 400)
    inside = [f" {text} " for text, _ in valid]
    apart = "\n".join(inside)
    keep = [
        r for r in rows if f" {r[0]} " not in apart and not any(t in f" {r[0]} " for t in inside)
    ]
    return {"train": keep, "valid": valid, "test": read(folder / "dev.tsv")}


def question_types() -> dict[str, Rows]:
    """Questions, and what kind of answer each asks for."""
    folder = Path(data_folder("trec"))

    def read(path: Path) -> Rows:
        cells = (line.split(" ", 1) for line in lines(path, "iso-8859-1"))
        return [(text.strip(), TYPES[label.split(":")[0]]) for label, text in cells]

    return {**held_out(read(folder / "TREC.train"), 400), "test": read(folder / "TREC.test")}


def titles() -> dict[str, Rows]:
    """First words of articles, and their titles."""

    def read(path: Path) -> Rows:
        found, title = [], ""
        for line in lines(path):
            if heading := re.fullmatch(r" = ([^=].*) = ", line):
                title = heading[1]
            elif title and line.strip() and "=" not in line[:3]:
                text = re.sub(r" @(.)@ ", r"\1", line)
                found.append((" ".join(text.split()[:FIRST_WORDS]), title))
                title = ""
        return found

    folder = Path(data_folder("wikitext-2"))
    return {part: read(folder / f"wiki.{part}.tokens.xz") for part in PARTS}


NAMES = ["Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gina", "Hugo"]
TABLE = {
    "lives in {}": ("where does {} live ?", ["Rome", "Oslo", "Bern", "Paris", "Lima", "Cairo"]),
    "has a {}": ("what animal does {} have ?", ["cat", "dog", "horse", "parrot", "rabbit", "goat"]),
    "works as a {}": (
        "what is the job of {} ?",
        ["baker", "doctor", "pilot", "teacher", "farmer", "singer"],
    ),
    "wears {}": (
        "what colour does {} wear ?",
        ["red", "blue", "green", "yellow", "white", "black"],
    ),
}


def world(rng: random.Random) -> tuple[str, str]:
    """A question with a text about three people, and the answer: the sentence that says it."""
    people, columns = rng.sample(NAMES, 3), rng.sample(list(TABLE), 2)
    table = {column: rng.sample(TABLE[column][1], 3) for column in columns}
    facts = [
        f"{person} {column.format(value)} ."
        for column, values in table.items()
        for person, value in zip(people, values, strict=True)
    ]
    rng.shuffle(facts)
    column, who = rng.choice(columns), rng.randrange(3)
    question = TABLE[column][0].format(people[who])
    return f"{question} {' '.join(facts)}", f"{people[who]} {column.format(table[column][who])}"


def answers() -> dict[str, Rows]:
    """Questions about made-up worlds."""
    counts = {"train": 20000, "valid": 400, "test": 1000}
    found: dict[str, Rows] = {}
    seen: set[str] = set()
    for number, (part, count) in enumerate(counts.items()):
        rng, rows = random.Random(number), []
        while len(rows) < count:
            row = world(rng)
            if row[0] not in seen:
                seen.add(row[0])
                rows.append(row)
        found[part] = rows
    return found


JOBS = {
    "translate": Job("translate English to German", translations, 1, "bleu", "BLEU"),
    "sentiment": Job("sentiment", sentiments, 1, "answers", "exact match"),
    "question": Job("question type", question_types, 3, "answers", "exact match"),
    "title": Job("title", titles, 6, "rouge", "ROUGE-L"),
    "answer": Job("answer", answers, 1, "answers", "exact match"),
}


def write(path: Path, rows: Iterable[tuple[str, str, str]]) -> None:
    """Write a table of sources, targets and tasks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    cells = (("source", "target", "task"), *rows)
    path.write_text("".join("\t".join(row) + "\n" for row in cells), "utf-8")


def make(out: Path) -> None:
    """Write the parts of all jobs together, and of each alone."""
    together: dict[str, list[tuple[str, str, str]]] = {part: [] for part in PARTS}
    for name, job in JOBS.items():
        for part, pairs in job.rows().items():
            rows = [(source, target, job.prefix) for source, target in pairs]
            write(out / name / f"{part}.tsv", rows)
            together[part] += {"train": rows * job.times, "valid": rows[:VALID], "test": rows}[part]
            print(f"{name} {part}: {len(rows):,} rows")
    for part, rows in together.items():
        random.Random(1).shuffle(rows)  # a validation decodes the first rows
        write(out / f"{part}.tsv", rows)


def one_job(out: Path, name: str) -> Path:
    """Folder of the model of one job."""
    return out.parent / f"one-{name}"


def train(out: Path) -> None:
    """Train a model for each job, for a fifth of the steps."""
    steps = text_many.SETTINGS["steps"] // len(JOBS)
    for name in JOBS:
        folder = one_job(out, name)
        if (folder / "model.safetensors").is_file():
            continue
        regard.train(
            "text_many",
            data=out / name,
            out=folder,
            steps=steps,
            valid_every=steps // len(JOBS),
            warmup=text_many.SETTINGS["warmup"] // len(JOBS),
        )


def judge(out: Path, many: str, part: str) -> None:
    """Print the score of each job by the model of all and by its own, and their ratio."""
    for name, job in JOBS.items():
        alone = one_job(out, name)
        asked: dict[str, Any] = {"data": out / name, "part": part, "metric": job.metric, "beam": 1}
        ours, own = (float(regard.evaluate(one, **asked)[job.score]) for one in (many, alone))
        print(f"{name}: {job.score} {ours:.2f}, its own model {own:.2f}", flush=True)


def main(words: list[str]) -> None:
    """Make data, train, or judge."""
    told = dict(word.split("=", 1) for word in words if "=" in word)
    out = Path(told.get("out", "runs/text-many"))
    if "judge" in told:
        judge(out, told["judge"], told.get("part", "valid"))
    elif "train" in words:
        train(out)
    else:
        make(out)


if __name__ == "__main__":
    main(sys.argv[1:])
