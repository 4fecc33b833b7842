"""Pairs of texts with a score, such as how alike people find them, from tables."""

import math
from pathlib import Path
from typing import Any, NamedTuple

from regard.data.pairs import PairReader
from regard.data.table import Table
from regard.errors import UsageError

_FIRST = ("sentence1", "sentence_1", "sentence_a", "text1", "text_a", "source", "src", "premise")
_SECOND = (
    "sentence2",
    "sentence_2",
    "sentence_b",
    "text2",
    "text_b",
    "target",
    "tgt",
    "hypothesis",
)
_SCORE_COLUMNS = ("score", "similarity", "similarity_score", "relatedness_score", "rating", "label")


class ScoredPair(NamedTuple):
    """Two texts and their score, with the file and line they came from."""

    texts: tuple[str, str]
    score: float
    where: str

    @property
    def input(self) -> str:
        """Input of a model: one of the texts."""
        return self.texts[0]

    @property
    def source(self) -> str:
        """Key by which a validation part is split off."""
        return "\t".join(self.texts)


class ScoredPairReader:
    """Reads pairs of texts with a score from a table."""

    of = "pairs of texts with scores"

    def __init__(
        self, columns: str | None = None, skip_bad: bool = False, header: bool | None = None
    ):
        self.skip_bad, self.header = skip_bad, header
        self.columns = None if columns is None else [part.strip() for part in columns.split(",")]
        if self.columns is not None and (len(self.columns) != 3 or not all(self.columns)):
            raise UsageError(
                f"columns={columns:.60} is not three columns; give both texts and the score, "
                "such as columns=6,7,5 or columns=sentence1,sentence2,score"
            )

    def read(self, path: Path, notes: list[str]) -> list[ScoredPair]:
        """Read a file; what the user should be told is added to the notes."""
        one, other, score = self.columns or self._find(path)
        options: dict[str, Any] = {"skip_bad": self.skip_bad, "header": self.header}
        texts = PairReader(path, columns=(one, other), **options)
        scores = PairReader(path, columns=(score, score), **options)
        written = {pair.where: pair.source for pair in scores}
        pairs: list[ScoredPair] = []
        bad: list[str] = []
        for pair in texts:
            number = _number(written.get(pair.where, ""))
            if number is not None:
                pairs.append(ScoredPair((pair.source, pair.target), number, pair.where))
                continue
            if pair.where == f"{path}:1":
                notes.append(f"{path}: row 1 has no number for a score, so it is a header")
                continue
            bad.append(f"{pair.where}: the score {written.get(pair.where)!r:.40} is not a number")
            if not self.skip_bad:
                raise UsageError(f"{bad[0]}; set columns=, or drop such rows with skip_bad=true")
        notes += texts.notes
        if bad:
            notes.append(f"{len(bad):,} rows of {path} dropped; the first: {bad[0]}")
        return pairs

    def _find(self, path: Path) -> list[str]:
        """Choose the columns by the header or the keys, or take the first three."""
        first = next((row.value for row in Table(path) if row.value is not None), [])
        keys = isinstance(first, dict)
        names = [cell.strip() for cell in first]
        by_role = [
            next((name for name in names if name.casefold() in role), None)
            for role in (_FIRST, _SECOND, _SCORE_COLUMNS)
        ]
        known = [name for name in by_role if name is not None]
        if len(known) == 3:
            return known
        if keys:
            raise UsageError(
                f"{path}:1: no two texts and score among the keys {', '.join(names[:8])}; name "
                "them sentence1, sentence2 and score, or set columns="
            )
        return ["1", "2", "3"]


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
