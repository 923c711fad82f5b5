"""Conversion of schedule lengths to updates, from epochs or from the length of the run.

Schedules take plain numbers of updates. In a config these functions compute them from the macros
STEPS_PER_EPOCH and TOTAL_STEPS, which the run sets once the data are loaded.
"""

import math
from collections.abc import Sequence
from typing import overload

from ddl.errors import ConfigError


@overload
def epochs_to_steps(epochs: float, steps_per_epoch: int | None) -> int: ...
@overload
def epochs_to_steps(epochs: Sequence[float], steps_per_epoch: int | None) -> list[int]: ...
def epochs_to_steps(
    epochs: float | Sequence[float], steps_per_epoch: int | None
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
    if steps_per_epoch is None:
        raise _missing("epochs_to_steps.steps_per_epoch", "STEPS_PER_EPOCH")
    if isinstance(epochs, Sequence):
        return [_steps(one, steps_per_epoch) for one in epochs]
    return _steps(epochs, steps_per_epoch)


def warmup_steps(
    steps: int | None = None, epochs: float | None = None, steps_per_epoch: int | None = None
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


def steps_after_warmup(total_steps: int | None, warmup_steps: int = 0) -> int:
    """Returns the number of updates between the end of the warm-up and the end of the run.

    Args:
      total_steps: Length of the run in updates.
      warmup_steps: Length of the warm-up in updates.

    Raises:
      ConfigError: If no updates are left after the warm-up, or `total_steps` is missing.
    """
    if total_steps is None:
        raise _missing("steps_after_warmup.total_steps", "TOTAL_STEPS")
    if warmup_steps >= total_steps:
        raise ConfigError(
            f"The warm-up must be shorter than the run, but it takes {warmup_steps:,} updates and "
            f"the run has {total_steps:,}. Decrease WARMUP_STEPS or WARMUP_EPOCHS, or train longer."
        )
    return total_steps - warmup_steps


def _missing(argument: str, macro: str) -> ConfigError:
    return ConfigError(
        f"{argument} must be a number of updates, got None. Bind it to %{macro}, which follows "
        "from the data, the batch size and the length of the run, or to a number."
    )


def _steps(epochs: float, steps_per_epoch: int) -> int:
    if not 0 <= epochs < math.inf:
        raise ConfigError(
            f"A number of epochs must be finite and at least 0, got {epochs}. Correct it in the "
            "config or the call, such as TRAIN_EPOCHS or WARMUP_EPOCHS."
        )
    # 1.1 epochs of 110 steps are 121, but 1.1 * 110 > 121 in floating point.
    steps = math.ceil(round(epochs * steps_per_epoch, 6))
    return max(steps, 1) if epochs else 0
