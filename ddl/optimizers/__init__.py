"""Optimizers that Keras lacks, and parameter groups. Keras's own are used as they are."""

from ddl.optimizers.groups import Group, ParameterGroups
from ddl.optimizers.large_batch import LAMB, LARS, MomentumSGD
from ddl.optimizers.variables import exclude_from_weight_decay

__all__ = ["LAMB", "LARS", "Group", "MomentumSGD", "ParameterGroups", "exclude_from_weight_decay"]
