"""The weights that a schedule-free optimizer evaluates.

Defazio et al. 2024, "The road less scheduled": gradients are computed at y = (1 - β)·z + β·x, where
z takes the plain steps and x is their average. The model holds y, and the optimizer holds z.
Evaluations and exports need x.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from ddl.errors import ConfigError
from ddl.optimizers.schedule_free import AdamWScheduleFree
from ddl.step.moving_statistics import restoring


class ScheduleFreeWeights:
    """The averages x of all variables that schedule-free optimizers update.

    Attributes:
      variables: The optimizers' z, one for each variable, which a checkpoint for evaluation needs.
    """

    def __init__(
        self,
        optimizers: Sequence[AdamWScheduleFree],
        variables: Sequence[Sequence[keras.Variable]],
        strategy: tf.distribute.Strategy,
    ):
        """Keeps the arguments; changes no variable.

        Args:
          optimizers: Built optimizers.
          variables: The variables that each updates.
          strategy: The strategy.
        """
        self._strategy = strategy
        self._triples: list[tuple[tf.Variable, tf.Variable, float]] = []
        for optimizer, own in zip(optimizers, variables, strict=True):
            for variable in own:
                z = optimizer._momentums[optimizer._get_variable_index(variable)]
                self._triples.append((variable.value, z.value, optimizer.beta_1))
        self.variables = [z for _, z, _ in self._triples]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Assigns x to the model within the `with` block; restores y bit for bit after it.

        Eager, cross-replica context.
        """
        with restoring(copy for weight, _, _ in self._triples for copy in self._copies(weight)):
            for weight, z, beta in self._triples:
                for copy, own in zip(self._copies(weight), self._copies(z), strict=True):
                    copy.assign((copy - (1 - beta) * own) / beta)
            yield

    def reset(self) -> None:
        """Sets z to the present weights, as before the first update. Eager, cross-replica."""
        for weight, z, _ in self._triples:
            for copy, value in zip(self._copies(z), self._copies(weight), strict=True):
                copy.assign(value)

    def _copies(self, variable: Any) -> tuple[tf.Variable, ...]:
        """Returns the copy of each replica of this worker."""
        return self._strategy.experimental_local_results(variable)


def schedule_free_weights(
    optimizers: Mapping[str, keras.optimizers.Optimizer],
    variables: Mapping[str, Sequence[keras.Variable]],
    strategy: tf.distribute.Strategy,
    *,
    averages: bool,
    averaged: Sequence[tf.Variable],
    statistics: bool,
) -> ScheduleFreeWeights | None:
    """Returns the weights of the schedule-free optimizers; None if there are none.

    Args:
      optimizers: All optimizers by name, built.
      variables: The variables of each optimizer, by its name.
      strategy: The strategy.
      averages: Whether the trainer keeps an average of the weights, too.
      averaged: Variables that a step changes by `update.average`.
      statistics: Whether layers have moving statistics, such as BatchNormalization.

    Raises:
      ConfigError: If `averages` is True although an optimizer is schedule-free, or if something
        else changes a variable of a schedule-free optimizer, so that x would be no average.
    """
    own = {n: one for n, one in optimizers.items() if isinstance(one, AdamWScheduleFree)}
    if not own:
        return None
    for name in own:
        for variable in variables[name]:
            if variable.constraint is not None:
                raise ConfigError(
                    f"{variable.path} has a constraint, which changes the weights after the "
                    "schedule-free optimizer, so that their average is not defined. Remove the "
                    "constraint, or use another optimizer."
                )
            if others := [n for n in optimizers if n != name and _has(variables[n], variable)]:
                raise ConfigError(
                    f"{variable.path} is updated by a schedule-free optimizer and by "
                    f"{', '.join(others)}, so that its average is not defined. Let one optimizer "
                    "update it."
                )
            if any(v is variable.value for v in averaged):
                raise ConfigError(
                    f"{variable.path} is updated by a schedule-free optimizer and changed by "
                    "update.average, so that its average is not defined. Leave one of them out."
                )
    if averages:
        raise ConfigError(
            "A schedule-free optimizer averages the weights itself, and evaluations use its "
            "average. Remove Trainer.weight_average, or use another optimizer."
        )
    if statistics:
        logging.warning(
            "Moving statistics, such as those of BatchNormalization, belong to the weights at "
            "which a schedule-free optimizer computes gradients, but evaluations use its averaged "
            "weights. Layers without moving statistics, such as GroupNormalization, avoid this."
        )
    return ScheduleFreeWeights(list(own.values()), [variables[name] for name in own], strategy)


def _has(variables: Sequence[keras.Variable], variable: keras.Variable) -> bool:
    return any(v is variable for v in variables)
