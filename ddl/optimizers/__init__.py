"""Optimizers that Keras lacks, and parameter groups. Keras's own are used as they are."""

from ddl.optimizers.exclusions import exclude_from_weight_decay
from ddl.optimizers.groups import Group, ParameterGroups
from ddl.optimizers.layerwise import LAMB, LARS
from ddl.optimizers.momentum import MomentumSGD

__all__ = ["LAMB", "LARS", "Group", "MomentumSGD", "ParameterGroups", "exclude_from_weight_decay"]
