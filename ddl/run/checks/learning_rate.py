"""Checks and summary of the learning rate, before training."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.optimizers.schedules import LearningRateSchedule

from ddl.errors import ConfigError
from ddl.optimizers.groups import by_name
from ddl.optimizers.learning_rate import LearningRate, learning_rate_at
from ddl.optimizers.plateau import ReduceOnPlateau, plateau_of
from ddl.run.plan import RunPlan


def learning_rate_summary(optimizer: keras.optimizers.Optimizer, steps: int) -> dict[str, str]:
    """Describes the learning rate over a run, as texts by name.

    Args:
      optimizer: The optimizer of the run.
      steps: Length of the run.

    Raises:
      ConfigError: If the rate is negative or not finite at one of about a thousand sampled steps,
        is 0 at all of them, or the warm-up does not end before the run.
    """
    plateau = plateau_of(optimizer)
    learning_rate = plateau.schedule if plateau else optimizer._learning_rate
    looked_at = {*range(0, max(steps, 1), max(1, -(-steps // 1000))), max(steps - 1, 0)}
    description = {}
    if isinstance(learning_rate, LearningRate):
        warmup = learning_rate.warmup_steps
        if warmup >= steps:
            raise ConfigError(
                f"The warm-up must be shorter than the run of {steps:,} updates, got {warmup:,} "
                "warm-up updates. Lower WARMUP_STEPS or WARMUP_EPOCHS, or train longer."
            )
        looked_at.add(warmup)
        description = learning_rate.description()
    if plateau is not None:
        description["on a plateau"] = plateau.description()
    with tf.device("CPU:0"):  # a GPU would wait for the host at each of a thousand turns
        rates = _learning_rates_at(optimizer, sorted(looked_at))
    for step, rate in rates.items():
        if not 0 <= rate < math.inf:
            raise ConfigError(
                f"The learning rate must be finite and at least 0, got {rate:g} at update {step:,}."
                " Check LEARNING_RATE and the arguments of the schedule."
            )
    peak = max(rates, key=lambda step: rates[step])
    if not rates[peak] > 0:
        raise ConfigError(
            f"The peak learning rate must be greater than 0, got {rates[peak]:g}. Raise "
            "LEARNING_RATE, or check the arguments of the schedule."
        )
    last = f", {rates[steps - 1]:.6g} at the end" if rates[steps - 1] != rates[peak] else ""
    return {"learning rate": f"{rates[peak]:.6g} at its peak{last}", **description}


def _learning_rates_at(
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

    found = rates(tf.constant(steps, tf.int64)).numpy().tolist()
    return dict(zip(steps, found, strict=True))


def check_plateau(
    plateau: ReduceOnPlateau, run_plan: RunPlan, metrics: Sequence[str], evaluates: bool
) -> None:
    """Checks that a `ReduceOnPlateau` will get its metric from evaluations.

    Args:
      plateau: The plateau rule.
      run_plan: The plan of the run.
      metrics: Names of the metrics of an evaluation.
      evaluates: Whether the run evaluates.

    Raises:
      ConfigError: If evaluations do not report the metric, or the run evaluates never or only at
        its end.
    """
    if plateau.metric not in metrics:
        raise ConfigError(
            f"ReduceOnPlateau.metric must be a metric of the evaluation ({', '.join(metrics)}), "
            f"got {plateau.metric!r}."
        )
    if not evaluates:
        raise ConfigError(
            "ReduceOnPlateau needs evaluations, but the run does not evaluate. Bind "
            "Trainer.eval_data, and pass --mode=train_and_eval."
        )
    if run_plan.eval_every is None:
        raise ConfigError(
            "ReduceOnPlateau needs evaluations during training, but EVAL_EVERY is None. Set "
            "EVAL_EVERY to a number of steps."
        )


def constant_rates(optimizer: Any) -> dict[str, float]:
    """Returns the rate of each optimizer whose rate is a number, by its name.

    Args:
      optimizer: A trainer's optimizer, groups, or a dict of these.
    """
    return {
        name: float(own._learning_rate.numpy())
        for name, own in by_name(optimizer).items()
        if isinstance(own._learning_rate, keras.Variable)
    }


def report_restored_rates(
    before: Mapping[str, float], optimizer: Any, report: Callable[[str], None]
) -> None:
    """Reports each rate that a restored checkpoint has changed.

    Args:
      before: `constant_rates` before the restore.
      optimizer: As for `constant_rates`.
      report: Called with a line of text.
    """
    for name, now in constant_rates(optimizer).items():
        if before[name] != now:
            of = f" of {name!r}" if name else ""
            report(
                f"The learning rate{of} is now {now:g}, as in the checkpoint, and no longer "
                f"{before[name]:g}, as the optimizer had it. To train on with another, assign to "
                "optimizer.learning_rate after the restore: call ddl.fit again with this trainer, "
                "or ddl.Checkpoints(…).restore_latest() before it."
            )
