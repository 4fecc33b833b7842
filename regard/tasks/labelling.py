"""What labelling texts and labelling words share: the encoder, and texts as it reads them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from regard.attention.positions import has_table
from regard.data.batches import Batches, pad
from regard.data.characters import Characters
from regard.data.features import Features, named, split_words
from regard.data.tokenize import train_tokenizer
from regard.data.tokenizer import blank_id
from regard.errors import UsageError, lookup, nearest
from regard.models import family
from regard.tasks import run
from regard.tasks.run import (
    TaskSettings,
    build_model,
    resolve_task,
    settle_tokenizer,
    shape_of,
    trained,
)
from regard.training.loop import at_least, mix

FAMILY = "bert"
BertConfig, _ = family(FAMILY)

# what a size means for training, on top of the sizes of the model
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"lr": 0.002, "batch_tokens": 1024, "pieces": 4000, "steps": 3000},
    "small": {"lr": 0.001, "batch_tokens": 2048, "pieces": 8000, "steps": 6000},
    "base": {"lr": 0.0003, "batch_tokens": 8192, "pieces": 32_000, "steps": 20_000},
    "big": {"lr": 0.0002, "batch_tokens": 16_384, "pieces": 32_000, "steps": 40_000},
}
# short keys for what lies deeper
SHORT = {
    **run.SHORT,
    "ffn_dropout": "model.block.ffn_dropout",
    "head_dropout": "model.head_dropout",
    "pool": "model.pool",
    "inner_width": "model.inner_width",
    "members": "model.members",
}
MOST_LABELS = 100_000
MOST_WEIGHT = 100.0  # of a label in the loss
UNEVEN = 5  # times as often: labels that the user should hear of
WORDS = "words"  # the tokenizer of those who know words by their features alone


@dataclass(frozen=True)
class LabelSettings(TaskSettings):
    """What a run that learns labels can be told, be they of texts or of words."""

    schedule: str = field(default="cosine", metadata={"help": "fall of the rate"})
    weight_decay: float = field(default=0.05, metadata=at_least(0, "of matrices", 10))
    ema: float = field(default=0.995, metadata=at_least(0, "memory of averaged weights", 0.99999))
    valid: str | None = field(default=None, metadata={"help": "a file to choose by, or a share"})
    like: str | None = field(default=None, metadata={"help": "bert, roberta, modernbert, ..."})
    encoding: str = field(default="auto", metadata={"help": "auto, utf-8 or latin1"})
    skip_bad: bool = field(default=False, metadata={"help": "leave bad rows out"})
    header: bool | None = field(
        default=None, metadata={"help": "whether a table begins with one; recognised unless told"}
    )
    tokenizer: str = field(default="bpe", metadata={"help": "bpe, unigram, characters, words"})
    pieces: int = field(default=4000, metadata=at_least(300, "sub-words", 1_000_000))
    bpe_dropout: float = field(default=0.0, metadata=at_least(0, "share of merges dropped", 1))
    word_dropout: float = field(default=0.0, metadata=at_least(0, "share of words hidden", 1))
    features: str = field(default="none", metadata={"help": "none, or such as affixes+bigrams"})
    feature_rows: int = field(default=20_000, metadata=at_least(1, "features known", 99_999))
    feature_dropout: float = field(default=0.0, metadata=at_least(0, "of features hidden", 1))
    batch_tokens: int = field(default=1024, metadata=at_least(1, "tokens a batch"))
    batch_rows: int | None = field(default=None, metadata=at_least(1, "texts a batch at most"))
    max_length: int = field(default=256, metadata=at_least(8, "pieces read at once", 100_000))
    label_smoothing: float = field(default=0.1, metadata=at_least(0, "spread of the target", 0.9))
    r_drop: float = field(default=0.0, metadata=at_least(0, "weight of the R-Drop term", 100))
    class_weights: str = field(
        default="none", metadata={"help": "in the loss: none, or balanced for uneven labels"}
    )
    model: BertConfig = field(default_factory=BertConfig)  # type: ignore[valid-type]


S = TypeVar("S", bound=LabelSettings)


def resolve_labels(cls: type[S], values: Mapping[str, Any], head: str, of: str) -> S:
    """Make full settings of what a user gave: the size fills in what is not said.

    A model that begins with nothing learns best with norms before its parts and turned positions;
    one that is like a published one, or starts from a trained one, has the parts of that.
    """
    row = [values["like"]] if values.get("like") else []
    shape = shape_of(FAMILY, values, *row, head=head)
    if not row and not values.get("init"):
        block = replace(shape.block, order="pre", norm_eps=1e-5, attention_dropout=0.0)
        shape = replace(shape, block=block, position="rotary", types=0, pool="mean")
    settings = resolve_task(cls, values, model=shape, sizes=SIZES, short=SHORT, of=of)
    model: Any = settings.model
    named(settings.features)
    lookup("class_weights", settings.class_weights, WEIGHTINGS)
    if model.members > 1 and head != "classify":
        raise UsageError(f"members={model.members} label whole texts; leave it out here")
    if settings.tokenizer == WORDS and settings.features == "none":
        raise UsageError(
            "tokenizer=words knows words by features=; add one, such as features=words"
        )
    if settings.tokenizer == WORDS and settings.bpe_dropout:
        raise UsageError("bpe_dropout= is for pieces, which tokenizer=words has not; leave it out")
    if "model.max_length" not in values and not (settings.init and has_table(model.position)):
        # a table has no rows for places that are never trained
        least = model.max_length if settings.init else 1
        model = replace(model, max_length=max(least, settings.max_length))
    if settings.max_length > model.max_length:
        if "max_length" in values:
            raise UsageError(
                f"max_length={settings.max_length} is more than the {model.max_length} places "
                "that the model has"
            )
        settings = replace(settings, max_length=model.max_length)
    return replace(settings, model=model)


def learn_tokenizer(texts: Sequence[str], settings: LabelSettings) -> Any:
    """Learn how to cut texts into tokens."""
    if settings.tokenizer == "characters":
        return Characters.learn(texts)
    if settings.tokenizer == WORDS:
        return train_tokenizer(texts, kind="bytes", vocab=300)
    return train_tokenizer(texts, kind=settings.tokenizer, vocab=settings.pieces)


def settle_features(
    folder: Path,
    settings: LabelSettings,
    begun: dict[str, Any] | None,
    sentences: Callable[[], Iterable[Sequence[str]]],
) -> Features | None:
    """Take the features of the run, or of the model it starts from, or learn which there are."""
    if settings.features == "none":
        return None
    return settle_tokenizer(
        folder,
        settings,
        begun,
        lambda: Features.learn(
            settings.features, sentences(), settings.feature_rows, settings.tokenizer == WORDS
        ),
        load=Features.load,
        save=lambda folder, features: features.save(folder),
    )


def build_labeller(settings: LabelSettings, reader: "Reader", labels: list[str], task: str) -> Any:
    """Build the model with a head for the labels; one that knew the same before keeps its head."""
    shape: Any = settings.model
    vocab = reader.tokenizer.vocab
    config = replace(
        shape,
        vocab=max(vocab, shape.vocab) if settings.init else vocab,
        labels=len(labels),
        types=shape.types if reader.features is None else reader.features.size,
    )
    fresh = "head."
    if settings.init:
        before = trained(settings.init)[1]
        if (before.get("task"), before.get("labels")) == (task, labels):
            fresh = ""
    return build_model(FAMILY, config, settings, fresh=fresh)


# Labels


def label_list(found: Sequence[Sequence[str]], where: str) -> list[str]:
    """Return all labels that there are, sorted, or say why they cannot be learnt."""
    labels = sorted({label for some in found for label in some})
    if len(labels) < 2:
        told = f"only the label {labels[0]!r:.40}" if labels else "no label"
        raise UsageError(f"{where}: {told}; expected two or more to tell apart")
    if len(labels) > MOST_LABELS or (len(labels) > 1000 and 2 * len(labels) > len(found)):
        raise UsageError(
            f"{where}: {len(labels):,} different labels in {len(found):,} rows, such as "
            f"{labels[0]!r:.40}; are the columns swapped? Set columns="
        )
    return labels


def unknown_label(where: str, label: str, labels: Sequence[str], known: str) -> str:
    """Say that a label is not among those that are known."""
    near = nearest(label, labels)
    shown = ", ".join(labels[:8]) + (", ..." if len(labels) > 8 else "")
    return f"{where}: label {label!r:.60} {known} ({shown}).{near}"


I = TypeVar("I")


def known_only(
    items: Sequence[I],
    labels: Sequence[str],
    of: Callable[[I], Sequence[str]],
    known: str,
    notes: list[str],
    *,
    skip_bad: bool = False,
) -> list[I]:
    """Return items all of whose labels are known, or refuse the first of the others."""
    every, kept, first = set(labels), [], ""
    for item in items:
        strange = next((label for label in of(item) if label not in every), None)
        if strange is None:
            kept.append(item)
            continue
        message = unknown_label(getattr(item, "where", ""), strange, labels, known)
        if not skip_bad:
            raise UsageError(f"{message} Mend it, or leave such rows out with skip_bad=true")
        first = first or message
    if first:
        notes.append(f"{len(items) - len(kept):,} rows with unknown labels left out; {first}")
    if not kept:
        raise UsageError(f"no row is left: {first}")
    return kept


def labels_of(folder: Path, model: Any, config: Mapping[str, Any]) -> list[str]:
    """Check and return the labels that a model's folder names."""
    path = folder / "config.json"
    labels: Any = config.get("labels")
    good = isinstance(labels, list) and all(isinstance(label, str) for label in labels)
    if not good or len(set(labels)) != len(labels):
        raise UsageError(f"{path}: 'labels' is {labels!r:.40}; expected a list of different texts")
    if len(labels) != model.config.labels:
        raise UsageError(
            f"{path}: {len(labels)} labels, but the model tells {model.config.labels} apart"
        )
    return labels


