"""Embedding: one vector of a text, so that texts can be compared. It is run, not trained."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.attention.watch import watch
from regard.data.documents import Texts, load_texts
from regard.data.labelled import Labelled, load_labelled
from regard.data.parts import Dataset
from regard.data.rows import Row, TextBatch, TextBatches, collate
from regard.data.scored import ScoredPairReader
from regard.decode.batching import in_batches
from regard.errors import UsageError, log, lookup
from regard.layers.heads import Max, Mean
from regard.metrics.correlation import correlation_scores
from regard.models.protocols import Model
from regard.settings import fill, setting
from regard.tasks.frame.answers import Embedded
from regard.tasks.frame.origin import Origin
from regard.tasks.frame.question import Question, text_keys
from regard.tasks.frame.settings import EvalSettings
from regard.tasks.frame.task import Answer, Judged, Task
from regard.tasks.text.codec import EncoderRun, TextCodec, check_max_length, load_encoder


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
class EmbedRun(EncoderRun):
    """How to embed texts."""

    pooling: str = setting("mean", "pooling of the tokens' vectors", choices=POOLINGS)
    normalise: bool = setting(True, "normalise vectors to length 1")
    similarity: bool = setting(False, "cosine similarity of two texts, with a TAB between them")

    @property
    def forced(self) -> bool:
        """Tell whether an input has two sides."""
        return self.similarity


@dataclass(frozen=True)
class EmbedEval(EvalSettings, EmbedRun):
    """What an evaluation of similarities can be told."""

    columns: str | None = setting(
        None, "columns of a table: both texts and the score: 6,7,5", group="data"
    )
    header: bool | None = setting(
        None, "whether a table has a header row; detected unless given", group="data"
    )
    skip_bad: bool = setting(False, "skip bad rows", group="data")


@dataclass(frozen=True)
class ShiftSettings(EmbedRun):
    """Which texts are embedded while something in the model is replaced."""

    data: str | None = setting(None, "texts: a folder or a file")
    init: str | None = setting(None, "the model")
    header: bool | None = setting(None, "whether a table has a header row; detected unless given")
    seed: int = setting(1, "of batches", min=0)


@dataclass(frozen=True)
class Similar(Answer):
    """The cosine similarity of two texts."""

    similarity: float
    cut: bool = False  # whether one of the texts was truncated

    def __str__(self) -> str:
        return f"{self.similarity:.6f}"

    def record(self, settings: Any) -> dict[str, Any]:
        """Return the fields that the prediction adds to a JSON line."""
        return {"prediction": round(self.similarity, 6), **({"cut": True} if self.cut else {})}


def check_pooling(pooling: str, family: str) -> None:
    """Refuse poolings that are unknown, or that say nothing of a text."""
    lookup("pooling", pooling, POOLINGS)
    if pooling == "first" and family == "gpt":
        raise UsageError("pooling=first is what every text begins with; choose mean or last")


class Embed(Task[TextCodec, Embedded | Similar]):
    """Makes one vector of a text by pooling those of its tokens."""

    name, holds, unit = "embed", "pairs of texts and their scores", "pairs"
    Train, Run, Eval = EmbedRun, EmbedRun, EmbedEval
    short = {}
    from_nothing = True

    def __init__(self, model: nn.Module, codec: TextCodec, config: Mapping[str, Any] | None = None):
        super().__init__(model, codec, config)
        self.tokenizer, self.encoder = codec.tokenizer, codec.encoder
        self.max_length: int = self.config.get("max_length") or self.model.config.max_length

    @classmethod
    def resolve(cls, values: Mapping[str, Any], origin: Origin | None = None) -> Any:
        """Refuse: there is no training of its own."""
        raise UsageError(
            "embed has no training of its own; import a model, or train one with: regard train "
            "language objective=masked ..., and run it with task=embed"
        )

    @classmethod
    def load_codec(cls, folder: Path, model: Model, config: dict[str, Any]) -> TextCodec:
        """Read the tokenizer and features of a folder, and check how vectors are made there."""
        path, family, known = folder / "config.json", config["family"], cls.families()
        if family not in known:
            raise UsageError(
                f"{path}: a model of family {family}, which makes no vectors of texts; "
                f"expected {' or '.join(known)}"
            )
        if not isinstance(config.get("normalise", True), bool):
            raise UsageError(f"{path}: 'normalise' is no true or false")
        try:
            own = {"pooling": config["pooling"]} if "pooling" in config else {}
            check_pooling(fill(EmbedRun, own).pooling, family)
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None
        # a model of running text never saw a begin or an end
        bare = family == "gpt" and config.get("running") is True
        return TextCodec(load_encoder(folder, model, config, bare=bare))

    @property
    def own(self) -> dict[str, Any]:
        """Return how the model makes vectors by default."""
        # the last token of a text is where CLIP learned to meet images
        usual = {"pooling": "last"} if self.config.get("family") == "clip" else {}
        return usual | {k: self.config[k] for k in ("pooling", "normalise") if k in self.config}

    def check_run(self, settings: Any) -> Any:
        """Refuse settings that do not fit the model."""
        check_pooling(settings.pooling, str(self.config.get("family")))
        check_max_length(settings, self.model)
        return settings

    def predict(
        self, inputs: list[str], settings: Any, *, first: int = 0
    ) -> list[Embedded | Similar]:
        """Embed each text or, for pairs with a TAB between, compare both."""
        if settings.similarity:
            pairs = [_sides(text, first + number) for number, text in enumerate(inputs, 1)]
            cosines, truncated = self.similarities(pairs, settings)
            self._log_truncated(truncated, settings)
            return [Similar(*both) for both in zip(cosines.tolist(), truncated, strict=True)]
        vectors, truncated = self.vectors(inputs, settings)
        self._log_truncated(truncated, settings)
        return [Embedded(*both) for both in zip(vectors, truncated, strict=True)]

    def _log_truncated(self, truncated: Sequence[bool], settings: Any) -> None:
        if any(truncated):
            most = settings.max_length or self.max_length
            log(f"{sum(truncated)} of {len(truncated)} texts were cut at {most} pieces")

    def vectors(self, texts: Sequence[str], settings: Any) -> tuple[np.ndarray, list[bool]]:
        """Return the vectors of texts (n, w), and which texts were truncated."""
        rows = self._rows(texts, settings)

        def embed(some: list[Row]) -> list[np.ndarray]:
            return list(self._forward(some, settings))

        limits = {"tokens": settings.batch_tokens, "rows": settings.batch_rows}
        vectors = in_batches(rows, [len(row.ids) for row in rows], embed, **limits)
        table = np.stack(vectors) if vectors else np.zeros((0, self.model.config.block.width))
        return table, [row.truncated for row in rows]

    def _rows(self, texts: Sequence[str], settings: Any) -> list[Row]:
        return self.encoder.texts(texts, settings.max_length or self.max_length)

    @torch.inference_mode()
    def _forward(self, rows: list[Row], settings: Any) -> np.ndarray:
        batch = collate(rows, self.tokenizer.pad, self.device)
        pooled = self.pooled(batch, settings)
        return (F.normalize(pooled, dim=-1) if settings.normalise else pooled).cpu().numpy()

    def pooled(self, batch: TextBatch, settings: Any) -> Tensor:
        """Vectors of texts, of whatever length."""
        hidden = self.model.hidden(**batch.inputs).float()
        return POOLINGS[settings.pooling](hidden, batch.lengths)

    def trained_as(self) -> tuple[Task[Any, Any], dict[str, Any]]:
        """The shift of vectors as a loss, since there is no training."""
        return VectorShift(self.model, self.codec, self.config), self.own

    def similarities(
        self, pairs: Sequence[tuple[str, str]], settings: Any
    ) -> tuple[np.ndarray, list[bool]]:
        """Return the cosine of each pair of texts, and which pairs were truncated."""
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        at = {text: number for number, text in enumerate(texts)}
        vectors, truncated = self.vectors(texts, settings)
        vectors = vectors.astype(np.float64)
        vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        sides = [[at[pair[side]] for pair in pairs] for side in (0, 1)]
        cosines = (vectors[sides[0]] * vectors[sides[1]]).sum(1)
        return cosines, [truncated[a] or truncated[b] for a, b in zip(*sides, strict=True)]

    # Judging

    def read_test(self, settings: Any) -> Labelled:
        """Read pairs of texts with scores."""
        part = settings.part
        reader = ScoredPairReader(settings.columns, settings.skip_bad, settings.header)
        return load_labelled(
            settings.data, reader, test=settings.test, need=(part,), trained=self.trained
        )

    def predict_examples(self, data: Labelled, settings: Any) -> np.ndarray:
        """Return the cosine of each pair."""
        pairs = [pair.texts for pair in data[settings.part]]
        cosines, truncated = self.similarities(pairs, settings)
        self._log_truncated(truncated, settings)
        return cosines

    def score(self, data: Labelled, predictions: np.ndarray, settings: Any) -> Judged:
        """Return the correlation of the cosines with the scores that people gave."""
        targets = np.array([pair.score for pair in data[settings.part]])
        signature = f"cosine|pooling:{settings.pooling}|pairs:{len(targets)}"
        return Judged(correlation_scores(predictions, targets, signature), len(targets))

    def outputs(
        self, data: Labelled, predictions: np.ndarray, settings: Any
    ) -> list[dict[str, Any]]:
        """Return the cosine of each pair beside its score."""
        return [
            {"texts": pair.texts, "score": pair.score, "prediction": round(value, 6)}
            for pair, value in zip(data[settings.part], predictions.tolist(), strict=True)
        ]

    def made_with(self, settings: Any) -> dict[str, Any]:
        """Return the settings that a score depends on."""
        most = settings.max_length or self.max_length
        return {"pooling": settings.pooling, "max_length": most}

    def read_part_of(self, data: str, part: str) -> Dataset[Any]:
        """Read texts of any kind: a plain file, a table of texts, or pairs with scores."""
        try:
            return load_texts(data, need=(part,), trained=self.trained)
        except UsageError as error:
            try:
                return super().read_part_of(data, part)
            except UsageError:
                raise error from None

    def question(self, given: Any, settings: Any, expected: Any = None) -> Question:
        """Refuse: a vector has no probability that a cut could lower."""
        raise UsageError(
            "this model gives a vector, and no answer with a probability that could be lost when "
            "something is cut; give it a head with: regard train classify init=MODEL ..., and look "
            "at that. What attends to what: regard look without cause=, lens= and patch="
        )

    def probe(self, given: str) -> Question:
        """A text's vector, which a change of the model moves by so much cosine distance."""
        settings = self.look_settings({})
        (row,) = self._rows([given], settings)

        @torch.inference_mode()
        def vectors(copies: int) -> Tensor:
            batch = collate([row] * copies, self.tokenizer.pad, self.device)
            return self.pooled(batch, settings).unsqueeze(1)

        own = vectors(1).double()
        pieces = self.tokenizer.pieces(row.ids.tolist())
        return Question(
            answer=given,
            logprobs=vectors,
            chosen=[0],
            names=[""],
            places=["text"],
            tokens=pieces,
            keys=text_keys(len(pieces)),
            score=lambda x: F.cosine_similarity(x, own, dim=-1)[:, 0] - 1,
            unit="cosine distance",
        )

    def explain(self, given: str, settings: Any) -> Any:
        """Embed a text and return a Picture of what each layer attended to."""
        from regard.viewer.picture import Picture
        from regard.viewer.text import text_views

        rows = self._rows([given], settings)
        with watch(self.model) as maps:
            (vector,) = self._forward(rows, settings)
        pieces = self.tokenizer.pieces(rows[0].ids.tolist())
        begin = " ".join(f"{number:.4f}" for number in vector[:8].tolist())
        return Picture(
            title=given,
            views=text_views(maps, pieces),
            source=given,
            output=f"{begin} ...",
            note=f"{len(vector)} numbers, the {settings.pooling} of {len(pieces)} tokens",
        )


