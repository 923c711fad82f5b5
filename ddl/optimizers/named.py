"""The optimizers of a Trainer by name: one, or a dict of several."""

from collections.abc import Mapping
from typing import Any, TypeAlias

import keras

from ddl.errors import ConfigError

Optimizers: TypeAlias = keras.optimizers.Optimizer | Mapping[str, keras.optimizers.Optimizer]

ONLY = "optimizer"
"""Name of the optimizer of a Trainer that was given one without a name."""


def by_name(optimizer: Any) -> dict[str, Any]:
    """Returns the optimizers by name; a single one by the name `ONLY`.

    Args:
      optimizer: An optimizer, or a dict from name to optimizer.

    Raises:
      ConfigError: If the dict is empty, a name is not allowed, or an optimizer is there twice.
    """
    if not isinstance(optimizer, Mapping):
        return {ONLY: optimizer}
    if not optimizer:
        raise ConfigError("Trainer.optimizer must hold at least one optimizer, got an empty dict.")
    for name in optimizer:
        if not isinstance(name, str) or not name.isidentifier():
            raise ConfigError(
                f"Trainer.optimizer: the name of an optimizer must be a word of letters, digits "
                f'and underscores, such as "generator", got {name!r}.'
            )
    if ONLY in optimizer:
        raise ConfigError(
            f"Trainer.optimizer: {ONLY!r} cannot be the name of an optimizer in a dict. Name it by "
            'what it updates, such as "generator".'
        )
    if len({id(one) for one in optimizer.values()}) < len(optimizer):
        raise ConfigError(
            f"Trainer.optimizer: each of {', '.join(optimizer)} needs an optimizer of its own, but "
            "two are the same object. In gin, use a scope for each: @generator/Adam()."
        )
    return dict(optimizer)


def figure(kind: str, name: str) -> str:
    """Returns the name of an optimizer's figure, such as "learning_rate" or "learning_rate/NAME".

    Args:
      kind: What the figure shows.
      name: Name of the optimizer.
    """
    return kind if name == ONLY else f"{kind}/{name}"
