"""What a model would answer after each layer: logit lens for texts, class lens for images.

The vectors after a layer take the place of those after the last one, and go through the model's own
norm and head (nostalgebraist 2020). All layers are read at once: each is a copy of the input.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from regard.attention.intervene import change, record
from regard.errors import UsageError
from regard.insight.causes import Attending, attending, loaded, per_copy
from regard.metrics.results import Named, markdown
from regard.tasks.frame.question import Question
from regard.tasks.runner import Given, Runner
from regard.viewer.picture import Picture, ValueTable
from regard.viewer.settings import LookSettings
from regard.viewer.text import candidate_steps

_MAX_CLASSES = 50_000_000  # log-probabilities of all layers and steps, eight bytes each


@dataclass(frozen=True, eq=False)
class Lens(Named):
    """The likeliest class after each layer, at each step of the answer, and its probability.

    `answer_logprobs` is the log-probability of the answer that the whole model gives.
    """

    answer: str
    layers: Sequence[str]
    places: Sequence[str]  # what each step is read from
    guesses: Sequence[Sequence[str]]  # (layers, steps)
    probabilities: np.ndarray  # (layers, steps) of the guesses
    chosen: np.ndarray  # (layers, steps) of the answer
    answer_logprobs: np.ndarray  # (layers,)

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        return {
            "answer": self.answer,
            "layers": list(self.layers),
            "places": list(self.places),
            "guesses": [list(row) for row in self.guesses],
            "probabilities": np.round(self.probabilities, 6).tolist(),
            "chosen": np.round(self.chosen, 6).tolist(),
            "answer_logprobs": np.round(self.answer_logprobs, 6).tolist(),
        }

    def __str__(self) -> str:
        rows = [["after", "log p of the answer", "guesses"]]
        for name, value, row in zip(self.layers, self.answer_logprobs, self.guesses, strict=True):
            rows.append([name, f"{value:.3f}", " ".join(row)])
        return f"{self.answer}\n\n{markdown(rows)}"


def residual_stream(
    model: nn.Module,
    question: Question,
    within: str = "",
    layers: Sequence[Attending] | None = None,
) -> tuple[list[str], list[Tensor]]:
    """Return the blocks of the stack that the answer is read from, and what each gives, (1, l, w).

    They are the blocks around the modules that attend whose vectors are shaped as the last one's;
    those `within` a part of the model, such as its encoder, if it is named.
    """
    names: list[str] = []
    for layer in attending(model, question) if layers is None else layers:
        block = layer.name  # of which the block is the first part around it that has a number
        while block and not block.rpartition(".")[2].isdecimal():
            block = block.rpartition(".")[0]
        if block.startswith(within) and block and block not in names:
            names.append(block)
    if not names:
        raise UsageError("this model has no stack of layers to look into")
    with record(model, *(f"{name}.out" for name in names)) as acts:
        question.logprobs(1)
    last = acts[f"{names[-1]}.out"]
    stack = names[-1].rpartition(".")[0]
    alike = [
        name
        for name in names
        if name.rpartition(".")[0] == stack and acts[f"{name}.out"].shape == last.shape
    ]
    return alike, [acts[f"{name}.out"] for name in alike]


def lens(model: Runner[Any], given: Given, /, **settings: Any) -> Lens:
    """Return what a model would answer to one input after each layer.

    lens(regard.load("shakespeare"), "ROMEO: I")["guesses"]
    """
    task = loaded(model)
    asked = task.look_settings(settings)
    with task.using(asked):
        return find_lens(task, given, asked)[0]


def find_lens(task: Any, given: Given, settings: LookSettings) -> tuple[Lens, list[Picture]]:
    """Look through the lens of each layer; return what is seen, and pictures of it."""
    question: Question = task.question(given, settings)
    model = task.model
    names, vectors = residual_stream(model, question)
    size = len(names) * question.numbers
    if size > _MAX_CLASSES:
        raise UsageError(
            f"lens=true of {len(names)} layers and {len(question.places)} places is too large; "
            "look at a shorter text"
        )
    stacked = torch.cat(vectors)

    def swap(x: Tensor, rows: Tensor) -> Tensor:
        return stacked.to(x)[rows].unsqueeze(1)

    with change(model, {f"{names[-1]}.out": per_copy(len(names), 1, swap)}):
        logprobs = question.logprobs(len(names))
        answers = question.answers_of(logprobs)
    best = logprobs.max(-1)
    chosen = torch.as_tensor(question.chosen, device=logprobs.device)
    chosen = logprobs.gather(2, chosen.view(1, -1, 1).expand(len(names), -1, 1)).squeeze(2)
    found = Lens(
        question.answer,
        names,
        question.places,
        [[question.spell(n) for n in row] for row in best.indices.tolist()],
        best.values.exp().cpu().numpy(),
        chosen.exp().cpu().numpy(),
        answers.cpu().numpy(),
    )
    source = given if isinstance(given, str) else ""
    note = "the likeliest after each layer, the last on top; colour: its probability"
    note = "; ".join(filter(None, (note, question.caveat)))
    table = ValueTable(
        "after each layer",
        found.probabilities[::-1],
        list(found.layers)[::-1],
        found.places,
        [list(row) for row in found.guesses][::-1],
        signed=False,
    )
    title = source or found.answer
    whole = Picture(title, source=source, output=found.answer, note=note, tables=[table])
    pages = [
        Picture(
            f"after {name}: log p of the answer {value:.3f}",
            steps=candidate_steps(
                row.exp(), question.names, candidates=settings.candidates, chosen=question.chosen
            ),
            note=note,
            source=f"after {name}: {source}",
            output=found.answer,
        )
        for name, row, value in zip(names, logprobs, found.answer_logprobs, strict=True)
    ]
    return found, [whole, *pages]
