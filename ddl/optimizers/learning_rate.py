"""Learning rate of a run: batch-size scaling, warm-up and schedule.

Schedules count updates from 0. Microbatches and skipped updates do not count; a resumed run
continues the count. ddl's schedules compute in float64, and Keras's schedules are converted to
float64. In float32 a schedule misses its closed form by more than rounding, and steps above 2^24
are not distinct. The optimizer casts the rate to the dtype of the weights.
"""

import copy
import math
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

import keras
import numpy as np
import tensorflow as tf
from keras.optimizers.schedules import CosineDecayRestarts, LearningRateSchedule

from ddl.errors import ConfigError, check_choice
from ddl.optimizers.schedules import Schedule

ScalingRule = Literal["linear", "square_root", "none"]
Rate: TypeAlias = float | LearningRateSchedule


@keras.saving.register_keras_serializable("ddl")
class LearningRate(Schedule):
    """A base rate or schedule, scaled to the batch size, after a warm-up.

    With f the scaling factor, W the warm-up in updates, a its start and r the base schedule, the
    rate of update s, counted from 0, is

        f · r(s − W)                             for s ≥ W
        f · r(0) · (a + (1 − a) · s / W)         for s < W

    The gradual warm-up is that of Goyal et al. 2017, section 2.2. With `schedule_begins="at_start"`
    the schedule counts from the first update, as for rates that change at given epochs of the
    training: r(s) replaces r(s − W), and r(W) replaces r(0).

    Attributes:
      factor: f, the factor of the base rate for the batch size.
    """

    def __init__(
        self,
        schedule: Rate,
        *,
        scaling: ScalingRule | None = None,
        base_batch_size: int | None = None,
        global_batch_size: int | None = None,
        warmup_steps: int = 0,
        warmup_start: float = 0.0,
        schedule_begins: Literal["after_warmup", "at_start"] | None = None,
    ):
        """Initializes the schedule.

        Args:
          schedule: The rate at `base_batch_size`, as a number or a schedule: Keras's, one of
            `ddl.optimizers.schedules`, or a custom one.
          scaling: How the rate scales with k = global / base batch size: "linear" multiplies by k
            (Goyal et al. 2017, "Accurate, Large Minibatch SGD"); "square_root" by √k, which keeps
            the variance of the update (Krizhevsky 2014, "One weird trick"; You et al. 2019, "Large
            Batch Optimization for Deep Learning", for Adam and LAMB). None is for a rate tuned at
            the batch size of the training, and refuses a base batch size. "none" keeps the rate at
            any batch size, and ignores a base batch size.
          base_batch_size: Batch size for which the rate was tuned.
          global_batch_size: Batch size of the training.
          warmup_steps: W, in updates; 0 for no warm-up.
          warmup_start: a, the first rate as a fraction of the peak, at least 0. Goyal et al. warm
            up from the unscaled base rate: a = 1 / f.
          schedule_begins: Whether the schedule counts from the end of the warm-up or from the first
            update. None is "after_warmup"; with a warm-up, it is an error for schedules with
            explicit boundaries, where the choice is easily overlooked.

        Raises:
          ConfigError: If a number is out of range or missing, or a choice is unknown.
        """
        check_choice("LearningRate.scaling", scaling or "none", get_args(ScalingRule))
        begins = schedule_begins or "after_warmup"
        check_choice("LearningRate.schedule_begins", begins, ("after_warmup", "at_start"))
        if isinstance(schedule, int | float) and not 0 < schedule < math.inf:
            raise ConfigError(
                "The learning rate (LearningRate.schedule) must be greater than 0, got "
                f"{schedule:g}. Set the macro LEARNING_RATE, or the schedule, to a positive number."
            )
        if warmup_steps < 0 or warmup_steps % 1:
            raise ConfigError(
                f"LearningRate.warmup_steps must be an integer of at least 0, got {warmup_steps}. "
                "Set the macro WARMUP_STEPS to a number of updates, or to None for no warm-up."
            )
        if not 0 <= warmup_start < math.inf:
            raise ConfigError(
                "LearningRate.warmup_start, a fraction of the peak rate, must be at least 0, got "
                f"{warmup_start}. Set the macro WARMUP_START to 0.0 to begin at rate 0."
            )
        boundaries = getattr(schedule, "boundaries", None)
        if schedule_begins is None and boundaries is not None and warmup_steps:
            raise ConfigError(
                f"The steps {list(boundaries)} of {type(schedule).__name__} could count from the "
                f"first update or from the end of the warm-up ({warmup_steps:,} updates). Set "
                "LearningRate.schedule_begins to 'at_start' or 'after_warmup'."
            )
        self.schedule = schedule
        self.scaling = scaling
        self.base_batch_size = base_batch_size
        self.global_batch_size = global_batch_size
        self.warmup_steps = int(warmup_steps)
        self.warmup_start = warmup_start
        self.schedule_begins = schedule_begins
        self.factor = self._factor()
        self._skipped = self.warmup_steps if begins == "after_warmup" else 0
        self._in_float64 = in_float64(schedule)

    def _factor(self) -> float:
        if self.scaling is None and self.base_batch_size is not None:
            raise ConfigError(
                f"A base batch size ({self.base_batch_size}) needs a scaling rule. Set "
                "SCALING_RULE (LearningRate.scaling) to 'linear', 'square_root' or 'none'."
            )
        if self.scaling is None or self.scaling == "none":
            return 1.0
        sizes = {name: getattr(self, name) for name in ("base_batch_size", "global_batch_size")}
        for name, size in sizes.items():
            if size is None or not size > 0:
                raise ConfigError(
                    f"The scaling rule {self.scaling!r} needs {name.upper()} (LearningRate.{name}) "
                    f"greater than 0, got {size}. Set it, or set SCALING_RULE to 'none'."
                )
        ratio = sizes["global_batch_size"] / sizes["base_batch_size"]
        return ratio if self.scaling == "linear" else math.sqrt(ratio)

    def __call__(self, step: Any) -> tf.Tensor:
        """Returns the rate of update `step` (int [], counted from 0): float64 []."""
        step = tf.cast(step, tf.int64)
        rate = self.factor * self._in_float64(tf.maximum(step, self.warmup_steps) - self._skipped)
        if not self.warmup_steps:
            return rate
        share = tf.constant(self.warmup_start, tf.float64)
        share += (1 - share) * tf.cast(step, tf.float64) / self.warmup_steps
        return rate * tf.where(step < self.warmup_steps, share, tf.ones_like(share))

    def description(self) -> dict[str, str]:
        """Describes the resolved scaling and warm-up: text by name."""
        found = {}
        if self.scaling is not None:
            of: str = self.scaling
            if of != "none":
                of += f", from batch size {self.base_batch_size:,} to {self.global_batch_size:,}"
            found["learning rate scaling"] = f"× {self.factor:.6g} ({of})"
            first = tf.constant(self.warmup_steps - self._skipped, tf.int64)
            base = float(self._in_float64(first))
            found["base learning rate"] = f"{base:.6g}"
        if self.warmup_steps:
            found["warm-up"] = f"gradual, {self.warmup_steps:,} updates from {float(self(0)):.6g}"
        return found


