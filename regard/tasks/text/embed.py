"""Embedding: one vector of a text, so that texts can be compared. It is run, not trained."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.attention.watch import watch
from regard.data.batches import moved
from regard.data.documents import Texts, load_texts
from regard.data.labelled import Labelled, load_labelled
from regard.data.rows import TextBatch, TextBatches, TokenRow, collate
from regard.data.scored import ScoredPairReader
from regard.decode.batching import in_batches
from regard.errors import UsageError, log, lookup
from regard.layers.heads import Max, Mean
from regard.metrics.correlation import correlation_scores
from regard.modalities.text import TEXT
from regard.modalities.tokens import text_keys
from regard.models import family, serving
from regard.models.protocols import Model
from regard.settings import fill, setting
from regard.tasks.frame.answers import Embedded
from regard.tasks.frame.origin import Origin
from regard.tasks.frame.question import Question
from regard.tasks.frame.settings import EvalSettings, TrainSettings
from regard.tasks.parts import (
    Answer,
    Judge,
    Lesson,
    Objective,
    Predictor,
    ScoredPredictions,
    System,
    Task,
    V,
)
from regard.tasks.runner import Runner
from regard.tasks.text.codec import EncoderRun, TextCodec, check_max_length, load_encoder
from regard.viewer.picture import Picture
from regard.viewer.settings import LookSettings


def _last(x: Tensor, lengths: Tensor) -> Tensor:
    return x[torch.arange(len(x), device=x.device), lengths - 1]


BertConfig, _ = family("bert")
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
class EmbedLook(LookSettings, EmbedRun):
    """What look can be told."""


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
class ShiftSettings(EmbedRun, TrainSettings):
    """Which texts are embedded while something in the model is replaced."""

    pooling: str | None = setting(None, "the model's own unless given", choices=POOLINGS)  # type: ignore[assignment]
    header: bool | None = setting(None, "whether a table has a header row; detected unless given")
    model: BertConfig = field(default_factory=BertConfig)  # type: ignore[valid-type]


@dataclass(frozen=True)
class Similar(Answer[EmbedRun]):
    """The cosine similarity of two texts."""

    similarity: float
    cut: bool = False  # whether one of the texts was truncated

    def __str__(self) -> str:
        return f"{self.similarity:.6f}"

    def record(self, settings: EmbedRun) -> dict[str, Any]:
        """The fields that the prediction adds to a JSON line."""
        return {"prediction": round(self.similarity, 6), **({"cut": True} if self.cut else {})}


def check_pooling(pooling: str, family: str) -> None:
    """Refuse poolings that are unknown, or that say nothing of a text."""
    lookup("pooling", pooling, POOLINGS)
    if pooling == "first" and family == "gpt":
        raise UsageError("pooling=first is what every text begins with; choose mean or last")


class Embedder(Predictor[Embedded | Similar, EmbedRun, EmbedLook, str]):
    """Makes one vector of a text by pooling those of its tokens."""

    Settings, Look = EmbedRun, EmbedLook
    from_nothing = True

    def __init__(self, model: nn.Module, codec: TextCodec, config: Mapping[str, Any]):
        super().__init__(model, codec, config)
        self.tokenizer, self.encoder = codec.tokenizer, codec.encoder
        self.max_length: int = config.get("max_length") or self.model.config.max_length
        # how it makes vectors; the last token of a text is where CLIP learned to meet images
        usual = {"pooling": "last"} if config.get("family") == "clip" else {}
        self.defaults = usual | {k: config[k] for k in ("pooling", "normalise") if k in config}

    def check(self, settings: V) -> V:
        """Refuse settings that do not fit the model."""
        if isinstance(settings, EmbedRun):
            check_pooling(settings.pooling, str(self.config.get("family")))
            check_max_length(settings, self.model)
        return settings

    def predict(
        self, inputs: list[str], settings: EmbedRun, *, first: int = 0
    ) -> list[Embedded | Similar]:
        """Embed each text or, for pairs with a TAB between, compare both."""
        if settings.similarity:
            pairs = [_sides(text, first + number) for number, text in enumerate(inputs, 1)]
            cosines, truncated = self.similarities(pairs, settings)
            return [Similar(*both) for both in zip(cosines.tolist(), truncated, strict=True)]
        vectors, truncated = self.vectors(inputs, settings)
        self._log_truncated(truncated, settings)
        return [Embedded(*both) for both in zip(vectors, truncated, strict=True)]

    def _log_truncated(self, truncated: Sequence[bool], settings: EmbedRun) -> None:
        if any(truncated):
            most = settings.max_length or self.max_length
            log(f"{sum(truncated)} of {len(truncated)} texts were cut at {most} pieces")

    def vectors(self, texts: Sequence[str], settings: EmbedRun) -> tuple[np.ndarray, list[bool]]:
        """The vectors of texts (n, w), and which texts were truncated."""
        rows = self.rows(texts, settings)

        def embed(some: list[TokenRow]) -> list[np.ndarray]:
            return list(self._forward(some, settings))

        limits = {"tokens": settings.batch_tokens, "rows": settings.batch_rows}
        vectors = in_batches(rows, [len(row.ids) for row in rows], embed, **limits)
        table = np.stack(vectors) if vectors else np.zeros((0, self.model.config.block.width))
        return table, [row.truncated for row in rows]

    def rows(self, texts: Sequence[str], settings: EmbedRun) -> list[TokenRow]:
        """Tokens of texts."""
        return self.encoder.texts(texts, settings.max_length or self.max_length)

    @torch.inference_mode()
    def _forward(self, rows: list[TokenRow], settings: EmbedRun) -> np.ndarray:
        batch = collate(rows, self.tokenizer.pad, self.device)
        pooled = self.pooled(batch, settings)
        return (F.normalize(pooled, dim=-1) if settings.normalise else pooled).cpu().numpy()

    def pooled(self, batch: TextBatch, settings: EmbedRun) -> Tensor:
        """Vectors of texts, of whatever length."""
        hidden = self.model.hidden(**batch.inputs).float()
        return POOLINGS[settings.pooling](hidden, batch.lengths)

    def similarities(
        self, pairs: Sequence[tuple[str, str]], settings: EmbedRun
    ) -> tuple[np.ndarray, list[bool]]:
        """The cosine of each pair of texts, and which pairs were truncated."""
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        at = {text: number for number, text in enumerate(texts)}
        vectors, truncated = self.vectors(texts, settings)
        vectors = vectors.astype(np.float64)
        vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        sides = [[at[pair[side]] for pair in pairs] for side in (0, 1)]
        cosines = (vectors[sides[0]] * vectors[sides[1]]).sum(1)
        either = [truncated[a] or truncated[b] for a, b in zip(*sides, strict=True)]
        self._log_truncated(either, settings)
        return cosines, either

    def answer_logprobs(self, given: str, settings: EmbedLook, expected: Any = None) -> Question:
        """A text's vector, which a change of the model moves by so much cosine distance."""
        (row,) = self.rows([given], settings)

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

    def explain(self, given: str, settings: EmbedLook) -> Picture:
        """Embed a text and return a Picture of what each layer attended to."""
        from regard.viewer.text import text_views

        rows = self.rows([given], settings)
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


