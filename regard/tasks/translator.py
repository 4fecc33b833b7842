"""A trained translator as its user has it: texts in, texts out, and a look at how."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.attention.watch import watch
from regard.data.batches import pad
from regard.data.sentences import join_sentences, split_sentences
from regard.data.tokenize import Tokenizer
from regard.data.tokenizer import words_of_pieces
from regard.decode import search
from regard.decode.rules import Given, Ways
from regard.decode.search import Hypothesis, in_batches
from regard.errors import UsageError, lookup
from regard.native import fast_run
from regard.settings import fill, setting
from regard.tasks.runners import Answer, Runner
from regard.tasks.tokenizer import load_any_tokenizers, save_any_tokenizers

LONGEST_PART = 400  # pieces; a longer sentence is read in parts, as the model never saw such


def save_tokenizers(folder: Path, pair: tuple[Tokenizer, Tokenizer]) -> None:
    """Write one tokenizer.json, or source_tokenizer.json and target_tokenizer.json."""
    save_any_tokenizers(folder, pair)


def load_tokenizers(folder: Path) -> tuple[Tokenizer, Tokenizer]:
    """Read the tokenizers of a folder."""
    return load_any_tokenizers(folder)


def around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return what a model expects before and after a source: its end, or as its tokenizer says."""
    return tokenizer.around("source")


def begin_of(tokenizer: Any) -> int:
    """Return the token after which a decoder begins to write."""
    return tokenizer.begin


def own_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return a model's own defaults of writing, without what is no setting."""
    told = config.get("generation", {})
    return {key: value for key, value in told.items() if key not in ("alignment_head", "rules")}


@dataclass(frozen=True)
class RunSettings:
    """How to translate."""

    beam: int = setting(5, "hypotheses followed; 1 is greedy", min=1, max=1000)
    length_penalty: str = setting("average", "average, gnmt or none")
    alpha: float | None = setting(None, "exponent of the length penalty", min=-10, max=10)
    max_length: int | None = setting(None, "longest answer in pieces", min=1, max=10_000)
    n_best: int = setting(1, "answers a line", min=1, max=1000)
    scores: bool = setting(False, "tell the score of each answer")
    alignments: str = setting("none", "none, pharaoh or json")
    prefix: str = setting("", "how every answer begins")
    forced: bool = setting(False, "score given pairs: source, TAB, target on each line")
    temperature: float | None = setting(None, "draw at random, at this temperature", min=0, max=100)
    top_k: int | None = setting(None, "draw among so many", min=1)
    top_p: float | None = setting(None, "draw among the likeliest with this mass", min=0, max=1)
    min_p: float | None = setting(None, "draw above this share of the likeliest", min=0, max=1)
    seed: int = setting(1, "of the draws", min=0)
    split: bool = setting(True, "translate sentence by sentence")
    script: str = setting("", "simplified or traditional, for Chinese")
    batch_tokens: int = setting(4096, "pieces translated at once", min=1)
    batch_rows: int = setting(128, "sentences translated at once", min=1)
    threads: int | None = setting(None, "processor threads", min=1, max=1024)

    @property
    def draws(self) -> bool:
        """Tell whether answers are drawn at random."""
        return any(x is not None for x in (self.temperature, self.top_k, self.top_p, self.min_p))


SCRIPTS = {"": None, "simplified": "t2s", "traditional": "s2t"}
ALIGNMENTS = ("none", "pharaoh", "json")


@dataclass
class Alignment:
    """Which source word each target word looked at most, with the pieces and all weights."""

    source: list[str]
    target: list[str]
    links: list[tuple[int, int]]

    def __str__(self) -> str:
        return " ".join(f"{s}-{t}" for s, t in self.links)

    def record(self) -> dict[str, Any]:
        """Return what a JSON line holds of it."""
        return {"source": self.source, "target": self.target, "links": self.links}


@dataclass
class Translated(Answer):
    """One answer, with what is known about it; `others` are the next best."""

    text: str
    score: float = 0.0
    logprob: float = 0.0
    alignment: Alignment | None = None
    others: list["Translated"] = field(default_factory=list)

    def __str__(self) -> str:
        return self.text

    def lines(self, settings: "RunSettings") -> Iterator[str]:
        """Write the answers as lines, each with what was asked for after ` ||| `."""
        for answer in [self, *self.others]:
            parts = [answer.text]
            if settings.scores or settings.forced:
                parts.append(f"{answer.score:.6f}")
            if answer.alignment is not None:
                import json

                pharaoh = settings.alignments == "pharaoh"
                told = json.dumps(answer.alignment.record(), ensure_ascii=False)
                parts.append(str(answer.alignment) if pharaoh else told)
            yield " ||| ".join(parts)

    def record(self, settings: "RunSettings") -> dict[str, Any]:
        """Return the fields of a JSON line."""
        found: dict[str, Any] = {"prediction": self.text, "score": round(self.score, 6)}
        if self.alignment is not None:
            found["alignment"] = self.alignment.record()
        if self.others:
            found["n_best"] = [found.copy(), *(other.record(settings) for other in self.others)]
        return found


