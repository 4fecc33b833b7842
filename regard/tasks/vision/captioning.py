"""Captions as a captioner learns them: settings, batches of images and captions, losses."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from regard.data.augment import AugmentOptions, augments, step_rng
from regard.data.batches import Shuffled, moved, pad
from regard.data.image_format import ImageFormat
from regard.data.images import Images
from regard.data.tokenize import TOKENIZERS
from regard.data.tokenizer import Tokenizer
from regard.decode.options import Decoding
from regard.errors import UsageError
from regard.metrics.bleu import BLEU
from regard.metrics.interval import paired
from regard.metrics.score import Score
from regard.models import family
from regard.models.protocols import TextModel
from regard.settings import setting
from regard.tasks.frame.answers import RankedText
from regard.tasks.frame.settings import derived
from regard.tasks.vision.photos import ImageEvalSettings, ImageRunSettings, ImageTrainSettings
from regard.training.loss import linear_cross_entropy, true_places
from regard.viewer.settings import ImageLookSettings

CAPTIONER = "captioner"
DecoderConfig = type(family(CAPTIONER)[0]().decoder)
_MAX_LENGTH = 64  # tokens of a caption, unless told
_POOL = 16  # batches whose images are sorted by the length of their captions
_SIDES = re.compile(r"\b(left|right)\b", re.IGNORECASE)


@dataclass(frozen=True)
class TrainCaption(ImageTrainSettings):
    """What a training of a captioner can be told."""

    blind: bool = setting(False, "train without images, as a baseline")
    captions: int = setting(5, "captions per image in a batch", min=1, max=100)
    lowercase: bool = setting(True, "write in lower case")
    tokenizer: str = setting("bpe", "tokenizer", choices=TOKENIZERS)
    pieces: int = setting(4000, "vocabulary size", min=300, max=99_999)
    max_length: int = setting(_MAX_LENGTH, "maximum tokens of a caption", min=1, max=10_000)
    label_smoothing: float = setting(0.1, "label smoothing", min=0, max=0.9)
    doubly_stochastic: float = setting(
        0.0, "weight of the doubly stochastic penalty; recurrent decoders", min=0, max=1000
    )
    encoder_rate: float = setting(1.0, "learning-rate factor of the encoder", above=0, max=1)
    valid_images: int = setting(500, "images captioned at a validation", min=0, group="length")
    batch: int = 32
    decoder: DecoderConfig = field(default_factory=DecoderConfig)  # type: ignore[valid-type]


@dataclass(frozen=True)
class RunCaption(derived("RunCaption", ImageRunSettings, Decoding)):
    """How to write captions."""

    alpha: float | None = setting(None, "exponent of the length penalty", min=0, max=10)
    max_length: int = setting(_MAX_LENGTH, "maximum tokens of a caption", min=1, max=10_000)
    scores: bool = setting(False, "print the score of each caption")
    prefix: str = setting("", "prefix of every caption")


@dataclass(frozen=True)
class EvalCaption(derived("EvalCaption", ImageEvalSettings, RunCaption)):
    """What to judge captions on, and how."""

    data: str | None = setting(None, "a folder or table of images and captions", group="data")
    columns: str | None = setting(None, "path and caption, such as 2,1", group="data")
    tokenise: str | None = setting(
        None, "sacreBLEU tokenisation", choices=BLEU.TOKENIZERS, group="scores"
    )
    lowercase: bool = setting(True, "ignore case", group="scores")
    shuffle: bool = setting(
        False, "also give the loss of each caption with another image", group="scores"
    )


@dataclass(frozen=True)
class LookCaption(ImageLookSettings):
    """What to see of how a caption came about."""

    view: str = setting(
        "words",
        "where each word looked, a view of the encoder's attention, or the first filters",
        choices=lambda: ("words", *import_module("regard.viewer.image").VIEWS),
    )
    candidates: int = setting(5, "tokens to show for each step", min=1, max=1000)
    beam: int = setting(5, "beam size; 1 is greedy", min=1, max=1000)
    caption: str | None = setting(None, "a given caption, instead of the model's own")


@dataclass
class Caption(RankedText):
    """A caption with its score; `others` are the next best."""


def tidy(text: str, lowercase: bool) -> str:
    """Return a caption as it is learnt: single spaces, and lower case if told."""
    text = " ".join(text.split())
    return text.lower() if lowercase else text


def encode_captions(
    captions: Sequence[Sequence[str]], tokenizer: Tokenizer, longest: int, lowercase: bool
) -> list[list[np.ndarray]]:
    """Cut the captions of each image into ids, at most so many."""
    texts = [tidy(text, lowercase) for some in captions for text in some]
    rows = iter(tokenizer.encode_batch(texts))
    return [[np.asarray(next(rows)[:longest], np.int64) for _ in some] for some in captions]


class Shifted(NamedTuple):
    """Captions (n, t) as inputs and as targets, as many of each image; -1 is no target."""

    inputs: Tensor
    targets: Tensor


def shift(captions: Sequence[Sequence[np.ndarray]], tokenizer: Tokenizer) -> Shifted:
    """Put captions of images side by side with their begin and end; missing ones are empty."""
    most = max(map(len, captions))
    nothing = np.zeros(0, np.int64)
    rows = [some[n] if n < len(some) else None for some in captions for n in range(most)]
    real = [nothing if row is None else row for row in rows]
    inputs, _ = pad([np.concatenate([[tokenizer.bos], row]) for row in real], tokenizer.pad)
    ended = [nothing if row is None else np.append(row, tokenizer.eos) for row in rows]
    targets, _ = pad(ended, -1)
    return Shifted(inputs, targets)


class CaptionBatch(NamedTuple):
    """Images, and some captions of each one after the other."""

    images: Tensor
    inputs: Tensor
    targets: Tensor
    tokens: int


class CaptionBatches:
    """Batch n of augmented images with their captions, a pure function of (seed, n)."""

    def __init__(
        self,
        train: Images,
        texts: Sequence[Sequence[str]],
        rows: Sequence[Sequence[np.ndarray]],
        settings: TrainCaption,
        format: ImageFormat,
        tokenizer: Tokenizer,
    ):
        """Take the images with their captions, as texts and as ids."""
        self.train, self.rows, self.settings = train, rows, settings
        self.format, self.tokenizer = format, tokenizer
        self.longest = np.array([max(map(len, some)) for some in rows])
        # a mirror image of what is said to be on the left would make the caption a lie
        self.sided = np.array([any(map(_SIDES.search, some)) for some in texts])
        self.size = min(settings.batch, len(train))
        self.shuffled = Shuffled(len(train), _POOL * self.size, settings.seed)
        names = settings.augment.split("+")
        self.changes = dict(zip(names, augments(settings.augment), strict=False))
        assert format.size is not None
        padding = format.size // 8 if settings.padding is None else settings.padding
        self.strengths = AugmentOptions(padding, settings.strength)

    def pick(self, n: int) -> np.ndarray:
        """Return the images of batch n, whose captions are about as long."""
        pool, place = divmod(n, _POOL)
        some = self.shuffled[pool]
        some = some[np.argsort(self.longest[some], kind="stable")]
        order = step_rng(self.settings.seed, pool, 11).permutation(_POOL)
        return some.reshape(_POOL, -1)[order[place]]

    def __getitem__(self, n: int) -> CaptionBatch:
        """Return batch n."""
        picked, rng = self.pick(n), step_rng(self.settings.seed, n)
        pixels = self.train.read(picked)
        for name, change in self.changes.items():
            changed = change(pixels, rng, self.strengths)
            if name == "flip":
                kept = torch.from_numpy(self.sided[picked])[:, None, None, None]
                changed = torch.where(kept, pixels, changed)
            pixels = changed
        captions = []
        for i in picked.tolist():
            rows = self.rows[i]
            captions.append([rows[j] for j in rng.permutation(len(rows))[: self.settings.captions]])
        shifted = shift(captions, self.tokenizer)
        images = self.format.normalise(pixels)
        return CaptionBatch(
            images, *shifted, sum(len(row) + 1 for some in captions for row in some)
        )

    def epoch(self) -> float:
        """Return in how many batches all images are read once."""
        return len(self.train) / self.size


def caption_loss(
    model: TextModel,
    batch: CaptionBatch,
    smoothing: float,
    tape: Any = None,
    doubly_stochastic: float = 0.0,
) -> Tensor:
    """Return the summed cross-entropy of captions; padding never reaches the vocabulary.

    On the tape of where each word attended, hard attention learns by REINFORCE, and the doubly
    stochastic penalty of Xu et al. (2015) asks every place to be attended to once.
    """
    hidden = model.hidden(batch.images, batch.inputs, tape)
    real = batch.targets >= 0
    places = true_places(real, batch.tokens)
    vectors, targets = hidden.flatten(0, 1)[places], batch.targets.flatten()[places]
    weight, bias = model.head.weight, model.head.bias
    loss = linear_cross_entropy(vectors, weight, targets, bias=bias, smoothing=smoothing)
    if tape is not None and tape.log_probs:
        with torch.no_grad():
            each = F.cross_entropy(F.linear(vectors, weight, bias), targets, reduction="none")
        losses = torch.zeros_like(batch.targets, dtype=each.dtype)
        losses.view(-1)[places] = each
        loss = loss + tape.loss(losses, real)
    if tape is not None and doubly_stochastic:
        loss = loss + doubly_stochastic * tape.doubly_stochastic(real)
    return loss


@torch.inference_mode()
def caption_losses(
    model: TextModel,
    images: Images,
    captions: Sequence[Sequence[np.ndarray]],
    format: ImageFormat,
    tokenizer: Tokenizer,
    *,
    seen: np.ndarray | None = None,
    batch: int = 64,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the summed loss of the captions of each image in nats, and their tokens.

    `seen` are the images to look at, if not each its own.
    """
    seen = np.arange(len(images)) if seen is None else seen
    device, head = next(model.parameters()).device, model.head
    losses, tokens = np.zeros(len(images)), np.zeros(len(images))
    for start in range(0, len(images), batch):
        some = range(start, min(len(images), start + batch))
        pixels = format.normalise(images.read(seen[some.start : some.stop]).to(device))
        rows = moved(shift([captions[i] for i in some], tokenizer), device)
        hidden = model.hidden(pixels, rows.inputs)
        each = len(rows.inputs) // len(some)
        for place, i in enumerate(some):
            mine = slice(place * each, (place + 1) * each)
            targets = rows.targets[mine].flatten()
            vectors = hidden[mine].flatten(0, 1)[targets >= 0]
            loss = linear_cross_entropy(vectors, head.weight, targets[targets >= 0], bias=head.bias)
            losses[i], tokens[i] = float(loss), int((targets >= 0).sum())
    return losses, tokens


