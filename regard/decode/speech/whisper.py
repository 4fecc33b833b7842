"""Whisper's way to write: prompts, timestamps, silence, long recordings and the times of words.

A window of sound is read once; its text comes after a prompt that names language and task, and
may hold timestamps, by which a long recording is followed from window to window. What is no speech
or only repeats itself is left out or tried again at a higher temperature (Radford et al. 2022).
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, inf
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from regard.attention.watch import watch
from regard.data.languages import language_of
from regard.data.tokenizer import Tokenizer
from regard.decode.batching import in_batches
from regard.decode.constraints import forbid
from regard.decode.decoder import decode
from regard.decode.rules import GenerationConfig, RuleInputs
from regard.decode.search import Hypothesis
from regard.decode.speech.ctc import FusionModel
from regard.decode.speech.decoder import (
    OverMemory,
    Recognised,
    SpeechDecoder,
    Utterance,
    distinct,
)
from regard.decode.speech.options import WINDOWS, WhisperDecoding
from regard.decode.speech.words import Word, word_tokens
from regard.errors import UsageError, lookup
from regard.native.processor import check_dtype

_MOST_WINDOWS = 16  # that are decoded at once
_MAX_MEMORY_BYTES = 2**30  # of the keys and values of their memories
_MEDIAN = 7  # frames over which attention weights are smoothed
# at which a window is tried again that came out improbable or repetitive
_TEMPERATURES = (0.2, 0.4, 0.6, 0.8, 1.0)
_REPETITIVE = 2.4  # times that a text can be compressed
_IMPROBABLE = -1.0  # mean log-probability of its tokens
_REPEATS, _LONGEST_REPEAT = 4, 32  # of the same tokens at the end of a text, which are then cut off


class SoundWindow(NamedTuple):
    """A stretch of a recording: its features (frames, mels), and at which frame it begins."""

    features: Tensor
    first: int = 0


@dataclass(frozen=True)
class WindowText:
    """What came out for a window: texts, the best first, with timestamps among their tokens.

    `spans` are the frames of the memory of each token of the best text but for timestamps.
    """

    texts: list[Hypothesis]
    no_speech: float  # probability
    language: int | None = None  # its token
    spans: Sequence[tuple[int, int]] = ()

    @property
    def score(self) -> float:
        """Mean log-probability of the tokens of the best text."""
        return self.texts[0].score


class Timestamps:
    """Timestamps come in pairs but for the last, never go back, and begin a text.

    Where all of them together are likelier than any word, one of them is taken.
    """

    def __init__(self, none: int, eos: int, most_initial: int | None = None):
        """Take the token that says there are none, after which they begin, and the first end."""
        self.none, self.first, self.eos, self.most_initial = none, none + 1, eos, most_initial

    def __call__(self, logits: Tensor, written: Tensor) -> Tensor:
        """Forbid what cannot follow the tokens (b, t) that are written."""
        first = self.first
        logits[:, self.none] = -inf
        stamps = written >= first
        last = stamps[:, -1:].any(1)
        before = stamps[:, -2:-1].any(1) if written.shape[1] > 1 else torch.ones_like(last)
        logits[:, first:].masked_fill_((last & before).unsqueeze(1), -inf)
        logits[:, : self.eos].masked_fill_((last & ~before).unsqueeze(1), -inf)
        if written.shape[1] == 0:
            logits[:, :first] = -inf
            if self.most_initial is not None:
                logits[:, first + self.most_initial + 1 :] = -inf
        else:
            # the last one may stand twice, as the end of one stretch and the beginning of the next
            latest = written.masked_fill(~stamps, 0).amax(1)
            least = latest + (~(last & ~before) & (latest > 0))
            numbers = torch.arange(first, logits.shape[1], device=logits.device)
            logits[:, first:].masked_fill_(numbers < least.unsqueeze(1), -inf)
        likelier = logits[:, first:].logsumexp(1) > logits[:, :first].amax(1)
        logits[:, :first].masked_fill_(likelier.unsqueeze(1), -inf)
        return logits


class FirstLogits(OverMemory):
    """A model as a Writer over a memory, and the logits (b, vocab) after its first tokens.

    They tell whether there is speech.
    """

    def __init__(self, model: Any):
        super().__init__(model)
        self.first: Tensor | None = None

    def step(self, ids: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Read the next tokens of all hypotheses and return the logits after each."""
        logits, state = self.model.step(ids, state)
        if self.first is None:
            self.first = logits[:, 0].clone()
        return logits, state


