"""CIDEr-D: how much a caption agrees with what several people wrote of an image.

Vedantam, Zitnick and Parikh 2015.
"""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from regard.errors import UsageError
from regard.metrics.text import words

LONGEST = 4  # words of a run
SPREAD = 6.0  # of the penalty of a length that differs
SIGNATURE = f"n:{LONGEST}|sigma:{SPREAD:g}|case:lc|tok:letters and digits|idf:these references"

Run = tuple[str, ...]


def runs(text: Sequence[str]) -> Counter[Run]:
    """Count all runs of 1 to 4 words."""
    return Counter(
        tuple(text[at : at + n]) for n in range(1, LONGEST + 1) for at in range(len(text) - n + 1)
    )


def weighted(counts: Counter[Run], rarity: dict[Run, float], rarest: float) -> list[dict]:
    """Return how often each run is there times how rare it is, for each length of runs."""
    found: list[dict[Run, float]] = [{} for _ in range(LONGEST)]
    for run, count in counts.items():
        found[len(run) - 1][run] = count * rarity.get(run, rarest)
    return found


def agreement(ours: dict[Run, float], theirs: dict[Run, float]) -> float:
    """Return the cosine of two texts, where a run that we repeat too often counts as theirs."""
    size = math.sqrt(sum(x * x for x in ours.values()) * sum(x * x for x in theirs.values()))
    common = sum(min(x, theirs[run]) * theirs[run] for run, x in ours.items() if run in theirs)
    return common / size if size else 0.0


def cider(outputs: Sequence[str], references: Sequence[Sequence[str]]) -> np.ndarray:
    """Return the CIDEr-D of each output against the references of its image, 0 to 1000.

    10 mean over n of mean over references of exp(-(l - l')^2 / 2 sigma^2) min(g, g') g' / |g||g'|,
    in percent. g counts the runs of n words, times log(images / images whose references have it).
    """
    if not outputs:
        raise UsageError("nothing to score: there are no outputs")
    if len(outputs) != len(references) or not all(references):
        raise UsageError(
            f"{len(outputs)} outputs for {len(references)} images; give references each"
        )
    told = [[words(text) for text in some] for some in references]
    counted = [[runs(text) for text in some] for some in told]
    seen = Counter(run for some in counted for run in set().union(*some))
    rarest = math.log(len(outputs))
    rarity = {run: rarest - math.log(count) for run, count in seen.items()}
    scores = []
    for output, texts, counts in zip(outputs, told, counted, strict=True):
        text = words(output)
        ours, total = weighted(runs(text), rarity, rarest), 0.0
        for other, count in zip(texts, counts, strict=True):
            theirs = weighted(count, rarity, rarest)
            near = math.exp(-((len(text) - len(other)) ** 2) / (2 * SPREAD**2))
            total += near * sum(map(agreement, ours, theirs)) / LONGEST
        scores.append(100 * 10 * total / len(texts))
    return np.array(scores)
