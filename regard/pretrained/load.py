"""Public checkpoints: their weights and configs to ours, and back."""

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor

from regard.attention.positions import ALIASES
from regard.errors import UsageError, lookup
from regard.models import family
from regard.models.folder import hollow
from regard.pretrained.tables import CHANGES, FORMATS, Format, Key, Rule
from regard.settings import fill
from regard.weights import float_state

# What a model is does not depend on these.
FREE = re.compile(r"start|drop_path|.*dropout")
# A setting that a format has no word for is as bad as so many that it has otherwise.
REFUSAL = 3
# family -> what makes a model whose parts public formats have
INSTEAD = {"vit": "like=vit", "bert": "like=bert", "gpt": "like=gpt2"}


def find_format(model_type: Any) -> Format:
    """Return the format of a model_type."""
    if not isinstance(model_type, str):
        raise UsageError(
            f"model_type={model_type!r} names no model; choose from {', '.join(sorted(FORMATS))}"
        )
    module = import_module(lookup("model_type", model_type, FORMATS))
    return module.FORMATS[model_type]


# ---- configs


def read_keys(
    cls: type,
    theirs: Mapping[str, Any],
    keys: Iterable[Key],
    parts: Mapping[str, Any],
    fixed: Mapping[str, Any],
) -> Any:
    """Make our config from theirs: settings by their keys, and the parts that all of them have.

    What is `fixed` in a format may not be otherwise in the file.
    """
    for key, value in fixed.items():
        if theirs.get(key, value) != value:
            raise UsageError(f"{key}={shortened(theirs[key])} is not supported; only {value} is")
    values, short = dict(parts), {}
    for key in keys:
        value = theirs.get(key.theirs, key.default)
        values[key.theirs] = key.names.get(value, value) if isinstance(value, Hashable) else value
        short[key.theirs] = key.ours
    return fill(cls, values, short=short)


