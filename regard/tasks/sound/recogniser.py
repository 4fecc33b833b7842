"""Speech recognition with a trained model: transcripts, their scores, and what it attended to."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from regard.data.sound_augment import change_speed
from regard.data.sound_batches import pad_sounds
from regard.data.sounds import SoundData, Sounds
from regard.decode.speech.ctc import FusionModel
from regard.decode.speech.decoder import Recognised, SpeechDecoder, Utterance
from regard.decode.speech.no_speech import is_speech
from regard.decode.speech.segments import Segment, cut_at_pauses, loudness
from regard.decode.speech.subtitles import join_words
from regard.decode.speech.whisper import WhisperDecoder
from regard.errors import UsageError
from regard.metrics.score import Comparison
from regard.metrics.speech import compare_transcripts, transcript_scores
from regard.modalities.sound import SOUND
from regard.models.protocols import Model
from regard.pretrained.tokenizer_folder import load_tokenizer
from regard.tasks.frame.answers import Unread
from regard.tasks.frame.media import MediaCodec
from regard.tasks.frame.question import Question
from regard.tasks.parts import Judge, Predictor, ScoredPredictions, System, V
from regard.tasks.runner import Runner
from regard.tasks.sound.codec import (
    SoundSource,
    read_sounds,
)
from regard.tasks.sound.transcribing import (
    Hearing,
    TranscribeEval,
    TranscribeLook,
    TranscribeRun,
    Transcript,
    as_pair,
    load_language_model,
    tidy,
    words_of_ids,
)
from regard.training.loss import ctc_losses
from regard.viewer.picture import Picture

H = TypeVar("H", bound=Hearing)
_PART = 256  # sounds of a part that are in memory at once


def load_codec(folder: Path, model: Model, config: Mapping[str, Any]) -> MediaCodec:
    """Format of sounds and tokenizer of a folder."""
    if not getattr(model.config, "vocab", 0) or not hasattr(model, "encode"):
        raise UsageError(f"{folder / 'config.json'}: a model that writes no transcripts")
    tokenizer = load_tokenizer(folder)
    if tokenizer.vocab > model.config.vocab:
        raise UsageError(
            f"{folder}: the tokenizer has {tokenizer.vocab} pieces, the model only "
            f"{model.config.vocab}"
        )
    return MediaCodec(SOUND, SOUND.saved_format(folder, model, config), tokenizer=tokenizer)


class Recogniser(Predictor[Transcript | Unread, TranscribeRun, TranscribeLook, SoundSource]):
    """Writes what is said in a sound, word by word with their times."""

    Settings, Look = TranscribeRun, TranscribeLook

    def __init__(self, model: Any, codec: MediaCodec, config: Mapping[str, Any]):
        super().__init__(model, codec, config)
        assert codec.tokenizer is not None
        self.tokenizer, self.format, hop = codec.tokenizer, codec.format, codec.format.hop
        # a frame of the encoder stands for those of the spectrogram around its middle
        delay = (model.stride - 1) / 2 * hop - (codec.format.seconds(100) - 100 * hop)
        times: dict[str, Any] = {"seconds": model.stride * hop, "delay": delay}
        times["device"] = self.device
        if hasattr(model.config, "full_window"):  # it reads windows of one length
            rules = self.config.get("generation", {}).get("rules")
            self.decoder = WhisperDecoder(model, self.tokenizer, rules=rules, **times)
            self.defaults = {"beam": 1, **self.defaults}  # greedy
        else:
            self.decoder = SpeechDecoder(model, self.tokenizer, **times)
        self._lm: tuple[str, FusionModel] | None = None  # the last that was asked for

    def check(self, settings: V) -> V:
        """Refuse unknown names, and options that contradict each other or the model."""
        if not isinstance(settings, Hearing):
            return settings
        self.decoder.check(settings)
        if settings.speeds != (1.0,):
            settings = self.check_speeds(settings)
        format = getattr(settings, "format", "text")
        if format in ("srt", "vtt") and not self.decoder.times:
            raise UsageError(
                f"format={format} needs the times of words, which this model cannot "
                "tell: it has no CTC head; choose text"
            )
        return settings

    def check_speeds(self, settings: H) -> H:
        """Refuse several speeds where texts are not compared by CTC.

        Those that are the model's own default are left out there.
        """
        told = f"speeds={','.join(f'{speed:g}' for speed in settings.speeds)}"
        if not settings.speeds:
            raise UsageError("speeds= names none; expected factors such as 0.9,1.0,1.1")
        by_ctc = (settings.decoding or self.decoder.ways[0]) == "ctc"
        if settings.forced is None and by_ctc:
            return settings
        if list(settings.speeds) == self.defaults.get("speeds"):
            return replace(settings, speeds=(1.0,))
        if settings.forced is not None:
            raise UsageError(f"{told} is for recognising; leave it out with forced=")
        has = "add decoding=ctc" if "ctc" in self.decoder.ways else "leave it out"
        raise UsageError(f"{told} compares texts by CTC; {has}")

    def language_model(self, settings: Hearing) -> FusionModel | None:
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

    def cut(self, samples: np.ndarray, settings: Hearing) -> list[Segment]:
        """Return the stretches of a sound that are transcribed by themselves."""
        rate = self.format.rate
        found = [Segment(0, len(samples))]
        if settings.windows == "pauses":
            found = cut_at_pauses(samples, rate, settings.segment_seconds)
        return [one for one in found if not settings.gate or is_speech(samples[slice(*one)], rate)]

    def predict(self, inputs: list[Any], settings: TranscribeRun, *, first: int = 0) -> list[Any]:
        """Transcribe sounds, or align the transcripts that are given."""
        texts: list[list[int]] = []
        if settings.forced is not None:
            pairs = [as_pair(given, settings.forced) for given in inputs]
            inputs = [sound for sound, _ in pairs]
            texts = [self.ids_of(text) for _, text in pairs]
        answers: list[Any] = []
        for group, _ in self.codec.groups(inputs, settings):
            good = [n for n, raw in enumerate(group) if not isinstance(raw, str)]
            sounds = [group[n] for n in good]
            if settings.forced is None:
                written = self.transcribe(sounds, settings)
            else:
                ids = [texts[len(answers) + n] for n in good]
                written = [self.aligned(*both, settings) for both in zip(sounds, ids, strict=True)]
            rows = iter(written)
            answers += [Unread(raw) if isinstance(raw, str) else next(rows) for raw in group]
        return answers

    def aligned(self, samples: np.ndarray, ids: list[int], settings: Hearing) -> Transcript:
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

    def transcribe(self, sounds: Sequence[np.ndarray], settings: Hearing) -> list[Transcript]:
        """Transcripts of samples, each cut at its pauses and put together again."""
        if not sounds:
            return []
        heard = self.recognise(sounds, settings)
        return [
            self.joined(some, len(samples) / self.format.rate)
            for some, samples in zip(heard, sounds, strict=True)
        ]

    def recognise(
        self, sounds: Sequence[np.ndarray], settings: Hearing
    ) -> list[list[tuple[float, list[Recognised]]]]:
        """Return the texts of the stretches of each sound, and in which second they begin."""
        rate = self.format.rate
        cuts = [
            (n, *one) for n, samples in enumerate(sounds) for one in self.cut(samples, settings)
        ]
        pieces = [sounds[n][start:end] for n, start, end in cuts]
        frames = max(1, round(settings.batch_seconds / self.format.hop))
        more: dict[str, Any] = {"lm": self.language_model(settings), "frames": frames}
        if settings.speeds == (1.0,):
            found = self.decoder([self.utterance(piece) for piece in pieces], settings, **more)
        else:
            speeds = settings.speeds
            played = [[self.utterance(change_speed(x, speed)) for speed in speeds] for x in pieces]
            found = self.decoder.at_speeds(played, speeds, settings, **more)
        parts: list[list[tuple[float, list[Recognised]]]] = [[] for _ in sounds]
        for (n, start, _), some in zip(cuts, found, strict=True):
            parts[n].append((start / rate, some))
        return parts

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

    def transcribe_part(self, sounds: Sounds, settings: TranscribeRun) -> list[Transcript]:
        """Transcripts of the sounds of a part."""
        answers: list[Transcript] = []
        for start in range(0, len(sounds), _PART):
            some = range(start, min(len(sounds), start + _PART))
            answers += self.transcribe([sounds.read(i) for i in some], settings)
        return answers

    # Looking

    def answer_logprobs(
        self, given: SoundSource, settings: TranscribeLook, expected: Any = None
    ) -> Question:
        """A sound with its transcript and the log-probability of that, by CTC if it can."""
        model = self.model
        samples = self.format.read(given)
        spectrogram = self.spectrogram(samples)
        best = expected
        if best is None and settings.forced is not None:
            best = self.ids_of(settings.forced)
        elif best is None:
            best = _ids(self.recognise([samples], settings)[0])
        if not best:
            raise UsageError("nothing was heard in this sound, so there is no answer to explain")
        prompt = self.decoder.prompt_of(spectrogram, settings)
        reads = torch.tensor([[*prompt, *best]], device=self.device)

        @torch.inference_mode()
        def logprobs(copies: int) -> Tensor:
            sounds = pad_sounds([spectrogram] * copies, self.device)
            target = () if model.config.ctc else (reads.expand(copies, -1),)
            return model(*sounds, *target).double().log_softmax(-1)

        def ctc(table: Tensor) -> Tensor:
            long, short = (torch.full((len(table),), n) for n in (table.shape[1], len(best)))
            targets = torch.tensor([best] * len(table))
            return -ctc_losses(table.cpu(), long, targets, short)

        chosen = [*prompt[1:], *best, self.tokenizer.eos]
        places = self.tokenizer.pieces(reads[0].tolist())
        tokens = SOUND.moments(model, len(spectrogram), self.format)
        if model.config.ctc:  # the sum over all alignments; a step is a frame
            chosen = logprobs(1)[0].argmax(-1).tolist()
            places = list(tokens.tokens)
        return Question(
            answer=self.tokenizer.decode(best).strip(),
            logprobs=logprobs,
            chosen=chosen,
            names=self.tokenizer.pieces,
            places=places,
            expected=best,
            first=len(prompt) - 1,
            score=ctc if model.config.ctc else None,
            **tokens._asdict(),
        )

    def explain(self, given: SoundSource, settings: TranscribeLook) -> Picture:
        """Watch the model while it transcribes a sound, and gather where it looked."""

        def describe(raws: Sequence[np.ndarray]) -> dict[str, Any]:
            return self.described(raws[0], settings)

        return self.codec.picture(self.model, given, settings, describe)

    def described(self, samples: np.ndarray, settings: TranscribeLook) -> dict[str, Any]:
        """Transcript of a sound for its picture, with the posteriors of CTC and times of words."""
        spectrogram, level = self.utterance(samples)
        if settings.forced is None:
            (heard,) = self.recognise([samples], settings)
        else:
            ids = self.ids_of(settings.forced)
            heard = [(0.0, [self.decoder.aligned([(0, spectrogram)], ids, level)])]
        best, ids = self.joined(heard, len(samples) / self.format.rate), _ids(heard)
        model, sound = self.model, pad_sounds([spectrogram], self.device)
        fields: dict[str, Any] = {
            "output": best.text,
            "alternatives": [(other.text, other.score) for other in best.others],
            "recording": {"words": best.words},
            "forward": lambda: model.encode(*sound),
        }
        if model.config.ctc:
            fields["recording"] |= self.decoder.posteriors(spectrogram)
        if not (model.config.decoder_depth and best.words):
            return fields
        words, of = words_of_ids(ids, self.tokenizer)
        prompt = self.decoder.prompt_of(spectrogram, settings)
        reads = torch.tensor([[*prompt, *ids]], device=self.device)
        return {
            **fields,
            "words": words,
            "word_of": of,
            "first": len(prompt) - 1,
            "forward": lambda: model.hidden(sound[0], reads, sound[1]),
        }


def _ids(heard: Sequence[tuple[float, Sequence[Recognised]]]) -> list[int]:
    """Return the tokens of the best texts of stretches, one after the other."""
    return [token for _, texts in heard for token in texts[0].ids]


class TranscriptJudge(Judge[SoundData, TranscribeEval, Sequence[Transcript]]):
    """Judges transcripts by the words and characters that are wrong."""

    def entrants(
        self, runners: Sequence[Runner[Any]], settings: TranscribeEval, given: Mapping[str, Any]
    ) -> list[tuple[Runner[Any], Any]]:
        """Models with the same settings, or a refusal of what one of them cannot do."""
        entrants = super().entrants(runners, settings, given)
        return [entrants[0], *((one, one.predictor.check(asked)) for one, asked in entrants[1:])]

    def read(self, runner: Runner[Any], settings: TranscribeEval) -> SoundData:
        """The part that is judged."""
        return read_sounds(runner, settings)

    def predict(
        self,
        runner: Runner[Any],
        data: SoundData,
        settings: TranscribeEval,
        like: Runner[Any] | None = None,
    ) -> list[Transcript]:
        """Transcript of each sound, which a model reads in its own format."""
        if like is not None:
            data = self.read(runner, settings)
        return runner.predictor.transcribe_part(data[settings.part], settings)

    def score(
        self,
        runner: Runner[Any],
        data: SoundData,
        predictions: Sequence[Transcript],
        settings: TranscribeEval,
        systems: Sequence[System] = (),
    ) -> ScoredPredictions:
        """Word and character error rates with their intervals, and how texts were decoded."""
        sounds = data[settings.part]
        texts = [str(one) for one in predictions]
        scores = transcript_scores(texts, sounds.texts, settings.normalise, settings.samples)
        names = set(TranscribeRun.__dataclass_fields__) - {"threads", "columns", "rate"}
        made_with = {name: getattr(settings, name) for name in sorted(names)}
        rows = [
            {"audio": sounds.where(i), "text": text, **answer.record(settings)}
            for i, (text, answer) in enumerate(zip(sounds.texts, predictions, strict=True))
        ]
        return ScoredPredictions(scores, len(sounds), made_with=made_with, rows=rows)

    def compare(
        self,
        runner: Runner[Any],
        data: SoundData,
        theirs: System,
        ours: Any,
        settings: TranscribeEval,
    ) -> list[Comparison]:
        """Comparison of transcripts by a paired bootstrap."""
        mine, other = ([str(one) for one in side] for side in (ours, theirs.predictions))
        references = data[settings.part].texts
        return compare_transcripts(mine, other, references, settings.normalise, settings.samples)