# Losses


def _balanced(often: np.ndarray, rows: int) -> np.ndarray:
    """Let every label weigh alike, however rare it is; the mean over all rows is one."""
    return rows / (len(often) * np.maximum(often, 1))


# name -> the weight of each label in the loss, from how often it is there among so many rows
WEIGHTINGS: dict[str, Callable[[np.ndarray, int], np.ndarray] | None] = {
    "none": None,
    "balanced": _balanced,
}


def weigh(name: str, often: np.ndarray, rows: int, several: bool = False) -> Tensor | None:
    """Return the weights of labels in the loss; of several, those of where each is there."""
    how = WEIGHTINGS[name]
    if how is None:
        return None
    weights = (rows - often) / np.maximum(often, 1) if several else how(often, rows)
    return torch.from_numpy(np.clip(weights, 1 / MOST_WEIGHT, MOST_WEIGHT).astype(np.float32))


def uneven(often: np.ndarray, labels: Sequence[str], name: str) -> list[str]:
    """Say that some labels are much rarer than others, if they are and nothing is done about it."""
    low, high = int(often.argmin()), int(often.argmax())
    if WEIGHTINGS[name] is not None or often[high] < UNEVEN * max(1, often[low]):
        return []
    return [
        f"uneven labels: {labels[high]!r:.40} occurs {int(often[high]):,} times, "
        f"{labels[low]!r:.40} {int(often[low]):,}; judge by macro F1, too, or set "
        "class_weights=balanced to let each label weigh alike"
    ]


