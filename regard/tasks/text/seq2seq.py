"""Sequence to sequence: what translation and text-to-text tasks share.

A model reads a source and writes a target; both have a tokenizer, which may be the same. It learns
from pairs, writes a text sentence by sentence, scores given pairs, and is judged by BLEU or another
metric, also by the length of the source.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from regard.attention.watch import watch
from regard.data.batches import Batches
from regard.data.pairs import Corpus, Pair, load_pairs
from regard.data.parallel import (
    SIDES,
    PairBatch,
    PairBatches,
    corpus_hash,
    hash_pairs,
    learn_tokenizers,
    make_batch,
)
from regard.data.tokenizer import Tokenizer
from regard.decode.alignment import Aligner, Alignment
from regard.decode.options import Decoding
from regard.decode.sentences import Sentence, SentenceDecoder
from regard.errors import UsageError, log
from regard.metrics.bleu import bleu_metric, tokenise_for
from regard.metrics.lengths import BORDERS, by_length, join_some
from regard.metrics.score import Comparison
from regard.metrics.text import METRICS
from regard.models.folder import load_folder
from regard.settings import setting
from regard.tasks.frame.answers import Generated
from regard.tasks.frame.origin import Origin
from regard.tasks.frame.recipe import save_generation
from regard.tasks.frame.settings import SHORT, BootstrapSettings, TrainSettings
from regard.tasks.frame.task import Data, Judged, Learnt, System, Task
from regard.tasks.tokenizer import load_any_tokenizers, save_any_tokenizers
from regard.training.loss import sequence_loss
from regard.viewer.settings import LookSettings

LONGEST_PART = 400  # tokens; a longer sentence is read in parts, as the model never saw such
LONGEST_WHOLE = 4000  # tokens of a text that is scored or looked at, which is never cut
SCRIPTS = {"": None, "simplified": "t2s", "traditional": "s2t"}  # as OpenCC names what it does
ALIGNMENTS = ("none", "pharaoh", "json")

# what a size means for training, on top of the sizes of the model
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"lr": 0.003, "batch_tokens": 2048, "pieces": 6000, "steps": 12_000},
    "small": {"lr": 0.0015, "batch_tokens": 4096, "pieces": 8000, "steps": 20_000},
    "base": {"lr": 0.0007, "batch_tokens": 16_384, "pieces": 32_000, "steps": 100_000},
    "big": {"lr": 0.0005, "batch_tokens": 32_768, "pieces": 32_000, "steps": 300_000},
}


# Settings


@dataclass(frozen=True)
class PairFormat:
    """Where the pairs are in a file."""

    source: str | None = setting(None, "source language", key="from")
    target: str | None = setting(None, "target language", key="to")
    columns: str | None = setting(None, "source and target columns, such as 2,1")
    header: bool | None = setting(None, "whether a table has a header row; detected unless given")
    skip_bad: bool = setting(False, "leave bad rows out")


@dataclass(frozen=True)
class PairTrainSettings(PairFormat, TrainSettings):
    """What a training on pairs of texts can be told."""

    like: str | None = setting(None, "model preset")
    joined: int = setting(
        0, "also learn from pairs joined to up to so many words", min=0, max=10_000
    )
    tokenizer: str = setting("bpe", "tokenizer: bpe or unigram")
    pieces: int = setting(6000, "vocabulary size", min=300, max=1_000_000)
    vocabularies: str = setting("auto", "vocabularies: joint, separate or auto")
    bpe_dropout: float = setting(0.0, "BPE dropout", min=0, max=1)
    batch_tokens: int = setting(2048, "tokens per batch", min=1)
    max_length: int = setting(256, "maximum tokens of a side", min=1, max=100_000)
    label_smoothing: float = setting(0.1, "label smoothing", min=0, max=0.9)
    r_drop: float = setting(0.0, "weight of the R-Drop term", min=0, max=100)
    valid_sentences: int = setting(500, "sentences to decode at a validation", min=0)


@dataclass(frozen=True)
class WriteSettings(Decoding):
    """How a target is written."""

    prefix: str = setting("", "how every translation begins")
    script: str = setting("", "Chinese script: simplified or traditional")
    threads: int | None = setting(None, "CPU threads", min=1, max=1024)


@dataclass(frozen=True)
class PairRunSettings(WriteSettings):
    """What a run can be told."""

    scores: bool = setting(False, "print the score of each hypothesis")
    alignments: str = setting("none", "word alignments: none, pharaoh or json")
    forced: bool = setting(False, "score given pairs: source, TAB, target on each line")
    split: bool = setting(True, "translate sentence by sentence")
    batch_tokens: int = setting(4096, "tokens per batch", min=1)
    batch_rows: int = setting(128, "sentences per batch", min=1)


@dataclass(frozen=True)
class PairLookSettings(LookSettings, WriteSettings):
    """What look can be told."""


@dataclass(frozen=True)
class PairEvalSettings(PairFormat, BootstrapSettings):
    """What an evaluation on pairs can be told."""

    tokenise: str | None = setting(None, "sacreBLEU tokenisation")
    lowercase: bool = setting(False, "ignore case")
    lengths: tuple[int, ...] = setting(
        BORDERS, "source words at which groups of BLEU by length end", min=1, max=10_000
    )
    joined: tuple[int, ...] = setting(
        (), "also join sentences to so many source words", min=1, max=10_000
    )
    plot: str | None = setting(None, "a .png of BLEU by source length")


# The task


@dataclass(frozen=True)
class PairCodec:
    """The tokenizers of source and target, and what config.json says beside the model."""

    source: Tokenizer
    target: Tokenizer
    about: Mapping[str, Any] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write the tokenizers, one if both are the same."""
        save_any_tokenizers(folder, self.tokenizers)

    @property
    def tokenizers(self) -> tuple[Tokenizer, Tokenizer]:
        """Return both."""
        return self.source, self.target

    def facts(self) -> dict[str, Any]:
        """Return what config.json says."""
        return dict(self.about)

    def hashes(self) -> list[str]:
        """Return the hashes of both tokenizers."""
        return [self.source.sha, self.target.sha]


