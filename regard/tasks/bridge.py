"""Tasks that are still one class, seen as rows of parts; goes when the last is converted."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from regard.tasks.frame.origin import Origin
from regard.tasks.frame.task import Task as OneClass
from regard.tasks.parts import Lesson, Objective


class ClassObjective(Objective):
    """The training of a task that is one class."""

    def __init__(self, kind: type[OneClass[Any, Any]]):
        self.kind = kind

    def read(self, settings: Any, origin: Origin | None) -> Any:
        """Parts to train and to validate on."""
        return self.kind.read(settings, origin)

    def suit(self, settings: Any, values: Mapping[str, Any], data: Any) -> Any:
        """Settings whose defaults follow the data where the user gave none."""
        return self.kind.defaults_for_data(settings, values, data)

    def codec(self, data: Any, settings: Any, learnt: Any, origin: Origin | None) -> Any:
        """What lies beside the weights."""
        return self.kind.make_codec(data, settings, learnt, origin)

    def model(self, data: Any, codec: Any, settings: Any, origin: Origin | None) -> Any:
        """Family and model."""
        return self.kind.make_model(data, codec, settings, origin)

    def lesson(self, runner: Any, data: Any, settings: Any) -> Lesson:
        """Batches and loss."""
        batches = runner.batches(data, settings)
        return Lesson(
            batches=batches,
            count=runner.count,
            loss=lambda batch: runner.loss(batch, settings),
            validate=lambda share: runner.validate(data, settings, share),
            title=runner.title(data, settings),
            facts=runner.facts(data, settings),
            baselines=lambda: runner.baselines(data, settings),
            decoded=runner.decodes(data, settings),
            lr_scales=runner.lr_scales(settings),
            published=runner.published(),
            publish=runner.publish,
            generation=runner.generation,
            runs_as=runner.runs_as(settings),
            finish=lambda folder: runner.finish(folder, data, settings),
            dynamic=runner.dynamic,
        )


def row_of(runner: Any) -> Any:
    """The task of a runner as a row, or of a task that is one class."""
    return as_row(type(runner)) if isinstance(runner, OneClass) else runner.task


def predictor_of(runner: Any) -> Any:
    """What answers with a model: the predictor of a runner, or a task that is one class."""
    return getattr(runner, "predictor", runner)


def as_row(kind: Any) -> Any:
    """A task as a row: itself, or one class seen as such."""
    if not isinstance(kind, type):
        return kind
    return SimpleNamespace(
        name=kind.name,
        origin_of=kind.origin_of,
        resolve=kind.resolve,
        learning=ClassObjective(kind),
        bind=kind,
        Train=kind.Train,
        short=kind.short,
        inputs=SimpleNamespace(columns_of=lambda settings: kind.columns_of(kind, settings)),
    )
