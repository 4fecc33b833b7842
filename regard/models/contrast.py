"""Contrastive learning: SimCLR of two views of an image, CLIP of images and their captions."""

import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from regard.layers.block import BlockConfig, size_field
from regard.layers.heads import Mean
from regard.layers.init import INITS
from regard.layers.shapes import Ids, Images, Lengths
from regard.models.bert import Bert, BertConfig
from regard.models.protocols import ImageEncoder
from regard.settings import setting


def info_nce(
    one: Float[Tensor, "b w"], other: Float[Tensor, "b w"], temperature: float
) -> Float[Tensor, ""]:
    """Summed InfoNCE of pairs of views, all others of the batch being negatives.

    -log exp(z_i z_j / t) / sum over k other than i of exp(z_i z_k / t), for unit vectors z of both
    views, and the mean of both ways (Chen et al. 2020).
    """
    z = F.normalize(torch.cat([one, other]), dim=-1)
    near = (z @ z.mT / temperature).fill_diagonal_(-math.inf)
    targets = torch.arange(len(z), device=z.device).roll(len(one))
    return F.cross_entropy(near, targets, reduction="sum") / 2


@dataclass(frozen=True)
class SimCLRConfig:
    """The projection head between the encoder and the loss, and its temperature."""

    inner_width: int = size_field(512, 2**16, "hidden width of the projection")
    width: int = size_field(128, 2**16, "width of the projection")
    temperature: float = setting(0.2, "temperature of the contrastive loss", min=0.001, max=100)


class SimCLR(nn.Module):
    """An encoder and a projection head, trained to agree on two views of an image.

    (Chen et al. 2020.) The projection head is thrown away after training.
    """

    encoder: ImageEncoder

    def __init__(self, encoder: ImageEncoder, config: SimCLRConfig):
        super().__init__()
        self.encoder, self.config = encoder, config
        inner = config.inner_width
        self.project = nn.Sequential(
            nn.Linear(encoder.pooled_width, inner, bias=False),
            # by the batch at hand, always: it is thrown away after training
            nn.BatchNorm1d(inner, track_running_stats=False),
            nn.ReLU(),
            nn.Linear(inner, config.width),
        )

    def features(self, images: Images) -> Float[Tensor, "b w"]:
        """One vector of each image."""
        return self.encoder(images)

    def forward(self, images: Images) -> Float[Tensor, "b w"]:
        """Vectors that are compared."""
        return self.project(self.features(images))

    def loss(self, one: Images, other: Images) -> Float[Tensor, ""]:
        """Summed InfoNCE of two views of the same images."""
        first, second = self(torch.cat([one, other])).float().chunk(2)
        return info_nce(first, second, self.config.temperature)


@dataclass(frozen=True)
class ImageTextConfig:
    """The text encoder, the width of the joint space, and the first temperature."""

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
    width: int = size_field(128, 2**16, "width of the common space")
    temperature: float = setting(
        0.07, "initial temperature of the contrastive loss", min=0.001, max=100
    )


class ImageTextContrast(nn.Module):
    """CLIP around any image encoder: a text encoder and a joint space (Radford et al. 2021).

    The inverse temperature is learned, as its logarithm.
    """

    SHARPEST = math.log(100)

    encoder: ImageEncoder

    def __init__(self, encoder: ImageEncoder, config: ImageTextConfig):
        super().__init__()
        self.encoder, self.config = encoder, config
        self.text = Bert(config.text)
        self.pool = Mean()
        self.image_out = nn.Linear(encoder.pooled_width, config.width, bias=False)
        self.text_out = nn.Linear(config.text.block.width, config.width, bias=False)
        self.sharpness = nn.Parameter(torch.full((), -math.log(config.temperature)))
        for part in (self.image_out, self.text_out):
            INITS["glorot"](part)

    def features(self, images: Images) -> Float[Tensor, "b w"]:
        """One vector of each image."""
        return self.encoder(images)

    def images(self, images: Images) -> Float[Tensor, "b v"]:
        """Unit vectors of images in the joint space."""
        return F.normalize(self.image_out(self.features(images)).float(), dim=-1)

    def texts(self, ids: Ids, lengths: Lengths | None = None) -> Float[Tensor, "b v"]:
        """Unit vectors of texts in the joint space."""
        pooled = self.pool(self.text.hidden(ids, lengths), lengths)
        return F.normalize(self.text_out(pooled).float(), dim=-1)

    def compare(
        self, images: Float[Tensor, "m v"], texts: Float[Tensor, "n v"]
    ) -> Float[Tensor, "m n"]:
        """Similarities of images and texts, as logits."""
        return self.sharpness.clamp(max=self.SHARPEST).exp() * images @ texts.mT

    def loss(self, images: Images, ids: Ids, lengths: Lengths) -> Float[Tensor, ""]:
        """Summed loss of finding the text of each image, and the image of each text."""
        near = self.compare(self.images(images), self.texts(ids, lengths))
        targets = torch.arange(len(near), device=near.device)
        texts = F.cross_entropy(near, targets, reduction="sum")
        return (texts + F.cross_entropy(near.mT, targets, reduction="sum")) / 2
