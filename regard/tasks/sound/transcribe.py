"""Speech recognition: sounds with transcripts to a model that writes what is said."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from regard.data.sounds import Sounds
from regard.decode.ctc import LanguageModel
from regard.decode.ctc_align import required_frames
from regard.decode.no_speech import is_speech
from regard.decode.segments import Segment, cut_at_pauses, loudness
from regard.decode.speech import Recognised, SpeechDecoder, Utterance
from regard.decode.subtitles import join_words
from regard.decode.whisper import WhisperDecoder
from regard.errors import UsageError, lookup
from regard.metrics.speech import (
    NORMALISATIONS,
    compare_transcripts,
    transcript_errors,
    transcript_scores,
)
from regard.models import task_changes
from regard.pretrained.tokenizer_folder import load_tokenizer
from regard.tasks.frame.answers import Unread
from regard.tasks.frame.origin import Origin
from regard.tasks.frame.task import Data, Judged
from regard.tasks.sound.codec import (
    SoundBatches,
    SoundCodec,
    SoundTask,
    format_of,
    pad_sounds,
    with_statistics,
)
from regard.tasks.sound.transcribing import (
    CTC_WEIGHT,
    FORMATS,
    Batch,
    TranscribeEval,
    TranscribeLook,
    TranscribeRun,
    TranscribeTrain,
    Transcript,
    as_pair,
    check_alignable,
    learn_tokenizer,
    load_language_model,
    make_batch,
    speech_loss,
    tidy,
    usual_decoding,
    words_of_ids,
)


class Transcribe(SoundTask[Transcript]):
    """Write what is said in a sound, word by word with their times."""

    name, holds, unit, target = "transcribe", "sounds and transcripts", "utterances", "text"
    Train, Run, Eval, Look = TranscribeTrain, TranscribeRun, TranscribeEval, TranscribeLook
    better = "-wer"
    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "micro": {"lr": 0.002, "steps": 2000},
        "tiny": {"lr": 0.002, "steps": 4000},
        "small": {"lr": 0.001, "steps": 20_000, "batch_seconds": 200.0},
        "base": {"lr": 0.0007, "steps": 60_000, "batch_seconds": 400.0},
        "big": {"lr": 0.0005, "steps": 100_000, "batch_seconds": 800.0},
    }

    def __init__(self, model: Any, codec: SoundCodec, config: Mapping[str, Any] | None = None):
        super().__init__(model, codec, config)
        assert codec.tokenizer is not None
        self.tokenizer, hop = codec.tokenizer, codec.format.hop
        # a frame of the encoder stands for those of the spectrogram around its middle
        delay = (model.stride - 1) / 2 * hop - (codec.format.seconds(100) - 100 * hop)
        times: dict[str, Any] = {"seconds": model.stride * hop, "delay": delay}
        times["device"] = self.device
        if hasattr(model.config, "max_frames"):  # it reads windows of a length
            rules = self.config.get("generation", {}).get("rules")
            self.decoder = WhisperDecoder(model, self.tokenizer, rules=rules, **times)
        else:
            self.decoder = SpeechDecoder(model, self.tokenizer, **times)
        self._lm: tuple[str, LanguageModel] | None = None  # the last that was asked for

    # Training

    @classmethod
    def checked(cls, settings: Any, values: Mapping[str, Any], origin: Origin | None) -> Any:
        """Settle the heads of the model by the weight of CTC in the loss."""
        settings = super().checked(settings, values, origin)
        weight, depth = settings.ctc_weight, settings.model.decoder_depth
        if weight is None:
            weight = CTC_WEIGHT if depth else 1.0
        if weight < 1 and not depth:
            raise UsageError(
                f"ctc_weight={weight} leaves the rest to a decoder; add one with decoder_depth=2"
            )
        if weight == 1 and depth:
            raise UsageError(
                f"ctc_weight={weight} leaves nothing to learn for decoder_depth={depth}; "
                "lower it, or leave the decoder out"
            )
        model = settings.model if origin else replace(settings.model, ctc=weight > 0)
        if weight and not model.ctc:
            raise UsageError(f"ctc_weight={weight}: the model of init= has no CTC head; choose 0")
        return replace(settings, ctc_weight=weight, model=model)

    @classmethod
    def read(cls, settings: Any, origin: Origin | None) -> Data:
        """Read sounds and their transcripts."""
        data = cls.load_parts(settings)
        return Data(data, data.sha, data.notes, data.split)

    @classmethod
    def make_codec(cls, data: Data, settings: Any, learnt: Any, origin: Any) -> SoundCodec:
        """Take the format of the sounds, and learn the tokenizer of their transcripts."""
        train: Sounds = data.parts.parts["train"]
        texts = [tidy(text) for text in train.texts]
        tokenizer = learnt(lambda: learn_tokenizer(texts, settings))
        format = with_statistics(settings.sound, train)
        return SoundCodec(format, tokenizer=tokenizer, more=cls.reading(settings))

    @classmethod
    def make_model(cls, data: Data, codec: SoundCodec, settings: Any, origin: Any) -> Any:
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

    def batches(self, data: Data, settings: Any) -> SoundBatches:
        """Return batches of augmented spectrograms with their transcripts."""
        parts = data.parts.parts
        train, rows, note = self.usable("train", parts["train"], settings, settings.broken)
        data.notes.extend([note] if note else [])
        self.trained_on = len(train)
        self.generation, note = usual_decoding(train)
        data.notes.extend([note] if note else [])
        needed = [required_frames(row.tolist()) for row in rows]

        def too_short(i: int, frames: int) -> bool:
            return int(self.model.out_lengths(torch.tensor(frames))) < needed[i]

        def make(picked: np.ndarray, sound: Tensor, lengths: Tensor) -> Batch:
            return make_batch([rows[i] for i in picked], sound, lengths, self.tokenizer)

        return SoundBatches(train, self.format, settings, make, too_short)

    def count(self, batch: Batch) -> tuple[int, int]:
        """Return the tokens of the texts, which the loss counts, and the frames that were read."""
        return batch.tokens, batch.frames

    def loss(self, batch: Batch, settings: Any) -> Tensor:
        """Return the summed loss of CTC and of the decoder."""
        weights = settings.ctc_weight, settings.label_smoothing, settings.inter_ctc
        return speech_loss(self.model, batch, *weights)

    def decodes(self, data: Data, settings: Any) -> int:
        """Return how many sounds a validation transcribes."""
        return min(settings.valid_sounds, len(data.parts.parts["valid"]))

    def validate(self, data: Data, settings: Any, share: float = 1.0) -> dict[str, float]:
        """Return the loss a token, and the error rates of greedy transcripts."""
        valid: Sounds = data.parts.parts["valid"]
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
            features = [self.format.spectrogram(sounds.read(i)) for i in places]
            texts = [rows[i] for i in places]
            batch = make_batch(texts, *pad_sounds(features, self.device), self.tokenizer)
            total += float(speech_loss(self.model, batch, settings.ctc_weight, 0.0))
            tokens += batch.tokens
        return total / tokens

    def title(self, data: Data, settings: Any) -> str:
        """Return what the model card says that the model is."""
        heads = " and ".join(way for way in ("ctc", "attention") if way in self.decoder.ways)
        return f"Transcripts of speech ({heads})"

    def facts(self, data: Data, settings: Any) -> dict[str, Any]:
        """Return what recipe.json says beside the settings."""
        train: Sounds = data.parts.parts["train"]
        return {"sounds": self.trained_on, "hours": round(float(train.seconds.sum()) / 3600, 3)}

    # Using

    @classmethod
    def load_codec(cls, folder: Path, model: Any, config: Mapping[str, Any]) -> SoundCodec:
        """Read the format of sounds and the tokenizer."""
        if not getattr(model.config, "vocab", 0) or not hasattr(model, "encode"):
            raise UsageError(f"{folder / 'config.json'}: a model that writes no transcripts")
        tokenizer = load_tokenizer(folder)
        if tokenizer.vocab > model.config.vocab:
            raise UsageError(
                f"{folder}: the tokenizer has {tokenizer.vocab} pieces, the model only "
                f"{model.config.vocab}"
            )
        return SoundCodec(format_of(folder, model, config), tokenizer=tokenizer)

    @property
    def own(self) -> dict[str, Any]:
        """Return the model's own defaults of decoding; Whisper's is greedy."""
        greedy = {"beam": 1} if isinstance(self.decoder, WhisperDecoder) else {}
        return {**greedy, **super().own}

    def check_run(self, settings: Any) -> Any:
        """Refuse unknown names, and options that contradict each other or the model."""
        self.decoder.check(settings)
        if isinstance(settings, TranscribeRun):
            lookup("format", settings.format, FORMATS)
        if isinstance(settings, TranscribeEval):
            lookup("normalise", settings.normalise, NORMALISATIONS)
        return super().check_run(settings)

    def language_model(self, settings: Any) -> LanguageModel | None:
        """Return the language model that is asked for."""
        if settings.lm is None:
            return None
        if self._lm is None or self._lm[0] != settings.lm:
            lm = load_language_model(settings.lm, self.tokenizer, self.device)
            self._lm = settings.lm, lm
        return self._lm[1]

    def ids_of(self, text: str) -> list[int]:
        """Return the tokens of a transcript that is to be aligned, or refuse what is unknown."""
        ids = self.tokenizer.encode(tidy(text))
        unknown = [c for c in dict.fromkeys(text) if self.tokenizer.unk in self.tokenizer.encode(c)]
        if self.tokenizer.unk in ids or not ids:
            what = f"the model never wrote {''.join(unknown)!r:.40}" if ids else "it is empty"
            raise UsageError(f"forced={text!r:.60} cannot be aligned: {what}")
        return ids

    def cut(self, samples: np.ndarray, settings: Any) -> list[Segment]:
        """Return the stretches of a sound that are transcribed by themselves."""
        rate = self.format.rate
        found = [Segment(0, len(samples))]
        if settings.windows == "pauses":
            found = cut_at_pauses(samples, rate, settings.segment_seconds)
        return [one for one in found if not settings.gate or is_speech(samples[slice(*one)], rate)]

    def predict(self, inputs: list[Any], settings: Any, *, first: int = 0) -> list[Any]:
        """Transcribe sounds, or align the transcripts that are given."""
        if settings.forced is None:
            return super().predict(inputs, settings, first=first)
        pairs = [as_pair(given, settings.forced) for given in inputs]
        ids = [self.ids_of(text) for _, text in pairs]
        sounds = super().read_groups([sound for sound, _ in pairs], settings.broken)
        read = (one for group in sounds for one in group)
        return [
            Unread(one) if isinstance(one, str) else self.aligned(one, row, settings)
            for one, row in zip(read, ids, strict=True)
        ]

    def aligned(self, samples: np.ndarray, ids: list[int], settings: Any) -> Transcript:
        """Align a transcript to a sound, which is read in stretches if it is long."""
        rate, size = self.format.rate, self.format.sizes.hop * self.model.stride
        cuts = cut_at_pauses(samples, rate, settings.segment_seconds) or [Segment(0, len(samples))]
        firsts = [start // size for start, _ in cuts]  # so that all lie on one grid of frames
        stretches = [
            (first, self.spectrogram(samples[first * size : end]))
            for first, (_, end) in zip(firsts, cuts, strict=True)
        ]
        found = self.decoder.aligned(stretches, ids, loudness(samples, rate))
        return self.joined([(0.0, [found])], len(samples) / rate)

    def spectrogram(self, samples: np.ndarray) -> Tensor:
        """Return the spectrogram of samples; Whisper hears silence after them."""
        if not isinstance(self.decoder, WhisperDecoder):
            return self.format.spectrogram(samples)
        sizes = self.format.sizes
        padded = np.pad(samples, (0, sizes.window))
        return self.format.spectrogram(padded)[: max(1, len(samples) // sizes.hop)]

    def utterance(self, samples: np.ndarray) -> Utterance:
        """Return samples as they are decoded."""
        return Utterance(self.spectrogram(samples), loudness(samples, self.format.rate))

    def answer_sounds(
        self, sounds: list[np.ndarray], settings: Any, lines: list[int]
    ) -> list[Transcript]:
        """Transcribe samples, each cut at its pauses and put together again."""
        rate = self.format.rate
        cuts = [
            (n, *one) for n, samples in enumerate(sounds) for one in self.cut(samples, settings)
        ]
        pieces = [sounds[n][start:end] for n, start, end in cuts]
        utterances = [self.utterance(piece) for piece in pieces]
        frames = max(1, round(settings.batch_seconds / self.format.hop))
        lm = self.language_model(settings)
        found = self.decoder(utterances, settings, lm=lm, frames=frames)
        parts: list[list[tuple[float, list[Recognised]]]] = [[] for _ in sounds]
        for (n, start, _), some in zip(cuts, found, strict=True):
            parts[n].append((start / rate, some))
        return [
            self.joined(some, len(samples) / rate)
            for some, samples in zip(parts, sounds, strict=True)
        ]

    def joined(
        self, parts: Sequence[tuple[float, Sequence[Recognised]]], seconds: float
    ) -> Transcript:
        """Put the texts of the stretches of a sound together, the best hypotheses first."""
        ranks = []
        for rank in range(max((len(some) for _, some in parts), default=0) or 1):
            best = [(start, some[: rank + 1][-1]) for start, some in parts]
            words = [
                replace(
                    word,
                    start=min(seconds, max(0.0, start + word.start)),
                    end=min(seconds, max(0.0, start + word.end)),
                )
                for start, one in best
                for word in one.words
            ]
            text = join_words([one.text for _, one in best])
            ranks.append(Transcript(text, words, sum(one.score for _, one in best), seconds))
        ranks[0].others = ranks[1:]
        return ranks[0]

    def transcribe_part(self, sounds: Sounds, settings: Any) -> list[Transcript]:
        """Transcribe the sounds of a part."""
        answers: list[Transcript] = []
        for start in range(0, len(sounds), 256):
            some = range(start, min(len(sounds), start + 256))
            answers += self.answer_sounds([sounds.read(i) for i in some], settings, list(some))
        return answers

    # Judging

    def predict_examples(self, data: Data, settings: Any) -> list[Transcript]:
        """Transcribe each sound."""
        return self.transcribe_part(data.parts.parts[settings.part], settings)

    def predictions_of(self, other: Any, data: Data, settings: Any) -> list[Transcript]:
        """Return the transcripts of another model, which reads the sounds in its own format."""
        return super().predictions_of(other, other.read_test(settings), settings)

    def judge(self, data: Data, predictions: list[Transcript], settings: Any) -> Judged:
        """Return word and character error rates with their intervals."""
        sounds: Sounds = data.parts.parts[settings.part]
        given = [str(one) for one in predictions], sounds.texts, settings.normalise
        return Judged(transcript_scores(*given, settings.samples), len(sounds))

    def compare(self, data: Data, ours: Any, theirs: Any, settings: Any) -> Any:
        """Compare transcripts by a paired bootstrap."""
        references = data.parts.parts[settings.part].texts
        mine, other = ([str(one) for one in side] for side in (ours, theirs))
        more = settings.normalise, settings.samples
        return compare_transcripts(mine, other, references, *more)

    def outputs(
        self, data: Data, predictions: list[Transcript], settings: Any
    ) -> list[dict[str, Any]]:
        """Return each sound with its transcript and what was recognised."""
        sounds: Sounds = data.parts.parts[settings.part]
        rows = zip(range(len(predictions)), sounds.texts, predictions, strict=True)
        return [{"audio": sounds.where(i), "text": t, **p.record(settings)} for i, t, p in rows]

    def made_with(self, settings: Any) -> dict[str, Any]:
        """Return how transcripts were decoded."""
        names = TranscribeRun.__dataclass_fields__
        return {name: getattr(settings, name) for name in names if name != "threads"}

    # Looking

    def describe(
        self, samples: np.ndarray, settings: Any
    ) -> tuple[dict[str, Any], Callable[[], Any]]:
        """Transcribe a sound for its picture, with the posteriors of CTC and the words' times."""
        spectrogram, level = utterance = self.utterance(samples)
        if settings.forced is None:
            lm = self.language_model(settings)
            (found,) = self.decoder([utterance], settings, lm=lm)
        else:
            ids = self.ids_of(settings.forced)
            found = [self.decoder.aligned([(0, spectrogram)], ids, level)]
        best = found[0]
        told: dict[str, Any] = {
            "output": best.text,
            "alternatives": [(other.text, other.score) for other in found[1:]],
            "recording": {"words": best.words},
        }
        model, sound = self.model, pad_sounds([spectrogram], self.device)
        if model.config.ctc:
            told["recording"] |= self.decoder.posteriors(spectrogram)
        if not (model.config.decoder_depth and best.words):
            return told, lambda: model.encode(*sound)
        words, of = words_of_ids(best.ids, self.tokenizer)
        reads = torch.tensor([[self.tokenizer.begin, *best.ids]], device=self.device)
        told |= {"words": words, "word_of": of}
        return told, lambda: model.hidden(sound[0], reads, sound[1])
