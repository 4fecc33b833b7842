"""A variational autoencoder around any image encoder: a vector from which an image is painted."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from regard.errors import UsageError
from regard.layers.block import size_field
from regard.layers.shapes import Images
from regard.models.protocols import ImageEncoder
from regard.settings import setting

_COARSE = 8  # places to a side from which an image is painted, at most
_FEWEST_DOUBLINGS = 2
_MOST_WIDENED = 8  # times `width` that the coarsest grid has in channels, at most


@dataclass(frozen=True)
class VAEConfig:
    """The numbers in a latent vector, the weight of the divergence, and the decoder's width."""

    latent: int = size_field(24, 2**14, "width of the latent vector")
    beta: float = setting(1.0, "weight of the KL term", min=0, max=1000)
    width: int = size_field(
        32, 2**12, "channels before the pixels; twice as many on each grid above"
    )


class Rebuilt(NamedTuple):
    """Images as they were painted, and the distributions of the vectors they were painted from."""

    images: Images
    mean: Float[Tensor, "b latent"]
    log_variance: Float[Tensor, "b latent"]


class VAE(nn.Module):
    """An encoder, a narrow vector z ~ N(mean, variance), and a convolutional decoder.

    (Kingma and Welling 2014.) -log p(x | z) + beta KL(q(z | x) || N(0, 1)), where p is a Gaussian
    around the painted image whose deviation is learned. The encoder's vectors are read place by
    place, so images are of one size.
    """

    encoder: ImageEncoder

    def __init__(self, encoder: ImageEncoder, config: VAEConfig):
        super().__init__()
        self.encoder, self.config = encoder, config
        outer = encoder.config
        self.image = outer.image
        height, width = encoder.grid((outer.image, outer.image))
        places = getattr(outer, "tokens", 0) + height * width
        self.read = nn.Linear(places * encoder.out_width, 2 * config.latent)
        doublings = max(_FEWEST_DOUBLINGS, math.ceil(math.log2(max(1, outer.image / _COARSE))))
        self.side = -(-outer.image // 2**doublings)
        widths = [config.width * min(_MOST_WIDENED, 2**n) for n in reversed(range(doublings + 1))]
        self.unfold = nn.Linear(config.latent, widths[0] * self.side**2)
        self.grow = nn.ModuleList(
            nn.Conv2d(wide, narrow, 3, padding=1)
            for wide, narrow in zip(widths, widths[1:], strict=False)
        )
        self.paint = nn.Conv2d(widths[-1], outer.channels, 3, padding=1)
        self.log_deviation = nn.Parameter(torch.zeros(()))

    def encode(self, images: Images) -> tuple[Float[Tensor, "b latent"], Float[Tensor, "b latent"]]:
        """Mean and the log-variance of the vector of each image."""
        if images.shape[-2:] != (self.image, self.image):
            high, wide = images.shape[-2:]
            raise UsageError(
                f"images of {wide} x {high} pixels; this autoencoder reads {self.image} x "
                f"{self.image}"
            )
        mean, log_variance = self.read(self.encoder.features(images).flatten(1)).chunk(2, -1)
        return mean, log_variance.clamp(-20, 20)  # e^20: beyond this a step would be its last

    def decode(self, z: Float[Tensor, "b latent"]) -> Images:
        """Paint an image from each vector."""
        x = F.gelu(self.unfold(z)).unflatten(1, (-1, self.side, self.side))
        for layer in self.grow:
            x = F.gelu(layer(F.interpolate(x, scale_factor=2.0)))
        return self.paint(x)[..., : self.image, : self.image]

    def forward(self, images: Images, noise: Float[Tensor, "b latent"]) -> Rebuilt:
        """Paint images again from vectors that were drawn by some noise of variance 1."""
        mean, log_variance = self.encode(images)
        return Rebuilt(self.decode(mean + (log_variance / 2).exp() * noise), mean, log_variance)

    def loss(self, images: Images, noise: Float[Tensor, "b latent"]) -> Float[Tensor, ""]:
        """Sum over images of minus the evidence lower bound, a pixel's share of it."""
        rebuilt, mean, log_variance = self(images, noise)
        error = (rebuilt.float() - images).square().flatten(1).sum(1)
        pixels = images[0].numel()
        unlikely = error / 2 * (-2 * self.log_deviation).exp() + pixels * self.log_deviation
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum(-1) / 2
        return (unlikely + self.config.beta * divergence).sum() / pixels
