"""Weights of the terms of a loss that follow a schedule, as for KL annealing and curricula."""

import math
from typing import Any

import keras
import tensorflow as tf
from keras.optimizers.schedules import LearningRateSchedule

from ddl import microbatch
from ddl.errors import ConfigError
from ddl.figures import LOSS_WEIGHT
from ddl.optimizers.learning_rate import Rate, in_float64


class LossWeight:
    """A weight that follows the step. Keep it in an attribute of the task.

        self.kl = ddl.LossWeight(keras.optimizers.schedules.PolynomialDecay(0.0, 1000, 1.0))
        …
        loss = pixels + self.kl() * divergence  # in per_example; the weight rises from 0 to 1

    The graph computes the weight from the number of updates made so far, so nothing is traced
    again, and a resumed run continues the schedule. A run logs it as `loss_weight/NAME`, with the
    name of the attribute. An evaluation has the weight of the training's next update.

    Attributes:
      schedule: The schedule.
    """

    def __init__(self, schedule: Rate):
        """Keeps the schedule.

        Args:
          schedule: A learning rate schedule of Keras or ddl, whose rate is the weight, or a number.

        Raises:
          ConfigError: If it is something else.
        """
        is_number = isinstance(schedule, int | float) and math.isfinite(schedule)
        if not (is_number or isinstance(schedule, LearningRateSchedule)):
            raise ConfigError(
                "LossWeight.schedule must be a number or a schedule of the step, such as "
                f"PolynomialDecay, got {schedule!r:.80}. In gin, write @PolynomialDecay(), with "
                "parentheses."
            )
        self.schedule = schedule
        self._weight = in_float64(schedule)

    def __call__(self, step: tf.Tensor | None = None) -> tf.Tensor:
        """Returns the weight, Keras's floatx []. In a loss, or anywhere with a step.

        Args:
          step: Number of updates made so far, int []; None: that of the loss that calls. In a step
            of one's own, pass `update.step`.

        Raises:
          ConfigError: Without a step outside of a loss.
        """
        if step is None:
            current = microbatch.current()
            if current is None or not current.rows:
                raise ConfigError(
                    "A LossWeight knows the step only in a loss that a ddl.Trainer runs. In a "
                    "step, pass update.step; elsewhere, pass a number."
                )
            step = tf.zeros([], tf.int64) if current.step is None else current.step
        return tf.cast(self._weight(step), keras.config.floatx())


def loss_weights(task: Any, step: int) -> dict[str, float]:
    """Returns the loss weights of a task at its last update, by the names of their figures.

    Before any update, these are the weights of the first.

    Args:
      task: The task, whose attributes are searched.
      step: Number of updates of the Trainer.
    """
    last = tf.constant(max(step - 1, 0), tf.int64)
    own = {name: one for name, one in vars(task).items() if isinstance(one, LossWeight)}
    return {f"{LOSS_WEIGHT}/{name.lstrip('_')}": float(one(last)) for name, one in own.items()}