class Way(NamedTuple):
    """One label is right, or each by itself: the summed loss, R-Drop's distance, the chances."""

    loss: Callable[[Tensor, Tensor, float, Tensor | None], Tensor]
    apart: Callable[[Tensor, Tensor], Tensor]
    chances: Callable[[Tensor], Tensor]


def _one(logits: Tensor, wanted: Tensor, smoothing: float, weights: Tensor | None) -> Tensor:
    return F.cross_entropy(logits, wanted, weights, reduction="sum", label_smoothing=smoothing)


def _one_apart(a: Tensor, b: Tensor) -> Tensor:
    p, q = a.log_softmax(-1), b.log_softmax(-1)
    return ((p.exp() - q.exp()) * (p - q)).sum()


def _several(logits: Tensor, wanted: Tensor, smoothing: float, weights: Tensor | None) -> Tensor:
    wanted = wanted * (1 - smoothing) + smoothing / 2
    return F.binary_cross_entropy_with_logits(
        logits, wanted.to(logits.dtype), pos_weight=weights, reduction="sum"
    )


def _several_apart(a: Tensor, b: Tensor) -> Tensor:
    return ((a.sigmoid() - b.sigmoid()) * (a - b)).sum()


WAYS: dict[str, Way] = {
    "one": Way(_one, _one_apart, lambda logits: logits.softmax(-1)),
    "several": Way(_several, _several_apart, torch.sigmoid),
    # a number, such as how well an answer fits a question, which is the only logit itself
    "value": Way(
        lambda logits, wanted, smoothing, weights: F.mse_loss(logits, wanted, reduction="sum"),
        lambda a, b: (a - b).square().sum(),
        lambda logits: logits,
    ),
}


