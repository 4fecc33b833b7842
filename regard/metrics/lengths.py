"""BLEU by source length: the figure of Bahdanau et al. 2015."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, repeat, zip_longest
from pathlib import Path
from random import Random
from typing import NamedTuple

from sacrebleu.metrics.bleu import BLEU

from regard.data.pairs import Corpus, Pair
from regard.data.sentences import join_sentences
from regard.data.tokenize import SPACELESS
from regard.errors import UsageError
from regard.metrics.interval import Interval
from regard.metrics.results import markdown

_LENGTH_UNIT = re.compile(rf"[{SPACELESS}]|[^\s{SPACELESS}]+")
LENGTH_BORDERS = (10, 20, 30, 40, 50, 60)
# of fewer, BLEU is no measure of a group, and a bootstrap no interval
FEW_SENTENCES = 30
_MAX_DRAWN = 2_000_000  # sentences of all resamples of a group, which bounds their memory


def count_words(text: str) -> int:
    """Count words by spaces, or characters of scripts without spaces."""
    return sum(1 for _ in _LENGTH_UNIT.finditer(text))


def groups(sources: Sequence[str], borders: Sequence[int]) -> dict[str, list[int]]:
    """Numbers of the sentences in each bin of source length, by the name of the bin."""
    ends = sorted(set(borders))
    names = [f"{a + 1}-{b}" for a, b in zip([0, *ends], ends, strict=False)] + [f"{ends[-1] + 1}+"]
    bins: dict[str, list[int]] = {name: [] for name in names}
    for number, source in enumerate(sources):
        words = count_words(source)
        bins[names[sum(words > end for end in ends)]].append(number)
    return {name: numbers for name, numbers in bins.items() if numbers}


def join_pairs(
    pairs: Sequence[Pair],
    words: Iterator[int],
    source: str | None = None,
    target: str | None = None,
) -> list[Pair]:
    """Concatenate neighbouring pairs until each source has so many words; drop a short rest."""
    joined, some, read, enough = [], [], 0, next(words)
    for pair in pairs:
        some.append(pair)
        read += count_words(pair.source)
        if read >= enough:
            spaces = [" "] * (len(some) - 1) + [""]
            reads = join_sentences([each.source for each in some], spaces, source)
            writes = join_sentences([each.target for each in some], spaces, target)
            joined.append(Pair(reads, writes, some[0].where))
            some, read, enough = [], 0, next(words)
    return joined


def add_joined(corpus: Corpus, most: int) -> Corpus:
    """Add the training pairs once more, concatenated to random lengths of up to `most` words."""
    pairs, rng = corpus.parts["train"], Random(most)
    words = (rng.randint(1, most) for _ in count())
    joined = join_pairs(pairs, words, corpus.source, corpus.target)
    notes = [*corpus.notes, f"{len(joined):,} pairs joined from them are learnt from too"]
    return replace(corpus, parts={**corpus.parts, "train": [*pairs, *joined]}, notes=notes)


def short_names(names: Sequence[str]) -> list[str]:
    """Shorten names of folders: without their common beginning and end."""
    parts = [Path(name).parts for name in names]
    if len(set(parts)) < 2:
        return list(names)
    ends = [parts, [each[::-1] for each in parts]]
    begin, end = (
        next(i for i, some in enumerate(zip_longest(*each)) if len(set(some)) > 1) for each in ends
    )
    begin = min(begin, *(len(each) - 1 for each in parts))
    return [str(Path(*each[begin : max(begin + 1, len(each) - end)])) for each in parts]


class BleuInterval(NamedTuple):
    """BLEU with the half-width of its 95% bootstrap interval; None for few sentences."""

    bleu: float
    half: float | None

    def __str__(self) -> str:
        return f"{self.bleu:.2f}" + (" (few)" if self.half is None else f" ± {self.half:.2f}")


@dataclass(frozen=True)
class LengthGroup:
    """A bin of source length, with the BLEU of every model."""

    name: str  # all, 11-20, or joined 40+
    sentences: int
    words: float  # of a source, on average
    scores: list[BleuInterval]


@dataclass(frozen=True)
class Lengths:
    """The BLEU of several models by source length."""

    models: list[str]
    rows: list[LengthGroup]
    signature: str

    def table(self) -> list[list[str]]:
        """Rows of the table, the head first."""
        names = [f"BLEU of {name}" for name in short_names(self.models)]
        head = ["source words", "sentences", "mean words", *names]
        return [
            head,
            *(
                [row.name, f"{row.sentences:,}", f"{row.words:.1f}", *map(str, row.scores)]
                for row in self.rows
            ),
        ]

    def __str__(self) -> str:
        few = f"few: under {FEW_SENTENCES} sentences, too few to tell  " * self.has_few
        return f"{markdown(self.table())}\n± 95% bootstrap interval  {few}{self.signature}"

    @property
    def has_few(self) -> bool:
        """True if some group has too few sentences to be scored."""
        return any(row.sentences < FEW_SENTENCES for row in self.rows)

    def draw(self, path: str | Path) -> None:
        """Plot a curve for each model, and one of joined sentences if there are some."""
        from regard.viewer.plot import DASHED, draw_curves

        lines: dict[str, list[tuple[float, Interval]]] = {}
        looks: dict[str, int] = {}
        hollow: dict[str, list[int]] = {}
        for row in self.rows[1:]:
            joined = row.name.startswith("joined")
            for number, name in enumerate(short_names(self.models)):
                bleu, half = row.scores[number]
                line = name + ", joined" * joined
                points = lines.setdefault(line, [])
                if row.sentences < FEW_SENTENCES:
                    hollow.setdefault(line, []).append(len(points))
                points.append((row.words, Interval(bleu, half, ())))
                looks[line] = number + DASHED * joined
        title = "BLEU by the length of the source"
        title += f"; hollow: under {FEW_SENTENCES} sentences" if hollow else ""
        names = ("source words", "BLEU")
        draw_curves(path, title, lines, names, log=False, styles=looks, hollow=hollow)


def score_group(
    metric: BLEU, name: str, outputs: Sequence[Sequence[str]], pairs: Sequence[Pair], samples: int
) -> LengthGroup:
    """Score the outputs of every model for the same pairs."""
    samples = max(100, min(samples, _MAX_DRAWN // len(pairs)))
    references, scores = [[pair.target for pair in pairs]], []
    for some in outputs:
        bleu = metric.corpus_score(list(some), references, n_bootstrap=samples)
        scores.append(BleuInterval(bleu.score, bleu._ci if len(pairs) >= FEW_SENTENCES else None))
    words = sum(count_words(pair.source) for pair in pairs) / len(pairs)
    return LengthGroup(name, len(pairs), words, scores)


def by_length(
    models: Sequence[str],
    outputs: Sequence[Sequence[str]],
    write: Sequence[Callable[[Sequence[str]], list[str]]],
    pairs: Sequence[Pair],
    metric: BLEU,
    *,
    effective: BLEU,
    samples: int = 1000,
    borders: Sequence[int] = LENGTH_BORDERS,
    joined: Sequence[int] = (),
    languages: tuple[str | None, str | None] = (None, None),
) -> Lengths:
    """Score the outputs of models by source length.

    All sentences are scored by `metric`, groups by `effective`, the same of the effective order.
    `write` translates by each model: pairs are also `joined` to sources of so many words.
    """
    rows = [score_group(metric, "all", outputs, pairs, samples)]
    for name, some in groups([pair.source for pair in pairs], borders).items():
        parts = [[each[i] for i in some] for each in outputs]
        rows.append(score_group(effective, name, parts, [pairs[i] for i in some], samples))
    for words in sorted(set(joined)):
        longer = join_pairs(pairs, repeat(words), *languages)
        if not longer:
            raise UsageError(f"joined={words} is more words than all sentences have together")
        written = [each([pair.source for pair in longer]) for each in write]
        rows.append(score_group(effective, f"joined {words}+", written, longer, samples))
    signature = f"all: {metric.get_signature()}, groups: {effective.get_signature()}"
    return Lengths(list(models), rows, signature)
