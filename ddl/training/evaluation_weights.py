"""The weights for evaluation, export and saving: one set of values for all replicas."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import tensorflow as tf

from ddl.distribution.workers import Workers
from ddl.errors import ConfigError
from ddl.step.moving_statistics import Statistics, synchronized
from ddl.step.weight_average import WeightAverages


class EvaluationWeights:
    """Gives the model one set of weights for all replicas within a `with` block.

    In training, statistics may be replica-local (in layers that are not synchronized), and the
    trainer may keep an average of the weights. An evaluation never changes the run.

    Attributes:
      replica_statistics: For each variable that may differ between replicas, the copy of each
        replica of this worker.
    """

    def __init__(
        self,
        averages: WeightAverages | None,
        statistics: Statistics,
        strategy: tf.distribute.Strategy,
    ):
        """Keeps the arguments; changes no variable.

        Args:
          averages: The averages that the trainer keeps, if any.
          statistics: The statistics of the layers.
          strategy: The strategy.
        """
        self._averages = averages
        variables = statistics.floating
        if averages is not None:
            variables = variables + averages.of(variables)
        self.replica_statistics: list[Sequence[tf.Variable]] = [
            strategy.experimental_local_results(variable) for variable in variables
        ]
        self._workers = Workers(strategy)
        self._blocks = 0
        self._restoring = ExitStack()

    @contextmanager
    def applied(self, averaged: bool = True) -> Iterator[None]:
        """Assigns the weights for evaluation within the `with` block.

        Statistics become their means over the replicas; weights become their averages, if kept and
        if `averaged` is True. Afterwards all values are restored bit for bit. A nested block
        changes nothing. Blocks of generators may end in any order: the last one that ends restores
        the values. Eager, cross-replica context, on all workers.
        """
        if not self._blocks:
            with ExitStack() as stack:
                stack.enter_context(synchronized(self.replica_statistics, self._workers))
                if averaged and self._averages is not None:
                    stack.enter_context(self._averages.applied())
                self._restoring = stack.pop_all()
        self._blocks += 1
        try:
            yield
        finally:
            self._blocks -= 1
            if not self._blocks:
                self._restoring.close()

    def check_not_applied(self) -> None:
        """Raises ConfigError within `applied`."""
        if self._blocks:
            raise ConfigError(
                "The model holds the evaluation weights. Leave the evaluation_weights() block, and "
                "read the iterators of predict_batches to their end or close() them, before "
                "training, saving or restoring."
            )
