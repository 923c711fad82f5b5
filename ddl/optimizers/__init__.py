"""Optimizers and schedules that Keras lacks, and parameter groups. Keras's own need no change."""

from ddl.optimizers.groups import Group, ParameterGroups
from ddl.optimizers.large_batch import LAMB, LARS, MomentumSGD
from ddl.optimizers.learning_rate import LearningRate
from ddl.optimizers.schedules import StepDecay
from ddl.optimizers.variables import exclude_from_weight_decay

__all__ = ["LAMB", "LARS", "Group", "LearningRate", "MomentumSGD", "ParameterGroups"]
__all__ += ["StepDecay", "exclude_from_weight_decay"]
