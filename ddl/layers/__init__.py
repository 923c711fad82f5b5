"""Keras layers that draw the same on any number of replicas (`ddl.random`), and sums for layers."""

from ddl.layers.attention import MultiHeadAttention
from ddl.layers.dropout_and_noise import (
    AlphaDropout,
    Dropout,
    GaussianDropout,
    GaussianNoise,
    SpatialDropout1D,
    SpatialDropout2D,
    SpatialDropout3D,
)
from ddl.layers.lookups import look_up
from ddl.layers.partitioned import PartitionedEmbedding
from ddl.layers.recurrent import GRU, LSTM, SimpleRNN
from ddl.layers.replica_sum import sum_over_replicas
from ddl.layers.tokens import ClassToken, PositionEmbedding, TiedEmbedding
from ddl.layers.transforms.augmentation import (
    Cutout,
    RandomBrightness,
    RandomContrast,
    RandomFlip,
    RandomShift,
)
from ddl.layers.transforms.color_jitter import ColorJitter
from ddl.layers.transforms.mixing import CutMix, Mixed, Mixup
from ddl.layers.transforms.rand_augment import RandAugment
from ddl.layers.transforms.random_resized_crop import RandomResizedCrop
from ddl.layers.transforms.token_masking import MaskedTokens, TokenMasking

__all__ = [
    "GRU",
    "LSTM",
    "AlphaDropout",
    "ClassToken",
    "ColorJitter",
    "CutMix",
    "Cutout",
    "Dropout",
    "GaussianDropout",
    "GaussianNoise",
    "MaskedTokens",
    "Mixed",
    "Mixup",
    "MultiHeadAttention",
    "PartitionedEmbedding",
    "PositionEmbedding",
    "RandAugment",
    "RandomBrightness",
    "RandomContrast",
    "RandomFlip",
    "RandomResizedCrop",
    "RandomShift",
    "SimpleRNN",
    "SpatialDropout1D",
    "SpatialDropout2D",
    "SpatialDropout3D",
    "TiedEmbedding",
    "TokenMasking",
    "look_up",
    "sum_over_replicas",
]
