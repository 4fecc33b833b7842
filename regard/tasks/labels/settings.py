"""Settings of tasks that give labels, whatever to, and what of a folder says which."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.data.labels import saved_labels
from regard.metrics.baselines import Baselines
from regard.models.protocols import Model
from regard.settings import setting
from regard.tasks.frame.origin import Origin
from regard.tasks.frame.settings import BootstrapSettings, TrainSettings
from regard.training.label_loss import CLASS_WEIGHTS
from regard.training.loss import loss_names


@dataclass(frozen=True)
class LabelTrainSettings(TrainSettings):
    """What a training by labels can be told; what says where inputs are is put before it."""

    family: str = setting("", "model family", group="model")
    loss: str = setting("auto", "loss: auto, or one of your own", choices=loss_names)
    label_smoothing: float = setting(0.1, "label smoothing", min=0, max=0.9)
    class_weights: str = setting("none", "class weights in the loss", choices=CLASS_WEIGHTS)
    model: Any = None  # config of the family

    def reading(self) -> Any:
        """How the inputs lie in files: the options of their modality's reader."""
        raise NotImplementedError

    def format(self, origin: Origin | None) -> Any:
        """What is known of the format of inputs before they are seen."""
        return None

    def facts(self) -> dict[str, Any]:
        """What config.json says of how the data were read."""
        return {}


@dataclass(frozen=True)
class LinearTrain:
    """What a training can be told of a linear model beside the encoder."""

    linear: bool | None = setting(
        None, "add a linear model to the encoder; true up to 20,000 rows unless given"
    )


@dataclass(frozen=True)
class NoneTrain:
    """What a training can be told of inputs that are to get no label."""

    none: float = setting(
        0.0, "share of the validation part that may be 'none of these'; 0 disables it", max=0.5
    )
    foreign: str | None = setting(None, "a folder of files that are none of these, to measure by")


@dataclass(frozen=True)
class OneLabelRun:
    """How labels are told."""

    n_best: int = setting(1, "labels to return for each, most probable first", min=1, max=100_000)
    scores: bool = setting(True, "print the probability of each label")


@dataclass(frozen=True)
class LabelEvalSettings(BootstrapSettings):
    """How labels are judged; what says where inputs are is put before it."""

    errors: int = setting(10, "errors to show", min=0, max=100_000, group="scores")

    def reading(self) -> Any:
        """How the inputs lie in files: the options of their modality's reader."""
        raise NotImplementedError


def saved_labels_and_baselines(
    folder: Path, model: Model, config: Mapping[str, Any]
) -> tuple[list[str], Baselines | None]:
    """Labels and baselines of a saved model."""
    labels = saved_labels(folder, config, model.config.labels)
    return labels, Baselines.load(folder, len(labels))
