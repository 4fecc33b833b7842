"""Texts generated sentence by sentence: cut, decoded in batches, and put together again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.attention.watch import watcher
from regard.data.batches import pad
from regard.data.sentences import join_sentences, split_sentences
from regard.data.tokenizer import Tokenizer
from regard.decode.batching import in_batches
from regard.decode.constraints import forbid, usual_limit
from regard.decode.decoder import decode, engine_search, refuse_part_int8, score
from regard.decode.options import Decoding
from regard.decode.rules import GenerationConfig, RuleInputs
from regard.decode.search import Hypothesis, hypothesis
from regard.decode.writer import Writer
from regard.errors import UsageError

Ids = Sequence[int]


@dataclass
class SourceSentence:
    """A part of a text that is translated by itself."""

    line: int
    ids: list[int]
    prefix: list[int]  # how its target begins
    separator: str  # between it and the next one
    hypotheses: list[Hypothesis] = field(default_factory=list)


class Joined(NamedTuple):
    """The target of a whole text, its scores, and the ids of its sentences on both sides."""

    text: str
    score: float
    logprob: float
    pairs: list[tuple[list[int], list[int]]]


def _limit(sentence: SourceSentence, options: Decoding) -> int:
    """Most tokens of the target of a sentence."""
    return options.max_length or usual_limit(len(sentence.ids)) + len(sentence.prefix)


class SentenceDecoder:
    """Decodes with an encoder-decoder and its tokenizers, by the rules of its checkpoint.

    Args:
        writer: encoder-decoder
        source: tokenizer of the sources
        target: tokenizer of the targets
        vocab: number of logits
        rules: generation_config.json beyond the options
        longest: maximum number of tokens read at once; longer sentences are read in parts
        device: device that the model is on
    """

    def __init__(
        self,
        writer: Writer,
        source: Tokenizer,
        target: Tokenizer,
        vocab: int,
        *,
        rules: Any = None,
        longest: int = 400,
        device: torch.device | str = "cpu",
    ):
        self.writer, self.source, self.target = writer, source, target
        self.longest, self.device = longest, torch.device(device)
        self.rules = GenerationConfig(rules, target.eos, vocab, target.begin)
        self.begin = self.rules.begin
        self.engine: Any = None  # of the writer, while it holds
        self.never = [*target.never, *range(target.rows, vocab)]

    def cut(
        self, text: str, line: int, encode: Callable[[str], list[int]], prefix: Ids, split: bool
    ) -> list[SourceSentence]:
        """Cut a text into the sentences that are decoded one by one, and what is between them.

        Args:
            text: text to cut
            line: number of its line
            encode: ids of a sentence
            prefix: ids that the target of the text begins with
            split: cut at the ends of sentences, not only where they are too long
        """
        sentences: list[SourceSentence] = []
        texts = split_sentences(text) if split else [text]
        if len(texts) > 1:
            self.rules.tell("sentence by sentence; split=false gives it a text at once")
        for part in texts:
            core = part.strip()
            before, _, after = part.partition(core) if core else (part, "", "")
            if before and sentences:
                sentences[-1].separator += before
            elif before:
                sentences.append(SourceSentence(line, [], [], before))
            ids = encode(core) if core else []
            if core and not ids:
                self.rules.tell(f"no answer to {core!r:.40}, of which its tokenizer keeps nothing")
            for start in range(0, len(ids), self.longest):
                piece = self.source.frame(ids[start : start + self.longest], "source")
                last = start + self.longest >= len(ids)
                sentences.append(SourceSentence(line, piece, list(prefix), after if last else " "))
                prefix = ()  # the target begins but once
        return sentences

    def write(
        self,
        sentences: list[SourceSentence],
        options: Decoding,
        first: int,
        *,
        tokens: int,
        rows: int,
    ) -> None:
        """Decode sentences in batches of so many tokens and rows; `first` seeds sampling.

        Args:
            sentences: sentences, which get their hypotheses
            options: how to search
            first: number of the first line, which seeds sampling
            tokens: maximum number of tokens in a batch
            rows: maximum number of sentences in a batch
        """
        hypotheses = self._by_engine(sentences, options)
        if hypotheses is None and any(s.ids for s in sentences):
            refuse_part_int8(self.writer)
        if hypotheses is None or watcher() is not None:
            # who watches sees the search in Python, and gets the answer that is given unwatched
            workers = torch.get_num_threads() if self.device.type == "cpu" else 1
            searched = in_batches(
                sentences,
                [len(s.ids) for s in sentences],
                lambda some: self.batch(some, options, first),
                tokens=tokens,
                rows=min(rows, max(1, -(-len(sentences) // workers))),
                workers=workers,
            )
            hypotheses = searched if hypotheses is None else hypotheses
        for sentence, some in zip(sentences, hypotheses, strict=True):
            sentence.hypotheses = some

    def _by_engine(
        self, sentences: list[SourceSentence], options: Decoding
    ) -> list[list[Hypothesis]] | None:
        """All hypotheses by the engine of the writer, if it has one that knows the options."""
        make = getattr(self.writer, "engine", None)
        changes = self.rules.changes(RuleInputs(self.rules.all_ends, [], [], []))
        constraints = replace(self.rules.constraints, adjust=[forbid(*self.never), *changes])
        asked, real = engine_search(options, constraints), [s for s in sentences if s.ids]
        if make is None or not real or asked is None:
            return None
        (never, how), limits = asked, [_limit(s, options) for s in real]
        self.engine = engine = make(never, self.engine)
        if engine is None:
            return None
        self._tell_limit(options)
        try:
            found = engine.translate([s.ids for s in real], limits, [s.prefix for s in real], **how)
        except UsageError:  # such as a text past the learned positions, which the search refuses
            return None
        if found is None:
            return None
        texts = iter(found)
        return [[hypothesis(*one) for one in next(texts)] if s.ids else [] for s in sentences]

    def _tell_limit(self, options: Decoding) -> None:
        """Say how long a text of a public checkpoint may become where nothing bounds it."""
        if options.max_length is None:
            most = "10 tokens and 1.5 for each of its source"
            self.rules.tell(f"no max_length is given, so a text has up to {most}, not 20")

    def batch(
        self, some: list[SourceSentence], options: Decoding, first: int
    ) -> list[list[Hypothesis]]:
        """Hypotheses of a batch of sentences; one without tokens has none."""
        real = [s for s in some if s.ids]
        if not real:
            return [[] for _ in some]
        limits = [_limit(s, options) for s in real]
        self._tell_limit(options)
        sources = [s.ids for s in real]
        given = RuleInputs(self.rules.all_ends, [[self.begin]] * len(real), sources, limits)
        constraints = replace(
            self.rules.constraints,
            prefix=[s.prefix for s in real],
            adjust=[forbid(*self.never), *self.rules.changes(given)],
            lines=[first + s.line for s in real],
        )
        hypotheses = iter(decode(self.writer, *self._padded(sources), options, constraints))
        return [next(hypotheses) if s.ids else [] for s in some]

    def join(self, parts: list[SourceSentence], language: str | None) -> list[Joined]:
        """Put the sentences of one text together again, the best hypotheses first."""
        separators = [s.separator for s in parts]
        joined = []
        for rank in range(max((len(s.hypotheses) for s in parts), default=0)):
            best = [s.hypotheses[: rank + 1][-1:] for s in parts]
            texts = ["".join(self.target.decode(h.ids) for h in some) for some in best]
            real = [(s, h) for s, some in zip(parts, best, strict=True) for h in some]
            lengths = [max(1, len(h.ids)) for _, h in real]
            total = sum(h.score * n for (_, h), n in zip(real, lengths, strict=True))
            joined.append(
                Joined(
                    join_sentences(texts, separators, language),
                    total / sum(lengths),
                    sum(h.logprob for _, h in real),
                    [(s.ids, h.ids) for s, h in real],
                )
            )
        return joined

    def score(
        self, pairs: Sequence[tuple[list[int], list[int]]], options: Decoding, **batches: int
    ) -> list[Hypothesis]:
        """Log-probabilities of given targets, in batches of up to `tokens` and `rows`."""
        refuse_part_int8(self.writer)
        constraints = replace(self.rules.constraints, eos=self.target.eos)

        def judge(some: list[tuple[list[int], list[int]]]) -> list[Hypothesis]:
            sources = self._padded([source for source, _ in some])
            targets = [target for _, target in some]
            return score(self.writer, *sources, targets, options, constraints)

        return in_batches(pairs, [max(map(len, pair)) for pair in pairs], judge, **batches)

    def _padded(self, rows: Sequence[Ids]) -> tuple[Tensor, Tensor]:
        ids, lengths = pad([np.asarray(row, dtype=np.int64) for row in rows], 0)
        return ids.to(self.device), lengths.to(self.device)
