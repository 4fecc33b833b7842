"""Sparse dictionaries of what flows at a place of a model, learnt from streamed activations.

The batches are those of the model's own task, so every modality has them. How many vectors one
gives is known when it has been computed; so a fixed number of them makes a chunk, from which a
fixed number of steps is drawn, and step n is a function of (seed, n), as the training loop asks.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from regard.attention.intervene import INTERVENTION_PLACES, change, record
from regard.data.batches import moved
from regard.data.seeds import mix
from regard.errors import UsageError
from regard.files import read_json, sha256, write_json
from regard.files.hashes import damaged, listed, seal, unseal, verify
from regard.insight.autoencoder import (
    SPARSITIES,
    AutoencoderConfig,
    SparseAutoencoder,
    VectorTraining,
    learn,
)
from regard.metrics.results import Named
from regard.models.folder import save_weights
from regard.settings import fill, setting
from regard.tasks.frame.origin import Origin
from regard.tasks.prepare import Report
from regard.tasks.runner import Runner
from regard.training.run_folder import locked
from regard.training.step import LoopSettings

_CONFIG, WEIGHTS, _PAGE = "config.json", "dictionary.safetensors", "features.html"
_FORMAT = 2  # 1: trained by a loop of its own; what is loaded is the same
_COUNTED = 8  # batches of the model that tell how many vectors one gives
_MOST_ACTIVATIONS = 2**27  # numbers of a chunk, which bounds memory
_HELD_OUT = 0.05  # of the batches of an epoch, by which a dictionary is judged
MOST_JUDGED = 16  # batches by which it is judged
_JUDGING = 1024  # vectors by which the threshold is set at the end
_FAR = 1.5  # times as many features as asked for, or as few
# settings of tasks that would change what a model reads, or how its loss is counted
_PLAIN: dict[str, Any] = {
    "augment": "none",
    "label_smoothing": 0.0,
    "mixup": 0.0,
    "cutmix": 0.0,
    "erase": 0.0,
    "word_dropout": 0.0,
    "feature_dropout": 0.0,
    "bpe_dropout": 0.0,
}
_PLAIN_SOUND = {"speeds": "1", "time_masks": 0, "frequency_masks": 0, "time_warp": 0}


@dataclass(frozen=True)
class DictionarySettings:
    """What a dictionary is learnt of, its shape, and how long it is trained.

    Further keys are those by which the task of the model reads its data (from=, columns=, ...).
    """

    at: str | None = setting(None, "the place: blocks.3 (its output), blocks.3.ffn.in, ...")
    data: str | None = setting(None, "data as for `regard train` with the model's task")
    out: str | None = setting(None, "folder of the dictionary")
    width: str = setting("8x", "features: a number, or so many times the width of the vectors")
    k: float = setting(32.0, "features of a vector that are not zero", above=0, max=10_000)
    sparsity: str = setting("matryoshka", "sparsity", choices=SPARSITIES)
    steps: int = setting(2000, "steps of training", min=1, max=10**7)
    batch: int = setting(1024, "vectors of a step", min=1, max=2**16)
    lr: float = setting(3e-3, "learning rate", above=0, max=1)
    start: float = setting(1.0, "length of directions before training", above=0, max=100)
    buffer: int = setting(2**15, "vectors in memory, out of which batches are drawn", min=1)
    dead_after: int = setting(200_000, "vectors without a feature after which it is revived", min=1)
    seed: int = setting(1, "of weights and batches", min=0)
    save_every: float = setting(120.0, "seconds between checkpoints", min=0)
    examples: int = setting(8, "top examples of each feature on the page", min=1, max=64)
    shown: int = setting(40, "features on the page", min=1, max=2000)
    steer: str | None = setting(None, "an input to answer while features are turned up and down")


@dataclass(frozen=True)
class Dictionary(Named):
    """A dictionary that was learnt, and how good it is."""

    folder: str
    at: str
    features: int
    k: float
    sparsity: str
    steps: int
    explained_variance: float
    l0: float
    dead: float  # share of features that fired for none of the vectors it was judged by
    loss: float  # of the model, as it is
    loss_reconstructed: float  # with the reconstruction in the place of what flows
    loss_zero: float  # with zeros
    loss_mean: float  # with the mean vector
    loss_recovered: float  # 1: as good as the model itself, 0: as bad as with zeros
    memory: int  # bytes that the run was bounded by, beside the model
    page: str | None = None

    @property
    def warnings(self) -> list[str]:
        """What to know before it is used: that it is not as sparse as was asked."""
        times = self.l0 / self.k
        if 1 / _FAR <= times <= _FAR:
            return []
        return [
            f"note: {self.l0:.1f} features of a vector are not zero, {times:.1f} times the k="
            f"{self.k:g} asked for: it has not settled after {self.steps:,} steps; raise steps="
        ]

    def __str__(self) -> str:
        lines = [
            f"{self.folder}: {self.features:,} features at {self.at} ({self.sparsity}, "
            f"{self.steps:,} steps)",
            f"explained variance {self.explained_variance:.3f}, L0 {self.l0:.1f}, "
            f"dead {self.dead:.1%}",
            *self.warnings,
            f"loss {self.loss:.4f}, with the reconstruction {self.loss_reconstructed:.4f}, with "
            f"the mean {self.loss_mean:.4f}, with zeros {self.loss_zero:.4f}: "
            f"{self.loss_recovered:.1%} recovered",
            f"memory beside the model: at most {self.memory / 2**20:,.0f} MB",
        ]
        return "\n".join([*lines, *([f"wrote {self.page}"] if self.page else [])])


def place_name(at: str) -> str:
    """Return a place as `record` names it: the output, if only a module is named."""
    last = at.rpartition(".")[2]
    return at if last in INTERVENTION_PLACES else f"{at}.out"


class Stream:
    """What flows at a place of a model over the batches that it is trained by."""

    def __init__(self, task: Runner[Any], at: str, values: Mapping[str, Any]):
        self.task, self.at = task, place_name(at)
        if self.at.rpartition(".")[2] in ("weights", "mask", "heads"):
            raise UsageError(f"at={at}: a dictionary is learnt of vectors; name a module, or .in")
        learner, told = task.trained_as()
        kind = learner.task
        known = {each.name for each in fields(kind.Train)}
        plain = {key: value for key, value in _PLAIN.items() if key in known}
        if "speeds" in kind.short:  # of sounds, whose augmentation has keys of its own
            plain.pop("augment", None)
            plain.update(_PLAIN_SOUND)
        window = getattr(task.predictor, "window", None)
        if "context" in known and window:
            plain["context"] = window
        with torch.random.fork_rng():
            origin = Origin.load(_folder(task))
            given = {**plain, **told, **values, "init": str(origin.folder)}
            self.settings = kind.resolve(given, origin)
            self.data = kind.learning.read(self.settings, origin)
            self.lesson = kind.learning.lesson(learner, self.data, self.settings)
        epoch = max(2, math.floor(self.lesson.batches.epoch()))
        self.held_out = max(1, min(MOST_JUDGED, round(epoch * _HELD_OUT)))
        self.trained = epoch - self.held_out  # batches to learn from, again and again
        self.task.model.eval()

    @torch.no_grad()
    def read(self, n: int) -> tuple[Any, Tensor, Tensor]:
        """Return batch n, what flows at the place (b, ..., width), and which of it is real."""
        batch = moved(self.lesson.batches[n], self.task.device)
        with record(self.task.model, self.at) as acts:
            self.lesson.loss(batch)
        x, calls = acts[self.at], acts.calls(self.at)
        if x.dim() < 2 or not x.is_floating_point():
            raise UsageError(f"{self.at} is of shape {tuple(x.shape)}; expected vectors")
        lengths = getattr(batch, "lengths", None)
        if len(calls) == 1 or lengths is None or len(calls) != len(lengths):
            return batch, x, real_places(batch, x)
        if x.dim() == 2:
            return batch, torch.cat(calls), torch.ones(len(calls), dtype=torch.bool)
        x = pad_sequence([one[0] for one in calls], batch_first=True)  # sounds are read one by one
        sizes = torch.tensor([one.shape[1] for one in calls])
        return batch, x, torch.arange(x.shape[1]) < sizes.unsqueeze(1)

    def vectors(self, n: int) -> Tensor:
        """Return the vectors (rows, width) of batch n, without padding."""
        _, x, real = self.read(n)
        return x[real] if x.dim() > 2 else x

    def judged(self) -> Iterator[int]:
        """Return the batches that nothing is learnt from."""
        return iter(range(self.trained, self.trained + self.held_out))


class VectorChunks:
    """Shuffled vectors of a stream, of which batch n is a function of (seed, n).

    Chunk c holds the vectors of `reads` batches of the model from c * reads on; `steps` batches are
    drawn from it. Both numbers follow from the first batches of the model.
    """

    def __init__(self, stream: Stream, *, batch: int, buffer: int, seed: int):
        if batch > buffer:
            raise UsageError(f"batch={batch} is more than buffer={buffer}; raise buffer=")
        self.stream, self.size, self.buffer, self.seed = stream, batch, buffer, seed
        counted = range(min(_COUNTED, stream.trained))
        mean = max(1.0, sum(len(stream.vectors(n)) for n in counted) / len(counted))
        self.reads = math.ceil(buffer / mean)
        self.steps = max(1, int(self.reads * mean) // batch)
        self.kept: tuple[int, Tensor] | None = None

    def chunk(self, c: int) -> Tensor:
        """Vectors of chunk c in their order; those of the last one are kept."""
        if self.kept is None or self.kept[0] != c:
            self.kept = None  # before there are two in memory
            self.kept = c, self._read(c)
        return self.kept[1]

    def _read(self, c: int) -> Tensor:
        parts, numbers = [], 0
        for n in range(c * self.reads, (c + 1) * self.reads):
            parts.append(self.stream.vectors(n % self.stream.trained))
            numbers += parts[-1].numel()
            if numbers > _MOST_ACTIVATIONS:
                raise UsageError(
                    f"buffer={self.buffer:,} vectors of {parts[0].shape[1]:,} numbers are too many "
                    f"for memory; at most {_MOST_ACTIVATIONS // parts[0].shape[1]:,}"
                )
        whole = torch.cat(parts)
        generator = torch.Generator().manual_seed(mix(self.seed, "chunk", c))
        return whole[torch.randperm(len(whole), generator=generator)]

    def __getitem__(self, n: int) -> Tensor:
        """Vectors (batch, width) of step n; a chunk that is too short is read round."""
        c, part = divmod(n, self.steps)
        chunk = self.chunk(c)
        return chunk[torch.arange(part * self.size, (part + 1) * self.size) % len(chunk)]


def _folder(task: Runner[Any]) -> Path:
    """Return the folder of a loaded model."""
    if task.folder is None:
        raise UsageError("a dictionary is learnt of a model in a folder; load it by its path")
    return task.folder


def real_places(batch: Any, x: Tensor) -> Tensor:
    """Return which places (b, ...) of what flows are not padding, by the lengths of the batch."""
    everything = torch.ones(x.shape[:-1], dtype=torch.bool)
    if x.dim() != 3:
        return everything
    inner = [batch, *(getattr(batch, name, None) for name in ("texts", "source", "sources"))]
    for part in inner:
        lengths = getattr(part, "lengths", None)
        if isinstance(lengths, Tensor) and lengths.shape == x.shape[:1]:
            longest = max(1, int(lengths.max()))
            kept = (lengths.double() * x.shape[1] / longest).ceil().clamp(max=x.shape[1])
            return torch.arange(x.shape[1]) < kept.unsqueeze(1)
    return everything


def dictionary_of(
    task: Runner[Any], given: Mapping[str, Any], *, quiet: bool = True
) -> Dictionary | Report:
    """Learn a dictionary of a loaded model by settings as the user gave them.

    The result is a `Report` if a signal stopped it.
    """
    own = {each.name for each in fields(DictionarySettings)}
    asked = fill(DictionarySettings, {key: v for key, v in given.items() if key in own})
    more = {key: value for key, value in given.items() if key not in own}
    for key in (each.name for each in fields(LoopSettings) if each.name in more):
        raise UsageError(f"{key}={more[key]} is not a setting of a dictionary; it trains by steps=")
    if asked.at is None:
        raise UsageError("at is missing; name a module of the model, such as at=blocks.2")
    if asked.data is None:
        holds = task.trained_as()[0].holds
        raise UsageError(f"data is missing; add data=FILE or data=FOLDER with {holds}")
    if asked.out is None:
        raise UsageError("out is missing; add out=FOLDER for the dictionary")
    stream = Stream(task, asked.at, {**more, "data": asked.data, "seed": asked.seed})
    from regard.insight.feature_page import write_page

    folder = Path(asked.out)
    with locked(folder):
        chunks = VectorChunks(stream, batch=asked.batch, buffer=asked.buffer, seed=asked.seed)
        vectors = chunks.chunk(0)
        model = _begin(stream, asked, vectors.shape[1], folder)
        model.fit_scale(vectors)
        sample = vectors[: max(asked.batch, _JUDGING)].clone()
        del vectors

        def judged() -> dict[str, float]:
            model.fit_threshold(sample)
            return judge(stream, model)

        def publish(weights: dict[str, Tensor], scores: dict[str, float]) -> None:
            unseal(folder)
            save_weights(folder, weights, name=WEIGHTS)
            seal(folder)

        outcome = learn(
            VectorTraining(model, chunks.__getitem__, asked.dead_after, judged),
            folder,
            steps=asked.steps,
            lr=asked.lr,
            seed=asked.seed,
            save_every=asked.save_every,
            publish=publish,
            lost=WEIGHTS not in listed(folder) or bool(damaged(folder, listed(folder))),
            quiet=quiet,
        )
        if not outcome.finished:
            return Report(str(folder), outcome.step, asked.steps, False, {}, signal=outcome.signal)
        found = Dictionary(
            folder=str(folder),
            at=stream.at,
            features=model.config.features,
            k=model.config.k,
            sparsity=asked.sparsity,
            steps=asked.steps,
            **{name: value for name, value in outcome.scores.items() if name != "better"},
            memory=memory_of(model.config, asked),
            page=str(folder / _PAGE),
        )
        write_page(folder / _PAGE, stream, model, found, asked, quiet=quiet)
        write_json(folder / "report.json", asdict(found))
    return found


def memory_of(config: AutoencoderConfig, asked: DictionarySettings) -> int:
    """Return the bytes that a run takes at most, beside the model and one batch of its own."""
    weights = 2 * config.features * (config.width + 1)
    step = asked.batch * (4 * config.features + 6 * config.width)
    return 4 * (2 * (asked.buffer + 2**14) * config.width + 4 * weights + step)


def features_of(asked: DictionarySettings, width: int) -> int:
    """Return how many features are asked for: 4096, or 8x as many as a vector has numbers."""
    text = asked.width.strip().lower()
    times = text.endswith("x")
    try:
        number = float(text.removesuffix("x"))
        count = round(number * width) if times else int(text)
    except (ValueError, OverflowError):
        raise UsageError(f"width={asked.width}; expected a number such as 4096, or 8x") from None
    if not 1 <= count <= 10**7:
        raise UsageError(f"width={asked.width} are {count:,} features; expected 1 to 10,000,000")
    return count


def _begin(
    stream: Stream, asked: DictionarySettings, width: int, folder: Path
) -> SparseAutoencoder:
    """A new dictionary in a folder that is empty, or in which the same one was begun."""
    config = AutoencoderConfig(
        width, features_of(asked, width), asked.k, asked.sparsity, start=asked.start
    )
    about = {
        "regard_dictionary": _FORMAT,
        "at": stream.at,
        "model": sha256(_folder(stream.task) / "model.safetensors"),
        "data": stream.data.sha,
        "autoencoder": asdict(config),
        **{name: getattr(asked, name) for name in ("steps", "batch", "lr", "buffer", "seed")},
        "dead_after": asked.dead_after,
    }
    if (folder / _CONFIG).exists():
        verify(folder)
        known = read_json(folder / _CONFIG)
        now = json.loads(json.dumps(about))
        differs = [key for key in about if known.get(key) != now[key]]
        if differs:
            raise UsageError(
                f"{folder}: has a dictionary of another {', '.join(differs)}; choose another out="
            )
    elif any(not path.name.startswith(".") for path in folder.iterdir()):
        raise UsageError(f"{folder}: is there already and not empty; choose another out=")
    else:
        write_json(folder / _CONFIG, about)
    return SparseAutoencoder(config, seed=mix(asked.seed, "dictionary"))


def load_dictionary(folder: str | Path) -> SparseAutoencoder:
    """Load a dictionary that was learnt into a folder."""
    verify(Path(folder))
    told = read_json(Path(folder) / _CONFIG)
    if told.get("regard_dictionary") not in (1, _FORMAT) or not isinstance(
        told.get("autoencoder"), dict
    ):
        raise UsageError(f"{folder}: no dictionary; learn one with: regard dictionary MODEL ...")
    model = SparseAutoencoder(fill(AutoencoderConfig, told["autoencoder"], where=str(folder)))
    path = Path(folder) / WEIGHTS
    try:
        verify(Path(folder), WEIGHTS)
        model.load_state_dict(load_file(path))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise UsageError(f"{path}: {str(error)[:200]}") from None
    return model


@torch.no_grad()
def judge(stream: Stream, model: SparseAutoencoder) -> dict[str, float]:
    """Judge a dictionary by batches that it was not trained on."""
    lesson = stream.lesson
    fired = torch.zeros(model.config.features, dtype=torch.bool)
    rest = square = active = 0.0
    plain, count, units = torch.zeros(model.config.width, dtype=torch.float64), 0, 0
    losses = {"loss": 0.0, "loss_reconstructed": 0.0, "loss_zero": 0.0, "loss_mean": 0.0}
    changes: dict[str, Callable[[Tensor], Tensor]] = {
        "loss_reconstructed": model,
        "loss_zero": torch.zeros_like,
        "loss_mean": lambda x: model.mean.expand(x.shape),
    }
    for n in stream.judged():
        batch, x, real = stream.read(n)
        vectors = x[real] if x.dim() > 2 else x
        z = model.encode(vectors)
        fired |= (z > 0).any(0)
        active += float((z > 0).sum())
        rest += float((model.decode(z) - vectors).double().pow(2).sum())
        square += float(vectors.double().pow(2).sum())
        plain += vectors.double().sum(0)
        count += len(vectors)
        units += lesson.count(batch)[0]
        losses["loss"] += float(lesson.loss(batch))
        for name, function in changes.items():
            with change(stream.task.model, {stream.at: function}):
                losses[name] += float(lesson.loss(batch))
    losses = {name: total / max(1, units) for name, total in losses.items()}
    spread = max(square - float(plain.pow(2).sum()) / count, 1e-12)
    gap = losses["loss_zero"] - losses["loss"]
    return {
        "explained_variance": 1 - rest / spread,
        "l0": active / count,
        "dead": float((~fired).float().mean()),
        **losses,
        "loss_recovered": (losses["loss_zero"] - losses["loss_reconstructed"]) / (gap or 1e-12),
    }


@contextmanager
def steer(
    task: Runner[Any], dictionary: SparseAutoencoder, at: str, feature: int, strength: float
) -> Iterator[None]:
    """Add so much of a feature to everything that flows at a place, while the block runs."""
    if not 0 <= feature < dictionary.config.features:
        raise UsageError(
            f"there is no feature {feature}; choose from 0 to {dictionary.config.features - 1}"
        )
    direction = strength * dictionary.direction(feature)
    with change(task.model, {place_name(at): lambda x: x + direction.to(x.dtype)}):
        yield