class SimilarityJudge(Judge[Labelled, EmbedEval, np.ndarray]):
    """Judges the cosines of pairs of texts by the scores that people gave."""

    Settings = EmbedEval

    def read(self, runner: Runner[Any], settings: EmbedEval) -> Labelled:
        """Pairs of texts with scores."""
        reader = ScoredPairReader(settings.columns, settings.skip_bad, settings.header)
        need = (settings.part,)
        return load_labelled(
            str(settings.data), reader, test=settings.test, need=need, trained=runner.trained
        )

    def predict(
        self,
        runner: Runner[Any],
        data: Labelled,
        settings: EmbedEval,
        like: Runner[Any] | None = None,
    ) -> np.ndarray:
        """Cosine of each pair."""
        pairs = [pair.texts for pair in data[settings.part]]
        return runner.predictor.similarities(pairs, settings)[0]

    def score(
        self,
        runner: Runner[Any],
        data: Labelled,
        predictions: np.ndarray,
        settings: EmbedEval,
        systems: Sequence[System] = (),
    ) -> ScoredPredictions:
        """Correlation of the cosines with the scores."""
        targets = np.array([pair.score for pair in data[settings.part]])
        signature = f"cosine|pooling:{settings.pooling}|pairs:{len(targets)}"
        return ScoredPredictions(
            correlation_scores(predictions, targets, signature),
            len(targets),
            made_with={
                "pooling": settings.pooling,
                "max_length": settings.max_length or runner.predictor.max_length,
            },
            rows=[
                {"texts": pair.texts, "score": pair.score, "prediction": round(value, 6)}
                for pair, value in zip(data[settings.part], predictions.tolist(), strict=True)
            ],
        )


