"""Pretraining by masks, views, captions or rebuilding: settings, batches, and retrieval."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.data.augment import AugmentOptions, augments, step_rng
from regard.data.batches import Shuffled, moved, pad
from regard.data.captions import CaptionData
from regard.data.image_format import ImageFormat
from regard.data.images import Images
from regard.data.tokenizer import Tokenizer
from regard.errors import UsageError, lookup
from regard.models import info, pretrainer, serving
from regard.models.protocols import DualEncoder, MaskedPretrainer, Pretrainer
from regard.settings import setting
from regard.tasks.frame.media import MediaCodec
from regard.tasks.vision.images import RunImages
from regard.tasks.vision.photos import ImageTrainSettings
from regard.viewer.settings import ImageLookSettings

MAEConfig, _ = pretrainer("mae")
# objective -> what it means for training
PRETRAIN_OBJECTIVES: dict[str, dict[str, Any]] = {
    "masked": {"augment": "flip+crop", "batch": 256},
    "contrastive": {"augment": "zoom+flip+jitter+grey", "batch": 256},
    "clip": {"augment": "flip+crop", "batch": 128},
    "variational": {"augment": "none", "batch": 128},
}
# what any encoder can be trained by; others are named by the family
ENCODER_PRETRAINERS = {"contrastive": "simclr", "clip": "clip", "variational": "vae"}
# the text encoder of CLIP: depth, width and heads
_TEXT_SIZES = {"tiny": (2, 128, 2), "small": (3, 192, 3), "base": (4, 256, 4), "big": (6, 384, 6)}
_VALID = 7  # the stream of random numbers for validation


@dataclass(frozen=True)
class TrainPretrain(ImageTrainSettings):
    """What a training without labels can be told."""

    objective: str = setting(
        "masked", "training objective; clip by captions", choices=PRETRAIN_OBJECTIVES
    )
    least: float = setting(
        0.2, "minimum share of the image that a random crop keeps", above=0, max=1
    )
    pieces: int = setting(4000, "vocabulary size of the captions", min=300, max=99_999)
    pretrainer: MAEConfig = field(default_factory=MAEConfig)  # type: ignore[valid-type]


@dataclass(frozen=True)
class RunPretrain(RunImages):
    """How to embed images, or to choose among texts."""

    texts: str | None = setting(None, "texts to choose from, separated by |: a dog|a cat")


@dataclass(frozen=True)
class LookPretrain(ImageLookSettings):
    """What to see of how an image is read."""

    view: str = setting(
        "attention",
        "view of the attention, or the reconstruction of masked patches",
        choices=lambda: (*import_module("regard.viewer.image").VIEWS, "rebuilt"),
    )
    seed: int = setting(1, "random seed of the mask, with view=rebuilt", min=0, max=2**31)


def pretrainer_of(objective: str, name: str) -> str:
    """Return what is built around an encoder of a family to train it by an objective."""
    lookup("objective", objective, PRETRAIN_OBJECTIVES)
    by = info(name).pretrainers.get(objective) or ENCODER_PRETRAINERS.get(objective)
    if by is None:
        known = [each for each in serving("pretrain") if objective in info(each).pretrainers]
        raise UsageError(
            f"objective={objective} is for family={' and '.join(known)}, not {name}; choose one of "
            "them, or objective=contrastive"
        )
    return by


def pretrainer_config(by: str, encoder: Any, size: str) -> Any:
    """Return the config of what is built around an encoder of a size."""
    config: Any = pretrainer(by)[0]()
    if by == "mae":
        half = encoder.block.width // 2
        narrow = half % encoder.block.heads == 0 and encoder.block.head_width is None
        parts = {"width": half, "ffn_width": 2 * half} if narrow else {}
        return replace(config, block=replace(encoder.block, dropout=0.0, **parts))
    if by == "clip":
        depth, width, heads = _TEXT_SIZES.get(size, _TEXT_SIZES["big"])
        block = replace(config.text.block, width=width, heads=heads, ffn_width=4 * width)
        return replace(config, text=replace(config.text, depth=depth, block=block), width=width)
    return config


def around_config(settings: TrainPretrain, tokenizer: Tokenizer | None) -> Any:
    """Return the config of what trains the encoder, with the vocabulary of its captions."""
    if tokenizer is None:
        return settings.pretrainer
    text = replace(settings.pretrainer.text, vocab=tokenizer.vocab, head="none")
    return replace(settings.pretrainer, text=text)


class PretrainBatches:
    """Batch n of images that are changed at random, a pure function of (seed, n)."""

    def __init__(
        self,
        images: CaptionData,
        settings: TrainPretrain,
        tokens: int,
        model: Pretrainer,
        codec: MediaCodec,
    ):
        """Take the images with their captions, and how many tokens an image has."""
        self.train, self.valid = images["train"], images["valid"]
        self.settings, self.format, self.tokens, self.model = settings, codec.format, tokens, model
        self.batch = min(settings.batch, len(self.train))
        self.shuffled = Shuffled(len(self.train), self.batch, settings.seed)
        self.changes = augments(settings.augment)
        assert self.format.size is not None
        padding = self.format.size // 8 if settings.padding is None else settings.padding
        self.strengths = AugmentOptions(padding, settings.strength, settings.least)
        self.take_captions(images.captions, model, codec)

    def take_captions(
        self, captions: Mapping[str, list[list[str]]], model: Pretrainer, codec: MediaCodec
    ) -> None:
        """Keep the captions of each part, where the model's loss takes them."""

    def view(self, pixels: Tensor, rng: np.random.Generator) -> Tensor:
        """Augment images at random, and normalise them."""
        for change in self.changes:
            pixels = change(pixels, rng, self.strengths)
        return self.format.normalise(pixels)

    def make(self, part: Images, picked: np.ndarray, rng: np.random.Generator) -> Any:
        """Return what the model's loss takes for some images."""
        raise NotImplementedError

    def __getitem__(self, n: int) -> Any:
        """Return batch n."""
        return self.make(self.train, self.shuffled[n], step_rng(self.settings.seed, n))

    def epoch(self) -> float:
        """Return in how many batches all images are read once."""
        return len(self.train) / self.batch

    @torch.inference_mode()
    def validation_loss(self, model: Pretrainer) -> float:
        """Return the mean loss on the validation part, in batches as large as in training."""
        total = 0.0
        parts = np.array_split(np.arange(len(self.valid)), -(-len(self.valid) // self.batch))
        for number, part in enumerate(parts):
            rng = step_rng(self.settings.seed, number, _VALID)
            made = moved(self.make(self.valid, part, rng), self.settings.device)
            total += float(model.loss(*made))
        return total / len(self.valid)


class MaskedImageBatches(PretrainBatches):
    """Masks are drawn anew for each image at each step (He et al. 2022, Xie et al. 2022)."""

    def __init__(
        self,
        images: CaptionData,
        settings: TrainPretrain,
        tokens: int,
        model: MaskedPretrainer,
        *rest: Any,
    ):
        super().__init__(images, settings, tokens, model, *rest)
        if not model.masked_count(tokens):
            raise UsageError(
                f"mask_share={settings.pretrainer.mask_share} masks none of the {tokens} pieces "
                "of an image; choose a larger share or a smaller patch"
            )

    def make(self, part: Images, picked: np.ndarray, rng: np.random.Generator) -> Any:
        """Return images, and noise that decides which of their patches are masked."""
        images = self.view(part.read(picked), rng)
        noise = torch.from_numpy(rng.random((len(images), self.tokens), np.float32))
        return images, noise


class ViewBatches(PretrainBatches):
    """Two views of each image (SimCLR, Chen et al. 2020)."""

    def make(self, part: Images, picked: np.ndarray, rng: np.random.Generator) -> Any:
        """Return two views of images."""
        pixels = part.read(picked)
        return self.view(pixels, rng), self.view(pixels, rng)


class NoiseBatches(PretrainBatches):
    """Noise by which the vector of each image is drawn (Kingma and Welling 2014)."""

    def make(self, part: Images, picked: np.ndarray, rng: np.random.Generator) -> Any:
        """Return images, and noise of variance 1."""
        images = self.view(part.read(picked), rng)
        shape = len(images), self.model.config.latent
        return images, torch.from_numpy(rng.standard_normal(shape, np.float32))


class ClipBatches(PretrainBatches):
    """Each image with one of its captions (CLIP, Radford et al. 2021)."""

    def take_captions(
        self, captions: Mapping[str, list[list[str]]], model: Pretrainer, codec: MediaCodec
    ) -> None:
        """Tokenise all captions once."""
        assert codec.tokenizer is not None
        self.pad, longest = codec.tokenizer.pad, model.config.text.max_length
        self.rows: dict[str, list[np.ndarray]] = {}
        self.captions: dict[str, list[list[np.ndarray]]] = {}
        for name, texts in captions.items():
            flat = [text for some in texts for text in some]
            self.rows[name] = text_rows(flat, codec.tokenizer, longest)
            rest = iter(self.rows[name])
            self.captions[name] = [[next(rest) for _ in some] for some in texts]

    def make(self, part: Images, picked: np.ndarray, rng: np.random.Generator) -> Any:
        """Return images, and the ids and lengths of a caption of each."""
        rows = self.captions["train" if part is self.train else "valid"]
        chosen = [rows[i][rng.integers(len(rows[i]))] for i in picked.tolist()]
        ids, lengths = pad(chosen, self.pad)
        return self.view(part.read(picked), rng), ids, lengths


PRETRAIN_BATCHES: dict[str, type[PretrainBatches]] = {
    "mae": MaskedImageBatches,
    "simmim": MaskedImageBatches,
    "simclr": ViewBatches,
    "clip": ClipBatches,
    "vae": NoiseBatches,
}


def text_rows(texts: Sequence[str], tokenizer: Tokenizer, longest: int) -> list[np.ndarray]:
    """Cut texts into ids, each framed as an encoder reads it."""
    before, after = tokenizer.around("encoder")
    room = max(1, longest - len(before) - len(after))
    rows = tokenizer.encode_batch(texts)
    return [np.array([*before, *ids[:room], *after], dtype=np.int64) for ids in rows]


@torch.inference_mode()
def image_vectors(
    model: DualEncoder, part: Images, format: ImageFormat, batch: int = 256
) -> Tensor:
    """Return the vectors of images in the space that they share with texts."""
    device = next(model.parameters()).device
    parts = np.split(np.arange(len(part)), range(batch, len(part), batch))
    rows = [model.images(format.normalise(part.read(p).to(device))) for p in parts]
    return torch.cat(rows).cpu()


def texts_to_choose(given: str, n_best: int) -> list[str]:
    """Return the texts to choose from that a user gave with | between, or refuse them."""
    texts = [text.strip() for text in str(given).split("|")]
    if len(texts) < 2 or not all(texts) or len(set(texts)) < len(texts):
        raise UsageError(f"texts={given!s:.40}; expected two or more, as in texts='a dog|a cat'")
    if n_best > len(texts):
        raise UsageError(f"n_best={n_best} is more than the {len(texts)} texts")
    return texts


def repaint(
    model: MaskedPretrainer, images: Tensor, format: ImageFormat, seed: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Mask some of normalised images, and return what a model paints and which pixels these are."""
    height, width = model.size(images)
    noise = step_rng(seed, 0).random((len(images), height * width), np.float32)
    painted, masked = model.reconstruct(images, torch.from_numpy(noise).to(images.device))
    shown = format.restore(painted).permute(0, 2, 3, 1).cpu().numpy()
    return list(zip(shown, masked[:, 0].cpu().numpy(), strict=True))


@torch.inference_mode()
def text_vectors(
    model: DualEncoder, rows: Sequence[np.ndarray], padding: int, batch: int = 256
) -> Tensor:
    """Return the vectors of texts in the space that they share with images."""
    device = next(model.parameters()).device
    parts = [pad(rows[i : i + batch], padding) for i in range(0, len(rows), batch)]
    found = [model.texts(ids.to(device), lengths.to(device)) for ids, lengths in parts]
    return torch.cat(found).cpu()


def recall_at_k(
    near: Tensor, counts: Sequence[int], among: Sequence[int] = (1, 5, 10)
) -> dict[str, float]:
    """Return how often the right one is among the first k, in percent.

    That is a text of each image, and the image of each text. near is (images, texts), the texts of
    the first image first; counts says how many each has.
    """
    own = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    mine = own == torch.arange(len(counts))[:, None]
    best = near.masked_fill(~mine, -torch.inf).amax(1, keepdim=True)
    text_rank = ((near > best) & ~mine).sum(1)
    right = near[own, torch.arange(len(own))]
    image_rank = (near > right).sum(0)
    ranks = {"text": text_rank, "image": image_rank}
    return {
        f"{name}@{k}": 100 * float((rank < k).float().mean())
        for name, rank in ranks.items()
        for k in among
    }
