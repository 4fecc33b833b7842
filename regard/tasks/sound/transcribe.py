"""Speech recognition: sounds with transcripts to a model that writes what is said."""

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from regard.data.batches import moved
from regard.data.sound_batches import SoundBatches, pad_sounds
from regard.data.sounds import SoundData, Sounds
from regard.decode.speech.ctc_align import required_frames
from regard.errors import UsageError
from regard.metrics.speech import transcript_errors
from regard.modalities.sound import SOUND
from regard.models import task_changes
from regard.tasks.frame.media import MediaCodec
from regard.tasks.frame.origin import Origin
from regard.tasks.parts import Learnt, Lesson, Objective, Task, build_model
from regard.tasks.runner import Runner
from regard.tasks.sound.codec import (
    SOUND_SHORT_KEYS,
    check_sound,
    read_training,
)
from regard.tasks.sound.recogniser import Recogniser, TranscriptJudge, load_codec
from regard.tasks.sound.transcribing import (
    CTC_WEIGHT,
    SpeechBatch,
    TranscribeEval,
    TranscribeRun,
    TranscribeTrain,
    check_alignable,
    learn_tokenizer,
    make_batch,
    speech_loss,
    tidy,
    usual_decoding,
)

_VALID_GROUP = 16  # sounds whose loss is measured at once


class Usable(NamedTuple):
    """Sounds that can be learnt from, the ids of their texts, and a note of those left out."""

    sounds: Sounds
    rows: list[np.ndarray]
    note: str | None


class SpeechObjective(Objective[TranscribeTrain, SoundData, MediaCodec]):
    """Learns transcripts by CTC, by a decoder, or by both."""

    Settings, short = TranscribeTrain, SOUND_SHORT_KEYS
    sizes = {
        "micro": {"lr": 0.002, "steps": 2000},
        "tiny": {"lr": 0.002, "steps": 4000},
        "small": {"lr": 0.001, "steps": 20_000, "batch_seconds": 200.0},
        "base": {"lr": 0.0007, "steps": 60_000, "batch_seconds": 400.0},
        "big": {"lr": 0.0005, "steps": 100_000, "batch_seconds": 800.0},
    }

    def resolve(
        self, task: Task, values: Mapping[str, Any], origin: Origin | None
    ) -> TranscribeTrain:
        """Settings whose weight of CTC in the loss settles the heads of the model."""
        settings = check_sound(super().resolve(task, values, origin), origin)
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

    def read(self, settings: TranscribeTrain, origin: Origin | None) -> SoundData:
        """Sounds and their transcripts."""
        return read_training(settings)

    def codec(
        self, data: SoundData, settings: TranscribeTrain, learnt: Learnt, origin: Origin | None
    ) -> MediaCodec:
        """Format of the sounds, and the tokenizer of their transcripts."""
        texts = [tidy(text) for text in data["train"].texts]
        tokenizer = learnt(lambda: learn_tokenizer(texts, settings))
        format = SOUND.settle(data, settings.sound)
        return MediaCodec(SOUND, format, tokenizer=tokenizer, more=settings.facts())

    def model(
        self, data: SoundData, codec: MediaCodec, settings: TranscribeTrain, origin: Origin | None
    ) -> tuple[str, nn.Module]:
        """Model with the heads that the settings choose."""
        assert codec.tokenizer is not None
        changes = task_changes(settings.family, "transcribe")
        vocab = codec.tokenizer.vocab if origin is None else settings.model.vocab
        config = replace(settings.model, **changes, vocab=vocab)
        return settings.family, build_model(settings.family, config, settings, origin)

    def lesson(self, runner: Runner[Any], data: SoundData, settings: TranscribeTrain) -> Lesson:
        """Batches of augmented spectrograms with their transcripts, and the loss of both heads."""
        model, recogniser = runner.model, runner.predictor
        train = usable(runner, "train", data["train"], settings, settings.broken)
        generation, gate = usual_decoding(train.sounds)
        data.notes.extend(note for note in (train.note, gate) if note)
        needed = [required_frames(row.tolist()) for row in train.rows]
        tokenizer, begin = recogniser.tokenizer, recogniser.decoder.begin
        decoded = min(settings.valid_sounds, len(data["valid"]))

        def too_short(i: int, frames: int) -> bool:
            return int(model.out_lengths(torch.tensor(frames))) < needed[i]

        def make(picked: np.ndarray, sound: Tensor, lengths: Tensor, frames: int) -> SpeechBatch:
            texts = [train.rows[i] for i in picked]
            return make_batch(texts, sound, lengths, frames, tokenizer, begin)

        def loss(batch: SpeechBatch) -> Tensor:
            smoothing, inter = settings.label_smoothing, settings.inter_ctc
            return speech_loss(model, batch, settings.ctc_weight or 0.0, smoothing, inter)

        def validate(share: float) -> dict[str, float]:
            some = data["valid"].pick(np.arange(math.ceil(share * decoded)))
            way = "ctc" if model.config.ctc else "attention"
            quick = TranscribeRun(decoding=way, beam=1, **generation)
            with runner.using(quick):
                texts = [str(answer) for answer in recogniser.transcribe_part(some, quick)]
                per_token = valid_loss(runner, some, settings)
            errors = transcript_errors(texts, some.texts)
            rates = {name.lower(): float(row.rate()) for name, row in errors.items()}
            return {"loss": per_token, **rates, "better": -rates["wer"]}

        ways = recogniser.decoder.ways
        heads = " and ".join(way for way in ("ctc", "attention") if way in ways)
        hours = round(float(data["train"].seconds.sum()) / 3600, 3)
        return Lesson(
            batches=SoundBatches(train.sounds, runner.codec.format, settings, make, too_short),
            count=lambda batch: (batch.tokens, batch.frames),
            loss=loss,
            validate=validate,
            title=f"Transcripts of speech ({heads})",
            facts={"sounds": len(train.sounds), "hours": hours},
            decoded=decoded,
            generation=generation,
        )


