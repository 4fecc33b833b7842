"""What a picture of attention is made of, whatever model it came from."""

import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import numpy as np

from regard.errors import UsageError, nearest
from regard.layers.layout import TokenGrid

Choice = str | int | Sequence[str | int] | None
# the query whose attention over an image is shown: the class token, the mean of all queries, the
# token of a number, or the one at (x, y), each from 0 to 1
QueryPoint = Literal["class", "mean"] | int | tuple[float, float]

_JOINERS = "\u200c\u200d"  # invisible, but they shape Persian, Hindi and emoji
_LONGEST_TOKEN = 120


@dataclass(frozen=True, eq=False)
class Placement:
    """Where the queries and keys of a view stand on an image.

    `query_tokens` (rows,) is the token of each row in the grid of queries, `key_tokens` (rows, or
    1 where all rows are alike, columns) that of each column in the grid of keys; -1 is padding.
    """

    query_grid: TokenGrid
    key_grid: TokenGrid
    query_tokens: np.ndarray
    key_tokens: np.ndarray


@dataclass(frozen=True, eq=False)
class Tile:
    """A small image and its name: bytes (h, w), or (h, w, 3)."""

    name: str
    pixels: np.ndarray


@dataclass(frozen=True, eq=False)
class View:
    """The weights of one attention layer, with the tokens of both sides.

    Row i is the query: `row_tokens[i]` is the token at that position and, in a decoder,
    `writes[i]` the token that this position goes on to write.
    """

    name: str
    weights: np.ndarray  # (heads, rows, columns)
    row_tokens: Sequence[str]
    column_tokens: Sequence[str]
    kind: Literal["self", "cross", "rollout"] = "self"
    writes: Sequence[str] | None = None
    heads: Sequence[int | str] = ()  # what the heads are called; 0, 1, 2 ... unless given
    placement: Placement | None = None

    def __post_init__(self) -> None:
        weights = np.asarray(self.weights, dtype=np.float32)
        expected = (len(self.row_tokens), len(self.column_tokens))
        if weights.ndim != 3 or weights.shape[1:] != expected or not weights.size:
            raise ValueError(
                f"{self.name}: weights of shape {weights.shape} for {expected[0]} row tokens and "
                f"{expected[1]} column tokens; expected (heads, rows, columns), none of them empty"
            )
        if self.writes is not None and len(self.writes) != expected[0]:
            raise ValueError(
                f"{self.name}: {len(self.writes)} written tokens for {expected[0]} rows"
            )
        heads = tuple(self.heads) or tuple(range(len(weights)))
        if len(heads) != len(weights):
            raise ValueError(f"{self.name}: {len(heads)} names for {len(weights)} heads")
        if not np.isfinite(weights).all() or weights.min() < 0:
            raise UsageError(
                f"{self.name}: attention weights must be finite and not negative; "
                "the model may have diverged, so look at an earlier checkpoint"
            )
        object.__setattr__(self, "weights", weights)
        object.__setattr__(self, "heads", heads)


@dataclass(frozen=True)
class Step:
    """One written token, its probability, and the candidates it was chosen from, best first."""

    token: str
    probability: float
    candidates: Sequence[tuple[str, float]] = ()
    row: int | None = None  # of the decoder's views; its own number unless given
    note: str = ""  # why it was taken, if not for its probability


class TimedWord(Protocol):
    """A word with the seconds it begins and ends at, and how probable it is, if that is known."""

    @property
    def text(self) -> str:
        """Word."""
        ...

    @property
    def start(self) -> float:
        """Second it begins at."""
        ...

    @property
    def end(self) -> float:
        """Second it ends at."""
        ...

    @property
    def confidence(self) -> float | None:
        """Its probability."""
        ...


@dataclass(frozen=True, eq=False)
class Recording:
    """The sound that a photo is the spectrogram of, its words, and the CTC posteriors of frames."""

    samples: np.ndarray  # (n,), from -1 to 1
    rate: int
    words: Sequence[TimedWord] = ()
    posteriors: np.ndarray | None = None  # (frames, units), at equal distances over the sound
    units: Sequence[str] = ()  # what the columns are called; "" is the blank

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return len(self.samples) / self.rate


