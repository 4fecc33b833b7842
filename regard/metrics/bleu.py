"""BLEU and chrF of sacreBLEU, with signatures and its paired bootstrap."""

from collections.abc import Sequence
from typing import Any

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from regard.errors import UsageError, lookup
from regard.metrics.score import Comparison, Score

# languages written without spaces between words -> sacreBLEU's tokenizer
_TOKENISE = {"zh": "zh", "ja": "char", "ko": "char"}


def tokenise_for(language: str | None) -> str:
    """SacreBLEU's tokenisation for a language."""
    return _TOKENISE.get((language or "").split("-")[0].split("_")[0].lower(), "13a")


def bleu_metric(
    language: str | None,
    tokenise: str | None = None,
    lowercase: bool = False,
    order: int = 4,
    force: bool = False,
    effective: bool = False,
) -> BLEU:
    """SacreBLEU's BLEU with the tokenizer of a language and n-grams of up to an order.

    It warns of tokenised outputs (spaces before full stops) unless `force`. `effective` is for few
    or short sentences: the order is that of the longest n-gram that any output has.
    """
    tokenise = tokenise or tokenise_for(language)
    lookup("tokenise", tokenise, dict.fromkeys(BLEU.TOKENIZERS))
    return BLEU(
        lowercase=lowercase,
        tokenize=tokenise,
        max_ngram_order=order,
        force=force,
        effective_order=effective,
    )


def bleu_scores(
    outputs: Sequence[str],
    references: Sequence[Sequence[str]],
    language: str | None = None,
    *,
    tokenise: str | None = None,
    lowercase: bool = False,
) -> list[Score]:
    """BLEU and chrF of outputs against one or several lists of references."""
    if not outputs:
        raise UsageError("nothing to score: there are no outputs")
    metrics = {
        "BLEU": bleu_metric(language, tokenise, lowercase),
        "chrF2": CHRF(lowercase=lowercase),
    }
    scores = []
    for name, metric in metrics.items():
        result = metric.corpus_score(list(outputs), [list(r) for r in references])
        scores.append(Score(name, result.score, str(metric.get_signature())))
    return scores


def compare_bleu(
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
    comparisons = []
    for name in metrics:
        row: Any = results[name]
        base, new = row
        # for equal scores sacreBLEU would count no resample, and be sure of a difference
        p = 1.0 if new.score == base.score else float(new.p_value or 0.0)
        low, high = float(new.mean - new.ci), float(new.mean + new.ci)
        signature = str(signatures[name])
        comparisons.append(Comparison(name, new.score, base.score, p, low, high, signature))
    return comparisons
