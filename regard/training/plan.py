"""How long a training is, and what follows from that: warm-up, and how often to validate."""

import math
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from regard.errors import UsageError

RISE = 0.1  # share of the steps in which the rate rises
MOST_RISE = 4000
VALIDATIONS = 12  # of a run; a long one has more:
APART = 1000  # steps between validations at most
FEWEST = 4  # validations, before each of them reads less
LEAST_ROWS = 50  # that a validation decodes
FOR_VALIDATION = 0.15  # of the time
TO_SPARE = 0.05  # of the time, for the end
FOR_TRAINING = 0.5  # of the time at least, however long all else takes


class Length(Protocol):
    """The settings that say how long a training is."""

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


LENGTHS = ("steps", "epochs", "minutes")


class Cost(NamedTuple):
    """What was measured: seconds of a step, a save and a validation of the whole part."""

    step: float
    save: float = 0.0
    validation: float = 0.0
    decoded: int = 0  # rows that a validation decodes, of which fewer would do; 0: all are needed


class Rhythm(NamedTuple):
    """How many steps fit, how often to validate among them, and on which share of the rows."""

    steps: int
    validations: int
    share: float = 1.0


@dataclass(frozen=True)
class Plan:
    """What a run will do, before its first step."""

    steps: int
    warmup: int
    valid_every: int
    valid_share: float = 1.0
    seconds_a_step: float | None = None
    seconds_a_validation: float | None = None
    notes: list[str] = field(default_factory=list)


def usual_warmup(steps: int) -> int:
    """Return in how many steps the rate rises: a tenth of all, but not more than help."""
    return min(MOST_RISE, int(RISE * steps))


def fitting(seconds: float, cost: Cost, valid_every: int | None = None) -> Rhythm:
    """Return how many steps fit into the time, with their validations."""
    most = seconds * (1 - TO_SPARE)
    each, share = cost.save + cost.validation, 1.0
    if valid_every:
        steps = max(1, int(most / (cost.step + each / valid_every)))
        return Rhythm(steps, -(-steps // valid_every))
    room = FOR_VALIDATION * seconds
    if cost.decoded > LEAST_ROWS and FEWEST * each > room:
        wanted = (room / FEWEST - cost.save) / cost.validation
        share = min(1.0, max(LEAST_ROWS / cost.decoded, wanted))
        each = cost.save + share * cost.validation
    count = max(1, min(_wished(seconds / cost.step), int(room / each) if each else VALIDATIONS))
    left = max(most - count * each, FOR_TRAINING * seconds)
    return Rhythm(max(1, int(left / cost.step)), count, share)


def _wished(steps: float) -> int:
    return max(VALIDATIONS, math.ceil(steps / APART))


def settle(
    settings: Length,
    *,
    epoch: float | None = None,
    cost: Cost | None = None,
    seconds: float = 0.0,
) -> Plan:
    """Turn steps, epochs (of so many steps) or seconds into steps, and say what follows."""
    limits: dict[str, int] = {}
    notes: list[str] = []
    rhythm = None
    if settings.steps is not None:
        limits["steps"] = settings.steps
    if settings.epochs is not None:
        assert epoch is not None
        limits["epochs"] = max(1, round(settings.epochs * epoch))
    if settings.minutes is not None:
        assert cost is not None
        rhythm = fitting(seconds, cost, settings.valid_every)
        limits["minutes"] = rhythm.steps
    if not limits:
        raise UsageError("how long to train is missing; add steps=, epochs= or minutes=")
    holds = min(limits, key=lambda key: limits[key])
    steps = limits[holds]
    if len(limits) > 1:
        given = " and ".join(f"{key}={getattr(settings, key):g}" for key in limits)
        notes.append(f"{given}: what ends first holds, here {holds} ({steps:,} steps)")
    validations = rhythm.validations if rhythm else _wished(steps)
    share = rhythm.share if rhythm else 1.0
    told = None
    if cost is not None:
        told = cost.save + share * cost.validation
        if validations * told > 2 * FOR_VALIDATION * seconds:
            notes.append(
                f"a validation takes about {told:.0f} s, much of the {seconds:.0f} s there are; "
                "give a smaller part with valid=, or more minutes"
            )
        if share < 1:
            rows = math.ceil(share * cost.decoded)
            notes.append(f"validations decode {rows:,} of {cost.decoded:,} rows to save time")
    warmup = settings.warmup if settings.warmup is not None else usual_warmup(steps)
    if warmup >= steps > 1:
        notes.append(
            f"warmup={warmup:,} is not over after {steps:,} steps, so the highest rate is never "
            f"reached; without warmup= it takes {usual_warmup(steps):,} steps"
        )
    return Plan(
        steps,
        warmup,
        settings.valid_every or max(1, -(-steps // validations)),
        share,
        cost.step if cost is not None else None,
        told,
        notes,
    )
