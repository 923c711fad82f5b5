"""Keras layers that draw the same on any number of replicas (`ddl.random`), and sums for layers."""

from ddl.layers.attention import MultiHeadAttention
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
from ddl.layers.recurrent import GRU, LSTM, SimpleRNN
from ddl.layers.replica_sum import sum_over_replicas
from ddl.layers.tokens import ClassToken, PositionEmbedding, TiedEmbedding

__all__ = [
    "GRU",
    "LSTM",
    "AlphaDropout",
    "ClassToken",
    "Cutout",
    "Dropout",
    "GaussianDropout",
    "GaussianNoise",
    "MultiHeadAttention",
    "PositionEmbedding",
    "RandomBrightness",
    "RandomContrast",
    "RandomFlip",
    "RandomShift",
    "SimpleRNN",
    "SpatialDropout1D",
    "SpatialDropout2D",
    "SpatialDropout3D",
    "TiedEmbedding",
    "sum_over_replicas",
]