class WhisperDecoder(SpeechDecoder[WhisperDecoding]):
    """Decodes with a Whisper model by the rules of its checkpoint's generation_config.json.

    `rules` are None for a model of our own; `seconds` are those of a vector of the memory.
    """

    model: Any  # whose memory can be kept: encode, decode, start_from, step and head

    def __init__(self, model: Any, tokenizer: Tokenizer, *, rules: Any = None, **times: Any):
        super().__init__(model, tokenizer, **times)
        config = model.config
        if rules is not None:
            rules = {"eos_token_id": list(tokenizer.ends), **rules}
        self.config = GenerationConfig(rules, tokenizer.eos, config.vocab, tokenizer.begin)
        told = self.rules = self.config.rules
        self.frames: int = model.stride * config.max_frames  # of a window
        self.plain: int | None = told.get("no_timestamps_token_id")
        # the token of the timestamp 0.00; beyond all tokens where there are none
        self.first_timestamp = config.vocab if self.plain is None else self.plain + 1
        names: Mapping[str, int] = told.get("lang_to_id", {})
        self.languages = {name.strip("<|>"): token for name, token in names.items()}
        self.tasks: Mapping[str, int] = told.get("task_to_id", {})
        layers, each = config.decoder_depth, config.block.heads
        upper = [(n, head) for n in range(layers // 2, layers) for head in range(each)]
        self.heads: list[tuple[int, int]] = told.get("alignment_heads", upper)
        for layer, head in self.heads:
            if layer >= layers or head >= each:
                raise UsageError(
                    f"alignment_heads has {[layer, head]}; the decoder has {layers} layers of "
                    f"{each} heads"
                )

    @property
    def begin(self) -> list[int]:
        """Tokens that a text without timestamps is written after, to be trained so."""
        prompt = self.prompt(WhisperDecoding(), timestamps=False)
        if None in prompt:
            raise UsageError(
                "a model of several languages learns one; name it as 'language' in "
                "generation_config.json of the model that init= names"
            )
        return [token for token in prompt if token is not None]

    @torch.inference_mode()
    def prompt_of(self, features: Tensor, options: WhisperDecoding) -> list[int]:
        """Prompt of a window (t, mels), with the language that is heard in it."""
        memory, lengths = self.model.encode(features.unsqueeze(0).to(self.device))
        return self.prompts(memory, lengths, options, timestamps=False)[0].tolist()

    @property
    def times(self) -> bool:
        """True: words have times, by cross-attention."""
        return True

    def check(self, options: WhisperDecoding) -> None:
        """Refuse options that contradict each other or the model."""
        options.check()
        if options.quantise != "none" and options.dtype != "float32":
            both = f"dtype={options.dtype} and quantise={options.quantise}"
            raise UsageError(f"{both} exclude each other; leave one out")
        check_dtype(options.dtype)
        if options.decoding not in (None, "attention"):
            raise UsageError(
                f"decoding={options.decoding}: this model has no CTC head; leave it out"
            )
        if options.lm is not None or options.length_bonus:
            what = "lm" if options.lm is not None else "length_bonus"
            raise UsageError(f"{what}= is for models with a CTC head; Whisper has none")
        self.prompt(options, WINDOWS[options.windows])

    # The prompt

    def language_token(self, name: str) -> int:
        """Token of a language by its code or name."""
        code = name.strip().lower().strip("<|>")
        code = code if code in self.languages else language_of(code) or code
        if code not in self.languages:
            known = ", ".join(self.languages) or "none: it writes one language only"
            raise UsageError(f"language={name!r:.40} is not one that the model knows ({known})")
        return self.languages[code]

    def prompt(self, options: WhisperDecoding, timestamps: bool) -> list[int | None]:
        """Tokens that a text is written after; None is the language, to be detected."""
        told = self.rules
        made: list[int | None] = [self.config.begin]
        name = options.language or told.get("language", "")
        asked = name or options.translate or "task" in told
        if "forced_decoder_ids" in told and not asked:
            made += told["forced_decoder_ids"]
        elif self.languages and told.get("is_multilingual", True):
            made.append(self.language_token(name) if name else None)
            if self.tasks:
                task = "translate" if options.translate else told.get("task", "transcribe")
                made.append(lookup("task", task, self.tasks))
        elif options.language or options.translate:
            what = f"language={options.language}" if options.language else "translate=true"
            raise UsageError(f"{what} is for a model of several languages; this one knows one")
        if made[-1] == self.plain:
            made.pop()
        if timestamps and self.plain is None:
            raise UsageError("windows=timestamps: this model writes no timestamps; leave it out")
        if not timestamps and self.plain is not None:
            made.append(self.plain)
        if None in made and not self.languages:
            raise UsageError(
                "forced_decoder_ids leave the language open, and no lang_to_id is there"
            )
        return made

    def prompts(
        self, memory: Tensor, lengths: Tensor, options: WhisperDecoding, timestamps: bool
    ) -> Tensor:
        """Prompt of each window (b, l), with the language that is heard in it."""
        prompt = self.prompt(options, timestamps)
        made = torch.tensor([-1 if token is None else token for token in prompt])
        made = made.to(memory.device).repeat(len(memory), 1)
        if None in prompt:
            state = self.model.start_from(memory, lengths, capacity=1)
            logits = self.model.step(made[:, :1], state)[0][:, -1]
            tokens = made.new_tensor(list(self.languages.values()))
            made[:, prompt.index(None)] = tokens[logits[:, tokens].argmax(1)]
        return made

    # A batch of windows

    @torch.inference_mode()
    def write(
        self,
        memory: Tensor,
        lengths: Tensor,
        options: WhisperDecoding,
        timestamps: bool = False,
        lines: Sequence[int] = (),
    ) -> list[WindowText]:
        """Write the texts of windows over their memory; `lines` number them for random draws.

        Args:
            memory: encoded windows (b, s, w)
            lengths: number of real vectors of each
            options: how to decode
            timestamps: write timestamps, too
            lines: numbers of the windows, which seed sampling
        """
        prompts = self.prompts(memory, lengths, options, timestamps)
        lines = list(lines) or list(range(len(memory)))
        made = self._write(memory, lengths, prompts, options, timestamps, lines)
        if not options.fallback or options.sampling:
            return made
        for temperature in _TEMPERATURES:
            again = [n for n, one in enumerate(made) if self.failed(one, options)]
            if not again:
                return made
            retried = self._write(
                memory[again],
                lengths[again],
                prompts[again],
                replace(options, temperature=temperature, beam=1),
                timestamps,
                [lines[n] for n in again],
            )
            for n, one in zip(again, retried, strict=True):
                made[n] = one
        return [self._cut(one) if self.repetitive(one) else one for one in made]

    def _write(
        self,
        memory: Tensor,
        lengths: Tensor,
        prompts: Tensor,
        options: WhisperDecoding,
        timestamps: bool,
        lines: list[int],
    ) -> list[WindowText]:
        """Write texts once, by greedy decoding, a beam or sampling."""
        config, rows, positions = self.config, prompts.tolist(), self.model.config.max_length
        room = (config.longest or positions) - prompts.shape[1]
        most = max(1, min(positions // 2, room))
        if options.max_length is not None:
            most = min(options.max_length, positions - prompts.shape[1] + 1)
        before = [row[:1] for row in rows] if "forced_bos_token_id" in self.rules else rows
        given = RuleInputs(
            config.all_ends, before, read=[[]] * len(rows), limits=[most] * len(rows)
        )
        adjust: list[Any] = [forbid(*self.never)] if self.never else []
        adjust += config.changes(given)
        if timestamps:
            assert self.plain is not None
            limit = self.rules.get("max_initial_timestamp_index")
            adjust.append(Timestamps(self.plain, config.all_ends[0], limit))
        writer = FirstLogits(self.model)
        constraints = replace(
            config.constraints, begin=prompts, adjust=adjust, max_length=most, lines=lines
        )
        texts = decode(writer, memory, lengths, options, constraints)
        silent = [0.0] * len(rows)
        if self.plain is not None and writer.first is not None:
            silent = writer.first.float().softmax(1)[:, self.plain - 1].tolist()
        known = set(self.languages.values())
        spoken = [next((token for token in row[1:2] if token in known), None) for row in rows]
        made = zip(texts, silent, spoken, strict=True)
        return [WindowText(some, none, language) for some, none, language in made]

    def text_ids(self, ids: Sequence[int]) -> list[int]:
        """Tokens of a text, without timestamps and ends."""
        ends = set(self.config.all_ends)
        return [token for token in ids if token < self.first_timestamp and token not in ends]

    def text(self, ids: Sequence[int]) -> str:
        """Text of tokens, without timestamps."""
        return self.tokenizer.decode(self.text_ids(ids))

    def silent(self, written: WindowText, options: WhisperDecoding) -> bool:
        """True if a window holds no speech: likely none, and what was written improbable."""
        return written.no_speech > options.no_speech and written.score <= _IMPROBABLE

    def repetitive(self, written: WindowText) -> bool:
        """True if the best text repeats itself."""
        return compression_ratio(self.text(written.texts[0].ids)) > _REPETITIVE

    def failed(self, written: WindowText, options: WhisperDecoding) -> bool:
        """True if a window is to be tried again."""
        improbable = written.score < _IMPROBABLE and not self.silent(written, options)
        return improbable or self.repetitive(written)

    def _cut(self, written: WindowText) -> WindowText:
        """Cut off what repeats itself at the end of the best text."""
        best = written.texts[0]
        keep = without_repetition(best.ids)
        best = replace(best, ids=best.ids[:keep], steps=best.steps[:keep])
        return replace(written, texts=[best, *written.texts[1:]])

    # Utterances

    def __call__(
        self,
        utterances: Sequence[Utterance],
        options: WhisperDecoding,
        *,
        lm: FusionModel | None = None,
        frames: int = 20_000,
    ) -> list[list[Recognised]]:
        """Best texts of each utterance, whose windows are decoded in batches.

        One that is longer than a window is followed from window to window by its timestamps.
        """
        sounds = [one.features for one in utterances]
        if not WINDOWS[options.windows]:
            for sound in sounds:
                if len(sound) > self.frames:
                    seconds = self.seconds / self.model.stride
                    raise UsageError(
                        f"a stretch of {len(sound) * seconds:.1f} seconds is longer than the "
                        f"{self.frames * seconds:g} that the model reads at once; choose a smaller "
                        "segment_seconds=, or windows=timestamps"
                    )
            made = self.windows(list(map(SoundWindow, sounds)), options, False)
            return [self.recognised_window(one, options) for one in made]
        parts: list[list[Recognised]] = [[] for _ in sounds]
        seek = [0] * len(sounds)
        while waiting := [n for n, sound in enumerate(sounds) if seek[n] < len(sound)]:
            some = [SoundWindow(sounds[n][seek[n] :][: self.frames], seek[n]) for n in waiting]
            for n, window, one in zip(
                waiting, some, self.windows(some, options, True), strict=True
            ):
                found, forward = self.segments(window, one, options)
                parts[n] += found
                seek[n] += forward
        return [[self._joined(some)] for some in parts]

    def windows(
        self, windows: list[SoundWindow], options: WhisperDecoding, timestamps: bool
    ) -> list[WindowText]:
        """Write windows, in batches that share the work of the threads."""
        config = self.model.config
        memory = 8 * config.max_frames * config.block.width * config.decoder_depth
        workers = torch.get_num_threads() if self.device.type == "cpu" else 1
        rows = min(_MOST_WINDOWS, _MAX_MEMORY_BYTES // memory, -(-len(windows) // workers))

        def write(some: list[tuple[int, SoundWindow]]) -> list[WindowText]:
            return self._batch(some, options, timestamps)

        lengths = [1] * len(windows)
        return in_batches(
            list(enumerate(windows)), lengths, write, rows=max(1, rows), workers=workers
        )

    @torch.inference_mode()
    def _batch(
        self, numbered: list[tuple[int, SoundWindow]], options: WhisperDecoding, timestamps: bool
    ) -> list[WindowText]:
        """Encode windows, write their texts and find the times of words."""
        windows = [window for _, window in numbered]
        shape = len(windows), self.frames, self.model.config.mels
        sound = torch.zeros(shape, device=self.device)
        for row, window in zip(sound, windows, strict=True):
            row[: len(window.features)] = window.features
        memory, lengths = self.model.encode(sound)
        made = self.write(memory, lengths, options, timestamps, [n for n, _ in numbered])
        if not options.words:
            return made
        texts = [self.text_ids(one.texts[0].ids) for one in made]
        frames = [len(window.features) // self.model.stride for window in windows]
        before = [self._plain_prompt(one.language, options) for one in made]
        spans = self.align(memory, lengths, before, texts, frames)
        return [replace(one, spans=some) for one, some in zip(made, spans, strict=True)]

    # Texts

    def recognised_window(self, written: WindowText, options: WhisperDecoding) -> list[Recognised]:
        """Texts of a window without timestamps; none where there is no speech."""
        if self.silent(written, options):
            return [Recognised([], "", 0.0)]
        first, *others = written.texts
        best = self._recognised(first.ids, first.steps, first.score, written.spans)
        rest = [self._recognised(one.ids, one.steps, one.score) for one in others]
        return distinct([best, *rest])

    def segments(
        self, window: SoundWindow, written: WindowText, options: WhisperDecoding
    ) -> tuple[list[Recognised], int]:
        """Texts between the timestamps of a window, and how far it was read."""
        size, best = len(window.features), written.texts[0]
        if self.silent(written, options):
            return [], size
        stride = self.model.stride
        stretches, forward = stretches_of(best.ids, self.first_timestamp, stride, size)
        offset, made, at, place = window.first * self.seconds / stride, [], 0, 0
        for first, last, ids in stretches:
            count = len(self.text_ids(ids))
            steps, spans = best.steps[at : at + len(ids)], written.spans[place : place + count]
            at, place = at + len(ids), place + count
            found = self._recognised(ids, steps, written.score, spans, offset)
            if first != last and found.text:
                made.append(found)
        return made, forward

    def _recognised(
        self,
        ids: Sequence[int],
        steps: Sequence[float],
        score: float,
        spans: Sequence[tuple[int, int]] = (),
        offset: float = 0.0,
    ) -> Recognised:
        """Text with the times of its words, where their frames are known."""
        kept = self.text_ids(ids)
        found: list[Word] = []
        if spans:
            ends = set(self.config.all_ends)
            sure = [
                exp(min(0.0, step))
                for token, step in zip(ids, steps, strict=False)
                if token < self.first_timestamp and token not in ends
            ]
            found = [
                Word(
                    text,
                    offset + spans[some[0]][0] * self.seconds,
                    offset + spans[some[-1]][1] * self.seconds,
                    min(sure[n] for n in some),
                )
                for text, some in word_tokens(kept, self.tokenizer)
            ]
        return Recognised(kept, self.tokenizer.decode(kept), score, found)

    def _joined(self, parts: Sequence[Recognised]) -> Recognised:
        """Segments of a recording as one text."""
        return Recognised(
            [token for part in parts for token in part.ids],
            "".join(part.text for part in parts),
            sum(part.score for part in parts),
            [word for part in parts for word in part.words],
        )

    # Times of words

    def _plain_prompt(self, language: int | None, options: WhisperDecoding) -> list[int]:
        """Prompt before a text that is aligned, without timestamps."""
        prompt = self.prompt(options, timestamps=False)
        filled = [language if token is None else token for token in prompt]
        return [token for token in filled if token is not None]

    @torch.inference_mode()
    def align(
        self,
        memory: Tensor,
        lengths: Tensor,
        prompts: Sequence[Sequence[int]],
        texts: Sequence[Sequence[int]],
        frames: Sequence[int],
    ) -> list[list[tuple[int, int]]]:
        """Vectors of the memory in which each token of each text is spoken.

        They are read off the heads of cross-attention that follow the sound, by dynamic time
        warping; the first so many `frames` of each memory are of sound.

        Args:
            memory: encoded windows (b, s, w)
            lengths: number of real vectors of each
            prompts: ids before each text
            texts: ids of each text
            frames: number of vectors of sound in each memory
        """
        end = self.config.all_ends[0]
        rows = [[*prompt, *text, end] for prompt, text in zip(prompts, texts, strict=True)]
        longest = max(map(len, rows), default=0)
        ids = torch.tensor([row + [end] * (longest - len(row)) for row in rows])
        with watch(self.model) as maps:
            self.model.decode(memory, lengths, ids.to(memory.device))
        spans = []
        for n, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            if not text or frames[n] < 1:
                spans.append([(0, 0)] * len(text))
                continue
            heads = [
                maps[f"decoder.{layer}.cross"].weights(n, head, slice(0, len(rows[n])))[0, 0]
                for layer, head in self.heads
            ]
            weights = torch.stack(heads)[..., : frames[n]].float()
            weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-30)
            matrix = smoothed(weights)[len(prompt) - 1 : -1]
            jumps = first_columns(-matrix.double().cpu().numpy())
            spans.append(list(zip(jumps[:-1], jumps[1:], strict=True)))
        return spans

    @torch.inference_mode()
    def aligned(
        self,
        stretches: Sequence[tuple[int, Tensor]],
        ids: Sequence[int],
        level: np.ndarray | None = None,
    ) -> Recognised:
        """Align a text to a sound of one window."""
        if len(stretches) > 1 or len(stretches[0][1]) > self.frames:
            seconds = self.frames * self.seconds / self.model.stride
            raise UsageError(
                f"forced= is for sounds of up to {seconds:g} seconds with this model; cut it"
            )
        first, features = stretches[0]
        memory, lengths = self.model.encode(features.unsqueeze(0).to(self.device))
        options = WhisperDecoding()
        prompt = self.prompts(memory, lengths, options, timestamps=False)
        reads = torch.cat([prompt, prompt.new_tensor([[*ids]])], 1)
        logits = self.model.head(self.model.decode(memory, lengths, reads))[
            0, prompt.shape[1] - 1 :
        ]
        steps = logits[:-1].log_softmax(1)[range(len(ids)), list(ids)].tolist()
        frames = [len(features) // self.model.stride]
        (spans,) = self.align(memory, lengths, prompt.tolist(), [list(ids)], frames)
        offset = first * self.seconds
        return self._recognised(ids, steps, sum(steps), spans, offset)


def compression_ratio(text: str) -> float:
    """Compression ratio of a text by zlib; repetitions make it large."""
    data = text.encode()
    return len(data) / len(zlib.compress(data))


def without_repetition(ids: Sequence[int]) -> int:
    """Number of tokens that remain when repetitions at the end are cut to one."""
    ids = list(ids)
    for period in range(1, _LONGEST_REPEAT + 1):
        size = len(ids)
        while size > period and ids[size - 1] == ids[size - 1 - period]:
            size -= 1
        if len(ids) - size >= (_REPEATS - 1) * period:
            return size
    return len(ids)


def stretches_of(
    ids: Sequence[int], first_timestamp: int, stride: int, size: int
) -> tuple[list[tuple[int, int, list[int]]], int]:
    """Part a window's tokens at its timestamps: (first tick, last tick, tokens) of each stretch.

    A tick is `stride` frames, of which the window has `size`. What comes after the last pair of
    timestamps is left for the next window: also returns after how many frames that begins.
    """
    ids = list(ids)
    stamps = [token >= first_timestamp for token in ids]
    ends = [n + 1 for n in range(len(ids) - 1) if stamps[n] and stamps[n + 1]]
    alone = stamps[-2:] == [False, True]  # no speech after the last one
    if not ends:
        found = [token for token in ids if token >= first_timestamp]
        last = found[-1] - first_timestamp if found else 0
        return [(0, last or -(-size // stride), ids)], size
    slices = [0, *ends, *([len(ids)] if alone else [])]
    parts = []
    for start, stop in zip(slices[:-1], slices[1:], strict=True):
        some = ids[start:stop]
        parts.append((some[0] - first_timestamp, some[-1] - first_timestamp, some))
    return parts, size if alone else parts[-1][1] * stride


def smoothed(weights: Tensor) -> Tensor:
    """Mean over heads (h, t, s) of weights in units of their spread over tokens.

    They are smoothed by a median over time.
    """
    std, mean = torch.std_mean(weights, dim=1, keepdim=True, correction=0)
    weights = (weights - mean) / std
    half = _MEDIAN // 2
    if weights.shape[-1] > half:
        padded = F.pad(weights, (half, half), mode="reflect")
        weights = padded.unfold(-1, _MEDIAN, 1).sort(-1).values[..., half]
    return weights.mean(0)


def first_columns(cost: np.ndarray) -> list[int]:
    """Column in which the cheapest monotonic path through costs (t, s) enters each row.

    Dynamic time warping: a step goes down, right or both. The path begins in one corner and ends
    in the other.
    """
    rows, columns = cost.shape
    total = np.full((rows + 1, columns + 1), inf)
    total[0, 0] = 0
    step = np.zeros((rows + 1, columns + 1), dtype=np.int8)
    step[0, :], step[:, 0] = 2, 1
    for number in range(2, rows + columns + 1):  # diagonals, whose entries do not need each other
        i = np.arange(max(1, number - columns), min(rows, number - 1) + 1)
        j = number - i
        both, down, right = total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]
        kind = np.where(
            (both < down) & (both < right), 0, np.where((down < both) & (down < right), 1, 2)
        )
        total[i, j] = cost[i - 1, j - 1] + np.choose(kind, [both, down, right])
        step[i, j] = kind
    i, j = rows, columns
    first = [0] * rows
    while i > 0 or j > 0:
        if i > 0:
            first[i - 1] = max(0, j - 1)
        kind = step[i, j]
        i, j = i - (kind != 2), j - (kind != 1)
    return first
