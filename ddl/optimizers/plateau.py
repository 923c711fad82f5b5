"""Learning rate reduction on a plateau of an evaluation metric."""

import math
from typing import Any

import keras
import tensorflow as tf

from ddl.errors import ConfigError
from ddl.figures import Direction, direction_of
from ddl.optimizers.groups import Optimizers, by_name
from ddl.optimizers.learning_rate import LearningRate, Rate, in_float64
from ddl.optimizers.schedules import Schedule


@keras.saving.register_keras_serializable("ddl")
class ReduceOnPlateau(Schedule):
    """A rate or schedule that is multiplied by a factor when evaluations stop improving.

    He et al. 2016, "Deep residual learning", section 3.4, divide by 10 "when the error plateaus".
    The rule is that of Keras's callback `ReduceLROnPlateau`. An evaluation improves if it beats the
    best one so far by more than `min_delta`. After `patience` evaluations in a row without
    improvement the rate is reduced.

    It is the outermost schedule, around a `LearningRate`. Build it in the strategy's scope, like
    the optimizer: its state is in variables, which the trainer's checkpoints include.

    Attributes:
      state: Variables [] by name: `best` (float64, NaN before the first evaluation), `not_better`,
        `reductions` and `reduced_at` (int64).
    """

    def __init__(
        self,
        schedule: Rate,
        metric: str = "loss",
        *,
        factor: float = 0.1,
        patience: int = 3,
        min_delta: float = 0.0,
        mode: Direction | None = None,
    ):
        """Initializes the schedule and creates its variables, in the strategy's scope.

        Args:
          schedule: The rate or schedule to reduce.
          metric: Name of the evaluation metric to watch.
          factor: Factor of each reduction, between 0 and 1, both excluded.
          patience: Evaluations in a row without improvement before a reduction, at least 1.
          min_delta: Smallest improvement that counts, at least 0.
          mode: Whether higher ("max") or lower ("min") values are better; None for the loss or an
            accuracy.

        Raises:
          ConfigError: If a number is out of range, `mode` is None for another metric, or `mode` is
            "max" for the loss.
        """
        if not 0 < factor < 1:
            raise ConfigError(
                f"ReduceOnPlateau.factor must be between 0 and 1, both excluded, got {factor}."
            )
        for name, value, least in (("patience", patience, 1), ("min_delta", min_delta, 0)):
            if not value >= least:
                raise ConfigError(f"ReduceOnPlateau.{name} must be at least {least}, got {value}.")
        if isinstance(schedule, (int, float)):
            LearningRate(schedule)  # raises unless it is positive and finite
        self.schedule = schedule
        self.metric = metric
        self.factor = factor
        self.patience = patience
        self.min_delta = min_delta
        self.mode = mode
        self._lower_is_better = direction_of(metric, mode, "ReduceOnPlateau.mode") == "min"
        self._in_float64 = in_float64(schedule)
        self.state = {
            "best": tf.Variable(math.nan, trainable=False, dtype=tf.float64),
            "not_better": tf.Variable(0, trainable=False, dtype=tf.int64),
            "reductions": tf.Variable(0, trainable=False, dtype=tf.int64),
            "reduced_at": tf.Variable(0, trainable=False, dtype=tf.int64),
        }

    def __call__(self, step: Any) -> tf.Tensor:
        """Returns the rate of update `step` (int [], counted from 0): float64 [].

        Only the update of the last reduction is stored. Updates before it get the rate without
        that reduction.
        """
        step = tf.cast(step, tf.int64)
        not_yet = tf.cast(step < self.state["reduced_at"], tf.int64)
        reductions = tf.cast(self.state["reductions"] - not_yet, tf.float64)
        share = tf.constant(self.factor, tf.float64) ** reductions
        return share * self._in_float64(step)

    def observe(self, step: int, value: float) -> bool:
        """Updates the state with the metric after `step` updates. Eager, cross-replica context.

        All workers pass the same value and therefore keep the same state.

        Args:
          step: Number of updates made before the evaluation.
          value: Value of the metric.

        Returns:
          Whether the rate was reduced.
        """
        best, not_better = (self.state[name].numpy() for name in ("best", "not_better"))
        gain = best - value if self._lower_is_better else value - best
        if math.isnan(best) or gain > self.min_delta:
            best, not_better = value, 0
        else:
            not_better += 1
        reduces = bool(not_better >= self.patience)
        if reduces:
            self.state["reductions"].assign_add(1)
            self.state["reduced_at"].assign(step)
            not_better = 0
        self.state["best"].assign(best)
        self.state["not_better"].assign(not_better)
        return reduces

    def description(self) -> str:
        """Describes the rule in one line, for the start of a run."""
        return f"× {self.factor:g} after {self.patience} evaluations without a better {self.metric}"


def plateaus_of(optimizer: Optimizers) -> dict[str, ReduceOnPlateau]:
    """Returns the `ReduceOnPlateau` of each of a Trainer's optimizers that has one, by its name.

    Raises:
      ConfigError: If two optimizers share one.
    """
    every = {name: plateau_of(one) for name, one in by_name(optimizer).items()}
    found = {name: plateau for name, plateau in every.items() if plateau is not None}
    if len(set(map(id, found.values()))) < len(found):
        raise ConfigError(
            f"The optimizers {', '.join(found)} share a ReduceOnPlateau, which would count each "
            "evaluation several times. Give each optimizer one of its own."
        )
    return found


def plateau_of(optimizer: keras.optimizers.Optimizer) -> ReduceOnPlateau | None:
    """Returns the `ReduceOnPlateau` of an optimizer, or None."""
    learning_rate = optimizer._learning_rate
    return learning_rate if isinstance(learning_rate, ReduceOnPlateau) else None
