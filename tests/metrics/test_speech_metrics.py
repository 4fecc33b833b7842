"""Laws of error rates: they are jiwer's, their parts add up, and their normalisation is named."""

import jiwer
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.errors import UsageError
from regard.metrics.speech import (
    NORMALISATIONS,
    bare_words,
    compare_transcripts,
    transcript_errors,
    transcript_scores,
)

TEXTS = st.lists(st.sampled_from(["a", "bb", "c", "d'e"]), max_size=6).map(" ".join)
REFERENCES = ["RUBOUT T H I R T Y", "yes", "ENTER FOUR FIVE", "go"]
TRANSCRIPTS = ["RUBOUT T I R T Y", "yes", "ENTER FOUR NINE FIVE", "no"]


def distance(ours: list[str], theirs: list[str]) -> int:
    """Return Levenshtein's distance by its definition."""
    row = list(range(len(theirs) + 1))
    for i, one in enumerate(ours, 1):
        last, row = row, [i]
        for j, other in enumerate(theirs, 1):
            row.append(min(last[j] + 1, row[-1] + 1, last[j - 1] + (one != other)))
    return row[-1]


def test_errors_are_counted_by_kind():
    errors = transcript_errors(TRANSCRIPTS, REFERENCES)["WER"]
    kinds = errors.substitutions, errors.insertions, errors.deletions
    assert [kind.tolist() for kind in kinds] == [[0, 0, 0, 1], [0, 0, 1, 0], [1, 0, 0, 0]]
    assert errors.units.tolist() == [7, 1, 3, 1]
    assert errors.rate() == pytest.approx(100 * 3 / 12)


@given(st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=6))
def test_rates_are_those_of_jiwer_and_of_the_definition(pairs):
    ours, theirs = [one for one, _ in pairs], [other for _, other in pairs]
    if not any(theirs):
        with pytest.raises(UsageError, match="no word of the references"):
            transcript_errors(ours, theirs)
        return
    errors = transcript_errors(ours, theirs, "none")
    for name, rate, split in (("WER", jiwer.wer, str.split), ("CER", jiwer.cer, list)):
        assert errors[name].rate() == pytest.approx(100 * rate(theirs, ours))
        expected = [distance(split(one), split(other)) for one, other in pairs]
        assert errors[name].total.tolist() == expected


def test_the_normalisation_decides_and_is_named():
    ours, theirs = ["Don't 'stop', it's ‘5’ o\u2019clock!"], ["don't stop it's 5 o'clock"]
    assert bare_words(ours[0]) == theirs[0]
    rates = {}
    for name in NORMALISATIONS:
        wer, cer = transcript_scores(ours, theirs, name, samples=100)
        assert wer.signature.startswith(f"norm:{name}|jiwer:") and "norm:" in cer.signature
        rates[name] = wer.value
    assert rates["words"] == 0 < rates["lowercase"] < rates["none"]
    with pytest.raises(UsageError, match="unknown normalise 'word'; .*Did you mean 'words'"):
        transcript_scores(ours, theirs, "word")


def test_the_interval_holds_the_rate_and_narrows_with_more_utterances():
    def width(times: int) -> float:
        wer = transcript_scores(TRANSCRIPTS * times, REFERENCES * times)[0]
        low, high = (float(x) for x in wer.signature.split("95%:")[1].split("|")[0].split(" to "))
        assert low <= wer.value <= high and wer.value == pytest.approx(25)
        return high - low

    assert width(40) < width(10) / 1.7 < width(2) / 3


def test_two_systems_are_compared_on_the_same_utterances():
    rng = np.random.default_rng(3)
    references = [" ".join(rng.choice(list("abcdefgh"), 6)) for _ in range(120)]
    worse = [text.replace("a", "h").replace("b", "g") for text in references]
    for name, row in zip(
        ("WER", "CER"), compare_transcripts(references, worse, references, samples=300), strict=True
    ):
        assert row.name == name and row.ours == 0 < row.theirs and row.p < 0.01
        assert "utterances:120" in row.signature and "norm:words" in row.signature
    same = compare_transcripts(worse, worse, references, samples=300)
    assert all(row.ours == row.theirs and row.p == 1 for row in same)