def derangement(count: int, seed: int) -> np.ndarray:
    """Return a random permutation that moves everything."""
    order = np.random.Generator(np.random.PCG64([seed, count])).permutation(count)
    found = np.empty(count, np.int64)
    found[order] = np.roll(order, 1)
    return found


def loss_scores(
    losses: Callable[..., tuple[np.ndarray, np.ndarray]],
    images: Images,
    rows: Sequence[Sequence[np.ndarray]],
    settings: EvalCaption,
) -> list[Score]:
    """Return the loss a token, and with shuffle= that beside another's image."""
    mine, tokens = losses(images, rows, batch=settings.batch)
    count = f"captions:{sum(map(len, rows))}|tokens:{int(tokens.sum())}"
    scores = [Score("loss", mine.sum() / tokens.sum(), f"nats a token|{count}", 4)]
    if not settings.shuffle:
        return scores
    if len(images) < 2:
        raise UsageError("shuffle=true needs two images or more to exchange")
    other, seed = derangement(len(images), settings.seed), settings.seed
    theirs, _ = losses(images, rows, seen=other, batch=settings.batch)
    gap = paired((theirs / tokens).tolist(), (mine / tokens).tolist())
    assert gap is not None
    sure = f"95%: {gap.mean - gap.half:.4f} to {gap.mean + gap.half:.4f} an image"
    worth = (theirs.sum() - mine.sum()) / tokens.sum()
    return [
        *scores,
        Score("loss, another's image", theirs.sum() / tokens.sum(), count, 4),
        Score("what its own image is worth", worth, f"nats a token|seed:{seed}|{sure}", 4),
    ]
