"""The report of a comparison: tables, plots and results.json."""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from regard.errors import UsageError
from regard.files import write_atomically
from regard.metrics.evaluation import LOWER_IS_BETTER
from regard.metrics.interval import Difference, Interval, interval, paired
from regard.metrics.results import Named, markdown
from regard.training.run_folder import exit_code

# keys that change the training data
_DATA = {"data", "valid", "init", "columns", "from", "to", "skip_bad", "share"}

_DERIVED = {"perplexity", "bits_per_byte"}  # from the loss, so a plot of it is enough
_MAX_PANELS = 3


class Variant(NamedTuple):
    """One combination of the varied settings."""

    name: str  # of its folder
    values: dict[str, Any]

    def __str__(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in self.values.items()) or self.name

    @property
    def label(self) -> str:
        """Return its values, for where the keys are named elsewhere."""
        return ", ".join(str(value) for value in self.values.values()) or self.name


def run_name(job: Mapping[str, Any]) -> str:
    """Return the name of a run: its variant and seed."""
    return f"{Variant(job['name'], job['variant'])}, seed {job['seed']}"


@dataclass
class SearchRecord:
    """How trials of a search were drawn, and which of them went on.

    Args:
        trials: how many were drawn.
        seed: by which they were.
        space: the range or list of each key, as it was given.
        shares: of the steps, at which the trials that are left are compared.
        rungs: for each share that all of them have reached, how many there were and the best.
    """

    trials: int
    seed: int
    space: dict[str, str]
    shares: tuple[float, ...]
    rungs: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Compared(Named):
    """The scores of all variants with confidence intervals over seeds."""

    name: str
    out: str
    varied: dict[str, list[Any]]
    variants: list[Variant]
    seeds: list[int]
    counted: str
    command: str
    runs: list[dict[str, Any]] = field(default_factory=list)
    signal: int | None = None  # that stopped it
    judged: Any = None  # the evaluation of all models on a test part
    search: SearchRecord | None = None
    trends: bool = False  # whether scores were drawn by a number, time and speed

    @property
    def stopped(self) -> bool:
        """True if a signal stopped the comparison."""
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """Exit code of a command that a signal stopped, as shells count it, or 0."""
        return exit_code(self.signal)

    def of(self, variant: Variant) -> list[dict[str, Any]]:
        """Return the finished runs of a variant, and those that a search has stopped."""
        runs = self.done if self.search is None else [run for run in self.runs if "scores" in run]
        return [run for run in runs if run["name"] == variant.name]

    @property
    def finished(self) -> bool:
        """True if nothing is left to train."""
        if self.search is not None:
            return len(self.search.rungs) == len(self.search.shares)
        return len(self.done) == len(self.runs)

    @property
    def done(self) -> list[dict[str, Any]]:
        """Return all finished runs."""
        return [run for run in self.runs if run["finished"]]

    @property
    def failed(self) -> list[dict[str, Any]]:
        """Return the runs that cannot be finished."""
        return [run for run in self.runs if "failed" in run]

    def check_data(self) -> None:
        """Refuse runs on different training data, unless data are what is compared."""
        for run in [] if _DATA & set(self.varied) else self.done:
            first = self.done[0]
            if run["data"] != first["data"]:
                raise UsageError(
                    f"{run['folder']} learnt from other data than {first['folder']}; "
                    "restore the data and remove the former, or choose another out="
                )

    # Scores

    @property
    def names(self) -> list[str]:
        """Return the names of the scores, the main one first."""
        names = dict.fromkeys(name for run in self.done for name in run["scores"])
        names.pop("better", None)
        return sorted(names, key=lambda name: name != self.main)

    @property
    def main(self) -> str:
        """Return the score that training selects by."""
        scores = self._first_finite()
        better = scores.pop("better", None)
        return next((k for k, v in scores.items() if better in (v, -v)), "")

    def _first_finite(self) -> dict[str, float]:
        """Return the scores of a run that did not diverge."""
        runs = (run["scores"] for run in self.done if run["scores"].get("better") is not None)
        return {k: v for k, v in next(runs, {}).items() if v is not None}

    def lower_is_better(self, name: str) -> bool:
        """Tell whether a lower score is better; for the main one, as training had it."""
        scores = self._first_finite()
        return name in LOWER_IS_BETTER or (name == self.main and scores[name] != scores["better"])

    def score(self, variant: Variant, name: str) -> Interval | None:
        """Return a score of a variant with its interval over seeds."""
        return interval_of([run["scores"].get(name) for run in self.of(variant)])

    def against_best(self) -> dict[str, Difference | None]:
        """Compare the main score of every variant with that of the best, seed by seed."""
        means = {v.name: self.score(v, self.main) for v in self.variants}
        number = (
            best_index(list(means.values()), self.lower_is_better(self.main)) if self.main else -1
        )
        if number < 0:
            return {}
        best = self.variants[number]
        return {v.name: self.between(v, best) for v in self.variants if v is not best}

    def between(self, one: Variant, other: Variant) -> Difference | None:
        """Compare the main score of two variants, paired by seed."""
        ours, theirs = (
            {run["seed"]: run["scores"].get(self.main) for run in self.of(v)} for v in (one, other)
        )
        both = [(ours[seed], theirs[seed]) for seed in ours if seed in theirs]
        known = [(a, b) for a, b in both if a is not None and b is not None]
        return paired([a for a, _ in known], [b for _, b in known])

    def curves(self) -> dict[str, dict[int, Interval | None]]:
        """Return the loss of each variant by test length, also with positions extended by YaRN."""
        key = "loss" if self.counted == "all" else "last"
        curves: dict[str, dict[int, Interval | None]] = {}
        for variant in self.variants:
            rows = [row for run in self.of(variant) for row in run["lengths"] or ()]
            for way in dict.fromkeys(row["way"] for row in rows):
                line = curves.setdefault(f"{variant.label} + {way}" if way else variant.label, {})
                for length in sorted({row["length"] for row in rows}):
                    some = [r[key] for r in rows if (r["length"], r["way"]) == (length, way)]
                    line[length] = interval_of(some)
        return curves

    # Tables, text and files

    def table(self) -> list[list[str]]:
        """Return the rows of the table, the head first."""
        several, names = len(self.variants) > 1, self.names
        against = self.against_best() if several else {}
        columns = []
        for name in names:
            scores = [self.score(variant, name) for variant in self.variants]
            ended = [
                score if any(run["finished"] for run in self.of(variant)) else None
                for variant, score in zip(self.variants, scores, strict=True)
            ]
            best = best_index(ended, self.lower_is_better(name)) if several else -1
            columns.append(cells(scores, best))
        compared = any(against.values())
        head = [*(self.varied or ["variant"]), *names, *([f"{self.main} against best"] * compared)]
        counted = ["steps", "tokens", "seconds", "parameters"]
        counted += ["speed"] * any(run.get("speed") for run in self.done)
        rows = [[*head, "runs", *counted]]
        for number, variant in enumerate(self.variants):
            runs = self.of(variant)
            row = [str(value) for value in variant.values.values()] or [variant.name]
            row += [column[number] for column in columns]
            row += [difference(against.get(variant.name))] * compared
            row.append(f"{len(runs)}")
            for key in counted:
                row.append(span([run[key] for run in runs]))
            rows.append(row)
        return rows

    def length_table(self) -> list[list[str]]:
        """Return the rows of the table of losses by test length, the head first."""
        curves = self.curves()
        lengths = sorted({length for line in curves.values() for length in line})
        columns = []
        for length in lengths:
            losses = [line.get(length) for line in curves.values()]
            columns.append(cells(losses, best_index(losses, True) if len(losses) > 1 else -1))
        head = [", ".join(self.varied) or "variant", *(f"{length:,} tokens" for length in lengths)]
        return [head, *([label, *row] for label, *row in zip(curves, *columns, strict=True))]

    def notes(self) -> list[str]:
        """Return notes on how to read the tables."""
        failed = [f"{run_name(run)} failed: {run['failed']}" for run in self.failed]
        if self.search is not None:
            return [*self._search_notes(self.search), *failed]
        seeds = f"seeds {', '.join(map(str, self.seeds))}" if len(self.seeds) > 1 else "one seed"
        notes = [f"Mean over {seeds}, ± its 95% interval by Student's t; the best is bold."]
        if len(self.variants) > 1 and len(self.seeds) > 1:
            notes.append(
                "Against best: mean of the differences seed by seed, with Student's paired test; "
                "p is not corrected for the number of variants."
            )
        same = len({run["steps"] for run in self.done}) <= 1
        notes.append(
            "All runs have the same number of steps; seconds are those of training and validation."
            if same
            else "Runs differ in their number of steps; minutes= is measured by each on its own."
        )
        cuts = {tuple(run["tokenizers"]) for run in self.done}
        if len(cuts) > 1:
            notes.append("Tokenizers differ, so losses a token do not compare.")
        return notes + failed

    def _search_notes(self, search: SearchRecord) -> list[str]:
        drawn = ", ".join(f"{key}={text}" for key, text in search.space.items())
        notes = [f"{search.trials} trials drawn at random by seed {search.seed} from {drawn}."]
        stops = " and ".join(f"{share:.0%}" for share in search.shares[:-1])
        if stops:
            notes.append(
                f"After {stops} of the steps only the best third went on; the scores of the others "
                "are those they had then. The best of those that finished is bold."
            )
        if self.finished and self.done:
            best = next(run for v in self.variants for run in self.of(v) if run["finished"])
            notes.append(
                f"Best: {best['name']}. Being the best of {search.trials} on the validation part "
                "flatters it: judge it on a test part, or compare it anew with other seeds. "
                f"To repeat it: regard train --from {best['folder']} out=FOLDER"
            )
        return notes

    def length_note(self) -> str:
        """Return a note on the table of test lengths."""
        what = "all tokens" if self.counted == "all" else "the last quarter of each window"
        return (
            f"Loss a token over {what} of the validation part, cut into windows of each length; "
            "the same tokens at every length. A dash: the model has no positions so far out."
        )

    def __str__(self) -> str:
        parts = []
        if self.done:
            parts += [markdown(self.table()), *self.notes()[1:]]
        if self.curves():
            parts += ["", markdown(self.length_table()), self.length_note()]
        if self.stopped:
            left = len(self.runs) - len(self.done)
            what = "" if self.search else f" with {left} of {len(self.runs)} runs left"
            parts += [f"stopped{what}; go on with:"]
            parts += [self.command]
        elif self.failed and not self.search:
            parts += [f"{len(self.failed)} of {len(self.runs)} runs failed; to try them again:"]
            parts += [self.command]
        else:
            parts += [f"{self.out}: results.json, table.md, " + " and ".join(self.plots())]
        if self.judged is not None:
            parts += ["", str(self.judged), f"{self.out}: lengths.png"]
        return "\n".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        keys = ("name", "out", "command", "varied", "seeds", "stopped", "main")
        against = self.against_best()
        values = {
            **{key: getattr(self, key) for key in keys},
            "finished": self.finished,
            "search": None if self.search is None else asdict(self.search),
            "variants": [
                {
                    "name": variant.name,
                    "values": variant.values,
                    "scores": {name: as_plain(self.score(variant, name)) for name in self.names},
                    "against_best": as_plain(against.get(variant.name)),
                }
                for variant in self.variants
            ],
            "pairs": [
                {"of": one.name, "against": other.name, **gap._asdict()}
                for one, other in itertools.combinations(self.variants, 2)
                if (gap := self.between(one, other)) is not None
            ],
            "lengths": {
                label: {str(length): as_plain(loss) for length, loss in line.items()}
                for label, line in self.curves().items()
            },
            "counted": self.counted,
            "notes": self.notes(),
            "accuracy_in": "percent",
            "runs": self.runs,
            "judged": None if self.judged is None else self.judged.to_dict(),
        }
        return finite(values)

    def write(self, out: Path) -> None:
        """Write results.json."""
        text = json.dumps(self.to_dict(), indent=1, ensure_ascii=False, default=str)
        write_atomically(out / "results.json", text + "\n")

    def plots(self) -> list[str]:
        """Return the names of the plots."""
        made = {"plot.png": self.done, "curve.png": self.curves(), "trends.html": self.trends}
        return [name for name, there in made.items() if there]

    def keep(self, out: Path) -> None:
        """Write results.json, table.md and the plots."""
        self.write(out)
        if not self.done:
            return
        from regard.lab.trends import draw_trends
        from regard.viewer.plot import draw_curves, draw_scores

        keys = ", ".join(self.varied)
        title = f"{self.name}: {keys}" if keys else self.name
        parts = [f"# {title}", "", f"`{self.command}`", "", *self.notes(), ""]
        parts += [markdown(self.table()), ""]
        curves = self.curves()
        if curves:
            parts += [self.length_note(), "", markdown(self.length_table()), ""]
        write_atomically(out / "table.md", "\n".join(parts))
        ended = {run["name"] for run in self.done}
        variants = [
            variant for variant in self.variants if not self.search or variant.name in ended
        ]
        labels = [variant.label for variant in variants]
        shown = [n for n in self.names if n == self.main or n not in _DERIVED][:_MAX_PANELS]
        panels = {name: [self.score(v, name) for v in variants] for name in shown}
        draw_scores(out / "plot.png", title, labels, panels)
        if (trends := draw_trends(self, title)) is not None:
            trends.save(out / "trends.png")
            trends.save(out / "trends.html")
            self.trends = True
        if curves:
            lines = {
                label: [(length, one) for length, one in line.items() if one is not None]
                for label, line in curves.items()
            }
            axes = ("test length in tokens", "loss a token")
            trained = {row["length"] / row["times"] for run in self.done for row in run["lengths"]}
            one = trained.pop() if len(trained) == 1 else None
            draw_curves(out / "curve.png", title, lines, axes, one)


