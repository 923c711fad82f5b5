"""Layers that Keras lacks, or that it computes per replica, and sums for layers."""

from ddl.layers.lookups import look_up
from ddl.layers.partitioned import PartitionedEmbedding
from ddl.layers.replica_sum import sum_over_replicas
from ddl.layers.tokens import ClassToken, PositionEmbedding, TiedEmbedding
from ddl.layers.transforms.augmentation import RandomShift
from ddl.layers.transforms.mixing import CutMix, Mixed, Mixup
from ddl.layers.transforms.random_resized_crop import RandomResizedCrop
from ddl.layers.transforms.token_masking import MaskedTokens, TokenMasking

__all__ = [
    "ClassToken",
    "CutMix",
    "MaskedTokens",
    "Mixed",
    "Mixup",
    "PartitionedEmbedding",
    "PositionEmbedding",
    "RandomResizedCrop",
    "RandomShift",
    "TiedEmbedding",
    "TokenMasking",
    "look_up",
    "sum_over_replicas",
]