def usable(
    runner: Runner[Any], part: str, sounds: Sounds, settings: TranscribeTrain, broken: str
) -> Usable:
    """Sounds of a part that can be learnt from, with the ids of their texts."""
    model, codec = runner.model, runner.codec
    ids = codec.tokenizer.encode_batch([tidy(text) for text in sounds.texts])
    rows, note = [np.array(row, dtype=np.int64) for row in ids], None
    longest = max(range(len(rows)), key=lambda i: len(rows[i]))
    most = model.config.max_length - 1
    if (settings.ctc_weight or 0.0) < 1 and len(rows[longest]) > most:
        raise UsageError(
            f"{sounds.where(longest)}: a transcript of {len(rows[longest])} tokens; the "
            f"decoder writes at most {most}: cut it, or raise model.max_length"
        )
    if settings.ctc_weight:
        frames = torch.tensor([codec.format.frames(n) for n in sounds.samples.tolist()])
        lengths = model.out_lengths(frames).tolist()
        good, note = check_alignable(part, sounds, lengths, rows, broken)
        sounds, rows = sounds.pick(good), [rows[i] for i in good.tolist()]
    return Usable(sounds, rows, note)


@torch.inference_mode()
def valid_loss(runner: Runner[Any], sounds: Sounds, settings: TranscribeTrain) -> float:
    """Loss a token of sounds that can be aligned, without augmentation."""
    recogniser = runner.predictor
    sounds, rows, _ = usable(runner, "valid", sounds, settings, "skip")
    total, tokens = 0.0, 0
    for start in range(0, len(sounds), _VALID_GROUP):
        places = range(start, min(len(sounds), start + _VALID_GROUP))
        features = [recogniser.spectrogram(sounds.read(i)) for i in places]
        sound, lengths = pad_sounds(features)
        texts = [rows[i] for i in places]
        frames, begin = sum(map(len, features)), recogniser.decoder.begin
        batch = make_batch(texts, sound, lengths, frames, recogniser.tokenizer, begin)
        batch = moved(batch, runner.device)
        total += float(speech_loss(runner.model, batch, settings.ctc_weight or 0.0, 0.0))
        tokens += batch.tokens
    return total / tokens


TRANSCRIBE = Task(
    name="transcribe",
    holds="sounds and transcripts",
    inputs=SOUND,
    predictor=Recogniser,
    judge=TranscriptJudge(),
    load_codec=load_codec,
    objective=SpeechObjective(),
    target="text",
    unit="utterances",
    judged=TranscribeEval,
)
