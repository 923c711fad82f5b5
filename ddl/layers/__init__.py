"""Layers that Keras lacks, or that it computes per replica, and sums for layers."""

from ddl.layers.across_replicas import sum_over_replicas
from ddl.layers.images import CutMix, Mixed, Mixup, RandomResizedCrop, RandomShift
from ddl.layers.lookups import look_up
from ddl.layers.tokens import (
    MaskedTokens,
    PositionEmbedding,
    TiedEmbedding,
    TokenMasking,
)

__all__ = ["CutMix", "MaskedTokens", "Mixed", "Mixup", "PositionEmbedding"]
__all__ += ["RandomResizedCrop", "RandomShift", "TiedEmbedding", "TokenMasking", "look_up"]
__all__ += ["sum_over_replicas"]
