"""Tasks on pairs of texts: their tokenizers, how pairs are read, and how targets that
a model writes are judged against the right ones, by BLEU or another metric and by source length.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from regard.data.batches import Batches
from regard.data.pairs import Corpus, Pair, load_pairs
from regard.data.parallel import (
    SIDES,
    PairBatch,
    PairBatches,
    learn_tokenizers,
    make_batch,
)
from regard.data.tokenizer import Tokenizer
from regard.decode.writer import EncoderDecoder
from regard.errors import UsageError, log
from regard.metrics.bleu import bleu_metric, tokenise_for
from regard.metrics.lengths import add_joined, by_length
from regard.metrics.score import Comparison
from regard.metrics.text import METRICS
from regard.models.protocols import Model
from regard.pretrained.tokenizer_folder import load_tokenizers, save_tokenizers
from regard.tasks.frame.answers import Generated
from regard.tasks.frame.origin import Origin
from regard.tasks.frame.settings import SHORT
from regard.tasks.frame.task import Judged, Learnt, System, Task
from regard.tasks.text.pair_settings import SIZES
from regard.training.loss import sequence_loss


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
    writer: EncoderDecoder  # the model, as one that reads a source, then a target

    @classmethod
    def encoder_decoder(cls, model: nn.Module) -> EncoderDecoder:
        """Return the model as one that reads a source, then a target."""
        return cast(EncoderDecoder, model)

    @classmethod
    def read(cls, settings: Any, origin: Origin | None) -> Corpus:
        """Read pairs of texts."""
        keys = ("source", "target", "columns", "header", "valid", "test", "skip_bad")
        corpus = load_pairs(settings.data, **{key: getattr(settings, key) for key in keys})
        return add_joined(corpus, settings.joined) if settings.joined else corpus

    @classmethod
    def make_codec(
        cls, data: Corpus, settings: Any, learnt: Learnt, origin: Origin | None
    ) -> PairCodec:
        """Learn the tokenizers, and note the languages."""
        source, target = learnt(
            lambda: learn_tokenizers(
                data["train"], settings.tokenizer, settings.pieces, settings.vocabularies
            ),
            load=load_tokenizers,
            save=save_tokenizers,
        )
        return PairCodec(source, target, {"from": data.source, "to": data.target})

    def batches(self, data: Corpus, settings: Any) -> Any:
        """Return batches of pairs."""
        made = PairBatches(
            data,
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

    def title(self, data: Corpus, settings: Any) -> str:
        """Return the languages."""
        return f"{data.source or 'source'} to {data.target or 'target'}"

    def facts(self, data: Corpus, settings: Any) -> dict[str, Any]:
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

    def read_test(self, settings: Any) -> Corpus:
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
        return replace(corpus, parts={"test": pairs})

    def data_hash(self, data: Corpus, settings: Any) -> str:
        """Return a hash of the pairs that were judged."""
        return data.part_sha("test")

    def prepared(self, corpus: Corpus, settings: Any) -> Corpus:
        """Return a test set as the model reads it."""
        return corpus

    def _language(self, corpus: Corpus, settings: Any) -> str | None:
        return settings.target or self.config.get("to") or corpus.target

    def predict_examples(self, data: Corpus, settings: Any) -> list[str]:
        """Write the targets of the sources of a test set."""
        sources = [pair.source for pair in data["test"]]
        return [str(answer) for answer in self.predict(sources, replace(settings, **self.as_given))]

    def _run_keys(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the user gave of the settings of a run."""
        known = self.Run.__dataclass_fields__
        return {**{key: value for key, value in given.items() if key in known}, **self.as_given}

    def settings_for(self, other: Task[Any, Any], settings: Any, given: Mapping[str, Any]) -> Any:
        """Return the other model's own defaults with what the user gave."""
        return other.check(self._run_keys(given))

    def predictions_of(self, other: Task[Any, Any], data: Corpus, settings: Any) -> list[str]:
        """Return what another model writes for the same sources."""
        sources = [pair.source for pair in data["test"]]
        return [str(answer) for answer in other.answer(sources, settings)]

    def judge(self, data: Corpus, predictions: list[str], settings: Any) -> Judged:
        """Return BLEU and chrF, or the scores of another metric."""
        references, options = self._references(data, settings)
        scores = self.metric(settings).score(predictions, references, **options)
        return Judged(scores, len(predictions))

    def _references(self, data: Corpus, settings: Any) -> tuple[list[list[str]], dict[str, Any]]:
        """Return the right targets, and by which language and rules to judge."""
        references = [[pair.target for pair in data["test"]]]
        options = {"tokenise": settings.tokenise, "lowercase": settings.lowercase}
        return references, {"language": self._language(data, settings), **options}

    def compare(
        self, data: Corpus, ours: list[str], theirs: list[str], settings: Any
    ) -> list[Comparison]:
        """Compare two models by paired bootstrap resampling (Koehn 2004)."""
        references, options = self._references(data, settings)
        options["samples"] = settings.samples
        return self.metric(settings).compare(ours, theirs, references, **options)

    def breakdown(
        self, data: Corpus, systems: Sequence[System], settings: Any, given: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the BLEU of all models by the length of the source."""
        if self.metric(settings).main != "BLEU":
            return {}
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
            data["test"],
            bleu_metric(**options),
            effective=bleu_metric(**options, effective=True),
            samples=settings.samples,
            borders=settings.lengths,
            joined=settings.joined,
            languages=(
                settings.source or self.config.get("from") or data.source,
                options["language"],
            ),
        )
        if settings.plot:
            lengths.draw(settings.plot)
        return {"lengths": lengths}

    def outputs(self, data: Corpus, predictions: list[str], settings: Any) -> list[dict[str, Any]]:
        """Return the predictions beside their pairs."""
        rows = zip(data["test"], predictions, strict=True)
        return [{"source": p.source, "target": p.target, "prediction": o} for p, o in rows]

    def made_with(self, settings: Any) -> dict[str, Any]:
        """Return the settings of the run."""
        return {name: getattr(settings, name) for name in self.Run.__dataclass_fields__}
