"""Captions by a trained model: running, judging and looking."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from regard.attention.watch import watch
from regard.data.captions import CaptionData, all_captions_of, with_captions
from regard.data.images import Images
from regard.data.tokenizer import words_of_pieces
from regard.decode.constraints import Constraints, forbid
from regard.decode.decoder import decode
from regard.decode.options import Decoding
from regard.decode.search import Hypothesis
from regard.errors import UsageError
from regard.layers.layout import full_layout
from regard.metrics.captions import caption_scores, compare_captions
from regard.modalities.base import One
from regard.modalities.image import IMAGE, photo_of, stacked
from regard.models.protocols import Model
from regard.pretrained.tokenizer_folder import load_tokenizer
from regard.settings import fill
from regard.tasks.frame.media import MediaCodec
from regard.tasks.frame.question import Question
from regard.tasks.labels.classifier import answer_groups
from regard.tasks.parts import Judge, Predictor, ScoredPredictions, System, V
from regard.tasks.runner import Runner
from regard.tasks.vision.captioning import (
    Caption,
    EvalCaption,
    LookCaption,
    RunCaption,
    caption_losses,
    encode_captions,
    loss_scores,
    tidy,
)
from regard.tasks.vision.photos import read_images
from regard.viewer.picture import Picture


class CaptionWriter(Predictor[Caption, RunCaption, LookCaption]):
    """Writes what is on an image, word by word."""

    Settings = RunCaption
    Look = LookCaption

    def __init__(self, model: nn.Module, codec: MediaCodec, config: Mapping[str, Any]):
        super().__init__(model, codec, config)
        assert codec.tokenizer is not None
        self.tokenizer = codec.tokenizer
        spare = range(self.tokenizer.vocab, self.model.head.out_features)
        self.forbidden = [*self.tokenizer.never, *spare]  # tokens that no caption has
        self.lowercase = config.get("lowercase") is True  # whether captions are

    def rows(self, captions: Sequence[Sequence[str]], longest: int) -> list[list[np.ndarray]]:
        """Ids of the captions of each image, at most so many."""
        return encode_captions(captions, self.tokenizer, longest, self.lowercase)

    def check(self, settings: V) -> V:
        """Refuse options of decoding that contradict each other or the model."""
        if isinstance(settings, Decoding):
            settings.check()
            assert settings.max_length is not None
            if settings.max_length > self.model.config.max_length:
                raise UsageError(
                    f"max_length={settings.max_length} is more than the "
                    f"{self.model.config.max_length} pieces that the model was made for"
                )
        return settings

    def predict(self, inputs: list[One], settings: RunCaption, *, first: int = 0) -> list[Any]:
        """Caption images batch by batch; one that cannot be read is told of."""

        def answer(raws: list[np.ndarray], lines: list[int]) -> list[Caption]:
            return self.answer_pixels(stacked(raws), settings, lines)

        return answer_groups(self.codec.groups(inputs, settings), IMAGE, answer, first)

    def answer_pixels(
        self, pixels: Tensor, settings: RunCaption, lines: Sequence[int]
    ) -> list[Caption]:
        """Caption bytes (n, c, h, w); lines are their numbers for random draws."""
        images = self.codec.format.normalise(pixels.to(self.device))
        return [self._caption(some) for some in self.write(images, settings, lines)]

    def write(
        self, images: Tensor, settings: RunCaption, lines: Sequence[int] = ()
    ) -> list[list[Hypothesis]]:
        """Write captions of normalised images."""
        opening = self.tokenizer.encode(tidy(settings.prefix, self.lowercase))
        constraints = Constraints(
            bos=self.tokenizer.bos,
            eos=self.tokenizer.eos,
            prefix=[opening] * len(images),
            adjust=[forbid(*self.forbidden)],
            lines=list(lines) or None,
            max_length=max(settings.max_length, len(opening)),
        )
        return decode(self.model, images, None, settings, constraints)

    def _caption(self, hypotheses: Sequence[Hypothesis]) -> Caption:
        captions = [Caption(self.tokenizer.decode(h.ids), h.score) for h in hypotheses]
        captions[0].others = captions[1:]
        return captions[0]

    def caption_part(self, images: Images, settings: RunCaption) -> list[str]:
        """The best caption of each image of a part."""
        rows = np.split(np.arange(len(images)), range(settings.batch, len(images), settings.batch))
        return [
            str(caption)
            for some in rows
            for caption in self.answer_pixels(images.read(some), settings, some.tolist())
        ]

    def losses(self, images: Images, rows: Any, **more: Any) -> tuple[np.ndarray, np.ndarray]:
        """Summed loss of the captions of each image in nats, and their tokens."""
        return caption_losses(self.model, images, rows, self.codec.format, self.tokenizer, **more)

    # Looking

    @torch.inference_mode()
    def maps(self, images: Tensor, ids: Sequence[int]) -> tuple[Any, Tensor]:
        """The attention over one image while a caption is written, exactly, and logits."""
        inputs = torch.tensor([[self.tokenizer.bos, *ids]], device=self.device)
        with watch(self.model) as maps:
            logits = self.model(images, inputs)
        return maps, logits[0]

    def _written(self, settings: LookCaption) -> RunCaption:
        """Settings by which the caption of a picture is written."""
        beam = {"beam": settings.beam, "n_best": settings.beam}
        return self.check(fill(RunCaption, {**self.defaults, **beam}))

    def _looked_at(
        self, images: Tensor, settings: LookCaption
    ) -> tuple[list[int], list[Hypothesis]]:
        """The caption that is looked at, and what was written unless that was given."""
        if settings.caption is None:
            written = self._written(settings)
            hypotheses = self.write(images, written)[0]
            ids = hypotheses[0].ids
        else:
            text = tidy(str(settings.caption), self.lowercase)
            ids, hypotheses = self.tokenizer.encode(text), []
        if not ids or len(ids) >= self.model.config.max_length:
            raise UsageError(f"a caption of {len(ids)} pieces; there is nothing to look at")
        return ids, hypotheses

    def answer_logprobs(self, given: One, settings: LookCaption, expected: Any = None) -> Question:
        """An image with its caption and the log-probability of that."""
        from regard.viewer.image import feature_grid

        pixels, _, _ = photo_of(self.codec.format_for(settings), given)
        images = self.codec.format.normalise(pixels.to(self.device))
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
            **IMAGE.tokens(self.model, images, self.codec.format, read)._asdict(),
        )

    def describe(self, pixels: Tensor, settings: LookCaption) -> dict[str, Any]:
        """Caption an image for its picture."""
        written = self._written(settings)
        caption = self.answer_pixels(pixels, written, [0])[0]
        others = [(other.text, other.score) for other in caption.others]
        return {"output": caption.text, "alternatives": others}

    def explain(self, given: One, settings: LookCaption) -> Picture:
        """Caption an image and gather where each word looked, or how the image was seen."""
        from regard.viewer.image import caption_views
        from regard.viewer.text import candidate_steps

        if settings.view != "words":
            return self.codec.picture(
                self.model.encoder, given, settings, partial(self.describe, settings=settings)
            )
        pixels, photo, name = photo_of(self.codec.format_for(settings), given)
        images = self.codec.format.normalise(pixels.to(self.device))
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


class CaptionJudge(Judge[CaptionData, EvalCaption, list[str]]):
    """Judges captions by n-grams of their references, and by the loss of these."""

    Settings = EvalCaption

    def read(self, runner: Runner[Any], settings: EvalCaption) -> CaptionData:
        """Images as a model takes them, and their captions."""
        data, part = read_images(runner, settings, labelled=False), settings.part
        return with_captions(data, {part: all_captions_of(data[part], settings)})

    def predict(
        self,
        runner: Runner[Any],
        data: CaptionData,
        settings: EvalCaption,
        like: Runner[Any] | None = None,
    ) -> list[str]:
        """Captions of the images, which another model reads in its own format."""
        own = data if like is None else self.read(runner, settings)
        return runner.predictor.caption_part(own[settings.part], settings)

    def score(
        self,
        runner: Runner[Any],
        data: CaptionData,
        predictions: list[str],
        settings: EvalCaption,
        systems: Sequence[System] = (),
    ) -> ScoredPredictions:
        """BLEU-1 to 4, chrF, CIDEr-D, and the loss a token of the references."""
        images, captions = data[settings.part], data.captions[settings.part]
        scores = caption_scores(predictions, captions, settings.tokenise, settings.lowercase)
        writer: CaptionWriter = runner.predictor
        rows = writer.rows(captions, runner.model.config.max_length - 1)
        return ScoredPredictions(
            [*scores, *loss_scores(writer.losses, images, rows, settings)],
            len(images),
            made_with={name: getattr(settings, name) for name in RunCaption.__dataclass_fields__},
            rows=[
                {"image": images.where(i), "captions": some, "prediction": predictions[i]}
                for i, some in enumerate(captions)
            ],
        )

    def compare(
        self,
        runner: Runner[Any],
        data: CaptionData,
        theirs: System,
        ours: Any,
        settings: EvalCaption,
    ) -> Any:
        """Comparison of captions by a paired bootstrap."""
        return compare_captions(ours, theirs.predictions, data.captions[settings.part], settings)


def load_codec(folder: Path, model: Model, config: Mapping[str, Any]) -> MediaCodec:
    """Read the format of images and the tokenizer."""
    if not hasattr(model.config, "sight"):
        raise UsageError(f"{folder / 'config.json'}: a model of another family; expected captioner")
    tokenizer, vocab = load_tokenizer(folder), model.config.decoder.vocab
    if tokenizer.vocab > vocab:
        raise UsageError(
            f"{folder}: the tokenizer has {tokenizer.vocab} pieces, the model only {vocab}"
        )
    return MediaCodec(IMAGE, IMAGE.saved_format(folder, model, config), tokenizer=tokenizer)
