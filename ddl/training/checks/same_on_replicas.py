"""Check that variables are the same on all replicas: a checkpoint holds one copy of each."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from ddl.distribution.workers import Workers
from ddl.errors import ConfigError
from ddl.layers.normalization import has_global_moments
from ddl.step.moving_statistics import Statistics
from ddl.tasks.parts import copies_of, layers_of, own_items_of, own_variables_of
from ddl.tasks.task import Task


class ReplicasDifferError(ConfigError):
    """A variable of the task or of a layer has other values on other replicas."""


def check_same_on_replicas(task: Task, strategy: tf.distribute.Strategy) -> None:
    """Compares the copies of the variables that losses and layers write.

    Variables that are read together (`tf.VariableSynchronization.ON_READ`) and states of
    `tf.random.Generator` may differ. Eager, cross-replica context, on all workers.

    Raises:
      ReplicasDifferError: If the copies of a variable differ; on all workers.
    """
    if strategy.num_replicas_in_sync == 1:
        return
    variables = [v for v in _variables(task, strategy) if _is_compared(v, strategy)]
    everywhere = _gathered(list(map(copies_of, variables)), Workers(strategy))
    for variable, values in zip(variables, everywhere, strict=True):
        if _differ(values):
            name = variable.name.split(":")[0]
            raise ReplicasDifferError(
                f"The variable {name!r} of {type(task).__name__} has other values on other "
                f"replicas, of which a checkpoint would hold those of the first: "
                f"{', '.join(_text(value) for value in values[:4])}. A layer or a loss, which sees "
                "the rows of its replica alone, has assigned to it. In a layer, assign what "
                "ddl.layers.sum_over_replicas returns. For a loss, assign in a method "
                "step(update, batch), such as self.variable.assign(update.mean(self.function, "
                "batch)). Or make the variable with aggregation=tf.VariableAggregation.MEAN."
            )


def _variables(task: Task, strategy: tf.distribute.Strategy) -> list[tf.Variable]:
    generators = [x for x in own_items_of(task) if isinstance(x, tf.random.Generator)]
    states = {id(generator.state) for generator in generators}
    layers = layers_of(task)
    # Moments over all replicas may differ by their rounding on processors of several kinds.
    others = [layer for layer in layers if not has_global_moments(layer)]
    own = [v for v in own_variables_of(task, layers) if id(v) not in states]
    return own + Statistics(others, strategy).variables


def _is_compared(variable: tf.Variable, strategy: tf.distribute.Strategy) -> bool:
    dtype = variable.dtype
    return (
        (dtype.is_floating or dtype.is_integer or dtype.is_bool)
        and variable.synchronization != tf.VariableSynchronization.ON_READ
        and strategy.extended.variable_created_in_scope(variable)
    )


def _gathered(
    all_copies: Sequence[Sequence[tf.Variable]], workers: Workers
) -> list[list[np.ndarray]]:
    """Returns for each variable the values of all replicas of all workers, on the host."""
    own = [[copy.numpy() for copy in copies] for copies in all_copies]
    if workers.number == 1 or not own:
        return own
    # One message for all values. float64 represents the values of the narrower floats exactly.
    flat = [np.reshape(value, -1).astype(np.float64) for values in own for value in values]
    rows = workers.gather(np.concatenate(flat))
    ends = np.cumsum([len(part) for part in flat])[:-1]
    parts = iter(np.split(rows, ends, axis=1))
    return [[row for _ in values for row in next(parts)] for values in own]


def _differ(values: Sequence[np.ndarray]) -> bool:
    """Returns whether any value differs from the first, all of one shape; NaN equals NaN."""
    return not all(np.array_equal(value, values[0], equal_nan=True) for value in values)


def _text(value: np.ndarray) -> str:
    return f"{value.ravel()[:3].tolist()}{'' if value.size <= 3 else ' …'}"
