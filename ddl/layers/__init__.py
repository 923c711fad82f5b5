"""Keras layers that draw the same on any number of replicas (`ddl.random`), and sums for layers."""

from ddl.layers.augmentation import (
    Cutout,
    RandomBrightness,
    RandomContrast,
    RandomFlip,
    RandomShift,
)
from ddl.layers.dropout_and_noise import (
    AlphaDropout,
    Dropout,
    GaussianDropout,
    GaussianNoise,
    SpatialDropout1D,
    SpatialDropout2D,
    SpatialDropout3D,
)
from ddl.layers.replica_sum import sum_over_replicas

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
    "sum_over_replicas",
]
