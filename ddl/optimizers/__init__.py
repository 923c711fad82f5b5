"""Optimizers that Keras lacks, or has in a slower form."""

from ddl.optimizers.exclusions import exclude_from_weight_decay
from ddl.optimizers.layerwise import LAMB, LARS
from ddl.optimizers.momentum import MomentumSGD

__all__ = ["LAMB", "LARS", "MomentumSGD", "exclude_from_weight_decay"]
