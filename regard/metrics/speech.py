"""Word and character error rates of transcripts by jiwer, with intervals and a paired bootstrap."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version

import jiwer
import numpy as np

from regard.errors import UsageError, lookup
from regard.metrics.labels import percent
from regard.metrics.score import (
    BOOTSTRAP_SEED,
    Comparison,
    Score,
    bootstrap,
    bootstrap_signature,
    paired_bootstrap,
    percentile_interval,
)

_PUNCTUATION = re.compile(r"[^\w\s']|_")
_STRAY = re.compile(r"(?<!\w)'|'(?!\w)")  # an apostrophe that joins nothing


def collapse(text: str) -> str:
    """Text with single spaces between its words."""
    return " ".join(text.split())


def fold_case(text: str) -> str:
    """Text without case and with single spaces."""
    return collapse(text.lower())


def bare_words(text: str) -> str:
    """Words of a text without case and punctuation; apostrophes within words stay."""
    plain = _PUNCTUATION.sub(" ", text.lower().replace("\u2019", "'"))
    return collapse(_STRAY.sub(" ", plain))


# name -> what is done to references and transcripts before they are compared
NORMALISATIONS: dict[str, Callable[[str], str]] = {
    "words": bare_words,
    "lowercase": fold_case,
    "none": collapse,
}


@dataclass(frozen=True)
class Errors:
    """What is wrong with each transcript, by units of the reference: words or characters."""

    substitutions: np.ndarray  # (utterances,)
    insertions: np.ndarray
    deletions: np.ndarray
    units: np.ndarray  # of the reference

    @property
    def total(self) -> np.ndarray:
        """Errors of each transcript."""
        return self.substitutions + self.insertions + self.deletions

    def rate(self, rows: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Error rate of some utterances in percent: of all, or of rows of samples."""
        return percent(self.total[rows].sum(-1), self.units[rows].sum(-1))

    def signature(self, unit: str, interval: tuple[float, float], samples: int) -> str:
        """Signature of the rate: its parts, and its 95% interval by utterances."""
        kinds = ("substitutions", "insertions", "deletions")
        told = [f"{unit}:{int(self.units.sum())}"]
        told += [f"{name}:{int(getattr(self, name).sum())}" for name in kinds]
        told += [f"95%:{interval[0]:.2f} to {interval[1]:.2f}"]
        told += [
            f"bootstrap over {len(self.units)} utterances|samples:{samples}|seed:{BOOTSTRAP_SEED}"
        ]
        return "|".join(told)


def count_errors(references: Sequence[str], transcripts: Sequence[str], unit: str) -> Errors:
    """Count the errors of transcripts in words or characters, as jiwer aligns them."""
    process = {"words": jiwer.process_words, "characters": jiwer.process_characters}[unit]
    output = process(list(references), list(transcripts))
    table = np.zeros((4, len(references)), dtype=np.int64)
    for column, chunks in enumerate(output.alignments):
        for chunk in chunks:
            reference = chunk.ref_end_idx - chunk.ref_start_idx
            added = chunk.hyp_end_idx - chunk.hyp_start_idx
            kind = ("substitute", "insert", "delete", "equal").index(chunk.type)
            if kind < 3:
                table[kind, column] += max(reference, added)
            table[3, column] += reference
    return Errors(*table)


def transcript_errors(
    transcripts: Sequence[str], references: Sequence[str], normalise: str = "words"
) -> dict[str, Errors]:
    """Count word and character errors after a normalisation that NORMALISATIONS names."""
    plain = lookup("normalise", normalise, NORMALISATIONS)
    if not references:
        raise UsageError("nothing to score: there are no transcripts")
    if len(references) != len(transcripts):
        raise UsageError(f"{len(transcripts)} transcripts for {len(references)} references")
    sides = [list(map(plain, side)) for side in (references, transcripts)]
    if not any(sides[0]):
        raise UsageError(f"normalise={normalise} leaves no word of the references to score")
    return {
        "WER": count_errors(*sides, unit="words"),
        "CER": count_errors(*sides, unit="characters"),
    }


_ERROR_UNITS = {"WER": "words", "CER": "characters"}


def named(normalise: str) -> str:
    """Normalisation of the compared texts, for a signature."""
    return f"norm:{normalise}|jiwer:{version('jiwer')}"


def transcript_scores(
    transcripts: Sequence[str],
    references: Sequence[str],
    normalise: str = "words",
    samples: int = 1000,
) -> list[Score]:
    """WER and CER in percent, each with its 95% interval by utterances."""
    scores = []
    for name, errors in transcript_errors(transcripts, references, normalise).items():
        (drawn,) = bootstrap([errors.rate], len(references), samples)
        told = errors.signature(_ERROR_UNITS[name], percentile_interval(drawn), samples)
        scores.append(Score(name, float(errors.rate()), f"{named(normalise)}|{told}"))
    return scores


def compare_transcripts(
    ours: Sequence[str],
    theirs: Sequence[str],
    references: Sequence[str],
    normalise: str = "words",
    samples: int = 1000,
) -> list[Comparison]:
    """Compare the transcripts of two systems by paired bootstrap resampling of utterances."""
    mine, other = (transcript_errors(side, references, normalise) for side in (ours, theirs))
    both = {name: (mine[name].rate, other[name].rate) for name in mine}
    units = len(references)
    signature = f"{bootstrap_signature(samples, units, 'utterances')}|{named(normalise)}"
    return paired_bootstrap(both, units, samples, signature)
