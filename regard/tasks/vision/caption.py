"""Captioning: images with captions to a model that writes what it sees."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from regard.data.augment import augments
from regard.data.captions import CaptionData
from regard.data.images import ImageData
from regard.data.seeds import mix
from regard.data.tokenize import train_tokenizer
from regard.errors import UsageError, lookup
from regard.metrics.captions import caption_scores
from regard.models import family, preset, serving, task_changes
from regard.tasks.frame.origin import Origin
from regard.tasks.frame.settings import resolve_train, size_of, with_parts
from regard.tasks.frame.tune import let_learn
from regard.tasks.vision.caption_writer import CaptionWriter
from regard.tasks.vision.captioning import (
    FAMILY,
    Batch,
    CaptionBatches,
    EvalCaption,
    LookCaption,
    RunCaption,
    TrainCaption,
    caption_loss,
    tidy,
)
from regard.tasks.vision.photos import (
    SHORT,
    ImageCodec,
    captioned,
    use_share,
    with_statistics,
)

CaptionerConfig, Captioner = family(FAMILY)
# kind of decoder -> the preset of the family that has it
DECODERS = {"transformer": "captioner", "recurrent": "show_attend_tell"}
NEW = "decoder."  # how the names of weights begin that no encoder has


class WriteCaptions(CaptionWriter):
    """Write what is on an image, word by word."""

    name, holds, target, dynamic = "caption", "photos and captions", "text", True
    Train, Run, Eval, Look = TrainCaption, RunCaption, EvalCaption, LookCaption
    generation = {"beam": 5, "length_penalty": "average", "alpha": 1.0}
    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "tiny": {"lr": 0.001, "steps": 4000},
        "small": {"lr": 0.0007, "steps": 10_000},
        "base": {"lr": 0.0005, "steps": 20_000},
        "big": {"lr": 0.0003, "steps": 60_000},
    }
    short = {
        **SHORT,
        "decoder": "decoder.kind",
        "decoder_depth": "decoder.depth",
        "decoder_width": "decoder.block.width",
        "decoder_heads": "decoder.block.heads",
        "decoder_ffn_width": "decoder.block.ffn_width",
        "decoder_position": "decoder.position",
        "dropout": ("decoder.block.dropout", "decoder.cell.dropout"),
        "cell": "decoder.cell.cell",
        "cell_width": "decoder.cell.width",
        "attention": "decoder.cell.attention",
        "normalise": "decoder.cell.normalise",
    }

    # Training

    @classmethod
    def families(cls) -> tuple[str, ...]:
        """Return the families of encoders."""
        return serving("images")

    @classmethod
    def resolve(cls, values: Mapping[str, Any], origin: Origin | None = None) -> Any:
        """Complete what a user gave to the settings of a training.

        `init` is a captioner, or an encoder on which a new decoder is put.
        """
        origin = origin or cls.origin_of(values)
        size = size_of(values)
        keys = ("decoder", "decoder.kind")
        kind = next((str(values[key]) for key in keys if key in values), "transformer")
        like = lookup("decoder", kind, DECODERS)
        decoder = preset(FAMILY, size if size in cls.sizes else "big", like).decoder
        if origin is not None and origin.family == FAMILY:
            encoder = origin.model.config.encoder
            name, model, decoder = encoder.family, encoder.config, origin.model.config.decoder
        else:
            name = cls.family_of(values, origin)
            changes = task_changes(name, "pretrain")
            model = replace(cls.shape(name, values, origin), **changes)
        sizes = {key: {**row, "decoder": decoder} for key, row in cls.size_table(values).items()}
        given = {**values, "family": name}
        if origin is not None and origin.family != FAMILY:  # most is new, and learns like it
            given = {"lr": sizes[size]["lr"], **given}
        settings = resolve_train(
            with_parts(cls.Train, model=family(name)[0]),
            given,
            config=model,
            sizes=sizes,
            short=cls.short,
            holds=cls.holds,
        )
        augments(settings.augment)
        cell = settings.decoder.cell
        soft = cell.attention != "none" and cell.normalise == "softmax"
        if settings.doubly_stochastic and not (settings.decoder.kind == "recurrent" and soft):
            raise UsageError(
                f"doubly_stochastic={settings.doubly_stochastic} is for a decoder whose soft "
                "attention can be noted: decoder=recurrent with attention= and normalise=softmax"
            )
        if settings.blind and settings.tune != "all":
            raise UsageError(f"tune={settings.tune} with blind=true, which has no encoder to keep")
        return settings

    @classmethod
    def read(cls, settings: Any, origin: Origin | None) -> CaptionData:
        """Read images and captions."""
        data: ImageData = cls.load_images(settings, origin, labelled=False)
        use_share(data, settings.share)
        return captioned(data, settings)

    @classmethod
    def make_codec(cls, data: CaptionData, settings: Any, learnt: Any, origin: Any) -> ImageCodec:
        """Take the format of the images, and learn the tokenizer of their captions."""
        texts = [tidy(text, settings.lowercase) for some in data.captions["train"] for text in some]
        tokenizer = learnt(
            lambda: train_tokenizer(texts, kind=settings.tokenizer, vocab=settings.pieces),
            init=origin is not None and origin.family == FAMILY,
        )
        more = {"lowercase": settings.lowercase}
        return ImageCodec(with_statistics(data), tokenizer=tokenizer, more=more)

    @classmethod
    def make_model(cls, data: CaptionData, codec: ImageCodec, settings: Any, origin: Any) -> Any:
        """Build the encoder and the decoder; what is in init keeps its weights."""
        whole = origin is not None and origin.family == FAMILY
        encoder, decoder = settings.model, settings.decoder
        if origin is None:
            encoder = replace(encoder, channels=codec.format.channels, image=codec.format.size)
        if not whole:
            longest = max(decoder.max_length, settings.max_length + 2)
            assert codec.tokenizer is not None
            decoder = replace(decoder, vocab=codec.tokenizer.vocab, max_length=longest)
        plain: Any = CaptionerConfig()
        config = replace(
            plain,
            encoder=type(plain.encoder)(settings.family, encoder),
            decoder=decoder,
            sight="blind" if settings.blind else "image",
        )
        torch.manual_seed(mix(settings.seed, "weights"))
        model = Captioner(config).to(settings.device)
        if origin is not None and whole:
            origin.initialise(model)
        elif origin is not None and not settings.blind:
            origin.initialise(model.encoder, "head.")
        let_learn(model, settings, NEW)
        return FAMILY, model

    def batches(self, data: CaptionData, settings: Any) -> CaptionBatches:
        """Return batches of images with some captions each."""
        captions = data.captions
        self.generation = {**self.generation, "max_length": settings.max_length}
        self.valid_rows = self.rows(captions["valid"], settings.max_length)
        train, texts = data["train"], captions["train"]
        rows = self.rows(texts, settings.max_length)
        return CaptionBatches(train, texts, rows, settings, self.format, self.tokenizer)

    def count(self, batch: Batch) -> tuple[int, int]:
        """Return the tokens of the captions, which the loss counts and which were read."""
        return batch.tokens, batch.tokens

    def lr_scales(self, settings: Any) -> dict[str, float]:
        """Return the learning-rate factor of the encoder."""
        return {"encoder.": settings.encoder_rate}

    def loss(self, batch: Batch, settings: Any) -> Tensor:
        """Return the summed cross-entropy of the captions, and what attention is to learn."""
        decoder, penalty = settings.decoder, settings.doubly_stochastic
        hard = decoder.kind == "recurrent" and decoder.cell.normalise == "sample"
        tape = self.model.attention_tape() if hard or penalty else None
        return caption_loss(self.model, batch, settings.label_smoothing, tape, penalty)

    def decodes(self, data: CaptionData, settings: Any) -> int:
        """Return how many images a validation captions."""
        return min(settings.valid_images, len(data["valid"]))

    def validate(self, data: CaptionData, settings: Any, share: float = 1.0) -> dict[str, float]:
        """Return the loss a token, and BLEU-4 and CIDEr of greedy captions."""
        captions, valid = data.captions["valid"], data["valid"]
        used = math.ceil(share * len(valid))
        some = valid if share == 1 else valid.pick(np.arange(used))
        losses, tokens = self._losses(some, self.valid_rows[:used])
        scores = {"loss": float(losses.sum() / tokens.sum())}
        scores["better"] = -scores["loss"]
        count = math.ceil(share * self.decodes(data, settings))
        if count:
            greedy = RunCaption(beam=1, max_length=settings.max_length)
            with self.using(greedy):
                outputs = self.caption_part(valid.pick(np.arange(count)), greedy)
            judged = {s.name: s.value for s in caption_scores(outputs, captions[:count])}
            scores |= {"bleu": judged["BLEU-4"], "cider": judged["CIDEr-D"]}
            scores["better"] = scores["bleu"]
        return scores

    def title(self, data: CaptionData, settings: Any) -> str:
        """Return what the model card says that the model is."""
        encoder = "blind" if settings.blind else settings.family
        return f"Captions of images ({encoder}, {settings.decoder.kind})"

    def facts(self, data: CaptionData, settings: Any) -> dict[str, Any]:
        """Return what recipe.json says beside the settings."""
        count = sum(map(len, data.captions["train"]))
        return {"images": len(data["train"]), "captions": count}