def label_loss(
    way: Way,
    logits: Callable[[], Tensor],
    wanted: Tensor,
    smoothing: float,
    r_drop: float,
    weights: Tensor | None = None,
) -> Tensor:
    """Return the summed loss of labels; with R-Drop, of two passes that should say the same."""
    one = logits().float()
    if not r_drop:
        return way.loss(one, wanted, smoothing, weights)
    two = logits().float()
    both = way.loss(one, wanted, smoothing, weights) + way.loss(two, wanted, smoothing, weights)
    return both / 2 + r_drop / 4 * way.apart(one, two)


# Texts as the model reads them


class Row(NamedTuple):
    """Ids in their frame, the word of each (-1: none), their features, and if it had to be cut."""

    ids: np.ndarray
    owner: np.ndarray
    types: np.ndarray | None = None
    cut: bool = False


def frame_of(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return what the model expects before and after a text."""
    return tokenizer.around("encoder")


def blank_of(tokenizer: Any) -> int:
    """Return the token that stands for a hidden word."""
    return blank_id(tokenizer)


class Reader:
    """Makes rows of texts and of words.

    Where a text has features, it is split into words, and each is cut into pieces by itself.
    """

    def __init__(self, tokenizer: Any, features: Features | None = None, sampler: Any = None):
        self.tokenizer, self.features, self.sampler = tokenizer, features, sampler
        self.before, self.after = frame_of(tokenizer)
        self.alone = features is not None and features.alone
        self.blank = blank_of(tokenizer)

    def room(self, longest: int) -> int:
        """Return how many pieces of a text fit into so many places."""
        return max(1, longest - len(self.before) - len(self.after))

    def texts(self, texts: Sequence[str], longest: int, keys: Sequence[int] = ()) -> list[Row]:
        """Read texts, each cut at the longest; keys draw how words are cut, if that is drawn."""
        room = self.room(longest)
        if self.features is not None:
            split = [split_words(text) for text in texts]
            drawn = keys or [None] * len(texts)
            both = zip(split, drawn, strict=True)
            return [self.words(words, longest, key) for words, key in both]
        if keys and self.sampler is not None:
            found = [self.sampler.encode(text, key) for text, key in zip(texts, keys, strict=True)]
        else:
            found = self.tokenizer.encode_batch(texts)
        return [
            self._framed(ids[:room], range(min(room, len(ids))), None, len(ids) > room)
            for ids in found
        ]

    def words(self, words: Sequence[str], longest: int, key: int | None = None) -> Row:
        """Read words, cut at the longest."""
        return self.row(words, self.pieces(words, key), longest)

    def row(self, words: Sequence[str], pieces: Sequence[Sequence[int]], longest: int) -> Row:
        """Make a row of words that are cut into pieces already."""
        ids = [i for some in pieces for i in some]
        owner = [n for n, some in enumerate(pieces) for _ in some]
        room = self.room(longest)
        types = None if self.features is None else self.features.numbers(words)
        return self._framed(ids[:room], owner[:room], types, len(ids) > room)

    def pieces(self, words: Sequence[str], key: int | None = None) -> list[list[int]]:
        """Cut each word into pieces, one or more."""
        if self.alone:
            return [[self.blank]] * len(words)
        if key is not None and self.sampler is not None:
            return [self.sampler.encode(word, key) for word in words]
        return self.tokenizer.encode_words(words)

    def shown(self, row: Row, words: Sequence[str]) -> list[str]:
        """Return what to show for each id of a row of words."""
        pieces: list[str] = self.tokenizer.pieces(row.ids.tolist())
        if not self.alone:
            return pieces
        owner: list[int] = row.owner.tolist()
        return [p if n < 0 else words[n] for p, n in zip(pieces, owner, strict=True)]

    def _framed(
        self, ids: Sequence[int], owner: Sequence[int], types: np.ndarray | None, cut: bool
    ) -> Row:
        around = len(self.before), len(self.after)
        row = np.array([*self.before, *ids, *self.after], dtype=np.int64)
        words = np.pad(np.array(owner, dtype=np.int64), around, constant_values=-1)
        if types is not None:
            types = np.pad(types[np.array(owner, dtype=np.int64)], (around, (0, 0)))
        return Row(row, words, types, cut)


class Read(NamedTuple):
    """Rows side by side."""

    ids: Tensor
    lengths: Tensor
    types: Tensor | None

    @property
    def tokens(self) -> int:
        """Return how many tokens there are."""
        return int(self.lengths.sum())


def collate(rows: Sequence[Row], padding: int, device: Any = "cpu") -> Read:
    """Lay rows side by side."""
    ids, lengths = pad([row.ids for row in rows], padding)
    types = None
    if rows[0].types is not None:
        table = np.zeros((*ids.shape, rows[0].types.shape[1]), dtype=np.int64)
        for place, row in zip(table, rows, strict=True):
            place[: len(row.ids)] = row.types
        types = torch.from_numpy(table).to(device)
    return Read(ids.to(device), lengths.to(device), types)


class Feed:
    """Batch n of rows, some words hidden and cut anew each time: a pure function of (seed, n)."""

    def __init__(
        self,
        rows: Sequence[Row],
        settings: LabelSettings,
        reader: Reader,
        again: Callable[[int, int], Row] | None = None,
    ):
        """Take the rows and, where words are cut anew, what reads row i by a key."""
        self.rows, self.settings, self.again = rows, settings, again
        self.reader = reader
        lengths = np.array([len(row.ids) for row in rows])
        self.batches = Batches([lengths], settings.batch_tokens, settings.seed, settings.batch_rows)

    def __getitem__(self, n: int) -> tuple[np.ndarray, list[Row], Read]:
        """Return which rows batch n holds, and the rows."""
        picked = self.batches[n]
        chance = np.random.Generator(np.random.PCG64([self.settings.seed % 2**64, n, 2]))
        rows = [self._hide(self._row(int(i), n), chance) for i in picked]
        return picked, rows, collate(rows, self.reader.tokenizer.pad, self.settings.device)

    def _row(self, i: int, n: int) -> Row:
        if self.again is None:
            return self.rows[i]
        row = self.again(i, mix(self.settings.seed, n, i))
        return row if not row.cut else self.rows[i]

    def _hide(self, row: Row, chance: np.random.Generator) -> Row:
        ids, owner, types, cut = row
        if share := self.settings.word_dropout:
            hidden = chance.random(int(owner.max(initial=-1)) + 2) < share
            hidden[-1] = False  # what is around the words is always seen
            ids = np.where(hidden[owner], self.reader.blank, ids)
            if types is not None and self.reader.alone:
                types = np.where(hidden[owner][:, None], 0, types)
        if types is not None and (share := self.settings.feature_dropout):
            types = np.where(chance.random(types.shape) < share, 0, types)
        return Row(ids, owner, types, cut)


def sampler_of(settings: LabelSettings, tokenizer: Any) -> Any:
    """Return what cuts words by BPE dropout, if that is wished."""
    if not settings.bpe_dropout:
        return None
    return tokenizer.sampler(settings.bpe_dropout, settings.seed)


def reader_of(config: Mapping[str, Any], folder: Path, model: Any, tokenizer: Any) -> Reader:
    """Check what lies beside a model in its folder, and return how it reads."""
    features = None
    if config.get("features", "none") != "none":
        features = Features.load(folder)
        if features.size != model.config.types:
            raise UsageError(
                f"{folder}: {features.size - 1} known features, "
                f"but the model has places for {model.config.types - 1}"
            )
    if tokenizer.vocab > model.config.vocab:
        raise UsageError(
            f"{folder}: the tokenizer has {tokenizer.vocab} pieces, "
            f"the model only {model.config.vocab}"
        )
    return Reader(tokenizer, features)


def longest_of(config: Mapping[str, Any], folder: Path, model: Any) -> int:
    """Check and return how many pieces a model reads at once."""
    most = model.config.max_length
    longest = config.get("max_length", most)
    if not isinstance(longest, int) or isinstance(longest, bool) or not 1 <= longest <= most:
        raise UsageError(
            f"{folder / 'config.json'}: 'max_length' is {longest!r:.40}; expected 1 to {most}"
        )
    return longest
