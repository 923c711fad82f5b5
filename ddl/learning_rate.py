"""The learning rate and the batch size."""

from typing import Literal, get_args

import keras

from ddl.errors import ConfigError, check_choice

ScalingRule = Literal["linear", "square_root", "none"]


def scale_learning_rate(
    learning_rate: float,
    global_batch_size: int,
    base_batch_size: int,
    rule: ScalingRule = "linear",
) -> float:
    """The learning rate for a batch size, from one that is right at another.

    Args:
      learning_rate: The rate at `base_batch_size`.
      global_batch_size: The batch size trained with.
      base_batch_size: The batch size for which `learning_rate` was found.
      rule: "linear" multiplies by k = global / base (Goyal et al. 2017, "Accurate, Large
        Minibatch SGD"); "square_root" by √k, which keeps the variance of the update
        (Krizhevsky 2014, "One weird trick"); "none" by 1.

    Raises:
      ConfigError: If a number is not positive, or the rule is unknown.
    """
    check_choice("the scaling rule", rule, get_args(ScalingRule))
    for name, value in (
        ("learning_rate", learning_rate),
        ("global_batch_size", global_batch_size),
        ("base_batch_size", base_batch_size),
    ):
        if not value > 0:
            raise ConfigError(f"{name} is {value}; it is more than 0")
    ratio = global_batch_size / base_batch_size
    factor = {"linear": ratio, "square_root": ratio**0.5, "none": 1.0}[rule]
    return learning_rate * factor


def learning_rate_at(optimizer: keras.optimizers.Optimizer, step: int) -> float:
    """The learning rate of an optimizer's update number `step`, counted from 0."""
    # The public property gives a schedule's value at the present step only.
    learning_rate = optimizer._learning_rate
    if isinstance(learning_rate, keras.optimizers.schedules.LearningRateSchedule):
        learning_rate = learning_rate(step)
    return float(keras.ops.convert_to_numpy(learning_rate))


def peak_learning_rate(optimizer: keras.optimizers.Optimizer, steps: int) -> float:
    """The largest learning rate in `steps` updates, looked for at a thousand of them."""
    looked_at = range(0, max(steps, 1), max(1, steps // 1000))
    return max(learning_rate_at(optimizer, step) for step in looked_at)
