"""Learning rate of a run: batch-size scaling, warm-up and schedule.

Schedules count updates from 0. Microbatches and skipped updates do not count; a resumed run
continues the count. ddl's schedules compute in float64, and Keras's schedules are converted to
float64. In float32 a schedule misses its closed form by more than rounding, and steps above 2^24
are not distinct. The optimizer casts the rate to the dtype of the weights.
"""

import copy
import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

import keras
import numpy as np
import tensorflow as tf
from keras.optimizers.schedules import CosineDecayRestarts, LearningRateSchedule

from ddl.errors import ConfigError, check_choice
from ddl.optimizers.schedule import Schedule

ScalingRule = Literal["linear", "square_root", "none"]
WarmUp = Literal["gradual", "constant"]
Rate: TypeAlias = float | LearningRateSchedule


def scaling_factor(global_batch_size: int, base_batch_size: int, rule: ScalingRule) -> float:
    """Returns the factor that adapts a learning rate to another batch size.

    Args:
      global_batch_size: Batch size of the training.
      base_batch_size: Batch size for which the learning rate was tuned.
      rule: "linear" multiplies by k = global / base (Goyal et al. 2017, "Accurate, Large
        Minibatch SGD"); "square_root" by √k, which keeps the variance of the update
        (Krizhevsky 2014, "One weird trick"; You et al. 2019, "Large Batch Optimization for Deep
        Learning", for Adam and LAMB); "none" by 1.

    Raises:
      ConfigError: If a batch size is not positive, or the rule is unknown.
    """
    check_choice("scaling_factor.rule", rule, get_args(ScalingRule))
    for name, value in (
        ("global_batch_size", global_batch_size),
        ("base_batch_size", base_batch_size),
    ):
        if not value > 0:
            raise ConfigError(
                f"{name} must be greater than 0, got {value}. Set the macro {name.upper()} to a "
                "number of examples."
            )
    ratio = global_batch_size / base_batch_size
    return {"linear": ratio, "square_root": math.sqrt(ratio), "none": 1.0}[rule]


