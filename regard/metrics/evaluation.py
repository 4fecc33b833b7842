"""The scores of one model on one data set, with all that they depend on."""

import json
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from regard import __version__
from regard.errors import log
from regard.files import write_atomically
from regard.metrics.lengths import Lengths
from regard.metrics.results import Scored, key_of
from regard.metrics.score import Comparison, Score

_MOST_PRINTED = 20  # labels of a confusion matrix that is printed whole
_MOST_SHOWN = 100  # characters of a text that is shown
LOWER_IS_BETTER = ("loss", "perplexity", "bits_per_byte", "wer", "cer")
WARNING = "warning: no better than a baseline: "


@dataclass(frozen=True, repr=False)
class Evaluation(Scored):
    """The scores of one system, by name as in result["bleu"], with all that they depend on."""

    model: str
    scores: list[Score]
    sentences: int
    seconds: float
    made_with: dict[str, Any]
    against: str | None = None
    comparison: list[Comparison] = field(default_factory=list)
    of: str = "sentences"  # what was counted
    lengths: Lengths | None = field(default=None, kw_only=True)
    notes: list[str] = field(default_factory=list, kw_only=True)  # what is to be known of the data
    # scores of trivial predictors on the same rows
    baselines: dict[str, dict[str, float]] = field(default_factory=dict, kw_only=True)

    def named_scores(self) -> Iterable[tuple[str, float]]:
        """Scores by name."""
        return ((score.name, score.value) for score in self.scores)

    def __str__(self) -> str:
        lines = [*self.notes]
        lines += [f"{self.model}: {self.sentences:,} {self.of} in {self.seconds:.1f} s"]
        lines += [str(score) for score in self.scores]
        for c in self.comparison:
            lines.append(
                f"{c.name}: {c.ours:.2f} against {c.theirs:.2f} of {c.against or self.against}; "
                f"95% interval of ours {c.low:.2f} to {c.high:.2f}; p = {c.p:.4f}  {c.signature}"
            )
        lines += [baseline_line(name, row) for name, row in self.baselines.items()]
        ours = {key_of(name): value for name, value in self.named_scores()}
        lines += [said] if (said := beside_baselines(ours, self.baselines)) else []
        lines += [str(self.lengths)] if self.lengths else []
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    def keep(self, folder: Path) -> None:
        """Add the scores to the model's own list of all scores it ever got."""
        try:
            with open(folder / "scores.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(self.to_dict(), ensure_ascii=False) + "\n")
            if self.lengths and len(self.lengths.rows) > 2:  # all, and groups to compare
                self.lengths.draw(folder / "lengths.png")
        except OSError:
            log(f"{folder}: could not be written to, so the scores are not kept there")


@dataclass(frozen=True)
class ClassScore:
    """Precision, recall and F1 of one label, in percent."""

    label: str
    precision: float
    recall: float
    f1: float
    support: int  # rows that have it


@dataclass(frozen=True)
class Misprediction:
    """A wrong prediction, with the probability that the model gave it."""

    where: str
    text: str
    right: str
    answer: str
    probability: float

    def __str__(self) -> str:
        text = self.text if len(self.text) <= _MOST_SHOWN else self.text[: _MOST_SHOWN - 1] + "…"
        return f"  {self.answer} ({self.probability:.2f}), but {self.right}: {text}  {self.where}"


def baseline_line(name: str, row: Mapping[str, float]) -> str:
    """Write the scores of a baseline as a line."""
    return f"baseline, {name}: " + ", ".join(f"{label_of(k)} {v:.2f}" for k, v in row.items())


def label_of(key: str) -> str:
    """A score's name as it is printed: macro F1 for macro_f1."""
    return key.replace("_f1", " F1").replace("_", " ")


def beside_baselines(
    scores: Mapping[str, float], baselines: Mapping[str, Mapping[str, float]]
) -> str:
    """Sentence on whether scores beat every baseline in every score, if there are baselines."""
    better, rest = [], []
    for key in dict.fromkeys(key for row in baselines.values() for key in row if key in scores):
        sign = -1 if key in LOWER_IS_BETTER else 1
        rows = {name: row[key] for name, row in baselines.items() if key in row}
        name = max(rows, key=lambda name: sign * rows[name])
        beats = sign * scores[key] > sign * rows[name]
        (better if beats else rest).append(
            f"{label_of(key)} {scores[key]:.2f}, {rows[name]:.2f} of {name}"
        )
    return (
        WARNING + "; ".join(rest)
        if rest
        else "beats its baselines: " * bool(better) + "; ".join(better)
    )


@dataclass(frozen=True, repr=False)
class LabelEvaluation(Evaluation):
    """The scores of labels, by class too, with the mispredictions of highest probability."""

    labels: list[str] = field(default_factory=list)
    classes: list[ClassScore] = field(default_factory=list)
    confusion: list[list[int]] | None = None
    errors: list[Misprediction] = field(default_factory=list)

    def __str__(self) -> str:
        parts = [super().__str__(), self._classes()]
        if self.confusion is not None:
            parts.append(self._confusion(self.confusion))
        if self.errors:
            parts += ["wrong, with the highest probability:", *map(str, self.errors)]
        return "\n".join(parts)

    def _classes(self) -> str:
        width = max(5, *(len(row.label) for row in self.classes))
        lines = [f"{'label':<{width}}  precision  recall      F1  support"]
        for row in self.classes:
            lines.append(
                f"{row.label:<{width}}  {row.precision:9.2f}  {row.recall:6.2f}  {row.f1:6.2f}"
                f"  {row.support:7,}"
            )
        return "\n".join(lines)

    def _confusion(self, table: list[list[int]]) -> str:
        if len(self.labels) > _MOST_PRINTED:
            pairs = [
                (number, self.labels[i], self.labels[j])
                for i, row in enumerate(table)
                for j, number in enumerate(row)
                if i != j and number
            ]
            most = sorted(pairs, key=lambda pair: -pair[0])[:10]
            lines = [f"  {a} predicted as {b}: {number:,}" for number, a, b in most]
            return "\n".join(["most often confused:", *lines])
        cells = [[f"{number:,}" for number in row] for row in table]
        wide = [
            max(len(label), *(len(row[j]) for row in cells)) for j, label in enumerate(self.labels)
        ]
        first = max(map(len, self.labels))
        lines = ["confusion matrix, targets down, predictions across:"]
        for name, row in (("", self.labels), *zip(self.labels, cells, strict=True)):
            line = "  ".join(f"{cell:>{width}}" for cell, width in zip(row, wide, strict=True))
            lines.append(f"{name:<{first}}  {line}")
        return "\n".join(lines)


def write_outputs(path: str, rows: Sequence[dict[str, Any]]) -> None:
    """Write the predictions of a model: a line each, or JSON lines with all that is known."""
    if path.lower().endswith(".jsonl"):
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    else:
        lines = [" ".join(str(row["prediction"]).split()) for row in rows]
    write_atomically(path, "".join(f"{line}\n" for line in lines))


def provenance() -> dict[str, Any]:
    """Version, commit, threads and date that a score was made with."""
    return {
        "threads": torch.get_num_threads(),
        "regard": __version__,
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _commit() -> str | None:
    """Commit of the program, if it runs from a checkout."""
    home = Path(__file__).resolve().parents[2]
    if not (home / ".git").exists():
        return None
    try:
        git = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=home, capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return git.stdout.strip() or None
