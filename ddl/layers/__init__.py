"""Keras layers that draw the same on any number of replicas (`ddl.random`), and sums for layers."""

from ddl.layers.augmentation import (
    Cutout,
    RandomBrightness,
    RandomContrast,
    RandomFlip,
    RandomShift,
)
from ddl.layers.color_jitter import ColorJitter
from ddl.layers.dropout_and_noise import (
    AlphaDropout,
    Dropout,
    GaussianDropout,
    GaussianNoise,
    SpatialDropout1D,
    SpatialDropout2D,
    SpatialDropout3D,
)
from ddl.layers.mixing import CutMix, Mixed, Mixup
from ddl.layers.rand_augment import RandAugment
from ddl.layers.random_resized_crop import RandomResizedCrop
from ddl.layers.replica_sum import sum_over_replicas
from ddl.layers.token_masking import MaskedTokens, TokenMasking

__all__ = [
    "AlphaDropout",
    "ColorJitter",
    "CutMix",
    "Cutout",
    "Dropout",
    "GaussianDropout",
    "GaussianNoise",
    "MaskedTokens",
    "Mixed",
    "Mixup",
    "RandAugment",
    "RandomBrightness",
    "RandomContrast",
    "RandomFlip",
    "RandomResizedCrop",
    "RandomShift",
    "SpatialDropout1D",
    "SpatialDropout2D",
    "SpatialDropout3D",
    "TokenMasking",
    "sum_over_replicas",
]
