"""Keras layers whose random draws are the same on any number of replicas (`ddl.random`)."""

from ddl.layers.augmentation import (
    Cutout,
    RandomBrightness,
    RandomContrast,
    RandomFlip,
    RandomShift,
)
from ddl.layers.regularization import (
    AlphaDropout,
    Dropout,
    GaussianDropout,
    GaussianNoise,
    SpatialDropout1D,
    SpatialDropout2D,
    SpatialDropout3D,
)

__all__ = [
    "AlphaDropout",
    "Cutout",
    "Dropout",
    "GaussianDropout",
    "GaussianNoise",
    "RandomBrightness",
    "RandomContrast",
    "RandomFlip",
    "RandomShift",
    "SpatialDropout1D",
    "SpatialDropout2D",
    "SpatialDropout3D",
]
