"""Translation: from pairs of sentences to a model that translates."""

import dataclasses
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.attention.positions import has_table
from regard.data.batches import Batches, pad
from regard.data.pairs import Corpus, Pair, load_pairs
from regard.data.store import Store, build_store, store_key
from regard.data.tokenize import Tokenizer, train_tokenizer
from regard.errors import UsageError, lookup
from regard.files import cache_folder
from regard.layers.recurrent import Draws
from regard.metrics.bleu import judge
from regard.metrics.lengths import add_joined
from regard.models import family, rows
from regard.models.folder import load_folder, read_config
from regard.pretrained.folder import is_foreign
from regard.settings import describe
from regard.tasks import run
from regard.tasks.run import (
    Data,
    Report,
    TaskSettings,
    Work,
    build_model,
    resolve_task,
    save_generation,
    settings_with,
    settle_tokenizer,
    shape_of,
    train_task,
)
from regard.tasks.translator import (
    Translator,
    around,
    begin_of,
    load_tokenizers,
    save_tokenizers,
)
from regard.training.loop import Trainable, at_least, mix
from regard.training.loss import ROWS, r_drop_loss, vocabulary_loss

NAME = "translate"
FAMILY = "transformer"
TransformerConfig, _ = family(FAMILY)
GENERATION = {"beam": 5, "length_penalty": "average", "alpha": 1.0}

# what a size means for training, on top of the sizes of the model
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"lr": 0.003, "batch_tokens": 2048, "pieces": 6000, "steps": 12_000},
    "small": {"lr": 0.0015, "batch_tokens": 4096, "pieces": 8000, "steps": 20_000},
    "base": {
        "lr": 0.0007,
        "batch_tokens": 16_384,
        "pieces": 32_000,
        "steps": 100_000,
    },
    "big": {
        "lr": 0.0005,
        "batch_tokens": 32_768,
        "pieces": 32_000,
        "steps": 300_000,
    },
}
# short keys for what lies deeper
SHORT = {
    **run.SHORT,
    "kv_heads": "model.block.kv_heads",
    "depth": ("model.encoder_depth", "model.decoder_depth"),
}
# and for what only some families have
PARTS = {
    "cell": "model.block.cell",
    "attention": "model.block.attention",
    "normalise": "model.block.normalise",
    "readout": "model.block.readout",
    "kernel": "model.block.kernel",
    "direction": "model.direction",
}


@dataclass(frozen=True)
class TranslateSettings(TaskSettings):
    """Everything that a translation run can be told."""

    source: str | None = field(default=None, metadata={"key": "from", "help": "language read"})
    target: str | None = field(default=None, metadata={"key": "to", "help": "language written"})
    like: str | None = field(
        default=None, metadata={"help": "transformer, t5, ...; rnnenc, rnnsearch, ...; convs2s"}
    )
    columns: str | None = field(default=None, metadata={"help": "source and target, such as 2,1"})
    header: bool | None = field(
        default=None, metadata={"help": "whether a table begins with one; recognised unless told"}
    )
    skip_bad: bool = field(default=False, metadata={"help": "leave bad rows out"})
    joined: int = field(
        default=0, metadata=at_least(0, "also learn pairs joined to up to so many words", 10_000)
    )
    tokenizer: str = field(default="bpe", metadata={"help": "bpe or unigram"})
    pieces: int = field(default=6000, metadata=at_least(300, "sub-words", 1_000_000))
    vocabularies: str = field(default="auto", metadata={"help": "joint, separate or auto"})
    bpe_dropout: float = field(default=0.0, metadata=at_least(0, "share of merges dropped", 1))
    batch_tokens: int = field(default=2048, metadata=at_least(1, "tokens a batch"))
    max_length: int = field(default=256, metadata=at_least(1, "longest side in pieces", 100_000))
    label_smoothing: float = field(default=0.1, metadata=at_least(0, "spread of the target", 0.9))
    r_drop: float = field(default=0.0, metadata=at_least(0, "weight of the R-Drop term", 100))
    valid_sentences: int = field(default=500, metadata=at_least(0, "decoded at a validation"))
    model: TransformerConfig = field(default_factory=TransformerConfig)  # type: ignore[valid-type]


