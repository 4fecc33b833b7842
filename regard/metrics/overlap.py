"""How well masks overlap: intersection over union of each class, and right pixels."""

from typing import NamedTuple

import numpy as np

from regard.metrics.score import (
    Comparison,
    Score,
    Statistic,
    bootstrap,
    bootstrap_signature,
    paired_bootstrap,
    percentile_interval,
)


class Overlaps(NamedTuple):
    """Pixels of each class (images, classes) in mask and prediction: in both, and in either."""

    both: np.ndarray
    either: np.ndarray
    pixels: np.ndarray  # of an image that are of any class, (images,)

    @classmethod
    def of(cls, masks: np.ndarray, predictions: np.ndarray, classes: int) -> "Overlaps":
        """Count pixels of masks and predictions (n, h, w); those of no class are left out."""
        real = masks < classes
        pairs = classes * masks.astype(np.int64) + predictions
        rows = [
            np.bincount(each[some], minlength=classes**2).reshape(classes, classes)
            for each, some in zip(pairs, real, strict=True)
        ]
        counts = np.stack(rows)
        both = counts.diagonal(axis1=1, axis2=2)
        return cls(both, counts.sum(1) + counts.sum(2) - both, real.sum((1, 2)))

    def by_class(self) -> np.ndarray:
        """Intersection over union of each class in percent; NaN of a class that is nowhere."""
        with np.errstate(invalid="ignore"):
            return 100 * self.both.sum(0) / self.either.sum(0)

    def mean_iou(self, rows: np.ndarray) -> np.ndarray:
        """Mean over classes for samples of images (samples, images)."""
        both, either = (_summed(rows, counts) for counts in (self.both, self.either))
        there = either > 0
        each = np.divide(both, either, out=np.zeros_like(both), where=there)
        return 100 * each.sum(1) / there.sum(1).clip(1)

    def accuracy(self, rows: np.ndarray) -> np.ndarray:
        """Right pixels in percent for samples of images (samples, images)."""
        right = _summed(rows, self.both).sum(1)
        return 100 * right / _summed(rows, self.pixels[:, None])[:, 0].clip(1)

    def values(self) -> dict[str, float]:
        """Scores of all images."""
        whole = np.arange(len(self.both))[None]
        return {key: float(score(whole)[0]) for key, (_, score) in self._statistics().items()}

    def scores(self, samples: int) -> list[Score]:
        """Scores with their 95% intervals, by resampling images."""
        units = len(self.both)
        named = self._statistics().values()
        drawn = bootstrap([statistic for _, statistic in named], units, samples)
        scores = []
        for (name, statistic), values in zip(named, drawn, strict=True):
            low, high = percentile_interval(values)
            made = f"images:{units}|95%:{low:.2f} to {high:.2f}|bootstrap|samples:{samples}"
            scores.append(Score(name, float(statistic(np.arange(units)[None])[0]), made))
        return scores

    def compare(self, theirs: "Overlaps", samples: int) -> list[Comparison]:
        """Comparison with another model on the same images."""
        units, others = len(self.both), theirs._statistics()
        both = {name: (ours, others[key][1]) for key, (name, ours) in self._statistics().items()}
        return paired_bootstrap(both, units, samples, bootstrap_signature(samples, units, "images"))

    def _statistics(self) -> dict[str, tuple[str, Statistic]]:
        return {
            "mean_iou": ("mean IoU", self.mean_iou),
            "pixel_accuracy": ("pixel accuracy", self.accuracy),
        }


def _summed(rows: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Sums of counts (images, k) over samples of images (samples, images)."""
    often = np.stack([np.bincount(row, minlength=len(counts)) for row in rows])
    return often @ counts.astype(float)