def interval_of(values: Sequence[float | None]) -> Interval | None:
    """Return the interval of the numbers that are known."""
    known = [value for value in values if value is not None]
    return interval(known) if known else None


def best_index(scores: Sequence[Interval | None], low: bool) -> int:
    """Return the index of the lowest (or highest) mean, or -1."""
    sign = 1 if low else -1
    known = [(sign * one.mean, i) for i, one in enumerate(scores) if one and one.mean == one.mean]
    return min(known, default=(0.0, -1))[1]


def cells(scores: Sequence[Interval | None], best: int) -> list[str]:
    """Format means with their intervals, the best in bold, all to the same precision."""
    largest = max((abs(one.mean) for one in scores if one and math.isfinite(one.mean)), default=0)
    digits = 3 if largest < 20 else 2 if largest < 200 else 1
    texts = []
    for number, one in enumerate(scores):
        if one is None:
            texts.append("-")
            continue
        text = f"{one.mean:,.{digits}f}"
        text = f"**{text}**" if number == best else text
        texts.append(text if one.half is None else f"{text} ± {one.half:,.{digits}f}")
    return texts


def difference(gap: Difference | None) -> str:
    """Format a difference to the best, with its p-value."""
    if gap is None:
        return ""
    p = f"p {gap.p:.3f}" if gap.p >= 0.001 else "p < 0.001"
    return f"{gap.mean:+.3f} ± {gap.half:.3f}, {p}"


def span(numbers: Sequence[float]) -> str:
    """Format numbers as one if they are equal, else as the range from least to largest."""
    texts = list(dict.fromkeys(f"{number:,.0f}" for number in sorted(numbers)))
    return " to ".join([texts[0], texts[-1]] if len(texts) > 1 else texts) or "-"


def as_plain(value: Interval | Difference | None) -> dict[str, Any] | None:
    """Return the fields of an interval for JSON."""
    if value is None:
        return None
    return value._asdict() if isinstance(value, Difference) else dict(vars(value))


def finite(value: Any) -> Any:
    """Replace numbers that are not finite by None, which JSON can write."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(one) for key, one in value.items()}
    return [finite(one) for one in value] if isinstance(value, list | tuple) else value