class ShiftBatch(NamedTuple):
    """Texts, and their vectors as the model is."""

    texts: TextBatch
    vectors: Tensor


class VectorShift(Embed):
    """Embedding with a loss: the cosine distance of each text's vector from what it was.

    It is 0 for the model as it is, and tells what a change of what flows in it costs.
    """

    holds, Train = "texts", ShiftSettings

    @classmethod
    def resolve(cls, values: Mapping[str, Any], origin: Origin | None = None) -> Any:
        """Complete what a user gave."""
        return fill(cls.Train, values)

    @classmethod
    def read(cls, settings: Any, origin: Origin | None) -> Texts:
        """Read texts: the lines of a running text, or the rows of a table."""
        read = load_texts(
            settings.data, key=settings.columns, header=settings.header, need=("train",)
        )
        texts = read["train"]
        if read.running:
            texts = [line for text in texts for line in text.splitlines()]
        texts = [text for text in texts if text.strip()]
        return replace(read, parts={"train": texts})

    def batches(self, data: Texts, settings: Any) -> TextBatches:
        """Return texts with their vectors."""

        @torch.no_grad()
        def make(_: Any, rows: list[Row], texts: TextBatch) -> ShiftBatch:
            return ShiftBatch(texts, self.pooled(texts, settings))

        self.check_run(settings)
        return TextBatches(
            self._rows(data["train"], settings),
            self.encoder,
            make,
            tokens=settings.batch_tokens,
            seed=settings.seed,
            max_rows=settings.batch_rows,
            device=self.device,
        )

    def count(self, batch: ShiftBatch) -> tuple[int, int]:
        """Return the number of texts, and of their tokens."""
        return len(batch.vectors), batch.texts.tokens

    def loss(self, batch: ShiftBatch, settings: Any) -> Tensor:
        """Return the summed cosine distance of the vectors from what they were."""
        now = self.pooled(batch.texts, settings).double()
        return (1 - F.cosine_similarity(now, batch.vectors.double(), dim=-1)).sum()


def _sides(text: str, number: int) -> tuple[str, str]:
    one, tab, other = text.partition("\t")
    if not tab:
        raise UsageError(
            f"text {number}: {text[:40]!r} is no pair; write both texts with a TAB between them"
        )
    return one, other
