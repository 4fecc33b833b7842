"""A model that reads one text and writes another: it translates, scores, aligns and explains."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention.watch import watch
from regard.data.pairs import Pair
from regard.decode.alignment import Aligner, Alignment
from regard.decode.options import Decoding
from regard.decode.search import Hypothesis
from regard.decode.sentences import SentenceDecoder, SourceSentence
from regard.decode.trace import untraced
from regard.errors import UsageError
from regard.settings import setting
from regard.tasks.frame.answers import Generated
from regard.tasks.frame.question import Question, source_keys
from regard.tasks.frame.settings import QuantiseSettings, RunSettings
from regard.tasks.parts import Predictor, V
from regard.tasks.text.sequence import ENCODER_DECODER, SENTENCES, PairCodec, Sources, Stack
from regard.viewer.picture import Picture
from regard.viewer.settings import HypothesisSettings, LookSettings

_LONGEST_WHOLE = 4000  # tokens of a text that is scored or looked at, which is never cut
_MOST_REASONS = 8  # steps of a text at which it is searched how it would have gone on otherwise
_SCRIPTS = {"": None, "simplified": "t2s", "traditional": "s2t"}  # as OpenCC names what it does
_ALIGNMENTS = ("none", "pharaoh", "json")
_UNITS = {"words": False, "pieces": True}  # whether pieces are left as they are
_IN_WORDS = "words: a row is the mean of its pieces' rows, a column the sum of their columns"

Ids = Sequence[int]


@dataclass(frozen=True)
class WriteSettings(Decoding):
    """How a target is written."""

    GROUP = "decoding"

    prefix: str = setting("", "prefix of every translation")
    script: str = setting(
        "", "Chinese script of the output; unchanged unless given", choices=_SCRIPTS
    )
    threads: int | None = setting(None, "CPU threads", min=1, max=1024, group="machine")


@dataclass(frozen=True)
class PairRunSettings(QuantiseSettings, RunSettings, WriteSettings):
    """What a run can be told."""

    scores: bool = setting(False, "print the score of each hypothesis")
    alignments: str = setting("none", "word alignments", choices=_ALIGNMENTS)
    units: str = setting("words", "units of the alignment: words or pieces", choices=_UNITS)
    shift: bool = setting(False, "align by the attention of the next step, which reads the token")
    forced: bool = setting(False, "score given pairs: source, TAB, target on each line")
    split: bool = setting(True, "translate sentence by sentence")
    batch_tokens: int = setting(4096, "tokens per batch", min=1, group="machine")
    batch_rows: int = setting(128, "sentences per batch", min=1, group="machine")


@dataclass(frozen=True)
class PairLookSettings(HypothesisSettings, LookSettings, WriteSettings):
    """What look can be told."""

    units: str = setting("words", "what is shown", choices=_UNITS)


class TextWriter(Predictor[Generated, PairRunSettings, PairLookSettings, str]):
    """Writes a text for a text, scores and aligns given pairs, and shows where a model looked.

    Args:
        model: the model.
        codec: its tokenizers.
        config: what its config.json says.
        stack: how it reads a source and a target.
        sources: how a text becomes a source.
    """

    Settings = PairRunSettings
    Look = PairLookSettings

    def __init__(
        self,
        model: nn.Module,
        codec: PairCodec,
        config: Mapping[str, Any],
        stack: Stack = ENCODER_DECODER,
        sources: Sources[Any] = SENTENCES,
    ):
        super().__init__(model, codec, config)
        self.stack, self.sources, self.tokenizer = stack, sources, codec.target
        self.writer = stack.writer(model)
        self.positions = sources.positions(self.model)
        generation = config.get("generation", {})
        self.decoder = SentenceDecoder(
            self.writer,
            *codec.tokenizers,
            self.writer.config.target_vocab,
            rules=generation.get("rules"),
            longest=sources.longest(self.model, len(codec.source.frame([], "source"))),
            device=self.device,
        )
        self.defaults = {**sources.defaults(config), **self.defaults}
        if self.decoder.rules.longest is not None:  # with the token after which it begins
            longest = max(1, self.decoder.rules.longest - 1)
            bound = min(longest, (self.positions or longest + 1) - 1)
            self.defaults.setdefault("max_length", bound)
        heads = {n: m.heads for n, m in self.writer.named_modules() if n.endswith(".cross")}
        self.aligner = Aligner(heads, self.maps, generation.get("alignment_head"))

    def check(self, settings: V) -> V:
        """Settings that do not contradict each other, or a refusal."""
        if isinstance(settings, WriteSettings):
            settings.check()
        return self.sources.check(settings, self.positions)

    # Writing

    def encode(self, text: str, settings: WriteSettings) -> list[int]:
        """Tokens of a text that are read, without a frame."""
        ids = self.codec.source.encode(self.sources.prompt(text, settings))
        return self.sources.cut(ids, self.decoder.longest)

    def predict(
        self, inputs: list[str], settings: PairRunSettings, *, first: int = 0
    ) -> list[Generated]:
        """Write the targets of texts; `first` is the number of the first, which seeds sampling."""
        if settings.forced:
            return self.score(list(map(_sides, inputs, range(1, len(inputs) + 1))), settings)
        most, rules = (self.positions or 0) - 1, self.decoder.rules
        if settings.max_length == most and rules.longest is None:
            rules.tell(f"no max_length is given, so a text has up to its {most} positions, not 20")
        opening = self.sources.opening(self.tokenizer, settings)
        texts = [
            self.decoder.cut(
                text, line, lambda part: self.encode(part, settings), opening, settings.split
            )
            for line, text in enumerate(inputs)
        ]
        sentences = [sentence for parts in texts for sentence in parts]
        self.decoder.write(
            sentences, settings, first, tokens=settings.batch_tokens, rows=settings.batch_rows
        )
        if settings.alignments != "none":
            self.aligner.settle([(s.ids, h.ids) for s in sentences for h in s.hypotheses])
        return [self._generated(parts, settings) for parts in texts]

    def _generated(self, parts: list[SourceSentence], settings: PairRunSettings) -> Generated:
        """The target of a text, and the next best ones."""
        best, *others = [
            Generated(_in_script(text, settings), score, logprob, self._aligned(pairs, settings))
            for text, score, logprob, pairs in self.decoder.join(parts, self.config.get("to"))
        ] or [Generated("".join(s.separator for s in parts))]
        best.others = others
        return best

    def _aligned(
        self, pairs: Sequence[tuple[list[int], list[int]]], settings: PairRunSettings
    ) -> Alignment | None:
        if settings.alignments == "none":
            return None
        return self.aligner.align(
            pairs,
            *self.codec.tokenizers,
            shift=int(settings.shift),
            pieces=_UNITS[settings.units],
        )

    # Scoring given pairs

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], settings: WriteSettings
    ) -> list[tuple[list[int], list[int]]]:
        """Split both sides of pairs into ids, as the model reads them."""
        prompts = [self.sources.prompt(source, settings) for source, _ in pairs]
        sources = self.codec.source.encode_batch(prompts)
        targets = self.codec.target.encode_batch([target for _, target in pairs])
        for ids in (*sources, *targets):
            if len(ids) > _LONGEST_WHOLE:
                raise UsageError(
                    f"a text of {len(ids)} pieces is too long to be scored whole; cut it"
                )
        return [
            (self.codec.source.frame(source, "source"), target)
            for source, target in zip(sources, targets, strict=True)
        ]

    def best_head(self, pairs: Iterable[tuple[str, str]]) -> str:
        """The head that aligns some pairs best; none of a model without cross-attention."""
        if not self.aligner.heads:
            return ""
        name, head = self.aligner.choose(self.encode_pairs(list(pairs), PairRunSettings()))
        return f"{name}:{head}"

    def score(self, pairs: Sequence[tuple[str, str]], settings: PairRunSettings) -> list[Generated]:
        """Given targets of sources with their log-probabilities, aligned if that is asked."""
        encoded = self.encode_pairs(pairs, settings)
        scored = self.decoder.score(
            encoded, settings, tokens=settings.batch_tokens, rows=settings.batch_rows
        )
        return [
            Generated(target, h.score, h.logprob, self._aligned([ids], settings))
            for (_, target), ids, h in zip(pairs, encoded, scored, strict=True)
        ]

    # Looking

    @torch.inference_mode()
    def maps(self, source: Ids, target: Ids) -> tuple[Any, Tensor]:
        """Attention of every layer and head over one pair, exactly, and the logits.

        One pass over the finished text: what was attended to at each step, whatever beam or batch
        it came from.
        """
        reads = torch.tensor([[self.decoder.begin, *target]], device=self.device)
        ids = torch.tensor([list(source)], device=self.device)
        with watch(self.model) as maps:
            logits = self.writer(ids, reads)
        return self.stack.maps(maps, len(source)), logits[0]

    def _source(self, given: str, settings: PairLookSettings) -> list[int]:
        """Ids of a source that is looked at."""
        if not given.strip():
            raise UsageError("there is nothing to look at in an empty text")
        ids = self.encode(given.strip(), settings)[:_LONGEST_WHOLE]
        return self.codec.source.frame(ids, "source")

    def _searched(self, source: list[int], settings: PairLookSettings) -> list[Hypothesis]:
        """Hypotheses for a source, the best first."""
        opening = self.sources.opening(self.tokenizer, settings)
        (hypotheses,) = self.decoder.batch([SourceSentence(0, source, opening, "")], settings, 0)
        return hypotheses

    def answer_logprobs(
        self, given: str, settings: PairLookSettings, expected: Any = None
    ) -> Question:
        """A source with its target and the log-probability of that."""
        target, source = self.tokenizer, self._source(given, settings)
        chosen = self._searched(source, settings)[0].ids if expected is None else list(expected)
        reads = [self.decoder.begin, *chosen]

        @torch.inference_mode()
        def logprobs(copies: int) -> Tensor:
            both = (torch.tensor([ids], device=self.device) for ids in (source, reads))
            logits = self.writer(*(ids.expand(copies, -1) for ids in both))
            return logits[..., : target.rows].double().log_softmax(-1)

        return Question(
            answer=target.decode(chosen),
            logprobs=logprobs,
            chosen=[*chosen, target.eos],
            names=target.pieces,
            places=target.pieces(reads),
            tokens=self.codec.source.pieces(source),
            keys=source_keys(len(source), len(reads)),
            expected=chosen,
        )

    def _picture(
        self, source: Ids, target: Ids, candidates: int, title: str
    ) -> tuple[Picture, Tensor]:
        """What is seen of a pair, and the probabilities of all tokens at each step."""
        from regard.viewer.text import candidate_steps, text_views

        side = self.tokenizer
        maps, logits = self.maps(source, target)
        chosen = [*target, side.eos]
        writes, probabilities = side.pieces(chosen), logits.softmax(-1)[:, : side.rows]
        views = text_views(
            maps,
            side.pieces([self.decoder.begin, *target]),
            source=self.codec.source.pieces(source),
            writes=writes,
        )
        steps = candidate_steps(
            probabilities, side.pieces, candidates=candidates, chosen=chosen, tokens=writes
        )
        return Picture(title, views, steps, source=title), probabilities

    def pair_picture(self, pair: Pair, candidates: int = 5) -> Picture:
        """Where a model looked while it read a given pair, and what it would have written."""
        settings = PairRunSettings(**self.sources.as_given)
        ((source, target),) = self.encode_pairs([(pair.source, pair.target)], settings)
        picture, _ = self._picture(source, target, candidates, pair.source)
        return replace(picture, output=pair.target, note="read")

    def explain(self, given: str, settings: PairLookSettings) -> Picture:
        """Where a model looked while it wrote a text, and why it wrote that."""
        source = self._source(given, settings)
        hypotheses = self._searched(source, settings)
        best = settings.wanted(hypotheses)
        self.aligner.settle([(source, best.ids or [self.tokenizer.eos])])
        picture, probabilities = self._picture(source, best.ids, settings.candidates, given)
        steps = list(picture.steps)
        for place, reason in self._reasons(source, best, probabilities, settings).items():
            steps[place] = replace(steps[place], note=reason)
        texts = {id(h): _in_script(self.tokenizer.decode(h.ids), settings) for h in hypotheses}
        number, count = settings.hypothesis, len(hypotheses)
        which = "" if number is None else f"hypothesis {number} of {count}, "
        return replace(
            picture,
            steps=steps,
            output=texts[id(best)],
            alternatives=[(texts[id(h)], h.score) for h in hypotheses if h is not best],
            note=f"{which}beam {settings.beam}, {settings.length_penalty} length penalty",
            opens=self.aligner.head,
            units=None if _UNITS[settings.units] else self._in_words,
        )

    @cached_property
    def _alone(self) -> set[str]:
        """Pieces that are no part of a word."""
        sides = self.codec.tokenizers
        special = {piece for side in sides for piece in side.pieces(sorted(side.special_ids))}
        return special | {*self.tokenizer.pieces([self.decoder.begin])}

    def _in_words(self, picture: Picture) -> Picture:
        """A picture whose pieces are joined to words."""
        from regard.viewer.text import word_views

        views, rows = word_views(picture.views, self._alone)
        steps = picture.steps
        if len(rows) == len(steps):
            steps = [replace(step, row=row) for step, row in zip(steps, rows, strict=True)]
        return replace(picture, views=views, steps=steps, note=f"{picture.note}; {_IN_WORDS}")

    def _reasons(
        self, source: list[int], best: Hypothesis, probabilities: Tensor, settings: PairLookSettings
    ) -> dict[int, str]:
        """Why a step of the best hypothesis took another token than the likeliest, by its number.

        The likeliest is put in its place, and the best text that goes on from there is found by the
        same search.
        """
        eos = self.tokenizer.eos
        chosen, found = [*best.ids, eos], {}
        begun = len(self.sources.opening(self.tokenizer, settings))  # tokens that were given
        for place in range(begun, len(chosen)):
            likeliest = int(probabilities[place].argmax())
            if likeliest == chosen[place] or len(found) == _MOST_REASONS:
                continue
            otherwise = best.ids[:place]
            if likeliest != eos:
                sentence = SourceSentence(0, source, [*otherwise, likeliest], "")
                with untraced():
                    ((found_otherwise, *_),) = self.decoder.batch([sentence], settings, 0)
                otherwise = found_otherwise.ids
            pairs = [(source, best.ids), (source, otherwise)]
            ours, other = self.decoder.score(pairs, settings, tokens=2**30, rows=2)
            text = _in_script(self.tokenizer.decode(otherwise), settings)
            taken, likely = (float(probabilities[place, n]) for n in (chosen[place], likeliest))
            verdict = (
                "The search missed a text of better score"
                if ours.score < other.score
                else "The whole text is likelier"
                if ours.logprob > other.logprob
                else "The whole text is less likely, but has the better score for its length"
            )
            found[place] = (
                f"{verdict}: log p {ours.logprob:.2f} in all (score {ours.score:.3f}), against "
                f"{other.logprob:.2f} (score {other.score:.3f}) for the best that was found with "
                f"the likelier token here ({100 * likely:.0f}% over {100 * taken:.0f}%): {text}"
            )
        return found


def _in_script(text: str, settings: WriteSettings) -> str:
    """A text with its Chinese in the script that was asked for."""
    table = _SCRIPTS[settings.script]
    if table is None:
        return text
    from opencc import OpenCC

    return OpenCC(table).convert(text)


def _sides(text: str, number: int) -> tuple[str, str]:
    """Source and target of a line with a TAB between them."""
    source, tab, target = text.partition("\t")
    if not tab:
        raise UsageError(f"forced=true: input {number} has no TAB between source and target")
    return source, target
