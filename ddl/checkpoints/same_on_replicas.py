"""Check that a task's own variables are the same on all replicas: a checkpoint holds one copy."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from ddl.distribution.workers import Workers
from ddl.errors import ConfigError
from ddl.step.moving_statistics import differ, gather_copies
from ddl.tasks.parts import copies_of, layers_of, own_items_of, own_variables_of
from ddl.tasks.task import Task


class ReplicasDifferError(ConfigError):
    """A variable of the task has other values on other replicas."""


def check_same_on_replicas(task: Task, strategy: tf.distribute.Strategy, workers: Workers) -> None:
    """Compares the copies of a task's own variables. Eager, cross-replica, on all workers.

    Variables that are read together (`tf.VariableSynchronization.ON_READ`) and states of
    `tf.random.Generator` may differ.

    Args:
      task: The task.
      strategy: The strategy.
      workers: The workers of the strategy.

    Raises:
      ReplicasDifferError: If the copies of a variable differ; on all workers.
    """
    if strategy.num_replicas_in_sync == 1:
        return
    variables = [v for v in _variables(task) if strategy.extended.variable_created_in_scope(v)]
    everywhere = gather_copies([copies_of(v) for v in variables], workers)
    for variable, values in zip(variables, everywhere, strict=True):
        if _differ(values):
            name = variable.name.split(":")[0]
            raise ReplicasDifferError(
                f"The variable {name!r} of {type(task).__name__} has other values on other "
                f"replicas, of which a checkpoint would hold those of the first: "
                f"{', '.join(_text(value) for value in values[:4])}. A loss, which sees the rows "
                "of its replica alone, has assigned to it. Assign in a method step(update, batch), "
                "such as self.variable.assign(update.mean(self.function, batch)); or make the "
                "variable with aggregation=tf.VariableAggregation.MEAN."
            )


def _variables(task: Task) -> list[tf.Variable]:
    generators = [x for x in own_items_of(task) if isinstance(x, tf.random.Generator)]
    states = {id(generator.state) for generator in generators}
    return [
        variable
        for variable in own_variables_of(task, layers_of(task))
        if (variable.dtype.is_floating or variable.dtype.is_integer or variable.dtype.is_bool)
        and variable.synchronization != tf.VariableSynchronization.ON_READ
        and id(variable) not in states
    ]


def _differ(values: Sequence[np.ndarray]) -> bool:
    """Returns whether any value differs from the first; NaN equals NaN."""
    known = [value == value for value in values]
    return differ(known) or differ(
        [np.where(at, value, 0) for at, value in zip(known, values, strict=True)]
    )


def _text(value: np.ndarray) -> str:
    return f"{value.ravel()[:3].tolist()}{'' if value.size <= 3 else ' …'}"