@dataclass(frozen=True)
class Node:
    """One token that a beam search considered, after its parent (-1: the beginning)."""

    parent: int
    token: str
    logprob: float
    score: float
    fate: str  # open, if it went on
    best: bool = False  # whether it leads to what was written
    when: str = ""  # where its fate was decided, if its place does not tell


@dataclass(frozen=True)
class Tree:
    """The hypotheses of a beam search, parents first; what fates mean, and why it ended."""

    nodes: Sequence[Node]
    fates: Mapping[str, str]
    end: str = ""


@dataclass(frozen=True, eq=False)
class Effects:
    """By how much the log-probability of an answer falls when a token, a head or an edge is cut.

    `attention` is what maps of attention give to each token; `correlations` are Spearman's between
    a map and the size of the effects.
    """

    answer: str
    logprob: float
    tokens: Sequence[str]
    effects: np.ndarray  # (tokens,)
    attention: Mapping[str, np.ndarray]  # (tokens,) of each map
    correlations: Mapping[str, float]
    heads: Mapping[str, np.ndarray] = field(default_factory=dict)  # (heads,) of each layer
    edges: Mapping[str, np.ndarray] = field(default_factory=dict)  # (queries, keys) of each layer
    grid: TokenGrid | None = None  # on which the tokens stand, of an image or a sound
    caveat: str = ""  # why cuts cannot change the answer, if they cannot

    @property
    def note(self) -> str:
        """Answer's log-probability and the correlations as one line."""
        told = ", ".join(f"{name} {value:+.2f}" for name, value in self.correlations.items())
        what = self.caveat or f"rank correlation with the effect of cutting: {told}"
        return f"log p = {self.logprob:.3f}; {what}"


@dataclass(frozen=True, eq=False)
class ValueTable:
    """Numbers (rows, columns) with names on both sides, and a text in each cell if given.

    Where `signed`, 0 is white and the two signs have colours of their own.
    """

    name: str
    values: np.ndarray
    rows: Sequence[str]
    columns: Sequence[str]
    texts: Sequence[Sequence[str]] | None = None
    signed: bool = True


@dataclass(frozen=True, eq=False)
class Picture:
    """All there is to see of one input: its attention, and how its output came about."""

    title: str
    views: Sequence[View] = ()
    steps: Sequence[Step] = ()  # step i is written by row i of the decoder's views
    source: str = ""
    output: str = ""
    alternatives: Sequence[tuple[str, float]] = field(default=())  # other outputs, with scores
    note: str = ""  # how it was made: model, beam, ...
    opens: tuple[str, int | str] | None = None  # the view and head that are seen first
    photo: np.ndarray | None = None  # what is attended to, bytes (h, w) or (h, w, 3)
    query: QueryPoint = "class"
    tiles: Sequence[Tile] = ()
    tiles_per_row: int = 0  # as many as fit unless given
    recording: Recording | None = None  # whose spectrogram the photo is
    effects: Effects | None = None  # what the output depends on, drawn in a PNG
    tables: Sequence[ValueTable] = ()  # drawn in a PNG
    tree: Tree | None = None  # what was considered on the way to the output
    units: "Callable[[Picture], Picture] | None" = None  # in which it is shown to a reader


def words_of(choice: Choice) -> list[str]:
    """Split a choice as a user gives it (`0,2`, 3, ["0", "mean"]) into its words."""
    if choice is None:
        return []
    if isinstance(choice, str) or not isinstance(choice, Sequence):
        choice = [choice]
    words = [word.strip() for part in choice for word in str(part).split(",")]
    return list(dict.fromkeys(word for word in words if word))


