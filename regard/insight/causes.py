"""What an answer depends on: cut a token, a head or an edge, and see what the answer loses.

An effect is by how much the log-probability of the model's own answer falls. All cuts of an input
are made at once: copies of it in one batch, each with a mask or a head of its own.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from regard.attention.intervene import Change, change, record
from regard.attention.watch import watch
from regard.errors import UsageError, lookup
from regard.layers.heads import GridMean, Max, Mean
from regard.layers.layout import TokenGrid
from regard.metrics.correlation import spearman
from regard.metrics.results import Named, markdown
from regard.tasks.frame.question import Question
from regard.tasks.runner import Given, Runner
from regard.training.progress import Progress
from regard.viewer.picture import Effects, Picture, Placement, View, show_token, words_of
from regard.viewer.rollout import roll_out, stack_of
from regard.viewer.settings import LookSettings

_PASS = 8192  # tokens of one batch of copies
_NUMBERS = 20_000_000  # log-probabilities of one batch, which take eight bytes each
_MAX_CUTS = 20_000
_MAX_TOLD = 12  # places of an image or a sound
_POOLS = (Mean, Max, GridMean)  # what is pooled so is not reached by a mask


@dataclass(frozen=True)
class Attending:
    """A module that attends: copies of one input are so many tiles, each of (heads, q, k)."""

    name: str
    tiles: int
    heads: int
    queries: int
    keys: int
    tokens: Tensor | None  # (tiles, k), the token of the input that each key is, or -1


def attending(model: nn.Module, question: Question) -> list[Attending]:
    """Return the modules that attend while a question is answered, in their order."""
    with watch(model) as maps:
        question.logprobs(1)
    names = maps.names()
    with record(model, *(f"{name}.heads" for name in names)) as acts:
        question.logprobs(1)
    found = []
    for name in names:
        if f"{name}.heads" not in acts:
            continue  # a gated unit, which only shows itself as attention
        tiles, heads, queries, keys = maps[name].shape
        each = acts[f"{name}.heads"]
        tokens = question.keys(name, keys)
        found.append(Attending(name, tiles, heads, each.shape[2], keys, tokens))
    return found


def per_copy(
    copies: int, tiles: int, function: Callable[[Tensor, Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    """Return a change that knows which copies it is given: (n, tiles, ...) and their numbers (n,).

    Some families compute the rows of a batch one after the other, and some step by step.
    """
    seen = 0

    def changed(x: Tensor) -> Tensor:
        nonlocal seen
        here = len(x) // tiles
        rows = (torch.arange(here) + seen) % copies
        seen += here
        return function(x.unflatten(0, (here, tiles)), rows.to(x.device)).flatten(0, 1)

    return changed


Cuts = Callable[[Sequence[int]], Mapping[str, Change]]


def cut_tokens(model: nn.Module, question: Question, layers: Sequence[Attending]) -> Cuts:
    """Return the changes by which copy n of an input loses token items[n]; -1 loses none.

    The token is hidden as a key from every query of every layer, and left out of a mean that is
    taken over all tokens.
    """
    reading = [layer for layer in layers if layer.tokens is not None]
    if not reading:
        raise UsageError("no attention of this model reads the tokens of its input")
    count = len(question.tokens)
    pools = {name: each for name, each in model.named_modules() if isinstance(each, _POOLS)}
    with record(model, *(f"{name}.in" for name in pools)) as acts:
        question.logprobs(1)
    pools = {name: each for name, each in pools.items() if f"{name}.in" in acts}

    def changes(items: Sequence[int]) -> dict[str, Change]:
        cut = torch.tensor(list(items))
        found: dict[str, Change] = {}
        for layer in reading:
            assert layer.tokens is not None
            hidden = (layer.tokens == cut[:, None, None]) & (cut >= 0)[:, None, None]

            def hide(x: Tensor, rows: Tensor, hidden: Tensor = hidden) -> Tensor:
                return x & ~hidden.to(x.device)[rows][:, :, None, None]

            found[f"{layer.name}.mask"] = per_copy(len(cut), layer.tiles, hide)
        for name, pool in pools.items():
            before = getattr(pool, "before", 0)

            def leave_out(x: Tensor, rows: Tensor, before: int = before) -> Tensor:
                if x.shape[2] != before + count or count < 2:
                    return x  # of something else than the tokens of the input
                which, x = cut.to(x.device)[rows], x.clone()
                for row, token in enumerate(which.tolist()):
                    if token >= 0:  # the mean of the others in its place leaves their mean
                        own = x[row, 0, before:]
                        own[token] = (own.sum(0) - own[token]) / (count - 1)
                return x

            found[f"{name}.in"] = per_copy(len(cut), 1, leave_out)
        return found

    return changes


def cut_heads(layers: Sequence[Attending]) -> tuple[Cuts, list[tuple[str, int]]]:
    """Return the changes by which copy n loses head items[n], and what these heads are."""
    heads = [(layer.name, head) for layer in layers for head in range(layer.heads)]

    def changes(items: Sequence[int]) -> dict[str, Change]:
        found: dict[str, Change] = {}
        for layer in layers:
            keep = torch.ones(len(items), layer.heads)
            for row, item in enumerate(items):
                if item >= 0 and heads[item][0] == layer.name:
                    keep[row, heads[item][1]] = 0.0

            def silence(x: Tensor, rows: Tensor, keep: Tensor = keep) -> Tensor:
                return x * keep.to(x)[rows][:, None, :, None, None]

            found[f"{layer.name}.heads"] = per_copy(len(items), layer.tiles, silence)
        return found

    return changes, heads


def cut_edges(
    layers: Sequence[Attending], seen: Mapping[str, np.ndarray]
) -> tuple[Cuts, list[tuple[str, int, int]]]:
    """Return the changes by which copy n loses edge items[n] of all heads, and these edges.

    An edge is a query and a key of one layer; those that the layer's mask forbids are left out.
    """
    edges = [
        (name, int(query), int(key))
        for name, weights in seen.items()
        for query, key in np.argwhere(weights > 0)
    ]

    def changes(items: Sequence[int]) -> dict[str, Change]:
        found: dict[str, Change] = {}
        for layer in layers:
            mine = [
                (row, *edges[item][1:])
                for row, item in enumerate(items)
                if item >= 0 and edges[item][0] == layer.name
            ]
            cut = torch.tensor(mine).view(-1, 3)

            def hide(x: Tensor, rows: Tensor, cut: Tensor = cut) -> Tensor:
                x = x.clone()
                for row, query, key in cut.tolist():
                    for place in (rows == row).nonzero().flatten().tolist():
                        x[place, 0, :, query, key] = False
                return x

            found[f"{layer.name}.mask"] = per_copy(len(items), 1, hide)
        return found

    return changes, edges


def measure(
    model: nn.Module,
    question: Question,
    cuts: Cuts,
    count: int,
    *,
    copies: int | None = None,
    what: str = "cutting",
    quiet: bool = False,
) -> np.ndarray:
    """Return the log-probability of the answer after each of `count` cuts, and first after none.

    `copies` of the input are read at once: all of them, or as many as memory is meant for; 1 is the
    plain loop.
    """
    if count > _MAX_CUTS:
        raise UsageError(
            f"{count:,} cuts are too many, {_MAX_CUTS:,} are made; choose fewer layers"
        )
    size = max(question.size, len(question.tokens), len(question.places))
    fits = max(1, min(_PASS // size, _NUMBERS // question.numbers))
    copies = min(copies or fits, count + 1)
    items = list(range(-1, count))
    values = []
    with Progress(what, len(items), quiet=quiet) as progress:
        for start in range(0, len(items), copies):
            some = items[start : start + copies]
            with change(model, cuts(some)):
                values.append(question.answers(len(some)).cpu().numpy())
            progress.update(len(some))
    return np.concatenate(values)


@dataclass(frozen=True, eq=False)
class Causes(Effects, Named):
    """What an answer depends on: by how much its log-probability falls with each cut."""

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain values."""

        def plain(numbers: Any) -> Any:
            return [round(float(x), 6) if math.isfinite(x) else None for x in numbers]

        correlations = plain(self.correlations.values())
        return {
            "answer": self.answer,
            "logprob": round(self.logprob, 6),
            "tokens": list(self.tokens),
            "effects": plain(self.effects),
            "attention": {name: plain(values) for name, values in self.attention.items()},
            "correlations": dict(zip(self.correlations, correlations, strict=True)),
            "heads": {name: plain(values) for name, values in self.heads.items()},
            "edges": {name: [plain(row) for row in table] for name, table in self.edges.items()},
            **({"caveat": self.caveat} if self.caveat else {}),
        }

    def __str__(self) -> str:
        rows = [["token", "log p lost when cut", *self.attention]]
        shown = np.arange(len(self.tokens))
        if self.grid is not None:  # places have an order of two axes, so the strongest come first
            shown = np.argsort(-np.abs(self.effects), kind="stable")[:_MAX_TOLD]
        for n in shown.tolist():
            maps = [f"{values[n]:.4f}" for values in self.attention.values()]
            rows.append([show_token(self.tokens[n]), f"{self.effects[n]:+.4f}", *maps])
        parts = [self.answer, self.note, "", markdown(rows)]
        if self.heads:
            lost = {(name, n): x for name, row in self.heads.items() for n, x in enumerate(row)}
            best = sorted(lost, key=lambda head: -lost[head])[:3]
            told = ", ".join(f"{name} head {n} {lost[name, n]:+.3f}" for name, n in best)
            parts += ["", f"heads with the largest loss when cut: {told}"]
        return "\n".join(parts)


