"""What of a trained model learns when it is trained on: all, its head, or low-rank additions."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from regard.errors import UsageError, lookup
from regard.layers.lora import adapt, adapters

if TYPE_CHECKING:
    from regard.tasks.frame.settings import TrainSettings

HEAD_PREFIX = "head."


class Tune(NamedTuple):
    """How much of a model learns, and how fast: the rate times the width of the model."""

    rate: float
    choose: Callable[[nn.Module, "TrainSettings", str], list[nn.Parameter]]


def _all(model: nn.Module, settings: "TrainSettings", fresh: str) -> list[nn.Parameter]:
    return list(model.parameters())


def _named(model: nn.Module, start: str) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if name.startswith(start)]


def _head(model: nn.Module, settings: "TrainSettings", fresh: str) -> list[nn.Parameter]:
    return _named(model, fresh or HEAD_PREFIX)


def _lora(model: nn.Module, settings: "TrainSettings", fresh: str) -> list[nn.Parameter]:
    """Add to the matrices; a head that is new learns as well."""
    new = _named(model, fresh) if fresh else []
    adapt(model, settings.lora_on, settings.lora_rank, settings.lora_alpha, fresh)
    return [*adapters(model), *new]


# name -> its rate times width (what is usual for BERT), and what learns
TUNES: dict[str, Tune] = {
    "all": Tune(0.04, _all),
    "head": Tune(0.4, _head),
    "lora": Tune(0.4, _lora),
}


def usual_rate(values: Mapping[str, Any], width: int) -> float:
    """Return the rate at which a trained model is trained on, unless told."""
    return lookup("tune", str(values.get("tune", "all")), TUNES).rate / width


def check_tune(settings: "TrainSettings", values: Mapping[str, Any]) -> None:
    """Refuse ways to tune that the settings give no meaning to."""
    if settings.tune != "all" and not settings.init:
        raise UsageError(
            f"tune={settings.tune} keeps most of a model as it is; name a trained one with init="
        )
    given = [key for key in values if str(key).startswith("lora_")]
    if given and settings.tune != "lora":
        raise UsageError(f"{given[0]}= does nothing with tune={settings.tune}; add tune=lora")


def let_learn(model: nn.Module, settings: "TrainSettings", fresh: str = "") -> None:
    """Let only that learn which the settings choose; weights whose names begin fresh are new."""
    learning = {id(p) for p in TUNES[settings.tune].choose(model, settings, fresh)}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in learning)
    if not learning:
        raise UsageError(
            f"tune={settings.tune} lets nothing learn: the head of this model is its table of "
            "embeddings; choose tune=lora or tune=all"
        )