def list_names(names: Iterable[int | str]) -> str:
    """List names in short: a run of numbers as `0 to 3`, others one by one."""
    unique = list(dict.fromkeys(names))
    numbers = sorted(int(name) for name in unique if str(name).isdecimal())
    others = [str(name) for name in unique if not str(name).isdecimal()]
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return ", ".join([f"{numbers[0]} to {numbers[-1]}", *others])
    return ", ".join([*map(str, numbers), *others])


def choose_views(picture: Picture, layers: Choice = None, heads: Choice = None) -> Picture:
    """Keep the chosen layers and heads of a picture.

    A layer is chosen by any whole part of its name: `3`, `cross`, `decoder.3`, `decoder.3.cross`,
    or all; a head by its number, mean, max, or all.
    """
    views, words = list(picture.views), words_of(layers)
    if words and "all" not in words:
        chosen: set[str] = set()
        for word in words:
            matches = {view.name for view in views if f".{word}." in f".{view.name}."}
            if not matches:
                raise UsageError(_unknown_layer(word, views))
            chosen |= matches
        views = [view for view in views if view.name in chosen]
    return replace(picture, views=tuple(choose_heads(view, heads) for view in views))


def _unknown_layer(word: str, views: Sequence[View]) -> str:
    if not views:
        return f"layers={word}: this picture holds no attention to choose from"
    parts = [part for view in views for part in view.name.split(".")]
    return (
        f"layers={word}: no such layer; choose from {list_names(parts)}, a whole name such as "
        f"{views[-1].name}, or all.{nearest(word, [*parts, *(view.name for view in views)])}"
    )


def choose_heads(view: View, heads: Choice = None) -> View:
    """Keep the chosen heads of a view; mean and max are taken over all of them."""
    words = words_of(heads)
    if not words or view.kind == "rollout":  # a rollout is of all heads
        return view
    names = [str(name) for name in view.heads]
    chosen: dict[int | str, np.ndarray] = {}
    for word in words:
        if word == "all":
            chosen.update(zip(view.heads, view.weights, strict=True))
        elif word in names:
            chosen[view.heads[names.index(word)]] = view.weights[names.index(word)]
        elif word == "mean":
            chosen[word] = view.weights.mean(axis=0)
        elif word == "max":
            chosen[word] = view.weights.max(axis=0)
        else:
            raise UsageError(
                f"heads={word}: {view.name} has no such head; choose from "
                f"{list_names(view.heads)}, mean, max or all"
            )
    return replace(view, weights=np.stack(list(chosen.values())), heads=tuple(chosen))


def readable(text: str, *, keep: str = " ") -> str:
    """Write what cannot be seen, or would disturb what stands beside it, as visible signs."""
    signs = {"\n": "↵", "\t": "⇥", "\x7f": "␡"}
    shown: list[str] = []
    for letter in text:
        category = unicodedata.category(letter)
        if letter in keep or letter in _JOINERS:
            shown.append(letter)
        elif letter in signs:
            shown.append(signs[letter])
        elif letter < " ":
            shown.append(chr(0x2400 + ord(letter)))
        elif category in ("Cc", "Cf", "Co", "Cs", "Zl", "Zp", "Zs"):
            shown.append(f"⟨U+{ord(letter):04X}⟩")
        else:
            shown.append(letter)
    return "".join(shown)


def show_token(token: str, longest: int = _LONGEST_TOKEN) -> str:
    """Write a token so that it can be seen, be it blank, a lone accent, or endless."""
    if not token.strip(" "):
        return "␣" * len(token) or "∅"
    if len(token) > longest:
        token = token[: longest - 1] + "…"
    if unicodedata.category(token[0]).startswith("M"):
        token = "◌" + token
    return readable(token)


def language_of(text: str) -> str:
    """Guess among Japanese, Korean and Chinese, which share characters but not their shapes."""
    if any("\u3040" <= letter <= "\u30ff" for letter in text):
        return "ja"
    if any("\uac00" <= letter <= "\ud7a3" for letter in text):
        return "ko"
    return "zh" if any("\u3400" <= letter <= "\u9fff" for letter in text) else ""
