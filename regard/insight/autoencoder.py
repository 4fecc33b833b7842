"""A sparse autoencoder: vectors as sums of few directions (features) out of many.

A vector x, less its mean and in units of its spread, is encoded as z = ReLU(xE' + e), of which only
some entries are kept, and decoded as zD + d. What is kept is the part that methods differ in, by
name in SPARSITIES. An entry counts by what it adds, its value times the length of its row of D.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from regard.errors import UsageError, lookup
from regard.training.fit import Fit, Outcome
from regard.training.plan import make_plan
from regard.training.step import LoopSettings, Trainable

_MOST_WEIGHTS = 2**28  # of encoder and decoder together
_AUXILIARY = 0.1  # weight of the loss that revives dead features (Gao et al. 2024: 1/32)
_FORGET = 0.01  # by how much a step moves the running threshold
_ADAPT = 0.02  # by how much a step moves the weight of an L1 penalty


@dataclass(frozen=True)
class AutoencoderConfig:
    """The shape of a sparse autoencoder, and what keeps it sparse."""

    width: int = 64
    features: int = 512
    k: float = 32.0  # features of a vector that are not zero: exactly, or on average
    sparsity: str = "matryoshka"
    prefixes: tuple[int, ...] = field(default=())  # of matryoshka: numbers of features, nested
    start: float = 1.0  # length of the rows of encoder and decoder before training

    def __post_init__(self) -> None:
        lookup("sparsity", self.sparsity, SPARSITIES)
        if 2 * self.width * self.features > _MOST_WEIGHTS:
            raise UsageError(
                f"{self.features:,} features of {self.width:,} numbers are too many; at most "
                f"{_MOST_WEIGHTS // 2 // self.width:,} of that width"
            )
        if not 0 < self.k <= self.features:
            raise UsageError(f"k={self.k:g} of {self.features} features; expected at most as many")
        if not 0 < self.start <= 100:
            raise UsageError(f"start={self.start:g}; expected a length over 0, at most 100")
        last = 0
        for size in self.prefixes:
            if not last < size <= self.features:
                raise UsageError(
                    f"prefixes={','.join(map(str, self.prefixes))}; expected rising numbers up to "
                    f"{self.features}"
                )
            last = size


class TopK:
    """The k largest entries of every vector are kept (Gao et al. 2024)."""

    by_threshold = False  # whether a vector alone is encoded by a threshold
    nested = False

    def keep(self, z: Tensor, model: "SparseAutoencoder") -> Tensor:
        """Return which entries of z are kept in training."""
        top = z.topk(int(model.config.k), dim=-1, sorted=False)
        return torch.zeros_like(z, dtype=torch.bool).scatter_(-1, top.indices, True)

    def penalty(self, z: Tensor, model: "SparseAutoencoder") -> Tensor | float:
        """Return what is added to the loss."""
        return 0.0


class BatchTopK(TopK):
    """The k largest entries a vector on average are kept, over a batch (Bussmann et al. 2024)."""

    by_threshold = True

    def keep(self, z: Tensor, model: "SparseAutoencoder") -> Tensor:
        """Return which entries of z are kept in training, and move the running threshold."""
        least = _kth_largest(z, int(model.config.k * len(z)), float(model.threshold))
        model.threshold += _FORGET * (least.double() - model.threshold)
        return z >= least


class Matryoshka(BatchTopK):
    """As BatchTopK, and each prefix of the features is to be a dictionary of its own.

    General features come first, and are not absorbed by special ones (Bussmann et al. 2025).
    """

    nested = True


class L1(TopK):
    """All entries are kept, and their sum is a penalty, weighed so that k of them are not zero."""

    def keep(self, z: Tensor, model: "SparseAutoencoder") -> Tensor:
        """Return which entries of z are kept in training, and move the weight of the penalty."""
        kept = z > 0
        excess = float(kept.sum()) / len(z) / model.config.k
        model.l1 *= math.exp(_ADAPT * max(-1.0, min(1.0, math.log(max(excess, 1e-3)))))
        return kept

    def penalty(self, z: Tensor, model: "SparseAutoencoder") -> Tensor | float:
        """Return the weighed mean of the sum of all entries."""
        return float(model.l1) * z.sum(-1).mean() / model.config.width


SPARSITIES: dict[str, type[TopK]] = {
    "topk": TopK,
    "batch_topk": BatchTopK,
    "matryoshka": Matryoshka,
    "l1": L1,
}


def _kth_largest(z: Tensor, k: int, guess: float) -> Tensor:
    """Return the kth largest of all entries; those above a guess are looked at first."""
    flat = z.detach().flatten()
    likely = flat[flat > 0.7 * guess]
    chosen = likely if len(likely) >= k else flat
    return chosen.topk(max(1, min(k, len(chosen))), sorted=False).values.min()


class SparseAutoencoder(nn.Module):
    """Encodes vectors as few of many features, and decodes them."""

    mean: Tensor
    scale: Tensor
    threshold: Tensor
    l1: Tensor
    silent: Tensor

    def __init__(self, config: AutoencoderConfig, seed: int = 1):
        super().__init__()
        self.config = config
        self.part = SPARSITIES[config.sparsity]()
        generator = torch.Generator().manual_seed(seed)
        start = torch.randn(config.features, config.width, generator=generator)
        start *= config.start / start.norm(dim=1, keepdim=True)
        self.encoder = nn.Parameter(start.clone())
        self.encoder_bias = nn.Parameter(torch.zeros(config.features))
        self.decoder = nn.Parameter(start.clone())
        self.decoder_bias = nn.Parameter(torch.zeros(config.width))
        self.register_buffer("mean", torch.zeros(config.width))
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("threshold", torch.zeros((), dtype=torch.float64))
        self.register_buffer("l1", torch.tensor(0.02, dtype=torch.float64))
        # vectors since each feature was last kept
        self.register_buffer("silent", torch.zeros(config.features, dtype=torch.int64))

    @torch.no_grad()
    def fit_scale(self, x: Tensor, *, centre: bool = True) -> None:
        """Take mean and spread of the vectors, so that settings mean the same for all models.

        Without `centre` the origin stays where it is: a feature that is often there could else be
        learnt as one that is seldom absent.
        """
        if centre:
            self.mean.copy_(x.mean(0))
        self.scale.copy_((x - self.mean).pow(2).mean().sqrt().clamp(min=1e-8))

    @torch.no_grad()
    def fit_threshold(self, x: Tensor) -> None:
        """Take the threshold by which k features of a vector are kept, on average over vectors.

        The running one lags behind by hundreds of steps, which is all of a short training.
        """
        if self.part.by_threshold:
            z = self.pre((x - self.mean) / self.scale)
            least = _kth_largest(z, int(self.config.k * len(x)), float(self.threshold))
            self.threshold.copy_(least)

    def prefixes(self) -> Sequence[int]:
        """Return the numbers of features that reconstruct alone, all of them last."""
        features = self.config.features
        if not self.part.nested:
            return [features]
        given = self.config.prefixes or (features // 32, features // 8, features // 2)
        return [*(size for size in given if 0 < size < features), features]

    def pre(self, x: Tensor) -> Tensor:
        """Return all entries of scaled vectors before any is dropped, each by what it adds."""
        bias = self.encoder_bias - self.encoder @ self.decoder_bias
        return torch.relu(torch.addmm(bias, x, self.encoder.T)) * self.decoder.norm(dim=1)

    def directions(self) -> Tensor:
        """Return the directions of all features, of length 1."""
        return self.decoder / self.decoder.norm(dim=1, keepdim=True).clamp(min=1e-8)

    @torch.no_grad()
    def encode(self, x: Tensor) -> Tensor:
        """Return the features (..., features) of vectors (..., width), nearly all of them zero."""
        flat = ((x - self.mean) / self.scale).reshape(-1, self.config.width)
        z = self.pre(flat)
        if self.part.by_threshold:
            kept = z >= self.threshold.to(z.dtype)
        elif self.config.sparsity == "l1":
            kept = z > 0
        else:
            kept = self.part.keep(z, self)
        return (z * kept).view(*x.shape[:-1], -1)

    @torch.no_grad()
    def decode(self, z: Tensor) -> Tensor:
        """Return the vectors of features."""
        return (z @ self.directions() + self.decoder_bias) * self.scale + self.mean

    def forward(self, x: Tensor) -> Tensor:
        """Return the reconstruction of vectors."""
        return self.decode(self.encode(x))

    def direction(self, feature: int) -> Tensor:
        """Return what one unit of a feature adds to a vector."""
        return self.directions()[feature].detach() * self.scale

    def loss(self, x: Tensor, dead_after: int) -> tuple[Tensor, Tensor]:
        """Return the loss over vectors (b, width), and which entries (b, features) were kept."""
        x = (x - self.mean) / self.scale
        pre = self.pre(x)
        with torch.no_grad():
            kept = self.part.keep(pre, self)
        z = pre * kept
        whole, directions = self.decoder_bias, self.directions()
        errors: list[Tensor] = []
        start = 0
        for stop in self.prefixes():
            whole = whole + z[:, start:stop] @ directions[start:stop]
            errors.append((whole - x).pow(2).mean())
            start = stop
        loss = torch.stack(errors).mean() + self.part.penalty(z, self)
        with torch.no_grad():
            self.silent += len(x)
            self.silent[kept.any(0)] = 0
            dead = (self.silent > dead_after).nonzero().squeeze(1)
        if len(dead):
            rest = (x - whole).detach()
            loss = loss + _AUXILIARY * self._revive(x, rest, dead)
        return loss, kept

    def _revive(self, x: Tensor, rest: Tensor, dead: Tensor) -> Tensor:
        """Return how badly dead features reconstruct what the others leave over."""
        encoder, decoder = self.encoder[dead], self.directions()[dead]
        bias = self.encoder_bias[dead] - encoder @ self.decoder_bias
        pre = torch.addmm(bias, x, encoder.T) * self.decoder[dead].norm(dim=1)
        top = pre.topk(min(len(dead), max(1, self.config.width // 2)), dim=1, sorted=False)
        z = torch.zeros_like(pre).scatter(1, top.indices, top.values)  # negative ones learn, too
        share = min(1.0, len(dead) / (self.config.width / 2))
        return share * (z @ decoder - rest).pow(2).mean() / rest.pow(2).mean().clamp(min=1e-8)


class VectorTraining(Trainable):
    """Vectors that an autoencoder learns to reconstruct, as the training loop sees them.

    Args:
        autoencoder: what is trained
        vectors: vectors (b, width) of batch n, always the same for the same n
        dead_after: vectors without a feature after which it is revived
        judge: its scores after the last step
    """

    def __init__(
        self,
        autoencoder: SparseAutoencoder,
        vectors: Callable[[int], Tensor],
        dead_after: int,
        judge: Callable[[], dict[str, float]] = dict,
    ):
        self.autoencoder, self.vectors = autoencoder, vectors
        self.dead_after, self.judge = dead_after, judge

    def batch(self, n: int) -> Tensor:
        """Vectors of batch n."""
        return self.vectors(n)

    def count(self, batch: Tensor) -> tuple[int, int]:
        """Number of vectors, of which all are read."""
        return len(batch), len(batch)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Summed loss of a batch."""
        return self.autoencoder.loss(batch, self.dead_after)[0] * len(batch)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Scores of the last step, the only one that is judged."""
        return {**self.judge(), "better": 0.0}


def learn(
    training: VectorTraining,
    folder: Path,
    *,
    steps: int,
    lr: float,
    seed: int = 1,
    save_every: float = 120.0,
    publish: Callable[[dict[str, Tensor], dict[str, float]], None] = lambda weights, scores: None,
    lost: bool = False,
    quiet: bool = True,
) -> Outcome:
    """Train an autoencoder in a folder, or go on where it stopped.

    It is judged once, at the end: how many features fire settles on the way, so that of two steps
    neither is the better dictionary.

    Args:
        training: the autoencoder and its vectors
        folder: for checkpoints and metrics
        steps: number of steps
        lr: peak learning rate
        seed: of the run
        save_every: seconds between checkpoints
        publish: saves weights
        lost: published weights are gone, and are published again from a checkpoint
        quiet: prints nothing
    """
    settings = LoopSettings(
        steps=steps,
        lr=lr,
        seed=seed,
        warmup=1 + steps // 50,
        schedule="trapezoid",
        weight_decay=0.0,
        beta2=0.999,
        clip=0.0,
        valid_every=steps,
        save_every=save_every,
    )
    return Fit(
        training.autoencoder,
        training,
        settings,
        folder,
        plans=[make_plan(settings)],
        publish=publish,
        lost=lost,
        quiet=quiet,
    ).run()