def in_float64(schedule: Rate) -> Callable[[Any], tf.Tensor]:
    """Returns a rate as a function of the step, to float64 []; Keras's schedules compute in it.

    Keras computes in the dtype of the initial rate, and converts Python floats to float32. So does
    `CosineDecayRestarts` still: it finds restarts by a logarithm, which in float64 is off by a bit
    at some of them.
    """
    if not callable(schedule):
        return lambda step: tf.constant(schedule, tf.float64)
    of_step = schedule
    if type(schedule).__module__.startswith("keras.") and type(schedule) is not CosineDecayRestarts:
        of_step = copy.copy(schedule)
        for name, value in vars(of_step).items():
            if isinstance(value, float):
                setattr(of_step, name, np.float64(value))
            elif name in ("values", "initial_learning_rate"):
                setattr(of_step, name, np.asarray(value, np.float64))
    return lambda step: tf.cast(of_step(step), tf.float64)


def learning_rate_at(optimizer: keras.optimizers.Optimizer, step: int) -> float:
    """Returns the learning rate of an optimizer's update `step`, counted from 0. Eager.

    Keras also allows a function without arguments as the rate; the result is its present value.
    """
    rate = optimizer._learning_rate  # the public property is that of the present step
    if isinstance(rate, LearningRateSchedule):
        rate = rate(tf.constant(step, tf.int64))
    return float(keras.ops.convert_to_numpy(rate() if callable(rate) else rate))
