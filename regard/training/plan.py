"""The length of a run in steps, and what follows from it: warm-up and validation interval.

A run of so many minutes is planned again every tenth of the way, by what its steps have taken.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, NamedTuple, Protocol

from regard.errors import UsageError

_WARMUP_SHARE = 0.1  # of all steps
_MAX_WARMUP = 4000
_VALIDATIONS = 12  # of a run; a long one has more:
_MAX_INTERVAL = 1000  # steps between validations
_MIN_VALIDATIONS = 4  # before each of them decodes fewer rows
MIN_DECODED = 50  # rows that a validation decodes
_VALIDATION_SHARE = 0.15  # of the time
_RESERVE = 0.03  # of the time, for the end
MIN_TRAINING_SHARE = 0.5  # of the time, however long all else takes
MIN_STEPS = 100  # in which a model may learn something
# shares of a run at which it is planned again; the first steps tell whether the measure was right
_PLANNED_AT = (0.02, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


class Duration(Protocol):
    """The settings that limit a run: steps, epochs, minutes."""

    @property
    def steps(self) -> int | None: ...
    @property
    def epochs(self) -> float | None: ...
    @property
    def minutes(self) -> float | None: ...
    @property
    def warmup(self) -> int | None: ...
    @property
    def valid_every(self) -> int | None: ...


DURATION_KEYS = ("steps", "epochs", "minutes")


class StepCost(NamedTuple):
    """Measured seconds of a step, of a checkpoint, and of a validation on the whole part."""

    step: float
    save: float = 0.0
    validation: float = 0.0
    decoded: int = 0  # rows that a validation decodes, of which fewer would do; 0: all are needed


class Budget(NamedTuple):
    """The steps and validations that fit into a time, and the share of rows these decode."""

    steps: int
    validations: int
    share: float = 1.0


@dataclass(frozen=True)
class Plan:
    """What a run will do from a step on: all that its next steps depend on beside the settings."""

    steps: int  # of the whole run
    warmup: int
    valid_every: int
    valid_share: float = 1.0
    seconds_a_step: float | None = None
    seconds_a_validation: float | None = None
    seconds: float | None = None  # for the whole run, if it is to fit into a time
    most: int | None = None  # steps, whatever fits into the time
    step: int = 0  # from which the plan holds
    position: float = 0.0  # of that step in the learning-rate schedule, which ends at `steps`
    validated: int = 0  # step from which `valid_every` counts
    notes: list[str] = field(default_factory=list, compare=False)

    def place(self, step: int) -> float:
        """Position of a step in the learning-rate schedule."""
        left = (self.steps - self.position) / (self.steps - self.step)
        return self.position + (step - self.step) * left

    def validates(self, step: int) -> bool:
        """True if the weights are validated after so many steps, the last ones apart."""
        return (step - self.validated) % self.valid_every == 0

    @property
    def next_step(self) -> int | None:
        """Step before which the run is planned again, if it is."""
        if self.seconds is None:
            return None
        for share in _PLANNED_AT:
            if (ahead := share * self.steps - self.position) > 0:
                left = (self.steps - self.step) / (self.steps - self.position)
                step = self.step + max(1, math.ceil(ahead * left))
                return step if step < self.steps else None
        return None

    def to_json(self) -> dict[str, Any]:
        """Plain values for recipe.json."""
        values = asdict(self)
        del values["notes"]
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Plan":
        """Read a plan of recipe.json, where one of before may lack some values."""
        known = {one.name for one in fields(cls)} - {"notes"}
        return cls(**{name: value for name, value in values.items() if name in known})


def default_warmup(steps: int) -> int:
    """Warm-up steps of a run for which none are given."""
    return min(_MAX_WARMUP, int(_WARMUP_SHARE * steps))


def budget(
    seconds: float, cost: StepCost, valid_every: int | None = None, *, left: float = 1.0
) -> Budget:
    """Steps that fit into the share of a time that is left, with their validations."""
    most = seconds * max(0.0, left - _RESERVE)
    each, share = cost.save + cost.validation, 1.0
    if valid_every:
        steps = max(1, int(most / (cost.step + each / valid_every)))
        return Budget(steps, -(-steps // valid_every))
    room = _VALIDATION_SHARE * seconds * left
    if cost.decoded > MIN_DECODED and _MIN_VALIDATIONS * each > room:
        share = (room / _MIN_VALIDATIONS - cost.save) / cost.validation
        share = min(1.0, max(MIN_DECODED / cost.decoded, share))
        each = cost.save + share * cost.validation
    usual = math.ceil(left * _validations(seconds / cost.step))
    count = max(1, min(usual, int(room / each) if each else usual))
    training = max(most - count * each, MIN_TRAINING_SHARE * seconds * left)
    return Budget(max(1, int(training / cost.step)), count, share)


def _validations(steps: float) -> int:
    return max(_VALIDATIONS, math.ceil(steps / _MAX_INTERVAL))


def make_plan(
    settings: Duration,
    *,
    epoch: float | None = None,
    cost: StepCost | None = None,
    seconds: float = 0.0,
) -> Plan:
    """Turn steps, epochs (of `epoch` steps) or seconds (by `cost`) into the plan to begin with."""
    limits: dict[str, int] = {}
    notes: list[str] = []
    fits = None
    if settings.steps is not None:
        limits["steps"] = settings.steps
    if settings.epochs is not None:
        assert epoch is not None
        limits["epochs"] = max(1, round(settings.epochs * epoch))
    if settings.minutes is not None:
        assert cost is not None
        fits = budget(seconds, cost, settings.valid_every)
        limits["minutes"] = fits.steps
    if not limits:
        raise UsageError("how long to train is missing; add steps=, epochs= or minutes=")
    holds = min(limits, key=lambda key: limits[key])
    steps = limits[holds]
    if len(limits) > 1:
        given = " and ".join(f"{key}={getattr(settings, key):g}" for key in limits)
        notes.append(f"{given}: what ends first holds, here {holds} ({steps:,} steps)")
    validations = fits.validations if fits else _validations(steps)
    share = fits.share if fits else 1.0
    validation = None
    if cost is not None:
        validation = cost.save + share * cost.validation
        if validations * validation > 2 * _VALIDATION_SHARE * seconds:
            notes.append(
                f"a validation takes about {validation:.0f} s, much of the {seconds:.0f} s "
                "there are; give a smaller part with valid=, or more minutes"
            )
        if share < 1:
            rows = math.ceil(share * cost.decoded)
            notes.append(f"validations decode {rows:,} of {cost.decoded:,} rows to save time")
    if holds == "minutes" and steps < MIN_STEPS:
        notes.append(too_few(steps))
    warmup = settings.warmup if settings.warmup is not None else default_warmup(steps)
    if warmup >= steps > 1:
        notes.append(
            f"warmup={warmup:,} is not over after {steps:,} steps, so the peak learning rate "
            f"is never reached; without warmup= it takes {default_warmup(steps):,} steps"
        )
    return Plan(
        steps,
        warmup,
        settings.valid_every or max(1, -(-steps // validations)),
        share,
        cost.step if cost is not None else None,
        validation,
        seconds if fits else None,
        min((limits[key] for key in limits if key != "minutes"), default=None),
        notes=notes,
    )


def plan_again(settings: Duration, last: Plan, step: int, spent: float, cost: StepCost) -> Plan:
    """Plan the rest of a run before a step, after so many seconds, by what steps have cost.

    The schedule goes on where it is and ends with the new last step; if it is ahead of the share
    of the time that was spent, it goes back to that.

    Args:
        settings: what was asked for
        last: plan that held so far
        step: first step of the new plan
        spent: seconds since the start
        cost: measured time of steps and validations
    """
    assert last.seconds is not None
    share = min(1.0, spent / last.seconds)
    fits = budget(last.seconds, cost, settings.valid_every, left=1 - share)
    steps = step + fits.steps
    if last.most is not None and last.most <= steps:
        steps = last.most
        share = step / steps
    position = min(share, last.place(step) / last.steps) * steps
    warmup = settings.warmup
    if warmup is None:
        warmup = default_warmup(steps)
    else:  # steps that the user has counted are not stretched
        position = float(step) if step < warmup else max(warmup, position)
    validated = step - (step - last.validated) % last.valid_every
    return replace(
        last,
        steps=steps,
        warmup=warmup,
        valid_every=settings.valid_every or max(1, -(-(steps - validated) // fits.validations)),
        seconds_a_step=cost.step,
        seconds_a_validation=cost.validation,
        step=step,
        position=position,
        validated=validated,
        notes=[],
    )


def too_few(steps: int) -> str:
    """Warning that a run of minutes has few steps."""
    return (
        f"warning: {steps:,} step{'s' * (steps != 1)} in these minutes are too few to learn much; "
        "give more minutes= or a smaller size="
    )
