"""Learning by telling apart: SimCLR by two views of an image, CLIP by images and their captions."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from regard.layers.block import BlockConfig, size
from regard.layers.heads import Mean
from regard.layers.start import STARTS
from regard.models.bert import Bert, BertConfig


def info_nce(
    one: Float[Tensor, "b w"], other: Float[Tensor, "b w"], temperature: float
) -> Float[Tensor, ""]:
    """Return the summed InfoNCE of pairs of views: each finds its other among all of the batch.

    -log exp(z_i z_j / t) / sum over k other than i of exp(z_i z_k / t), for unit vectors z of both
    views, and the mean of both ways (Chen et al. 2020).
    """
    z = F.normalize(torch.cat([one, other]), dim=-1)
    near = (z @ z.mT / temperature).fill_diagonal_(-math.inf)
    wanted = torch.arange(len(z), device=z.device).roll(len(one))
    return F.cross_entropy(near, wanted, reduction="sum") / 2


def pooled_width(encoder: Any) -> int:
    """Return how wide the one vector is that an encoder makes of an image."""
    both = getattr(encoder.config, "pool", "") in ("both", "first_mean")
    return encoder.out_width * (2 if both else 1)


@dataclass(frozen=True)
class SimCLRConfig:
    """What stands between the encoder and the loss, and how sharp the loss is."""

    inner_width: int = size(512, 2**16)
    width: int = size(128, 2**16)
    temperature: float = field(default=0.2, metadata={"min": 0.001, "max": 100})


class SimCLR(nn.Module):
    """An encoder and a small network whose vectors of two views of an image are to be alike.

    The network is thrown away: what it no longer tells of an image, the encoder still knows.
    """

    def __init__(self, encoder: Any, config: SimCLRConfig):
        super().__init__()
        self.encoder, self.config = encoder, config
        inner = config.inner_width
        self.project = nn.Sequential(
            nn.Linear(pooled_width(encoder), inner, bias=False),
            # by the batch at hand, always: nothing is remembered that a checkpoint would lose
            nn.BatchNorm1d(inner, track_running_stats=False),
            nn.ReLU(),
            nn.Linear(inner, config.width),
        )

    def features(self, images: Float[Tensor, "b c y x"]) -> Float[Tensor, "b w"]:
        """Return one vector of each image."""
        return self.encoder(images)

    def forward(self, images: Float[Tensor, "b c y x"]) -> Float[Tensor, "b w"]:
        """Return the vectors that are compared."""
        return self.project(self.features(images))

    def loss(
        self, one: Float[Tensor, "b c y x"], other: Float[Tensor, "b c y x"]
    ) -> Float[Tensor, ""]:
        """Return the summed InfoNCE of two views of the same images."""
        first, second = self(torch.cat([one, other])).float().chunk(2)
        return info_nce(first, second, self.config.temperature)


@dataclass(frozen=True)
class CLIPConfig:
    """The encoder of texts, the width in which both meet, and how sharp the loss is at first."""

    text: BertConfig = field(
        default_factory=lambda: BertConfig(
            vocab=4000,
            depth=2,
            block=BlockConfig(128, 2, 512, feed_forward="gelu"),
            max_length=64,
            types=0,
            embed_norm="none",
            head="none",
        )
    )
    width: int = size(128, 2**16)
    temperature: float = field(default=0.07, metadata={"min": 0.001, "max": 100})


class CLIP(nn.Module):
    """An encoder of images and one of texts whose vectors meet (Radford et al. 2021).

    How sharply they are compared is learned, as the logarithm of a factor.
    """

    SHARPEST = math.log(100)

    def __init__(self, encoder: Any, config: CLIPConfig):
        super().__init__()
        self.encoder, self.config = encoder, config
        self.text = Bert(config.text)
        self.pool = Mean()
        self.image_out = nn.Linear(pooled_width(encoder), config.width, bias=False)
        self.text_out = nn.Linear(config.text.block.width, config.width, bias=False)
        self.sharpness = nn.Parameter(torch.full((), -math.log(config.temperature)))
        for part in (self.image_out, self.text_out):
            STARTS["glorot"](part)

    def features(self, images: Float[Tensor, "b c y x"]) -> Float[Tensor, "b w"]:
        """Return one vector of each image."""
        return self.encoder(images)

    def images(self, images: Float[Tensor, "b c y x"]) -> Float[Tensor, "b v"]:
        """Return the unit vectors of images where they meet texts."""
        return F.normalize(self.image_out(self.features(images)).float(), dim=-1)

    def texts(
        self, ids: Int[Tensor, "b l"], lengths: Int[Tensor, " b"] | None = None
    ) -> Float[Tensor, "b v"]:
        """Return the unit vectors of texts where they meet images."""
        pooled = self.pool(self.text.hidden(ids, lengths), lengths)
        return F.normalize(self.text_out(pooled).float(), dim=-1)

    def compare(
        self, images: Float[Tensor, "m v"], texts: Float[Tensor, "n v"]
    ) -> Float[Tensor, "m n"]:
        """Return how well each image and each text go together, as logits."""
        return self.sharpness.clamp(max=self.SHARPEST).exp() * images @ texts.mT

    def loss(
        self,
        images: Float[Tensor, "b c y x"],
        ids: Int[Tensor, "b l"],
        lengths: Int[Tensor, " b"],
    ) -> Float[Tensor, ""]:
        """Return the summed loss of finding the text of each image, and the image of each text."""
        near = self.compare(self.images(images), self.texts(ids, lengths))
        wanted = torch.arange(len(near), device=near.device)
        found = F.cross_entropy(near, wanted, reduction="sum")
        return (found + F.cross_entropy(near.mT, wanted, reduction="sum")) / 2
