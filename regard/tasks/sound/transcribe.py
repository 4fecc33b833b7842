"""Speech recognition: sounds with transcripts to a model that writes what is said."""

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from regard.data.sounds import SoundData, Sounds
from regard.decode.speech.ctc_align import required_frames
from regard.errors import UsageError
from regard.metrics.speech import transcript_errors
from regard.models import task_changes
from regard.tasks.frame.origin import Origin
from regard.tasks.sound.codec import SoundBatches, SoundCodec, pad_sounds, with_statistics
from regard.tasks.sound.recogniser import SpeechRecogniser
from regard.tasks.sound.transcribing import (
    CTC_WEIGHT,
    Batch,
    TranscribeTrain,
    check_alignable,
    learn_tokenizer,
    make_batch,
    speech_loss,
    tidy,
    usual_decoding,
)


class Transcribe(SpeechRecogniser):
    """Write what is said in a sound, word by word with their times."""

    name, holds, unit, target = "transcribe", "sounds and transcripts", "utterances", "text"
    Train = TranscribeTrain
    better = "-wer"
    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "micro": {"lr": 0.002, "steps": 2000},
        "tiny": {"lr": 0.002, "steps": 4000},
        "small": {"lr": 0.001, "steps": 20_000, "batch_seconds": 200.0},
        "base": {"lr": 0.0007, "steps": 60_000, "batch_seconds": 400.0},
        "big": {"lr": 0.0005, "steps": 100_000, "batch_seconds": 800.0},
    }

    # Training

    @classmethod
    def checked(cls, settings: Any, values: Mapping[str, Any], origin: Origin | None) -> Any:
        """Settle the heads of the model by the weight of CTC in the loss."""
        settings = super().checked(settings, values, origin)
        weight, depth = settings.ctc_weight, settings.model.decoder_depth
        if weight is None:
            weight = CTC_WEIGHT * settings.model.ctc if depth else 1.0
        if weight < 1 and not depth:
            raise UsageError(
                f"ctc_weight={weight} leaves the rest to a decoder; add one with decoder_depth=2"
            )
        if weight == 1 and depth:
            raise UsageError(
                f"ctc_weight={weight} leaves nothing to learn for decoder_depth={depth}; "
                "lower it, or leave the decoder out"
            )
        if settings.inter_ctc and not weight:
            raise UsageError(
                f"inter_ctc={settings.inter_ctc} is a share of the CTC loss, of which "
                "ctc_weight=0 leaves nothing; raise that, or leave inter_ctc out"
            )
        model, known = settings.model, {one.name for one in fields(settings.model)}
        if origin is None and "ctc" in known:
            model = replace(model, ctc=weight > 0)
        if weight and not model.ctc:
            whose = "a Whisper" if "ctc" not in known else "the model of init="
            raise UsageError(f"ctc_weight={weight}: {whose} has no CTC head; choose 0")
        return replace(settings, ctc_weight=weight, model=model)

    @classmethod
    def read(cls, settings: Any, origin: Origin | None) -> SoundData:
        """Read sounds and their transcripts."""
        data = cls.load_parts(settings)
        return data

    @classmethod
    def make_codec(cls, data: SoundData, settings: Any, learnt: Any, origin: Any) -> SoundCodec:
        """Take the format of the sounds, and learn the tokenizer of their transcripts."""
        train: Sounds = data["train"]
        texts = [tidy(text) for text in train.texts]
        tokenizer = learnt(lambda: learn_tokenizer(texts, settings))
        format = with_statistics(settings.sound, train)
        return SoundCodec(format, tokenizer=tokenizer, more=cls.reading(settings))

    @classmethod
    def make_model(cls, data: SoundData, codec: SoundCodec, settings: Any, origin: Any) -> Any:
        """Build the model with the heads that the settings choose."""
        assert codec.tokenizer is not None
        changes = task_changes(settings.family, cls.name)
        vocab = codec.tokenizer.vocab if origin is None else settings.model.vocab
        config = replace(settings.model, **changes, vocab=vocab)
        return settings.family, cls.build(settings.family, config, settings, origin)

    def rows(self, sounds: Sounds) -> list[np.ndarray]:
        """Return the ids of the transcripts."""
        ids = self.tokenizer.encode_batch([tidy(text) for text in sounds.texts])
        return [np.array(row, dtype=np.int64) for row in ids]

    def usable(
        self, part: str, sounds: Sounds, settings: Any, broken: str
    ) -> tuple[Sounds, list[np.ndarray], str | None]:
        """Return the sounds that can be learnt from with the ids of their texts, and a note."""
        rows, note = self.rows(sounds), None
        longest = max(range(len(rows)), key=lambda i: len(rows[i]))
        most = self.model.config.max_length - 1
        if settings.ctc_weight < 1 and len(rows[longest]) > most:
            raise UsageError(
                f"{sounds.where(longest)}: a transcript of {len(rows[longest])} tokens; the "
                f"decoder writes at most {most}: cut it, or raise model.max_length"
            )
        if settings.ctc_weight:
            frames = torch.tensor([self.format.frames(n) for n in sounds.samples.tolist()])
            frames = self.model.out_lengths(frames).tolist()
            good, note = check_alignable(part, sounds, frames, rows, broken)
            sounds, rows = sounds.pick(good), [rows[i] for i in good.tolist()]
        return sounds, rows, note

    def batches(self, data: SoundData, settings: Any) -> SoundBatches:
        """Return batches of augmented spectrograms with their transcripts."""
        parts = data.parts
        train, rows, note = self.usable("train", parts["train"], settings, settings.broken)
        data.notes.extend([note] if note else [])
        self.trained_on = len(train)
        self.generation, note = usual_decoding(train)
        data.notes.extend([note] if note else [])
        needed, begin = [required_frames(row.tolist()) for row in rows], self.decoder.begin

        def too_short(i: int, frames: int) -> bool:
            return int(self.model.out_lengths(torch.tensor(frames))) < needed[i]

        def make(picked: np.ndarray, sound: Tensor, lengths: Tensor) -> Batch:
            return make_batch([rows[i] for i in picked], sound, lengths, self.tokenizer, begin)

        return SoundBatches(train, self.format, settings, make, too_short)

    def count(self, batch: Batch) -> tuple[int, int]:
        """Return the tokens of the texts, which the loss counts, and the frames that were read."""
        return batch.tokens, batch.frames

    def loss(self, batch: Batch, settings: Any) -> Tensor:
        """Return the summed loss of CTC and of the decoder."""
        return speech_loss(
            self.model, batch, settings.ctc_weight, settings.label_smoothing, settings.inter_ctc
        )

    def decodes(self, data: SoundData, settings: Any) -> int:
        """Return how many sounds a validation transcribes."""
        return min(settings.valid_sounds, len(data["valid"]))

    def validate(self, data: SoundData, settings: Any, share: float = 1.0) -> dict[str, float]:
        """Return the loss a token, and the error rates of greedy transcripts."""
        valid: Sounds = data["valid"]
        some = valid.pick(np.arange(math.ceil(share * self.decodes(data, settings))))
        way = "ctc" if self.model.config.ctc else "attention"
        quick = self.Run(decoding=way, beam=1, **self.generation)
        with self.using(quick):
            texts = [str(answer) for answer in self.transcribe_part(some, quick)]
            loss = self.valid_loss(some, settings)
        errors = transcript_errors(texts, some.texts)
        rates = {name.lower(): float(row.rate()) for name, row in errors.items()}
        return {"loss": loss, **rates, "better": -rates["wer"]}

    @torch.inference_mode()
    def valid_loss(self, sounds: Sounds, settings: Any) -> float:
        """Return the loss a token of sounds that can be aligned, without augmentation."""
        sounds, rows, _ = self.usable("valid", sounds, settings, "skip")
        total, tokens, group = 0.0, 0, 16
        for start in range(0, len(sounds), group):
            places = range(start, min(len(sounds), start + group))
            features = [self.spectrogram(sounds.read(i)) for i in places]
            texts = [rows[i] for i in places]
            sound = pad_sounds(features, self.device)
            batch = make_batch(texts, *sound, self.tokenizer, self.decoder.begin)
            total += float(speech_loss(self.model, batch, settings.ctc_weight, 0.0))
            tokens += batch.tokens
        return total / tokens

    def title(self, data: SoundData, settings: Any) -> str:
        """Return what the model card says that the model is."""
        heads = " and ".join(way for way in ("ctc", "attention") if way in self.decoder.ways)
        return f"Transcripts of speech ({heads})"

    def facts(self, data: SoundData, settings: Any) -> dict[str, Any]:
        """Return what recipe.json says beside the settings."""
        train: Sounds = data["train"]
        return {"sounds": self.trained_on, "hours": round(float(train.seconds.sum()) / 3600, 3)}