def family_of(values: Mapping[str, Any]) -> str:
    """Return the family of the model to build: that of `init`, or of what it is to be like."""
    row, init = values.get("like"), values.get("init")
    if row and init:
        raise UsageError(f"like={row} is for a new model; the one in init= has its parts already")
    if init:
        name = FAMILY if is_foreign(init) else read_config(Path(init))["family"]
        return name if isinstance(name, str) and name in FAMILIES else FAMILY
    known = {each: name for name in FAMILIES for each in rows(name)}
    return lookup("row", str(row), known) if row else FAMILY


def resolve(values: Mapping[str, Any]) -> TranslateSettings:
    """Make full settings of what a user gave: the size fills in what is not said."""
    name = family_of(values)
    kind = settings_with(TranslateSettings, model=family(name)[0])
    known = {each.key for each in describe(kind)}
    short = {**SHORT, **PARTS}
    settings = resolve_task(
        kind,
        values,
        model=shape_of(name, values, *([str(values["like"])] if values.get("like") else [])),
        sizes=SIZES,
        short={key: long for key, long in short.items() if known.issuperset(_several(long))},
        of="pairs of sentences",
    )
    if settings.vocabularies not in ("joint", "separate", "auto"):
        raise UsageError(
            f"vocabularies='{settings.vocabularies}' is not one of joint, separate, auto"
        )
    return settings


def _several(keys: str | tuple[str, ...]) -> tuple[str, ...]:
    return (keys,) if isinstance(keys, str) else keys


@dataclass
class Batch:
    """Sentences side by side: the source, and the target shifted for reading and for guessing."""

    source: Tensor
    source_lengths: Tensor
    reads: Tensor
    writes: Tensor
    tokens: int
    read: int


def corpus_hash(corpus: Corpus) -> str:
    """Return a hash of the pairs that are trained and validated on."""
    digest = hashlib.sha256()
    for part in ("train", "valid"):
        for pair in corpus.parts.get(part, ()):
            digest.update(f"{pair.source}\x00{pair.target}\x01".encode(errors="replace"))
        digest.update(b"\x02")
    return digest.hexdigest()


def share_letters(corpus: Corpus) -> bool:
    """Tell whether both sides are written in the same letters, so that one vocabulary suits."""
    some = corpus.parts["train"][:2000]
    letters = [
        {c for pair in some for c in getattr(pair, side) if c.isalpha()}
        for side in ("source", "target")
    ]
    return len(letters[0] & letters[1]) > 0.5 * min(map(len, letters), default=0)


def build_tokenizers(corpus: Corpus, settings: TranslateSettings) -> tuple[Tokenizer, Tokenizer]:
    """Learn one tokenizer for both sides, or one for each."""
    train = corpus.parts["train"]
    kind, pieces = settings.tokenizer, settings.pieces
    joint = settings.vocabularies == "joint"
    if joint or (settings.vocabularies == "auto" and share_letters(corpus)):
        texts = (text for pair in train for text in (pair.source, pair.target))
        tokenizer = train_tokenizer(texts, kind=kind, vocab=pieces)
        return tokenizer, tokenizer
    sides = [[getattr(pair, side) for pair in train] for side in ("source", "target")]
    source, target = (train_tokenizer(texts, kind=kind, vocab=pieces) for texts in sides)
    return source, target


