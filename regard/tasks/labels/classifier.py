"""One classifier for all modalities: probabilities of labels, and inputs that are none of these."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from regard.errors import UsageError, log
from regard.files import read_json, write_json
from regard.files.hashes import seal, unseal
from regard.metrics.baselines import Baselines
from regard.metrics.outliers import Outliers
from regard.modalities.base import Modality
from regard.tasks.frame.answers import Classified, Unread, Valued
from regard.tasks.frame.question import Question
from regard.tasks.labels.decision import Decision
from regard.tasks.parts import Codec, Configured, Predictor
from regard.viewer.picture import Picture
from regard.viewer.settings import LookSettings

STRANGERS = 300  # of each kind that is made
_NONE_EXAMPLES = 3000  # of a part, that distances are measured on
GROUP = 512  # examples of a part that are in memory at once

Raw = TypeVar("Raw")


class JudgedUnits(NamedTuple):
    """What of a part is judged."""

    show: Callable[[int], tuple[str, str]]  # where unit i is, and what it is
    groups: np.ndarray | None = None  # (n,): the sentence of each word; these are resampled whole
    notes: Sequence[str] = ()


class LabelCodec(Codec, Protocol[Raw]):
    """What brings the inputs of a modality to a classifier, and knows its labels."""

    modality: Modality[Raw]
    labels: list[str]
    baselines: Baselines | None
    outliers: Outliers | None
    decision: Decision

    def targets(self, part: Any) -> np.ndarray:
        """Table (n, labels) of the labels of a part."""
        ...

    def about(self, raw: Raw) -> dict[str, Any]:
        """Fields of an answer that say what became of its input."""
        ...

    def judged(self, part: Any) -> JudgedUnits:
        """What of a part is judged: names of units, and which are resampled together."""
        ...

    def records(self, part: Any, probs: np.ndarray, settings: Any) -> list[dict[str, Any]]:
        """Each example of a part with its label and what was predicted."""
        ...

    def read(self, given: Any, settings: Any) -> Raw:
        """One input as it is read."""
        ...

    def check(self, settings: Any, model: Any) -> None:
        """Refuse settings of a run that do not fit the model."""
        ...

    def in_parts(self, part: Any, size: int) -> Iterator[Any]:
        """Examples of a part, so many at a time."""
        ...

    def groups(
        self, inputs: Sequence[Any], settings: Any
    ) -> Iterator[tuple[list[Raw | str], list[list[str]]]]:
        """Inputs as they are read, some at a time: each, or what is wrong with it; and notes."""
        ...

    def raws(self, part: Any, settings: Any) -> Sequence[Raw]:
        """Examples of a part as they are read."""
        ...

    def logits(self, model: Any, raws: Sequence[Raw], settings: Any) -> Tensor:
        """Logits (n, labels) of inputs that were read, by one pass."""
        ...

    def probabilities(self, model: Any, raws: Sequence[Raw], settings: Any) -> np.ndarray:
        """Probability of each label (n, labels) of inputs that were read."""
        ...

    def tokens(self, model: Any, raw: Raw) -> dict[str, Any]:
        """Tokens, keys and grid of a Question about an input."""
        ...

    def picture(self, model: Any, given: Any, settings: Any, describe: Any) -> Picture:
        """Where a model looks while it answers an input; `describe` answers one that was read."""
        ...

    def baseline_vectors(self, part: Any) -> np.ndarray:
        """Examples of a part as vectors, as the nearest-mean baseline reads them."""
        ...


class NoneOfThese(Protocol[Raw]):
    """What a codec can do beside, whose inputs may be none of what was learnt."""

    def outlier_vectors(self, model: Any, raws: Sequence[Raw]) -> np.ndarray:
        """Numbers (n, w) by which the distance of inputs is measured."""
        ...

    def strangers(self, raws: Sequence[Raw], rng: np.random.Generator) -> dict[str, Any]:
        """Inputs like these in size that are none of what was learnt, by their kind."""
        ...

    def read_foreign(self, folder: str) -> Sequence[Raw]:
        """Files of a folder that are none of what was learnt."""
        ...


class Classifier(Predictor[Classified]):
    """Gives each input the most probable of its labels, whatever an input is.

    Args:
        model: the model.
        codec: a LabelCodec, which brings inputs to it.
        config: what its config.json says.
        plain: settings of a run without options.
    """

    codec: Any

    def __init__(self, model: nn.Module, codec: Any, config: Mapping[str, Any], plain: Any):
        super().__init__(model, codec, config)
        self.defaults = {}  # nothing is decoded
        self.labels: list[str] = codec.labels
        self.plain = plain

    def check(self, settings: Any) -> Any:
        """Refuse more labels than there are."""
        if getattr(settings, "n_best", 1) > len(self.labels):
            raise UsageError(
                f"n_best={settings.n_best} is more than the {len(self.labels)} labels of the model"
            )
        self.codec.check(settings, self.model)
        return settings

    def predict(self, inputs: list[Any], settings: Any, *, first: int = 0) -> list[Any]:
        """Label inputs; one that cannot be read is told of where such are passed over."""
        return answer_groups(
            self.codec, inputs, settings, lambda raws, lines: self.label(raws, settings)
        )

    def label(self, raws: Sequence[Any], settings: Any) -> list[Classified]:
        """Labels of inputs that were read."""
        return self.classified(self.codec.probabilities(self.model, raws, settings), raws, settings)

    def classified(self, probs: np.ndarray, raws: Any, settings: Any) -> list[Classified]:
        """Answers by probabilities (n, labels) of inputs that were read."""
        codec, none = self.codec, self.are_none(probs, raws).tolist()
        return [
            codec.decision.answer(
                self.labels, row, settings, **codec.about(raw), **({"none": True} if far else {})
            )
            for row, raw, far in zip(probs, raws, none, strict=True)
        ]

    def part_probabilities(self, part: Any, settings: Any) -> np.ndarray:
        """Probability of each label for each example of a part."""
        codec = self.codec
        groups = [codec.raws(some, settings) for some in codec.in_parts(part, GROUP)]
        return np.concatenate([codec.probabilities(self.model, raws, settings) for raws in groups])

    # Looking

    def answer_logprobs(self, given: Any, settings: Any, expected: Any = None) -> Question:
        """An input with its label and the log-probability of that."""
        codec, decision = self.codec, self.codec.decision
        raw = codec.read(given, settings)

        @torch.inference_mode()
        def logprobs(copies: int) -> Tensor:
            return decision.logprobs(codec.logits(self.model, [raw] * copies, settings))

        chosen = expected
        if chosen is None:
            chosen = decision.question(self.labels, logprobs(1)[0].exp(), settings)
        return Question(
            logprobs=logprobs,
            chosen=list(chosen),
            expected=list(chosen),
            **decision.named(self.labels, chosen),
            **codec.tokens(self.model, raw),
        )

    def explain(self, given: Any, settings: Any) -> Picture:
        """Watch the model while it labels an input, and gather where it looked."""

        def describe(raws: Any) -> dict[str, Any]:
            run = replace(self.plain, **{k: getattr(settings, k) for k in self._shared(settings)})
            probs = self.codec.probabilities(self.model, raws, run)
            (answer,) = self.classified(probs, raws, run)
            return described(answer, probs[0], settings.candidates)

        return self.codec.picture(self.model, given, settings, describe)

    def _shared(self, settings: Any) -> set[str]:
        """Settings of a run that look has, too, but for how many are answered at once."""
        own = {each.name for each in fields(self.plain)} - {"batch", "batch_seconds"}
        return own & {each.name for each in fields(settings)}

    # None of these

    def are_none(self, probs: np.ndarray, raws: Any) -> np.ndarray:
        """For each input, with its probabilities, whether it is none of these."""
        if self.codec.outliers is None:
            return np.zeros(len(probs), dtype=bool)
        vectors = self.codec.outlier_vectors(self.model, raws)
        return self.codec.outliers.are_far(vectors, probs.argmax(1))

    def none_in(self, part: Any, probs: np.ndarray) -> np.ndarray:
        """For each example of a part whether it is none of these."""
        codec, place, found = self.codec, 0, []
        for some in codec.in_parts(part, GROUP):
            raws = codec.raws(some, self.plain)
            found.append(self.are_none(probs[place : place + len(raws)], raws))
            place += len(raws)
        return np.concatenate(found)

    def measure_none(self, parts: Any, share: float, foreign: str | None) -> Outliers:
        """Distance from which on inputs are none of these; see Outliers."""
        codec, model = self.codec, self.model

        def some(part: Any) -> Any:
            rows = np.unique(np.linspace(0, len(part) - 1, _NONE_EXAMPLES).astype(np.int64))
            return part.pick(rows)

        def placed(raws: Any) -> tuple[np.ndarray, np.ndarray]:
            probs = codec.probabilities(model, raws, self.plain)
            return codec.outlier_vectors(model, raws), probs.argmax(1)

        train, valid = some(parts["train"]), codec.raws(some(parts["valid"]), self.plain)
        others = codec.strangers(valid, np.random.default_rng(0))
        if foreign is not None:
            others["foreign files"] = codec.read_foreign(foreign)
        return Outliers.measure(
            (codec.outlier_vectors(model, codec.raws(train, self.plain)), np.asarray(train.labels)),
            placed(valid),
            {name: placed(raws) for name, raws in others.items()},
            len(self.labels),
            share,
        )

    def note_none(self, folder: Path, parts: Any, share: float, foreign: str | None) -> Outliers:
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


def classifier(plain: Any, look: type = LookSettings) -> Configured[Classified]:
    """The classifier of a task whose runs, without options, have such settings."""
    return Configured(partial(Classifier, plain=plain), type(plain), look)


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
    codec: Any,
    inputs: Sequence[Any],
    settings: Any,
    answer: Callable[[list[Any], list[int]], Sequence[Any]],
    first: int = 0,
) -> list[Any]:
    """Answers to inputs, some at a time; one that cannot be read is told of.

    Args:
        codec: reads inputs by its `groups`.
        inputs: the inputs.
        settings: those of the run.
        answer: answers inputs that were read, of these numbers.
        first: number of the first input.
    """
    answers: list[Any] = []
    for group, notes in codec.groups(inputs, settings):
        numbered = enumerate(group, first + len(answers))
        good = [(line, raw) for line, raw in numbered if not isinstance(raw, str)]
        rows = iter(answer([raw for _, raw in good], [line for line, _ in good]) if good else [])
        some = [Unread(raw) if isinstance(raw, str) else next(rows) for raw in group]
        answers += noted(some, notes, codec.modality)
    return answers


def in_groups(
    read: Callable[[Any, list[str]], Any],
    inputs: Sequence[Any],
    limit: float,
    weight: Callable[[Any], float] = lambda raw: 1,
) -> Iterator[tuple[list[Any], list[list[str]]]]:
    """Read inputs, as many at once as weigh no more than a limit allows for."""
    group: list[Any] = []
    notes: list[list[str]] = []
    total = 0.0
    for given in inputs:
        notes.append([])
        group.append(read(given, notes[-1]))
        total += weight(group[-1])
        if total >= limit:
            yield group, notes
            group, notes, total = [], [], 0.0
    if group:
        yield group, notes
