"""What each attention head does, by scores that are measured over one's own data.

A score is from 0 to 1, a mean over all queries it is defined for, in all examples:

previous    the weight on the token just before the query's
next        the weight on the token just after it
near        in images, the weight on the query's place and those around it
same        the weight on other places of the query's token, over queries whose token is elsewhere
induction   the weight on what came after other places of the query's token, over the same queries
sink        the weight on special tokens, and in self-attention on the first token
positional  the share of the weights' variance that the offset from query to key explains
alignment   in cross-attention, the weight within a tenth of the length around the diagonal
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regard.attention.watch import watch
from regard.data.parts import PARTS
from regard.errors import UsageError, log
from regard.files import write_atomically
from regard.insight.alignments import (
    Aligned,
    Alignments,
    judge_heads,
    read_links,
    running_text,
)
from regard.metrics.results import Named
from regard.settings import setting
from regard.tasks.frame.inputs import cut_inputs, first_inputs, read_picture
from regard.tasks.runner import Runner
from regard.training.progress import Progress
from regard.viewer.notebook import save as save_pictures
from regard.viewer.picture import Picture, View

_LEAST = 0.4  # a head is named after a score that is at least this high
_FEWEST = 20  # queries that a score is a mean over, or it says nothing
_NEAR = 0.1  # of the length: how far from the diagonal an alignment may be


@dataclass(frozen=True, eq=False)
class HeadInputs:
    """The attention of one layer over one example, and where and what its tokens are."""

    weights: np.ndarray  # (heads, queries, keys)
    queries: np.ndarray  # what each query is, (queries,)
    keys: np.ndarray  # what each key is, (rows or 1, keys)
    special: np.ndarray  # which keys are special tokens, (rows or 1, keys)
    offset: np.ndarray | None  # from query to key, (queries, keys, axes); none across two texts
    words: bool = True  # whether tokens are told apart by what they are

    @property
    def visible(self) -> np.ndarray:
        """Return which keys a query may look at, (queries, keys): the past, if all look back."""
        queries, keys = self.weights.shape[1:]
        everything = np.ones((queries, keys), bool)
        past = np.tril(everything)
        causal = self.offset is not None and queries == keys
        return past if causal and not self.weights[:, ~past].any() else everything


def look_at(view: View, specials: frozenset[str]) -> HeadInputs:
    """Return what a view holds as the scores take it."""
    weights = view.weights.astype(np.float64)
    if view.placement is None:
        queries, keys = np.array(view.row_tokens, object), np.array(view.column_tokens, object)
        special = np.isin(keys.astype(str), [*specials])[None]
        offset = None
        if view.kind == "self":
            offset = (np.arange(len(keys)) - np.arange(len(queries))[:, None])[..., None]
        return HeadInputs(weights, queries, keys[None], special, offset)
    place = view.placement
    q, k = place.query_tokens, place.key_tokens
    special = (k >= 0) & (k < len(place.key_grid.names))
    offset = None
    if place.query_grid.height and place.key_grid.height:
        there = _cells(k, place.key_grid) - _cells(q, place.query_grid)[:, None]
        offset = there[..., 1:] if place.key_grid.height == 1 else there
    return HeadInputs(weights, q, k, special, offset, words=False)


def _cells(tokens: np.ndarray, grid: Any) -> np.ndarray:
    """Return row and column of tokens on a grid, NaN where they have no place on it."""
    cells = tokens - len(grid.names)
    placed = np.stack([cells // grid.width, cells % grid.width], -1).astype(float)
    return np.where((cells >= 0)[..., None], placed, np.nan)


# A score of one layer in one example: the sum over queries for each head, and how many they were.
Tally = tuple[np.ndarray, int]


def _at_offset(seen: HeadInputs, offset: int) -> Tally | None:
    if seen.offset is None or seen.offset.shape[-1] != 1:  # an image has no next token
        return None
    there = seen.offset[..., 0] == offset
    return (seen.weights * there).sum((1, 2)), int(there.any(1).sum())


def previous(seen: HeadInputs) -> Tally | None:
    """Sum the weight on the token before each query's."""
    return _at_offset(seen, -1)


def next_token(seen: HeadInputs) -> Tally | None:
    """Sum the weight on the token after each query's."""
    return _at_offset(seen, 1)


def near(seen: HeadInputs) -> Tally | None:
    """Sum the weight on each query's place in an image and the eight around it."""
    if seen.offset is None or seen.offset.shape[-1] != 2:
        return None
    there = np.asarray((np.abs(seen.offset) <= 1).all(-1))
    return (seen.weights * there).sum((1, 2)), int(there.any(1).sum())


def _others(seen: HeadInputs) -> np.ndarray | None:
    """Return which keys are the query's token at another place, (queries, keys)."""
    if seen.offset is None or not seen.words:
        return None
    equal = (seen.queries[:, None] == seen.keys) & ~seen.special
    return equal & (seen.offset[..., 0] != 0)


