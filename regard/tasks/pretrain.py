"""Training encoders of images without labels: by what is masked, by two views, by captions."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.data.augment import Ways, augments, chance_of
from regard.data.batches import Shuffled, pad
from regard.data.image_files import BROKEN
from regard.data.image_format import ImageFormat
from regard.data.images import ImageData, Images, load_images
from regard.data.labelled import hash_items
from regard.data.pairs import PairReader
from regard.data.parts import named_files
from regard.data.tokenize import train_tokenizer
from regard.errors import UsageError, lookup
from regard.files import cache_folder
from regard.models import family, pretrainer
from regard.models.folder import save_parts
from regard.settings import describe
from regard.tasks import images as classify
from regard.tasks.images import SightSettings, family_of, format_wanted, options_of
from regard.tasks.labelling import Reader
from regard.tasks.probe import Known, by_neighbours, vectors
from regard.tasks.run import (
    Data,
    Report,
    Work,
    build_model,
    resolve_task,
    save_tokenizer,
    settings_with,
    settle_tokenizer,
    shape_of,
    size_of,
    train_task,
)
from regard.training.loop import Trainable, at_least, mix

NAME = "pretrain"
# objective -> family -> what is built around an encoder to train it; "" is any other family
OBJECTIVES: dict[str, dict[str, str]] = {
    "masked": {"vit": "mae", "swin": "simmim"},
    "contrastive": {"": "simclr"},
    "clip": {"": "clip"},
}
# what an objective means for training, and then what a size does
DEFAULTS: dict[str, dict[str, Any]] = {
    "masked": {"augment": "flip+crop", "batch": 256},
    "contrastive": {"augment": "zoom+flip+jitter+grey", "batch": 256},
    "clip": {"augment": "flip+crop", "batch": 128},
}
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"lr": 0.002, "steps": 6000},
    "small": {"lr": 0.0015, "steps": 15_000},
    "base": {"lr": 0.001, "steps": 40_000},
    "big": {"lr": 0.0005, "steps": 100_000},
}
# the text encoder of CLIP: depth, width and heads
TEXTS = {"tiny": (2, 128, 2), "small": (3, 192, 3), "base": (4, 256, 4), "big": (6, 384, 6)}
SHORT: dict[str, str | tuple[str, ...]] = {
    **classify.SHORT,
    "mask_share": "way.mask_share",
    "target": "way.target",
    "decoder_depth": "way.depth",
    "decoder_width": "way.block.width",
    "decoder_heads": "way.block.heads",
    "temperature": "way.temperature",
    "meet_width": "way.width",
    "max_length": "way.text.max_length",
}
KNOWN, ASKED = 5000, 1000  # images by which neighbours are judged while training
VALID = 7  # the chance of what is validated on
MAEConfig, _ = pretrainer("mae")


@dataclass(frozen=True)
class PretrainSettings(SightSettings):
    """Everything that a run that learns from images without labels can be told."""

    objective: str = field(
        default="masked", metadata={"help": "masked, contrastive, or clip with captions"}
    )
    least: float = field(
        default=0.2, metadata={"help": "share of an image that zoom keeps", "above": 0, "max": 1}
    )
    pieces: int = field(default=4000, metadata=at_least(300, "of the captions' words", 99_999))
    way: MAEConfig = field(default_factory=MAEConfig)  # type: ignore[valid-type]


def way_of(by: str, model: Any, size: str) -> Any:
    """Return the config of what is built around a model of a size."""
    way: Any = pretrainer(by)[0]()
    if by == "mae":
        half = model.block.width // 2
        narrow = half % model.block.heads == 0 and model.block.head_width is None
        parts = {"width": half, "ffn_width": 2 * half} if narrow else {}
        return replace(way, block=replace(model.block, dropout=0.0, **parts))
    if by == "clip":
        depth, width, heads = TEXTS.get(size, TEXTS["big"])
        block = replace(way.text.block, width=width, heads=heads, ffn_width=4 * width)
        return replace(way, text=replace(way.text, depth=depth, block=block), width=width)
    return way


def resolve(values: Mapping[str, Any]) -> PretrainSettings:
    """Make full settings of what a user gave: the size fills in what is not said."""
    objective, name, size = values.get("objective", "masked"), family_of(values), size_of(values)
    ways = lookup("objective", str(objective), OBJECTIVES)
    by = ways.get(name) or ways.get("")
    if by is None:
        raise UsageError(
            f"objective={objective} is for family={' and '.join(ways)}, not {name}; choose one of "
            "them, or objective=contrastive"
        )
    if values.get("like") and values.get("init"):
        raise UsageError(
            f"like={values['like']} is for a new model; the one in init= has its parts already"
        )
    row = [str(values["like"])] if values.get("like") else []
    model = shape_of(name, values, *row, labels=0)
    if by == "mae" and not values.get("init"):
        model = replace(model, pool="mean")  # no other vector is about all patches
    way = way_of(by, model, size)
    kind = settings_with(PretrainSettings, model=family(name)[0], way=pretrainer(by)[0])
    known = {each.key for each in describe(kind)}
    said = {**DEFAULTS[str(objective)], "way": way}
    sizes = {each: {**row, **said} for each, row in SIZES.items()}
    settings = resolve_task(
        kind,
        {**values, "family": name},
        model=model,
        sizes={size: sizes["big"], **sizes},
        short={key: long for key, long in SHORT.items() if long in known},
        of="images and captions" if by == "clip" else "images",
    )
    augments(settings.augment)
    lookup("broken", settings.broken, BROKEN)
    if settings.batch < 2 and by != "mae":
        raise UsageError(f"batch={settings.batch}; there must be others to tell an image from")
    if settings.model.labels:  # type: ignore[attr-defined]
        raise UsageError("model.labels is for training with labels: regard train classify")
    return settings


# Data


def read_pictures(settings: PretrainSettings, *, labelled: bool = True) -> ImageData:
    """Read the images to train and to validate on, with their labels if they have some.

    Labels are never learnt from: by them neighbours are judged.
    """
    assert settings.data is not None
    options = options_of(settings)

    def load(labelled: bool) -> ImageData:
        return load_images(
            str(settings.data),
            valid=settings.valid,
            test=settings.test,
            format=format_wanted(settings),
            options=replace(options, labelled=labelled),
            cache=cache_folder(),
        )

    try:
        data = load(labelled)
    except UsageError:
        if not labelled:
            raise
        data = load(False)
    train = data.parts["train"]
    if not 2 <= len(data.classes) <= len(train) // 2:
        data.classes = []
    if settings.share < 1:
        data.parts["train"] = some = train.part(settings.share)
        data.notes.append(f"share={settings.share}: {len(some):,} of {len(train):,} images used")
    return data


def captions_in(
    path: Path, part: str, columns: str | None, header: bool | None = None
) -> dict[str, list[str]]:
    """Read the captions of each image in a table, or in that of a part, by the path of its file."""
    tables = named_files(path).get(part, []) if path.is_dir() else [path]
    found: dict[str, list[str]] = {}
    for table in tables:
        for pair in PairReader(table, columns=columns, header=header):
            found.setdefault(str(table.parent / pair.source), []).append(pair.target)
    return found


def read_captions(settings: PretrainSettings) -> dict[str, list[str]]:
    """Read all captions to train and to validate on."""
    data, valid = Path(str(settings.data)), settings.valid
    found: dict[str, list[str]] = {}
    for part in ("train", "valid") if data.is_dir() else ("train",):
        found |= captions_in(data, part, settings.columns, settings.header)
    if valid:
        beside = (data if data.is_dir() else data.parent) / valid
        for path in [path for path in (Path(valid), beside) if path.is_file()][:1]:
            found |= captions_in(path, "valid", settings.columns, settings.header)
    if not found:
        raise UsageError(
            f"{data}: no table of images and captions; expected a TSV of paths and captions, or a "
            "folder with train.tsv"
        )
    return found


def of_part(images: Images, captions: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Return the captions of each image of a part."""
    return [list(captions.get(images.where(i), [""])) for i in range(len(images))]