_WHAT = ("tokens", "heads", "edges")


def parse_cuts(cause: str) -> list[str]:
    """Read cause=: true for tokens and heads, or some of tokens, heads and edges."""
    word = cause.strip().lower()
    if word in ("true", "yes", "1"):
        return ["tokens", "heads"]
    found = [part.strip() for part in word.split(",") if part.strip()]
    for part in found:
        lookup("cause", part, dict.fromkeys(_WHAT))
    return ["tokens", *(part for part in found if part != "tokens")]


def causes(
    model: Runner[Any], given: Given, /, *, cut: str = "true", layers: Any = None, **settings: Any
) -> Causes:
    """Measure what a model's answer to one input depends on.

    causes(regard.load("en-zh"), "How are you?")["effects"]

    `cut` is true for tokens and heads, or some of tokens, heads and edges; edges are those of
    `layers`, of the last one unless given. Further keys are those of look.
    """
    task = loaded(model)
    asked = task.look_settings(settings)
    with task.using(asked):
        return find_causes(task, given, asked, parse_cuts(str(cut)), layers=layers)[0]


def loaded(model: object) -> Runner[Any]:
    """Return what regard.load returned, or refuse what is something else."""
    if not isinstance(model, Runner):
        raise UsageError(f"{model!r:.60} is no loaded model; give what regard.load returned")
    return model


