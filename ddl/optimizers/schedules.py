"""Learning rate schedules that Keras lacks, in float64, over updates counted from 0.

Schedules take plain numbers of updates. In a config, `epochs_to_steps` and the like compute them
from `@steps_per_epoch()` of the training data and from the length of the run.
"""

import inspect
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, overload

import keras
import tensorflow as tf
from keras.optimizers.schedules import LearningRateSchedule

from ddl.choices import check_count, check_positive
from ddl.errors import ConfigError


class Schedule(LearningRateSchedule):
    """A schedule that keeps each argument of its constructor on an attribute of the same name."""

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor by name, as a resumed run compares them."""
        names = list(inspect.signature(type(self).__init__).parameters)[1:]
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Schedule":
        """Makes a schedule of its saved arguments, among which may be another schedule."""
        made = keras.saving.deserialize_keras_object
        return cls(**{n: made(v) if isinstance(v, dict) else v for n, v in config.items()})


@keras.saving.register_keras_serializable("ddl")
class StepDecay(Schedule):
    """Step decay: the rate is multiplied by a factor at each boundary.

    The rate of update s is η · factor^(number of boundaries ≤ s), the schedule of He et al. 2016,
    "Deep residual learning", and Goyal et al. 2017. Keras's `PiecewiseConstantDecay` still uses
    the earlier rate for update s = boundary.
    """

    def __init__(
        self, initial_learning_rate: float, boundaries: Sequence[int], factor: float = 0.1
    ):
        """Initializes the schedule.

        Args:
          initial_learning_rate: η, more than 0.
          boundaries: Updates at which the rate changes, at least 0 and strictly increasing.
          factor: Factor of the rate at each boundary, more than 0.

        Raises:
          ConfigError: If the boundaries are not increasing, or a number is out of range.
        """
        check_positive("StepDecay.initial_learning_rate", initial_learning_rate)
        check_positive("StepDecay.factor", factor)
        self.initial_learning_rate = initial_learning_rate
        self.boundaries = list(boundaries)
        self.factor = factor
        if self.boundaries != sorted(set(self.boundaries)) or min(self.boundaries, default=0) < 0:
            raise ConfigError(
                "StepDecay.boundaries must increase strictly and start at 0 or later, got "
                f"{self.boundaries}."
            )

    def __call__(self, step: Any) -> tf.Tensor:
        """Returns the rate of update `step` (int [], counted from 0): float64 []."""
        passed = tf.constant(self.boundaries, tf.int64) <= tf.cast(step, tf.int64)
        powers = tf.constant(
            [self.initial_learning_rate * self.factor**n for n in range(len(self.boundaries) + 1)],
            tf.float64,
        )
        return powers[tf.math.count_nonzero(passed)]


EpochLength: TypeAlias = int | Callable[[], int] | None
"""Updates of a pass over the training data; or a function that is called if they are needed."""


@overload
def epochs_to_steps(epochs: float, steps_per_epoch: EpochLength) -> int: ...
@overload
def epochs_to_steps(epochs: Sequence[float], steps_per_epoch: EpochLength) -> list[int]: ...
def epochs_to_steps(
    epochs: float | Sequence[float], steps_per_epoch: EpochLength
) -> int | list[int]:
    """Converts epochs, one number or several, to updates; fractions round up to whole batches.

    Any number of epochs above 0 is at least one update.

    Args:
      epochs: Passes over the training data, at least 0.
      steps_per_epoch: Updates per pass over the training data.

    Returns:
      The number of updates; a list for a sequence of epochs.

    Raises:
      ConfigError: If a number of epochs is negative or infinite, or
        `steps_per_epoch` is missing.
    """
    if callable(steps_per_epoch):
        steps_per_epoch = steps_per_epoch()
    if steps_per_epoch is None:
        raise ConfigError(
            "steps_per_epoch must be a number of updates, got None. In a config, bind it to "
            "@steps_per_epoch()."
        )
    if isinstance(epochs, Sequence):
        return [_steps(one, steps_per_epoch) for one in epochs]
    return _steps(epochs, steps_per_epoch)


def warmup_steps(
    steps: int | None = None, epochs: float | None = None, steps_per_epoch: EpochLength = None
) -> int:
    """Returns the length of the warm-up in updates; 0 if no length is given.

    Args:
      steps: The length in updates.
      epochs: The length in epochs, instead of `steps`.
      steps_per_epoch: Updates per pass over the training data; required with `epochs`.

    Raises:
      ConfigError: If both lengths are given, or `epochs` is negative.
    """
    if steps is not None and epochs is not None:
        raise ConfigError(
            f"WARMUP_STEPS and WARMUP_EPOCHS exclude each other, got {steps} and {epochs}. Set one "
            "of them to None."
        )
    if epochs is not None:
        return epochs_to_steps(epochs, steps_per_epoch)
    return steps or 0


def total_steps(
    train_steps: int | None = None,
    train_epochs: float | None = None,
    steps_per_epoch: EpochLength = None,
) -> int:
    """Returns the length of a run in updates; a fraction of a batch counts as a whole one.

    Args:
      train_steps: The length in updates.
      train_epochs: The length in epochs, instead of `train_steps`.
      steps_per_epoch: Updates per pass over the training data; required with `train_epochs`.

    Raises:
      ConfigError: If not exactly one length is given, or one is not positive.
    """
    if (train_steps is None) == (train_epochs is None):
        raise ConfigError(
            "Set one of train_steps and train_epochs (macros TRAIN_STEPS, TRAIN_EPOCHS), got "
            f"{train_steps} and {train_epochs}."
        )
    if train_epochs is not None:
        check_positive("RunPlan.train_epochs", train_epochs)
        return epochs_to_steps(train_epochs, steps_per_epoch)
    check_count("RunPlan.train_steps", train_steps)
    return int(train_steps or 0)


def length_in_steps(steps: Any, epochs: float | None, steps_per_epoch: int | None) -> int:
    """Returns the length of a training in updates.

    Raises:
      ConfigError: Unless exactly one of `steps` and `epochs` is given, `steps` is an integer of at
        least 0, and `epochs` a finite number of at least 0.
    """
    if steps is None and epochs is not None:
        return epochs_to_steps(float(epochs), steps_per_epoch)
    is_number = isinstance(steps, numbers.Integral) and not isinstance(steps, bool)
    if epochs is not None or not is_number or steps < 0:
        raise ConfigError(
            "train needs either steps, an integer of at least 0, or epochs, got "
            f"{steps!r:.60} and {epochs!r:.60}. Write train(steps=1000) or train(epochs=5)."
        )
    return int(steps)


def steps_after_warmup(total_steps: int, warmup_steps: int = 0) -> int:
    """Returns the number of updates between the end of the warm-up and the end of the run.

    Args:
      total_steps: Length of the run in updates.
      warmup_steps: Length of the warm-up in updates.

    Raises:
      ConfigError: If no updates are left after the warm-up.
    """
    if warmup_steps >= total_steps:
        raise ConfigError(
            f"The warm-up must be shorter than the run, but it takes {warmup_steps:,} updates and "
            f"the run has {total_steps:,}. Decrease WARMUP_STEPS or WARMUP_EPOCHS, or train longer."
        )
    return total_steps - warmup_steps


def _steps(epochs: float, steps_per_epoch: int) -> int:
    if not 0 <= epochs < math.inf:
        raise ConfigError(
            f"A number of epochs must be finite and at least 0, got {epochs}. Correct it in the "
            "config or the call, such as TRAIN_EPOCHS or WARMUP_EPOCHS."
        )
    # 1.1 epochs of 110 steps are 121, but 1.1 * 110 > 121 in floating point.
    steps = math.ceil(round(epochs * steps_per_epoch, 6))
    return max(steps, 1) if epochs else 0
