"""Everyday English into Chinese: which sentences of a list a model gets right, by accepted answers.

    python bench/everyday.py [MODEL] [--list tests/data/everyday.tsv ...]

A list has one sentence a line: the English, a tab, and the accepted answers between bars, in which
[a/b/] stands for a, b or nothing. Punctuation and spaces are ignored, and 您 is 你.
"""

import argparse
import itertools
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import regard

DATA = Path(__file__).parents[1] / "tests" / "data"
LISTS = [DATA / "everyday.tsv", DATA / "first_words.tsv"]


class Row(NamedTuple):
    """An English sentence, the patterns of accepted answers, and a model's answer."""

    english: str
    accepted: list[str]
    answer: str = ""

    @property
    def right(self) -> bool:
        """Whether the answer is one that is accepted."""
        return any(plain(self.answer) in map(plain, variants(one)) for one in self.accepted)


def plain(text: str) -> str:
    """Letters and digits of a text in their usual form, with 你 for 您."""
    text = unicodedata.normalize("NFKC", text).replace("您", "你").lower()
    return "".join(letter for letter in text if letter.isalnum())


def variants(pattern: str) -> Iterator[str]:
    """Texts that a pattern stands for: one of each [a/b/]."""
    parts = re.split(r"\[([^][]*)\]", pattern)
    choices = [part.split("/") if n % 2 else [part] for n, part in enumerate(parts)]
    return map("".join, itertools.product(*choices))


def read(path: Path) -> list[Row]:
    """Sentences of a list with their accepted answers."""
    rows = (line.split("\t") for line in path.read_text().splitlines())
    return [
        Row(english, [one.strip() for one in accepted.split("|")]) for english, accepted in rows
    ]


def judge(model: str, path: Path) -> list[Row]:
    """Sentences of a list with the answers of a model, by its own defaults."""
    rows = read(path)
    answers = regard.load(model).run([row.english for row in rows])
    return [row._replace(answer=str(one)) for row, one in zip(rows, answers, strict=True)]


def main() -> None:
    """Print each row of the lists, and the share that is right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="en-zh")
    parser.add_argument("--list", nargs="*", type=Path, default=LISTS)
    args = parser.parse_args()
    for path in args.list:
        rows = judge(args.model, path)
        for row in rows:
            print("right" if row.right else "WRONG", row.english, row.answer, sep="\t")
        right = sum(row.right for row in rows)
        print(f"{path.name}: {right} of {len(rows)} right ({100 * right / len(rows):.1f}%)\n")


if __name__ == "__main__":
    main()
