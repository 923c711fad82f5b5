"""The weights that are evaluated, exported and saved, as one model has them on any strategy."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import tensorflow as tf

from ddl.errors import ConfigError
from ddl.statistics import Statistics, synchronized
from ddl.weight_average import WeightAverages
from ddl.workers import Workers


class EvaluationWeights:
    """Gives the model, for a while, what stands for all replicas; looking never changes a run.

    In training each replica may hold statistics of its own (of layers that are not synchronized),
    and an average may be kept beside the weights.
    """

    def __init__(
        self,
        averages: WeightAverages | None,
        statistics: Statistics,
        strategy: tf.distribute.Strategy,
    ):
        """Takes them; changes nothing."""
        self._averages = averages
        variables = statistics.floating
        if averages is not None:
            variables = variables + averages.of(variables)
        self.replica_statistics: list[Sequence[tf.Variable]] = [
            strategy.experimental_local_results(variable) for variable in variables
        ]
        """For each variable in which replicas may differ, the copy of each of this worker's."""
        self._workers = Workers(strategy)
        self._are_applied = False

    @contextmanager
    def applied(self, averaged: bool = True) -> Iterator[None]:
        """The averages, where any are kept and wanted, and statistics that are means over replicas.

        All values come back to the bit afterwards. Within another such block this one changes
        nothing. Eager, cross-replica context, on all workers.
        """
        if self._are_applied:
            yield
            return
        self._are_applied = True
        try:
            with synchronized(self.replica_statistics, self._workers):
                if averaged and self._averages is not None:
                    with self._averages.applied():
                        yield
                else:
                    yield
        finally:
            self._are_applied = False

    def check_not_applied(self) -> None:
        """Raises ConfigError within `applied`."""
        if self._are_applied:
            raise ConfigError(
                "the model has the weights for evaluation: leave evaluation_weights() to train, "
                "save or restore"
            )