def find_causes(
    task: Runner[Any],
    given: Given,
    settings: LookSettings,
    cuts: Sequence[str] = ("tokens", "heads"),
    *,
    layers: Any = None,
    copies: int | None = None,
) -> tuple[Causes, Picture]:
    """Measure what an answer depends on, beside the picture of where the model looked.

    `settings` are those of look, completed by the task.
    """
    usual = type(settings).__dataclass_fields__["view"].default  # not what was followed already
    picture: Picture = task.explain(given, replace(settings, view=usual))
    question = task.question(given, settings)
    model = task.model
    found = attending(model, question)
    values = measure(
        model,
        question,
        cut_tokens(model, question, found),
        len(question.tokens),
        copies=copies,
        what="cutting tokens",
    )
    effects = values[0] - values[1:]
    attention = attention_to_tokens(picture, question)
    correlations = {name: spearman(map, np.abs(effects)) for name, map in attention.items()}
    more: dict[str, Any] = {}
    if "heads" in cuts:
        changes, heads = cut_heads(found)
        lost = measure(model, question, changes, len(heads), copies=copies, what="cutting heads")
        table: dict[str, list[float]] = {}
        for (name, _), value in zip(heads, lost[0] - lost[1:], strict=True):
            table.setdefault(name, []).append(float(value))
        more["heads"] = {name: np.array(row) for name, row in table.items()}
    if "edges" in cuts:
        more["edges"], correlated = _edges(model, question, found, layers, copies)
        correlations |= correlated
    told = {"answer": question.answer, "logprob": float(values[0]), "tokens": question.tokens}
    told |= {"effects": effects, "attention": attention, "correlations": correlations}
    told |= {"caveat": question.caveat}
    return Causes(**told, grid=question.grid, **more), picture


