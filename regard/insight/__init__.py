"""What a trained model does and why: causes, heads with names, features, directions."""

from regard.insight.autoencoder import SparseAutoencoder
from regard.insight.causes import Attending, Cuts, attending, measure, per_copy
from regard.insight.heads import HeadsSettings, MeasuredData, inputs_of
from regard.insight.lens import residual_stream
from regard.insight.receptive import (
    Liking,
    SeenImages,
    chosen_layers,
    encoder_of,
    favourites,
    fields,
    held_in,
    pull,
    seen_images,
)

__all__ = [
    "Attending",
    "Cuts",
    "HeadsSettings",
    "Liking",
    "MeasuredData",
    "SeenImages",
    "SparseAutoencoder",
    "attending",
    "chosen_layers",
    "encoder_of",
    "favourites",
    "fields",
    "held_in",
    "inputs_of",
    "measure",
    "per_copy",
    "pull",
    "residual_stream",
    "seen_images",
]
