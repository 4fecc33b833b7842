"""A model that makes one vector of a text, so that texts can be compared."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.attention.watch import watch
from regard.data.labelled import hash_items, load_labelled
from regard.data.pairs import PairReader
from regard.data.table import Table
from regard.decode.search import in_batches
from regard.errors import UsageError, log, lookup
from regard.layers.heads import Max, Mean
from regard.metrics.bleu import Score
from regard.metrics.evaluation import Evaluation, made_here, score_both, write_outputs
from regard.settings import fill, setting
from regard.tasks.labelling import Read, Reader, Row, collate, longest_of, reader_of
from regard.tasks.run import load_tokenizer
from regard.tasks.runners import Answer, Runner

NAME = "embed"
FAMILIES = ("bert", "gpt", "clip")


def _last(x: Tensor, lengths: Tensor) -> Tensor:
    return x[torch.arange(len(x), device=x.device), lengths - 1]


# name -> how the vectors of a text's tokens (b, l, w) become one (b, w), padding left out
POOLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": Mean(),
    "first": lambda x, lengths: x[:, 0],
    "last": _last,
    "max": Max(),
}


@dataclass(frozen=True)
class EmbedSettings:
    """How to make vectors of texts."""

    pooling: str = setting("mean", "mean, first, last or max of the tokens' vectors")
    normalise: bool = setting(True, "make every vector as long as 1")
    similarity: bool = setting(False, "compare two texts, with a TAB between them")
    max_length: int | None = setting(None, "pieces read of a text", min=1, max=100_000)
    batch_tokens: int = setting(4096, "pieces read at once", min=1)
    batch_rows: int = setting(128, "texts read at once", min=1)
    threads: int | None = setting(None, "processor threads", min=1, max=1024)

    @property
    def forced(self) -> bool:
        """Tell whether an input has two sides."""
        return self.similarity


@dataclass(frozen=True)
class EmbedEvalSettings(EmbedSettings):
    """What to judge on, and how."""

    data: str | None = setting(None, "a folder or file of pairs of texts with scores")
    part: str = setting("test", "test, valid or train")
    test: str | None = setting(None, "which test file of the folder")
    columns: str | None = setting(None, "both texts and the score, such as 6,7,5")
    header: bool | None = setting(None, "whether a table begins with one; recognised unless told")
    skip_bad: bool = setting(False, "leave bad rows out")
    outputs: str | None = setting(None, "a file for the answers; .jsonl tells more")


def train(values: Mapping[str, Any], **more: Any) -> Any:
    """Refuse: there is no training of its own."""
    raise UsageError(
        "embed has no training of its own; import a model, or train one with: regard train "
        "language objective=masked ..., and run it with task=embed"
    )


@dataclass(frozen=True)
class Embedded(Answer):
    """The vector of one text."""

    vector: np.ndarray
    cut: bool = False

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.vector, dtype=dtype, copy=copy)

    def __str__(self) -> str:
        return " ".join(f"{number:.8g}" for number in self.vector.tolist())

    def lines(self, how: EmbedSettings) -> Iterator[str]:
        """Write the numbers with spaces between them."""
        yield str(self)

    def record(self, how: EmbedSettings) -> dict[str, Any]:
        """Return the fields of a JSON line."""
        found = {"prediction": [float(f"{number:.8g}") for number in self.vector.tolist()]}
        return {**found, "cut": True} if self.cut else found


@dataclass(frozen=True)
class Similar(Answer):
    """How alike two texts are: the cosine of the angle between their vectors."""

    similarity: float
    cut: bool = False

    def __str__(self) -> str:
        return f"{self.similarity:.6f}"

    def lines(self, how: EmbedSettings) -> Iterator[str]:
        """Write the number."""
        yield str(self)

    def record(self, how: EmbedSettings) -> dict[str, Any]:
        """Return the fields of a JSON line."""
        found = {"prediction": round(self.similarity, 6)}
        return {**found, "cut": True} if self.cut else found


class Embedder(Runner[Embedded | Similar]):
    """A model with its tokenizer, and how it makes one vector of many."""

    task = NAME
    settings = EmbedSettings
    eval_settings = EmbedEvalSettings
    from_nothing = True  # an empty text has a vector, too

    def __init__(self, model: Any, reader: Reader, config: dict[str, Any]):
        self.model, self.reader, self.config = model, reader, config
        self.tokenizer = reader.tokenizer
        self.longest: int = config.get("max_length") or model.config.max_length
        self.device = next(model.parameters()).device

    @classmethod
    def load(cls, folder: Path, model: Any, config: dict[str, Any]) -> "Embedder":
        """Put a loaded model together with the tokenizer beside it."""
        path = folder / "config.json"
        if config["family"] not in FAMILIES:
            raise UsageError(
                f"{path}: a model of family {config['family']}, which makes no vectors of texts; "
                f"expected {' or '.join(FAMILIES)}"
            )
        if not isinstance(config.get("normalise", True), bool):
            raise UsageError(f"{path}: 'normalise' is no true or false")
        longest = longest_of(config, folder, model)
        reader = reader_of(config, folder, model, load_tokenizer(folder))
        if config["family"] == "gpt" and config.get("running") is True:
            reader.before, reader.after = [], []  # such a model never saw a begin or an end
        made = cls(model, reader, {**config, "max_length": longest})
        try:
            made.check({})
        except UsageError as mistake:
            raise UsageError(f"{path}: {mistake}") from None
        return made

    def check(self, settings: dict[str, Any]) -> EmbedSettings:
        """Make full settings of what a user gave, with the model's own defaults."""
        return self._check(fill(EmbedSettings, {**self._own(), **settings}))

    def _own(self) -> dict[str, Any]:
        # the last token of a text is where CLIP learned to meet images
        usual = {"pooling": "last"} if self.config["family"] == "clip" else {}
        told = {key: self.config[key] for key in ("pooling", "normalise") if key in self.config}
        return {**usual, **told}

    def _check(self, how: Any) -> Any:
        lookup("pooling", how.pooling, POOLINGS)
        if how.pooling == "first" and self.config["family"] == "gpt":
            raise UsageError("pooling=first is what every text begins with; choose mean or last")
        if how.max_length and how.max_length > self.model.config.max_length:
            raise UsageError(
                f"max_length={how.max_length} is more than the {self.model.config.max_length} "
                "places of the model"
            )
        return how

    def answer(
        self, inputs: list[Any], *, first: int = 0, **settings: Any
    ) -> list[Embedded | Similar]:
        """Make a vector of each text or, for pairs with a TAB between, tell how alike they are."""
        how = self.check(settings)
        for text in inputs:
            if not isinstance(text, str):
                raise UsageError(f"{text!r:.60} is no text; give a list of texts")
        if how.threads:
            torch.set_num_threads(how.threads)
        if not how.similarity:
            vectors, cut = self.vectors(inputs, how)
            self._tell(cut, how)
            return [Embedded(row, was) for row, was in zip(vectors, cut, strict=True)]
        pairs = [_sides(text, first + number) for number, text in enumerate(inputs, 1)]
        found, cut = self.compare(pairs, how)
        self._tell(cut, how)
        return [Similar(one, was) for one, was in zip(found.tolist(), cut, strict=True)]

    def _most(self, how: EmbedSettings) -> int:
        return how.max_length or self.longest

    def _tell(self, cut: Sequence[bool], how: EmbedSettings) -> None:
        if any(cut):
            log(f"{sum(cut)} of {len(cut)} texts were cut at {self._most(how)} pieces")

    def vectors(self, texts: Sequence[str], how: EmbedSettings) -> tuple[np.ndarray, list[bool]]:
        """Return the vectors of texts (n, w), and which texts had to be cut."""
        rows = [self._row(row) for row in self.reader.texts(texts, self._most(how))]

        @torch.inference_mode()
        def embed(some: list[Row]) -> list[np.ndarray]:
            read = collate(some, self.tokenizer.pad, self.device)
            return list(self._pool(self._hidden(read), read.lengths, how).cpu().numpy())

        lengths = [len(row.ids) for row in rows]
        found = in_batches(rows, lengths, embed, tokens=how.batch_tokens, rows=how.batch_rows)
        table = np.stack(found) if found else np.zeros((0, self.model.config.block.width))
        return table, [row.cut for row in rows]

    def _row(self, row: Row) -> Row:
        """Read a begin where there is nothing at all to read."""
        if len(row.ids):
            return row
        return Row(np.array([self.tokenizer.bos]), np.array([-1]))

    def _hidden(self, read: Read) -> Tensor:
        types = {} if read.types is None else {"types": read.types}
        return self.model.hidden(read.ids, read.lengths, **types).float()

    def _pool(self, hidden: Tensor, lengths: Tensor, how: EmbedSettings) -> Tensor:
        pooled = POOLINGS[how.pooling](hidden, lengths)
        return torch.nn.functional.normalize(pooled, dim=-1) if how.normalise else pooled

    def compare(
        self, pairs: Sequence[tuple[str, str]], how: EmbedSettings
    ) -> tuple[np.ndarray, list[bool]]:
        """Return the cosine of each pair of texts, and which pairs had to be cut."""
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        at = {text: number for number, text in enumerate(texts)}
        vectors, cut = self.vectors(texts, how)
        vectors = vectors.astype(np.float64)
        vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        sides = [[at[pair[side]] for pair in pairs] for side in (0, 1)]
        cosines = (vectors[sides[0]] * vectors[sides[1]]).sum(1)
        return cosines, [cut[a] or cut[b] for a, b in zip(*sides, strict=True)]

    # Judging

    def evaluate(
        self,
        settings: dict[str, Any],
        *,
        against: "Embedder | None" = None,
        names: tuple[str, str] = ("model", ""),
    ) -> Evaluation:
        """Tell how well the model's similarities go with those that people gave."""
        how = self._check(fill(EmbedEvalSettings, {**self._own(), **settings}))
        if how.data is None:
            raise UsageError("data is missing; add data=FILE with pairs of texts and their scores")
        if how.threads:
            torch.set_num_threads(how.threads)
        reader = ScoredReader(how.columns, how.skip_bad, how.header)
        data = load_labelled(
            how.data, reader, test=how.test, need=(how.part,), trained=self.trained
        )
        pairs: list[Any] = data.parts[how.part]
        scores, seconds = score_both(
            lambda model: model._scores(pairs, how), self, against, names[1]
        )
        if how.outputs:
            found, _ = self.compare([pair.texts for pair in pairs], how)
            write_outputs(
                how.outputs,
                [
                    {"texts": pair.texts, "score": pair.score, "prediction": round(value, 6)}
                    for pair, value in zip(pairs, found.tolist(), strict=True)
                ],
            )
        made_with = {
            "data": how.data,
            "part": how.part,
            "data_hash": hash_items(pairs),
            "tokenizers": [self.tokenizer.sha],
            "pooling": how.pooling,
            "max_length": self._most(how),
            **made_here(),
        }
        return Evaluation(
            names[0],
            scores,
            len(pairs),
            seconds,
            made_with,
            names[1] or None,
            of="pairs",
            notes=data.notes,
        )

    def _scores(self, pairs: Sequence["Scored"], how: EmbedEvalSettings) -> list[Score]:
        found, cut = self.compare([pair.texts for pair in pairs], how)
        self._tell(cut, how)
        wanted = np.array([pair.score for pair in pairs])
        signature = f"cosine|pooling:{how.pooling}|pairs:{len(pairs)}"
        return [
            Score("Spearman", spearman(found, wanted), signature, 4),
            Score("Pearson", pearson(found, wanted), signature, 4),
        ]

    # Looking

    def picture(self, text: str, **settings: Any):
        """Make the vector of a text and gather where the model looked for it."""
        from regard.viewer.picture import Picture, View

        how = self.check(settings)
        row = self._row(self.reader.texts([text], self._most(how))[0])
        read = collate([row], self.tokenizer.pad, self.device)
        with torch.inference_mode(), watch(self.model) as maps:
            vector = self._pool(self._hidden(read), read.lengths, how)[0].cpu().numpy()
        pieces = self.tokenizer.pieces(row.ids.tolist())
        views = [
            View(name, maps[name].weights()[0].cpu().numpy(), pieces, pieces)
            for name in maps.names()
        ]
        begin = " ".join(f"{number:.4f}" for number in vector[:8].tolist())
        return Picture(
            title=text,
            views=views,
            source=text,
            output=f"{begin} ...",
            note=f"{len(vector)} numbers, the {how.pooling} of {len(pieces)} tokens",
        )