@keras.saving.register_keras_serializable("ddl")
class LearningRate(Schedule):
    """A base rate or schedule, scaled to the batch size, after a warm-up.

    With f the scaling factor, W the warm-up in updates, a its start and r the base schedule, the
    rate of update s, counted from 0, is

        f · r(s − W)                             for s ≥ W
        f · r(0) · (a + (1 − a) · s / W)         for s < W, gradual warm-up
        f · r(0) · a                             for s < W, constant warm-up

    Both warm-ups are from Goyal et al. 2017, section 2.2. With `schedule_begins="at_start"` the
    schedule counts from the first update, as for rates that change at given epochs of the
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
        warmup: WarmUp = "gradual",
        schedule_begins: Literal["after_warmup", "at_start"] | None = None,
    ):
        """Initializes the schedule.

        Args:
          schedule: The rate at `base_batch_size`, as a number or a schedule: Keras's, one of
            `ddl.optimizers.schedules`, or a custom one.
          scaling: How the rate scales with the batch size (`scaling_factor`). None is for a rate
            tuned at the batch size of the training, and refuses a base batch size. "none" keeps the
            rate at any batch size, and ignores a base batch size.
          base_batch_size: Batch size for which the rate was tuned.
          global_batch_size: Batch size of the training.
          warmup_steps: W, in updates; 0 for no warm-up.
          warmup_start: a, the first rate as a fraction of the peak, at least 0. Goyal et al. warm
            up from the unscaled base rate: a = 1 / f.
          warmup: "gradual" increases the rate linearly; "constant" keeps it at its start.
          schedule_begins: Whether the schedule counts from the end of the warm-up or from the first
            update. None is "after_warmup"; with a warm-up, it is an error for schedules with
            explicit boundaries, where the choice is easily overlooked.

        Raises:
          ConfigError: If a number is out of range or missing, a choice is unknown, or `schedule`
            is a `ReduceOnPlateau`.
        """
        check_choice("LearningRate.warmup", warmup, get_args(WarmUp))
        if isinstance(schedule, int):
            schedule = float(schedule)
        if isinstance(schedule, float) and not 0 < schedule < math.inf:
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
        if warmup == "constant" and warmup_steps and not warmup_start:
            raise ConfigError(
                "A constant warm-up at rate 0 trains nothing. Set LearningRate.warmup_start to "
                "more than 0."
            )
        if hasattr(schedule, "observe"):
            raise ConfigError(
                f"{type(schedule).__name__} must wrap LearningRate, but it was passed as "
                "LearningRate.schedule. Pass the LearningRate as the schedule of "
                f"{type(schedule).__name__}."
            )
        boundaries = getattr(schedule, "boundaries", None)
        if schedule_begins is None and boundaries is not None and warmup_steps:
            raise ConfigError(
                f"The steps {list(boundaries)} of {type(schedule).__name__} could count from the "
                f"first update or from the end of the warm-up ({warmup_steps:,} updates). Set "
                "LearningRate.schedule_begins to 'at_start' or 'after_warmup'."
            )
        if schedule_begins is not None:
            check_choice(
                "LearningRate.schedule_begins", schedule_begins, ("after_warmup", "at_start")
            )
        self.schedule = schedule
        self.scaling = scaling
        self.base_batch_size = base_batch_size
        self.global_batch_size = global_batch_size
        self.warmup_steps = int(warmup_steps)
        self.warmup_start = warmup_start
        self.warmup = warmup
        self.schedule_begins = schedule_begins
        self.factor = self._factor()
        self._skipped = 0 if schedule_begins == "at_start" else self.warmup_steps
        self._in_float64 = in_float64(schedule)

    def _factor(self) -> float:
        base, batch, scaling = self.base_batch_size, self.global_batch_size, self.scaling
        if scaling is None:
            if base is not None:
                raise ConfigError(
                    f"A base batch size ({base}) needs a scaling rule, but none is given. Set "
                    "SCALING_RULE (LearningRate.scaling) to 'linear', 'square_root' or 'none'."
                )
            return 1.0
        if scaling == "none":
            return 1.0
        check_choice("LearningRate.scaling", scaling, get_args(ScalingRule))
        for name, value in (("BASE_BATCH_SIZE", base), ("GLOBAL_BATCH_SIZE", batch)):
            if value is None:
                raise ConfigError(
                    f"The scaling rule {scaling!r} needs {name} (LearningRate.{name.lower()}), "
                    f"which is missing. Set {name}, or set SCALING_RULE to 'none'."
                )
        return scaling_factor(int(batch or 0), int(base or 0), scaling)

    def __call__(self, step: Any) -> tf.Tensor:
        """Returns the rate of update `step` (int [], counted from 0): float64 []."""
        step = tf.cast(step, tf.int64)
        rate = self.factor * self._base_rate(tf.maximum(step, self.warmup_steps) - self._skipped)
        if not self.warmup_steps:
            return rate
        share = tf.constant(self.warmup_start, tf.float64)
        if self.warmup == "gradual":
            share += (1 - share) * tf.cast(step, tf.float64) / self.warmup_steps
        return rate * tf.where(step < self.warmup_steps, share, tf.ones_like(share))

    def _base_rate(self, step: tf.Tensor) -> tf.Tensor:
        if isinstance(self._in_float64, LearningRateSchedule):
            return tf.cast(self._in_float64(step), tf.float64)
        return tf.constant(self._in_float64, tf.float64)

    def description(self) -> dict[str, str]:
        """Describes the resolved scaling and warm-up: text by name."""
        found = {}
        if self.scaling is not None:
            found["learning rate scaling"] = f"× {self.factor:.6g} ({self.scaling}"
            if self.scaling != "none":
                found["learning rate scaling"] += (
                    f", from batch size {self.base_batch_size:,} to {self.global_batch_size:,}"
                )
            found["learning rate scaling"] += ")"
            base = float(self._base_rate(tf.constant(self.warmup_steps - self._skipped, tf.int64)))
            found["base learning rate"] = f"{base:.6g}"
        if self.warmup_steps:
            start = float(self(0))
            way = "from" if self.warmup == "gradual" else "at"
            found["warm-up"] = f"{self.warmup}, {self.warmup_steps:,} updates {way} {start:.6g}"
        return found


def in_float64(schedule: Rate) -> Rate:
    """Returns a copy of a Keras schedule that computes in float64; other schedules unchanged.

    Keras computes in the dtype of the initial rate, and converts Python floats to float32.
    `CosineDecayRestarts` is returned unchanged: it finds restarts by a logarithm, which in float64
    is off by a bit at some of them. `ddl.optimizers.schedules.CosineWithRestarts` is exact there.
    """
    is_kerass = type(schedule).__module__.startswith("keras.")
    if not is_kerass or isinstance(schedule, CosineDecayRestarts):
        return schedule
    schedule = copy.copy(schedule)
    for name, value in vars(schedule).items():
        if isinstance(value, float):
            setattr(schedule, name, np.float64(value))
        elif name in ("values", "initial_learning_rate"):
            setattr(schedule, name, np.asarray(value, np.float64))
    return schedule


def learning_rate_at(optimizer: keras.optimizers.Optimizer, step: int) -> float:
    """Returns the learning rate of an optimizer's update `step`, counted from 0. Eager.

    Keras also allows a function without arguments as the rate; the result is its present value.
    """
    # The public property evaluates a schedule at the present step only.
    learning_rate = optimizer._learning_rate
    if isinstance(learning_rate, LearningRateSchedule):
        learning_rate = learning_rate(tf.constant(step, tf.int64))
    elif callable(learning_rate):
        learning_rate = learning_rate()
    return float(keras.ops.convert_to_numpy(learning_rate))


def learning_rates_at(
    optimizer: keras.optimizers.Optimizer, steps: Sequence[int]
) -> dict[int, float]:
    """Returns the learning rate of each of many updates, with one trace. Eager."""
    schedule = optimizer._learning_rate
    if not isinstance(schedule, LearningRateSchedule):
        return dict.fromkeys(steps, learning_rate_at(optimizer, 0))

    @tf.function(autograph=False)
    def rates(steps: tf.Tensor) -> tf.Tensor:
        return tf.map_fn(
            lambda step: tf.cast(schedule(step), tf.float64), steps, fn_output_signature=tf.float64
        )

    of_steps = tf.constant(steps, tf.int64)
    found = rates.get_concrete_function(of_steps)(of_steps).numpy().tolist()
    return dict(zip(steps, found, strict=True))