def _mean_on(seen: HeadInputs, keys: np.ndarray | None) -> Tally | None:
    """Sum the weight on some keys, over queries that may look at one."""
    if keys is None:
        return None
    keys = keys & seen.visible
    return (seen.weights * keys).sum((1, 2)), int(keys.any(1).sum())


def same(seen: HeadInputs) -> Tally | None:
    """Sum the weight on other places of each query's token."""
    return _mean_on(seen, _others(seen))


def induction(seen: HeadInputs) -> Tally | None:
    """Sum the weight on what came after other places of each query's token."""
    others = _others(seen)
    if others is None or seen.offset is None:
        return None
    after = np.zeros_like(others)
    after[:, 1:] = (others & seen.visible)[:, :-1]
    return _mean_on(seen, after & (seen.offset[..., 0] != 0))


def sink(seen: HeadInputs) -> Tally | None:
    """Sum the weight on special tokens, and in self-attention on the first."""
    drains = np.broadcast_to(seen.special, seen.weights.shape[1:]).copy()
    if seen.offset is not None and seen.words:
        drains[:, 0] = True
        drains[0] = False  # it has no choice
    return (seen.weights * drains).sum((1, 2)), int(drains.any(1).sum())


def diagonal(seen: HeadInputs) -> Tally | None:
    """Sum the weight near the diagonal of cross-attention, of what is on no special token."""
    queries, keys = seen.weights.shape[1:]
    if seen.offset is not None or not seen.words or queries < 2:
        return None
    real = ~seen.special[0]
    count = int(real.sum())
    if count < 2:
        return None
    away = np.arange(queries)[:, None] / (queries - 1) - np.arange(count) / (count - 1)
    near = np.abs(away) <= max(_NEAR, 1 / (count - 1))
    return (seen.weights[:, :, real] * near).sum((1, 2)), queries


# score -> its sum over the queries of one example
_SCORES: dict[str, Callable[[HeadInputs], Tally | None]] = {
    "previous": previous,
    "next": next_token,
    "near": near,
    "same": same,
    "induction": induction,
    "sink": sink,
    "alignment": diagonal,
}
_POSITIONAL = "positional"
COLUMNS = ("previous", "next", "near", "same", "induction", "sink", _POSITIONAL, "alignment")


class Variance:
    """The variance of weights, and how much of it is between offsets from query to key."""

    def __init__(self, heads: int):
        self.sums: dict[tuple[int, ...], np.ndarray] = {}  # offset -> count, sums, squares
        self.heads = heads

    def add(self, seen: HeadInputs) -> None:
        """Take the weights of one example in."""
        if seen.offset is None:
            return
        offset = np.broadcast_to(seen.offset, (*seen.weights.shape[1:], seen.offset.shape[-1]))
        use = seen.visible & ~np.isnan(offset).any(-1)
        each, group = np.unique(offset[use].astype(int), axis=0, return_inverse=True)
        weights, group = seen.weights[:, use], group.reshape(-1)
        counts = np.bincount(group, minlength=len(each)).astype(float)
        added = np.stack(
            [
                np.stack([counts, *(np.bincount(group, row, len(each)) for row in rows)])
                for rows in (weights, weights**2)
            ]
        )
        for number, key in enumerate(map(tuple, each.tolist())):
            self.sums[key] = self.sums.get(key, 0.0) + added[..., number]

    def explained(self) -> np.ndarray:
        """Return the share of the variance that is between offsets, for each head."""
        if not self.sums:
            return np.full(self.heads, np.nan)
        table = np.stack(list(self.sums.values()))  # (offsets, sums and squares, 1 + heads)
        count, sums, squares = table[:, 0, :1], table[:, 0, 1:], table[:, 1, 1:]
        total = squares.sum(0) - sums.sum(0) ** 2 / count.sum()
        within = (squares - sums**2 / count).sum(0)
        spread = total > 1e-9 * count.sum()
        return np.where(spread, 1 - within / np.where(spread, total, 1.0), 0.0).clip(0, 1)


class LayerScores:
    """The scores of the heads of one layer, summed up example by example."""

    def __init__(self, heads: int):
        self.sums = {name: np.zeros(heads) for name in _SCORES}
        self.counts = dict.fromkeys(_SCORES, 0)
        self.variance = Variance(heads)

    def add(self, seen: HeadInputs) -> None:
        """Take one example in."""
        for name, score in _SCORES.items():
            if (tally := score(seen)) is not None:
                self.sums[name] += tally[0]
                self.counts[name] += tally[1]
        self.variance.add(seen)

    def scores(self, fewest: int = 1) -> list[dict[str, float]]:
        """Return the scores of each head; NaN where there were fewer queries."""
        means = {
            name: self.sums[name] / self.counts[name]
            if self.counts[name] >= fewest
            else np.full(len(self.sums[name]), np.nan)
            for name in _SCORES
        }
        means[_POSITIONAL] = self.variance.explained()
        heads = range(len(means[_POSITIONAL]))
        return [{name: float(means[name][head]) for name in COLUMNS} for head in heads]