@dataclass
class _Sentence:
    """A part of an input that is translated by itself."""

    line: int
    ids: list[int]
    prefix: list[int]
    separator: str
    answers: list[Hypothesis] = field(default_factory=list)


class Translator(Runner[Translated]):
    """A model with its tokenizers."""

    task = "translate"
    settings = RunSettings
    takes_several = True  # others to be judged against

    def __init__(self, model: Any, source: Tokenizer, target: Tokenizer, config: dict[str, Any]):
        self.model, self.config = model, config
        self.source_tokenizer, self.target_tokenizer = source, target
        self.tokenizer = target
        self.device = next(model.parameters()).device
        self.before, self.after = around(source)
        vocab = getattr(model.config, "target_vocab", target.vocab)
        rules = config.get("generation", {}).get("rules")
        self.ways = Ways(rules, target.eos, vocab, begin_of(target))
        self.begin = self.ways.begin
        self.positions: int | None = None
        self.longest = LONGEST_PART
        # tokens that no answer has; what a checkpoint's own tokenizer calls special is up to it
        self.forbidden = [*target.never, *range(target.vocab, vocab)]

    @classmethod
    def load(cls, folder: Path, model: Any, config: dict[str, Any]) -> "Translator":
        """Put a loaded model together with the tokenizers beside it."""
        source, target = load_tokenizers(folder)
        shape = model.config
        for side, tokenizer, size in (
            ("source", source, shape.source_vocab),
            ("target", target, shape.target_vocab),
        ):
            if tokenizer.vocab > size:
                raise UsageError(
                    f"{folder}: the {side} tokenizer has {tokenizer.vocab} pieces, "
                    f"the model only {size}"
                )
        for key in ("from", "to"):
            if not isinstance(config.get(key), str | None):
                raise UsageError(
                    f"{folder / 'config.json'}: '{key}' is {config[key]!r:.40}, not text"
                )
        try:
            made = cls(model, source, target, config)
            made.check({})
            made._alignment_head()
        except UsageError as mistake:
            raise UsageError(f"{folder / 'generation_config.json'}: {mistake}") from None
        return made

    def framed(self, ids: Sequence[int]) -> list[int]:
        """Put around a source what the model expects there."""
        return [*self.before, *ids, *self.after]

    def encode_source(self, text: str, how: RunSettings) -> list[int]:
        """Split what is read into ids."""
        return self.source_tokenizer.encode(text)

    def opening(self, how: RunSettings) -> list[int]:
        """Return how every answer must begin."""
        return self.target_tokenizer.encode(how.prefix)

    # Translating

    def check(self, settings: dict[str, Any]) -> RunSettings:
        """Make full settings of what a user gave, with the model's own defaults."""
        own = own_settings(self.config)
        if self.ways.longest is not None:  # with the token after which it begins
            longest = max(1, self.ways.longest - 1)
            own.setdefault("max_length", min(longest, (self.positions or longest + 1) - 1))
        how = fill(self.settings, {**own, **settings})
        lookup("length_penalty", how.length_penalty, search.PENALTIES)
        if how.alignments not in ALIGNMENTS:
            raise UsageError(f"alignments='{how.alignments}' is not one of {', '.join(ALIGNMENTS)}")
        if how.script not in SCRIPTS:
            raise UsageError(f"script='{how.script}' is not one of simplified, traditional")
        if how.n_best > how.beam and not how.draws:
            raise UsageError(f"n_best={how.n_best} is more than beam={how.beam}; widen the beam")
        return how

    @fast_run
    def answer(self, inputs: list[Any], *, first: int = 0, **settings: Any) -> list[Translated]:
        """Translate texts; `first` is the number of the first line, which seeds random draws."""
        how = self.check(settings)
        for text in inputs:
            if not isinstance(text, str):
                raise UsageError(f"{text!r:.60} is no text; give a list of texts")
        if how.threads:
            torch.set_num_threads(how.threads)
        if how.forced:
            return self._forced(inputs, how)
        sentences = [s for i, text in enumerate(inputs) for s in self._sentences(text, i, how)]

        def write(some: list[_Sentence]) -> list[list[Hypothesis]]:
            return self._write(some, how, first)

        lengths = [len(s.ids) for s in sentences]
        workers = torch.get_num_threads() if self.device.type == "cpu" else 1
        rows = min(how.batch_rows, max(1, -(-len(sentences) // workers)))
        found = in_batches(
            sentences, lengths, write, tokens=how.batch_tokens, rows=rows, workers=workers
        )
        for sentence, hypotheses in zip(sentences, found, strict=True):
            sentence.answers = hypotheses
        if how.alignments != "none":
            self._align([(s.ids, h.ids) for s in sentences for h in s.answers])
        by_line: list[list[_Sentence]] = [[] for _ in inputs]
        for sentence in sentences:
            by_line[sentence.line].append(sentence)
        return [self._told(parts, how) for parts in by_line]

    def _sentences(self, text: str, line: int, how: RunSettings) -> list[_Sentence]:
        """Cut an input into the sentences that are translated one by one, and what is between."""
        prefix = self.opening(how)
        found: list[_Sentence] = []
        for part in split_sentences(text) if how.split else [text]:
            core = part.strip()
            before, _, after = part.partition(core) if core else (part, "", "")
            if before and found:
                found[-1].separator += before
            elif before:
                found.append(_Sentence(line, [], [], before))
            ids = self.encode_source(core, how) if core else []
            for start in range(0, len(ids), self.longest):
                piece = self.framed(ids[start : start + self.longest])
                last = start + self.longest >= len(ids)
                found.append(_Sentence(line, piece, prefix, after if last else " "))
                prefix = []  # the answer begins but once
        return found

    def _write(self, some: list[_Sentence], how: RunSettings, first: int) -> list[list[Hypothesis]]:
        """Write the answers to a batch of sentences."""
        real = [s for s in some if s.ids]
        found: list[list[Hypothesis]] = []
        if real:
            ids, lengths = self._padded([s.ids for s in real])
            prefix = [s.prefix for s in real] if how.prefix else None
            rest: dict[str, Any] = {
                "length_penalty": how.length_penalty,
                "alpha": how.alpha,
                "max_length": how.max_length,
                "prefix": prefix,
                "adjust": [search.forbid(*self.forbidden), *self._rules(real, how)],
                "bos": self.begin,
                "eos": self.ways.eos,
                "ends": self.ways.ends,
            }
            if how.draws:
                found = search.sample(
                    self.model,
                    ids,
                    lengths,
                    samples=how.n_best,
                    temperature=1.0 if how.temperature is None else how.temperature,
                    top_k=how.top_k,
                    top_p=how.top_p,
                    min_p=how.min_p,
                    seed=how.seed,
                    lines=[first + s.line for s in real],
                    **rest,
                )
            elif how.beam == 1:
                found = search.greedy(self.model, ids, lengths, **rest)
            else:
                rest |= {"beam": how.beam, "n_best": how.n_best, **self.ways.beam()}
                found = search.beam(self.model, ids, lengths, **rest)
        answers = iter(found)
        return [next(answers) if s.ids else [] for s in some]

    def _rules(self, some: list[_Sentence], how: RunSettings) -> list[search.Adjust]:
        """Return the checkpoint's own rules for some sentences."""
        limits = [how.max_length or search.usual_limit(len(s.ids)) + len(s.prefix) for s in some]
        given = Given(self.ways.all_ends, [[self.begin]] * len(some), [s.ids for s in some], limits)
        return list(self.ways.changes(given))

    def _padded(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        ids, lengths = pad([np.asarray(row, dtype=np.int64) for row in rows], 0)
        return ids.to(self.device), lengths.to(self.device)

    def _told(self, parts: list[_Sentence], how: RunSettings) -> Translated:
        """Put the sentences of one input together again."""
        count = max((len(s.answers) for s in parts), default=0)
        if count == 0:
            blank = "".join(s.separator for s in parts)
            return Translated(blank)
        answers = []
        for rank in range(count):
            chosen = [
                s.answers[min(rank, len(s.answers) - 1)] if s.answers else None for s in parts
            ]
            texts = [self.target_tokenizer.decode(h.ids) if h else "" for h in chosen]
            text = join_sentences(texts, [s.separator for s in parts], self.config.get("to"))
            real = [h for h in chosen if h]
            tokens = sum(max(1, len(h.ids)) for h in real)
            score = sum(h.score * max(1, len(h.ids)) for h in real) / tokens
            answer = Translated(self._in_script(text, how), score, sum(h.logprob for h in real))
            if how.alignments != "none":
                pairs = [(s.ids, h.ids) for s, h in zip(parts, chosen, strict=True) if h]
                answer.alignment = self._joined(pairs)
            answers.append(answer)
        answers[0].others = answers[1:]
        return answers[0]

    def _in_script(self, text: str, how: RunSettings) -> str:
        """Write Chinese in the script that was asked for."""
        table = SCRIPTS[how.script]
        if table is None:
            return text
        from opencc import OpenCC

        return OpenCC(table).convert(text)

    # Judging and aligning given texts

    @fast_run
    def score(self, pairs: Sequence[tuple[str, str]], **settings: Any) -> list[Translated]:
        """Tell how likely the model finds given translations, and align them if asked."""
        how = self.check(settings)
        encoded = self.encode_pairs(pairs)

        def judge(some: list[tuple[list[int], list[int]]]) -> list[Hypothesis]:
            ids, lengths = self._padded([a for a, _ in some])
            texts = [b for _, b in some]
            return search.score(
                self.model,
                ids,
                lengths,
                texts,
                length_penalty=how.length_penalty,
                alpha=how.alpha,
                bos=self.begin,
                eos=self.target_tokenizer.eos,
            )

        lengths = [max(len(a), len(b)) for a, b in encoded]
        found = in_batches(encoded, lengths, judge, tokens=how.batch_tokens, rows=how.batch_rows)
        answers = []
        for (_, target), pair, judged in zip(pairs, encoded, found, strict=True):
            answer = Translated(target, judged.score, judged.logprob)
            if how.alignments != "none":
                answer.alignment = self._joined([pair])
            answers.append(answer)
        return answers

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
        """Split both sides of pairs into ids, as the model reads them."""
        sources = self.source_tokenizer.encode_batch([a for a, _ in pairs])
        targets = self.target_tokenizer.encode_batch([b for _, b in pairs])
        for ids in (*sources, *targets):
            if len(ids) > 10 * LONGEST_PART:
                raise UsageError(
                    f"a text of {len(ids)} pieces is too long to be scored whole; cut it"
                )
        return [(self.framed(a), b) for a, b in zip(sources, targets, strict=True)]

    def _forced(self, inputs: Sequence[str], how: RunSettings) -> list[Translated]:
        """Score lines that hold a source, a TAB and a target."""
        pairs = []
        for number, text in enumerate(inputs, 1):
            source, tab, target = text.partition("\t")
            if not tab:
                raise UsageError(
                    f"forced=true: input {number} has no TAB between source and target"
                )
            pairs.append((source, target))
        return self.score(
            pairs,
            length_penalty=how.length_penalty,
            alpha=how.alpha,
            alignments=how.alignments,
            prefix=how.prefix,
            batch_tokens=how.batch_tokens,
            batch_rows=how.batch_rows,
        )

    @torch.inference_mode()
    def maps(self, source: Sequence[int], target: Sequence[int]):
        """Return the attention of every layer and head over one pair, exactly, and the logits.

        One pass over the finished text: what was seen at each step, whatever beam or batch it
        came from.
        """
        reads = torch.tensor([[self.begin, *target]], device=self.device)
        ids = torch.tensor([list(source)], device=self.device)
        with watch(self.model) as maps:
            logits = self.model(ids, reads)
        return maps, logits[0]

    def _alignment_head(self) -> tuple[str, int] | None:
        """Return the layer and the head that align, if the model says which."""
        told = self.config.get("generation", {}).get("alignment_head")
        if told is None:
            return None
        for name, module in self.model.named_modules():
            for head in range(module.heads) if name.endswith(".cross") else ():
                if told == f"{name}:{head}":
                    return name, head
        raise UsageError(f"alignment_head={told!r:.60} is no head of cross-attention")

    @property
    def looks(self) -> bool:
        """Tell whether the model looks at the source while it writes."""
        return any(name.endswith(".cross") for name, _ in self.model.named_modules())

    def _align(self, pairs) -> None:
        """Settle once which head aligns, if the model does not say."""
        if not self.looks:
            raise UsageError(
                "this model writes from one fixed context and never looks at the source again; "
                "take one with attention, such as like=rnnsearch"
            )
        if self._alignment_head() is None:
            some = [pair for pair in pairs if pair[0] and pair[1]][:50]
            if not some:
                return
            name, head = self.choose_alignment_head(some)
            self.config.setdefault("generation", {})["alignment_head"] = f"{name}:{head}"

    def choose_alignment_head(
        self, pairs: Sequence[tuple[list[int], list[int]]]
    ) -> tuple[str, int]:
        """Choose the head of cross-attention that tells most about which word goes with which.

        That is the one with the highest mutual information of target and source positions: each
        target word looks at few source words, and different ones at different ones.
        """
        told: dict[tuple[str, int], float] = {}
        for source, target in pairs:
            maps, _ = self.maps(source, target)
            for name in maps.names():
                if not name.endswith(".cross"):
                    continue
                weights = maps[name].weights()[0, :, :-1].double().clamp_min(1e-12)
                if weights.shape[1] == 0:
                    continue
                whole = weights.mean(1)
                spread = -(whole * whole.log()).sum(-1)
                each = -(weights * weights.log()).sum(-1).mean(-1)
                for head, value in enumerate((spread - each).tolist()):
                    told[name, head] = told.get((name, head), 0.0) + value
        if not told:
            raise UsageError("nothing to align: every text is empty")
        return max(told, key=lambda key: told[key])

    def alignment_weights(self, source: list[int], target: list[int]) -> np.ndarray:
        """Return how much each target piece looked at each source piece, by the aligning head."""
        self._align([(source, target)])
        name, _, head = self.config["generation"]["alignment_head"].rpartition(":")
        maps, _ = self.maps(source, target)
        return maps[name].weights(heads=int(head))[0, 0, : len(target), :-1].cpu().numpy()

    def _joined(self, pairs: Sequence[tuple[list[int], list[int]]]) -> Alignment:
        """Align the sentences of one input and count their words through."""
        sources: list[str] = []
        targets: list[str] = []
        links: list[tuple[int, int]] = []
        for source, target in pairs:
            a, of_a = words_of_pieces(self.source_tokenizer.pieces(source[:-1]))
            b, of_b = words_of_pieces(self.target_tokenizer.pieces(target))
            if a and b:
                weights = self.alignment_weights(source, target)
                mass = np.zeros((len(b), len(a)))
                np.add.at(mass, (np.array(of_b)[:, None], np.array(of_a)[None, :]), weights)
                best = mass.argmax(1)
                links += [(int(s) + len(sources), t + len(targets)) for t, s in enumerate(best)]
            sources += a
            targets += b
        return Alignment(sources, targets, sorted(links))

    @fast_run
    def evaluate(self, settings: dict[str, Any], **more: Any) -> Any:
        """Judge the translations of a test set."""
        from regard.tasks.evaluation import evaluate

        return evaluate(self, settings, **more)

    # Looking

    def picture(self, text: str, *, candidates: int = 5, **settings: Any):
        """Translate a sentence and gather all there is to see of how it was done."""
        from regard.viewer.picture import Picture, Step, View

        how = self.check(settings)
        if not text.strip():
            raise UsageError("there is nothing to look at in an empty text")
        ids = self.encode_source(text.strip(), how)[: 10 * LONGEST_PART]
        source = self.framed(ids)
        sentence = _Sentence(0, source, self.opening(how), "")
        hypotheses = self._write([sentence], how, 0)[0]
        best = hypotheses[0]
        maps, logits = self.maps(source, best.ids)
        show = self.target_tokenizer.pieces
        rows = show([self.begin, *best.ids])
        writes = show([*best.ids, self.target_tokenizer.eos])
        columns = self.source_tokenizer.pieces(source)
        views = []
        for name in maps.names():
            encoder, cross = name.startswith("encoder"), name.endswith("cross")
            views.append(
                View(
                    name,
                    maps[name].weights()[0].cpu().numpy(),
                    columns if encoder else rows,
                    columns if encoder or cross else rows,
                    "cross" if cross else "self",
                    None if encoder else writes,
                )
            )
        probabilities = logits.softmax(-1)
        top = probabilities.topk(min(candidates, logits.shape[-1]))
        steps = []
        for i, number in enumerate([*best.ids, self.target_tokenizer.eos]):
            pairs = zip(show(top.indices[i].tolist()), top.values[i].tolist(), strict=True)
            steps.append(Step(writes[i], float(probabilities[i, number]), list(pairs)))
        self._align([(source, best.ids)] if best.ids else [(source, [self.target_tokenizer.eos])])
        name, _, head = self.config["generation"]["alignment_head"].rpartition(":")
        told = [
            (self._in_script(self.target_tokenizer.decode(h.ids), how), h.score) for h in hypotheses
        ]
        return Picture(
            title=text,
            views=views,
            steps=steps,
            source=text,
            output=told[0][0],
            alternatives=told[1:],
            note=f"beam {how.beam}, {how.length_penalty} length penalty",
            opens=(name, int(head)),
        )
