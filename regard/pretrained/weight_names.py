"""Weight names of transformers beside ours, and how their tensors become ours."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.models.protocols import BlockModelConfig, ModelConfig, PatchModelConfig


@dataclass(frozen=True)
class Rule:
    """Where one weight of ours stands in their state dict; each `{}` is the number of a layer.

    Several of theirs are concatenated along the rows: evenly, unless `rows` says how many each has.
    An empty name among them stands for zeros, where theirs has nothing (a bias of Whisper's keys).
    `also` are names under which the same weight may be written once more, or instead: two that
    differ are refused. `instead` are names that are read only where its own is missing. Where
    theirs holds several of ours, `part` is which of how many parts of its rows is this one, evenly
    unless `rows` says otherwise.
    """

    theirs: tuple[str, ...]
    change: str = "same"
    rows: tuple[int, ...] = ()
    also: tuple[str, ...] = ()
    instead: tuple[str, ...] = ()
    part: tuple[int, int] = (0, 1)

    def renamed(self, rename: Callable[[str], str]) -> "Rule":
        """Return the rule with every name of theirs changed."""
        names = (self.theirs, self.also, self.instead)
        theirs, also, instead = (
            tuple(rename(name) if name else name for name in some) for some in names
        )
        return replace(self, theirs=theirs, also=also, instead=instead)


# Our module or parameter -> theirs: one name, several, or a rule, which may depend on our config. A
# row for a module holds for each of its parameters, whose own names are the same on both sides.
Row = str | tuple[str, ...] | Rule
WeightNames = Mapping[str, Row | Callable[[Any], Row]]


class Change(NamedTuple):
    """How one of their tensors becomes ours under a config, and back."""

    read: Callable[[Tensor, Any], Tensor]
    write: Callable[[Tensor, Any], Tensor]


def _transposed(x: Tensor, config: ModelConfig) -> Tensor:
    """Transpose a matrix; a bias stays as it is."""
    return x.mT if x.ndim == 2 else x


def _part_by_head(x: Tensor, config: BlockModelConfig) -> Tensor:
    """Part (h 3 d) rows, with query, key and value of a head together, into (3 h d)."""
    return x.unflatten(0, (config.block.heads, 3, -1)).transpose(0, 1).flatten(0, 2)


def _join_by_head(x: Tensor, config: BlockModelConfig) -> Tensor:
    """Put (3 h d) rows together by head, (h 3 d)."""
    return x.unflatten(0, (3, config.block.heads, -1)).transpose(0, 1).flatten(0, 2)


def _flat_patches(x: Tensor, config: ModelConfig) -> Tensor:
    """Return the weight of a convolution as that of a product with patches."""
    return x.flatten(1)


def _square_patches(x: Tensor, config: PatchModelConfig) -> Tensor:
    """Return the weight of a product with patches as that of a convolution."""
    return x.unflatten(1, (config.channels, config.patch, config.patch))


CHANGES: dict[str, Change] = {
    "same": Change(lambda x, config: x, lambda x, config: x),
    # transformers' Conv1D keeps its matrix transposed
    "transpose": Change(_transposed, _transposed),
    # positions of RoBERTa and BART begin in the third row
    "skip2": Change(
        lambda x, config: x[2:], lambda x, config: torch.cat([x.new_zeros(2, *x.shape[1:]), x])
    ),
    # a vector written as a matrix of one row
    "row": Change(lambda x, config: x.flatten(), lambda x, config: x.unsqueeze(0)),
    # a matrix of one row written as a vector
    "row_of": Change(lambda x, config: x.unsqueeze(0), lambda x, config: x.flatten()),
    "by_head": Change(_part_by_head, _join_by_head),
    "patches": Change(_flat_patches, _square_patches),
}


def as_rule(entry: Row | Callable[[Any], Row], config: ModelConfig | None) -> Rule:
    """Return the rule that a row of a weight table stands for under one of our configs."""
    entry = entry(config) if callable(entry) else entry
    if isinstance(entry, Rule):
        return entry
    return Rule((entry,) if isinstance(entry, str) else entry)


def within(ours: str, theirs: str, weights: WeightNames) -> WeightNames:
    """Return a weight table with prefixes before our names and before theirs."""

    def prefixed(entry: Row | Callable[[Any], Row]) -> Callable[[Any], Row]:
        return lambda config: as_rule(entry, config).renamed(lambda name: theirs + name)

    return {ours + name: prefixed(entry) for name, entry in weights.items()}


def each(name: str) -> tuple[str, ...]:
    """Return the names that a pattern such as `{q,k,v}_proj` stands for."""
    before, options, after = re.split(r"{(\w+(?:,\w+)+)}", name)
    return tuple(f"{before}{option}{after}" for option in options.split(","))


def block(
    attention: tuple[str, str, str], network: tuple[str, str, str], change: str = "same"
) -> dict[str, Row | Callable[[Any], Row]]:
    """Name the modules of a block.

    `attention` are its projection of queries, keys and values (one name, or several in braces), of
    the output, and its norm; `network` the two products of the feed-forward network, and its norm.
    """
    qkv, *rest = attention
    names: dict[str, Any] = {"attention.qkv": each(qkv) if "," in qkv else (qkv,)}
    modules = ("attention.out", "around_attention.norm")
    modules += ("feed_forward.inner", "feed_forward.outer", "around_feed_forward.norm")
    names |= {ours: (name,) for ours, name in zip(modules, (*rest, *network), strict=True)}
    return {ours: Rule(theirs, change) for ours, theirs in names.items()}


def half(name: str, number: int) -> Rule:
    """Return the rule of a weight that is one half (0 or 1) of the rows of theirs."""
    return Rule((name,), part=(number, 2))


def head_width(config: BlockModelConfig) -> int:
    """Return how wide a head is, whether the config says so or not."""
    return config.block.head_width or config.block.width // config.block.heads


def kv_heads(config: BlockModelConfig) -> int:
    """Return how many heads keys and values have, whether the config says so or not."""
    return config.block.kv_heads or config.block.heads


def qkv_rows(config: BlockModelConfig) -> tuple[int, ...]:
    """Return how many rows queries, keys and values have where heads may share keys and values."""
    return tuple(n * head_width(config) for n in (config.block.heads, *[kv_heads(config)] * 2))
