"""Attention through a whole stack of a text model: rollout and flow (Abnar and Zuidema 2020).

A layer passes on half of what a position was and half of what it attends to, (1 + A) / 2 with A
the mean over heads. Rollout multiplies these matrices; flow takes their entries as capacities of
pipes, and asks how much can run from a position down to each token of the input. In an
encoder-decoder the positions are those of source and target together, and self-attention and
cross-attention are a layer each.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from regard.errors import UsageError, lookup
from regard.viewer.picture import Picture, View

MAX_FLOW_TOKENS = 96
_LEAST = 1e-9  # a capacity below it counts as none


class FlowLayer(NamedTuple):
    """What one layer passes on, (positions, positions), and the positions that it computes."""

    name: str
    passed: np.ndarray
    rows: slice
    row_tokens: Sequence[str]
    writes: Sequence[str] | None


class FlowStack(NamedTuple):
    """The layers of a model from the first on, and the tokens of its input."""

    layers: list[FlowLayer]
    tokens: list[str]


def stack_of(views: Sequence[View]) -> FlowStack:
    """Layers of a picture's views of one text, or of a source and a target."""
    views = [view for view in views if not view.name.startswith("members.")]  # of an ensemble
    crosses = [view for view in views if view.name.endswith("cross")]
    source = list(crosses[0].column_tokens) if crosses else []
    own = [view for view in views if view.kind == "self" and not is_source(view, crosses)]
    target = list(own[0].row_tokens if own else crosses[0].row_tokens if crosses else [])
    count, size = len(source), len(source) + len(target)
    if not size:
        raise UsageError("this model attends from no token to another, so nothing can be followed")
    places = {"source": slice(0, count), "target": slice(count, size)}
    # one stack that reads a source and then a target is shown as three views of each layer
    together = any(view.name.endswith(".self") for view in views)
    attended: dict[str, np.ndarray] = {}
    seen: dict[str, tuple[View, slice, np.ndarray]] = {}
    for view in views:
        row = "source" if is_source(view, crosses) else "target"
        rows, columns = places[row], places["source" if view in crosses else row]
        fits = rows.stop - rows.start, columns.stop - columns.start
        if view.kind == "rollout" or view.weights.shape[1:] != fits:
            continue  # pooling, or a part beside the stack
        name = view.name.split(".")[1] if together else view.name
        table = attended.setdefault(name, np.zeros((size, size)))
        table[rows, columns] += view.weights.mean(0)
        computed = seen[name][2] if name in seen else np.zeros(size, bool)
        computed[rows] = True
        seen[name] = view, rows, computed
    layers = []
    for name, (view, rows, computed) in seen.items():
        passed = np.eye(size)
        passed[computed] = (passed + attended[name])[computed] / 2
        layers.append(FlowLayer(view.name, passed, rows, view.row_tokens, view.writes))
    return FlowStack(layers, source + target)


def is_source(view: View, crosses: Sequence[View]) -> bool:
    """True if a view is of the encoder of an encoder-decoder."""
    return bool(crosses) and view.name.startswith("encoder")


def roll_out(stack: FlowStack) -> list[np.ndarray]:
    """Shares of the tokens in each layer's positions, (positions, tokens), layer by layer."""
    rolled, found = np.eye(len(stack.tokens)), []
    for layer in stack.layers:
        rolled = layer.passed @ rolled
        found.append(rolled)
    return found


def flow(stack: FlowStack, depth: int | None = None) -> np.ndarray:
    """Maximum flow from each position of a layer, the last unless given, to a token.

    That is the maximum flow through pipes as wide as what each layer passes on.
    """
    size = len(stack.tokens)
    if size > MAX_FLOW_TOKENS:
        raise UsageError(
            f"view=flow of {size} tokens; at most {MAX_FLOW_TOKENS} are followed, "
            "choose view=rollout or a shorter text"
        )
    layers = stack.layers[: len(stack.layers) if depth is None else depth + 1]
    rows = range(size)[layers[-1].rows]
    passed = [layer.passed for layer in layers]
    return np.array([[maximum_flow(passed, row, token) for token in range(size)] for row in rows])