class Seq2Seq(Task[PairCodec, Generated]):
    """A task whose model reads one text and writes another."""

    unit = "sentences"
    Run = PairRunSettings
    Look = PairLookSettings
    sizes = SIZES
    short = {
        **SHORT,
        "kv_heads": "model.block.kv_heads",
        "depth": ("model.encoder_depth", "model.decoder_depth"),
    }
    several_against = True
    noted: ClassVar[tuple[str, ...]] = ("from", "to")  # in config.json, beside the model
    as_given: ClassVar[Mapping[str, Any]] = {}  # settings by which a source is read as it stands

    def __init__(self, model: Any, codec: PairCodec, config: Mapping[str, Any] | None = None):
        super().__init__(model, codec, config)
        self.writer = self.encoder_decoder(model)
        self.source_tokenizer, self.target_tokenizer = codec.source, codec.target
        self.tokenizer = codec.target
        told = self.config.get("generation", {})
        self.decoder = SentenceDecoder(
            self.writer,
            *codec.tokenizers,
            self.writer.config.target_vocab,
            rules=told.get("rules"),
            longest=self.longest_source(),
            device=self.device,
        )
        heads = {n: m.heads for n, m in self.writer.named_modules() if n.endswith(".cross")}
        self.aligner = Aligner(heads, self.maps, told.get("alignment_head"))
        self.left_out = 0  # training pairs that are too long

    @classmethod
    def encoder_decoder(cls, model: Any) -> Any:
        """Return the model as one that reads a source, then a target."""
        return model

    @property
    def positions(self) -> int | None:
        """Return how many positions the model has learned, where that bounds a text."""
        return None

    def longest_source(self) -> int:
        """Return the most tokens of a sentence that are read at once."""
        return LONGEST_PART

    # ---- Training

    @classmethod
    def read(cls, settings: Any, origin: Origin | None) -> Data:
        """Read pairs of texts."""
        keys = ("source", "target", "columns", "header", "valid", "test", "skip_bad")
        corpus = load_pairs(settings.data, **{key: getattr(settings, key) for key in keys})
        corpus = join_some(corpus, settings.joined) if settings.joined else corpus
        return Data(corpus, corpus_hash(corpus), corpus.notes, corpus.split)

    @classmethod
    def make_codec(
        cls, data: Data, settings: Any, learnt: Learnt, origin: Origin | None
    ) -> PairCodec:
        """Learn the tokenizers, and note the languages."""
        corpus: Corpus = data.parts
        source, target = learnt(
            lambda: learn_tokenizers(
                corpus.parts["train"], settings.tokenizer, settings.pieces, settings.vocabularies
            ),
            load=load_any_tokenizers,
            save=save_any_tokenizers,
        )
        return PairCodec(source, target, {"from": corpus.source, "to": corpus.target})

    def batches(self, data: Data, settings: Any) -> Any:
        """Return batches of pairs."""
        made = PairBatches(
            data.parts,
            self.codec.tokenizers,
            tokens=settings.batch_tokens,
            longest=settings.max_length,
            seed=settings.seed,
            bpe_dropout=settings.bpe_dropout,
            device=settings.device,
        )
        self.left_out = made.left_out
        return made

    def count(self, batch: PairBatch) -> tuple[int, int]:
        """Return the target tokens that the loss counts, and all that were read."""
        return batch.tokens, batch.read

    def batch_loss(self, batch: PairBatch, smoothing: float, r_drop: float) -> Tensor:
        """Return the summed loss of a batch."""
        return sequence_loss(self.writer, batch, smoothing, r_drop)

    def loss(self, batch: PairBatch, settings: Any) -> Tensor:
        """Return the summed cross-entropy of the targets."""
        return self.batch_loss(batch, settings.label_smoothing, settings.r_drop)

    def decodes(self, data: Data, settings: Any) -> int:
        """Return how many sentences a validation decodes."""
        return min(settings.valid_sentences, len(data.parts.parts["valid"]))

    def validate(self, data: Data, settings: Any, share: float = 1.0) -> dict[str, float]:
        """Return the loss on the validation part, and the scores of what is written greedily."""
        pairs: list[Pair] = data.parts.parts["valid"]
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

    def valid_loss(self, pairs: Sequence[Pair], settings: Any) -> float:
        """Return the cross-entropy a token of pairs."""
        encoded = [
            tokenizer.encode_batch([getattr(pair, side) for pair in pairs])
            for side, tokenizer in zip(SIDES, self.codec.tokenizers, strict=True)
        ]
        most = min(4 * settings.max_length, self.writer.config.max_length - 2)
        lengths = [np.array([min(len(row), most) + 1 for row in side]) for side in encoded]
        plan = Batches(lengths, max(4096, settings.batch_tokens), 0)

        def batch(rows: np.ndarray) -> PairBatch:
            source, target = ([np.asarray(side[i][:most]) for i in rows] for side in encoded)
            return make_batch(source, target, *self.codec.tokenizers, settings.device)

        return self.mean_loss(batch(plan[n]) for n in range(plan.len_epoch()))

    @torch.inference_mode()
    def mean_loss(self, batches: Iterable[PairBatch]) -> float:
        """Return the cross-entropy a token of batches, without smoothing."""
        total = tokens = 0.0
        for batch in batches:
            total += float(self.batch_loss(batch, 0.0, 0.0))
            tokens += batch.tokens
        return total / tokens

    def title(self, data: Data, settings: Any) -> str:
        """Return the languages."""
        return f"{data.parts.source or 'source'} to {data.parts.target or 'target'}"

    def facts(self, data: Data, settings: Any) -> dict[str, Any]:
        """Return how many pairs were too long to be learnt from."""
        return {"left_out": self.left_out}

    def save_alignment_head(self, folder: Path, pairs: Sequence[Pair]) -> None:
        """Note in a folder which head of its model aligns some pairs best."""
        published = type(self).load(folder, *load_folder(folder))
        if published.aligner.heads:
            some = [(pair.source, pair.target) for pair in pairs[:50]]
            ids = published.encode_pairs(some, published.check({}))
            name, head = published.aligner.choose(ids)
            save_generation(folder, {**self.generation, "alignment_head": f"{name}:{head}"})

    # ---- Writing

    @classmethod
    def load_codec(cls, folder: Path, model: Any, config: dict[str, Any]) -> PairCodec:
        """Read the tokenizers, and check that they fit the model."""
        # without a note of where it came from, a folder is one of ours
        foreign = None if "imported" in config else False
        about = {key: config[key] for key in cls.noted if key in config}
        codec = PairCodec(*load_any_tokenizers(folder, foreign), about)
        shape = cls.encoder_decoder(model).config
        for side in SIDES:
            count, size = getattr(codec, side).vocab, getattr(shape, f"{side}_vocab")
            if count > size:
                raise UsageError(
                    f"{folder}: the {side} tokenizer has {count} pieces, the model only {size}"
                )
        for key in ("from", "to"):
            if not isinstance(config.get(key), str | None):
                raise UsageError(
                    f"{folder / 'config.json'}: '{key}' is {config[key]!r:.40}, not text"
                )
        return codec

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
        alignments = getattr(settings, "alignments", "none")
        if alignments not in ALIGNMENTS:
            raise UsageError(f"alignments='{alignments}' is not one of {', '.join(ALIGNMENTS)}")
        if settings.script not in SCRIPTS:
            raise UsageError(f"script='{settings.script}' is not one of simplified, traditional")
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
        return self.aligner.align(pairs, *self.codec.tokenizers)

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

    # ---- Judging

    def metric(self, settings: Any) -> Any:
        """Return the metric that targets are judged by."""
        return METRICS["bleu"]

    def check_eval(self, settings: Any, given: Mapping[str, Any]) -> None:
        """Refuse what cannot be told by length, before anything is translated."""
        for key in ("lengths", "joined", "plot"):
            if key in given and self.metric(settings).main != "BLEU":
                raise UsageError(f"{key}= tells BLEU by source length; add metric=bleu")
        if not settings.lengths:
            raise UsageError("lengths= is empty; write source words such as lengths=10,20,40")
        if settings.plot and Path(settings.plot).suffix.lower() != ".png":
            raise UsageError(f"plot={settings.plot} is no picture's name; end it with .png")

    def check_against(self, other: Task[Any, Any]) -> None:
        """Refuse a model that writes no text for a text."""
        if not isinstance(other, Seq2Seq):
            raise UsageError("against= names a model that does not translate; compare translators")

    def read_test(self, settings: Any) -> Data:
        """Read the part that a model is judged on."""
        corpus = load_pairs(
            settings.data,
            source=settings.source or self.config.get("from"),
            target=settings.target or self.config.get("to"),
            columns=settings.columns,
            header=settings.header,
            test=settings.test,
            skip_bad=settings.skip_bad,
            need=(settings.part,),
            trained=self.trained,
        )
        corpus = self.prepared(corpus, settings)
        pairs = corpus.parts[settings.part]
        language = self._language(corpus, settings)
        if settings.tokenise == "13a" and tokenise_for(language) != "13a":
            log(f"warning: tokenise=13a does not part the words of {language}; such scores mislead")
        return Data(replace(corpus, parts={"test": pairs}), hash_pairs(pairs), corpus.notes)

    def prepared(self, corpus: Corpus, settings: Any) -> Corpus:
        """Return a test set as the model reads it."""
        return corpus

    def _language(self, corpus: Corpus, settings: Any) -> str | None:
        return settings.target or self.config.get("to") or corpus.target

    def predict_examples(self, data: Data, settings: Any) -> list[str]:
        """Write the targets of the sources of a test set."""
        sources = [pair.source for pair in data.parts.parts["test"]]
        return [str(answer) for answer in self.predict(sources, replace(settings, **self.as_given))]

    def _run_keys(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the user gave of the settings of a run."""
        known = self.Run.__dataclass_fields__
        return {**{key: value for key, value in given.items() if key in known}, **self.as_given}

    def settings_for(self, other: Task[Any, Any], settings: Any, given: Mapping[str, Any]) -> Any:
        """Return the other model's own defaults with what the user gave."""
        return other.check(self._run_keys(given))

    def predictions_of(self, other: Task[Any, Any], data: Data, settings: Any) -> list[str]:
        """Return what another model writes for the same sources."""
        sources = [pair.source for pair in data.parts.parts["test"]]
        return [str(answer) for answer in other.answer(sources, settings)]

    def judge(self, data: Data, predictions: list[str], settings: Any) -> Judged:
        """Return BLEU and chrF, or the scores of another metric."""
        references, options = self._references(data, settings)
        scores = self.metric(settings).score(predictions, references, **options)
        return Judged(scores, len(predictions))

    def _references(self, data: Data, settings: Any) -> tuple[list[list[str]], dict[str, Any]]:
        """Return the right targets, and by which language and rules to judge."""
        references = [[pair.target for pair in data.parts.parts["test"]]]
        options = {"tokenise": settings.tokenise, "lowercase": settings.lowercase}
        return references, {"language": self._language(data.parts, settings), **options}

    def compare(
        self, data: Data, ours: list[str], theirs: list[str], settings: Any
    ) -> list[Comparison]:
        """Compare two models by paired bootstrap resampling (Koehn 2004)."""
        references, options = self._references(data, settings)
        options["samples"] = settings.samples
        return self.metric(settings).compare(ours, theirs, references, **options)

    def breakdown(
        self, data: Data, systems: Sequence[System], settings: Any, given: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the BLEU of all models by the length of the source."""
        if self.metric(settings).main != "BLEU":
            return {}
        corpus: Corpus = data.parts
        _, options = self._references(data, settings)
        # joined sentences are translated whole, unless the user says otherwise
        run = {"split": False, **self._run_keys(given)}

        def write(system: System) -> Callable[[Sequence[str]], list[str]]:
            task = system.task
            return lambda texts: [str(a) for a in task.answer(list(texts), task.check(run))]

        lengths = by_length(
            [system.name for system in systems],
            [system.predictions for system in systems],
            [write(system) for system in systems],
            corpus.parts["test"],
            bleu_metric(**options),
            effective=bleu_metric(**options, effective=True),
            samples=settings.samples,
            borders=settings.lengths,
            joined=settings.joined,
            languages=(
                settings.source or self.config.get("from") or corpus.source,
                options["language"],
            ),
        )
        if settings.plot:
            lengths.draw(settings.plot)
        return {"lengths": lengths}

    def outputs(self, data: Data, predictions: list[str], settings: Any) -> list[dict[str, Any]]:
        """Return the predictions beside their pairs."""
        rows = zip(data.parts.parts["test"], predictions, strict=True)
        return [{"source": p.source, "target": p.target, "prediction": o} for p, o in rows]

    def made_with(self, settings: Any) -> dict[str, Any]:
        """Return the settings of the run."""
        return {name: getattr(settings, name) for name in self.Run.__dataclass_fields__}

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

    def explain(self, given: str, settings: Any) -> Any:
        """Translate a sentence and gather all there is to see of how it was done."""
        from regard.viewer.picture import Picture
        from regard.viewer.text import candidate_steps, text_views

        if not given.strip():
            raise UsageError("there is nothing to look at in an empty text")
        target = self.codec.target
        ids = self.encode_source(given.strip(), settings)[:LONGEST_WHOLE]
        source = self.framed(ids)
        sentence = Sentence(0, source, self.opening(settings), "")
        (hypotheses,) = self.decoder.batch([sentence], settings, 0)
        best = hypotheses[0].ids
        chosen = [*best, target.eos]
        maps, logits = self.maps(source, best)
        tokens, writes = target.pieces([self.decoder.begin, *best]), target.pieces(chosen)
        self.aligner.settle([(source, best or chosen)])
        texts = [self._in_script(target.decode(h.ids), settings) for h in hypotheses]
        return Picture(
            title=given,
            views=text_views(maps, tokens, source=self.codec.source.pieces(source), writes=writes),
            steps=candidate_steps(
                logits.softmax(-1)[:, : target.vocab],
                target.pieces,
                candidates=settings.candidates,
                chosen=chosen,
                tokens=writes,
            ),
            source=given,
            output=texts[0],
            alternatives=[(t, h.score) for t, h in zip(texts[1:], hypotheses[1:], strict=True)],
            note=f"beam {settings.beam}, {settings.length_penalty} length penalty",
            opens=self.aligner.head,
        )