def name_of(scores: Mapping[str, float], least: float = _LEAST) -> str:
    """Name a head after its highest score, positional only if no other will do; "" if none."""
    high = {name: value for name, value in scores.items() if value >= least}
    special = {name: value for name, value in high.items() if name != _POSITIONAL}
    return max(special or high, key=lambda name: high[name]) if high else ""


@dataclass(frozen=True)
class Head:
    """One head: its layer, its number, what it is called, and its scores by name."""

    layer: str
    head: int
    name: str
    scores: dict[str, float]


@dataclass(frozen=True)
class Heads(Named):
    """The heads of a model with their scores over some examples."""

    model: str
    examples: int
    heads: list[Head]
    picture: Picture | None = field(default=None, repr=False, compare=False)
    alignments: Alignments | None = None  # of cross-attention with gold links
    out: str | None = None

    def named(self, name: str) -> list[Head]:
        """Return the heads of one name, the clearest first."""
        found = [head for head in self.heads if head.name == name]
        return sorted(found, key=lambda head: -head.scores[name])

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; a score that nothing had is null."""
        rows = [
            {
                **asdict(head),
                "scores": {k: None if math.isnan(v) else v for k, v in head.scores.items()},
            }
            for head in self.heads
        ]
        more = {} if self.alignments is None else {"alignments": asdict(self.alignments)}
        more |= {} if self.out is None else {"path": self.out}
        return {"model": self.model, "examples": self.examples, "heads": rows, **more}

    def __str__(self) -> str:
        wide = max(len("layer"), *(len(head.layer) for head in self.heads))
        columns = [
            name for name in COLUMNS if not all(math.isnan(h.scores[name]) for h in self.heads)
        ]
        lines = [f"{'layer':{wide}}  head  " + "  ".join(f"{name:>10}" for name in columns)]
        for head in self.heads:
            values = (head.scores[name] for name in columns)
            shown = "  ".join(f"{'-' if math.isnan(v) else f'{v:.2f}':>10}" for v in values)
            lines.append(f"{head.layer:{wide}}  {head.head:>4}  {shown}  {head.name}".rstrip())
        lines.append(
            f"over {self.examples} examples; a name is the highest score from {_LEAST} on, and a "
            f"score of fewer than {_FEWEST} queries is -"
        )
        more = [] if self.alignments is None else ["", str(self.alignments)]
        return "\n".join([*lines, *more, *([f"wrote {self.out}"] if self.out else [])])


@dataclass(frozen=True)
class MeasuredData:
    """The data over which a model is measured."""

    data: str | None = setting(None, "data of the model's task: a folder or a file")
    part: str | None = setting(
        None, "the part of the data; test unless given, or else valid", choices=PARTS
    )
    examples: int = setting(100, "examples to look at", min=1, max=10_000)
    length: int = setting(256, "tokens of a text, at most", min=2, max=512)


@dataclass(frozen=True)
class HeadsSettings(MeasuredData):
    """Over what the heads of a model are measured."""

    repeated: int | None = setting(
        None, "instead of data: random tokens said twice, so many each time", min=2, max=1024
    )
    links: str | None = setting(
        None, "instead of data: pairs in words with gold links, source TAB target TAB 0-0 1-2 ..."
    )
    out: str | None = setting(None, "file to write: .png for all scores, .html to see the heads")


def measure_heads(task: Runner[Any], inputs: Iterable[Any], *, quiet: bool = True) -> Heads:
    """Return the scores of every attention head of a loaded model over inputs.

    An input is what `regard.look` takes, or a Pair of a source and its target. Weights are kept
    for one input at a time.
    """
    return _measure(task, (read_picture(task, given) for given in inputs), quiet=quiet)


def _measure(task: Runner[Any], seen: Iterable[Picture], count: int = 0, *, quiet: bool) -> Heads:
    layers: dict[str, LayerScores] = {}
    specials, first, examples = special_tokens(task), None, 0
    with Progress("heads", count, quiet=quiet or not count) as bar:
        for picture in seen:
            views = [view for view in picture.views if view.kind != "rollout"]
            first = first or replace(picture, views=views, opens=None)
            for view in views:
                layer = layers.setdefault(view.name, LayerScores(len(view.weights)))
                layer.add(look_at(view, specials))
            examples += 1
            bar.update(1)
    if first is None or not layers:
        raise UsageError("there was no attention to measure; give data with at least one example")
    heads = [
        Head(layer, number, name_of(scores), scores)
        for layer, tally in layers.items()
        for number, scores in enumerate(tally.scores(_FEWEST))
    ]
    return Heads(task.path, examples, heads, first)


def special_tokens(task: Runner[Any]) -> frozenset[str]:
    """Return how the special tokens of a model's tokenizers are spelt."""
    found: set[str] = set()
    for name in ("tokenizer", "source", "target"):
        tokenizer = getattr(task.codec, name, None)
        if tokenizer is not None:
            found |= {*tokenizer.pieces(sorted(tokenizer.special_ids))}
    return frozenset(found)


