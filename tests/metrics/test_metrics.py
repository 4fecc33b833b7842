"""Laws of scores: one paired bootstrap and one set of intervals for every metric."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.errors import UsageError
from regard.metrics.interval import wilson
from regard.metrics.labels import LabelResults, compare, count_units, one_hot
from regard.metrics.score import (
    BOOTSTRAP_SEED,
    bootstrap,
    compare_means,
    paired_bootstrap,
    percentile_interval,
)


def scores(seed: int, count: int = 60) -> np.ndarray:
    return np.random.default_rng(seed).normal(30, 3, count)


def test_a_system_is_no_better_than_itself():
    (same,) = compare_means({"PSNR": scores(0)}, {"PSNR": scores(0)}, 200)
    assert same.p == 1 and same.ours == same.theirs and same.low < same.ours < same.high


def test_a_clear_difference_is_found_from_both_sides_and_a_small_one_is_not():
    one, better = scores(0), scores(0) + 1 + 0.1 * scores(1)
    (ours,) = compare_means({"x": better}, {"x": one}, 500)
    (theirs,) = compare_means({"x": one}, {"x": better}, 500)
    assert ours.p == theirs.p == pytest.approx(1 / 501)
    assert ours.ours == pytest.approx(better.mean()) and ours.theirs == theirs.ours
    (close,) = compare_means({"x": scores(0)}, {"x": scores(2)}, 500)
    assert close.p > 0.05


def test_several_scores_are_resampled_together_and_each_as_if_alone():
    both = compare_means(
        {"a": scores(0), "b": scores(1)}, {"a": scores(2), "b": scores(3)}, 300, "n:4", "images"
    )
    alone = compare_means({"b": scores(1)}, {"b": scores(3)}, 300, "n:4", "images")
    assert both[1] == alone[0]
    assert both[0].signature == f"paired bootstrap|samples:300|seed:{BOOTSTRAP_SEED}|images:60|n:4"


def test_resamples_do_not_depend_on_how_many_are_drawn_at_once(monkeypatch):
    means = [lambda rows: scores(0)[rows].mean(-1)]
    (whole,) = bootstrap(means, 60, 250)
    monkeypatch.setattr("regard.metrics.score.DRAWN_ROWS", 60 * 7)
    (parts,) = bootstrap(means, 60, 250)
    assert np.array_equal(whole, parts)


def test_a_bootstrap_interval_of_a_mean_is_that_of_the_normal_law():
    values = scores(0, 400)
    low, high = percentile_interval(bootstrap([lambda rows: values[rows].mean(-1)], 400, 2000)[0])
    half = 1.96 * values.std() / 20
    assert (values.mean() - low, high - values.mean()) == pytest.approx((half, half), rel=0.1)


def test_labels_are_compared_as_means_are():
    rng = np.random.default_rng(0)
    targets = one_hot(rng.integers(0, 3, 80), 3)
    ours, theirs = (one_hot(rng.integers(0, 3, 80), 3) for _ in range(2))
    labels = compare(count_units(targets, ours), count_units(targets, theirs), "accuracy", 300)
    right = [100.0 * (targets & table).sum(1) for table in (ours, theirs)]
    (means,) = compare_means({"accuracy": right[0]}, {"accuracy": right[1]}, 300)
    for name in ("ours", "theirs", "p", "low", "high"):
        assert getattr(labels, name) == pytest.approx(getattr(means, name))


def test_any_statistic_can_be_compared():
    ours, theirs = scores(0), scores(1)
    both = {"median": tuple(lambda rows, x=x: np.median(x[rows], -1) for x in (ours, theirs))}
    (row,) = paired_bootstrap(both, 60, 100, "")
    assert (row.ours, row.theirs) == (np.median(ours), np.median(theirs))


@given(st.integers(0, 50), st.integers(1, 50))
def test_an_interval_of_a_proportion_holds_it_and_stays_within_0_and_100(hits, more):
    total = hits + more
    low, high = wilson(hits, total)
    assert 0 <= low <= 100 * hits / total + 1e-9 and 100 * hits / total <= high <= 100


def test_nothing_cannot_be_scored():
    with pytest.raises(UsageError, match="nothing to score"):
        wilson(0, 0)


# LabelResults


def test_one_label_a_row_is_its_most_probable():
    probs = np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.3, 0.7]])
    results = LabelResults.single(["no", "yes"], np.array([0, 1, 1, 0]), probs)
    accuracy, macro, loss = results.scores()
    assert (accuracy.name, accuracy.value) == ("accuracy", 50.0) and macro.value == 50.0
    assert loss.value == pytest.approx(-np.log([0.9, 0.8, 0.4, 0.3]).mean())
    assert results.confusion() == [[1, 1], [1, 1]]
    errors = results.errors(9, lambda i: (f"row {i}", "text"))
    assert [(e.where, e.right, e.answer, e.probability) for e in errors] == [
        ("row 3", "no", "yes", 0.7),
        ("row 2", "yes", "no", 0.6),
    ]
    assert results.errors(1, lambda i: ("", "")) == [errors[0].__class__("", "", "no", "yes", 0.7)]


def test_of_several_labels_a_missing_one_is_an_error_too():
    targets = np.array([[True, True], [False, False]])
    predictions = np.array([[True, False], [False, False]])
    probs = np.array([[0.9, 0.05], [0.4, 0.1]])
    results = LabelResults(["a", "b"], targets, predictions, probs, multilabel=True)
    assert results.confusion() is None
    assert [score.name for score in results.scores()] == [
        "all labels right",
        "micro F1",
        "macro F1",
        "loss",
    ]
    (error,) = results.errors(5, lambda i: (str(i), ""))
    assert (error.right, error.answer, error.probability) == ("a,b", "a", pytest.approx(0.95))
