"""Captioning: from photos with captions to a model that writes what it sees."""

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from regard.data.augment import Ways, augments, chance_of
from regard.data.batches import Shuffled
from regard.data.image_files import BROKEN
from regard.data.image_format import ImageFormat
from regard.data.images import ImageData
from regard.data.labelled import hash_items
from regard.data.tokenize import train_tokenizer
from regard.errors import UsageError, lookup
from regard.models import family, sized
from regard.settings import describe
from regard.tasks import images as classify
from regard.tasks.captions import (
    LONGEST,
    NAME,
    CaptionRunSettings,
    Describer,
    framed,
    judge_captions,
    tidy,
)
from regard.tasks.images import SightSettings, family_of
from regard.tasks.pretrain import of_part, read_captions, read_pictures, said
from regard.tasks.run import (
    Data,
    Report,
    Work,
    resolve_task,
    save_generation,
    save_tokenizer,
    settings_with,
    settle_tokenizer,
    shape_of,
    size_of,
    start_from,
    train_task,
    trained,
)
from regard.tasks.tune import let_learn
from regard.training.loop import Trainable, at_least, mix
from regard.training.loss import vocabulary_loss

FAMILY = "captioner"
CaptionerConfig, Captioner = family(FAMILY)
WriterConfig = type(CaptionerConfig().decoder)
GENERATION = {"beam": 5, "length_penalty": "average", "alpha": 1.0}
# what writes -> the row of the family that has it
WRITERS = {"transformer": "captioner", "recurrent": "show_attend_tell"}
POOL = 16  # batches whose photos are sorted by the length of their captions
FRESH = "decoder."  # how the names of weights begin that no encoder has

# what a size means for training, on top of the sizes of the model
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"lr": 0.001, "steps": 4000},
    "small": {"lr": 0.0007, "steps": 10_000},
    "base": {"lr": 0.0005, "steps": 20_000},
    "big": {"lr": 0.0003, "steps": 60_000},
}
# short keys: what sees has those of other tasks with images, what writes has these
SHORT: dict[str, Any] = {
    **classify.SHORT,
    "decoder": "writer.kind",
    "decoder_depth": "writer.depth",
    "decoder_width": "writer.block.width",
    "decoder_heads": "writer.block.heads",
    "decoder_ffn_width": "writer.block.ffn_width",
    "decoder_position": "writer.position",
    "dropout": ("writer.block.dropout", "writer.cell.dropout"),
    "cell": "writer.cell.cell",
    "cell_width": "writer.cell.width",
    "attention": "writer.cell.attention",
    "normalise": "writer.cell.normalise",
}
SIDES = re.compile(r"\b(left|right)\b", re.IGNORECASE)


@dataclass(frozen=True)
class CaptionSettings(SightSettings):
    """Everything that a captioning run can be told."""

    blind: bool = field(default=False, metadata={"help": "never look: what images are worth"})
    captions: int = field(default=5, metadata=at_least(1, "read of each photo at once", 100))
    lowercase: bool = field(default=True, metadata={"help": "write in small letters"})
    tokenizer: str = field(default="bpe", metadata={"help": "bpe or unigram"})
    pieces: int = field(default=4000, metadata=at_least(300, "of the captions' words", 99_999))
    max_length: int = field(default=LONGEST, metadata=at_least(1, "longest caption", 10_000))
    label_smoothing: float = field(default=0.1, metadata=at_least(0, "spread of the target", 0.9))
    doubly_stochastic: float = field(
        default=0.0, metadata=at_least(0, "pull to look at every place once; recurrent", 1000)
    )
    encoder_rate: float = field(
        default=1.0, metadata={"help": "times lr, of what sees", "above": 0, "max": 1}
    )
    valid_images: int = field(default=500, metadata=at_least(0, "captioned at a validation"))
    batch: int = field(default=32, metadata=at_least(1, "photos a batch", 100_000))
    writer: WriterConfig = field(default_factory=WriterConfig)  # type: ignore[valid-type]


class Origin(NamedTuple):
    """What a run starts from: the family that sees, its config, and that of what writes."""

    family: str
    model: Any
    writer: Any
    whole: bool  # whether what writes is trained already


def origin_of(values: Mapping[str, Any]) -> Origin:
    """Return what to start from: the model in init, an encoder or a captioner, or new ones."""
    size = size_of(values)
    kind = str(values.get("decoder", values.get("writer.kind", "transformer")))
    row = lookup("decoder", kind, WRITERS)
    writer = sized(FAMILY, size if size in SIZES else "big", row).decoder
    if values.get("like") and values.get("init"):
        raise UsageError(
            f"like={values['like']} is for a new model; the one in init= has its parts already"
        )
    if values.get("init"):
        other, config = trained(values["init"])
        if config["family"] == FAMILY:
            seen = other.config.encoder
            return Origin(seen.family, seen.own, other.config.decoder, True)
    name = family_of(values)
    like = [str(values["like"])] if values.get("like") else []
    return Origin(name, shape_of(name, values, *like, labels=0), writer, False)