class Translation(Trainable):
    """The task as the training loop sees it."""

    def __init__(
        self,
        corpus: Corpus,
        settings: TranslateSettings,
        tokenizers: tuple[Tokenizer, Tokenizer],
        device: str = "cpu",
    ):
        self.settings, self.device = settings, device
        self.source, self.target = tokenizers
        self.language = corpus.target
        self.valid = corpus.parts["valid"]
        self.decoded = min(settings.valid_sentences, len(self.valid))
        self.store, self.dropped = self._tokenise(corpus)
        lengths = [self.store.lengths(0) + 1, self.store.lengths(1) + 1]
        self.batches = Batches(lengths, settings.batch_tokens, settings.seed)
        self.samplers = None
        if settings.bpe_dropout:
            self.pairs = [
                p for p, kept in zip(corpus.parts["train"], self.kept, strict=True) if kept
            ]
            self.samplers = [
                t.sampler(settings.bpe_dropout, settings.seed) for t in (self.source, self.target)
            ]

    def _tokenise(self, corpus: Corpus) -> tuple[Store, int]:
        """Tokenise the training pairs, or find them tokenised already."""
        train, longest = corpus.parts["train"], self.settings.max_length
        sides = [
            tokenizer.encode_batch([getattr(pair, side) for pair in train])
            for side, tokenizer in (("source", self.source), ("target", self.target))
        ]
        self.kept = [len(a) <= longest and len(b) <= longest for a, b in zip(*sides, strict=True)]
        if not any(self.kept):
            raise UsageError(f"every pair is longer than max_length={longest} pieces; raise it")
        key = store_key(corpus_hash(corpus), self.source.sha, self.target.sha, longest)
        folder = cache_folder() / "stores" / key
        try:
            store = Store.open(folder)
        except UsageError:
            rows = ((a, b) for a, b, kept in zip(*sides, self.kept, strict=True) if kept)
            store = build_store(folder, rows)
        return store, len(self.kept) - sum(self.kept)

    def batch(self, n: int) -> Batch:
        """Return batch n, always the same for the same seed and n."""
        rows = self.batches[n]
        if self.samplers is None:
            sources = [self.store[0][i] for i in rows]
            targets = [self.store[1][i] for i in rows]
        else:
            keys = [mix(self.settings.seed, n, int(i)) for i in rows]
            sources, targets = (
                [
                    np.asarray(sampler.encode(getattr(self.pairs[i], side), key)[: self._most()])
                    for i, key in zip(rows, keys, strict=True)
                ]
                for sampler, side in zip(self.samplers, ("source", "target"), strict=True)
            )
        return make_batch(sources, targets, self.source, self.target, self.device)

    def epoch(self) -> float:
        """Return in how many batches all pairs are read once."""
        return self.batches.len_epoch()

    def some(self, count: int) -> list[Pair]:
        """Return so many validation pairs, fewer where a share is to do."""
        return self.valid[: math.ceil(self.valid_share * count)]

    def _most(self) -> int:
        return 2 * self.settings.max_length

    def count(self, batch: Batch) -> tuple[int, int]:
        """Return the target tokens that the loss counts, and all that were read."""
        return batch.tokens, batch.read

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """Return the summed cross-entropy of the target with label smoothing."""
        settings = self.settings
        return translation_loss(model, batch, settings.label_smoothing, settings.r_drop)

    @torch.inference_mode()
    def valid_loss(self, model: Any) -> float:
        """Return the cross-entropy a token on the validation part, without smoothing."""
        total = tokens = 0.0
        pairs = self.some(len(self.valid))
        encoded = [
            tokenizer.encode_batch([getattr(pair, side) for pair in pairs])
            for side, tokenizer in (("source", self.source), ("target", self.target))
        ]
        most = min(4 * self.settings.max_length, model.config.max_length - 2)
        lengths = [np.array([min(len(row), most) + 1 for row in side]) for side in encoded]
        plan = Batches(lengths, max(4096, self.settings.batch_tokens), 0)
        for n in range(plan.len_epoch(0)):
            source, target = ([np.asarray(side[i][:most]) for i in plan[n]] for side in encoded)
            batch = make_batch(source, target, self.source, self.target, self.device)
            total += float(translation_loss(model, batch, 0.0, 0.0))
            tokens += batch.tokens
        return total / tokens

    def evaluate(self, model: Any) -> dict[str, float]:
        """Return loss and greedy BLEU on the validation part."""
        scores = {"loss": self.valid_loss(model)}
        scores["better"] = -scores["loss"]
        some = self.some(self.decoded)
        if some:
            sources = [pair.source for pair in some]
            outputs = [r.text for r in self.translator(model).run(sources, beam=1)]
            bleu = judge(outputs, [[pair.target for pair in some]], self.language)[0]
            scores["bleu"] = scores["better"] = bleu.value
        return scores

    def translator(self, model: nn.Module) -> Translator:
        """Return the model as its user will have it."""
        return Translator(model, self.source, self.target, {"to": self.language})


