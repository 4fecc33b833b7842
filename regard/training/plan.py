"""The length of a run in steps, and what follows from it: warm-up and validation interval."""

import math
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from regard.errors import UsageError

WARMUP_SHARE = 0.1  # of all steps
MAX_WARMUP = 4000
VALIDATIONS = 12  # of a run; a long one has more:
MAX_INTERVAL = 1000  # steps between validations
MIN_VALIDATIONS = 4  # before each of them decodes fewer rows
MIN_DECODED = 50  # rows that a validation decodes
VALIDATION_SHARE = 0.15  # of the time
RESERVE = 0.05  # of the time, for the end
MIN_TRAINING_SHARE = 0.5  # of the time, however long all else takes


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


class Cost(NamedTuple):
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
    """What a run will do, settled before its first step."""

    steps: int
    warmup: int
    valid_every: int
    valid_share: float = 1.0
    seconds_a_step: float | None = None
    seconds_a_validation: float | None = None
    notes: list[str] = field(default_factory=list)


def default_warmup(steps: int) -> int:
    """Return the warm-up steps of a run for which none are given."""
    return min(MAX_WARMUP, int(WARMUP_SHARE * steps))


def budget(seconds: float, cost: Cost, valid_every: int | None = None) -> Budget:
    """Return how many steps fit into the time, with their validations."""
    most = seconds * (1 - RESERVE)
    each, share = cost.save + cost.validation, 1.0
    if valid_every:
        steps = max(1, int(most / (cost.step + each / valid_every)))
        return Budget(steps, -(-steps // valid_every))
    room = VALIDATION_SHARE * seconds
    if cost.decoded > MIN_DECODED and MIN_VALIDATIONS * each > room:
        share = (room / MIN_VALIDATIONS - cost.save) / cost.validation
        share = min(1.0, max(MIN_DECODED / cost.decoded, share))
        each = cost.save + share * cost.validation
    count = max(
        1, min(_validations(seconds / cost.step), int(room / each) if each else VALIDATIONS)
    )
    left = max(most - count * each, MIN_TRAINING_SHARE * seconds)
    return Budget(max(1, int(left / cost.step)), count, share)


def _validations(steps: float) -> int:
    return max(VALIDATIONS, math.ceil(steps / MAX_INTERVAL))


def make_plan(
    settings: Duration,
    *,
    epoch: float | None = None,
    cost: Cost | None = None,
    seconds: float = 0.0,
) -> Plan:
    """Turn steps, epochs (of `epoch` steps) or seconds (by `cost`) into a plan."""
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
        if validations * validation > 2 * VALIDATION_SHARE * seconds:
            notes.append(
                f"a validation takes about {validation:.0f} s, much of the {seconds:.0f} s "
                "there are; give a smaller part with valid=, or more minutes"
            )
        if share < 1:
            rows = math.ceil(share * cost.decoded)
            notes.append(f"validations decode {rows:,} of {cost.decoded:,} rows to save time")
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
        notes,
    )