def resolve(values: Mapping[str, Any]) -> CaptionSettings:
    """Make full settings of what a user gave: the size fills in what is not said."""
    size, origin = size_of(values), origin_of(values)
    kind = settings_with(CaptionSettings, model=family(origin.family)[0])
    known = {each.key for each in describe(kind)}
    sizes = {each: {**row, "writer": origin.writer} for each, row in SIZES.items()}
    sizes = {size: sizes["big"], **sizes}
    given = {**values, "family": origin.family}
    if not origin.whole:  # most of it is new, and learns as fast as if all were
        given = {"lr": sizes[size]["lr"], **given}
    settings = resolve_task(
        kind,
        given,
        model=origin.model,
        sizes=sizes,
        short={
            key: long for key, long in SHORT.items() if isinstance(long, tuple) or long in known
        },
        of="photos and captions",
    )
    augments(settings.augment)
    lookup("broken", settings.broken, BROKEN)
    if settings.doubly_stochastic and not noting(settings):
        raise UsageError(
            f"doubly_stochastic={settings.doubly_stochastic} is for a decoder whose soft attention "
            "can be noted: decoder=recurrent with attention= and normalise=softmax"
        )
    if settings.blind and settings.tune != "all":
        raise UsageError(f"tune={settings.tune} with blind=true, which has no encoder to keep")
    return settings


def noting(settings: CaptionSettings) -> bool:
    """Tell whether where each word looked with soft attention can be noted."""
    writer: Any = settings.writer
    soft = writer.cell.attention != "none" and writer.cell.normalise == "softmax"
    return writer.kind == "recurrent" and soft


@dataclass
class Batch:
    """Photos, and some captions of each one after the other."""

    images: Tensor
    reads: Tensor
    writes: Tensor
    tokens: int
    read: int


class Captioning(Trainable):
    """The task as the training loop sees it."""

    def __init__(
        self,
        data: ImageData,
        captions: Mapping[str, list[list[str]]],
        settings: CaptionSettings,
        describer: Describer,
    ):
        self.train, self.valid = data.parts["train"], data.parts["valid"]
        self.settings, self.format, self.tokenizer = settings, data.format, describer.tokenizer
        self.told, self.describer = captions, describer
        self.rows = {
            name: describer.encode(some, settings.max_length) for name, some in captions.items()
        }
        self.longest = np.array([max(map(len, some)) for some in self.rows["train"]])
        # a mirror image of what is said to be on the left would make the caption a lie
        self.sided = np.array([any(map(SIDES.search, some)) for some in captions["train"]])
        self.count_rows = min(settings.batch, len(self.train))
        self.shuffled = Shuffled(len(self.train), POOL * self.count_rows, settings.seed)
        self.changes = dict(
            zip(settings.augment.split("+"), augments(settings.augment), strict=False)
        )
        assert self.format.size is not None
        padding = self.format.size // 8 if settings.padding is None else settings.padding
        self.ways = Ways(padding, settings.strength)
        self.lr_scales = {"encoder.": settings.encoder_rate}
        self.decoded = min(settings.valid_images, len(self.valid))

    def pick(self, n: int) -> np.ndarray:
        """Return the photos of batch n, whose captions are about as long."""
        pool, place = divmod(n, POOL)
        some = self.shuffled[pool]
        some = some[np.argsort(self.longest[some], kind="stable")]
        order = chance_of(self.settings.seed, pool, 11).permutation(POOL)
        return some.reshape(POOL, -1)[order[place]]

    def batch(self, n: int) -> Batch:
        """Return batch n, always the same for the same seed and n."""
        picked, chance = self.pick(n), chance_of(self.settings.seed, n)
        pixels = self.train.read(picked)
        for name, change in self.changes.items():
            changed = change(pixels, chance, self.ways)
            if name == "flip":
                kept = torch.from_numpy(self.sided[picked])[:, None, None, None]
                changed = torch.where(kept, pixels, changed)
            pixels = changed
        most, captions = self.settings.captions, []
        for i in picked.tolist():
            rows = self.rows["train"][i]
            order = chance.permutation(len(rows))[:most]
            captions.append([rows[j] for j in order])
        device = self.settings.device
        rows = framed(captions, self.tokenizer, device)
        tokens = int((rows.writes >= 0).sum())
        images = self.format.normalise(pixels.to(device))
        return Batch(images, rows.reads, rows.writes, tokens, tokens)

    def epoch(self) -> float:
        """Return in how many batches all photos are read once."""
        return len(self.train) / self.count_rows

    def count(self, batch: Batch) -> tuple[int, int]:
        """Return the tokens of the captions, which the loss counts and which were read."""
        return batch.tokens, batch.read

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """Return the summed cross-entropy of the captions, and what attention is to learn."""
        settings = self.settings
        hard = settings.writer.kind == "recurrent" and settings.writer.cell.normalise == "sample"  # type: ignore[attr-defined]
        looks = model.looks() if hard or settings.doubly_stochastic else None
        return caption_loss(
            model, batch, settings.label_smoothing, looks, settings.doubly_stochastic
        )

    @torch.inference_mode()
    def evaluate(self, model: Any) -> dict[str, float]:
        """Return the loss a token, and BLEU-4 and CIDEr of greedy captions, of the valid part."""
        describer, share = self.describer, self.valid_share
        used = math.ceil(share * len(self.valid))
        valid = self.valid if share == 1 else self.valid.pick(np.arange(used))
        losses, tokens = describer.losses(valid, self.rows["valid"][:used])
        scores = {"loss": float(losses.sum() / tokens.sum())}
        scores["better"] = -scores["loss"]
        count = math.ceil(share * self.decoded)
        if count:
            how = CaptionRunSettings(beam=1, max_length=self.settings.max_length)
            outputs = describer.captions_of(self.valid.pick(np.arange(count)), how)
            told = judge_captions(outputs, self.told["valid"][:count])
            named = {score.name: score.value for score in told}
            scores |= {"bleu": named["BLEU-4"], "cider": named["CIDEr-D"]}
            scores["better"] = scores["bleu"]
        return scores


