"""Converts the weights of a checkpoint to those of our model, and back."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from regard.errors import UsageError
from regard.files.weights import float_state
from regard.models import family
from regard.models.folder import on_meta
from regard.models.protocols import ModelConfig
from regard.pretrained.format import Format
from regard.pretrained.weight_names import CHANGES, Rule, WeightNames, as_rule


def to_ours(
    format: Format,
    config: ModelConfig | None,
    theirs: Mapping[str, Tensor],
    named: str | None = None,
) -> dict[str, Tensor]:
    """Return the weights of our model from theirs, which are those of a class."""
    shapes = {name: tuple(x.shape) for name, x in theirs.items()}
    with on_meta():
        empty = float_state(family(format.family)[1](config))
    places = compare(format, config, empty, shapes, named)
    return convert(format, config, empty, theirs, places, named)


def to_theirs(
    format: Format, config: ModelConfig | None, ours: Mapping[str, Tensor], named: str | None = None
) -> dict[str, Tensor]:
    """Return their weights for those of our model."""
    theirs: dict[str, Tensor] = {}
    shared: dict[str, list[Tensor | None]] = {}  # of which ours are parts
    for name, rule in resolved_rules(format, config, ours, named).items():
        tensor, (number, whole) = ours[name], rule.part
        if whole > 1:
            shared.setdefault(rule.theirs[0], [None] * whole)[number] = tensor
            continue
        count = len(rule.theirs)
        parts = tensor.split(rule.rows or len(tensor) // count) if count > 1 else [tensor]
        for other, part in zip(rule.theirs, parts, strict=True):
            if other:
                theirs[other] = CHANGES[rule.change].write(part, config).contiguous()
    return theirs | {name: torch.cat(cast(list, parts)) for name, parts in shared.items()}


def compare(
    format: Format,
    config: ModelConfig | None,
    ours: Mapping[str, Tensor],
    shapes: Mapping[str, Sequence[int]],
    named: str | None = None,
) -> dict[str, str]:
    """Refuse weights whose names or shapes do not fit our model, before any memory is taken.

    `ours` are its parameters and buffers, on the meta device. Returns where each of the weights
    that the rules name stands in the file.
    """
    expected = to_theirs(format, config, ours, named)
    also: dict[str, list[str]] = {}
    for rule in resolved_rules(format, config, ours, named).values():
        for other in (*rule.also, *rule.instead):
            also.setdefault(other, []).append(rule.theirs[0])
    shared: dict[str, str] = {}
    own: dict[str, str] = {}
    wrong: list[str] = []
    twice: list[str] = []
    for name in shapes:
        spellings = (name, format.prefix + name, name.removeprefix(format.prefix))
        spelling = next((n for n in spellings if n in expected or n in also), None)
        if spelling in expected:
            twice += [name] if spelling in own else []
            own[spelling] = name
        elif spelling is not None:
            for owner in also[spelling]:
                shared.setdefault(owner, name)
        elif not any(re.search(pattern, name) for pattern in format.ignored):
            wrong.append(f"unknown {name}")
    places = shared | own  # rather its own name than one that it shares
    # a weight of its own may be absent where it is the same as another one (T5's head)
    for other, names in also.items():
        if other in places:
            places = dict.fromkeys(names, places[other]) | places
    wrong = [f"missing {name}" for name in expected if name not in places] + wrong
    wrong += [f"{name} is there with and without its prefix" for name in twice]
    wrong += [
        f"{place} is {list(shapes[place])}, not {list(expected[name].shape)}"
        for name, place in places.items()
        if tuple(shapes[place]) != tuple(expected[name].shape)
    ]
    if wrong:
        more = f" and {len(wrong) - 6} more" if len(wrong) > 6 else ""
        raise UsageError(f"the weights do not fit the config: {'; '.join(wrong[:6])}{more}")
    return places


def convert(
    format: Format,
    config: ModelConfig | None,
    ours: Mapping[str, Tensor],
    theirs: Mapping[str, Tensor],
    places: Mapping[str, str],
    named: str | None = None,
) -> dict[str, Tensor]:
    """Change weights that have been compared, one after the other, into ours."""
    made: dict[str, Tensor] = {}
    for name, rule in resolved_rules(format, config, ours, named).items():
        _refuse_contradiction(format, rule, theirs, places)
        change, (number, whole) = CHANGES[rule.change].read, rule.part
        parts = [change(theirs[places[part]], config) for part in rule.theirs if part]
        for i, part in enumerate(rule.theirs):
            if not part:
                parts.insert(i, torch.zeros_like(parts[0]))
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        if whole > 1:
            joined = (joined.split(rule.rows) if rule.rows else joined.chunk(whole))[number]
        made[name] = joined.reshape(ours[name].shape).contiguous()
    return made


def _refuse_contradiction(
    format: Format, rule: Rule, theirs: Mapping[str, Tensor], places: Mapping[str, str]
) -> None:
    """Refuse a weight that is there twice with different values: which is meant is unclear."""
    for other in rule.also:
        place = places[rule.theirs[0]]
        for spelling in {other, format.prefix + other, other.removeprefix(format.prefix)}:
            if spelling == place or spelling not in theirs or spelling in places.values():
                continue
            if not torch.equal(theirs[spelling], theirs[place]):
                raise UsageError(
                    f"{spelling} and {place} differ, though the config says that they are the "
                    "same; set tie_word_embeddings to false in config.json if they are not"
                )


def resolved_rules(
    format: Format, config: ModelConfig | None, names: Iterable[str], named: str | None = None
) -> dict[str, Rule]:
    """Give each parameter of ours its rule, with the numbers of its layers filled in."""
    table = format.weight_table(named)
    rules: dict[str, Rule] = {}
    for name in names:
        rule = _rule(name, table, config)
        if rule is None:
            raise UsageError(
                f"weight '{name}' has no counterpart in the format {format.model_type}"
            )
        old = (
            other.removesuffix(end) + older
            for other in rule.theirs
            for end, older in format.older.items()
            if other.endswith(end)
        )
        rules[name] = replace(rule, also=(*rule.also, *old))
    for absent, owners in format.tied.items():
        owner = next((name for name in owners if name in rules), None)
        if absent not in rules and owner and (lent := _rule(absent, table, config)):
            also = (*rules[owner].also, *lent.theirs, *lent.also)
            rules[owner] = replace(rules[owner], also=also)
    return rules


_LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def _rule(name: str, table: WeightNames, config: ModelConfig | None) -> Rule | None:
    """Return the rule of a parameter: its own row, or that of its module."""
    row = _LAYER_NUMBER.sub("{}", name)
    module, _, leaf = row.rpartition(".")
    if row in table:
        rule = as_rule(table[row], config)
    elif module in table:
        rule = as_rule(table[module], config).renamed(lambda other: f"{other}.{leaf}")
    else:
        return None
    numbers = _LAYER_NUMBER.findall(name)
    return rule.renamed(lambda other: other.format(*numbers))
