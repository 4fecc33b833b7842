"""What labelling texts and labelling words share: settings, what lies beside weights, batches."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.attention.positions import has_table
from regard.data.characters import Characters
from regard.data.features import WORD_FEATURES, WordFeatures, feature_functions, split_words
from regard.data.labelled import Example, Labelled, Sentence, load_labelled
from regard.data.labels import label_list, label_table, with_known_labels
from regard.data.lines import ENCODINGS
from regard.data.rows import RowEncoder, TextBatch, TextBatches, TokenRow
from regard.data.seeds import mix
from regard.data.tokenize import train_tokenizer, with_characters
from regard.data.tokenizer import Tokenizer
from regard.errors import UsageError
from regard.metrics.outliers import Outliers
from regard.models import family, task_changes
from regard.models.ensemble import members_of
from regard.models.protocols import Model
from regard.settings import setting
from regard.tasks.frame import settings as frame
from regard.tasks.frame.origin import Origin
from regard.tasks.frame.settings import BootstrapSettings, TrainSettings
from regard.tasks.labels.decision import ONE_LABEL, Decision
from regard.tasks.labels.objective import LabelledInputs
from regard.tasks.labels.settings import saved_labels_and_baselines
from regard.tasks.parts import usual_shape
from regard.tasks.runner import Runner
from regard.tasks.text.codec import TextCodec, check_max_length, load_encoder
from regard.training.label_loss import CLASS_WEIGHTS, label_loss

BertConfig, _ = family("bert")

# what a size means for training, on top of the sizes of the model
ENCODER_SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"lr": 0.002, "batch_tokens": 1024, "pieces": 4000, "steps": 3000},
    "small": {"lr": 0.001, "batch_tokens": 2048, "pieces": 8000, "steps": 6000},
    "base": {"lr": 0.0003, "batch_tokens": 8192, "pieces": 32_000, "steps": 20_000},
    "big": {"lr": 0.0002, "batch_tokens": 16_384, "pieces": 32_000, "steps": 40_000},
}
LABEL_SHORT_KEYS = {
    **frame.SHORT_KEYS,
    "ffn_dropout": "model.block.ffn_dropout",
    "head_dropout": "model.head_dropout",
    "pool": "model.pool",
    "inner_width": "model.inner_width",
    "members": "model.members",
}
# parts with which a new encoder learns best, where its family leaves the choice
_NEW: dict[str, Any] = {
    "block": {"order": "pre", "norm_eps": 1e-5, "attention_dropout": 0.0},
    "position": "rotary",
    "types": 0,
    "pool": "mean",
}
_WORDS = "words"  # the tokenizer that knows words by their features alone


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
        choices=lambda: (_WORDS, *with_characters()),
    )
    pieces: int = setting(4000, "vocabulary size", min=300, max=1_000_000)
    bpe_dropout: float = setting(0.0, "BPE dropout", min=0, max=1)
    word_dropout: float = setting(0.0, "probability that a word is masked", min=0, max=1)
    features: str = setting(
        "none", "features of words", choices=lambda: ("none", *WORD_FEATURES), joined_by="+"
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
    if settings.tokenizer == _WORDS:
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


@dataclass
class LabelData(Labelled):
    """Examples or sentences by part, and their labels."""

    multilabel: bool = False
    left_out: int = 0  # rows with labels that the model does not know


@dataclass(frozen=True)
class LabelTextCodec(TextCodec):
    """How texts or words with labels are brought to an encoder; a LabelCodec but for its rows."""

    decision: Decision = ONE_LABEL
    max_length: int = 0  # tokens of a text or window, unless a run says

    outliers: ClassVar[Outliers | None] = None

    def check(self, settings: Any, model: Any) -> None:
        """Refuse more tokens than the model has positions for."""
        check_max_length(settings, model)

    def longest(self, settings: Any) -> int:
        """Tokens that are read of a text or window."""
        return settings.max_length or self.max_length

    def targets(self, part: Sequence[Example | Sentence]) -> np.ndarray:
        """Table (n, labels) of the labels of texts or words."""
        return label_table(part, self.labels)

    def baseline_vectors(self, part: Sequence[Example | Sentence]) -> list[str]:
        """Texts or words."""
        return [unit for item in part for unit, _ in item.units]

    def in_parts(self, part: Any, size: int) -> Iterator[Any]:
        """All of a part at once, which is batched by length."""
        yield part


def read_labelled(reader: Any, runner: Runner[Any], settings: Any, known: bool = True) -> LabelData:
    """The part that a model is judged on, with labels that are known to it."""
    part = settings.part
    data = load_labelled(
        settings.data, reader, test=settings.test, need=(part,), trained=runner.trained
    )
    items = data[part]
    if known:
        why, skip = "is none of the model's", settings.skip_bad
        items = with_known_labels(items, runner.codec.labels, why, data.notes, skip_bad=skip)
    left_out = len(data[part]) - len(items)
    return LabelData({part: items}, left_out=left_out, notes=data.notes)


def made_with(runner: Runner[Any], data: LabelData, settings: Any) -> dict[str, Any]:
    """Length of texts, and how many were left out."""
    return {"max_length": runner.codec.longest(settings), "left_out": data.left_out}


def load_text_codec(
    task: str, unit: str, folder: Path, model: Model, config: dict[str, Any]
) -> LabelTextCodec:
    """Tokenizer, features, labels and baselines of a folder."""
    changes = task_changes(config["family"], task)
    if any(getattr(model.config, key) != value for key, value in changes.items()):
        raise UsageError(
            f"{folder / 'config.json'}: a head of {model.config.head!r:.40}, which labels no "
            f"{unit}; train one with: regard train {task} init=..."
        )
    labels, baselines = saved_labels_and_baselines(folder, model, config)
    longest = config.get("max_length") or model.config.max_length
    encoder = load_encoder(folder, model, config)
    return LabelTextCodec(encoder, labels, baselines, max_length=longest)


class LabelledText(LabelledInputs):
    """Texts or words, of which labels are learnt by an encoder with a head."""

    def reader(self, settings: Any) -> Any:
        """What reads a file of examples."""
        raise NotImplementedError

    def logits(self, codec: Any, model: Any, batch: LabelBatch) -> Tensor:
        """Logits (n, labels) of a batch by a model, or by one of an ensemble."""
        raise NotImplementedError

    def label_facts(self, data: LabelData, settings: Any) -> dict[str, Any]:
        """What config.json says of how labels were read."""
        raise NotImplementedError

    def shape(self, name: str, values: Mapping[str, Any], origin: Origin | None) -> Any:
        """Config with the head of the task.

        A new model has the parts that learn best; one that is like a published model, or starts
        from a trained one, has the parts of that.
        """
        shape = replace(usual_shape(name, values, origin), **task_changes(name, self.task))
        return shape if values.get("like") or origin else with_known(shape, _NEW)

    def check(self, settings: Any, values: Mapping[str, Any], origin: Origin | None) -> Any:
        """Refuse settings that do not fit each other, and let there be enough positions."""
        feature_functions(settings.features)
        if settings.tokenizer == _WORDS and settings.features == "none":
            raise UsageError(
                "tokenizer=words knows words by features=; add one, such as features=words"
            )
        if settings.tokenizer == _WORDS and settings.bpe_dropout:
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

    def read_parts(self, settings: Any, by: str = "text") -> LabelData:
        """Parts to train and to validate on, and their labels."""
        reader = self.reader(settings)
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

    def codec(self, data: LabelData, settings: Any, learnt: Any, origin: Origin | None) -> Any:
        """Learn the tokenizer and the features."""
        train = data["train"]
        texts = [item.source for item in train]
        tokenizer = learnt(lambda: learn_tokenizer(texts, settings))
        features, alone = None, settings.tokenizer == _WORDS
        if settings.features != "none":
            words = (i.words if isinstance(i, Sentence) else split_words(i.text) for i in train)
            features = learnt(
                lambda: WordFeatures.learn(settings.features, words, settings.feature_rows, alone),
                load=WordFeatures.load,
                save=lambda folder, features: features.save(folder),
            )
        dropout = settings.bpe_dropout
        sampler = tokenizer.sampler(dropout, settings.seed) if dropout else None
        config = {"max_length": settings.max_length, "features": settings.features}
        return self.codec_of(
            LabelTextCodec(
                RowEncoder(tokenizer, features, sampler),
                data.classes,
                config={**config, **self.label_facts(data, settings)},
                max_length=settings.max_length,
            ),
            self.label_facts(data, settings),
        )

    def codec_of(self, codec: LabelTextCodec, config: Mapping[str, Any]) -> Any:
        """The codec of the task, by what config.json says."""
        raise NotImplementedError

    def config(self, config: Any, codec: LabelTextCodec, origin: Origin | None) -> Any:
        """Config of the model for this vocabulary."""
        vocab, features = codec.tokenizer.vocab, codec.encoder.features
        config = replace(config, vocab=max(vocab, config.vocab) if origin else vocab)
        return config if features is None else replace(config, types=features.size)

    def text_batches(
        self,
        rows: Sequence[TokenRow],
        encoder: RowEncoder,
        make: Callable[[np.ndarray, list[TokenRow], TextBatch], LabelBatch],
        again: Callable[[int, int], TokenRow],
        settings: Any,
    ) -> TextBatches:
        """Batches of rows; for BPE dropout, `again` encodes row i anew by a key."""

        def redrawn(i: int, n: int) -> TokenRow:
            return again(i, mix(settings.seed, n, i))

        return TextBatches(
            rows,
            encoder,
            make,
            tokens=settings.batch_tokens,
            seed=settings.seed,
            max_rows=settings.batch_rows,
            word_dropout=settings.word_dropout,
            feature_dropout=settings.feature_dropout,
            again=redrawn if encoder.sampler is not None else None,
            device=settings.device,
        )

    def count(self, runner: Runner[Any], batch: LabelBatch) -> tuple[int, int]:
        """Texts or words, which the loss counts, and the tokens."""
        return len(batch.targets), batch.texts.tokens

    def loss(
        self, runner: Runner[Any], batch: LabelBatch, settings: Any, weights: Tensor | None
    ) -> Tensor:
        """Summed loss of the labels, the mean over an ensemble."""
        codec = runner.codec
        losses = [
            label_loss(
                codec.decision.loss,
                partial(self.logits, codec, model, batch),
                batch.targets,
                settings.label_smoothing,
                settings.r_drop,
                weights,
            )
            for model in members_of(runner.model)
        ]
        return torch.stack(losses).mean()

    def facts(self, data: LabelData, batches: TextBatches, settings: Any) -> dict[str, Any]:
        """Nothing further."""
        return {}
