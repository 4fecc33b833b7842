"""What labelling texts and labelling words share: an encoder with a head for labels.

Settings, what lies beside the weights (tokenizer, features of words, labels, baselines), batches of
rows, and scores. `Labeller` is all of a task but how texts become rows, logits and answers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from regard.attention.positions import has_table
from regard.data.characters import Characters
from regard.data.features import Features, feature_functions, split_words
from regard.data.labelled import Example, Sentence, hash_items, load_labelled
from regard.data.labels import label_list, label_table, saved_labels, with_known_labels
from regard.data.rows import Row, RowEncoder, TextBatch, TextBatches
from regard.data.tokenize import train_tokenizer
from regard.data.tokenizer import Tokenizer
from regard.errors import UsageError, lookup
from regard.metrics.baselines import Baselines
from regard.metrics.evaluation import LabelEvaluation
from regard.metrics.labels import (
    MANY,
    LabelResults,
    count,
    log_loss,
    macro_f1,
    micro_f1,
    one_hot,
    precision_at_k,
)
from regard.metrics.score import Comparison
from regard.models import family, task_changes
from regard.models.protocols import Model, TextModel
from regard.settings import setting
from regard.tasks.frame import settings as frame
from regard.tasks.frame.origin import Origin
from regard.tasks.frame.settings import BootstrapSettings, TrainSettings
from regard.tasks.frame.task import Answer, Data, Judged, Learnt, Task
from regard.tasks.text.codec import TextCodec, check_max_length, load_encoder
from regard.training.label_loss import CLASS_WEIGHTS, LABEL_LOSSES, LabelLoss, label_loss
from regard.training.loop import mix

BertConfig, _ = family("bert")

# what a size means for training, on top of the sizes of the model
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"lr": 0.002, "batch_tokens": 1024, "pieces": 4000, "steps": 3000},
    "small": {"lr": 0.001, "batch_tokens": 2048, "pieces": 8000, "steps": 6000},
    "base": {"lr": 0.0003, "batch_tokens": 8192, "pieces": 32_000, "steps": 20_000},
    "big": {"lr": 0.0002, "batch_tokens": 16_384, "pieces": 32_000, "steps": 40_000},
}
SHORT = {
    **frame.SHORT,
    "ffn_dropout": "model.block.ffn_dropout",
    "head_dropout": "model.head_dropout",
    "pool": "model.pool",
    "inner_width": "model.inner_width",
    "members": "model.members",
}
# parts with which a new encoder learns best, where its family leaves the choice
NEW: dict[str, Any] = {
    "block": {"order": "pre", "norm_eps": 1e-5, "attention_dropout": 0.0},
    "position": "rotary",
    "types": 0,
    "pool": "mean",
}
WORDS = "words"  # the tokenizer that knows words by their features alone


@dataclass(frozen=True)
class LabelFormat:
    """How files of texts or words with labels are read."""

    encoding: str = setting("auto", "character encoding: auto, utf-8 or latin1")
    skip_bad: bool = setting(False, "skip bad rows")


@dataclass(frozen=True)
class LabelTrain(LabelFormat, TrainSettings):
    """What a training can be told that learns labels of texts or of words."""

    schedule: str = "cosine"
    weight_decay: float = 0.05
    ema: float = 0.995
    family: str = setting("bert", "model family")
    like: str | None = setting(None, "a published model to build: bert, roberta, modernbert, ...")
    tokenizer: str = setting("bpe", "bpe, unigram, characters, or words (by their features alone)")
    pieces: int = setting(4000, "vocabulary size", min=300, max=1_000_000)
    bpe_dropout: float = setting(0.0, "BPE dropout", min=0, max=1)
    word_dropout: float = setting(0.0, "probability that a word is masked", min=0, max=1)
    features: str = setting("none", "features of words: none, or such as affixes+bigrams")
    feature_rows: int = setting(20_000, "maximum number of features", min=1, max=99_999)
    feature_dropout: float = setting(0.0, "probability that a feature is dropped", min=0, max=1)
    batch_tokens: int = setting(1024, "tokens per batch", min=1)
    batch_rows: int | None = setting(None, "maximum texts per batch", min=1)
    max_length: int = setting(256, "maximum tokens per text or window", min=8, max=100_000)
    label_smoothing: float = setting(0.1, "label smoothing", min=0, max=0.9)
    r_drop: float = setting(0.0, "weight of the R-Drop term", min=0, max=100)
    class_weights: str = setting("none", "class weights in the loss: none or balanced")
    model: BertConfig = field(default_factory=BertConfig)  # type: ignore[valid-type]


@dataclass(frozen=True)
class LabelEval(LabelFormat, BootstrapSettings):
    """What an evaluation of labels can be told."""

    errors: int = setting(10, "errors to show", min=0, max=100_000)


def learn_tokenizer(texts: Sequence[str], settings: LabelTrain) -> Tokenizer:
    """Train a tokenizer on texts."""
    if settings.tokenizer == "characters":
        return Characters.learn(texts)
    if settings.tokenizer == WORDS:
        return train_tokenizer(texts, kind="bytes", vocab=300)
    return train_tokenizer(texts, kind=settings.tokenizer, vocab=settings.pieces)


def with_known(config: Any, changes: Mapping[str, Any]) -> Any:
    """Return a config with those changes, and inside of nested ones, that it has fields for."""
    new = {}
    for name in {each.name for each in fields(config)} & changes.keys():
        value = changes[name]
        nested = isinstance(value, Mapping)
        new[name] = with_known(getattr(config, name), value) if nested else value
    return replace(config, **new)


class LabelBatch(NamedTuple):
    """Rows, the targets and, where words have them, the places of those words."""

    texts: TextBatch
    targets: Tensor
    words: Any = None


@dataclass(frozen=True)
class LabelData(Data):
    """Examples or sentences by part, and their labels."""

    labels: list[str] = field(default_factory=list)
    multilabel: bool = False
    left_out: int = 0  # rows with labels that the model does not know


class Predicted(NamedTuple):
    """The probability of each label (n, labels) of texts or words, and how many were truncated."""

    probs: np.ndarray
    truncated: int = 0


@runtime_checkable
class Ensemble(Protocol):
    """Encoders that are trained each by itself, and whose logits are averaged."""

    def everyone(self) -> Sequence[nn.Module]:
        """Return all of them."""
        ...


A = TypeVar("A", bound=Answer)
Items = Sequence[Example] | Sequence[Sentence]


class Labeller(Task[TextCodec, A], Generic[A]):
    """A task that gives labels to texts or to words.

    It says how files are read (`file_reader`), what config.json holds (`label_facts`), and how
    examples become batches, logits and probabilities.
    """

    sizes, short = SIZES, SHORT
    Result = LabelEvaluation
    baseline: ClassVar[str]  # the simplest model that learns, by its name in baselines.KINDS
    multilabel = False

    def __init__(self, model: nn.Module, codec: TextCodec, config: Mapping[str, Any] | None = None):
        super().__init__(model, codec, config)
        self.labels, self.tokenizer, self.encoder = codec.labels, codec.tokenizer, codec.encoder
        self.max_length: int = self.config.get("max_length") or self.model.config.max_length
        self.class_weights: Tensor | None = None  # in the loss, while it is trained

    @classmethod
    def file_reader(cls, settings: Any) -> Any:
        """Return what reads a file of examples."""
        raise NotImplementedError

    @classmethod
    def label_facts(cls, data: LabelData, settings: Any) -> dict[str, Any]:
        """Return what config.json says beside what is common to labellers."""
        raise NotImplementedError

    def logits(self, model: TextModel, batch: LabelBatch) -> Tensor:
        """Return the logits (n, labels) of a batch by a model, or by one of an ensemble."""
        raise NotImplementedError

    def probabilities(self, items: Any, settings: Any) -> Predicted:
        """Return the probability of each label of texts or words."""
        raise NotImplementedError

    # Training

    def text_batches(
        self,
        rows: Sequence[Row],
        make: Callable[[np.ndarray, list[Row], TextBatch], LabelBatch],
        again: Callable[[int, int], Row],
        settings: Any,
    ) -> TextBatches:
        """Return batches of rows; for BPE dropout, `again` encodes row i anew by a key."""

        def redrawn(i: int, n: int) -> Row:
            return again(i, mix(settings.seed, n, i))

        return TextBatches(
            rows,
            self.encoder,
            make,
            tokens=settings.batch_tokens,
            seed=settings.seed,
            max_rows=settings.batch_rows,
            word_dropout=settings.word_dropout,
            feature_dropout=settings.feature_dropout,
            again=redrawn if self.encoder.sampler is not None else None,
            device=settings.device,
        )

    @classmethod
    def defaults(cls, shape: Any, values: Mapping[str, Any], origin: Origin | None) -> Any:
        """Return the config with the head of the task.

        A new model has the parts that learn best; one that is like a published model, or starts
        from a trained one, has the parts of that.
        """
        shape = replace(shape, **task_changes(cls.family_of(values, origin), cls.name))
        return shape if values.get("like") or origin else with_known(shape, NEW)

    @classmethod
    def checked(cls, settings: Any, values: Mapping[str, Any], origin: Origin | None) -> Any:
        """Refuse settings that do not fit each other, and let there be enough positions."""
        feature_functions(settings.features)
        lookup("class_weights", settings.class_weights, CLASS_WEIGHTS)
        if settings.tokenizer == WORDS and settings.features == "none":
            raise UsageError(
                "tokenizer=words knows words by features=; add one, such as features=words"
            )
        if settings.tokenizer == WORDS and settings.bpe_dropout:
            raise UsageError(
                "bpe_dropout= is for pieces, which tokenizer=words has not; leave it out"
            )
        model = settings.model
        if "model.max_length" not in values and not (origin and has_table(model.position)):
            # a table has no rows for positions that are never trained
            least = model.max_length if origin else 1
            model = replace(model, max_length=max(least, settings.max_length))
        if settings.max_length > model.max_length:
            if "max_length" in values:
                raise UsageError(
                    f"max_length={settings.max_length} is more than the {model.max_length} places "
                    "that the model has"
                )
            settings = replace(settings, max_length=model.max_length)
        return replace(settings, model=model)

    @classmethod
    def read_parts(cls, settings: Any, by: str = "text") -> LabelData:
        """Read the parts to train and to validate on, and their labels."""
        reader = cls.file_reader(settings)
        files = {"valid": settings.valid, "test": settings.test}
        data = load_labelled(settings.data, reader, **files, by=by)
        labels = label_list([item[1] for item in data.parts["train"]], settings.data)
        data.parts["valid"] = with_known_labels(
            data.parts["valid"],
            labels,
            "does not occur in train",
            data.notes,
            skip_bad=settings.skip_bad,
        )
        return LabelData(data.parts, data.sha, data.notes, data.split, labels, reader.several)

    @classmethod
    def make_codec(
        cls, data: Any, settings: Any, learnt: Learnt, origin: Origin | None
    ) -> TextCodec:
        """Learn the tokenizer, the features and the baselines."""
        train = data.parts["train"]
        texts = [item.source for item in train]
        tokenizer = learnt(lambda: learn_tokenizer(texts, settings))
        features, alone = None, settings.tokenizer == WORDS
        if settings.features != "none":
            words = (i.words if isinstance(i, Sentence) else split_words(i.text) for i in train)
            features = learnt(
                lambda: Features.learn(settings.features, words, settings.feature_rows, alone),
                load=Features.load,
                save=lambda folder, features: features.save(folder),
            )
        dropout = settings.bpe_dropout
        sampler = tokenizer.sampler(dropout, settings.seed) if dropout else None
        units = [unit for item in train for unit, _ in item.units]
        config = {"max_length": settings.max_length, "features": settings.features}
        return TextCodec(
            RowEncoder(tokenizer, features, sampler),
            data.labels,
            Baselines.fit(cls.baseline, units, label_table(train, data.labels)),
            {**config, **cls.label_facts(data, settings)},
        )

    @classmethod
    def make_model(
        cls, data: Any, codec: TextCodec, settings: Any, origin: Origin | None
    ) -> tuple[str, Any]:
        """Build the model with a head for the labels; one that knew the same keeps its head."""
        config, features, vocab = settings.model, codec.encoder.features, codec.tokenizer.vocab
        vocab = max(vocab, config.vocab) if origin else vocab
        config = replace(config, vocab=vocab, labels=len(codec.labels))
        if features is not None:
            config = replace(config, types=features.size)
        fresh = "" if origin and origin.was(cls.name, codec.labels) else "head."
        name = settings.family
        return name, cls.build(name, config, settings, origin, fresh=fresh)

    @property
    def objective(self) -> LabelLoss:
        """Return the loss of its labels."""
        return LABEL_LOSSES["multi" if self.multilabel else "single"]

    def count(self, batch: LabelBatch) -> tuple[int, int]:
        """Return the texts or words, which the loss counts, and the tokens."""
        return len(batch.targets), batch.texts.tokens

    def loss(self, batch: LabelBatch, settings: Any) -> Tensor:
        """Return the summed loss of the labels, the mean over an ensemble."""
        ensemble = isinstance(self.model, Ensemble)
        models: list[Any] = list(self.model.everyone()) if ensemble else [self.model]
        losses = [
            label_loss(
                self.objective,
                partial(self.logits, model, batch),
                batch.targets,
                settings.label_smoothing,
                settings.r_drop,
                self.class_weights,
            )
            for model in models
        ]
        return torch.stack(losses).mean()

    def validate(self, data: Data, settings: Any, share: float = 1.0) -> dict[str, float]:
        """Return loss, accuracy and F1 on the validation part."""
        items = data.parts["valid"]
        results = self.results(items, self.probabilities(items, self.Run()), settings)
        counts = count(results.targets, results.predictions)
        right = (results.targets == results.predictions).all(1)
        scores = {
            "loss": log_loss(results.targets, results.probs, self.multilabel),
            "accuracy": 100 * float(right.mean()),
            "macro_f1": macro_f1(counts),
        }
        if self.multilabel and len(self.labels) >= MANY:
            each = precision_at_k(results.targets, results.probs)
            scores |= {name: float(values.mean()) for name, values in each.items()}
        balanced = self.class_weights is not None
        return {**scores, "better": scores["macro_f1"] if balanced else micro_f1(counts)}

    def baselines(self, data: Data, settings: Any, part: str = "valid") -> dict[str, Any]:
        """Return the scores of the baselines on a part, if the model has any beside it."""
        if self.codec.baselines is None:
            return {}
        units = [unit for item in data.parts[part] for unit, _ in item.units]
        return self.codec.baselines.scores(units, label_table(data.parts[part], self.labels))

    def facts(self, data: Data, settings: Any) -> dict[str, Any]:
        """Return what recipe.json says beside the settings."""
        return {"labels": len(self.labels)}

    # Using

    @classmethod
    def load_codec(cls, folder: Path, model: Model, config: dict[str, Any]) -> TextCodec:
        """Read tokenizer, features, labels and baselines of a folder."""
        changes = task_changes(config["family"], cls.name)
        if any(getattr(model.config, key) != value for key, value in changes.items()):
            raise UsageError(
                f"{folder / 'config.json'}: a head of {model.config.head!r:.40}, which labels no "
                f"{cls.unit}; train one with: regard train {cls.name} init=..."
            )
        labels = saved_labels(folder, config, model.config.labels)
        encoder = load_encoder(folder, model, config)
        return TextCodec(encoder, labels, Baselines.load(folder, len(labels)))

    @property
    def own(self) -> dict[str, Any]:
        """Return none: nothing is decoded."""
        return {}

    def check_run(self, settings: Any) -> Any:
        """Refuse more tokens than the model has positions for."""
        check_max_length(settings, self.model)
        return settings

    def read_part(self, settings: Any, known: bool = True) -> LabelData:
        """Read the part that a model is judged on, with labels that are known to it."""
        part = settings.part
        data = load_labelled(
            settings.data,
            self.file_reader(settings),
            test=settings.test,
            need=(part,),
            trained=self.trained,
        )
        items = data.parts[part]
        if known:
            why, skip = "is none of the model's", settings.skip_bad
            items = with_known_labels(items, self.labels, why, data.notes, skip_bad=skip)
        left_out = len(data.parts[part]) - len(items)
        return LabelData({part: items}, hash_items(items), data.notes, left_out=left_out)

    def predict_examples(self, data: Data, settings: Any) -> Predicted:
        """Return the probability of each label of the examples."""
        return self.probabilities(data.parts[settings.part], settings)

    def assign(self, probs: np.ndarray, settings: Any) -> np.ndarray:
        """Return a table (n, labels) of the predicted labels: the likeliest of each row."""
        return one_hot(probs.argmax(1), len(self.labels))

    def results(self, items: Items, predicted: Predicted, settings: Any) -> LabelResults:
        """Return targets, predictions and probabilities, from which all scores follow."""
        targets, probs = label_table(items, self.labels), predicted.probs
        sizes = [len(item.units) for item in items]
        # the words of a sentence are resampled together
        groups = np.repeat(np.arange(len(sizes)), sizes) if self.unit == "words" else None
        assigned, unit = self.assign(probs, settings), self.unit
        return LabelResults(
            self.labels, targets, assigned, probs, self.multilabel, groups=groups, unit=unit
        )

    def score(self, data: LabelData, predictions: Predicted, settings: Any) -> Judged:
        """Return accuracy, F1 and loss, the scores of each label, and the worst errors."""
        items = data.parts[settings.part]
        if predictions.truncated:
            most = settings.max_length or self.max_length
            data.notes.append(f"{predictions.truncated:,} texts were cut at {most} pieces")
        results = self.results(items, predictions, settings)
        units = [(item, n) for item in items for n in range(len(item.units))]
        errors = results.errors(
            settings.errors, lambda i: (units[i][0].where, units[i][0].excerpt(units[i][1]))
        )
        details = results.details(errors, self.baselines(data, settings, settings.part))
        more = {"left_out": data.left_out}
        return Judged(results.scores(settings.samples), len(units), details, more)

    def check_against(self, other: Task[Any, Any]) -> None:
        """Refuse a model of other labels."""
        super().check_against(other)
        assert isinstance(other, Labeller)
        if set(other.labels) != set(self.labels) or other.multilabel != self.multilabel:
            raise UsageError(
                "against= names a model of other labels "
                f"({', '.join(other.labels[:6])}); compare models of the same"
            )

    def predictions_of(self, other: Any, data: Data, settings: Any) -> Predicted:
        """Return what another model predicts, with its labels in the order of this one."""
        theirs = super().predictions_of(other, data, settings)
        order = [other.labels.index(label) for label in self.labels]
        return theirs._replace(probs=theirs.probs[:, order])

    def compare(self, data: Data, ours: Any, theirs: Any, settings: Any) -> list[Comparison]:
        """Compare by paired bootstrap resampling."""
        results = self.results(data.parts[settings.part], ours, settings)
        assigned = self.assign(theirs.probs, settings)
        return results.compare(assigned, settings.samples, theirs.probs)

    def made_with(self, settings: Any) -> dict[str, Any]:
        """Return the settings that a score depends on."""
        return {"max_length": settings.max_length or self.max_length}
