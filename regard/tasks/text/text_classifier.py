"""Labels of texts by a trained model: running, judging and looking."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from regard.attention.watch import watch
from regard.data.label_clusters import FILE, load_clusters
from regard.data.labelled import Example
from regard.data.labels import check_single_labels
from regard.data.rows import Row, collate
from regard.decode.batching import in_batches
from regard.errors import UsageError, log
from regard.metrics.correlation import value_scores
from regard.metrics.evaluation import Evaluation
from regard.models.ensemble import members_of
from regard.models.protocols import Model
from regard.tasks.frame.answers import Classified, Valued
from regard.tasks.frame.question import Question, text_keys
from regard.tasks.frame.task import Judged, Task
from regard.tasks.text.codec import TextCodec
from regard.tasks.text.label_judge import LabelData, Predicted
from regard.tasks.text.labelling import Labeller

WHOLE_POOLS = ("mean", "max", "attention", "convolution")  # they read all tokens, not the first


def clusters_of(config: Any) -> int:
    """Return into how many clusters a model puts its labels; 0 if into none."""
    return getattr(config, "clusters", 0)


class TextClassifier(Labeller[Classified | Valued]):
    """A model that labels whole texts."""

    def __init__(self, model: nn.Module, codec: TextCodec, config: Mapping[str, Any] | None = None):
        super().__init__(model, codec, config)
        self.clusters = clusters_of(self.model.config)
        self.multilabel = self.config.get("several") is True
        self.regression = len(self.labels) == 1 and not self.multilabel
        if self.regression:
            self.Result = Evaluation
        self.truncated = 0  # texts of the training

    @classmethod
    def load_codec(cls, folder: Path, model: Model, config: dict[str, Any]) -> TextCodec:
        """Read tokenizer, features, labels and baselines of a folder."""
        codec = super().load_codec(folder, model, config)
        if not isinstance(config.get("several", False), bool):
            raise UsageError(f"{folder / 'config.json'}: 'several' is no true or false")
        count = clusters_of(model.config)
        if not count:
            return codec
        clusters = load_clusters(folder)
        if (list(chain(*clusters)), len(clusters)) != (codec.labels, count):
            raise UsageError(
                f"{folder / FILE}: its clusters are not those of 'labels' and 'clusters' in "
                "config.json; restore both as they were published"
            )
        return replace(codec, clusters=clusters)

    def check_run(self, settings: Any) -> Any:
        """Refuse more labels or clusters than there are."""
        if settings.cluster_beam and settings.cluster_beam > self.clusters:
            raise UsageError(
                f"cluster_beam={settings.cluster_beam} is more than the {self.clusters} clusters "
                "of the model"
            )
        if settings.n_best > len(self.labels):
            raise UsageError(
                f"n_best={settings.n_best} is more than the {len(self.labels)} labels of the model"
            )
        return super().check_run(settings)

    @contextmanager
    def using(self, settings: Any) -> Iterator[None]:
        """Rank the labels of as many clusters as are asked for."""
        heads = [one.head for one in members_of(self.model)] if self.clusters else []
        usual = [head.beam for head in heads]
        for head in heads:
            head.beam = settings.cluster_beam or head.beam
        try:
            with super().using(settings):
                yield
        finally:
            for head, beam in zip(heads, usual, strict=True):
                head.beam = beam

    def probabilities(self, items: Sequence[Example], settings: Any) -> Predicted:
        """Return the probability of each label of the texts."""
        probs, truncated = self.text_probabilities([item.text for item in items], settings)
        return Predicted(probs, sum(truncated))

    def text_probabilities(
        self, texts: Sequence[str], settings: Any
    ) -> tuple[np.ndarray, list[bool]]:
        """Return the probability of each label (n, labels), and which texts were truncated."""
        rows = self.encoder.texts(texts, settings.max_length or self.max_length)

        @torch.inference_mode()
        def forward(some: list[Row]) -> list[np.ndarray]:
            batch = collate(some, self.tokenizer.pad, self.device)
            logits = self.model(**batch.inputs).float()
            return list(self.objective.probs(logits).cpu().numpy())

        limits = {"tokens": settings.batch_tokens, "rows": settings.batch_rows}
        probs = in_batches(rows, [len(row.ids) for row in rows], forward, **limits)
        table = np.stack(probs) if probs else np.zeros((0, len(self.labels)), np.float32)
        return table, [row.truncated for row in rows]

    def predict(
        self, inputs: list[Any], settings: Any, *, first: int = 0
    ) -> list[Classified | Valued]:
        """Label texts, or give each a number where the model has a single output."""
        probs, truncated = self.text_probabilities(inputs, settings)
        if any(truncated):
            most = settings.max_length or self.max_length
            log(f"{sum(truncated)} of {len(inputs)} texts were cut at {most} pieces")
        pairs = list(zip(probs, truncated, strict=True))
        if self.regression:
            return [Valued(float(row[0]), cut) for row, cut in pairs]
        return [self._classified(row, settings.threshold, cut) for row, cut in pairs]

    def _classified(self, probs: np.ndarray, threshold: float, cut: bool = False) -> Classified:
        """Choose the likeliest label, or all above a threshold, the likeliest first."""
        order = np.argsort(-probs, kind="stable").tolist()
        chosen = [i for i in order if probs[i] >= threshold] if self.multilabel else order[:1]
        return Classified(self.labels, probs, chosen, self.multilabel, cut)

    def assign(self, probs: np.ndarray, settings: Any) -> np.ndarray:
        """Return a table (n, labels) of the labels that are given to each text."""
        return probs >= settings.threshold if self.multilabel else super().assign(probs, settings)

    def eval_defaults(self) -> dict[str, Any]:
        """Return how the labels of the model's own data were read."""
        own = {key: self.config.get(f"read_{key}") for key in ("labels", "separator")}
        return {key: value for key, value in own.items() if isinstance(value, str)}

    def read_test(self, settings: Any) -> LabelData:
        """Read the part that a model is judged on."""
        data = self.read_part(settings, known=not self.regression)
        if not self.regression and not self.multilabel:
            check_single_labels(data[settings.part])
        return data

    def check_against(self, other: Task[Any, Any]) -> None:
        """Refuse a model of other labels."""
        if self.regression:
            raise UsageError("against= compares labels, and this model gives numbers; leave it out")
        super().check_against(other)

    def score(self, data: Any, predictions: Predicted, settings: Any) -> Judged:
        """Return the scores of labels, or how well numbers go with those that are right."""
        if not self.regression:
            return super().score(data, predictions, settings)
        targets = np.array([example.number for example in data[settings.part]])
        return Judged(value_scores(predictions.probs[:, 0].astype(float), targets), len(targets))

    def outputs(self, data: Any, predictions: Predicted, settings: Any) -> list[dict[str, Any]]:
        """Return the prediction of each text beside its label."""
        rows = []
        for example, probs in zip(data[settings.part], predictions.probs, strict=True):
            row: dict[str, Any] = {"text": example.text, "label": ",".join(example.labels)}
            if self.regression:
                rows.append({**row, "prediction": float(probs[0])})
                continue
            answer = self._classified(probs, settings.threshold)
            rows.append({**row, "prediction": str(answer), "probability": answer.probability})
        return rows

    def made_with(self, settings: Any) -> dict[str, Any]:
        """Return the settings that a score depends on."""
        if self.regression:
            return super().made_with(settings)
        threshold = settings.threshold if self.multilabel else None
        made = {**super().made_with(settings), "threshold": threshold}
        return made | {"cluster_beam": self.model.head.beam} if self.clusters else made

    def question(self, given: str, settings: Any, expected: Any = None) -> Question:
        """Return a text with its labels and their log-probability."""
        if self.regression:
            raise UsageError("this model gives a number, which has no probability to be changed")
        (row,) = self.encoder.texts([given], settings.max_length or self.max_length)

        @torch.inference_mode()
        def logprobs(copies: int) -> Tensor:
            batch = collate([row] * copies, self.tokenizer.pad, self.device)
            logits = self.model(**batch.inputs).double()
            if self.multilabel:  # each label is given or not
                return torch.stack([-logits, logits], -1).log_softmax(-1)
            return logits.log_softmax(-1).unsqueeze(1)

        chosen = expected
        if chosen is None:
            probs = logprobs(1)[0].exp()
            given_labels = probs[:, 1] >= settings.threshold if self.multilabel else probs.argmax(1)
            chosen = given_labels.long().tolist()
        numbers = [n for n, yes in enumerate(chosen) if yes] if self.multilabel else chosen
        tokens = self.encoder.spelled(row)
        pool = getattr(self.model.config, "pool", "mean")
        return Question(
            answer=", ".join(self.labels[n] for n in numbers) or "no label",
            logprobs=logprobs,
            chosen=chosen,
            names=["no", "yes"] if self.multilabel else self.labels,
            places=self.labels if self.multilabel else ["label"],
            tokens=tokens,
            keys=text_keys(len(tokens)),
            expected=chosen,
            reads=None if pool in WHOLE_POOLS else [0],
        )

    def explain(self, given: str, settings: Any) -> Any:
        """Label a text and return a Picture of what each layer attended to."""
        from regard.viewer.picture import Picture
        from regard.viewer.text import label_candidates, text_views

        (row,) = self.encoder.texts([given], settings.max_length or self.max_length)
        batch = collate([row], self.tokenizer.pad, self.device)
        with torch.inference_mode(), watch(self.model) as maps:
            logits = self.model(**batch.inputs).float()
            probs = self.objective.probs(logits)[0].cpu().numpy()
        views = text_views(maps, self.encoder.spelled(row))
        if self.regression:
            value = str(Valued(float(probs[0])))
            return Picture(title=given, views=views, source=given, output=value, note=value)
        answer = self._classified(probs, settings.threshold)
        candidates = label_candidates(self.labels, probs, answer.chosen, settings.candidates)
        output = str(answer) or "no label"
        return Picture(title=given, views=views, source=given, output=output, **candidates)
