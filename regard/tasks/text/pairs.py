"""Tasks on pairs of texts: their settings and tokenizers, how pairs are read, and how targets that
a model writes are judged against the right ones, by BLEU or another metric and by source length.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, cast

from torch import nn

from regard.data.pairs import Corpus, load_pairs
from regard.data.parallel import SIDES, PairBatches, hash_pairs, learn_tokenizers
from regard.data.tokenizer import Tokenizer
from regard.decode.writer import EncoderDecoder
from regard.errors import UsageError, log
from regard.metrics.bleu import bleu_metric, tokenise_for
from regard.metrics.lengths import BORDERS, add_joined, by_length
from regard.metrics.score import Comparison
from regard.metrics.text import METRICS
from regard.models.protocols import Model
from regard.pretrained.tokenizer_folder import load_tokenizers, save_tokenizers
from regard.settings import setting
from regard.tasks.frame.answers import Generated
from regard.tasks.frame.origin import Origin
from regard.tasks.frame.settings import SHORT, BootstrapSettings, TrainSettings
from regard.tasks.frame.task import Data, Judged, Learnt, System, Task

# what a size means for training, on top of the sizes of the model
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"lr": 0.003, "batch_tokens": 2048, "pieces": 6000, "steps": 12_000},
    "small": {"lr": 0.0015, "batch_tokens": 4096, "pieces": 8000, "steps": 20_000},
    "base": {"lr": 0.0007, "batch_tokens": 16_384, "pieces": 32_000, "steps": 100_000},
    "big": {"lr": 0.0005, "batch_tokens": 32_768, "pieces": 32_000, "steps": 300_000},
}


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


@dataclass(frozen=True)
class PairCodec:
    """The tokenizers of source and target, and what config.json says beside the model."""

    source: Tokenizer
    target: Tokenizer
    about: Mapping[str, Any] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write the tokenizers, one if both are the same."""
        save_tokenizers(folder, self.tokenizers)

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


class PairTask(Task[PairCodec, Generated]):
    """A task that learns from pairs of texts, and whose targets are judged against references."""

    unit = "sentences"
    sizes = SIZES
    short = {
        **SHORT,
        "kv_heads": "model.block.kv_heads",
        "depth": ("model.encoder_depth", "model.decoder_depth"),
    }
    several_against = True
    noted: ClassVar[tuple[str, ...]] = ("from", "to")  # in config.json, beside the model
    as_given: ClassVar[Mapping[str, Any]] = {}  # settings by which a source is read as it stands
    left_out = 0  # training pairs that are too long

    @classmethod
    def encoder_decoder(cls, model: nn.Module) -> EncoderDecoder:
        """Return the model as one that reads a source, then a target."""
        return cast(EncoderDecoder, model)

    @classmethod
    def read(cls, settings: Any, origin: Origin | None) -> Data:
        """Read pairs of texts."""
        keys = ("source", "target", "columns", "header", "valid", "test", "skip_bad")
        corpus = load_pairs(settings.data, **{key: getattr(settings, key) for key in keys})
        corpus = add_joined(corpus, settings.joined) if settings.joined else corpus
        return Data(corpus, corpus.sha, corpus.notes, corpus.split)

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
            load=load_tokenizers,
            save=save_tokenizers,
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

    def title(self, data: Data, settings: Any) -> str:
        """Return the languages."""
        return f"{data.parts.source or 'source'} to {data.parts.target or 'target'}"

    def facts(self, data: Data, settings: Any) -> dict[str, Any]:
        """Return how many pairs were too long to be learnt from."""
        return {"left_out": self.left_out}

    @classmethod
    def load_codec(cls, folder: Path, model: Model, config: dict[str, Any]) -> PairCodec:
        """Read the tokenizers, and check that they fit the model."""
        # without a note of where it came from, a folder is one of ours
        foreign = None if "imported" in config else False
        about = {key: config[key] for key in cls.noted if key in config}
        codec = PairCodec(*load_tokenizers(folder, foreign), about)
        shape = cls.encoder_decoder(cast(nn.Module, model)).config
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
        if not isinstance(other, PairTask):
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
