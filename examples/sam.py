"""Sharpness-aware minimization (Foret et al. 2021) of a task that has a model and a loss."""

from typing import Any

import gin

import ddl


@gin.register
class Sam:
    """Takes the gradient where the loss is highest nearby, and applies it to the weights."""

    def __init__(self, task: ddl.Task, rho: float = 0.05) -> None:
        self.task, self.model, self.rho = task, task.model, rho

    def check(self, source: ddl.data.Source) -> None:
        """Lets the wrapped task check its data."""
        if check := getattr(self.task, "check", None):
            check(source)

    def per_example(self, features: dict[str, Any], training: bool) -> ddl.PerExample:
        """The loss of the wrapped task, which also defines evaluation."""
        return self.task.per_example(features, training)

    def step(self, update: ddl.Update, batch: ddl.StepBatch) -> None:
        """Updates the weights by the gradient at the moved ones."""
        up = update.gradients(self.per_example, batch)
        with update.moved(self.model, up * (self.rho / up.norm())):
            sharp = update.gradients(
                self.per_example, batch, same_draws_as=up, moves_statistics=False
            )
        update.apply(sharp)