def make_batch(
    sources: Sequence[np.ndarray],
    targets: Sequence[np.ndarray],
    source: Tokenizer,
    target: Tokenizer,
    device: str = "cpu",
) -> Batch:
    """Frame sentences with their begin and end tokens and pad them."""
    before, after = (np.array(ids, dtype=np.int64) for ids in around(source))
    framed = [np.concatenate([before, row, after]) for row in sources]
    ids, lengths = pad(framed, source.pad)
    reads, _ = pad([np.concatenate([[begin_of(target)], row]) for row in targets], target.pad)
    writes, target_lengths = pad([np.append(row, target.eos) for row in targets], -1)
    tokens = int(target_lengths.sum())
    read = tokens + int(lengths.sum())
    ids, lengths, reads, writes = (x.to(device) for x in (ids, lengths, reads, writes))
    return Batch(ids, lengths, reads, writes, tokens, read)


def translation_loss(model: Any, batch: Batch, smoothing: float, r_drop: float) -> Tensor:
    """Return the summed loss of a batch; padding never reaches the vocabulary."""
    hidden = model.hidden(*_sides(batch, r_drop))
    return _loss_of(model.head, hidden, batch, smoothing, r_drop)


def _sides(batch: Batch, r_drop: float) -> tuple[Tensor, ...]:
    """Return what a model reads: the source, the target and the lengths; for R-Drop twice."""
    sides = batch.source, batch.reads, batch.source_lengths
    return tuple(torch.cat([x, x]) for x in sides) if r_drop else sides


def _loss_of(
    head: nn.Linear, hidden: Tensor, batch: Batch, smoothing: float, r_drop: float
) -> Tensor:
    """Return the summed loss of the vectors before the head."""
    real = (batch.writes >= 0).flatten().nonzero().squeeze(-1)
    writes = batch.writes.flatten()[real]
    weight, bias = head.weight, head.bias
    if r_drop:
        one, two = (half.flatten(0, 1)[real] for half in hidden.chunk(2))
        return r_drop_loss(one, two, weight, writes, r_drop, bias=bias, smoothing=smoothing)
    return vocabulary_loss(
        hidden.flatten(0, 1)[real], weight, writes, bias=bias, smoothing=smoothing
    )


