"""Activation patching: vectors of one input put into the run on another, place by place.

The first input is answered one way, the second another. Where a vector of the first restores its
answer on the second, there lies what makes the difference (Vig et al. 2020, Meng et al. 2022).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from regard.attention.intervene import Change
from regard.errors import UsageError
from regard.insight.causes import loaded, measure, per_copy
from regard.insight.lens import residual_stream
from regard.metrics.results import Named, markdown
from regard.tasks.frame.question import Question
from regard.tasks.runner import Runner
from regard.viewer.picture import Picture, ValueTable, View, show_token
from regard.viewer.settings import LookSettings


@dataclass(frozen=True, eq=False)
class Patched(Named):
    """By how much the log-probability of the first input's answer rises on the second input.

    `effects` (layers, places): after vectors of the first input were put in there; `logprobs` is
    that of the answer on the first input, and on the second before anything is put in.
    """

    answer: str
    inputs: tuple[str, str]
    logprobs: tuple[float, float]
    layers: Sequence[str]
    places: Sequence[str]
    effects: np.ndarray

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        return {
            "answer": self.answer,
            "inputs": list(self.inputs),
            "logprobs": [round(each, 6) for each in self.logprobs],
            "layers": list(self.layers),
            "places": list(self.places),
            "effects": np.round(self.effects, 6).tolist(),
        }

    @property
    def note(self) -> str:
        """Return what the answer's log-probability is on both inputs."""
        clean, other = self.logprobs
        return (
            f"log p of '{self.answer}': {clean:.3f} for the first input, {other:.3f} for the second"
        )

    def __str__(self) -> str:
        rows = [["place", *(name.removesuffix(".attention") for name in self.layers)]]
        for n, place in enumerate(self.places):
            rows.append([show_token(place), *(f"{row[n]:+.3f}" for row in self.effects)])
        return f"{self.note}\n\n{markdown(rows)}"


def patch(model: Runner[Any], first: Any, second: Any, /, **settings: Any) -> Patched:
    """Put the vectors of one input into the run on another, and see where its answer returns.

    patch(regard.load("en-zh"), "I like tea.", "I like fish.")["effects"]
    """
    task = loaded(model)
    asked = task.look_settings(settings)
    with task.using(asked):
        return find_patches(task, first, second, asked)[0]


def find_patches(
    task: Any, first: Any, second: Any, settings: LookSettings, *, copies: int | None = None
) -> tuple[Patched, Picture]:
    """Patch every layer at every place; return the effects and a picture of them."""
    model = task.model
    clean: Question = task.question(first, settings)
    other: Question = task.question(second, settings, clean.expected)
    if len(clean.tokens) != len(other.tokens):
        raise UsageError(
            f"patch=true: the inputs have {len(clean.tokens)} and {len(other.tokens)} tokens; "
            "give two of the same number, such as sentences that differ in one word"
        )
    stacks = _streams(model, clean)
    sites = [(name, place) for name, x in stacks.items() for place in range(x.shape[1])]

    def patches(items: Sequence[int]) -> Mapping[str, Change]:
        found: dict[str, Change] = {}
        for name, own in stacks.items():
            mine = {
                row: sites[n][1] for row, n in enumerate(items) if n >= 0 and sites[n][0] == name
            }

            def put(x: Tensor, rows: Tensor, mine: Any = mine, own: Tensor = own) -> Tensor:
                x = x.clone()
                for at, row in enumerate(rows.tolist()):
                    if row in mine:
                        x[at, 0, mine[row]] = own[0, mine[row]]
                return x

            found[f"{name}.out"] = per_copy(len(items), 1, put)
        return found

    values = measure(model, other, patches, len(sites), copies=copies, what="patching")
    (size,) = {x.shape[1] for x in stacks.values()}
    effects = (values[1:] - values[0]).reshape(len(stacks), size)
    tokens, theirs = clean.tokens, other.tokens
    places = [a if a == b else f"{a}/{b}" for a, b in zip(tokens, theirs, strict=True)]
    if len(places) != size:
        places = [str(n) for n in range(size)]
    named = first if isinstance(first, str) else "", second if isinstance(second, str) else ""
    with torch.inference_mode():
        logprobs = float(clean.answers(1)), float(values[0])
    found = Patched(clean.answer, named, logprobs, list(stacks), places, effects)
    table = ValueTable(
        "log p of the first input's answer that is gained on the second",
        effects[::-1],
        list(stacks)[::-1],
        places,
    )
    parts = np.stack([np.maximum(effects, 0), np.maximum(-effects, 0)])
    view = View("patched", parts, list(stacks), places, "cross", heads=("gained", "lost"))
    note = "; ".join(filter(None, (found.note, clean.caveat)))
    title = " / ".join(name for name in named if name) or clean.answer
    picture = Picture(
        title, [view], source=named[0], output=clean.answer, note=note, tables=[table]
    )
    return found, picture


def _streams(model: nn.Module, question: Question) -> dict[str, Tensor]:
    """Return the residual stream (1, l, w) of the layers that read the input, by name."""
    names, vectors = residual_stream(model, question)
    if any(name.startswith("decoder") for name in names):  # what the encoder makes of the source
        names, vectors = residual_stream(model, question, "encoder")
    return dict(zip(names, vectors, strict=True))
