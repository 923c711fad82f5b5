"""A learning rate that is reduced when evaluations get no better."""

import math
from typing import Any, Literal

import keras
import tensorflow as tf
from keras.optimizers.schedules import LearningRateSchedule

from ddl.errors import ConfigError, check_choice
from ddl.learning_rate import LearningRate, Rate, deserialized, in_float64


@keras.saving.register_keras_serializable("ddl")
class ReduceOnPlateau(LearningRateSchedule):
    """A rate or a schedule, times a factor each time that evaluations get no better.

    He et al. 2016, "Deep residual learning", section 3.4, divide by 10 "when the error plateaus";
    the rule is that of Keras's callback of this name. An evaluation is better if it passes the best
    one so far by more than `min_delta`. After `patience` evaluations in a row that are not, the
    rate is reduced, and those of the `cooldown` are not counted.

    It stands outermost, around a `LearningRate`. The state is in variables that are made in the
    strategy's scope, as the optimizer's are; a checkpoint of the trainer has them.
    """

    def __init__(
        self,
        schedule: Rate,
        metric: str = "loss",
        *,
        factor: float = 0.1,
        patience: int = 3,
        min_delta: float = 0.0,
        cooldown: int = 0,
        min_share: float = 0.0,
        mode: Literal["max", "min"] | None = None,
    ):
        """Checks the numbers, and makes the variables.

        Args:
          schedule: What is reduced.
          metric: The evaluation figure that is looked at.
          factor: What the rate is multiplied by, between 0 and 1.
          patience: Evaluations without a better one, in a row, that reduce it.
          min_delta: By how much a better one is better.
          cooldown: Evaluations after a reduction before the next one counts.
          min_share: The share of `schedule` that it is never reduced below.
          mode: `max` or `min`; None takes the smallest of a loss and the largest of all else.

        Raises:
          ConfigError: If a number is out of range.
        """
        if not 0 < factor < 1:
            raise ConfigError(f"ReduceOnPlateau.factor is {factor}; it lies between 0 and 1")
        for name, value, least in (
            ("patience", patience, 1),
            ("min_delta", min_delta, 0),
            ("cooldown", cooldown, 0),
        ):
            if not value >= least:
                raise ConfigError(f"ReduceOnPlateau.{name} is {value}; it is {least} or more")
        if not 0 <= min_share < 1:
            raise ConfigError(f"ReduceOnPlateau.min_share is {min_share}; it is from 0 to below 1")
        if isinstance(schedule, (int, float)):
            LearningRate(schedule)  # is it more than 0?
        if mode is not None:
            check_choice("ReduceOnPlateau.mode", mode, ("max", "min"))
        self.schedule = schedule
        self.metric = metric
        self.factor = factor
        self.patience = patience
        self.min_delta = min_delta
        self.cooldown = cooldown
        self.min_share = min_share
        self.mode = mode
        self._lower_is_better = mode == "min" or (mode is None and metric.endswith("loss"))
        self._in_float64 = in_float64(schedule)
        self.state = {
            "best": tf.Variable(math.nan, trainable=False, dtype=tf.float64),
            "not_better": tf.Variable(0, trainable=False, dtype=tf.int64),
            "cooling_down": tf.Variable(0, trainable=False, dtype=tf.int64),
            "reductions": tf.Variable(0, trainable=False, dtype=tf.int64),
            "reduced_at": tf.Variable(0, trainable=False, dtype=tf.int64),
        }
        """What evaluations have told so far. The best is NaN before any."""

    def __call__(self, step: Any) -> tf.Tensor:
        """The rate of update `step`, int [], counted from 0: float64 [].

        It knows of the last reduction when it was made: of updates before that one it gives the
        rate as used.
        """
        step = tf.cast(step, tf.int64)
        not_yet = tf.cast(step < self.state["reduced_at"], tf.int64)
        reductions = tf.cast(self.state["reductions"] - not_yet, tf.float64)
        share = tf.maximum(tf.constant(self.factor, tf.float64) ** reductions, self.min_share)
        rate = self._in_float64
        return share * tf.cast(rate(step) if callable(rate) else rate, tf.float64)

    def observe(self, step: int, value: float) -> bool:
        """Takes what an evaluation gave after `step` updates. Eager, cross-replica context.

        Several workers give the same value, and so have the same state.

        Returns:
          Whether it reduced the rate.
        """
        state = {name: variable.numpy() for name, variable in self.state.items()}
        best, cooling_down = state["best"], state["cooling_down"]
        gain = best - value if self._lower_is_better else value - best
        not_better = state["not_better"]
        if math.isnan(best) or gain > self.min_delta:
            best, not_better = value, 0
        elif not cooling_down:
            not_better += 1
        at_its_least = self.factor ** state["reductions"] <= self.min_share
        reduces = bool(not_better >= self.patience and not at_its_least)
        if reduces:
            self.state["reductions"].assign_add(1)
            self.state["reduced_at"].assign(step)
            not_better, cooling_down = 0, self.cooldown
        else:
            cooling_down = max(cooling_down - 1, 0)
        self.state["best"].assign(best)
        self.state["not_better"].assign(not_better)
        self.state["cooling_down"].assign(cooling_down)
        return reduces

    def description(self) -> str:
        """What it does, for the start of a run."""
        return f"× {self.factor:g} after {self.patience} evaluations without a better {self.metric}"

    def get_config(self) -> dict[str, Any]:
        """What `from_config` takes; the state is not part of it."""
        schedule = self.schedule
        if isinstance(schedule, LearningRateSchedule):
            schedule = keras.optimizers.schedules.serialize(schedule)
        return {
            "schedule": schedule,
            "metric": self.metric,
            "factor": self.factor,
            "patience": self.patience,
            "min_delta": self.min_delta,
            "cooldown": self.cooldown,
            "min_share": self.min_share,
            "mode": self.mode,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "ReduceOnPlateau":
        """Makes one like that whose `get_config` this is, in its first state."""
        return cls(**config | {"schedule": deserialized(config["schedule"])})


def plateau_of(optimizer: keras.optimizers.Optimizer) -> ReduceOnPlateau | None:
    """The `ReduceOnPlateau` of an optimizer; None if it has none."""
    learning_rate = optimizer._learning_rate
    return learning_rate if isinstance(learning_rate, ReduceOnPlateau) else None


def unreduced(optimizer: keras.optimizers.Optimizer) -> Any:
    """An optimizer's learning rate without the `ReduceOnPlateau` around it."""
    plateau = plateau_of(optimizer)
    return plateau.schedule if plateau else optimizer._learning_rate