def drawn_loss(model: Any, batch: Batch, smoothing: float, r_drop: float) -> Tensor:
    """Return the same loss of a model that may draw where it looks, and learns from the outcome."""
    draws = Draws()
    hidden = model.hidden(*_sides(batch, r_drop), draws=draws)
    loss = _loss_of(model.head, hidden, batch, smoothing, r_drop)
    if not draws.chances:
        return loss
    writes = torch.cat([batch.writes] * (len(hidden) // len(batch.writes)))
    with torch.no_grad():
        each = [
            F.cross_entropy(
                model.head(x), y, ignore_index=-1, reduction="none", label_smoothing=smoothing
            )
            for x, y in zip(
                hidden.flatten(0, 1).split(ROWS), writes.flatten().split(ROWS), strict=True
            )
        ]
    return loss + draws.loss(torch.cat(each).view(writes.shape), writes >= 0)


class Drawing(Translation):
    """The task for models that may draw where they look."""

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """Return the summed cross-entropy of the target with label smoothing."""
        settings = self.settings
        return drawn_loss(model, batch, settings.label_smoothing, settings.r_drop)


# family -> the task as it is trained; those that translate, the usual one first
FAMILIES: dict[str, type[Translation]] = {
    FAMILY: Translation,
    "recurrent": Drawing,
    "convolutional": Translation,
}


def build(settings: TranslateSettings, tokenizers: tuple[Tokenizer, Tokenizer]) -> Any:
    """Build the model that the settings describe, for these vocabularies."""
    config: Any = settings.model
    if not settings.init:
        source, target = tokenizers
        config = dataclasses.replace(config, source_vocab=source.vocab, target_vocab=target.vocab)
        if source is not target and config.tie == "all":
            config = dataclasses.replace(config, tie="target")
    learned = has_table(getattr(config, "position", "none"))
    if not settings.init or not learned:  # a table has the rows that it has
        longest = max(config.max_length, 4 * settings.max_length + 2)
        config = dataclasses.replace(config, max_length=longest)
    name = next(name for name in FAMILIES if type(config) is family(name)[0])
    return build_model(name, config, settings)


def load(settings: TranslateSettings) -> Corpus:
    """Read the pairs that the settings name."""
    assert settings.data is not None
    corpus = load_pairs(
        settings.data,
        source=settings.source,
        target=settings.target,
        columns=settings.columns,
        header=settings.header,
        valid=settings.valid,
        test=settings.test,
        skip_bad=settings.skip_bad,
    )
    return add_joined(corpus, settings.joined) if settings.joined else corpus


class Way(NamedTuple):
    """A way to translate: which task it is, by what family, and what is made of it."""

    name: str
    family: str
    build: Callable[[Any, tuple[Tokenizer, Tokenizer]], Any]
    task: type[Translation]
    runner: type[Translator]


def train(values: Mapping[str, Any], *, quiet: bool = False, recipe: str | None = None) -> Report:
    """Train a translator in a folder, or go on with one that was begun there."""
    name = family_of(values)
    way = Way(NAME, name, build, FAMILIES[name], Translator)
    return train_way(way, values, resolve(values), quiet=quiet, recipe=recipe)


def train_way(
    way: Way,
    values: Mapping[str, Any],
    settings: TranslateSettings,
    *,
    quiet: bool,
    recipe: str | None,
) -> Report:
    """Train a translator of any kind from pairs of sentences."""

    def read() -> Data:
        corpus = load(settings)
        return Data(corpus, corpus_hash(corpus), corpus.notes, corpus.split)

    def prepare(data: Data, folder: Path, begun: dict[str, Any] | None) -> Work:
        corpus: Corpus = data.parts
        tokenizers = settle_tokenizer(
            folder,
            settings,
            begun,
            lambda: build_tokenizers(corpus, settings),
            load=load_tokenizers,
            save=save_tokenizers,
        )
        model = way.build(settings, tokenizers)
        task = way.task(corpus, settings, tokenizers, settings.device)

        def save(folder: Path) -> None:
            save_tokenizers(folder, tokenizers)
            if not (folder / "generation_config.json").exists():
                save_generation(folder, GENERATION)

        return Work(
            way.family,
            model,
            task,
            f"{corpus.source or 'source'} to {corpus.target or 'target'}",
            about={"from": corpus.source, "to": corpus.target},
            facts={"tokenizers": [t.sha for t in tokenizers], "left_out": task.dropped},
            save=save,
            finish=lambda folder: settle_alignment(folder, corpus, way.runner),
        )

    return train_task(
        way.name, values, settings, read=read, prepare=prepare, recipe=recipe, quiet=quiet
    )


def settle_alignment(folder: Path, corpus: Corpus, runner: type[Translator]) -> None:
    """Write down which head aligns best on the validation part."""
    translator = runner.load(folder, *load_folder(folder))
    if not translator.looks:
        return
    pairs = [(pair.source, pair.target) for pair in corpus.parts["valid"][:50]]
    name, head = translator.choose_alignment_head(translator.encode_pairs(pairs))
    save_generation(folder, {**GENERATION, "alignment_head": f"{name}:{head}"})
