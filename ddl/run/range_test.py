"""The learning rate range test of Smith 2017, arXiv:1506.01186."""

import dataclasses
from types import SimpleNamespace

import keras
import numpy as np

from ddl.checkpoints import contents
from ddl.choices import check_types
from ddl.distribution.traits import traits_of
from ddl.errors import ConfigError, TrainingDiverged
from ddl.optimizers.groups import by_name
from ddl.training.trainer import Trainer

_FEWEST = 10


@dataclasses.dataclass(frozen=True)
class RangeTest:
    """The result of `ddl.find_learning_rate`. Arrays are float64 [updates made].

    Attributes:
      rates: Learning rate of each update.
      losses: Mean loss of each update's batch, before the update.
      smoothed: The losses, up to four times the first, smoothed by a Gaussian centred on each: a
        mean of past losses would lag.
      suggested: Rate at which the smoothed loss falls fastest; None if the loss does not fall.
    """

    rates: np.ndarray
    losses: np.ndarray
    smoothed: np.ndarray
    suggested: float | None


def find_learning_rate(
    trainer: Trainer, lowest: float = 1e-6, highest: float = 10.0, steps: int = 200
) -> RangeTest:
    """Makes a learning rate range test (Smith 2017, arXiv:1506.01186), and undoes its updates.

    The rate grows exponentially from update to update, until `highest` or until training diverges:
    the loss is not finite, or exceeds four times its first value. Afterwards weights, slots, step
    and learning rate of the trainer are as before. Eager, cross-replica context.

        trainer = ddl.Trainer(task, keras.optimizers.SGD(0.1, momentum=0.9), data, …)
        trainer.optimizer.learning_rate = ddl.find_learning_rate(trainer).suggested

    Args:
      trainer: A trainer with one loss and one optimizer, whose learning rate is a number.
      lowest: Learning rate of the first update.
      highest: Learning rate of the last update.
      steps: Number of updates, at least 10.

    Raises:
      ConfigError: If an argument is out of range, the trainer is another one or belongs to a
        cluster, or training diverges in the first updates.
    """
    check_types(find_learning_rate, locals(), ("return",))
    if not 0 < lowest < highest or steps < _FEWEST:
        raise ConfigError(f"The test needs 0 < lowest < highest and at least {_FEWEST} steps.")
    optimizer = _optimizer_of(trainer)
    rates, losses = np.geomspace(lowest, highest, steps), list[float]()
    trainer.trace()  # a layer may create variables in its first call
    state, values = trainer.state, contents.values_of(trainer)
    contents.check_covers(values, trainer.variables_in_use)
    before = contents.snapshot(values, trainer.strategy)
    try:
        for rate in rates:
            optimizer.learning_rate.assign(rate)
            losses.append(trainer.train(1, progress=False)["loss"])
            if len(losses) >= _FEWEST and losses[-1] > 4 * abs(losses[0]):
                break
    except TrainingDiverged:
        if len(losses) < _FEWEST:
            at = f"{rates[len(losses)]:g}, in update {len(losses) + 1}"
            raise ConfigError(f"Diverged at {at}. Lower `lowest`, or raise `steps`.") from None
    finally:
        reader = SimpleNamespace(get_tensor=before.__getitem__)
        contents.assign(values, reader, trainer.strategy)
        trainer.state = state
    rates = rates[: len(losses)]
    # A single huge loss at the end would hide all others.
    places, capped = np.arange(len(losses)), np.minimum(losses, 4 * abs(losses[0]))
    weights = np.exp(-0.5 * ((places[:, None] - places) / (0.03 * steps)) ** 2)
    smoothed = weights @ capped / weights.sum(axis=1)
    falls = smoothed.min() < 0.95 * smoothed[0]  # else the slope is noise
    steepest = float(rates[np.argmin(np.gradient(smoothed))]) if falls else None
    return RangeTest(rates, np.array(losses), smoothed, steepest)


def _optimizer_of(trainer: Trainer) -> keras.optimizers.Optimizer:
    """Returns the optimizer whose rate is tested, or raises ConfigError."""
    if traits_of(trainer.strategy).several_processes:
        raise ConfigError("find_learning_rate runs in one process. Call it without a cluster.")
    optimizer, *others = by_name(trainer.optimizer).values()
    rate = optimizer._learning_rate
    if others or "loss" not in trainer.metric_names or not isinstance(rate, keras.Variable):
        raise ConfigError(
            "find_learning_rate needs one loss and one optimizer whose learning rate is a number, "
            f"such as SGD(0.1), got {1 + len(others)} optimizers and {type(rate).__name__}."
        )
    return optimizer
