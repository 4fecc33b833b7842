"""Speech decoding: from the spectrograms of utterances to texts, by CTC, attention or both."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from regard.data.batches import pad
from regard.data.tokenizer import Tokenizer
from regard.decode.batching import in_batches
from regard.decode.constraints import MAX_TEXT_TOKENS, Adjust, Constraints, forbid, stop_repetition
from regard.decode.decoder import decode
from regard.decode.speech.ctc import CTCPrefixScore, FusionModel, PrefixBeam, greedy
from regard.decode.speech.ctc_align import CTCAlignment, align, alignable
from regard.decode.speech.options import SpeechDecoding, whisper_only
from regard.decode.speech.words import Word, words
from regard.errors import UsageError
from regard.training.loss import ctc_losses

Options = TypeVar("Options", bound=SpeechDecoding)


class Utterance(NamedTuple):
    """What is decoded at once: a spectrogram (t, mels), and the loudness that words lie on."""

    features: Tensor
    level: np.ndarray | None = None


@dataclass(frozen=True)
class Recognised:
    """A text of an utterance: its tokens, their score, and its words with their times."""

    ids: list[int]
    text: str
    score: float
    words: list[Word] = field(default_factory=list)
    prior: float = 0.0  # the part of the score that a language model and length_bonus have


def distinct(texts: Sequence[Recognised]) -> list[Recognised]:
    """Texts without those that differ in space alone."""
    found: dict[str, Recognised] = {}
    for one in texts:
        found.setdefault(one.text, one)
    return list(found.values())


def likely_texts(
    tables: Sequence[Tensor], found: Sequence[Sequence[Recognised]], speeds: Sequence[float]
) -> list[Recognised]:
    """Texts found at several speeds by their mean probability over all of these.

    Each speed has its log-probabilities (frames, vocab) and its texts, whose words get the times of
    the sound at speed 1.
    """
    texts: list[Recognised] = []
    for some, speed in zip(found, speeds, strict=True):
        for one in some:
            back = [replace(w, start=speed * w.start, end=speed * w.end) for w in one.words]
            texts.append(replace(one, words=back))
    texts = distinct(sorted(texts, key=lambda one: -one.score))
    ids, lengths = pad([np.array(one.ids, dtype=np.int64) for one in texts], 0)
    each = []
    for table in tables:
        logits = table.cpu().double().expand(len(texts), -1, -1)
        frames = torch.full_like(lengths, len(table))
        each.append(-ctc_losses(logits, frames, ids, lengths))
    mean = torch.stack(each).logsumexp(0) - math.log(len(tables))
    scored = [
        replace(one, score=score + one.prior)
        for one, score in zip(texts, mean.tolist(), strict=True)
    ]
    return sorted(scored, key=lambda one: -one.score)


class Encoder(Protocol):
    """What is asked of a model: to encode sounds, and CTC logits or a decoder over the memory."""

    config: Any

    def encode(self, sound: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Memory (b, s, w) of spectrograms (b, t, mels), and its lengths (b)."""
        ...

    def ctc_logits(self, memory: Tensor) -> Tensor:
        """Logits (b, s, vocab) of every token in each frame."""
        ...


