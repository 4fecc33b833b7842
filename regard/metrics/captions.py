"""Scores of captions with several references each: BLEU-1 to 4, chrF and CIDEr-D."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from sacrebleu.metrics.chrf import CHRF

from regard.errors import UsageError
from regard.metrics.bleu import bleu_metric, compare_bleu
from regard.metrics.score import Comparison, Score, compare_means
from regard.metrics.text import words

_MAX_ORDER = 4  # of n-grams
_SIGMA = 6.0  # of the length penalty, in words
_CIDER = f"n:{_MAX_ORDER}|sigma:{_SIGMA:g}|case:lc|tok:letters and digits|idf:these references"

Ngram = tuple[str, ...]


def ngrams(text: Sequence[str]) -> Counter[Ngram]:
    """Count all n-grams of 1 to 4 words."""
    orders = range(1, _MAX_ORDER + 1)
    return Counter(tuple(text[i : i + n]) for n in orders for i in range(len(text) - n + 1))


def tf_idf(counts: Counter[Ngram], idf: dict[Ngram, float], max_idf: float) -> list[dict]:
    """TF-IDF vector of n-grams for each n."""
    vectors: list[dict[Ngram, float]] = [{} for _ in range(_MAX_ORDER)]
    for gram, count in counts.items():
        vectors[len(gram) - 1][gram] = count * idf.get(gram, max_idf)
    return vectors


def clipped_cosine(ours: dict[Ngram, float], theirs: dict[Ngram, float]) -> float:
    """Cosine of two vectors, our values clipped to theirs."""
    norm = math.sqrt(sum(x * x for x in ours.values()) * sum(x * x for x in theirs.values()))
    dot = sum(min(x, theirs[gram]) * theirs[gram] for gram, x in ours.items() if gram in theirs)
    return dot / norm if norm else 0.0


def cider(outputs: Sequence[str], references: Sequence[Sequence[str]]) -> np.ndarray:
    """CIDEr-D of each output against the references of its image, 0 to 1000.

    Vedantam, Zitnick and Parikh 2015.

    10 mean over n of mean over references of exp(-(l - l')^2 / 2 sigma^2) min(g, g') g' / |g||g'|,
    in percent. g counts n-grams, times log(images / images whose references have it).
    """
    if not outputs:
        raise UsageError("nothing to score: there are no outputs")
    if len(outputs) != len(references) or not all(references):
        raise UsageError(
            f"{len(outputs)} outputs for {len(references)} images; give references each"
        )
    texts = [[words(text) for text in several] for several in references]
    counts = [[ngrams(text) for text in several] for several in texts]
    frequency = Counter(gram for several in counts for gram in set().union(*several))
    max_idf = math.log(len(outputs))
    idf = {gram: max_idf - math.log(count) for gram, count in frequency.items()}
    scores = []
    for output, several, several_counts in zip(outputs, texts, counts, strict=True):
        text = words(output)
        ours, total = tf_idf(ngrams(text), idf, max_idf), 0.0
        for reference, count in zip(several, several_counts, strict=True):
            theirs = tf_idf(count, idf, max_idf)
            penalty = math.exp(-((len(text) - len(reference)) ** 2) / (2 * _SIGMA**2))
            total += penalty * sum(map(clipped_cosine, ours, theirs)) / _MAX_ORDER
        scores.append(100 * 10 * total / len(several))
    return np.array(scores)


def references_of(captions: Sequence[Sequence[str]]) -> list[list[str | None]]:
    """Lay the captions of each image out as sacreBLEU wants them: first ones, second ones, ..."""
    most = max(map(len, captions))
    return [[some[n] if n < len(some) else None for some in captions] for n in range(most)]


def caption_scores(
    outputs: Sequence[str],
    captions: Sequence[Sequence[str]],
    tokenise: str | None = None,
    lowercase: bool = True,
) -> list[Score]:
    """BLEU of runs of up to 1, 2, 3 and 4 words, chrF and CIDEr-D."""
    references: Any = references_of(captions)
    metrics: dict[str, Any] = {
        f"BLEU-{order}": bleu_metric("en", tokenise, lowercase, order, force=True)
        for order in range(1, 5)
    }
    metrics["chrF2"] = CHRF(lowercase=lowercase)
    scores = [
        Score(
            name, metric.corpus_score(list(outputs), references).score, str(metric.get_signature())
        )
        for name, metric in metrics.items()
    ]
    signature = f"nrefs:{len(references)}|{_CIDER}"
    return [*scores, Score("CIDEr-D", float(cider(outputs, captions).mean()), signature)]


def compare_captions(
    ours: Sequence[str],
    theirs: Sequence[str],
    captions: Sequence[Sequence[str]],
    settings: Any,
) -> list[Comparison]:
    """Compare two systems by paired bootstrap resampling (Koehn 2004)."""
    references: Any = references_of(captions)
    options: dict[str, Any] = {"tokenise": settings.tokenise, "lowercase": settings.lowercase}
    rows = compare_bleu(ours, theirs, references, "en", samples=settings.samples, **options)
    rows = [replace(one, name="BLEU-4") if one.name == "BLEU" else one for one in rows]
    mine, other = ({"CIDEr-D": cider(outputs, captions)} for outputs in (ours, theirs))
    more = f"nrefs:{len(references)}|{_CIDER}"
    return rows + compare_means(mine, other, settings.samples, more, "images")