@torch.inference_mode()
def repeated_views(task: Runner[Any], length: int, seed: int) -> Sequence[View]:
    """Return where a causal language model looked in random tokens that are said twice."""
    from regard.viewer.text import text_views

    tokenizer, model = getattr(task.codec, "tokenizer", None), task.model
    if task.name != "language" or tokenizer is None:
        raise UsageError(f"repeated= is for language models, not {task.name}; give data=")
    most = model.config.max_length
    if 2 * length + 1 > most:
        raise UsageError(
            f"repeated={length} takes {2 * length + 1} tokens; the model reads at most {most}"
        )
    real = torch.tensor([i for i in range(tokenizer.vocab) if i not in tokenizer.special_ids])
    chosen = torch.randint(len(real), (length,), generator=torch.Generator().manual_seed(seed))
    ids = torch.cat([torch.tensor([tokenizer.bos]), real[chosen], real[chosen]])
    with watch(model) as maps:
        model(ids[None].to(task.device))
    return text_views(maps, [f"{i}" for i in ids.tolist()])


def inputs_of(task: Runner[Any], settings: HeadsSettings) -> list[Any]:
    """Return the first inputs of a part of data, texts cut to the tokens that are looked at."""
    if settings.data is None:
        raise UsageError(f"data is missing; add data=FILE or data=FOLDER with {task.holds}")
    part = settings.part or "test"
    try:
        data = task.read_part_of(settings.data, part)
    except UsageError as error:
        if settings.part is not None:
            raise
        part = "valid"
        try:
            data = task.read_part_of(settings.data, part)
        except UsageError:
            raise error from None
        log(f"{error}; the valid part is read instead")
    inputs = first_inputs(task, data, part, settings.examples)
    return cut_inputs(task, inputs, settings.length, settings.examples)


def measured(task: Runner[Any], settings: HeadsSettings, *, quiet: bool = True) -> Heads:
    """Measure the heads of a loaded model as settings say, and draw them if asked."""
    if settings.out and Path(settings.out).suffix.lower() not in (".png", ".html", ".htm"):
        raise UsageError(f"out={settings.out}: unknown kind of picture; end it in .html or .png")
    given = [key for key in ("data", "repeated", "links") if getattr(settings, key)]
    if len(given) > 1:
        raise UsageError(f"{given[1]}= takes the place of {given[0]}=; give one of them")
    links: list[Aligned] = []
    if settings.repeated:
        count, length = settings.examples, settings.repeated
        seen = (Picture("heads", repeated_views(task, length, n)) for n in range(count))
    else:
        if settings.links:
            links = read_links(settings.links, settings.examples)
            inputs: list[Any] = [running_text(task, pair) for pair in links]
        else:
            inputs = inputs_of(task, settings)
        count = len(inputs)
        seen = (read_picture(task, given) for given in inputs)
    found = _measure(task, seen, count, quiet=quiet)
    if links:
        found = replace(found, alignments=judge_heads(task, links, quiet=quiet))
    return found if settings.out is None else save(found, settings.out)


def save(found: Heads, path: str | Path) -> Heads:
    """Write the scores as a .png, or the first example as a page whose heads have their names."""
    if Path(path).suffix.lower() == ".png":
        from regard.viewer.heatmaps import draw_tables

        layers = list(dict.fromkeys(head.layer for head in found.heads))
        count = 1 + max(head.head for head in found.heads)
        tables = {name: np.full((len(layers), count), np.nan) for name in COLUMNS}
        for head in found.heads:
            for name, value in head.scores.items():
                tables[name][layers.index(head.layer), head.head] = value
        shown = {name: table for name, table in tables.items() if not np.isnan(table).all()}
        columns = [str(number) for number in range(count)]
        title = f"Heads of {found.model or 'the model'}, over {found.examples} examples"
        write_atomically(path, draw_tables(title, shown, layers, columns).png())
    else:
        assert found.picture is not None
        named = {(head.layer, head.head): head.name for head in found.heads}
        views = [
            replace(
                view,
                heads=[f"{n} {named[view.name, n]}".rstrip() for n in range(len(view.weights))],
            )
            for view in found.picture.views
        ]
        save_pictures(replace(found.picture, views=views), path)
    return replace(found, out=str(path))
