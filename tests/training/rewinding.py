"""The start of a trainer, kept to train it again: a second trainer would be traced again."""

from collections.abc import Iterable

import tensorflow as tf

import ddl


class Start:
    """State, variables and every replica's copies of a trainer, as they are now."""

    def __init__(self, trainer: ddl.Trainer, others: Iterable[tf.Variable] = ()):
        """Keeps the values.

        Args:
          trainer: The trainer.
          others: Variables to keep besides those of model, optimizer and averages.
        """
        self._trainer = trainer
        averages = trainer.averages.variables if trainer.averages else []
        own = [v.value for v in [*trainer.model.variables, *trainer.optimizer.variables]]
        self._copies: list[tf.Variable] = [
            copy
            for variable in [*own, *averages, *others]
            for copy in trainer.strategy.experimental_local_results(variable)
        ]
        self._values = [copy.numpy() for copy in self._copies]
        self._state = trainer.state

    def again(self) -> ddl.Trainer:
        """Returns the trainer, set back to the start."""
        for copy, value in zip(self._copies, self._values, strict=True):
            copy.assign(value)
        self._trainer.state = self._state
        return self._trainer
