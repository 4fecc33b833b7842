"""One word in several texts, layer by layer: how far its contextual vectors move apart."""

from collections.abc import Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor, nn
from torch.nn import functional as F

from regard.attention.intervene import record
from regard.data.tokenizer import words_of_pieces
from regard.errors import UsageError, nearest
from regard.viewer.drawing import Drawing, Plot, draw_plots
from regard.viewer.fonts import cut
from regard.viewer.plot import DOT, label_points, set_ticks

_MOST_TEXTS, _MOST_TOKENS, _MOST_WORDS = 8, 512, 80
_MOST_CURVES = 8  # words of a single text that are compared with the one asked for
# where a text is read: tokenizer of the codec; embedding, method and blocks of the model
_READERS = (("tokenizer", "embed", "hidden", "blocks"), ("source", "source", "encode", "encoder"))
_LETTERS = " .,;:!?\"'()«»“”"  # that are no part of a word


class Read(NamedTuple):
    """The words of a text, their static vectors, and their vectors at each layer."""

    text: str
    words: list[str]
    static: Tensor  # (words, width): rows of the embedding matrix
    layers: list[Tensor]  # (words, width), before the first block and after each


def read_words(task: Any, text: str) -> Read:
    """Read a text and return the vectors of its words, each the mean of its pieces'."""
    model = task.model
    for asked, embed, method, blocks in _READERS:
        tokenizer = getattr(task.codec, asked, None)
        tokens = getattr(getattr(model, embed, None), "tokens", None)
        stack = isinstance(getattr(model, blocks, None), nn.ModuleList)
        if tokenizer is not None and tokens is not None and stack and hasattr(model, method):
            break
    else:
        raise UsageError(
            "word= needs a model of texts that reads them by a stack of layers, such as bert, gpt "
            "or transformer; give one of these, or leave word= out"
        )
    ids = tokenizer.encode(text)
    before, _ = tokenizer.around("encoder")
    framed = tokenizer.frame(ids)
    limit = min(_MOST_TOKENS, getattr(model.config, "max_length", _MOST_TOKENS))
    if len(framed) > limit:
        raise UsageError(f"a text of {len(framed)} tokens; word= takes at most {limit}")
    words, word_of = words_of_pieces(tokenizer.pieces(ids))
    if not words:
        raise UsageError("an empty text has no words; give texts that hold word=")
    device = next(model.parameters()).device
    row = torch.tensor([framed], device=device)
    with torch.inference_mode(), record(model, f"{embed}.out", f"{blocks}.*.out") as acts:
        getattr(model, method)(row)
        static = tokens(row[0]).float().cpu()
    found = [acts[name][0].float().cpu() for name in acts]
    share = torch.zeros(len(words), len(framed))
    share[torch.tensor(word_of), torch.arange(len(ids)) + len(before)] = 1.0
    share = share / share.sum(1, keepdim=True)
    return Read(text, words, share @ static, [share @ x for x in found])


def place_of(word: str, read: Read) -> int:
    """Return where a word stands in a text, the first time, or refuse it."""
    plain = [one.strip(_LETTERS).lower() for one in read.words]
    wanted = word.strip(_LETTERS).lower()
    if wanted not in plain:
        raise UsageError(
            f"word={word}: not in '{cut(read.text, 30)}', which has {', '.join(plain[:20])}."
            + nearest(wanted, plain)
        )
    return plain.index(wanted)


def plane(vectors: Tensor) -> Tensor:
    """Return vectors (n, width) as points (n, 2) in the plane of their two principal components.

    The sign of an axis is that in which its largest coordinate is positive.
    """
    centred = vectors - vectors.mean(0)
    rows = torch.linalg.svd(centred, full_matrices=False).Vh
    points = F.pad(centred @ rows[:2].T, (0, max(0, 2 - len(rows))))
    sign = points.gather(0, points.abs().argmax(0, keepdim=True)).sign()
    return points * torch.where(sign == 0, 1.0, sign)


