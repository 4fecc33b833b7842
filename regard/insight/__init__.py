"""What a trained model does and why: causes, heads with names, features, directions."""

from regard.insight.autoencoder import SparseAutoencoder
from regard.insight.causes import Attending, Cuts, attending, measure, per_copy
from regard.insight.heads import HeadsSettings, MeasuredData, inputs_of
from regard.insight.lens import residual_stream

__all__ = [
    "Attending",
    "Cuts",
    "HeadsSettings",
    "MeasuredData",
    "SparseAutoencoder",
    "attending",
    "inputs_of",
    "measure",
    "per_copy",
    "residual_stream",
]
