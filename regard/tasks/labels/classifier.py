"""One classifier for all modalities: probabilities of labels, and inputs that are none of these."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from regard.data.parts import Dataset
from regard.decode.batching import in_batches
from regard.errors import UsageError, log
from regard.files import read_json, write_json
from regard.files.hashes import seal, unseal
from regard.metrics.baselines import Baselines
from regard.metrics.outliers import Outliers
from regard.modalities.base import Modality, NoneOfThese, One
from regard.tasks.frame.answers import Classified, Unread, Valued
from regard.tasks.frame.question import Question
from regard.tasks.frame.settings import Asked, RunSettings
from regard.tasks.labels.decision import Decision, threshold_of
from regard.tasks.parts import Codec, Configured, Predictor, V
from regard.viewer.picture import Picture
from regard.viewer.settings import LookSettings

_NONE_EXAMPLES = 3000  # of a part, that distances are measured on
_FOREIGN = 200  # files of a folder that are none of these, at most
_PART = 512  # examples of a part that are in memory at once

Parts = Mapping[str, Any] | Dataset[Any]


class LabelCodec(Codec, Protocol):
    """What lies beside a classifier: labels, and the format in which a modality brings inputs."""

    @property
    def modality(self) -> Modality[Any]: ...
    @property
    def format(self) -> Any: ...
    @property
    def labels(self) -> list[str]: ...
    @property
    def baselines(self) -> Baselines | None: ...
    @property
    def outliers(self) -> Outliers | None: ...
    @property
    def decision(self) -> Decision: ...


class Classifier(Predictor[Classified]):
    """Gives each input the most probable of its labels, whatever an input is.

    Args:
        model: the model.
        codec: labels, and the format of inputs.
        config: what its config.json says.
        plain: settings of a run without options.
    """

    codec: LabelCodec

    def __init__(
        self, model: nn.Module, codec: LabelCodec, config: Mapping[str, Any], plain: RunSettings
    ):
        super().__init__(model, codec, config)
        self.modality, self.labels, self.plain = codec.modality, codec.labels, plain
        self.defaults = {}  # nothing is decoded

    def check(self, settings: V) -> V:
        """Refuse more labels than there are, and formats that the model does not read."""
        n_best = getattr(settings, "n_best", 1)
        if n_best > len(self.labels):
            raise UsageError(
                f"n_best={n_best} is more than the {len(self.labels)} labels of the model"
            )
        self.format_for(settings)
        return settings

    def format_for(self, settings: Asked) -> Any:
        """Format in which inputs are read by such settings."""
        return self.modality.format_for(self.codec.format, settings)

    def predict(self, inputs: list[Any], settings: RunSettings, *, first: int = 0) -> list[Any]:
        """Label inputs; one that cannot be read is told of where such are passed over."""
        broken, most = getattr(settings, "broken", "refuse"), getattr(settings, "batch", _PART)
        groups = self.modality.groups(inputs, self.format_for(settings), broken, most)
        return answer_groups(groups, self.modality, lambda raws, lines: self.label(raws, settings))

    def label(self, raws: Sequence[Any], settings: Asked) -> list[Any]:
        """Labels of inputs that were read."""
        return self.classified(self.probabilities(raws, settings), raws, settings)

    def classified(self, probs: np.ndarray, raws: Sequence[Any], settings: Asked) -> list[Any]:
        """Answers by probabilities (n, labels) of inputs that were read."""
        answer, threshold = self.codec.decision.answer, threshold_of(settings)
        answers = []
        for row, raw, far in zip(probs, raws, self.are_none(probs, raws).tolist(), strict=True):
            about = {"none": True} if far else {}
            if getattr(raw, "truncated", False):
                about["cut"] = True
            answers.append(answer(self.labels, row, threshold, **about))
        return answers

    def logits(self, raws: Sequence[Any], settings: Asked) -> Tensor:
        """Logits (n, labels) of inputs that were read, by one pass; a linear part is added."""
        inputs = self.modality.collate(raws, self.codec.format, self.device)
        named = isinstance(inputs, Mapping)
        logits = self.model(**inputs) if named else self.model(*inputs)
        beside, valid = self.codec.baselines, of_valid(settings)
        if beside is None:
            return logits
        return beside.added(logits, lambda: self.modality.features(raws, self.codec.format), valid)

    @torch.inference_mode()
    def probabilities(self, raws: Sequence[Any], settings: Asked) -> np.ndarray:
        """Probability of each label (n, labels) of inputs that were read."""
        probs_of, format = self.codec.decision.loss.probs, self.codec.format

        def forward(some: list[Any]) -> list[np.ndarray]:
            return list(probs_of(self.logits(some, settings).float()).cpu().numpy())

        lengths = [self.modality.length(raw, format) for raw in raws]
        probs = in_batches(raws, lengths, forward, **self.modality.limits(settings, format))
        return np.stack(probs) if probs else np.zeros((0, len(self.labels)), np.float32)

    def raws_of(self, part: Any, settings: Asked) -> Iterator[Sequence[Any]]:
        """Inputs of a part as they are read, some at a time; texts at once, batched by length."""
        format, count = self.format_for(settings), len(part)
        if self.modality.in_rows:
            yield self.modality.raws(part, format)
            return
        for start in range(0, count, _PART):
            some = part.pick(np.arange(start, min(count, start + _PART)))
            yield self.modality.raws(some, format)

    def part_probabilities(self, part: Any, settings: Asked) -> np.ndarray:
        """Probability of each label for each example of a part."""
        groups = self.raws_of(part, settings)
        return np.concatenate([self.probabilities(raws, settings) for raws in groups])

    # Looking

    @property
    def caveat(self) -> str:
        """Why attention has no part in an answer, where a linear model alone gives it."""
        return self.codec.baselines.caveat if self.codec.baselines else ""

    def answer_logprobs(self, given: One, settings: LookSettings, expected: Any = None) -> Question:
        """An input with its label and the log-probability of that."""
        decision, format = self.codec.decision, self.format_for(settings)
        raw = self.modality.read(given, format)

        @torch.inference_mode()
        def logprobs(copies: int) -> Tensor:
            return decision.logprobs(self.logits([raw] * copies, settings))

        steps = decision.steps(self.labels, logprobs(1)[0], threshold_of(settings), expected)
        tokens = self.modality.tokens(self.model, raw, format)
        steps |= {"expected": steps["chosen"], "caveat": self.caveat}
        return Question(logprobs=logprobs, **steps, **tokens._asdict())

    def explain(self, given: One, settings: LookSettings) -> Picture:
        """Watch the model while it labels an input, and gather where it looked."""

        def describe(raws: Any) -> dict[str, Any]:
            run = replace(self.plain, **{k: getattr(settings, k) for k in self._shared(settings)})
            probs = self.probabilities(raws, run)
            (answer,) = self.classified(probs, raws, run)
            told = described(answer, probs[0], settings.candidates)
            return {**told, "note": "; ".join(filter(None, (told["note"], self.caveat)))}

        format = self.format_for(settings)
        return self.modality.picture(self.model, given, format, settings, describe)

    def _shared(self, settings: LookSettings) -> set[str]:
        """Settings of a run that look has, too, but for how many are answered at once."""
        own = {each.name for each in fields(self.plain)} - {"batch", "batch_seconds"}
        return own & {each.name for each in fields(settings)}

    # None of these

    def outlier_vectors(self, raws: Sequence[Any]) -> np.ndarray:
        """Numbers (n, w) by which the distance of inputs is measured."""
        assert isinstance(self.modality, NoneOfThese)
        return self.modality.outlier_vectors(self.model, raws, self.codec.format)

    def are_none(self, probs: np.ndarray, raws: Sequence[Any]) -> np.ndarray:
        """For each input, with its probabilities, whether it is none of these."""
        if self.codec.outliers is None:
            return np.zeros(len(probs), dtype=bool)
        return self.codec.outliers.are_far(self.outlier_vectors(raws), probs.argmax(1))

    def none_in(self, part: Any, probs: np.ndarray) -> np.ndarray:
        """For each example of a part whether it is none of these."""
        place, found = 0, []
        for raws in self.raws_of(part, self.plain):
            found.append(self.are_none(probs[place : place + len(raws)], raws))
            place += len(raws)
        return np.concatenate(found)

    def strangers(self, raws: Sequence[Any], seed: int = 0) -> dict[str, Sequence[Any]]:
        """Inputs like these in size that are none of what was learnt, by their kind."""
        assert isinstance(self.modality, NoneOfThese)
        return self.modality.strangers(raws, self.codec.format, np.random.default_rng(seed))

    def read_foreign(self, folder: str) -> list[Any]:
        """Files of a folder that are none of what was learnt, as they are read."""
        if not (files := sorted(self.modality.files_in(folder))[:_FOREIGN]):
            ends = ", ".join(sorted(self.modality.suffixes))
            raise UsageError(f"{folder}: no files that end in {ends}")
        return [self.modality.decode(file, self.codec.format) for file in files]

    def measure_none(self, parts: Parts, share: float, foreign: str | None) -> Outliers:
        """Distance from which on inputs are none of these; see Outliers."""

        def some(part: Any) -> Any:
            rows = np.unique(np.linspace(0, len(part) - 1, _NONE_EXAMPLES).astype(np.int64))
            return part.pick(rows)

        def placed(raws: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
            return self.outlier_vectors(raws), self.probabilities(raws, self.plain).argmax(1)

        train, format = some(parts["train"]), self.codec.format
        valid = self.modality.raws(some(parts["valid"]), format)
        known = self.outlier_vectors(self.modality.raws(train, format))
        others = self.strangers(valid)
        if foreign is not None:
            others["foreign files"] = self.read_foreign(foreign)
        return Outliers.measure(
            (known, np.asarray(train.labels)),
            placed(valid),
            {name: placed(raws) for name, raws in others.items()},
            len(self.labels),
            share,
        )

    def note_none(
        self,
        folder: Path,
        parts: Mapping[str, Any] | Dataset[Any],
        share: float,
        foreign: str | None,
    ) -> Outliers:
        """Measure what is none of these, and write it into the folder of the model."""
        found = self.measure_none(parts, share, foreign)
        unseal(folder)
        found.save(folder)
        config = read_json(folder / "config.json")
        write_json(folder / "config.json", {**config, "none": found.facts()})
        seal(folder)
        told = ", ".join(f"{name} {value:g}%" for name, value in found.measured["labelled"].items())
        log(
            f"none of these: {100 * share:g}% of the validation part; labelled all the same: {told}"
        )
        return found


def described(answer: Any, probs: np.ndarray, candidates: int) -> dict[str, Any]:
    """Fields of a picture that tell an answer and the likeliest labels (labels,)."""
    from regard.viewer.text import label_candidates

    if isinstance(answer, Valued):
        return {"output": str(answer), "note": str(answer)}
    shown = label_candidates(answer.labels, probs, answer.chosen, candidates)
    return {"output": str(answer) or "no label", **shown}


def of_valid(settings: Any) -> bool:
    """Whether it is the validation part that is judged."""
    return getattr(settings, "part", "") == "valid"


def classifier(
    plain: RunSettings, look: type = LookSettings, kind: type[Classifier] = Classifier
) -> Configured[Classified]:
    """The classifier of a task whose runs, without options, have such settings."""
    return Configured(partial(kind, plain=plain), type(plain), look)


def noted(answers: list[Any], notes: Sequence[Sequence[str]], modality: Modality[Any]) -> list[Any]:
    """Answers with what was done to their inputs, after a line of how many these are."""
    prepared = [told for told in notes if told]
    if prepared:
        many = f"{len(prepared):,} of {len(notes):,} {modality.many}"
        what = many if len(notes) > 1 else f"the {modality.one}"
        like = f"prepared as the training {modality.many} were"
        log(f"{what} {like}: {'; '.join(prepared[0])}")
    return [
        replace(one, notes=tuple(told)) if told and hasattr(one, "notes") else one
        for one, told in zip(answers, notes, strict=True)
    ]


def answer_groups(
    groups: Iterator[tuple[list[Any], list[list[str]]]],
    modality: Modality[Any],
    answer: Callable[[list[Any], list[int]], Sequence[Any]],
    first: int = 0,
) -> list[Any]:
    """Answers to inputs that are read some at a time; one that cannot be read is told of.

    `answer` is given inputs that were read, and their numbers from the first on.
    """
    answers: list[Any] = []
    for group, notes in groups:
        numbered = enumerate(group, first + len(answers))
        good = [(line, raw) for line, raw in numbered if not isinstance(raw, str)]
        rows = iter(answer([raw for _, raw in good], [line for line, _ in good]) if good else [])
        some = [Unread(raw) if isinstance(raw, str) else next(rows) for raw in group]
        answers += noted(some, notes, modality)
    return answers