def maximum_flow(passed: Sequence[np.ndarray], top: int, token: int) -> float:
    """Maximum flow from a position above the last layer to a token below the first.

    `passed` are the capacities (positions, positions) of layers from the first on. By Dinic's
    algorithm, on pipes that lead anywhere.
    """
    size, depth = len(passed[0]), len(passed)
    # only what lies between both ends counts
    above, below = [{top}], [{token}]
    for matrix in passed[::-1]:
        above.append({int(j) for i in above[-1] for j in np.flatnonzero(matrix[i] > _LEAST)})
    for matrix in passed:
        below.append({int(i) for j in below[-1] for i in np.flatnonzero(matrix[:, j] > _LEAST)})
    inside = [above[n] & below[depth - n] for n in range(depth + 1)]
    ends, room, pipes = [], [], {}
    for n, matrix in enumerate(passed[::-1]):
        for i in inside[n]:
            for j in inside[n + 1]:
                if matrix[i, j] > _LEAST:
                    for start, stop, wide in (
                        (n * size + i, (n + 1) * size + j, float(matrix[i, j])),
                        ((n + 1) * size + j, n * size + i, 0.0),
                    ):
                        pipes.setdefault(start, []).append(len(ends))
                        ends.append(stop)
                        room.append(wide)
    return _dinic(pipes, ends, room, top, depth * size + token)


def _dinic(
    pipes: dict[int, list[int]], ends: list[int], room: list[float], start: int, stop: int
) -> float:
    """Maximum flow; pipe n and n ^ 1 are the two directions of one."""
    total = 0.0
    while True:
        level = {start: 0}
        queue = deque([start])
        while queue:
            node = queue.popleft()
            for pipe in pipes.get(node, ()):
                if room[pipe] > _LEAST and ends[pipe] not in level:
                    level[ends[pipe]] = level[node] + 1
                    queue.append(ends[pipe])
        if stop not in level:
            return total
        tried = dict.fromkeys(level, 0)
        path: list[int] = []
        node = start
        while True:
            if node == stop:
                most = min(room[pipe] for pipe in path)
                total += most
                for pipe in path:
                    room[pipe] -= most
                    room[pipe ^ 1] += most
                # go on from where the first pipe is full
                full = next(n for n, pipe in enumerate(path) if room[pipe] <= _LEAST)
                node = ends[path[full] ^ 1]
                del path[full:]
                continue
            some = pipes.get(node, [])
            while tried[node] < len(some):
                pipe = some[tried[node]]
                if room[pipe] > _LEAST and level.get(ends[pipe], -1) == level[node] + 1:
                    break
                tried[node] += 1
            if tried[node] < len(some):
                path.append(some[tried[node]])
                node = ends[path[-1]]
            elif path:
                node = ends[path.pop() ^ 1]
                tried[node] += 1
            else:
                break


def _rolled(stack: FlowStack) -> list[np.ndarray]:
    return [each[layer.rows] for each, layer in zip(roll_out(stack), stack.layers, strict=True)]


def _flows(stack: FlowStack) -> list[np.ndarray]:
    return [flow(stack)]


# name -> what is computed of a stack: for its last layers, or all, (positions, tokens)
FOLLOWED: dict[str, Callable[[FlowStack], list[np.ndarray]]] = {"rollout": _rolled, "flow": _flows}


def follow(picture: Picture, view: str) -> Picture:
    """Picture of a text with its attention as it is, or followed through all layers."""
    if view == "attention" or picture.photo is not None or picture.tiles:
        return picture  # over a photo, attention was followed when it was laid there
    followed = lookup("view", view, {"attention": None, **FOLLOWED})
    assert followed is not None
    stack = stack_of(picture.views)
    tables = followed(stack)
    views = [
        View(
            layer.name,
            table[None],
            layer.row_tokens,
            stack.tokens,
            "rollout",
            layer.writes,
            (view,),
        )
        for layer, table in zip(stack.layers[-len(tables) :], tables, strict=True)
    ]
    return replace(picture, views=views, opens=(views[-1].name, view))