def write_keys(config: Any, keys: Iterable[Key], fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Return their words for our config."""
    theirs = dict(fixed)
    for key in keys:
        value = config
        for name in key.ours.split("."):
            value = getattr(value, name)
        back = {ours: name for name, ours in reversed(list(key.names.items()))}
        theirs[key.theirs] = back.get(value, value)
    return theirs


def shortened(value: Any) -> str:
    """Write a value in few letters."""
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def unlike(ours: Any, again: Any) -> list[str]:
    """Name the settings in which a config differs from what came back from a format."""

    def settings(config: Any) -> dict[str, Any]:
        values = asdict(config)
        if isinstance(block := values.pop("block", None), dict):
            block["kv_heads"] = block["kv_heads"] or block["heads"]
            block["head_width"] = block["head_width"] or block["width"] // block["heads"]
            values |= {f"block.{key}": value for key, value in block.items()}
        if "position" in values:
            values["position"] = ALIASES.get(values["position"], values["position"])
        return values

    one, other = settings(ours), settings(again)
    return [key for key in one if one[key] != other[key] and not FREE.fullmatch(key)]


def fitting(name: str, config: Any, task: str) -> tuple[Format, dict[str, Any]]:
    """Return a format that can hold one of our models, and the config.json to write for it."""
    nearest: list[tuple[int, str]] = []
    for model_type in FORMATS:
        format = find_format(model_type)
        if format.family != name or not _serves(format, task):
            continue
        try:
            settled = format.settle(config)
            theirs = format.write_config(settled, task)
            named = architecture(format, task, settled)
            differing = unlike(settled, format.read_config(theirs, named))
            if not differing:
                return format, theirs
            values = ", ".join(_setting(config, key) for key in differing)
            nearest.append((len(differing), f"{model_type}, but for {values}"))
        except UsageError as mistake:
            nearest.append((REFUSAL, f"{model_type}, but for {mistake}"))
    if not nearest:
        raise UsageError(f"no public format holds a {name} for {task}; export another model")
    remedy = f"; one trained with {INSTEAD[name]} alone can be exported" if name in INSTEAD else ""
    raise UsageError(f"no public format holds this {name}; nearest is {min(nearest)[1]}{remedy}")


def _setting(config: Any, key: str) -> str:
    value = config
    for part in key.split("."):
        value = getattr(value, part, None)
    return f"{key}={shortened(value)}"


def _named(format: Format, task: str) -> bool:
    """Tell whether one of a format's classes is for a task."""
    return task in format.architectures.values()


def _serves(format: Format, task: str) -> bool:
    """Tell whether a format has a class for a task; to translate is to answer texts with texts."""
    return _named(format, task) or (task == "translate" and _named(format, "text"))


def architecture(format: Format, task: str | None = None, config: Any = None) -> str:
    """Return the name of their class for a task and, if it is given, our config; or the usual."""
    for theirs, ours in format.architectures.items():
        if config is not None and not format.holds(config, theirs):
            continue
        if task is None or ours == task or not _named(format, task) and _serves(format, task):
            return theirs
    raise UsageError(f"{format.model_type} has no model for {task}")


# ---- weights


def to_ours(
    format: Format, config: Any, theirs: Mapping[str, Tensor], named: str | None = None
) -> dict[str, Tensor]:
    """Return the weights of our model from theirs, which are those of an architecture."""
    known = compare(format, config, {name: tuple(x.shape) for name, x in theirs.items()}, named)
    return convert(format, config, theirs, known, named)


def to_theirs(
    format: Format, config: Any, ours: Mapping[str, Tensor], named: str | None = None
) -> dict[str, Tensor]:
    """Return their weights for those of our model."""
    theirs: dict[str, Tensor] = {}
    shared: dict[str, list[Tensor | None]] = {}  # of which ours are parts
    for rule, tensor in _ruled(format, config, ours, named):
        number, whole = rule.part
        if whole > 1:
            shared.setdefault(rule.theirs[0], [None] * whole)[number] = tensor
            continue
        count = len(rule.theirs)
        parts = tensor.split(rule.rows or len(tensor) // count) if count > 1 else [tensor]
        for name, part in zip(rule.theirs, parts, strict=True):
            theirs[name] = CHANGES[rule.change].write(part, config).contiguous()
    return theirs | {name: torch.cat(cast(list, parts)) for name, parts in shared.items()}


def compare(
    format: Format,
    config: Any,
    shapes: Mapping[str, Sequence[int]],
    named: str | None = None,
) -> dict[str, str]:
    """Refuse weights whose names or shapes do not fit a config, before any memory is taken.

    Returns where to find each of the weights that the rules name.
    """
    ghost = weights_of(format, config)
    wanted = to_theirs(format, config, ghost, named)
    also: dict[str, list[str]] = {}
    for rule, _ in _ruled(format, config, ghost, named):
        for other in (*rule.also, *rule.instead):
            also.setdefault(other, []).append(rule.theirs[0])
    known: dict[str, str] = {}
    unknown: list[str] = []
    own: dict[str, str] = {}
    twice: list[str] = []
    for name in shapes:
        spellings = (name, format.prefix + name, name.removeprefix(format.prefix))
        found = next((n for n in spellings if n in wanted or n in also), None)
        if found in wanted:
            twice += [name] if found in own else []
            own[found] = name
        elif found is not None:
            for wanting in also[found]:
                known.setdefault(wanting, name)
        elif not any(re.search(pattern, name) for pattern in format.ignored):
            unknown.append(name)
    known |= own  # rather than under a name that it shares
    # a weight of its own may be absent where it is the same as another one (T5's head)
    for other, names in also.items():
        for name in names:
            if name not in known and other in known:
                known[name] = known[other]
    wrong = [f"missing {name}" for name in wanted if name not in known]
    wrong += [f"unknown {name}" for name in unknown]
    wrong += [f"{name} is there with and without its prefix" for name in twice]
    wrong += [
        f"{place} is {list(shapes[place])}, not {list(wanted[name].shape)}"
        for name, place in known.items()
        if tuple(shapes[place]) != tuple(wanted[name].shape)
    ]
    if wrong:
        more = f" and {len(wrong) - 6} more" if len(wrong) > 6 else ""
        raise UsageError(f"the weights do not fit the config: {'; '.join(wrong[:6])}{more}")
    return known


def convert(
    format: Format,
    config: Any,
    theirs: Mapping[str, Tensor],
    known: Mapping[str, str],
    named: str | None = None,
) -> dict[str, Tensor]:
    """Change weights that have been compared, one after the other, into ours."""
    ours: dict[str, Tensor] = {}
    ghost = weights_of(format, config)
    for name, (rule, like) in zip(ghost, _ruled(format, config, ghost, named), strict=True):
        _agree(format, rule, theirs, known)
        change, (number, whole) = CHANGES[rule.change].read, rule.part
        parts = [change(theirs[known[part]], config) for part in rule.theirs]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        if whole > 1:
            joined = (joined.split(rule.rows) if rule.rows else joined.chunk(whole))[number]
        ours[name] = joined.reshape(like.shape).contiguous()
    return ours


def _agree(
    format: Format, rule: Rule, theirs: Mapping[str, Tensor], known: Mapping[str, str]
) -> None:
    """Refuse a weight that is there twice, and not the same: which of them is meant is unclear."""
    for other in rule.also:
        place = known[rule.theirs[0]]
        for spelling in {other, format.prefix + other, other.removeprefix(format.prefix)}:
            if spelling == place or spelling not in theirs or spelling in known.values():
                continue
            if not torch.equal(theirs[spelling], theirs[place]):
                raise UsageError(
                    f"{spelling} and {place} differ, though the config says that they are the "
                    "same; set tie_word_embeddings to false in config.json if they are not"
                )


def weights_of(format: Format, config: Any) -> dict[str, Tensor]:
    """Return the weights of our model without their memory."""
    with hollow():
        return float_state(family(format.family)[1](config))


def _ruled(
    format: Format, config: Any, ours: Mapping[str, Tensor], named: str | None
) -> list[tuple[Rule, Tensor]]:
    """Give each of our weights its rule, with the number of its layer filled in."""
    rules = {rule.ours: rule for rule in format.rules(config, named or architecture(format))}
    return [(_rule(name, rules, format.model_type), tensor) for name, tensor in ours.items()]


def _rule(name: str, rules: Mapping[str, Rule], model_type: str) -> Rule:
    """Return the rule for a weight; tables know it without the number of its layer."""
    if name in rules:
        return rules[name]
    found = re.search(r"\.(\d+)\.", name)
    rule = rules.get(name.replace(found[0], ".{}.", 1)) if found else None
    if found is None or rule is None:
        raise UsageError(f"weight '{name}' has no counterpart in the format {model_type}")
    return replace(
        rule,
        theirs=tuple(n.format(found[1]) for n in rule.theirs),
        also=tuple(n.format(found[1]) for n in rule.also),
        instead=tuple(n.format(found[1]) for n in rule.instead),
    )
