"""Optimizers that Keras lacks, and faster versions of Keras's own."""

from ddl.optimizers.exclusions import exclude_from_weight_decay
from ddl.optimizers.fused_adam import FusedAdam, FusedAdamW
from ddl.optimizers.fused_rmsprop import FusedAdagrad, FusedRMSprop
from ddl.optimizers.fused_sgd import FusedSGD, MomentumSGD
from ddl.optimizers.groups import Group, ParameterGroups
from ddl.optimizers.layerwise import LAMB, LARS

__all__ = [
    "LAMB",
    "LARS",
    "FusedAdagrad",
    "FusedAdam",
    "FusedAdamW",
    "FusedRMSprop",
    "FusedSGD",
    "Group",
    "MomentumSGD",
    "ParameterGroups",
    "exclude_from_weight_decay",
]
