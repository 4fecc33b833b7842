"""What labelling texts and labelling words share: an encoder with a head for labels.

Settings, what lies beside the weights (tokenizer, features of words, labels, baselines), batches of
rows, and scores. `Labeller` is all of a task but how texts become rows, logits and answers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.attention.positions import has_table
from regard.data.characters import Characters
from regard.data.features import FEATURES, Features, feature_functions, split_words
from regard.data.labelled import Sentence, load_labelled
from regard.data.labels import label_list, label_table, with_known_labels
from regard.data.lines import ENCODINGS
from regard.data.rows import Row, RowEncoder, TextBatch, TextBatches
from regard.data.seeds import mix
from regard.data.tokenize import train_tokenizer, with_characters
from regard.data.tokenizer import Tokenizer
from regard.errors import UsageError
from regard.metrics.baselines import Baselines
from regard.metrics.labels import MANY, count, log_loss, macro_f1, micro_f1, precision_at_k
from regard.models import family, task_changes
from regard.models.ensemble import members_of
from regard.models.protocols import TextModel
from regard.settings import setting
from regard.tasks.frame import settings as frame
from regard.tasks.frame.origin import Origin
from regard.tasks.frame.settings import BootstrapSettings, TrainSettings
from regard.tasks.frame.task import Learnt
from regard.tasks.text.codec import TextCodec
from regard.tasks.text.label_judge import A, LabelData, LabelJudge
from regard.training.label_loss import CLASS_WEIGHTS, LABEL_LOSSES, LabelLoss, label_loss

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

    GROUP = "data"

    encoding: str = setting("auto", "character encoding", choices=lambda: ("auto", *ENCODINGS))
    skip_bad: bool = setting(False, "skip bad rows")


@dataclass(frozen=True)
class LabelTrain(LabelFormat, TrainSettings):
    """What a training can be told that learns labels of texts or of words."""

    schedule: str = "cosine"
    weight_decay: float = 0.05
    ema: float = 0.995
    family: str = setting("bert", "model family", group="model")
    like: str | None = setting(None, "model preset", group="model")
    tokenizer: str = setting(
        "bpe",
        "tokenizer; words knows these by their features alone",
        choices=lambda: (WORDS, *with_characters()),
    )
    pieces: int = setting(4000, "vocabulary size", min=300, max=1_000_000)
    bpe_dropout: float = setting(0.0, "BPE dropout", min=0, max=1)
    word_dropout: float = setting(0.0, "probability that a word is masked", min=0, max=1)
    features: str = setting(
        "none", "features of words", choices=lambda: ("none", *FEATURES), joined_by="+"
    )
    feature_rows: int = setting(20_000, "maximum number of features", min=1, max=99_999)
    feature_dropout: float = setting(0.0, "probability that a feature is dropped", min=0, max=1)
    batch_tokens: int = setting(1024, "tokens per batch", min=1, group="optimiser")
    batch_rows: int | None = setting(None, "maximum texts per batch", min=1, group="optimiser")
    max_length: int = setting(256, "maximum tokens per text or window", min=8, max=100_000)
    label_smoothing: float = setting(0.1, "label smoothing", min=0, max=0.9)
    r_drop: float = setting(0.0, "weight of the R-Drop term", min=0, max=100)
    class_weights: str = setting("none", "class weights in the loss", choices=CLASS_WEIGHTS)
    model: BertConfig = field(default_factory=BertConfig)  # type: ignore[valid-type]


@dataclass(frozen=True)
class LabelEval(LabelFormat, BootstrapSettings):
    """What an evaluation of labels can be told."""

    errors: int = setting(10, "errors to show", min=0, max=100_000, group="scores")


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


class Labeller(LabelJudge[A]):
    """A task that gives labels to texts or to words.

    It says what config.json holds (`label_facts`), and how examples become batches and logits.
    """

    sizes, short = SIZES, SHORT
    baseline: ClassVar[str]  # the simplest model that learns, by its name in baselines.KINDS

    @classmethod
    def label_facts(cls, data: LabelData, settings: Any) -> dict[str, Any]:
        """Return what config.json says beside what is common to labellers."""
        raise NotImplementedError

    def logits(self, model: TextModel, batch: LabelBatch) -> Tensor:
        """Return the logits (n, labels) of a batch by a model, or by one of an ensemble."""
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
        labels = label_list([item[1] for item in data["train"]], settings.data)
        data.parts["valid"] = with_known_labels(
            data["valid"],
            labels,
            "does not occur in train",
            data.notes,
            skip_bad=settings.skip_bad,
        )
        about = {"notes": data.notes, "split": data.split, "classes": labels}
        return LabelData(data.parts, reader.several, **about)

    @classmethod
    def make_codec(
        cls, data: Any, settings: Any, learnt: Learnt, origin: Origin | None
    ) -> TextCodec:
        """Learn the tokenizer, the features and the baselines."""
        train = data["train"]
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
            data.classes,
            Baselines.fit(cls.baseline, units, label_table(train, data.classes)),
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
        losses = [
            label_loss(
                self.objective,
                partial(self.logits, model, batch),
                batch.targets,
                settings.label_smoothing,
                settings.r_drop,
                self.class_weights,
            )
            for model in members_of(self.model)
        ]
        return torch.stack(losses).mean()

    def validate(self, data: LabelData, settings: Any, share: float = 1.0) -> dict[str, float]:
        """Return loss, accuracy and F1 on the validation part."""
        items = data["valid"]
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

    def facts(self, data: LabelData, settings: Any) -> dict[str, Any]:
        """Return what recipe.json says beside the settings."""
        return {"labels": len(self.labels)}
