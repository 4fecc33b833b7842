"""Sequence to sequence: a model reads a source and writes a target.

It learns from pairs, writes a text sentence by sentence, and scores and aligns given pairs.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention.watch import watch
from regard.data.pairs import Corpus, Pair
from regard.decode.alignment import Aligner, Alignment
from regard.decode.sentences import Sentence, SentenceDecoder
from regard.decode.trace import untraced
from regard.errors import UsageError
from regard.metrics.text import METRICS
from regard.models.folder import load_folder
from regard.tasks.frame.answers import Generated
from regard.tasks.frame.question import Question, source_keys
from regard.tasks.frame.recipe import save_generation
from regard.tasks.text.pair_settings import SCRIPTS, UNITS, PairLookSettings, PairRunSettings
from regard.tasks.text.pairs import PairCodec, PairTask

LONGEST_PART = 400  # tokens; a longer sentence is read in parts, as the model never saw such
LONGEST_WHOLE = 4000  # tokens of a text that is scored or looked at, which is never cut
MOST_REASONS = 8  # steps of a text at which it is searched how it would have gone on otherwise


class Seq2Seq(PairTask):
    """A task whose model reads one text and writes another."""

    holds, target = "pairs of sentences", "text"
    generation = {"beam": 5, "length_penalty": "average", "alpha": 1.0}
    Run = PairRunSettings
    Look = PairLookSettings

    def __init__(self, model: nn.Module, codec: PairCodec, config: Mapping[str, Any] | None = None):
        super().__init__(model, codec, config)
        self.writer = self.encoder_decoder(model)
        self.source_tokenizer, self.target_tokenizer = codec.source, codec.target
        self.tokenizer = codec.target
        generation = self.config.get("generation", {})
        self.decoder = SentenceDecoder(
            self.writer,
            *codec.tokenizers,
            self.writer.config.target_vocab,
            rules=generation.get("rules"),
            longest=self.longest_source(),
            device=self.device,
        )
        heads = {n: m.heads for n, m in self.writer.named_modules() if n.endswith(".cross")}
        self.aligner = Aligner(heads, self.maps, generation.get("alignment_head"))

    @property
    def positions(self) -> int | None:
        """Return how many positions the model has learned, where that bounds a text."""
        return None

    def longest_source(self) -> int:
        """Return the most tokens of a sentence that are read at once."""
        return LONGEST_PART

    # ---- Training

    def decodes(self, data: Corpus, settings: Any) -> int:
        """Return how many sentences a validation decodes."""
        return min(settings.valid_sentences, len(data["valid"]))

    def validate(self, data: Corpus, settings: Any, share: float = 1.0) -> dict[str, float]:
        """Return the loss on the validation part, and the scores of what is written greedily."""
        pairs: list[Pair] = data["valid"]
        loss = self.valid_loss(pairs[: math.ceil(share * len(pairs))], settings)
        scores = {"loss": loss, "better": -loss}
        some = pairs[: math.ceil(share * self.decodes(data, settings))]
        if some:
            greedy = self.check({"beam": 1, **self.as_given})
            outputs = [str(answer) for answer in self.answer([p.source for p in some], greedy)]
            scores |= self.valid_scores(outputs, [p.target for p in some], settings)
        return scores

    def valid_scores(
        self, outputs: list[str], references: list[str], settings: Any
    ) -> dict[str, float]:
        """Return the scores of written texts; `better` is to be raised."""
        bleu = METRICS["bleu"].score(outputs, [references], self.config.get("to"))[0].value
        return {"bleu": bleu, "better": bleu}

    def save_alignment_head(self, folder: Path, pairs: Sequence[Pair]) -> None:
        """Note in a folder which head of its model aligns some pairs best."""
        published = type(self).load(folder, *load_folder(folder))
        if published.aligner.heads:
            some = [(pair.source, pair.target) for pair in pairs[:50]]
            ids = published.encode_pairs(some, published.check({}))
            name, head = published.aligner.choose(ids)
            save_generation(folder, {**self.generation, "alignment_head": f"{name}:{head}"})

    # ---- Writing

    @property
    def own(self) -> dict[str, Any]:
        """Return the model's own defaults of decoding; a checkpoint may bound the length."""
        own = super().own
        if self.decoder.rules.longest is not None:  # with the token after which it begins
            longest = max(1, self.decoder.rules.longest - 1)
            own.setdefault("max_length", min(longest, (self.positions or longest + 1) - 1))
        return own

    def check_run(self, settings: Any) -> Any:
        """Refuse settings that contradict each other."""
        settings.check()
        return settings

    def framed(self, ids: Sequence[int]) -> list[int]:
        """Put around a source the special tokens that the model expects there."""
        return self.codec.source.frame(ids, "source")

    def prompt(self, text: str, settings: Any) -> str:
        """Return what the model reads for a text."""
        return text

    def opening(self, settings: Any) -> list[int]:
        """Return the tokens that every target begins with."""
        return self.codec.target.encode(settings.prefix)

    def encode_source(self, text: str, settings: Any) -> list[int]:
        """Split what is read into ids."""
        return self.codec.source.encode(self.prompt(text, settings))

    def predict(self, inputs: list[str], settings: Any, *, first: int = 0) -> list[Generated]:
        """Write the targets of texts; `first` is the number of the first, which seeds sampling."""
        if settings.forced:
            return self._scored(list(map(self._pair, inputs, range(len(inputs)))), settings)
        most, rules = (self.positions or 0) - 1, self.decoder.rules
        if settings.max_length == most and rules.longest is None:
            rules.tell(f"no max_length is given, so a text has up to its {most} positions, not 20")
        texts = [
            self.decoder.cut(
                text,
                line,
                lambda part: self.encode_source(part, settings),
                self.opening(settings),
                settings.split,
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

    def _generated(self, parts: list[Sentence], settings: Any) -> Generated:
        """Return the target of a text, and the next best ones."""
        best, *others = [
            Generated(
                self._in_script(text, settings), score, logprob, self._aligned(pairs, settings)
            )
            for text, score, logprob, pairs in self.decoder.join(parts, self.config.get("to"))
        ] or [Generated("".join(s.separator for s in parts))]
        best.others = others
        return best

    def _aligned(
        self, pairs: Sequence[tuple[list[int], list[int]]], settings: Any
    ) -> Alignment | None:
        if settings.alignments == "none":
            return None
        more = {"shift": int(settings.shift), "pieces": UNITS[settings.units]}
        return self.aligner.align(pairs, *self.codec.tokenizers, **more)

    def _in_script(self, text: str, settings: Any) -> str:
        """Write Chinese in the script that was asked for."""
        table = SCRIPTS[settings.script]
        if table is None:
            return text
        from opencc import OpenCC

        return OpenCC(table).convert(text)

    # ---- Scoring given pairs

    def score(self, pairs: Sequence[tuple[str, str]], **settings: Any) -> list[Generated]:
        """Return how likely the model finds given targets of sources, and align them if asked."""
        completed = self.check(settings)
        with self.using(completed):
            return self._scored(pairs, completed)

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], settings: Any
    ) -> list[tuple[list[int], list[int]]]:
        """Split both sides of pairs into ids, as the model reads them."""
        sources = self.codec.source.encode_batch([self.prompt(a, settings) for a, _ in pairs])
        targets = self.codec.target.encode_batch([b for _, b in pairs])
        for ids in (*sources, *targets):
            if len(ids) > LONGEST_WHOLE:
                raise UsageError(
                    f"a text of {len(ids)} pieces is too long to be scored whole; cut it"
                )
        return [(self.framed(a), b) for a, b in zip(sources, targets, strict=True)]

    def _scored(self, pairs: Sequence[tuple[str, str]], settings: Any) -> list[Generated]:
        encoded = self.encode_pairs(pairs, settings)
        scored = self.decoder.score(
            encoded, settings, tokens=settings.batch_tokens, rows=settings.batch_rows
        )
        return [
            Generated(target, h.score, h.logprob, self._aligned([ids], settings))
            for (_, target), ids, h in zip(pairs, encoded, scored, strict=True)
        ]

    def _pair(self, text: str, line: int) -> tuple[str, str]:
        """Split a line that holds a source, a TAB and a target."""
        source, tab, target = text.partition("\t")
        if not tab:
            raise UsageError(f"forced=true: input {line + 1} has no TAB between source and target")
        return source, target

    # ---- Looking

    @torch.inference_mode()
    def maps(self, source: Sequence[int], target: Sequence[int]) -> tuple[Any, Tensor]:
        """Return the attention of every layer and head over one pair, exactly, and the logits.

        One pass over the finished text: what was attended to at each step, whatever beam or batch
        it came from.
        """
        reads = torch.tensor([[self.decoder.begin, *target]], device=self.device)
        ids = torch.tensor([list(source)], device=self.device)
        with watch(self.model) as maps:
            logits = self.writer(ids, reads)
        return maps, logits[0]

    def _source_ids(self, given: str, settings: Any) -> list[int]:
        """Return the ids of a source that is looked at."""
        if not given.strip():
            raise UsageError("there is nothing to look at in an empty text")
        return self.framed(self.encode_source(given.strip(), settings)[:LONGEST_WHOLE])

    def _hypotheses(self, source: list[int], settings: Any) -> list[Any]:
        """Return the hypotheses for a source, the best first."""
        sentence = Sentence(0, source, self.opening(settings), "")
        (hypotheses,) = self.decoder.batch([sentence], settings, 0)
        return hypotheses

    def question(self, given: str, settings: Any, expected: Any = None) -> Question:
        """Return a source with its target and the log-probability of that."""
        target = self.codec.target
        source = self._source_ids(given, settings)
        best = self._hypotheses(source, settings)[0].ids if expected is None else list(expected)
        reads = [self.decoder.begin, *best]

        @torch.inference_mode()
        def logprobs(copies: int) -> Tensor:
            both = (torch.tensor([ids], device=self.device) for ids in (source, reads))
            logits = self.writer(*(ids.expand(copies, -1) for ids in both))
            return logits[..., : target.rows].double().log_softmax(-1)

        return Question(
            answer=target.decode(best),
            logprobs=logprobs,
            chosen=[*best, target.eos],
            names=target.pieces,
            places=target.pieces(reads),
            tokens=self.codec.source.pieces(source),
            keys=source_keys(len(source), len(reads)),
            expected=best,
        )

    def pair_picture(self, pair: Pair, candidates: int = 5) -> Any:
        """Read a given pair and gather where the model looked, and what it would have written."""
        from regard.viewer.picture import Picture
        from regard.viewer.text import candidate_steps, text_views

        target = self.codec.target
        ((source, ids),) = self.encode_pairs([(pair.source, pair.target)], self.check({}))
        maps, logits = self.maps(source, ids)
        tokens, chosen = target.pieces([self.decoder.begin, *ids]), [*ids, target.eos]
        writes, read = target.pieces(chosen), self.codec.source.pieces(source)
        more = {"candidates": candidates, "chosen": chosen, "tokens": writes}
        return Picture(
            title=pair.source,
            views=text_views(maps, tokens, source=read, writes=writes),
            steps=candidate_steps(logits.softmax(-1)[:, : target.rows], target.pieces, **more),
            source=pair.source,
            output=pair.target,
            note="read",
        )

    def explain(self, given: str, settings: Any) -> Any:
        """Translate a sentence and gather all there is to see of how it was done."""
        from regard.viewer.picture import Picture
        from regard.viewer.text import candidate_steps, text_views

        target = self.codec.target
        source = self._source_ids(given, settings)
        hypotheses = self._hypotheses(source, settings)
        best = hypotheses[0].ids
        chosen = [*best, target.eos]
        maps, logits = self.maps(source, best)
        tokens, writes = target.pieces([self.decoder.begin, *best]), target.pieces(chosen)
        self.aligner.settle([(source, best or chosen)])
        texts = [self._in_script(target.decode(h.ids), settings) for h in hypotheses]
        probabilities = logits.softmax(-1)[:, : target.rows]
        more = {"candidates": settings.candidates, "chosen": chosen, "tokens": writes}
        steps = candidate_steps(probabilities, target.pieces, **more)
        for place, reason in self._reasons(source, hypotheses[0], probabilities, settings).items():
            steps[place] = replace(steps[place], note=reason)
        return Picture(
            title=given,
            views=text_views(maps, tokens, source=self.codec.source.pieces(source), writes=writes),
            steps=steps,
            source=given,
            output=texts[0],
            alternatives=[(t, h.score) for t, h in zip(texts[1:], hypotheses[1:], strict=True)],
            note=f"beam {settings.beam}, {settings.length_penalty} length penalty",
            opens=self.aligner.head,
        )

    def for_reader(self, picture: Any, settings: Any) -> Any:
        """Join pieces to words, unless pieces are asked for."""
        from regard.viewer.text import word_views

        if UNITS[settings.units]:
            return picture
        sides = self.codec.tokenizers
        alone = {piece for side in sides for piece in side.pieces(sorted(side.special_ids))}
        alone |= {*self.codec.target.pieces([self.decoder.begin])}
        views, rows = word_views(picture.views, alone)
        steps = picture.steps
        if len(rows) == len(steps):
            steps = [replace(step, row=row) for step, row in zip(steps, rows, strict=True)]
        told = "words: a row is the mean of its pieces' rows, a column the sum of their columns"
        return replace(picture, views=views, steps=steps, note=f"{picture.note}; {told}")

    def _reasons(
        self, source: list[int], best: Any, probabilities: Tensor, settings: Any
    ) -> dict[int, str]:
        """Why a step of the best hypothesis took another token than the likeliest, by its number.

        The likeliest is put in its place, and the best text that goes on from there is found by the
        same search.
        """
        chosen, found = [*best.ids, self.codec.target.eos], {}
        begun = len(self.opening(settings))  # tokens that were given
        for place in range(begun, len(chosen)):
            likeliest = int(probabilities[place].argmax())
            if likeliest == chosen[place] or len(found) == MOST_REASONS:
                continue
            otherwise = best.ids[:place]
            if likeliest != self.codec.target.eos:
                sentence = Sentence(0, source, [*otherwise, likeliest], "")
                with untraced():
                    ((found_otherwise, *_),) = self.decoder.batch([sentence], settings, 0)
                otherwise = found_otherwise.ids
            pairs = [(source, best.ids), (source, otherwise)]
            ours, other = self.decoder.score(pairs, settings, tokens=2**30, rows=2)
            text = self._in_script(self.codec.target.decode(otherwise), settings)
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