def said(images: Images, captions: Mapping[str, Sequence[str]]) -> list[tuple[str, list[str]]]:
    """Return what tells each image of a part from all others, and its captions."""
    return list(zip(images.hashes, of_part(images, captions), strict=True))


# Tasks as the training loop sees them


class Pretraining(Trainable):
    """What all ways share: images that are changed at random, and neighbours to judge by."""

    def __init__(self, data: ImageData, settings: PretrainSettings, tokens: int):
        """Take the images, and how many tokens one comes to."""
        self.train, self.valid = data.parts["train"], data.parts["valid"]
        self.settings, self.format, self.tokens = settings, data.format, tokens
        self.classes = len(data.classes)
        self.rows = min(settings.batch, len(self.train))
        self.shuffled = Shuffled(len(self.train), self.rows, settings.seed)
        self.changes = augments(settings.augment)
        assert self.format.size is not None
        padding = self.format.size // 8 if settings.padding is None else settings.padding
        self.ways = Ways(padding, settings.strength, settings.least)

    def view(self, pixels: Tensor, chance: np.random.Generator) -> Tensor:
        """Change images at random, and bring them to what the model reads."""
        for change in self.changes:
            pixels = change(pixels, chance, self.ways)
        return self.format.normalise(pixels.to(self.settings.device))

    def make(self, part: Images, picked: np.ndarray, chance: np.random.Generator) -> Any:
        """Return what the model is asked of some images."""
        raise NotImplementedError

    def batch(self, n: int) -> Any:
        """Return batch n, always the same for the same seed and n."""
        return self.make(self.train, self.shuffled[n], chance_of(self.settings.seed, n))

    def epoch(self) -> float:
        """Return in how many batches all images are read once."""
        return len(self.train) / self.rows

    def count(self, batch: Any) -> tuple[int, int]:
        """Return the images, which the loss counts, and the tokens that they come to."""
        return len(batch[0]), len(batch[0]) * self.tokens

    def loss(self, model: Any, batch: Any) -> Tensor:
        """Return the summed loss of a batch."""
        return model.loss(*batch)

    @torch.inference_mode()
    def evaluate(self, model: Any) -> dict[str, float]:
        """Return the loss on the validation part, and how often neighbours have the same label."""
        total = 0.0
        # batches as large as in training, as others of the batch matter
        parts = np.array_split(np.arange(len(self.valid)), -(-len(self.valid) // self.rows))
        for number, part in enumerate(parts):
            chance = chance_of(self.settings.seed, number, VALID)
            total += float(model.loss(*self.make(self.valid, part, chance)))
        scores = {"loss": total / len(self.valid)}
        if self.classes:
            scores["neighbours"] = self.neighbours(model.encoder)
        return {**scores, "better": -scores["loss"]}

    def neighbours(self, encoder: Any) -> float:
        """Return the accuracy of the labels that nearest neighbours vote for."""
        every = max(1, len(self.train) // KNOWN)
        known = self.train.pick(np.arange(0, len(self.train), every)[:KNOWN])
        asked = self.valid.pick(np.arange(min(ASKED, len(self.valid))))
        theirs, ours = (vectors(encoder, part, self.format) for part in (known, asked))
        chances = by_neighbours(Known(theirs, known.labels, self.classes), ours)
        return 100 * float((chances.argmax(1) == asked.labels).float().mean())


class Painting(Pretraining):
    """Masks are drawn anew for each image at each step."""

    def __init__(self, data: ImageData, settings: PretrainSettings, tokens: int, units: int):
        """Take how many pieces of an image there are to mask."""
        super().__init__(data, settings, tokens)
        self.units = units

    def make(
        self, part: Images, picked: np.ndarray, chance: np.random.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return images, and noise that decides what of them is masked."""
        images = self.view(part.read(picked), chance)
        noise = torch.from_numpy(chance.random((len(images), self.units), np.float32))
        return images, noise.to(images.device)


class Views(Pretraining):
    """Each image is changed in two ways."""

    def make(
        self, part: Images, picked: np.ndarray, chance: np.random.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return two views of images."""
        pixels = part.read(picked)
        return self.view(pixels, chance), self.view(pixels, chance)


class Captioned(NamedTuple):
    """The captions of each image of a part, as ids."""

    rows: list[list[np.ndarray]]

    @classmethod
    def read(cls, captions: list[list[str]], reader: Reader, longest: int) -> "Captioned":
        """Cut captions into pieces."""
        rows = iter(reader.texts([text for some in captions for text in some], longest))
        return cls([[next(rows).ids for _ in some] for some in captions])


class Captions(Pretraining):
    """Each image comes with one of its captions."""

    def __init__(
        self,
        data: ImageData,
        settings: PretrainSettings,
        tokens: int,
        captions: Mapping[str, Captioned],
        padding: int,
    ):
        """Take the captions of train and valid, and the id that fills short ones up."""
        super().__init__(data, settings, tokens)
        self.captions, self.padding = captions, padding

    def make(
        self, part: Images, picked: np.ndarray, chance: np.random.Generator
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return images, and the ids and lengths of a caption of each."""
        rows = self.captions["train" if part is self.train else "valid"].rows
        chosen = [rows[i][chance.integers(len(rows[i]))] for i in picked.tolist()]
        ids, lengths = pad(chosen, self.padding)
        device = self.settings.device
        return self.view(part.read(picked), chance), ids.to(device), lengths.to(device)

    @torch.inference_mode()
    def evaluate(self, model: Any) -> dict[str, float]:
        """Return the loss, and how often what belongs together is found on the validation part."""
        found = super().evaluate(model)
        images = meeting_images(model, self.valid, self.format)
        rows = self.captions["valid"].rows
        texts = meeting_texts(model, [row for some in rows for row in some], self.padding)
        recalls = recall(images @ texts.mT, [len(some) for some in rows])
        mean = sum(recalls.values()) / len(recalls)
        return {**found, "recall": mean, **recalls, "better": mean}


@torch.inference_mode()
def meeting_images(model: Any, part: Images, format: ImageFormat, batch: int = 256) -> Tensor:
    """Return the vectors of images where they meet texts."""
    device = next(model.parameters()).device
    parts = np.split(np.arange(len(part)), range(batch, len(part), batch))
    found = [model.images(format.normalise(part.read(p).to(device))) for p in parts]
    return torch.cat(found).cpu()


@torch.inference_mode()
def meeting_texts(model: Any, rows: Sequence[np.ndarray], padding: int, batch: int = 256) -> Tensor:
    """Return the vectors of texts where they meet images."""
    device = next(model.parameters()).device
    parts = [pad(rows[i : i + batch], padding) for i in range(0, len(rows), batch)]
    found = [model.texts(ids.to(device), lengths.to(device)) for ids, lengths in parts]
    return torch.cat(found).cpu()


def recall(near: Tensor, counts: Sequence[int], among: Sequence[int] = (1, 5, 10)) -> dict:
    """Return how often the right one is among the first, in percent: a text of each image, and its
    image of each text.

    near is (images, texts), the texts of the first image first; counts says how many each has.
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


# Training


def train(values: Mapping[str, Any], *, quiet: bool = False, recipe: str | None = None) -> Report:
    """Train an encoder of images in a folder, or go on with one that was begun there."""
    settings = resolve(values)
    by = next(
        by for key, by in OBJECTIVES[settings.objective].items() if key in ("", settings.family)
    )
    texts: dict[str, list[str]] = {}

    def read() -> Data:
        data = read_pictures(settings, labelled=by != "clip")
        sha = data.sha
        if by == "clip":
            texts.update(read_captions(settings))
            told = [pair for part in data.parts.values() for pair in said(part, texts)]
            sha = hash_items([(sha, ""), *told])
        return Data(data, sha, data.notes, data.split)

    def prepare(data: Data, folder: Path, begun: dict[str, Any] | None) -> Work:
        found: ImageData = data.parts
        if not found.format.mean:
            mean, std = found.parts["train"].channel_stats()
            found.format = replace(found.format, mean=mean, std=std)
        format, way = found.format, settings.way
        assert format.size is not None
        config: Any = settings.model
        if not settings.init:
            config = replace(config, channels=format.channels, image=format.size)
        encoder = build_model(settings.family, config, settings, fresh="head.")
        height, width = encoder.grid((format.size, format.size))
        tokenizer: Any = None
        mine: dict[str, list[list[str]]] = {}
        if by == "clip":
            mine = {name: of_part(part, texts) for name, part in found.parts.items()}
            every = [text for some in mine["train"] for text in some]
            tokenizer = settle_tokenizer(
                folder,
                replace(settings, init=None),
                begun,
                lambda: train_tokenizer(every, vocab=settings.pieces),
            )
            way = replace(way, text=replace(way.text, vocab=tokenizer.vocab, head="none"))
        torch.manual_seed(mix(settings.seed, "around"))
        model: Any = pretrainer(by)[1](encoder, way).to(settings.device)
        if by == "clip":
            reader, longest = Reader(tokenizer), way.text.max_length
            rows = {name: Captioned.read(mine[name], reader, longest) for name in mine}
            task = Captions(found, settings, height * width, rows, tokenizer.pad)
        elif by == "simclr":
            task = Views(found, settings, height * width)
        else:
            units = height * width
            if not model.masks(units):
                raise UsageError(
                    f"mask_share={way.mask_share} masks none of the {units} pieces of an image; "
                    "choose a larger share or a smaller patch"
                )
            task = Painting(found, settings, units, units)
        return Work(
            settings.family,
            model,
            task,
            f"An encoder of images ({settings.family}), trained by {by} without labels",
            about={"image": asdict(format), "pretraining": {"by": by, **asdict(way)}},
            facts={
                "images": len(found.parts["train"]),
                **({"tokenizers": [tokenizer.sha]} if tokenizer is not None else {}),
            },
            save=lambda folder: save_tokenizer(folder, tokenizer) if tokenizer else None,
            dynamic=by == "clip",
            kept=encoder,
            publish=save_parts,
        )

    return train_task(
        NAME, values, settings, read=read, prepare=prepare, recipe=recipe, quiet=quiet
    )
