"""Means of the metrics since they were last read."""

from absl import logging

from ddl.errors import DataError
from ddl.figures import GRADIENT_NORM
from ddl.optimizers.groups import figure
from ddl.step.state import TrainingState
from ddl.step.train_step import TrainStep


class MetricReader:
    """Computes the means that a trainer returns, and checks that some example has a weight.

    Attributes:
      last_read: The step at which the means were last read.
    """

    def __init__(self, update: TrainStep):
        """Keeps the argument.

        Args:
          update: The update that sums the metrics.
        """
        self._update = update
        self.last_read = 0
        self._weight_seen = False

    def means(self, state: TrainingState) -> dict[str, float]:
        """Returns the means of loss and metrics, and of the norms."""
        means = self._update.metrics.means(state.sums)
        norms = state.gradient_norms.numpy().reshape(-1, 2)
        for name, (total, count) in zip(self._update.plan.groups, norms, strict=True):
            if self._update.clips[name] is not None and count:
                means[figure(GRADIENT_NORM, name)] = float(total / count)
        return means

    def restart(self, step: int) -> None:
        """Counts the updates since the last read from `step` on."""
        self.last_read = step

    def check_some_weight(self, state: TrainingState) -> None:
        """Raises DataError, or logs, if all examples since the last read have weight 0."""
        first, step = self.last_read, int(state.step)
        self.last_read = step
        if self._update.metrics.weight(state.sums) != 0:
            self._weight_seen = True
        elif step > first:
            updates = f"All examples of the updates {first + 1:,} to {step:,} have weight 0"
            # Only logged in the first epoch, if an earlier example counted, or if the task gives
            # the weights: these may depend on the model and be 0 for a while.
            of_epoch = next(iter(self._update.pipelines.values())).steps_per_epoch
            whole_epoch = of_epoch is not None and step >= of_epoch
            if whole_epoch and not (self._weight_seen or self._update.task_weighs):
                raise DataError(
                    f"{updates} in feature 'weight', so nothing is learned and the mean loss is "
                    "undefined. Give a positive weight to the examples to train on."
                )
            logging.warning("%s, so the mean loss is NaN.", updates)
