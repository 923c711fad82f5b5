"""The optimizers of a Trainer by name: one, a dict of several, or parameter groups."""

from collections.abc import Mapping
from typing import Any, TypeAlias

import keras

from ddl.errors import ConfigError
from ddl.optimizers.groups import ONLY, Group, ParameterGroups, check_name

OptimizerOrGroups: TypeAlias = keras.optimizers.Optimizer | ParameterGroups
Optimizers: TypeAlias = OptimizerOrGroups | Mapping[str, OptimizerOrGroups]


def from_keras_name(optimizer: Any, strategy: Any) -> Any:
    """Returns an optimizer given by Keras's name, such as "adam", with Keras's default arguments.

    Args:
      optimizer: The name; optimizers, parameter groups and dicts of them are returned as they are.
      strategy: Strategy in whose scope the optimizer is created.

    Raises:
      ConfigError: If it is something else, or Keras has no optimizer of this name.
    """
    if not isinstance(optimizer, str):
        named = optimizer if isinstance(optimizer, Mapping) else {ONLY: optimizer}
        for name, one in named.items():
            _check_optimizer(name, one)
        return optimizer
    try:
        with strategy.scope():
            return keras.optimizers.get(optimizer)
    except ValueError as error:
        raise ConfigError(
            "Trainer.optimizer must be an optimizer, or the name of one of Keras's, such as "
            f"'adam' or 'sgd', got {optimizer!r:.60}. Correct the name, or pass an instance."
        ) from error


def _check_optimizer(name: Any, optimizer: Any) -> None:
    if isinstance(optimizer, OptimizerOrGroups):
        return
    where = "Trainer.optimizer" if name == ONLY else f"Trainer.optimizer[{name!r}]"
    remedy = "Pass an instance, such as keras.optimizers.Adam(1e-3)."
    if isinstance(optimizer, type):
        remedy = f"Call the class: {optimizer.__name__}(...)."
    elif isinstance(optimizer, list | tuple):
        remedy = (
            "Pass one optimizer, or a dict from a name to each, whose names a step uses: "
            'update.minimize(..., optimizer="NAME").'
        )
    raise ConfigError(f"{where} must be a Keras optimizer, got {optimizer!r:.80}. {remedy}")


def groups_by_name(optimizer: Any) -> dict[str, dict[str, Group]]:
    """Returns, for each name that a step can use, the groups of variables by the optimizer's name.

    Args:
      optimizer: An optimizer, parameter groups, or a dict from name to one of these.

    Returns:
      An optimizer without groups has one group, which takes all variables and has its name. The
      optimizers of parameter groups are named after the groups, as "GROUP" or "NAME/GROUP".

    Raises:
      ConfigError: If the dict is empty, a name is not allowed, or an optimizer is there twice.
    """
    if not isinstance(optimizer, Mapping):
        return {ONLY: _groups(ONLY, optimizer)}
    if not optimizer:
        raise ConfigError("Trainer.optimizer must hold at least one optimizer, got an empty dict.")
    for name in optimizer:
        check_name("Trainer.optimizer", name, "generator")
    found = {name: _groups(name, one) for name, one in optimizer.items()}
    every = [id(group.optimizer) for groups in found.values() for group in groups.values()]
    if len(set(every)) < len(every):
        raise ConfigError(
            f"Trainer.optimizer: each of {', '.join(optimizer)} needs an optimizer of its own, but "
            "two are the same object. In gin, use a scope for each: @generator/Adam()."
        )
    return found


def _groups(name: str, optimizer: Any) -> dict[str, Group]:
    if not isinstance(optimizer, ParameterGroups):
        return {name: Group(optimizer)}
    prefix = "" if name == ONLY else f"{name}/"
    return {f"{prefix}{group}": own for group, own in optimizer.groups.items()}


def by_name(optimizer: Any) -> dict[str, Any]:
    """Returns the optimizers by name, with those of parameter groups; a single one by `ONLY`.

    The argument, the names and the errors are those of `groups_by_name`.
    """
    return {
        name: group.optimizer
        for groups in groups_by_name(optimizer).values()
        for name, group in groups.items()
    }


def frozen_until(optimizer: Any) -> dict[str, int]:
    """Returns the step from which each optimizer updates its variables, by its name."""
    return {
        name: group.frozen_until
        for groups in groups_by_name(optimizer).values()
        for name, group in groups.items()
    }


def figure(kind: str, name: str) -> str:
    """Returns the name of an optimizer's figure, such as "learning_rate" or "learning_rate/NAME".

    Args:
      kind: Kind of the figure.
      name: Name of the optimizer.
    """
    return kind if name == ONLY else f"{kind}/{name}"
