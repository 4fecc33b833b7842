"""Captioning: images with captions to a model that writes what it sees."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from regard.attention.watch import watch
from regard.data.augment import augments
from regard.data.captions import all_captions_of
from regard.data.images import ImageData, Images
from regard.data.labelled import hash_items
from regard.data.media import BROKEN
from regard.data.tokenize import train_tokenizer
from regard.data.tokenizer import words_of_pieces
from regard.decode import search
from regard.decode.options import Decoding, decode
from regard.decode.search import Hypothesis
from regard.errors import UsageError, lookup
from regard.layers.layout import full_layout
from regard.metrics.captions import caption_scores, compare_captions
from regard.models import family, preset, serving, task_changes
from regard.models.protocols import Model
from regard.pretrained.tokenizer_folder import load_tokenizer
from regard.tasks.frame.origin import Origin
from regard.tasks.frame.question import Question
from regard.tasks.frame.settings import resolve_train, size_of, with_parts
from regard.tasks.frame.task import Data, Judged
from regard.tasks.frame.tune import let_learn
from regard.tasks.vision.captioning import (
    FAMILY,
    Batch,
    Caption,
    CaptionBatches,
    EvalCaption,
    LookCaption,
    RunCaption,
    TrainCaption,
    caption_loss,
    caption_losses,
    encode_captions,
    loss_scores,
    tidy,
)
from regard.tasks.vision.photos import (
    SHORT,
    ImageCodec,
    ImageTask,
    check_image,
    format_of,
    photo_of,
    use_share,
    with_captions,
    with_statistics,
)
from regard.training.loop import mix

CaptionerConfig, Captioner = family(FAMILY)
# kind of decoder -> the preset of the family that has it
DECODERS = {"transformer": "captioner", "recurrent": "show_attend_tell"}
NEW = "decoder."  # how the names of weights begin that no encoder has


class WriteCaptions(ImageTask[Caption]):
    """Write what is on an image, word by word."""

    name, holds, dynamic = "caption", "photos and captions", True
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

    def __init__(
        self, model: nn.Module, codec: ImageCodec, config: Mapping[str, Any] | None = None
    ):
        super().__init__(model, codec, config)
        assert codec.tokenizer is not None
        self.tokenizer = codec.tokenizer
        spare = range(self.tokenizer.vocab, self.model.head.out_features)
        self.forbidden = [*self.tokenizer.never, *spare]  # tokens that no caption has

    @property
    def lowercase(self) -> bool:
        """Tell whether captions are written in lower case."""
        return self.config.get("lowercase") is True

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
        keys = ("decoder", "decoder.kind", "writer.kind")  # the last is its older name
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
        lookup("broken", settings.broken, BROKEN)
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
    def read(cls, settings: Any, origin: Origin | None) -> Data:
        """Read images and captions."""
        data: ImageData = cls.load_images(settings, origin, labelled=False)
        use_share(data, settings.share)
        return with_captions(data, settings)

    @classmethod
    def make_codec(cls, data: Data, settings: Any, learnt: Any, origin: Any) -> ImageCodec:
        """Take the format of the images, and learn the tokenizer of their captions."""
        images, captions = data.parts
        texts = [tidy(text, settings.lowercase) for some in captions["train"] for text in some]
        tokenizer = learnt(
            lambda: train_tokenizer(texts, kind=settings.tokenizer, vocab=settings.pieces),
            init=origin is not None and origin.family == FAMILY,
        )
        more = {"lowercase": settings.lowercase}
        return ImageCodec(with_statistics(images), tokenizer=tokenizer, more=more)

    @classmethod
    def make_model(cls, data: Data, codec: ImageCodec, settings: Any, origin: Any) -> Any:
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

    def rows(self, captions: Sequence[Sequence[str]], longest: int) -> list[list[np.ndarray]]:
        """Cut the captions of each image into ids, at most so many."""
        return encode_captions(captions, self.tokenizer, longest, self.lowercase)

    def batches(self, data: Data, settings: Any) -> CaptionBatches:
        """Return batches of images with some captions each."""
        images, captions = data.parts
        self.generation = {**self.generation, "max_length": settings.max_length}
        self.valid_rows = self.rows(captions["valid"], settings.max_length)
        train, texts = images.parts["train"], captions["train"]
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

    def decodes(self, data: Data, settings: Any) -> int:
        """Return how many images a validation captions."""
        return min(settings.valid_images, len(data.parts[0].parts["valid"]))

    def validate(self, data: Data, settings: Any, share: float = 1.0) -> dict[str, float]:
        """Return the loss a token, and BLEU-4 and CIDEr of greedy captions."""
        images, captions = data.parts
        valid: Images = images.parts["valid"]
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
            judged = {s.name: s.value for s in caption_scores(outputs, captions["valid"][:count])}
            scores |= {"bleu": judged["BLEU-4"], "cider": judged["CIDEr-D"]}
            scores["better"] = scores["bleu"]
        return scores

    def title(self, data: Data, settings: Any) -> str:
        """Return what the model card says that the model is."""
        encoder = "blind" if settings.blind else settings.family
        return f"Captions of images ({encoder}, {settings.decoder.kind})"

    def facts(self, data: Data, settings: Any) -> dict[str, Any]:
        """Return what recipe.json says beside the settings."""
        images, captions = data.parts
        count = sum(map(len, captions["train"]))
        return {"images": len(images.parts["train"]), "captions": count}

    # Using

    @classmethod
    def load_codec(cls, folder: Path, model: Model, config: Mapping[str, Any]) -> ImageCodec:
        """Read the format of images and the tokenizer."""
        if not hasattr(model.config, "sight"):
            raise UsageError(
                f"{folder / 'config.json'}: a model of another family; expected captioner"
            )
        tokenizer, vocab = load_tokenizer(folder), model.config.decoder.vocab
        if tokenizer.vocab > vocab:
            raise UsageError(
                f"{folder}: the tokenizer has {tokenizer.vocab} pieces, the model only {vocab}"
            )
        return ImageCodec(format_of(folder, model, config), tokenizer=tokenizer)

    def check_run(self, settings: Any) -> Any:
        """Refuse options of decoding that contradict each other or the model."""
        if isinstance(settings, Decoding):
            settings.check()
            assert settings.max_length is not None
            if settings.max_length > self.model.config.max_length:
                raise UsageError(
                    f"max_length={settings.max_length} is more than the "
                    f"{self.model.config.max_length} pieces that the model was made for"
                )
        return super().check_run(settings)

    def answer_pixels(self, pixels: Tensor, settings: Any, lines: Sequence[int]) -> list[Caption]:
        """Caption bytes (n, c, h, w); lines are their numbers for random draws."""
        images = self.format.normalise(pixels.to(self.device))
        return [self._caption(some) for some in self.write(images, settings, lines)]

    def write(
        self, images: Tensor, settings: Any, lines: Sequence[int] = ()
    ) -> list[list[Hypothesis]]:
        """Write captions of normalised images."""
        opening = self.tokenizer.encode(tidy(settings.prefix, self.lowercase))
        return decode(
            self.model,
            images,
            None,
            settings,
            bos=self.tokenizer.bos,
            eos=self.tokenizer.eos,
            prefix=[opening] * len(images) if opening else None,
            adjust=[search.forbid(*self.forbidden)],
            lines=list(lines) or list(range(len(images))),
            max_length=max(settings.max_length, len(opening)),
        )

    def _caption(self, hypotheses: Sequence[Hypothesis]) -> Caption:
        captions = [Caption(self.tokenizer.decode(h.ids), h.score) for h in hypotheses]
        captions[0].others = captions[1:]
        return captions[0]

    def caption_part(self, images: Images, settings: Any) -> list[str]:
        """Return the best caption of each image of a part."""
        rows = np.split(np.arange(len(images)), range(settings.batch, len(images), settings.batch))
        return [
            str(caption)
            for some in rows
            for caption in self.answer_pixels(images.read(some), settings, some.tolist())
        ]

    def _losses(self, images: Images, rows: Any, **more: Any) -> tuple[np.ndarray, np.ndarray]:
        return caption_losses(self.model, images, rows, self.format, self.tokenizer, **more)

    # Judging

    def read_test(self, settings: Any) -> Data:
        """Read images as this model takes them, and their captions."""
        data = self.load_test(settings, labelled=False)
        images: Images = data.parts[settings.part]
        captions = all_captions_of(images, settings)
        sha = hash_items(list(zip(images.hashes, captions, strict=True)))
        return Data((images, captions), sha, data.notes)

    def predict_examples(self, data: Data, settings: Any) -> list[str]:
        """Caption each image."""
        return self.caption_part(data.parts[0], settings)

    def predictions_of(self, other: Any, data: Data, settings: Any) -> list[str]:
        """Return the captions of another model, which reads the images in its own format."""
        return super().predictions_of(other, other.read_test(settings), settings)

    def judge(self, data: Data, predictions: list[str], settings: Any) -> Judged:
        """Return BLEU-1 to 4, chrF, CIDEr-D, and the loss a token of the references."""
        images, captions = data.parts
        scores = caption_scores(predictions, captions, settings.tokenise, settings.lowercase)
        rows = self.rows(captions, self.model.config.max_length - 1)
        return Judged([*scores, *loss_scores(self._losses, images, rows, settings)], len(images))

    def compare(self, data: Data, ours: Any, theirs: Any, settings: Any) -> Any:
        """Compare captions by a paired bootstrap."""
        return compare_captions(ours, theirs, data.parts[1], settings)

    def outputs(self, data: Data, predictions: list[str], settings: Any) -> list[dict[str, Any]]:
        """Return each image with its captions and what was written."""
        rows = zip(range(len(predictions)), data.parts[1], predictions, strict=True)
        where = data.parts[0].where
        return [{"image": where(i), "captions": c, "prediction": o} for i, c, o in rows]

    def made_with(self, settings: Any) -> dict[str, Any]:
        """Return how captions were written."""
        return {name: getattr(settings, name) for name in RunCaption.__dataclass_fields__}

    # Looking

    @torch.inference_mode()
    def maps(self, images: Tensor, ids: Sequence[int]) -> tuple[Any, Tensor]:
        """Return the attention over one image while a caption is written, exactly, and logits."""
        inputs = torch.tensor([[self.tokenizer.bos, *ids]], device=self.device)
        with watch(self.model) as maps:
            logits = self.model(images, inputs)
        return maps, logits[0]

    def _looked_at(self, images: Tensor, settings: Any) -> tuple[list[int], list[Hypothesis]]:
        """Return the caption that is looked at, and what was written unless that was given."""
        if settings.caption is None:
            written = self.check({"beam": settings.beam, "n_best": settings.beam})
            hypotheses = self.write(images, written)[0]
            ids = hypotheses[0].ids
        else:
            text = tidy(str(settings.caption), self.lowercase)
            ids, hypotheses = self.tokenizer.encode(text), []
        if not ids or len(ids) >= self.model.config.max_length:
            raise UsageError(f"a caption of {len(ids)} pieces; there is nothing to look at")
        return ids, hypotheses

    def question(self, given: Any, settings: Any, expected: Any = None) -> Question:
        """Return an image with its caption and the log-probability of that."""
        from regard.viewer.image import feature_grid

        images = self.normalised(given, settings)
        best = self._looked_at(images, settings)[0] if expected is None else expected
        reads = torch.tensor([[self.tokenizer.bos, *best]], device=self.device)

        @torch.inference_mode()
        def logprobs(copies: int) -> Tensor:
            inputs = reads.expand(copies, -1)
            return self.model(images.expand(copies, -1, -1, -1), inputs).double().log_softmax(-1)

        features = feature_grid(self.model.encoder, (images.shape[2], images.shape[3]))
        crosses = [n for n, _ in self.model.named_modules() if n.endswith("cross")]
        read = dict.fromkeys(crosses, full_layout(features, features))
        return Question(
            answer=self.tokenizer.decode(best),
            logprobs=logprobs,
            chosen=[*best, self.tokenizer.eos],
            names=self.tokenizer.pieces,
            places=self.tokenizer.pieces(reads[0].tolist()),
            expected=best,
            **self.image_tokens(images, read),
        )

    def watched(self) -> Any:
        """Return the encoder, whose attention other views than words show."""
        return self.model.encoder

    def describe(self, pixels: Tensor, settings: Any) -> dict[str, Any]:
        """Caption an image for its picture."""
        written = self.check({"beam": settings.beam, "n_best": settings.beam})
        caption = self.answer_pixels(pixels, written, [0])[0]
        others = [(other.text, other.score) for other in caption.others]
        return {"output": caption.text, "alternatives": others}

    def explain(self, given: Any, settings: Any) -> Any:
        """Caption an image and gather where each word looked, or how the image was seen."""
        from regard.viewer.image import caption_views
        from regard.viewer.picture import Picture
        from regard.viewer.text import candidate_steps

        if settings.view != "words":
            return super().explain(given, settings)
        pixels, photo, name = photo_of(self.format_for(settings), check_image(given))
        images = self.format.normalise(pixels.to(self.device))
        ids, hypotheses = self._looked_at(images, settings)
        maps, logits = self.maps(images, ids)
        words, of = words_of_pieces(self.tokenizer.pieces(ids))
        size = (images.shape[2], images.shape[3])
        views = caption_views(self.model.encoder, maps, size, words, of)
        return Picture(
            title=name,
            views=views,
            steps=candidate_steps(
                logits.float().softmax(-1),
                self.tokenizer.pieces,
                candidates=settings.candidates,
                chosen=[*ids, self.tokenizer.eos],
            ),
            source=name,
            output=self.tokenizer.decode(ids),
            alternatives=[(self.tokenizer.decode(h.ids), h.score) for h in hypotheses[1:]],
            note=f"beam {settings.beam}" if hypotheses else "a caption that was given",
            opens=(views[-1].name, "mean"),
            photo=photo,
            query="mean",
        )
