"""Transcripts as a model learns and gives them: settings, batches, losses, answers and formats."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from regard.data.batches import pad
from regard.data.characters import Characters
from regard.data.sounds import Sounds
from regard.data.tokenize import train_tokenizer, with_characters
from regard.data.tokenizer import Tokenizer
from regard.decode.speech.ctc import FusionModel
from regard.decode.speech.ctc_align import not_alignable, required_frames
from regard.decode.speech.no_speech import is_speech
from regard.decode.speech.options import WhisperDecoding
from regard.decode.speech.subtitles import srt, vtt
from regard.decode.speech.words import Word, word_tokens
from regard.errors import UsageError
from regard.metrics.speech import NORMALISATIONS
from regard.models.folder import load_folder
from regard.pretrained.tokenizer_folder import load_tokenizer
from regard.settings import setting
from regard.tasks.parts import Answer
from regard.tasks.sound.codec import (
    SoundEvalSettings,
    SoundRunSettings,
    SoundSource,
    SoundTrainSettings,
)
from regard.training.loss import ctc_loss, linear_cross_entropy
from regard.viewer.settings import SoundLookSettings

_GATED = 100  # training sounds at which the gate is tried
_SPEECH = 0.95  # share of them that must pass
_SEGMENTS = 5.0, 30.0  # seconds of a stretch that is read at once, least and most
CTC_WEIGHT = 0.3  # beside a decoder, unless told (Watanabe et al. 2017)


@dataclass(frozen=True)
class TranscribeTrain(SoundTrainSettings):
    """What a training of a speech recogniser can be told."""

    tokenizer: str = setting("characters", "tokenizer", choices=with_characters)
    pieces: int = setting(1000, "vocabulary size of bpe and unigram", min=300, max=99_999)
    ctc_weight: float | None = setting(
        None, "weight of CTC in the loss; the decoder's loss has the rest", min=0, max=1
    )
    inter_ctc: float = setting(0.0, "share of the CTC loss at the middle block", min=0, max=0.9)
    label_smoothing: float = setting(0.1, "label smoothing of the decoder", min=0, max=0.9)
    valid_sounds: int = setting(1000, "sounds transcribed at a validation", min=1)


@dataclass(frozen=True)
class Listening:
    """What of a sound is read, and at which speeds."""

    GROUP = "decoding"

    gate: bool = setting(True, "write nothing where there is no speech, such as in noise")
    segment_seconds: float = setting(
        30.0, "maximum seconds read at once; longer sounds are split at pauses", min=1, max=600
    )
    speeds: tuple[float, ...] = setting(
        (1.0,),
        "read at these speeds, such as 0.9,1.0,1.1; keep the most probable text",
        min=0.5,
        max=2,
    )


@dataclass(frozen=True)
class Hearing(SoundRunSettings, WhisperDecoding, Listening):
    """How a sound is heard, and its transcript written or aligned."""

    forced: str | bool | None = setting(
        None, "a transcript to align; true: that of each input, after a TAB"
    )


@dataclass(frozen=True)
class TranscribeRun(Hearing):
    """How to transcribe sounds."""

    format: str = setting("text", "format of the answers", choices=lambda: TRANSCRIPT_FORMATS)
    scores: bool = setting(False, "print the score of each transcript")


@dataclass(frozen=True)
class TranscribeEval(SoundEvalSettings, TranscribeRun):
    """What to judge transcripts on, and how."""

    data: str | None = setting(None, "a folder or table of sounds and transcripts")
    normalise: str = setting(
        "words",
        "text normalisation before scoring; words: no case, no punctuation",
        choices=NORMALISATIONS,
        group="scores",
    )


@dataclass(frozen=True)
class TranscribeLook(SoundLookSettings, Hearing):
    """What to see of how a transcript came about."""

    forced: str | None = setting(None, "a transcript to align, instead of its own")


# Answers


@dataclass
class Transcript(Answer[TranscribeRun]):
    """A transcript with its words and their times; `others` are the next best."""

    text: str
    words: list[Word] = field(default_factory=list[Word])
    score: float = 0.0
    seconds: float = 0.0  # of the sound
    others: list["Transcript"] = field(default_factory=list["Transcript"])

    def __str__(self) -> str:
        return self.text

    def lines(self, settings: TranscribeRun) -> Iterator[str]:
        """Write the transcript in the format that is asked for."""
        yield from TRANSCRIPT_FORMATS[settings.format](self, settings)

    def record(self, settings: TranscribeRun) -> dict[str, Any]:
        """Return the fields of a JSON line."""
        fields: dict[str, Any] = {
            "prediction": self.text,
            "score": round(self.score, 6),
            "seconds": round(self.seconds, 3),
            "words": [
                {
                    "word": word.text,
                    "start": round(word.start, 3),
                    "end": round(word.end, 3),
                    "confidence": round(word.confidence, 4),
                }
                for word in self.words
            ],
        }
        if self.others:
            fields["n_best"] = [fields.copy(), *(other.record(settings) for other in self.others)]
        return fields


def _plain(answer: Transcript, settings: TranscribeRun) -> Iterator[str]:
    for one in [answer, *answer.others]:
        yield f"{one.text} ||| {one.score:.6f}" if settings.scores else one.text


def _json(answer: Transcript, settings: TranscribeRun) -> Iterator[str]:
    yield json.dumps(answer.record(settings), ensure_ascii=False)


# name -> the lines of a transcript
TRANSCRIPT_FORMATS: dict[str, Callable[[Transcript, Any], Iterator[str]]] = {
    "text": _plain,
    "json": _json,
    "srt": lambda answer, settings: iter(srt(answer.words).splitlines()),
    "vtt": lambda answer, settings: iter(vtt(answer.words).splitlines()),
}


# Texts


def tidy(text: str) -> str:
    """Return a transcript as it is learnt: with single spaces."""
    return " ".join(text.split())


def as_pair(given: SoundSource, forced: str | bool) -> tuple[SoundSource, str]:
    """Return a sound and the transcript to align: one for all, or what follows a TAB."""
    if str(forced).lower() != "true":
        return given, str(forced)
    if not isinstance(given, str) or "\t" not in given:
        raise UsageError(
            f"{given!r:.60}: no transcript; expected the sound, a TAB and its transcript, a table "
            "of both, or forced=TRANSCRIPT"
        )
    sound, _, text = given.partition("\t")
    return sound, text


def words_of_ids(ids: Sequence[int], tokenizer: Tokenizer) -> tuple[list[str], list[int]]:
    """Return the words of tokens, and to which of them each belongs; a space to the one before."""
    found = word_tokens(ids, tokenizer)
    of = {place: number for number, (_, places) in enumerate(found) for place in places}
    last = 0
    numbers: list[int] = []
    for place in range(len(ids)):
        last = of.get(place, last)
        numbers.append(last)
    return [word for word, _ in found], numbers


def learn_tokenizer(texts: Sequence[str], settings: TranscribeTrain) -> Tokenizer:
    """Learn the tokens that transcripts are written with."""
    if settings.tokenizer == "characters":
        return Characters.learn(texts)
    return train_tokenizer(texts, kind=settings.tokenizer, vocab=settings.pieces)


def load_language_model(folder: str, tokenizer: Tokenizer, device: Any = "cpu") -> FusionModel:
    """Load the language model that lm= names, whose tokens must be those of the transcripts."""
    model: Any
    model, config = load_folder(Path(folder), str(device))
    if config.get("task") != "language":
        raise UsageError(
            f"lm={folder} is a model for {config.get('task')}; expected one that was trained by: "
            "regard train language"
        )
    own = load_tokenizer(Path(folder))
    try:
        return FusionModel(model, own, tokenizer, context=model.config.max_length, device=device)
    except UsageError as error:
        raise UsageError(f"lm={folder}: {error}") from None


# Batches


class SpeechBatch(NamedTuple):
    """Spectrograms with their transcripts, shifted by one for a decoder."""

    sound: Tensor  # (b, t, mels)
    lengths: Tensor  # (b)
    texts: Tensor  # (b, l)
    text_lengths: Tensor  # (b)
    reads: Tensor  # (b, l + 1)
    writes: Tensor  # (b, l + 1), -1 at padding
    tokens: int  # with the end of each text
    frames: int


def make_batch(
    rows: Sequence[np.ndarray],
    sound: Tensor,
    lengths: Tensor,
    frames: int,
    tokenizer: Tokenizer,
    begin: Sequence[int] = (),
) -> SpeechBatch:
    """Put spectrograms and the ids of their transcripts together.

    A decoder writes them after `begin`, or the tokenizer's own first token.
    """
    begin = begin or [tokenizer.begin]
    texts, text_lengths = pad(rows, tokenizer.pad)
    reads, _ = pad([np.concatenate([begin, row]) for row in rows], tokenizer.pad)
    given = [-1] * (len(begin) - 1)
    writes, _ = pad([np.concatenate([given, row, [tokenizer.eos]]) for row in rows], -1)
    return SpeechBatch(
        sound,
        lengths,
        texts,
        text_lengths,
        reads,
        writes,
        sum(len(row) + 1 for row in rows),
        frames,
    )


def usual_decoding(train: Sounds) -> tuple[dict[str, Any], str | None]:
    """Return how to decode by default what is like the training sounds, and a note on the gate.

    Stretches are as long as what the model has learnt from, and the gate is left out where it
    would take such sounds for no speech.
    """
    longest = float(np.clip(train.seconds.max(), *_SEGMENTS))
    some = range(0, len(train), max(1, len(train) // _GATED))
    passed = sum(is_speech(train.read(i), train.format.rate) for i in some) / len(some)
    own: dict[str, Any] = {"segment_seconds": round(longest, 2)}
    if passed >= _SPEECH:
        return own, None
    note = f"only {passed:.0%} of some training sounds are like speech, so the model has gate=false"
    return {**own, "gate": False}, note


def speech_loss(
    model: Any,
    batch: SpeechBatch,
    ctc_weight: float,
    smoothing: float,
    inter_ctc: float = 0.0,
) -> Tensor:
    """Return weight * CTC + (1 - weight) * cross-entropy of the decoder, each summed.

    With inter_ctc the block in the middle has a share of CTC (Lee and Watanabe 2021).
    """
    if inter_ctc:
        depths = [len(model.encoder) // 2, len(model.encoder)]
        (middle, memory), lengths = model.encode_at(batch.sound, batch.lengths, depths)
        shares = [(middle, inter_ctc), (memory, 1 - inter_ctc)]
    else:
        memory, lengths = model.encode(batch.sound, batch.lengths)
        shares = [(memory, 1.0)]
    loss = memory.new_zeros(())
    if ctc_weight:
        for one, share in shares:
            each = ctc_loss(model.ctc_logits(one), lengths, batch.texts, batch.text_lengths)
            loss = loss + ctc_weight * share * each
    if ctc_weight < 1:
        hidden = model.decode(memory, lengths, batch.reads)
        real = batch.writes >= 0
        head, targets = model.head, batch.writes[real]
        entropy = linear_cross_entropy(
            hidden[real], head.weight, targets, bias=head.bias, smoothing=smoothing
        )
        loss = loss + (1 - ctc_weight) * entropy
    return loss


def check_alignable(
    part: str,
    sounds: Sounds,
    frames: Sequence[int],
    rows: Sequence[np.ndarray],
    broken: str,
) -> tuple[np.ndarray, str | None]:
    """Return the sounds that CTC can align to their texts, and a note where others are left out.

    `frames` are those of the encoder; a text that needs more is refused unless broken is skip.
    """
    bad = not_alignable(zip(frames, (row.tolist() for row in rows), strict=True))
    good = np.delete(np.arange(len(sounds)), bad)
    if not bad:
        return good, None
    first = bad[0]
    what = (
        f"{len(bad):,} of {len(sounds):,} sounds of the {part} part are too short for their "
        f"transcripts; the first is {sounds.where(first)}: {frames[first]} frames, but its "
        f"{len(rows[first])} tokens need {required_frames(rows[first].tolist())}"
    )
    if broken == "skip" and len(good):
        return good, f"{what}; they are left out"
    raise UsageError(
        f"{what}; correct them, leave them out with broken=skip, or choose subsampling=2, "
        "a smaller hop= or longer tokens"
    )