class ShiftBatch(NamedTuple):
    """Texts, and their vectors as the model is."""

    texts: TextBatch
    vectors: Tensor


class ShiftObjective(Objective[ShiftSettings, Texts]):
    """The cosine distance of each text's vector from what it was, as a loss.

    It is 0 for the model as it is, and tells what a change of what flows in it costs.
    """

    Settings = ShiftSettings
    sizes = {"tiny": {}}

    def read(self, settings: ShiftSettings, origin: Origin | None) -> Texts:
        """Texts: the lines of a running text, or the rows of a table."""
        read = load_texts(
            str(settings.data), key=settings.columns, header=settings.header, need=("train",)
        )
        texts = read["train"]
        if read.running:
            texts = [line for text in texts for line in text.splitlines()]
        return replace(read, parts={"train": [text for text in texts if text.strip()]})

    def lesson(self, runner: Runner[Any], data: Texts, settings: ShiftSettings) -> Lesson:
        """Texts with their vectors, pooled as the model does by default."""
        embedder: Embedder = runner.predictor
        pooling = settings.pooling or embedder.defaults.get("pooling", "mean")
        asked = embedder.check(replace(settings, pooling=pooling))

        @torch.no_grad()
        def make(_: Any, rows: list[TokenRow], texts: TextBatch) -> ShiftBatch:
            texts = moved(texts, embedder.device)
            return ShiftBatch(texts, embedder.pooled(texts, asked))

        def loss(batch: ShiftBatch) -> Tensor:
            now = embedder.pooled(batch.texts, asked).double()
            return (1 - F.cosine_similarity(now, batch.vectors.double(), dim=-1)).sum()

        return Lesson(
            batches=TextBatches(
                embedder.rows(data["train"], asked),
                embedder.encoder,
                make,
                tokens=settings.batch_tokens,
                seed=settings.seed,
                max_rows=settings.batch_rows,
            ),
            count=lambda batch: (len(batch.vectors), batch.texts.tokens),
            loss=loss,
            validate=lambda share: {},
        )


def load_codec(folder: Path, model: Model, config: dict[str, Any]) -> TextCodec:
    """Read the tokenizer and features of a folder, and check how vectors are made there."""
    path, name, known = folder / "config.json", config["family"], serving("embed")
    if name not in known:
        raise UsageError(
            f"{path}: a model of family {name}, which makes no vectors of texts; "
            f"expected {' or '.join(known)}"
        )
    if not isinstance(config.get("normalise", True), bool):
        raise UsageError(f"{path}: 'normalise' is not true or false")
    try:
        own = {"pooling": config["pooling"]} if "pooling" in config else {}
        check_pooling(fill(EmbedRun, own).pooling, name)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    # a model of running text never saw a begin or an end
    bare = name == "gpt" and config.get("running") is True
    return TextCodec(load_encoder(folder, model, config, bare=bare))


def _sides(text: str, number: int) -> tuple[str, str]:
    one, tab, other = text.partition("\t")
    if not tab:
        raise UsageError(
            f"text {number}: {text[:40]!r} is not a pair; write both texts with a TAB between them"
        )
    return one, other


_SHIFT = Task(
    name="embed",
    holds="texts",
    inputs=TEXT,
    unit="pairs",
    predictor=Embedder,
    judge=SimilarityJudge(),
    judged=EmbedEval,
    load_codec=load_codec,
    objective=ShiftObjective(),
)
EMBED = replace(
    _SHIFT,
    holds="pairs of texts and their scores",
    objective=None,
    learnt_by=(_SHIFT, {}),
    remedy="; import a model, or train one with: regard train language objective=masked ..., "
    "and run it with task=embed",
)
