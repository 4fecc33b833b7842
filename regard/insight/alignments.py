"""How well heads of cross-attention align words, by gold links that people have drawn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from regard.data.languages import language_of
from regard.data.pairs import Pair
from regard.data.sentences import WITHOUT_SPACES
from regard.data.table import Table
from regard.data.tokenizer import Tokenizer
from regard.errors import UsageError
from regard.metrics.alignment import Link, parse_links, score_links
from regard.metrics.results import Named
from regard.tasks.runner import Runner
from regard.tasks.text.writer import TextWriter
from regard.training.progress import Progress

MEAN = "mean"  # of all heads of a layer
ALL = "all layers"
_MAX_WORDS = 500  # of a sentence with gold links


@dataclass(frozen=True)
class Aligned:
    """A pair of sentences in words, and the links between them."""

    source: list[str]
    target: list[str]
    links: set[Link]


@dataclass(frozen=True)
class AlignedHead(Named):
    """How well a head aligns: its error rate over all links, and of linked source words only."""

    layer: str
    head: int | str  # a number, or mean
    shift: int  # 1 if its attention is read one step later
    error_rate: float
    error_rate_linked: float
    precision: float
    recall: float


@dataclass(frozen=True)
class Alignments(Named):
    """The heads of cross-attention, the one that aligns best first."""

    pairs: int
    heads: list[AlignedHead]

    def __str__(self) -> str:
        lines = ["layer            head  shift  error rate  (linked words)  precision  recall"]
        for one in self.heads:
            lines.append(
                f"{one.layer:<15}  {one.head!s:>4}  {one.shift:>5}  {one.error_rate:>10.3f}"
                f"  {one.error_rate_linked:>14.3f}  {one.precision:>9.3f}  {one.recall:>6.3f}"
            )
        return "\n".join([*lines, f"over {self.pairs} pairs with gold links"])


def read_links(path: str | Path, most: int = 10_000) -> list[Aligned]:
    """Read pairs with gold links: source words, target words and links 0-0 1-2, by TABs."""
    rows: list[Aligned] = []
    for row in Table(str(path)):
        if row.fault is not None:
            raise UsageError(row.fault.message)
        if row.value is None:
            continue
        where, cells = f"{path}:{row.number}", row.value
        if not isinstance(cells, list) or len(cells) != 3:
            raise UsageError(f"{where}: expected source, target and links, with TABs between them")
        source, target = cells[0].split(), cells[1].split()
        if not 0 < len(source) <= _MAX_WORDS or not 0 < len(target) <= _MAX_WORDS:
            raise UsageError(f"{where}: a side of no words, or of more than {_MAX_WORDS}; cut it")
        rows.append(Aligned(source, target, parse_links(cells[2], len(source), len(target), where)))
        if len(rows) == most:
            break
    if not rows:
        raise UsageError(f"{path}: no pairs in it; expected source, target and links by TABs")
    return rows


def join_words(words: Sequence[str], language: str | None) -> str:
    """Return words as a running text of their language."""
    code = language_of(language) if language else None
    return ("" if code in WITHOUT_SPACES else " ").join(words)


def running_text(task: Runner[Any], pair: Aligned) -> Pair:
    """Return a pair of sentences in words as the texts that a model of two languages reads."""
    source, target = task.config.get("from"), task.config.get("to")
    return Pair(join_words(pair.source, source), join_words(pair.target, target), "")


def word_shares(ids: Sequence[int], tokenizer: Tokenizer, words: Sequence[str]) -> np.ndarray:
    """Return which share of each token's letters is of which word, (tokens, words).

    Where words stand without spaces a token may hold several; one without a whole letter, such as
    a byte of it, is of the word that this letter is of.
    """
    of_letter = np.eye(len(words))[[n for n, word in enumerate(words) for _ in word]]
    # how many letters there are before each token; those of a letter in bytes are not one yet
    texts = (tokenizer.decode(ids[:n]) for n in range(len(ids) + 1))
    before = [len("".join(text.split()).rstrip("\ufffd")) for text in texts]
    if before[-1] != len(of_letter):
        raise UsageError(
            f"tokens of {before[-1]} letters for words of {len(of_letter)}; the tokenizer changes "
            "the text, so that its tokens cannot be laid over given words"
        )
    starts = np.minimum(before[:-1], len(of_letter) - 1)
    spans = zip(starts, np.maximum(before[1:], starts + 1), strict=True)
    return np.stack([of_letter[start:end].mean(0) for start, end in spans])


def head_links(
    task: Runner[Any], pairs: Sequence[Aligned], *, quiet: bool = True
) -> Iterator[dict[tuple[str, int | str, int], set[Link]]]:
    """Yield for each pair the links by each head, and by their mean, at once and one step later.

    A target word is linked to the source word to which its pieces give most weight: the weight of
    the step that writes a piece or, one step later, of the step that reads it.
    """
    writer = task.predictor
    if not isinstance(writer, TextWriter) or not writer.aligner.heads:
        raise UsageError(f"{task.name} has no cross-attention between texts; links= aligns words")
    with Progress("links", len(pairs), quiet=quiet) as bar:
        for pair in pairs:
            text = running_text(task, pair)
            ((source, target),) = writer.encode_pairs([(text.source, text.target)], task.check({}))
            of_source = word_shares(source[:-1], writer.codec.source, pair.source)
            of_target = word_shares(target, writer.codec.target, pair.target)
            maps, _ = writer.maps(source, target)
            found: dict[tuple[str, int | str, int], set[Link]] = {}
            layers = {
                name: maps[name].weights()[0, :, :, :-1].double().cpu().numpy()
                for name in writer.aligner.heads
            }
            layers[ALL] = np.concatenate(list(layers.values())).mean(0, keepdims=True)
            for name, whole in layers.items():
                for shift in (0, 1):
                    part = whole[:, shift : shift + len(target)]
                    mass = of_target.T @ part @ of_source  # (heads, target words, source words)
                    each = {} if name == ALL else dict(enumerate(mass))
                    for head, one in {**each, MEAN: mass.mean(0)}.items():
                        links = {(int(s), t) for t, s in enumerate(one.argmax(-1))}
                        found[name, head, shift] = links
            yield found
            bar.update(1)


def judge_heads(task: Runner[Any], pairs: Sequence[Aligned], *, quiet: bool = True) -> Alignments:
    """Judge every head of cross-attention by gold links, at once and one step later."""
    found = list(head_links(task, pairs, quiet=quiet))
    gold = [pair.links for pair in pairs]
    heads = []
    for name, head, shift in found[0]:
        predicted = [links[name, head, shift] for links in found]
        score = score_links(predicted, gold)
        linked = score_links(predicted, gold, linked_only=True)
        heads.append(
            AlignedHead(
                name,
                head,
                shift,
                score.error_rate,
                linked.error_rate,
                score.precision,
                score.recall,
            )
        )
    return Alignments(len(pairs), sorted(heads, key=lambda one: one.error_rate))