def _sides(text: str, number: int) -> tuple[str, str]:
    one, tab, other = text.partition("\t")
    if not tab:
        raise UsageError(
            f"text {number}: {text[:40]!r} is no pair; write both texts with a TAB between them"
        )
    return one, other


# Pairs that people have judged


class Scored(NamedTuple):
    """Two texts and how alike they are said to be, with the file and line they came from."""

    texts: tuple[str, str]
    score: float
    where: str

    @property
    def source(self) -> str:
        """Return what it is told apart by where a validation part is split off."""
        return "\t".join(self.texts)


ONES = ("sentence1", "sentence_1", "sentence_a", "text1", "text_a", "source", "src", "premise")
OTHERS = ("sentence2", "sentence_2", "sentence_b", "text2", "text_b", "target", "tgt", "hypothesis")
SCORES = ("score", "similarity", "similarity_score", "relatedness_score", "rating", "label")


class ScoredReader:
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

    def read(self, path: Path, notes: list[str]) -> list[Scored]:
        """Read a file; what the user should be told is added to the notes."""
        one, other, score = self.columns or self._find(path)
        how: dict[str, Any] = {"skip_bad": self.skip_bad, "header": self.header}
        texts = PairReader(path, columns=(one, other), **how)
        scores = PairReader(path, columns=(score, score), **how)
        told = {pair.where: pair.source for pair in scores}
        found: list[Scored] = []
        bad: list[str] = []
        for pair in texts:
            number = _number(told.get(pair.where, ""))
            if number is not None:
                found.append(Scored((pair.source, pair.target), number, pair.where))
                continue
            if pair.where == f"{path}:1":
                notes.append(f"{path}: row 1 has no number for a score, so it is a header")
                continue
            bad.append(f"{pair.where}: the score {told.get(pair.where)!r:.40} is no number")
            if not self.skip_bad:
                raise UsageError(f"{bad[0]}; set columns=, or drop such rows with skip_bad=true")
        notes += texts.notes
        if bad:
            notes.append(f"{len(bad):,} rows of {path} dropped; the first: {bad[0]}")
        return found

    def _find(self, path: Path) -> list[str]:
        """Choose the columns by the header or the keys, or take the first three."""
        first = next((row.value for row in Table(path) if row.value is not None), [])
        keys = isinstance(first, dict)
        names = [cell.strip() for cell in first]
        by_role = [
            next((name for name in names if name.casefold() in role), None)
            for role in (ONES, OTHERS, SCORES)
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


# How well two rows of numbers go together


def pearson(one: np.ndarray, other: np.ndarray) -> float:
    """Return the correlation of two rows of numbers; NaN where one of them never changes."""
    a, b = (np.asarray(x, dtype=np.float64) for x in (one, other))
    a, b = a - a.mean(), b - b.mean()
    size = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / size if size else math.nan


def ranks(numbers: np.ndarray) -> np.ndarray:
    """Return the place of each number from 1 on; equal ones share the mean of their places."""
    _, which, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[which]


def spearman(one: np.ndarray, other: np.ndarray) -> float:
    """Return the correlation of the ranks of two rows of numbers."""
    return pearson(ranks(one), ranks(other))
