"""The scores of one model on one data set, with all that they depend on."""

import json
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from regard import __version__
from regard.errors import log
from regard.files import write_atomically
from regard.metrics.bleu import Comparison, Score
from regard.metrics.lengths import Lengths
from regard.results import Scored


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

    def named_scores(self) -> Iterable[tuple[str, float]]:
        """Return the scores by name."""
        return ((score.name, score.value) for score in self.scores)

    def __str__(self) -> str:
        lines = [*self.notes]
        lines += [f"{self.model}: {self.sentences:,} {self.of} in {self.seconds:.1f} s"]
        lines += [str(score) for score in self.scores]
        for c in self.comparison:
            lines.append(
                f"{c.name}: {c.ours:.2f} against {c.theirs:.2f} of {c.against or self.against}; "
                f"95% of resamples of ours {c.low:.2f} to {c.high:.2f}; "
                f"p = {c.p:.4f} that the difference is chance  {c.signature}"
            )
        lines += [str(self.lengths)] if self.lengths else []
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
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


def write_outputs(path: str, rows: Sequence[dict[str, Any]]) -> None:
    """Write what a model answered: one line for each, or all that is known of it as JSON lines."""
    if path.lower().endswith(".jsonl"):
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    else:
        lines = [" ".join(str(row["prediction"]).split()) for row in rows]
    write_atomically(path, "".join(f"{line}\n" for line in lines))


def score_both(
    score: Callable[[Any], list[Score]], mine: Any, against: Any, name: str
) -> tuple[list[Score], float]:
    """Return the scores of a model and of another of some name, and the seconds of the first."""
    started = time.perf_counter()
    scores = score(mine)
    seconds = time.perf_counter() - started
    if against is not None:
        scores += [replace(one, name=f"{one.name} of {name}") for one in score(against)]
    return scores, seconds


def made_here() -> dict[str, Any]:
    """Return by what program a score was made, on how many threads, and when."""
    return {
        "threads": torch.get_num_threads(),
        "regard": __version__,
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _commit() -> str | None:
    """Return the commit of the program, if it runs from a checkout."""
    home = Path(__file__).resolve().parents[2]
    if not (home / ".git").exists():
        return None
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=home, capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
