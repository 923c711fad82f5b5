"""Planning of a task's own step by a trace that computes no gradients and changes nothing.

The trace finds the losses, the variables that each optimizer updates, and whether an update can
check all gradients before its first change. Its plan defines the optimizer slots and the metric
sums.
"""

from ddl.step.verbs.planning.trace import plan_step

__all__ = ["plan_step"]