def _edges(
    model: nn.Module, question: Question, found: Sequence[Attending], layers: Any, copies: Any
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Cut every edge of chosen layers, the last unless given; return effects and correlations."""
    with watch(model) as maps:
        question.logprobs(1)
    words = words_of(layers)
    whole = [one for one in found if one.tiles == 1 and one.queries == maps[one.name].shape[2]]
    chosen = [one for one in whole if any(f".{word}." in f".{one.name}." for word in words)]
    if "all" in words or not words:
        chosen = whole if words else whole[-1:]
    if not chosen:
        known = ", ".join(one.name for one in whole) or "none"
        raise UsageError(
            f"cause=edges: layers={','.join(words)} has no edges of its own; choose from {known}"
        )
    seen = {one.name: maps[one.name].weights()[0].mean(0).float().cpu().numpy() for one in chosen}
    changes, edges = cut_edges(chosen, seen)
    lost = measure(model, question, changes, len(edges), copies=copies, what="cutting edges")
    tables = {name: np.zeros_like(weights, dtype=np.float64) for name, weights in seen.items()}
    for (name, query, key), value in zip(edges, lost[0] - lost[1:], strict=True):
        tables[name][query, key] = value
    correlations = {
        f"edges of {name}": spearman(seen[name][seen[name] > 0], np.abs(table[seen[name] > 0]))
        for name, table in tables.items()
    }
    return tables, correlations


# ---- what maps of attention give to each token ------------------------------------------------


def attention_to_tokens(picture: Picture, question: Question) -> dict[str, np.ndarray]:
    """Return the attention of the answer to each token: last layer, all layers, and rollout."""
    if question.grid is not None:
        return _on_grid(picture, question)
    views = [view for view in picture.views if view.kind != "rollout"]
    crosses = [view for view in views if view.name.endswith("cross")]
    count = len(question.tokens)
    rows = slice(None) if question.reads is None else list(question.reads)
    reading = [view for view in crosses or views if len(view.column_tokens) == count]
    given = [
        view.weights.mean(0)[slice(None) if view.kind == "cross" else rows].mean(0)
        for view in reading
    ]
    found = {"last layer": given[-1], "all layers": np.mean(given, axis=0)}
    try:
        stack = stack_of(views)
    except UsageError:
        return found
    rolled = roll_out(stack)[-1][:, :count]
    if crosses:
        rolled = rolled[count:]
    elif reading[-1].kind == "cross":  # attention pooling of what was rolled out
        rolled = reading[-1].weights.mean(0) @ rolled
    else:
        rolled = rolled[rows]
    return {**found, "rollout": rolled.mean(0)}


def _on_grid(picture: Picture, question: Question) -> dict[str, np.ndarray]:
    """Return the attention to each cell of an image or a sound."""
    from regard.viewer.image import resample, rollout
    from regard.viewer.placement import placement_of, token_weights

    grid = question.grid
    assert grid is not None
    views = [view for view in picture.views if view.kind != "rollout" and view.placement]

    def cells(view: View) -> np.ndarray:
        weights = torch.from_numpy(token_weights(view, picture.query).mean(0)[None]).float()
        own = replace(placement_of(view).key_grid, seconds=0.0)
        names = len(own.names)
        if (own.height, own.width) == (grid.height, grid.width):
            return weights[0, names:].numpy()
        coarse = replace(grid, names=own.names, seconds=0.0)
        return resample(weights, own, coarse)[0, names:].numpy()

    given = [cells(view) for view in views]
    found = {"last layer": given[-1], "all layers": np.mean(given, axis=0)}
    stack = [view for view in views if view.kind == "self"]
    if stack and not any(view.kind == "cross" for view in views):
        found["rollout"] = cells(rollout(stack, picture.query))
    return found


# ---- pictures ---------------------------------------------------------------------------------


def effect_view(causes: Causes) -> View:
    """Return the effects of tokens as a view beside those of attention: for the answer, against."""
    name, heads = "cut", ("for", "against")
    parts = np.stack([np.maximum(causes.effects, 0), np.maximum(-causes.effects, 0)])[:, None]
    if causes.grid is None:
        return View(name, parts, [causes.answer], causes.tokens, "cross", heads=heads)
    from regard.viewer.image import placed_view

    answer = TokenGrid((causes.answer,), 0, 0, 1.0, 1.0)
    cells = replace(causes.grid, names=())
    placement = Placement(answer, cells, np.arange(1), np.arange(len(cells))[None])
    return placed_view(name, parts, placement, kind="cross", heads=heads)


def pictures_of(causes: Causes, picture: Picture) -> list[Picture]:
    """Return the picture of attention with the effects of tokens, and one of heads and edges."""
    from regard.viewer.effects import edge_tables, head_table  # matplotlib takes a while

    note = " | ".join(line for line in (picture.note, causes.note) if line)
    views = [*picture.views, effect_view(causes)]
    first = replace(picture, views=views, note=note, effects=causes, opens=("cut", "for"))
    tables = [*head_table(causes), *edge_tables(causes, picture)]
    if not tables:
        return [first]
    views = [
        View(
            table.name,
            np.nan_to_num(np.stack([np.maximum(table.values, 0), np.maximum(-table.values, 0)])),
            table.rows,
            table.columns,
            "cross",
            heads=("for", "against"),
        )
        for table in tables
    ]
    title = f"{picture.title}: heads and edges that were cut"
    told: dict[str, Any] = {"source": picture.source, "output": causes.answer}
    told["note"] = causes.note
    return [first, Picture(title, views, **told, tables=tables)]
