"""What a model attends to in a text, layer by layer, and the candidates it chose from."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from regard.attention.watch import Maps
from regard.data.tokenizer import words_of_pieces
from regard.viewer.picture import Step, View

Names = Callable[[Sequence[int]], Sequence[str]] | Sequence[str]


def text_views(
    maps: Maps,
    tokens: Sequence[str],
    *,
    source: Sequence[str] | None = None,
    writes: Sequence[str] | None = None,
    whole: str = "text",
) -> list[View]:
    """View of every layer that was watched while a model read one text (batch size 1).

    `tokens` are those of the text, in an encoder-decoder those that the decoder reads; `source`
    those of the encoder. `writes` is what is predicted at each of `tokens`: the next token, or a
    tag. Layers are told apart by name: `encoder.*` attends from source to source, `*.cross` from
    tokens to source, `*.pool` (or any other number of queries) from the `whole` to its tokens.

    Args:
        maps: attention that was watched
        tokens: tokens that the model, or its decoder, reads
        source: tokens that the encoder reads
        writes: prediction at each token: the next token, or a tag
        whole: name of the query that stands for all tokens
    """
    views = []
    for name in maps:
        weights = maps[name].weights()[0].float().cpu().numpy()
        part, queries = name.rpartition(".")[2], weights.shape[1]
        if source is not None and name.startswith("encoder"):
            view = View(name, weights, source, source)
        elif source is not None and part == "cross":
            view = View(name, weights, tokens, source, "cross", writes)
        elif part == "pool" or queries != len(tokens):
            view = View(name, weights, [whole] * queries, tokens, "cross")
        else:
            view = View(name, weights, tokens, tokens, "self", writes)
        views.append(view)
    return views


def join_pieces(weights: np.ndarray, rows: Sequence[int], columns: Sequence[int]) -> np.ndarray:
    """Weights (heads, words, words) of those of pieces, by the number of the word of each piece.

    The pieces of a word share what is paid to it (a sum over columns), and each of them looks for
    the word (a mean over rows); so a row still sums to one.
    """
    mean = np.zeros((max(rows) + 1, len(rows)))
    mean[rows, np.arange(len(rows))] = 1
    mean /= mean.sum(1, keepdims=True)
    total = np.zeros((len(columns), max(columns) + 1))
    total[np.arange(len(columns)), columns] = 1
    return mean @ weights @ total


def word_views(views: Sequence[View], alone: Collection[str]) -> tuple[list[View], list[int]]:
    """Views of an encoder-decoder in words, and the row of each piece that is written.

    A row of a decoder is the word that it writes, after the one before it; pieces that stand
    `alone`, such as the end of a text, are words.
    """
    found, rows = [], []
    for view in views:
        columns, of_columns = words_of_pieces(view.column_tokens, alone)
        if view.writes is None:
            words, of_rows = words_of_pieces(view.row_tokens, alone)
            weights = join_pieces(view.weights, of_rows, of_columns)
            found.append(replace(view, weights=weights, row_tokens=words, column_tokens=columns))
            continue
        writes, rows = words_of_pieces(view.writes, alone)
        read = [view.row_tokens[0], *writes[:-1]]
        if [*view.column_tokens] == [*view.row_tokens]:  # the tokens that were read
            columns, of_columns = read, [0, *(1 + word for word in rows[:-1])]
        weights = join_pieces(view.weights, rows, of_columns)
        tokens = {"row_tokens": read, "column_tokens": columns, "writes": writes}
        found.append(replace(view, weights=weights, **tokens))
    return found, rows


def candidate_steps(
    probabilities: Tensor,
    names: Names,
    *,
    candidates: int = 5,
    chosen: Sequence[int] | None = None,
    tokens: Sequence[str] | None = None,
) -> list[Step]:
    """Step for each row of probabilities (n, classes), with its likeliest candidates.

    Args:
        probabilities: probabilities (n, classes)
        names: spells a class: a tokenizer's `pieces`, or the list of all names
        candidates: number of candidates to show
        chosen: ids that were taken; the most probable unless given
        tokens: spelling of these, where it depends on those around them
    """
    top = probabilities.topk(min(candidates, probabilities.shape[-1]))
    steps = []
    for row, (ids, values) in enumerate(
        zip(top.indices.tolist(), top.values.tolist(), strict=True)
    ):
        taken = ids[0] if chosen is None else chosen[row]
        token = _spell(names, taken) if tokens is None else tokens[row]
        pairs = [(_spell(names, each), value) for each, value in zip(ids, values, strict=True)]
        steps.append(Step(token, float(probabilities[row, taken]), pairs))
    return steps


def _spell(names: Names, number: int) -> str:
    return names([number])[0] if callable(names) else names[number]


def label_candidates(
    labels: Sequence[str],
    probabilities: Sequence[float] | np.ndarray,
    chosen: Collection[int],
    candidates: int = 5,
) -> dict[str, Any]:
    """`alternatives` and `note` of a picture of a classifier: its likeliest labels."""
    values = np.asarray(probabilities, dtype=np.float64)
    best = np.argsort(-values, kind="stable")[:candidates].tolist()
    told = ", ".join(f"{labels[i]} {values[i]:.4f}" for i in best)
    others = [(labels[i], float(values[i])) for i in best if i not in chosen]
    return {"alternatives": others, "note": f"probabilities: {told}"}
