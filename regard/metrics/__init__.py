"""Scores of every task, each with its signature, one paired bootstrap and one interval."""

from regard.metrics.image import noisy, psnr, ssim
from regard.metrics.results import Named, markdown

__all__ = ["Named", "markdown", "noisy", "psnr", "ssim"]
