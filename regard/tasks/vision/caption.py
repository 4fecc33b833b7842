"""Captioning: images with captions to a model that writes what it sees."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.data.augment import augments
from regard.data.captions import CaptionData
from regard.data.seeds import mix
from regard.data.tokenize import train_tokenizer
from regard.errors import UsageError, lookup
from regard.metrics.captions import caption_scores
from regard.modalities.image import IMAGE
from regard.models import family, preset
from regard.tasks.frame.media import MediaCodec
from regard.tasks.frame.origin import Origin
from regard.tasks.parts import Learnt, Lesson, Objective, Task, complete, size_of
from regard.tasks.runner import Runner
from regard.tasks.vision.caption_writer import CaptionJudge, CaptionWriter, load_codec
from regard.tasks.vision.captioning import (
    CAPTIONER,
    CaptionBatch,
    CaptionBatches,
    EvalCaption,
    RunCaption,
    TrainCaption,
    caption_loss,
    tidy,
)
from regard.tasks.vision.photos import (
    IMAGE_SHORT_KEYS,
    begin_around,
    captioned,
    encoder_shape,
    training_images,
    use_share,
)

CaptionerConfig, Captioner = family(CAPTIONER)
# kind of decoder -> the preset of the family that has it
_DECODERS = {"transformer": "captioner", "recurrent": "show_attend_tell"}
_GENERATION = {"beam": 5, "length_penalty": "average", "alpha": 1.0}


class CaptionObjective(Objective[TrainCaption, CaptionData, MediaCodec]):
    """Learns captions of images by cross-entropy."""

    Settings = TrainCaption
    serves = "images"
    published_sizes = True
    sizes = {
        "tiny": {"lr": 0.001, "steps": 4000},
        "small": {"lr": 0.0007, "steps": 10_000},
        "base": {"lr": 0.0005, "steps": 20_000},
        "big": {"lr": 0.0003, "steps": 60_000},
    }
    short = {
        **IMAGE_SHORT_KEYS,
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

    def resolve(self, task: Task, values: Mapping[str, Any], origin: Origin | None) -> TrainCaption:
        """Settings of a training, completed from what a user gave.

        `init` is a captioner, or an encoder on which a new decoder is put.
        """
        size = size_of(values)
        keys = ("decoder", "decoder.kind")
        kind = next((str(values[key]) for key in keys if key in values), "transformer")
        like = lookup("decoder", kind, _DECODERS)
        decoder = preset(CAPTIONER, size if size in self.sizes else "big", like).decoder
        if origin is not None and origin.family == CAPTIONER:
            decoder = origin.model.config.decoder
        name, model = encoder_shape(task, values, origin)
        sizes = {key: {**row, "decoder": decoder} for key, row in task.size_rows(values).items()}
        given = values
        if origin is not None and origin.family != CAPTIONER:  # most is new, and learns like it
            given = {"lr": sizes[size]["lr"], **given}
        settings = complete(task, given, name, model, sizes=sizes)
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

    def read(self, settings: TrainCaption, origin: Origin | None) -> CaptionData:
        """Images and captions."""
        data = training_images(settings, origin, labelled=False)
        use_share(data, settings.share)
        return captioned(data, settings)

    def codec(
        self, data: CaptionData, settings: TrainCaption, learnt: Learnt, origin: Origin | None
    ) -> MediaCodec:
        """The format of the images, and the tokenizer of their captions."""
        texts = [tidy(text, settings.lowercase) for some in data.captions["train"] for text in some]
        tokenizer = learnt(
            lambda: train_tokenizer(texts, kind=settings.tokenizer, vocab=settings.pieces),
            init=origin is not None and origin.family == CAPTIONER,
        )
        more = {"lowercase": settings.lowercase}
        return MediaCodec(IMAGE, IMAGE.settle(data, None), tokenizer=tokenizer, more=more)

    def model(
        self, data: CaptionData, codec: MediaCodec, settings: TrainCaption, origin: Origin | None
    ) -> Any:
        """Encoder and decoder; what is in init keeps its weights."""
        whole = origin is not None and origin.family == CAPTIONER
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
        begin_around(model, settings, origin if whole or not settings.blind else None, CAPTIONER)
        return CAPTIONER, model

    def lesson(self, runner: Runner[Any], data: CaptionData, settings: TrainCaption) -> Lesson:
        """Batches of images with some captions each, and the cross-entropy of these."""
        writer: CaptionWriter = runner.predictor
        model, captions, valid = runner.model, data.captions, data["valid"]
        train, valid_rows = captions["train"], writer.rows(captions["valid"], settings.max_length)
        decoder, penalty = settings.decoder, settings.doubly_stochastic
        hard = decoder.kind == "recurrent" and decoder.cell.normalise == "sample"
        decoded = min(settings.valid_images, len(valid))

        def loss(batch: CaptionBatch) -> Tensor:
            tape = model.attention_tape() if hard or penalty else None
            return caption_loss(model, batch, settings.label_smoothing, tape, penalty)

        def validate(share: float) -> dict[str, float]:
            """Loss a token, and BLEU-4 and CIDEr of greedy captions."""
            used = math.ceil(share * len(valid))
            some = valid if share == 1 else valid.pick(np.arange(used))
            losses, tokens = writer.losses(some, valid_rows[:used])
            scores = {"loss": float(losses.sum() / tokens.sum())}
            scores["better"] = -scores["loss"]
            if count := math.ceil(share * decoded):
                greedy = RunCaption(beam=1, max_length=settings.max_length)
                with runner.using(greedy):
                    outputs = writer.caption_part(valid.pick(np.arange(count)), greedy)
                judged = {
                    s.name: s.value for s in caption_scores(outputs, captions["valid"][:count])
                }
                scores |= {"bleu": judged["BLEU-4"], "cider": judged["CIDEr-D"]}
                scores["better"] = scores["bleu"]
            return scores

        return Lesson(
            batches=CaptionBatches(
                data["train"],
                train,
                writer.rows(train, settings.max_length),
                settings,
                runner.format,
                writer.tokenizer,
            ),
            count=lambda batch: (batch.tokens, batch.tokens),
            loss=loss,
            validate=validate,
            title=f"Captions of images ({'blind' if settings.blind else settings.family}, "
            f"{decoder.kind})",
            facts={"images": len(data["train"]), "captions": sum(map(len, train))},
            decoded=decoded,
            lr_scales={"encoder.": settings.encoder_rate},
            generation={**_GENERATION, "max_length": settings.max_length},
        )


CAPTION = Task(
    name="caption",
    holds="photos and captions",
    inputs=IMAGE,
    target="text",
    unit="images",
    objective=CaptionObjective(),
    predictor=CaptionWriter,
    judge=CaptionJudge(),
    judged=EvalCaption,
    load_codec=load_codec,
)
