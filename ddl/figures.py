"""Figures of a run: their names, those that ddl writes itself, and the directions of metrics."""

import re
from typing import Literal

from ddl.errors import ConfigError, check_choice

Direction = Literal["max", "min"]

# Patterns that match whole names of figures.
_KNOWN: tuple[tuple[str, Direction], ...] = (
    ("loss", "min"),
    (r"accuracy|top_\d+_accuracy", "max"),
)


def direction_of(metric: str, given: Direction | None, parameter: str) -> Direction:
    """Returns the configured direction of a figure, or the known one.

    The direction of an unknown name is not guessed: a run that keeps the checkpoint with the
    largest error rate would be noticed only after training.

    Args:
      metric: Name of the figure.
      given: The direction in the config; None if the config gives none.
      parameter: Name of the config parameter, such as `Retention.best_mode`, for errors.

    Raises:
      ConfigError: If no direction is given and none is known, if `given` is neither `max` nor
        `min`, or `max` for the loss.
    """
    if given is not None:
        choices = ("min",) if metric == "loss" else ("max", "min")
        check_choice(f"{parameter} of {metric!r}", given, choices)
        return given
    for names, direction in _KNOWN:
        if re.fullmatch(names, metric.removeprefix("val_")):  # which `check_metric` refuses
            return direction
    raise ConfigError(
        f"{parameter} is required for the metric {metric!r}: ddl does not know whether larger or "
        f"smaller values are better. Set {parameter} = 'max' or 'min'."
    )


LEARNING_RATE = "learning_rate"
GRADIENT_NORM = "gradient_norm"
LOSS_WEIGHT = "loss_weight"
LOSS_SCALE = "loss_scale"
SKIPPED_UPDATES = "skipped_updates"
EXAMPLES_PER_SECOND = "examples_per_second"
INPUT_SHARE = "input_share"
GPU_UTILIZATION = "gpu_utilization"

RESERVED = (
    *("loss", "step", "epoch", "split", LEARNING_RATE, GRADIENT_NORM, EXAMPLES_PER_SECOND),
    *(LOSS_SCALE, SKIPPED_UPDATES),
)
"""Keys of metrics.jsonl that ddl writes itself; a task's metric cannot have these names."""

_WITH_NAMES = ("loss", LOSS_WEIGHT, LEARNING_RATE, GRADIENT_NORM)


def is_reserved(metric: str) -> bool:
    """Returns whether ddl itself writes a figure of this name, such as "loss" or "loss/NAME"."""
    first, slash, _ = metric.partition("/")
    return is_measured(metric) or (first in _WITH_NAMES if slash else metric in RESERVED)


def is_measured(metric: str) -> bool:
    """Returns whether a figure is one of the machine, which repeats in no other run.

    These go to metrics.jsonl and TensorBoard, and are neither printed nor in the history.
    """
    return metric == INPUT_SHARE or metric.startswith(f"{GPU_UTILIZATION}/")
