"""The first inputs of a part of a task's data, as its `picture` takes them."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from regard.data.pairs import Pair
from regard.data.parts import Dataset
from regard.data.tokenizer import Tokenizer
from regard.errors import UsageError
from regard.tasks.parts import ReadsPairs

_LETTERS = 50  # of a token, at most, where a long text is cut into windows


def first_inputs(task: Any, data: Dataset[Any], part: str, count: int) -> list[Any]:
    """Return the first so many inputs of what a task has read: texts, pairs, images, sounds."""
    if part not in data.parts:
        raise UsageError(f"no part '{part}' in the data; there are {', '.join(data.parts)}")
    one = getattr(data, "running", False)  # text, whose first block is enough
    return task.inputs.first_inputs(data[part], 1 if one else count)


def cut_inputs(task: Any, inputs: list[Any], length: int, count: int) -> list[Any]:
    """Cut inputs of a task to so many tokens, and a long text into as many windows as are asked."""
    predictor = task.predictor
    tokenizer = getattr(predictor, "tokenizer", None)
    if tokenizer is None:  # images, sounds, series
        return inputs[:count]
    if all(isinstance(given, str) for given in inputs):
        length = min(length, getattr(predictor, "window", length))
        return windows_of(inputs, tokenizer, length, count)

    def cut(given: Any) -> Any:
        if isinstance(given, list):  # words to be tagged
            return given[:length]
        if not isinstance(given, Pair):
            return given
        tokenizers = getattr(task.codec, "source", tokenizer), tokenizer
        both = zip(tokenizers, (given.source, given.target), strict=True)
        source, target = (each.decode(each.encode(text)[:length]) for each, text in both)
        return Pair(source, target, given.where)

    return [cut(given) for given in inputs[:count]]


def windows_of(texts: Sequence[str], tokenizer: Tokenizer, length: int, count: int) -> list[str]:
    """Return the first tokens of each text, or if there are few texts more windows of each."""
    each = max(1, -(-count // max(1, len(texts))))
    cut: list[str] = []
    for text in texts[:count]:
        ids = tokenizer.encode(text[: each * length * _LETTERS])
        starts = range(0, max(1, min(len(ids), each * length)), length)
        cut += [tokenizer.decode(ids[at : at + length]) for at in starts]
    return [text for text in cut if text.strip()][:count]


def read_picture(task: Any, given: Any) -> Any:
    """Return a picture of how a model reads an input, and given targets rather than its own."""
    if isinstance(given, Pair):
        if isinstance(task.predictor, ReadsPairs):
            return task.predictor.pair_picture(given)
        given = given.source
    # heads are measured on what a model reads: pieces, and texts as they are
    asked: dict[str, Any] = {"forced": True} if task.name == "language" else {}
    if any(each.name == "units" for each in fields(task.task.Look)):
        asked["units"] = "pieces"
    return task.picture(given, **asked)
