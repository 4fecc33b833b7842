"""What labelling texts and labelling words share: settings, what lies beside weights, batches."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from regard.attention.positions import has_table
from regard.data.characters import Characters
from regard.data.features import WORD_FEATURES, WordFeatures, feature_functions, split_words
from regard.data.labelled import Sentence
from regard.data.lines import ENCODINGS
from regard.data.rows import RowEncoder, TextBatch, TextBatches, TokenRow
from regard.data.seeds import mix
from regard.data.tokenize import train_tokenizer, with_characters
from regard.data.tokenizer import Tokenizer
from regard.errors import UsageError
from regard.metrics.outliers import Outliers
from regard.modalities.text import TEXT, WORDS, LabelData, Text, TextFormat
from regard.models import family, task_changes
from regard.models.ensemble import members_of
from regard.models.protocols import Model, ModelConfig
from regard.settings import setting
from regard.tasks.frame import settings as frame
from regard.tasks.frame.origin import Origin
from regard.tasks.labels.decision import ONE_LABEL, Decision
from regard.tasks.labels.objective import LabelObjective, with_baselines
from regard.tasks.labels.settings import (
    LabelEvalSettings,
    LabelTrainSettings,
    saved_labels_and_baselines,
)
from regard.tasks.parts import Learnt, Task, complete, usual_shape
from regard.tasks.runner import Runner
from regard.tasks.text.codec import TextCodec, load_encoder
from regard.training.label_loss import label_loss
from regard.training.loss import own_loss

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
class LabelTrain(LabelFormat, LabelTrainSettings):
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
    r_drop: float = setting(0.0, "weight of the R-Drop term", min=0, max=100)
    model: BertConfig = field(default_factory=BertConfig)  # type: ignore[valid-type]


L = TypeVar("L", bound=LabelTrain)


@dataclass(frozen=True)
class LabelEval(LabelFormat, LabelEvalSettings):
    """What an evaluation of labels of texts or words can be told."""


def learn_tokenizer(texts: Sequence[str], settings: LabelTrain) -> Tokenizer:
    """Train a tokenizer on texts."""
    if settings.tokenizer == "characters":
        return Characters.learn(texts)
    if settings.tokenizer == _WORDS:
        return train_tokenizer(texts, kind="bytes", vocab=300)
    return train_tokenizer(texts, kind=settings.tokenizer, vocab=settings.pieces)


def with_known(config: ModelConfig, changes: Mapping[str, Any]) -> Any:
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

    @property
    def lengths(self) -> Tensor:
        """Number of tokens of each text."""
        return self.texts.lengths

    @property
    def tokens(self) -> int:
        """Number of tokens without padding."""
        return self.texts.tokens


@dataclass(frozen=True)
class LabelTextCodec(TextCodec):
    """How texts or words with labels are brought to an encoder, its labels and their clusters."""

    modality: Text = TEXT
    decision: Decision = ONE_LABEL
    max_length: int = 0  # tokens of a text or window, unless a run says
    places: int = 10**9  # tokens that the model has positions for
    join: str = "first"  # of a tagger: the vector of a word, of those of its tokens

    outliers: Outliers | None = None  # what is given no label: of texts nothing is

    @property
    def format(self) -> TextFormat:
        """How texts are read."""
        return TextFormat(self.encoder, self.max_length, self.places)


def made_with(runner: Runner[Any], data: LabelData, settings: frame.EvalSettings) -> dict[str, Any]:
    """Length of texts, and how many were left out."""
    format = runner.predictor.format_for(settings)
    return {"max_length": format.longest, "left_out": data.left_out}


def load_text_codec(
    task: str, modality: Text, folder: Path, model: Model, config: dict[str, Any]
) -> LabelTextCodec:
    """Tokenizer, features, labels and baselines of a folder."""
    changes = task_changes(config["family"], task)
    if any(getattr(model.config, key) != value for key, value in changes.items()):
        unit = "words" if modality is WORDS else "texts"
        raise UsageError(
            f"{folder / 'config.json'}: a head of {model.config.head!r:.40}, which labels no "
            f"{unit}; train one with: regard train {task} init=..."
        )
    labels, baselines = saved_labels_and_baselines(folder, model, config)
    places = model.config.max_length
    return LabelTextCodec(
        load_encoder(folder, model, config),
        labels,
        baselines,
        modality=modality,
        max_length=config.get("max_length") or places,
        places=places,
    )


class TextLabels(LabelObjective[L, LabelData, LabelTextCodec]):
    """Learns labels of texts or words by an encoder with a head."""

    modality: Text

    def resolve(self, task: Task, values: Mapping[str, Any], origin: Origin | None) -> L:
        """Settings of a model with the head of the task, and with enough positions.

        A new model has the parts that learn best; one that is like a published model, or starts
        from a trained one, has the parts of that.
        """
        name = task.family_of(values, origin)
        shape = replace(usual_shape(name, values, origin), **task_changes(name, self.task))
        shape = shape if values.get("like") or origin else with_known(shape, _NEW)
        settings: L = complete(task, values, name, shape)
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

    def read(self, settings: L, origin: Origin | None) -> LabelData:
        """Examples to train and to validate on, and their labels."""
        parts: dict[str, Any] = {"valid": settings.valid, "test": settings.test}
        return self.modality.load(str(settings.data), settings.reading(), **parts)

    def codec(
        self, data: LabelData, settings: L, learnt: Learnt, origin: Origin | None
    ) -> LabelTextCodec:
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
        codec = LabelTextCodec(
            RowEncoder(tokenizer, features, sampler),
            data.classes,
            config={**config, **settings.facts()},
            modality=self.modality,
            max_length=settings.max_length,
            places=settings.model.max_length,
        )
        return with_baselines(codec, train)

    def model(
        self, data: LabelData, codec: LabelTextCodec, settings: L, origin: Origin | None
    ) -> tuple[str, nn.Module]:
        """Model for this vocabulary."""
        vocab, features = codec.tokenizer.vocab, codec.encoder.features
        vocab = max(vocab, settings.model.vocab) if origin else vocab
        types = {} if features is None else {"types": features.size}
        settings = replace(settings, model=replace(settings.model, vocab=vocab, **types))
        return super().model(data, codec, settings, origin)


def text_batches(
    rows: Sequence[TokenRow],
    encoder: RowEncoder,
    make: Callable[[np.ndarray, list[TokenRow], TextBatch], LabelBatch],
    again: Callable[[int, int], TokenRow],
    settings: LabelTrain,
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
    )


def text_loss(
    runner: Runner[Any], settings: LabelTrain, logits: Callable[[Any, LabelBatch], Tensor]
) -> Callable[[LabelBatch, Tensor | None], Tensor]:
    """Summed loss of labels by the logits of each model of an ensemble, the mean over it."""
    kind, how = runner.codec.decision.loss, (settings.label_smoothing, settings.r_drop)
    if (name := settings.loss) != "auto":
        kind = kind._replace(loss=lambda logits, targets, *how: own_loss(name, logits, targets))

    def loss(batch: LabelBatch, weights: Tensor | None) -> Tensor:
        losses = [
            label_loss(kind, partial(logits, model, batch), batch.targets, *how, weights)
            for model in members_of(runner.model)
        ]
        return torch.stack(losses).mean()

    return loss
