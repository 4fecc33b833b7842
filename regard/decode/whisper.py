"""Whisper's way to write: prompts, timestamps, silence, long recordings and the times of words.

A window of sound is read once; its text comes after a prompt that names language and task, and
may hold timestamps, by which a long recording is followed from window to window. What is no speech
or only repeats itself is left out or tried again at a higher temperature (Radford et al. 2022).
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from regard.attention.watch import watch
from regard.data.languages import language_of
from regard.data.tokenizer import Tokenizer
from regard.decode.batching import in_batches
from regard.decode.options import Decoding, decode
from regard.decode.rules import GenerationConfig, Given
from regard.decode.search import Hypothesis, forbid
from regard.decode.words import Word, words
from regard.decode.writer import State
from regard.errors import UsageError, lookup
from regard.settings import setting

MOST_WINDOWS = 16  # that are decoded at once
MOST_BYTES = 2**30  # of the keys and values of their memories
MEDIAN = 7  # frames over which attention weights are smoothed
# at which a window is tried again that came out improbable or repetitive
TEMPERATURES = (0.2, 0.4, 0.6, 0.8, 1.0)
REPETITIVE = 2.4  # times that a text can be compressed
IMPROBABLE = -1.0  # mean log-probability of its tokens
WINDOWS = {"pauses": False, "timestamps": True}  # how a recording is cut -> with timestamps or not


@dataclass(frozen=True)
class WhisperOptions(Decoding):
    """How the windows of a recording are written."""

    beam: int = setting(1, "beam size; 1 is greedy", min=1, max=1000)
    language: str = setting("", "language that is spoken, such as en; detected unless given")
    translate: bool = setting(False, "write English, whatever language is spoken")
    windows: str = setting(
        "pauses", "cut a long recording at pauses, or after the timestamps that are written"
    )
    no_speech: float = setting(
        0.6, "probability of no speech at which an improbable text is dropped", min=0, max=1
    )
    fallback: bool = setting(True, "sample again what is improbable or repeats itself")
    words: bool = setting(False, "give the times of words")

    def check(self) -> None:
        """Refuse options that contradict each other."""
        super().check()
        lookup("windows", self.windows, WINDOWS)


class Listener(Protocol):
    """An encoder-decoder of sounds whose memory can be kept."""

    config: Any  # with max_frames, max_length, decoder_depth and block
    stride: int

    @property
    def head(self) -> Any:
        """Return the module that makes logits of hidden vectors."""
        ...

    def encode(self, sound: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the memory (b, s, w) of spectrograms (b, t, mels), and its lengths (b)."""
        ...

    def decode(self, memory: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        """Return the vectors before the head, one for each token of whole targets."""
        ...

    def start_from(self, memory: Tensor, lengths: Tensor, *, capacity: int) -> Any:
        """Allocate what decoding needs over a memory."""
        ...

    def step(self, ids: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Read the next tokens of all hypotheses and return the logits after each."""
        ...


@dataclass
class Segment:
    """A stretch of a recording with its text; times are in seconds."""

    start: float
    end: float
    ids: list[int]  # of the text, without special tokens
    text: str
    language: str = ""
    logprob: float = 0.0  # mean of its window's tokens
    no_speech: float = 0.0  # probability
    confidences: list[float] = field(default_factory=list)  # of each token
    words: list[Word] = field(default_factory=list)


@dataclass(frozen=True)
class Window:
    """A stretch of a recording's features (frames, mels), and at which frame it begins."""

    features: Tensor
    first: int = 0


@dataclass(frozen=True)
class Written:
    """The tokens of a window as they came out, timestamps among them."""

    hypothesis: Hypothesis
    no_speech: float
    language: int | None  # its token


class Timestamps:
    """Timestamps come in pairs but for the last, never go back, and begin a text.

    Where all of them together are likelier than any word, one of them is taken.
    """

    def __init__(self, first: int, eos: int, most_initial: int | None, never: int):
        self.first, self.eos, self.most_initial, self.never = first, eos, most_initial, never

    def __call__(self, logits: Tensor, written: Tensor) -> Tensor:
        """Forbid what cannot follow the tokens (b, t) that are written."""
        first = self.first
        logits[:, self.never] = -inf
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


class _Prompted:
    """A writer over a memory whose texts come after a prompt, read at once.

    What its first token is followed by tells whether there is speech, and in which language.
    """

    def __init__(self, decoder: "WhisperDecoder", memory: Tensor, lengths: Tensor, prompt: Tensor):
        self.decoder, self.memory, self.lengths, self.prompt = decoder, memory, lengths, prompt
        self.first: Tensor | None = None  # logits after the first token

    def start(self, source: Tensor, lengths: Tensor | None = None, *, capacity: int) -> Any:
        """Read all of the prompt but its last token, with which the first step begins."""
        model, count = self.decoder.model, self.prompt.shape[1]
        state = model.start_from(self.memory, self.lengths, capacity=capacity + count - 1)
        if count > 1:
            logits, state = model.step(self.prompt[:, :-1], state)
            self.first = logits[:, 0].clone()
        return state

    def step(self, ids: Tensor, state: State) -> tuple[Tensor, State]:
        """Read the next tokens of all hypotheses and return the logits after each."""
        logits, state = self.decoder.model.step(ids, state)
        if self.first is None:
            self.first = logits[:, 0].clone()
        return logits, state


class WhisperDecoder:
    """Writes what is said in recordings, by the rules of a checkpoint's generation_config.json.

    `rules` are None for a model of our own; `hop` are the seconds of a frame of its features.
    """

    def __init__(self, model: Any, tokenizer: Tokenizer, hop: float, rules: Any = None):
        self.model: Listener = model
        self.tokenizer, self.hop = tokenizer, hop
        config = self.model.config
        if rules is not None:
            rules = {"eos_token_id": list(tokenizer.ends), **rules}
        self.config = GenerationConfig(rules, tokenizer.eos, config.vocab, tokenizer.begin)
        told = self.rules = self.config.rules
        self.frames = self.model.stride * config.max_frames  # of a window
        self.tick = hop * self.model.stride  # seconds of a timestamp, and of a vector of the memory
        self.plain: int | None = told.get("no_timestamps_token_id")
        self.languages = {
            name.strip("<|>"): token for name, token in told.get("lang_to_id", {}).items()
        }
        self.tasks: Mapping[str, int] = told.get("task_to_id", {})
        self.never = [*range(tokenizer.vocab, config.vocab), *tokenizer.never]
        heads = told.get("alignment_heads")
        layers, each = config.decoder_depth, config.block.heads
        if heads is None:
            heads = [(n, head) for n in range(layers // 2, layers) for head in range(each)]
        for layer, head in heads:
            if layer >= layers or head >= each:
                raise UsageError(
                    f"alignment_heads has {[layer, head]}; the decoder has {layers} layers of "
                    f"{each} heads"
                )
        self.heads: list[tuple[int, int]] = heads

    # ---- the prompt

    @property
    def first_timestamp(self) -> int:
        """Return the token of the timestamp 0.00; beyond all tokens where there is none."""
        return self.model.config.vocab if self.plain is None else self.plain + 1

    def language_token(self, name: str) -> int:
        """Return the token of a language by its code or name."""
        code = name.strip().lower().strip("<|>")
        code = code if code in self.languages else language_of(code) or code
        if code not in self.languages:
            known = ", ".join(self.languages) or "none: it writes one language only"
            raise UsageError(f"language={name!r:.40} is not one that the model knows ({known})")
        return self.languages[code]

    def prompt(self, options: WhisperOptions, timestamps: bool) -> list[int | None]:
        """Return the tokens that a text is written after; None is the language, to be detected."""
        told = self.rules
        made: list[int | None] = [self.config.begin]
        name = options.language or told.get("language", "")
        asked = bool(name or options.translate or "task" in told)
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
            raise UsageError("this model has no timestamps; leave out windows=timestamps")
        if not timestamps and self.plain is not None:
            made.append(self.plain)
        if None in made and made[-1] is None:
            raise UsageError("the model names no task; name its language by language=")
        return made

    def _prompts(
        self, memory: Tensor, lengths: Tensor, options: WhisperOptions, timestamps: bool
    ) -> Tensor:
        """Return the prompt of each window (b, l), with the language that is heard in it."""
        prompt = self.prompt(options, timestamps)
        device = memory.device
        made = torch.tensor([-1 if t is None else t for t in prompt], device=device)
        made = made.repeat(len(memory), 1)
        if None in prompt:
            if not self.languages:
                raise UsageError("the language is not known; name the tokens of all in lang_to_id")
            state = self.model.start_from(memory, lengths, capacity=1)
            logits = self.model.step(made[:, :1], state)[0][:, -1]
            tokens = torch.tensor(list(self.languages.values()), device=device)
            made[:, prompt.index(None)] = tokens[logits[:, tokens].argmax(1)]
        return made

    # ---- one window

    def _most(self, options: WhisperOptions, prompt: int) -> int:
        """Return how many tokens a window's text may have."""
        room = self.model.config.max_length - prompt + 1
        own = self.config.longest
        usual = self.model.config.max_length // 2 if own is None else max(1, own - prompt)
        return min(room, options.max_length or usual)

    @torch.inference_mode()
    def write(
        self,
        memory: Tensor,
        lengths: Tensor,
        options: WhisperOptions,
        timestamps: bool,
        lines: Sequence[int] = (),
    ) -> list[Written]:
        """Write the texts of windows over their memory; `lines` number them for random draws."""
        prompts = self._prompts(memory, lengths, options, timestamps)
        lines = list(lines) or list(range(len(memory)))
        made = self._once(memory, lengths, prompts, options, timestamps, lines)
        for temperature in TEMPERATURES if options.fallback and not options.sampling else ():
            again = [n for n, one in enumerate(made) if self._failed(one, options)]
            if not again:
                break
            hot = replace(options, temperature=temperature, beam=1)
            rest = memory[again], lengths[again], prompts[again], hot, timestamps
            for n, one in zip(again, self._once(*rest, [lines[n] for n in again]), strict=True):
                made[n] = one
        return made

    def _once(
        self,
        memory: Tensor,
        lengths: Tensor,
        prompts: Tensor,
        options: WhisperOptions,
        timestamps: bool,
        lines: list[int],
    ) -> list[Written]:
        config, length = self.config, prompts.shape[1]
        most = self._most(options, length)
        given = Given(
            ends=config.all_ends,
            before=prompts.tolist(),
            read=[[]] * len(prompts),
            limits=[most] * len(prompts),
        )
        adjust: list[Any] = [forbid(*self.never)] if self.never else []
        adjust += config.changes(given)
        if timestamps:
            assert self.plain is not None
            limit = self.rules.get("max_initial_timestamp_index")
            adjust.append(Timestamps(self.plain + 1, config.all_ends[0], limit, self.plain))
        writer = _Prompted(self, memory, lengths, prompts)
        texts = decode(
            writer,
            memory,
            lengths,
            options,
            begin=prompts[:, -1],
            eos=config.eos,
            ends=config.ends,
            adjust=adjust,
            max_length=most,
            lines=lines,
            **config.beam(),
        )
        silent = [0.0] * len(prompts)
        if self.plain is not None and writer.first is not None:
            silent = writer.first.float().softmax(1)[:, self.plain - 1].tolist()
        heard = [None] * len(prompts)
        if self.languages and prompts.shape[1] > 1:
            tokens = set(self.languages.values())
            heard = [row[1] if row[1] in tokens else None for row in prompts.tolist()]
        rows = zip(texts, silent, heard, strict=True)
        return [Written(best[0], none, language) for best, none, language in rows]

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, without timestamps."""
        return self.tokenizer.decode([token for token in ids if token < self.first_timestamp])

    def _silent(self, written: Written, options: WhisperOptions) -> bool:
        """Tell whether a window holds no speech: likely none, and what was written improbable."""
        return written.no_speech > options.no_speech and written.hypothesis.score <= IMPROBABLE

    def _failed(self, written: Written, options: WhisperOptions) -> bool:
        """Tell whether a text is to be tried again."""
        if compression_ratio(self.text(written.hypothesis.ids)) > REPETITIVE:
            return True
        return written.hypothesis.score < IMPROBABLE and not self._silent(written, options)

    # ---- whole recordings

    def transcribe(
        self,
        recordings: Sequence[Tensor],
        options: WhisperOptions,
        cuts: Sequence[Sequence[tuple[int, int]]] | None = None,
    ) -> list[list[Segment]]:
        """Write what is said in recordings, each given by its features (frames, mels).

        `cuts` are the first and last frames of the stretches of each recording that are read, one
        window each at most; a longer recording without them is followed by its timestamps.
        """
        options.check()
        segments: list[list[Segment]] = [[] for _ in recordings]
        if not WINDOWS[options.windows]:
            cuts = [[(0, len(sound))] for sound in recordings] if cuts is None else cuts
            windows = [
                (n, Window(recordings[n][first:last], first))
                for n, some in enumerate(cuts)
                for first, last in some
            ]
            self._check(windows)
            texts = self._windows([window for _, window in windows], options, False)
            for (n, window), written in zip(windows, texts, strict=True):
                segments[n] += self._segments(window, written, options)[0]
            return segments
        seek = [0] * len(recordings)
        while waiting := [n for n, sound in enumerate(recordings) if seek[n] < len(sound)]:
            windows = [
                (n, Window(recordings[n][seek[n] : seek[n] + self.frames], seek[n]))
                for n in waiting
            ]
            texts = self._windows([window for _, window in windows], options, True)
            for (n, window), written in zip(windows, texts, strict=True):
                some, forward = self._segments(window, written, options)
                segments[n] += some
                seek[n] += forward
        return segments

    def _check(self, windows: Sequence[tuple[int, Window]]) -> None:
        for _, window in windows:
            if len(window.features) > self.frames:
                raise UsageError(
                    f"a stretch of {len(window.features) * self.hop:.1f} seconds is longer than "
                    f"the {self.frames * self.hop:g} that the model reads at once; cut it, or set "
                    "windows=timestamps"
                )

    def _windows(
        self, windows: list[Window], options: WhisperOptions, timestamps: bool
    ) -> "list[tuple[Written, list[tuple[int, int]]]]":
        """Write windows in batches; return what was written, and the frames of its tokens."""
        config = self.model.config
        memory = 8 * config.max_frames * config.block.width * config.decoder_depth
        workers = torch.get_num_threads()
        rows = min(MOST_WINDOWS, max(1, MOST_BYTES // memory), -(-len(windows) // workers))

        def write(some: list[tuple[int, Window]]) -> list[Any]:
            return self._batch(some, options, timestamps)

        numbered = list(enumerate(windows))
        lengths = [1] * len(windows)
        return in_batches(numbered, lengths, write, rows=max(1, rows), workers=workers)

    @torch.inference_mode()
    def _batch(
        self, numbered: list[tuple[int, Window]], options: WhisperOptions, timestamps: bool
    ) -> "list[tuple[Written, list[tuple[int, int]]]]":
        device = self.model.head.weight.device
        mels = self.model.config.mels
        sound = torch.zeros(len(numbered), self.frames, mels, device=device)
        for row, (_, window) in zip(sound, numbered, strict=True):
            row[: len(window.features)] = window.features
        memory, lengths = self.model.encode(sound)
        lines = [n for n, _ in numbered]
        made = self.write(memory, lengths, options, timestamps, lines)
        spans: list[list[tuple[int, int]]] = [[] for _ in made]
        if options.words:
            prompts = self._align_prompts(made, options)
            texts = [self._words_of(one.hypothesis.ids) for one in made]
            frames = [len(window.features) // self.model.stride for _, window in numbered]
            spans = self.align(memory, lengths, prompts, texts, frames)
        return list(zip(made, spans, strict=True))

    def _words_of(self, ids: Sequence[int]) -> list[int]:
        silent = set(self.config.all_ends)
        return [token for token in ids if token < self.first_timestamp and token not in silent]

    def _segments(
        self,
        window: Window,
        result: "tuple[Written, list[tuple[int, int]]]",
        options: WhisperOptions,
    ) -> tuple[list[Segment], int]:
        """Part what was written into segments; return how many frames were read with them."""
        written, spans = result
        size, offset = len(window.features), window.first * self.hop
        if self._silent(written, options):
            return [], size
        names = {token: name for name, token in self.languages.items()}
        stretches, forward = stretches_of(
            written.hypothesis.ids, self.first_timestamp, self.model.stride, size
        )
        made, place, at = [], 0, 0
        for first, last, ids in stretches:
            text_ids = self._words_of(ids)
            text = self.tokenizer.decode(text_ids)
            steps = written.hypothesis.steps[at : at + len(ids)]
            sure = [
                float(np.exp(min(0.0, step)))
                for token, step in zip(ids, steps, strict=True)
                if token in text_ids
            ]
            own = spans[place : place + len(text_ids)] if spans else []
            place, at = place + len(text_ids), at + len(ids)
            if first == last or not text.strip():
                continue
            segment = Segment(
                offset + first * self.tick,
                min(offset + last * self.tick, offset + size * self.hop),
                text_ids,
                text,
                names.get(written.language or -1, ""),
                written.hypothesis.score,
                written.no_speech,
                sure,
            )
            if own:
                timed = TimedTokens(text_ids, own, sure)
                segment.words = words(timed, self.tokenizer, self.tick, offset=offset)
            made.append(segment)
        return made, forward

    # ---- times of words

    def _align_prompts(self, made: Sequence[Written], options: WhisperOptions) -> list[list[int]]:
        """Return what stands before a text that is aligned: the prompt without timestamps."""
        prompts = []
        for one in made:
            prompt = self.prompt(options, timestamps=False)
            prompts.append([one.language if token is None else token for token in prompt])
        return [[token for token in prompt if token is not None] for prompt in prompts]

    @torch.inference_mode()
    def align(
        self,
        memory: Tensor,
        lengths: Tensor,
        prompts: Sequence[Sequence[int]],
        texts: Sequence[Sequence[int]],
        frames: Sequence[int],
    ) -> list[list[tuple[int, int]]]:
        """Return the frames of the memory in which each token of each text is spoken.

        They are read off the heads of cross-attention that follow the sound, by dynamic time
        warping; only so many `frames` of each memory are of sound.
        """
        eos = self.config.all_ends[0]
        rows = [[*prompt, *text, eos] for prompt, text in zip(prompts, texts, strict=True)]
        longest = max(map(len, rows), default=0)
        ids = torch.tensor([row + [eos] * (longest - len(row)) for row in rows])
        with watch(self.model) as maps:  # type: ignore[arg-type]
            self.model.decode(memory, lengths, ids.to(memory.device))
        spans = []
        for n, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            if not text or frames[n] < 1:
                spans.append([(0, 0)] * len(text))
                continue
            weights = torch.stack(
                [
                    maps[f"decoder.{layer}.cross"].weights(n, head)[0, 0, : len(rows[n])]
                    for layer, head in self.heads
                ]
            )
            weights = weights[..., : frames[n]].float()
            weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-30)
            matrix = smoothed(weights)[len(prompt) - 1 : -1]
            jumps = first_columns(-matrix.double().cpu().numpy())
            spans.append(list(zip(jumps[:-1], jumps[1:], strict=True)))
        return spans


@dataclass(frozen=True)
class TimedTokens:
    """Tokens with the frames of the memory in which they are spoken."""

    ids: Sequence[int]
    spans: Sequence[tuple[int, int]]
    confidences: Sequence[float]


def compression_ratio(text: str) -> float:
    """Return how many times smaller a text becomes by zlib; repetitions make it large."""
    data = text.encode()
    return len(data) / len(zlib.compress(data))


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
    """Return the mean over heads (h, t, s) of weights in units of their spread over tokens.

    They are smoothed by a median over time.
    """
    std, mean = torch.std_mean(weights, dim=1, keepdim=True, correction=0)
    weights = (weights - mean) / std
    half = MEDIAN // 2
    if weights.shape[-1] > half:
        padded = F.pad(weights, (half, half), mode="reflect")
        weights = padded.unfold(-1, MEDIAN, 1).sort(-1).values[..., half]
    return weights.mean(0)


def first_columns(cost: np.ndarray) -> list[int]:
    """Return in which column the cheapest monotonic path through costs (t, s) enters each row.

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
