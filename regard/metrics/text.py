"""Metrics of generated text: BLEU and chrF, ROUGE, exact match and F1 of answers."""

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from regard.errors import UsageError
from regard.metrics.bleu import bleu_scores, compare_bleu
from regard.metrics.score import Comparison, Score, compare_means

# a word is a run of letters and digits; where no spaces part words, each character is one
_ROUGE_WORD = re.compile(
    "[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\\W_\u3040-\u30ff\u3400-\u9fff]+"
)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)
_MAX_ROUGE_WORDS = 20_000  # of a text that ROUGE-L compares


def words(text: str) -> list[str]:
    """Split a text into words without case and punctuation, as ROUGE counts them."""
    return _ROUGE_WORD.findall(text.lower())


def f1(common: float, ours: int, theirs: int) -> float:
    """Harmonic mean of precision and recall."""
    return 2 * common / (ours + theirs) if common else 0.0


def rouge_n(ours: Sequence[str], theirs: Sequence[str], n: int) -> float:
    """ROUGE-N, the F1 of shared n-grams (Lin 2004)."""
    grams = [Counter(zip(*(side[i:] for i in range(n)), strict=False)) for side in (ours, theirs)]
    return f1((grams[0] & grams[1]).total(), grams[0].total(), grams[1].total())


def longest_common(ours: Sequence[str], theirs: Sequence[str]) -> int:
    """Length of the longest common subsequence of words.

    Neighbours in a row of the usual table differ by 0 or 1, so a row is kept as the bits of one
    number (Hyyrö 2004).
    """
    places: dict[str, int] = {}
    for place, word in enumerate(ours):
        places[word] = places.get(word, 0) | 1 << place
    full = row = (1 << len(ours)) - 1
    for word in theirs:
        match = row & places.get(word, 0)
        row = (row + match | row - match) & full
    return len(ours) - row.bit_count()


def rouge(output: str, reference: str) -> dict[str, float]:
    """ROUGE-1, ROUGE-2 and ROUGE-L of a text against one reference, from 0 to 1."""
    ours, theirs = (words(text)[:_MAX_ROUGE_WORDS] for text in (output, reference))
    return {
        "ROUGE-1": rouge_n(ours, theirs, 1),
        "ROUGE-2": rouge_n(ours, theirs, 2),
        "ROUGE-L": f1(longest_common(ours, theirs), len(ours), len(theirs)),
    }


def normalise(answer: str) -> str:
    """Normalise an answer as SQuAD does: no case, punctuation, articles or extra space."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_WITHOUT_PUNCTUATION)).split())


def answer(output: str, reference: str) -> dict[str, float]:
    """Exact match and the F1 of the words of an answer against one reference."""
    one, two = normalise(output), normalise(reference)
    ours, theirs = one.split(), two.split()
    shared = (Counter(ours) & Counter(theirs)).total()
    # an empty answer is right only where the reference is empty
    close = f1(shared, len(ours), len(theirs)) if ours and theirs else float(one == two)
    return {"exact match": float(one == two), "F1": close}


@dataclass(frozen=True)
class MeanMetric:
    """A metric that is a mean over examples, each against its best reference."""

    each: Callable[[str, str], dict[str, float]]
    signature: str
    main: str  # the score that training selects by

    def table(
        self, outputs: Sequence[str], references: Sequence[Sequence[str]]
    ) -> dict[str, np.ndarray]:
        """Every score of every example, in percent."""
        if not outputs:
            raise UsageError("nothing to score: there are no outputs")
        for texts in references:
            if len(texts) != len(outputs):
                raise UsageError(
                    f"{len(outputs)} outputs for {len(texts)} references; give as many"
                )
        rows = [
            [self.each(output, reference) for reference in several]
            for output, several in zip(outputs, zip(*references, strict=True), strict=True)
        ]
        return {
            name: np.array([100 * max(scores[name] for scores in row) for row in rows])
            for name in rows[0][0]
        }

    def score(
        self,
        outputs: Sequence[str],
        references: Sequence[Sequence[str]],
        language: str | None = None,
        **bleu: Any,
    ) -> list[Score]:
        """Means over all outputs, against one or several lists of references."""
        _only_bleu(bleu)
        signature = f"nrefs:{len(references)}|{self.signature}"
        table = self.table(outputs, references)
        return [Score(name, float(values.mean()), signature) for name, values in table.items()]

    def compare(
        self,
        ours: Sequence[str],
        theirs: Sequence[str],
        references: Sequence[Sequence[str]],
        language: str | None = None,
        *,
        samples: int = 1000,
        **bleu: Any,
    ) -> list[Comparison]:
        """Compare two systems by paired bootstrap resampling (Koehn 2004)."""
        _only_bleu(bleu)
        mine, other = (self.table(outputs, references) for outputs in (ours, theirs))
        signature = f"nrefs:{len(references)}|{self.signature}"
        return compare_means(mine, other, samples, signature, "texts")


def _only_bleu(options: Mapping[str, Any]) -> None:
    """Refuse tokenise and lowercase, which only BLEU has."""
    if any(options.values()):
        raise UsageError(
            "tokenise and lowercase are for metric=bleu; the others have their own tokenisation"
        )


class BleuMetric:
    """BLEU and chrF by sacreBLEU."""

    main = "BLEU"
    score = staticmethod(bleu_scores)
    compare = staticmethod(compare_bleu)


# name -> metric
TEXT_METRICS: dict[str, MeanMetric | BleuMetric] = {
    "bleu": BleuMetric(),
    "rouge": MeanMetric(rouge, "case:lc|tok:letters and digits|stem:no|F1", "ROUGE-L"),
    "answers": MeanMetric(answer, "norm:SQuAD", "F1"),
}
