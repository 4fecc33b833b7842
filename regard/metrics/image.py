"""Image quality: PSNR and SSIM."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from regard.errors import UsageError
from regard.filters.gaussian import gaussian
from regard.filters.pixels import planes

_SIGMA, _SIDE = 1.5, 11  # of the Gaussian window of SSIM, in pixels


def psnr(image: Float[Tensor, "*b c h w"], clean: Float[Tensor, "*b c h w"]) -> float:
    """Peak signal-to-noise ratio in dB, for values from 0 to 1."""
    _same(image, clean)
    error = float((image.double() - clean.double()).square().mean())
    return -10 * math.log10(error) if error else math.inf


def ssim(image: Float[Tensor, "*b c h w"], clean: Float[Tensor, "*b c h w"]) -> float:
    """Mean structural similarity (Wang et al. 2004), for values from 0 to 1.

    Gaussian window of 11 x 11; the outermost pixels, whose windows are not whole, are left out.
    """
    _same(image, clean)
    x, y = planes(image).double(), planes(clean).double()

    def mean(x: Tensor) -> Tensor:
        return gaussian(x, sigma=_SIGMA, window=_SIDE, border="mirror")

    mean_x, mean_y = mean(x), mean(y)
    var_x, var_y = mean(x * x) - mean_x**2, mean(y * y) - mean_y**2
    covariance = mean(x * y) - mean_x * mean_y
    c1, c2 = 0.01**2, 0.03**2
    similarity = (2 * mean_x * mean_y + c1) * (2 * covariance + c2)
    similarity = similarity / ((mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2))
    for dim in (-2, -1):
        edge = _SIDE // 2 if similarity.shape[dim] >= _SIDE else 0
        similarity = similarity.narrow(dim, edge, similarity.shape[dim] - 2 * edge)
    return float(similarity.mean())


def _same(image: Tensor, clean: Tensor) -> None:
    if image.shape != clean.shape:
        raise UsageError(
            f"images of {tuple(image.shape)} and {tuple(clean.shape)}; expected the same shape"
        )


def noisy(image: Tensor, sigma: float, seed: int = 0) -> Tensor:
    """Add Gaussian noise of standard deviation sigma, for values from 0 to 1, without clipping."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(image.shape, generator=generator, dtype=torch.float64)
    return image + sigma * noise.to(image)
