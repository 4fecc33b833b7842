"""Scores that say how they were made."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from regard.errors import UsageError

# languages whose words are not parted by spaces, and sacreBLEU's way to part them
TOKENISE = {"zh": "zh", "ja": "char", "ko": "char"}


@dataclass(frozen=True)
class Score:
    """A score with the signature that lets anyone reproduce it."""

    name: str
    value: float
    signature: str
    digits: int = 2  # after the point

    def __str__(self) -> str:
        return f"{self.name} = {self.value:.{self.digits}f}  {self.signature}"


def tokenise_for(language: str | None) -> str:
    """Return sacreBLEU's tokenisation for a language."""
    return TOKENISE.get((language or "").split("-")[0].split("_")[0].lower(), "13a")


def bleu_metric(
    language: str | None,
    tokenise: str | None = None,
    lowercase: bool = False,
    order: int = 4,
    force: bool = False,
    effective: bool = False,
) -> BLEU:
    """Return the BLEU that suits a language, of runs of up to so many words.

    It warns of spaces before full stops, unless those are known to belong there (force). For few or
    short sentences the order is the effective one: of runs as long as any output has.
    """
    tokenise = tokenise or tokenise_for(language)
    if tokenise not in BLEU.TOKENIZERS:
        raise UsageError(
            f"tokenise='{tokenise}' is not one of {', '.join(sorted(BLEU.TOKENIZERS))}"
        )
    return BLEU(
        lowercase=lowercase,
        tokenize=tokenise,
        max_ngram_order=order,
        force=force,
        effective_order=effective,
    )


def judge(
    outputs: Sequence[str],
    references: Sequence[Sequence[str]],
    language: str | None = None,
    *,
    tokenise: str | None = None,
    lowercase: bool = False,
) -> list[Score]:
    """Return BLEU and chrF of outputs against one or several lists of references."""
    if not outputs:
        raise UsageError("nothing to judge: there are no outputs")
    scores = []
    bleu, chrf = bleu_metric(language, tokenise, lowercase), CHRF(lowercase=lowercase)
    metrics = (("BLEU", bleu), ("chrF2", chrf))
    for name, metric in metrics:
        result = metric.corpus_score(list(outputs), [list(r) for r in references])
        scores.append(Score(name, result.score, str(metric.get_signature())))
    return scores


@dataclass(frozen=True)
class Comparison:
    """Two systems on the same sentences, and how likely the difference is chance."""

    name: str
    ours: float
    theirs: float
    p: float
    low: float
    high: float
    signature: str
    against: str = ""  # whose theirs are, where there are several


def compare(
    ours: Sequence[str],
    theirs: Sequence[str],
    references: Sequence[Sequence[str]],
    language: str | None = None,
    *,
    tokenise: str | None = None,
    lowercase: bool = False,
    samples: int = 1000,
) -> list[Comparison]:
    """Compare two systems by paired bootstrap resampling (Koehn 2004)."""
    from sacrebleu.significance import PairedTest

    bleu = bleu_metric(language, tokenise, lowercase, force=True)  # it has warned before
    metrics = {"BLEU": bleu, "chrF2": CHRF(lowercase=lowercase)}
    systems: Any = [("theirs", list(theirs)), ("ours", list(ours))]
    test = PairedTest(
        systems, metrics, [list(r) for r in references], test_type="bs", n_samples=samples
    )
    signatures, results = test()
    found = []
    for name in metrics:
        row: Any = results[name]
        base, new = row
        found.append(
            Comparison(
                name,
                new.score,
                base.score,
                # for equal scores sacreBLEU would count no resample, and be sure of a difference
                1.0 if new.score == base.score else float(new.p_value or 0.0),
                float(new.mean - new.ci),
                float(new.mean + new.ci),
                str(signatures[name]),
            )
        )
    return found
