"""Checks that a trainer can shard the state of its optimizers."""

from collections.abc import Mapping

import keras
import tensorflow as tf
from absl import logging

from ddl.distribution.traits import traits_of
from ddl.errors import ConfigError, either
from ddl.optimizers import MomentumSGD

_FLAG = "--shard_optimizer_state (Trainer.shard_optimizer_state)"

_BY_ENTRY: tuple[type[keras.optimizers.Optimizer], ...] = (
    *(keras.optimizers.Adadelta, keras.optimizers.Adagrad, keras.optimizers.Adam),
    *(keras.optimizers.AdamW, keras.optimizers.Adamax, keras.optimizers.Ftrl),
    *(keras.optimizers.Lion, keras.optimizers.Nadam, keras.optimizers.RMSprop),
    *(keras.optimizers.SGD, MomentumSGD),
)
"""Optimizers that compute each entry of a weight from the same entry of gradient and slots."""


def has_shares(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether a strategy has several replicas; logs a warning if not.

    Raises:
      ConfigError: If the strategy cannot keep another share on each replica.
    """
    traits = traits_of(strategy)
    name = type(strategy).__name__
    if traits.asynchronous or traits.shares_variables or traits.replicates_handles:
        raise ConfigError(
            f"{_FLAG} needs a copy of each variable on every replica, which "
            f"--strategy=mirrored and multi_worker_mirrored have, got {name}. Leave the flag out, "
            "or use one of these strategies."
        )
    if strategy.num_replicas_in_sync == 1:
        logging.warning(
            "%s has no effect on one replica, which keeps all slots. Use several replicas, or "
            "leave it out.",
            _FLAG,
        )
        return False
    return True


def is_known(optimizer: keras.optimizers.Optimizer) -> bool:
    """Returns whether shares update as whole weights with an optimizer."""
    return type(optimizer) in _BY_ENTRY


def check_optimizers(optimizers: Mapping[str, keras.optimizers.Optimizer]) -> None:
    """Raises ConfigError for an optimizer that shares do not update as whole weights."""
    for optimizer in optimizers.values():
        if not is_known(optimizer):
            known = either([of.__name__ for of in _BY_ENTRY])
            raise ConfigError(
                f"{_FLAG} supports elementwise optimizers only, got {type(optimizer).__name__}. "
                f"Leave the flag out, or use {known}."
            )
        if optimizer.built:
            raise ConfigError(
                f"{_FLAG} needs an optimizer without slots, but {optimizer.name!r} was built "
                "already, with whole slots on each replica. Leave the call of `build` out; the "
                "Trainer builds the optimizer."
            )
