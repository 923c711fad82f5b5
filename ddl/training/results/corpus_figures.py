"""Figures of all outputs of an evaluation (`ddl.metrics.OfAllOutputs`)."""

import math
from collections.abc import Sequence
from typing import Any

from ddl.data.pipeline import BatchPipeline
from ddl.data.source import Source
from ddl.data.stream import Stream
from ddl.distribution.workers import Workers
from ddl.errors import ConfigError
from ddl.metrics.of_all_outputs import checked_corpus_metrics
from ddl.step.state import TrainingState
from ddl.training.results.other_data import OtherData


class CorpusFigures:
    """Passes all outputs to the functions on the chief, and their figures to all workers."""

    def __init__(self, metrics: Any, given: OtherData, workers: Workers):
        """Checks the functions; computes nothing.

        Args:
          metrics: The argument `corpus_metrics` of `ddl.Trainer`.
          given: Computes the outputs.
          workers: The workers.

        Raises:
          ConfigError: If `metrics` has another type, or the task or the strategy has no outputs to
            predict.
        """
        self._metrics = checked_corpus_metrics(metrics)
        self._given = given
        self._workers = workers
        if self._metrics:
            given.check_predicts("Trainer.corpus_metrics")

    def names_in(self, pipeline: BatchPipeline | None, names: Sequence[str]) -> Sequence[str]:
        """Returns the names of an evaluation's figures, with those of the functions.

        Args:
          pipeline: Data to evaluate on, which are checked, but not read; or None.
          names: Names of the figures of the task.

        Raises:
          ConfigError: If a name is taken.
          DataError: If the data have no order, or lack what the functions read.
        """
        for metric in self._metrics:
            if pipeline is not None:
                self._given.check_outputs(pipeline.source, metric.features)
        own = [name for metric in self._metrics for name in metric.names]
        if taken := sorted(set(own) & set(names)):
            raise ConfigError(
                f"Trainer.corpus_metrics has the figures {', '.join(taken)}, which the task "
                "reports too. Rename them."
            )
        return (*names, *own)

    def of(self, source: Source | Stream, state: TrainingState, loss: float) -> dict[str, float]:
        """Returns the figures of a data set. Eager, cross-replica context, on all workers.

        Args:
          source: The data.
          state: The training's state.
          loss: The mean loss; if it is not finite, all figures are NaN.

        Raises:
          ConfigError: If outputs and features need more memory than allowed, or a function returns
            something else than its figures.
          DataError: If the data lack a feature.
        """
        if not math.isfinite(loss):  # which the run reports
            return {name: math.nan for metric in self._metrics for name in metric.names}
        figures: dict[str, float] = {}
        for metric in self._metrics:
            found = self._given.outputs(
                source, state, metric.features, metric.max_bytes, keeps=self._workers.is_chief
            )
            own: dict[str, float] = {}
            with self._workers.failing_together():
                if found is not None:
                    own = metric(*found)
            for name in metric.names:
                figures[name] = self._workers.broadcast_float(own.get(name, 0.0))
        return figures