def caption_loss(
    model: Any, batch: Batch, smoothing: float, looks: Any = None, pull: float = 0.0
) -> Tensor:
    """Return the summed loss of captions; padding never reaches the vocabulary."""
    hidden = model.hidden(batch.images, batch.reads, looks)
    real = batch.writes >= 0
    places = real.flatten().nonzero().squeeze(-1)
    found, wanted = hidden.flatten(0, 1)[places], batch.writes.flatten()[places]
    weight, bias = model.head.weight, model.head.bias
    loss = vocabulary_loss(found, weight, wanted, bias=bias, smoothing=smoothing)
    if looks is not None and looks.chances:
        with torch.no_grad():
            each = F.cross_entropy(F.linear(found, weight, bias), wanted, reduction="none")
        losses = torch.zeros_like(batch.writes, dtype=each.dtype)
        losses.view(-1)[places] = each
        loss = loss + looks.loss(losses, real)
    if looks is not None and pull:
        loss = loss + pull * looks.uneven(real)
    return loss


def build(settings: CaptionSettings, format: ImageFormat, vocab: int, whole: bool) -> Any:
    """Build what sees and what writes; what is in init keeps its weights."""
    seen: Any = settings.model
    if not settings.init:
        seen = replace(seen, channels=format.channels, image=format.size)
    writer: Any = settings.writer
    if not whole:
        longest = max(writer.max_length, settings.max_length + 2)
        writer = replace(writer, vocab=vocab, max_length=longest)
    plain: Any = CaptionerConfig()
    config = replace(
        plain,
        encoder=type(plain.encoder).of(settings.family, seen),
        decoder=writer,
        sight="blind" if settings.blind else "image",
    )
    torch.manual_seed(mix(settings.seed, "weights"))
    model: Any = Captioner(config).to(settings.device)
    if settings.init and whole:
        start_from(model, settings.init)
    elif settings.init and not settings.blind:
        start_from(model.encoder, settings.init, "head.")
    let_learn(model, settings, FRESH)
    return model


def train(values: Mapping[str, Any], *, quiet: bool = False, recipe: str | None = None) -> Report:
    """Train a captioner in a folder, or go on with one that was begun there."""
    settings = resolve(values)
    whole = bool(settings.init) and trained(str(settings.init))[1]["family"] == FAMILY
    texts: dict[str, list[str]] = {}

    def read() -> Data:
        data = read_pictures(settings, labelled=False)  # type: ignore[arg-type]
        texts.update(read_captions(settings))  # type: ignore[arg-type]
        told = [pair for part in data.parts.values() for pair in said(part, texts)]
        return Data(data, hash_items([(data.sha, ""), *told]), data.notes, data.split)

    def prepare(data: Data, folder: Path, begun: dict[str, Any] | None) -> Work:
        found: ImageData = data.parts
        if not found.format.mean:
            mean, std = found.parts["train"].channel_stats()
            found.format = replace(found.format, mean=mean, std=std)
        captions = {name: of_part(part, texts) for name, part in found.parts.items()}
        every = [tidy(text, settings.lowercase) for some in captions["train"] for text in some]
        tokenizer = settle_tokenizer(
            folder,
            settings if whole else replace(settings, init=None),
            begun,
            lambda: train_tokenizer(every, kind=settings.tokenizer, vocab=settings.pieces),
        )
        model = build(settings, found.format, tokenizer.vocab, whole)
        about = {"image": asdict(found.format), "lowercase": settings.lowercase}
        describer = Describer(model, tokenizer, found.format, about)
        task = Captioning(found, captions, settings, describer)

        def save(folder: Path) -> None:
            save_tokenizer(folder, tokenizer)
            if not (folder / "generation_config.json").exists():
                most = {"max_length": settings.max_length}
                save_generation(folder, {**GENERATION, **most})

        kind = settings.writer.kind  # type: ignore[attr-defined]
        return Work(
            FAMILY,
            model,
            task,
            f"Captions of images ({'blind' if settings.blind else settings.family}, {kind})",
            about=about,
            facts={
                "tokenizers": [tokenizer.sha],
                "images": len(found.parts["train"]),
                "captions": len(every),
            },
            save=save,
        )

    return train_task(
        NAME, values, settings, read=read, prepare=prepare, recipe=recipe, quiet=quiet
    )