class OverMemory:
    """A model as a Writer whose sources are encoded already."""

    def __init__(self, model: Any):
        self.model = model

    def start(self, source: Tensor, lengths: Tensor | None = None, *, capacity: int) -> Any:
        """Allocate for texts over a memory (b, s, w)."""
        return self.model.start_from(source, lengths, capacity=capacity)

    def step(self, ids: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Read the next tokens of all hypotheses and return the logits after each."""
        return self.model.step(ids, state)


def fuse(lm: FusionModel | None, weight: float, bonus: float, eos: int) -> Adjust:
    """Shallow fusion: add a language model's log-probabilities, and a bonus for every token."""

    def adjust(logits: Tensor, written: Tensor) -> Tensor:
        scores = logits + bonus
        scores[:, eos] -= bonus
        if lm is not None:
            scores += weight * torch.from_numpy(lm(written.tolist())).to(scores)
        return scores

    return adjust


@dataclass
class EncodedBatch:
    """The encoded sounds of a batch, and with a CTC head its log-probabilities of each."""

    vectors: Tensor
    lengths: Tensor
    log_probs: Tensor | None
    levels: list[np.ndarray | None]

    def frames(self, row: int) -> Tensor:
        """Log-probabilities (frames, vocab) of one sound, without padding."""
        assert self.log_probs is not None
        return self.log_probs[row, : int(self.lengths[row])]


class SpeechDecoder(Generic[Options]):
    """Decodes with a speech model and its tokenizer.

    Args:
        model: speech model
        tokenizer: its tokenizer
        seconds: duration of a frame of the encoder
        delay: seconds from a sound to the frame that tells of it
        device: device that the model is on
    """

    def __init__(
        self,
        model: Encoder,
        tokenizer: Tokenizer,
        *,
        seconds: float,
        delay: float = 0.0,
        device: torch.device | str = "cpu",
    ):
        self.model, self.tokenizer, self.device = model, tokenizer, torch.device(device)
        self.seconds, self.delay = seconds, delay
        spare = range(tokenizer.vocab, model.config.vocab)
        self.never = [*tokenizer.never, *spare]  # tokens that no text holds
        ctc, attends = model.config.ctc, model.config.decoder_depth > 0
        heads = {"joint": ctc and attends, "ctc": ctc, "attention": attends}
        self.ways = [name for name, has in heads.items() if has]  # the best first

    @property
    def begin(self) -> list[int]:
        """Tokens that a text is written after."""
        return [self.tokenizer.begin]

    def prompt_of(self, features: Tensor, options: Options) -> list[int]:
        """Tokens that the text of a spectrogram (t, mels) is written after."""
        return self.begin

    @property
    def times(self) -> bool:
        """True if words have times, by alignment to the frames of CTC."""
        return "ctc" in self.ways

    def check(self, options: Options) -> None:
        """Refuse options that contradict each other or the model."""
        options.check()
        way = options.decoding
        if way is not None and way not in self.ways:
            lacks = "decoder" if "ctc" in self.ways else "CTC head"
            raise UsageError(
                f"decoding={way}: this model has no {lacks}; choose {' or '.join(self.ways)}"
            )
        for name, value in whisper_only(options).items():
            raise UsageError(f"{name}={value} is for Whisper; leave it out with this model")
        if options.sampling and (way or self.ways[0]) != "attention":
            raise UsageError("sampling is for decoding=attention; leave temperature= and such out")

    def __call__(
        self,
        utterances: Sequence[Utterance],
        options: Options,
        *,
        lm: FusionModel | None = None,
        frames: int = 20_000,
    ) -> list[list[Recognised]]:
        """Best texts of each utterance, decoded in batches of so many frames."""
        way = WAYS[options.decoding or self.ways[0]]

        @torch.inference_mode()
        def batch(some: list[Utterance]) -> list[list[Recognised]]:
            return way(self, self.encode(some), options, lm)

        lengths = [len(one.features) for one in utterances]
        return in_batches(utterances, lengths, batch, tokens=frames)

    def encode(self, utterances: Sequence[Utterance]) -> EncodedBatch:
        """Encode spectrograms; what no text holds has no probability."""
        features = [one.features for one in utterances]
        lengths = torch.tensor([len(one) for one in features], device=self.device)
        sound = pad_sequence(features, batch_first=True).to(self.device)
        vectors, lengths = self.model.encode(sound, lengths)
        levels = [one.level for one in utterances]
        if not self.model.config.ctc:
            return EncodedBatch(vectors, lengths, None, levels)
        logits = self.model.ctc_logits(vectors).float()
        columns = logits.new_tensor([one for one in self.never if one]).long()  # but for blank
        columns = torch.cat([columns, columns.new_tensor([self.tokenizer.eos])])
        logits = logits.index_fill(2, columns, -torch.inf)
        return EncodedBatch(vectors, lengths, logits.log_softmax(2), levels)

    # Ways to decode

    def ctc(
        self, memory: EncodedBatch, options: SpeechDecoding, lm: FusionModel | None
    ) -> list[list[Recognised]]:
        """Decode by CTC alone: the best path, or a beam over prefixes."""
        search = PrefixBeam(
            beam=options.beam,
            n_best=1 if options.n_best == 1 else options.beam,
            lm=lm,
            lm_weight=options.lm_weight,
            length_bonus=options.length_bonus,
            eos=self.tokenizer.eos,
        )
        found: list[list[Recognised]] = []
        for row in range(len(memory.lengths)):
            table = memory.frames(row).cpu()
            some = [greedy(table)] if options.beam == 1 and lm is None else search(table)
            level = memory.levels[row]
            texts = [
                replace(self.recognised(one, one.score, level), prior=one.score - one.logprob)
                for one in some
            ]
            found.append(distinct(texts)[: options.n_best])
        return found

    def at_speeds(
        self,
        sounds: Sequence[Sequence[Utterance]],
        speeds: Sequence[float],
        options: SpeechDecoding,
        *,
        lm: FusionModel | None = None,
        frames: int = 20_000,
    ) -> list[list[Recognised]]:
        """Texts of sounds that were played at several speeds, most likely first.

        A text has the mean over the speeds of its probability by CTC; those are compared that are
        the best at some speed. The times of words are those of the sound as it is.

        Args:
            sounds: for each sound, its utterance at every speed
            speeds: factors of speed
            options: how to decode
            lm: language model for shallow fusion
            frames: maximum number of frames in a batch
        """
        wide = replace(options, n_best=max(options.n_best, options.beam))

        @torch.inference_mode()
        def batch(some: list[Sequence[Utterance]]) -> list[list[Recognised]]:
            memories = [self.encode(played) for played in zip(*some, strict=True)]
            each = [self.ctc(memory, wide, lm) for memory in memories]
            answers = []
            for row in range(len(some)):
                tables = [memory.frames(row) for memory in memories]
                texts = likely_texts(tables, [found[row] for found in each], speeds)
                answers.append(texts[: options.n_best])
            return answers

        lengths = [sum(len(one.features) for one in sound) for sound in sounds]
        return in_batches(sounds, lengths, batch, tokens=frames)

    def attention(
        self,
        memory: EncodedBatch,
        options: SpeechDecoding,
        lm: FusionModel | None,
        adjust: Sequence[Adjust] = (),
    ) -> list[list[Recognised]]:
        """Decode by the attention decoder."""
        tokenizer = self.tokenizer
        most = min(self.model.config.max_length - 1, options.max_length or MAX_TEXT_TOKENS)
        changes = [forbid(*self.never), *adjust]
        if lm is not None or options.length_bonus:
            changes.append(fuse(lm, options.lm_weight, options.length_bonus, tokenizer.eos))
        constraints = Constraints(
            bos=tokenizer.begin,
            eos=tokenizer.eos,
            adjust=[*changes, stop_repetition(eos=tokenizer.eos)],
            max_length=[max(1, min(most, n)) for n in memory.lengths.tolist()],
            on="logprobs",
        )
        writer = OverMemory(self.model)
        hypotheses = decode(writer, memory.vectors, memory.lengths, options, constraints)
        return [
            distinct([self.timed(memory, row, one.ids, one.score) for one in some])
            for row, some in enumerate(hypotheses)
        ]

    def joint(
        self, memory: EncodedBatch, options: SpeechDecoding, lm: FusionModel | None
    ) -> list[list[Recognised]]:
        """Decode by the attention decoder and CTC together (Watanabe et al. 2017)."""
        assert memory.log_probs is not None
        scores = CTCPrefixScore(
            memory.log_probs, memory.lengths, weight=options.ctc_weight, ends=[self.tokenizer.eos]
        )
        return self.attention(memory, options, lm, [scores])

    # Times

    def recognised(
        self, timed: CTCAlignment, score: float, level: np.ndarray | None = None
    ) -> Recognised:
        """Text that was aligned, with its words."""
        found = words(timed, self.tokenizer, self.seconds, level=level, delay=self.delay)
        return Recognised(timed.ids, self.tokenizer.decode(timed.ids).strip(), score, found)

    def timed(self, memory: EncodedBatch, row: int, ids: list[int], score: float) -> Recognised:
        """Align a text that the decoder wrote; what CTC cannot align is replaced by its own."""
        if memory.log_probs is None:
            return Recognised(ids, self.tokenizer.decode(ids).strip(), score)
        table = memory.frames(row)
        path = align(table, ids) if alignable(len(table), ids) else greedy(table)
        return self.recognised(path, score, memory.levels[row])

    @torch.inference_mode()
    def aligned(
        self,
        stretches: Sequence[tuple[int, Tensor]],
        ids: Sequence[int],
        level: np.ndarray | None = None,
    ) -> Recognised:
        """Align a text to a sound of this loudness, of which some stretches are read.

        Each is the number of its first frame, as the encoder counts them, and its spectrogram.
        """
        if not self.times:
            raise UsageError("forced= needs a CTC head to align by, and this model has none")
        tables = [self.encode([Utterance(one)]).frames(0).cpu() for _, one in stretches]
        at = [
            first + n
            for (first, _), table in zip(stretches, tables, strict=True)
            for n in range(len(table))
        ]
        path = align(torch.cat(tables), ids)
        path = replace(path, spans=[(at[a], at[b - 1] + 1) for a, b in path.spans])
        return self.recognised(path, path.logprob, level)

    @torch.inference_mode()
    def posteriors(self, features: Tensor, least: float = 0.05) -> dict[str, Any]:
        """CTC posteriors (frames, units) of the tokens that reach so much, by name."""
        probs = self.encode([Utterance(features)]).frames(0).exp().cpu()
        kept = [0, *(n for n in (probs.amax(0) >= least).nonzero()[:, 0].tolist() if n)]
        units = ["", *self.tokenizer.pieces(kept[1:])]
        return {"posteriors": probs[:, kept].numpy(), "units": units}


# name -> how a batch is decoded
Way = Callable[
    [SpeechDecoder[Any], EncodedBatch, SpeechDecoding, FusionModel | None], list[list[Recognised]]
]
WAYS: dict[str, Way] = {
    "ctc": SpeechDecoder.ctc,
    "attention": SpeechDecoder.attention,
    "joint": SpeechDecoder.joint,
}