def compare_word(task: Any, texts: Sequence[str], word: str) -> Drawing:
    """Draw how a word's vectors in several texts differ layer by layer, and words in a plane.

    In a single text it is compared with the other words of that text.
    """
    if not 1 <= len(texts) <= _MOST_TEXTS or not all(isinstance(text, str) for text in texts):
        raise UsageError(f"word={word} reads texts; give 1 to {_MOST_TEXTS} of them that hold it")
    reads = [read_words(task, text) for text in texts]
    if sum(len(read.words) for read in reads) > _MOST_WORDS:
        raise UsageError(f"word= draws at most {_MOST_WORDS} words; give shorter texts")
    places = [place_of(word, read) for read in reads]
    depth = len(reads[0].layers)
    names = ["embedding", *(f"layer {n}" for n in range(1, depth))]
    first, *rest = zip(reads, places, strict=True)
    numbers: dict[str, dict[str, float]] = {}
    for number, (read, place) in enumerate(rest, 2):
        pairs = zip(first[0].layers, read.layers, strict=True)
        same = [float(F.cosine_similarity(x[first[1]], y[place], dim=0)) for x, y in pairs]
        numbers[f"{word} in text 1 and {number}"] = dict(zip(names, same, strict=True))
    if not rest:
        numbers = others_in(first[0], first[1], names)
    numbers["different words, mean"] = dict(
        zip(names, [mean_cosine(reads, n) for n in range(depth)], strict=True)
    )

    def curves(axes: Axes) -> None:
        for name, row in numbers.items():
            dash = "--" if name.startswith("different") else "o-"
            axes.plot(
                range(depth), list(row.values()), dash, markersize=3, linewidth=1.3, label=name
            )
        axes.set_ylim(min(-0.05, *(min(row.values()) for row in numbers.values())), 1.05)
        set_ticks(axes, range(depth), [str(n) for n in range(depth)])
        axes.legend(fontsize=6.5)

    def points(vectors: list[Tensor], numbered: bool):
        at = plane(torch.cat(vectors)).numpy()
        labels = [
            (one, n, i == places[n])
            for n, read in enumerate(reads)
            for i, one in enumerate(read.words)
        ]

        def paint(axes: Axes) -> None:
            drawn: dict[Any, tuple[float, float, str, Any]] = {}
            for place, ((x, y), (one, n, chosen)) in enumerate(zip(at, labels, strict=True)):
                told = f"{one} ({n + 1})" if numbered and len(reads) > 1 else one
                colour = "C3" if chosen else DOT
                drawn.setdefault(place if numbered else one, (x, y, told, colour))
            for x, y, _, colour in drawn.values():
                axes.plot(x, y, "o", color=colour, markersize=4)
            axes.margins(0.18)
            # the word itself first, while there is room
            label_points(axes, sorted(drawn.values(), key=lambda point: point[3] == DOT))

        return paint

    title = f"{word}, in {len(texts)} texts" if rest else f"{word}, and the words beside it"
    notes = tuple(f"{n}: {text}" for n, text in enumerate(texts, 1)) + (
        "A static vector is a row of the embedding matrix, the same in every text; a contextual "
        "one is what a layer makes of it. The plane is that of the two principal components.",
    )
    plots = [
        Plot(curves, "cosine, layer by layer", "layer"),
        Plot(points([read.static for read in reads], False), "static vectors"),
        Plot(points([read.layers[-1] for read in reads], True), "contextual vectors, last layer"),
    ]
    sheet = draw_plots(title, [plots], notes=notes, size=(3.3, 3.0))
    return Drawing(title, numbers, notes, sheet)


def draw_words(task: Any, words: str) -> Drawing:
    """Draw words, each read alone, in a plane: their static vectors, and those of the last layer.

    What a plane loses of the squared distances between them is told.
    """
    chosen = list(dict.fromkeys(words.split()))
    if not 3 <= len(chosen) <= _MOST_WORDS:
        raise UsageError(f"words= has {len(chosen)} words; give 3 to {_MOST_WORDS} of them")
    reads = [read_words(task, word) for word in chosen]
    kinds = {
        "static vectors": torch.stack([read.static.mean(0) for read in reads]),
        "contextual vectors, last layer": torch.stack([x.layers[-1].mean(0) for x in reads]),
    }
    plots: list[Plot] = []
    numbers: dict[str, dict[str, float]] = {}
    for name, vectors in kinds.items():
        at = plane(vectors)
        whole = (vectors - vectors.mean(0)).square().sum()
        lost = 1 - float(at.square().sum() / whole) if whole > 0 else 0.0
        near = F.cosine_similarity(vectors[:, None], vectors[None], dim=-1)
        numbers.setdefault("lost", {})[name] = lost
        for i, j in combinations(range(len(chosen)), 2):
            numbers.setdefault(f"cosine of {chosen[i]}, {chosen[j]}", {})[name] = float(near[i, j])

        def paint(axes: Axes, at: Tensor = at) -> None:
            axes.plot(*at.T.tolist(), "o", color=DOT, markersize=4)
            axes.margins(0.18)
            rows = zip(at.tolist(), chosen, strict=True)
            label_points(axes, [(x, y, word, DOT) for (x, y), word in rows])

        plots.append(Plot(paint, f"{name}: {lost:.0%} lost"))
    notes = (
        "A static vector is the row of the embedding matrix (the mean of a word's pieces), a "
        "contextual one what the layers make of the word alone.",
        "The plane is that of the two principal components; lost is the share of the squared "
        "distances between the words that it does not show.",
    )
    title = f"{len(chosen)} words in a plane"
    sheet = draw_plots(title, [plots], notes=notes, size=(3.6, 3.2))
    return Drawing(title, numbers, notes, sheet)


def others_in(read: Read, place: int, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Cosines of a word and the others of its text at each layer, of the most alike ones at last.

    A word that is there again is told apart by its number in the text.
    """
    table = torch.stack(
        [F.cosine_similarity(x[place], x, dim=-1) for x in read.layers], dim=1
    )  # (words, layers)
    order = [n for n in table[:, -1].argsort(descending=True).tolist() if n != place]
    again = {one for one in read.words if read.words.count(one) > 1}
    found = {}
    for n in sorted(order[:_MOST_CURVES]):
        one = read.words[n]
        label = f"{read.words[place]} and {one}" + (f" (word {n + 1})" if one in again else "")
        found[label] = dict(zip(names, table[n].tolist(), strict=True))
    return found


def mean_cosine(reads: Sequence[Read], layer: int) -> float:
    """Return the mean cosine of the vectors of different words, at a layer."""
    vectors = F.normalize(torch.cat([read.layers[layer] for read in reads]), dim=-1)
    words = [one.strip(_LETTERS).lower() for read in reads for one in read.words]
    differ = torch.from_numpy(np.array([[a != b for b in words] for a in words]))
    if not differ.any():
        return 1.0
    return float((vectors @ vectors.T)[differ].mean())
