"""The optimizers of a Trainer: one, a dict of several by name, or parameter groups."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import keras

from ddl.errors import ConfigError, check_no_text, did_you_mean
from ddl.figures import LEARNING_RATE
from ddl.optimizers.learning_rate import learning_rate_at
from ddl.optimizers.variables import matching

ONLY = "optimizer"
"""Name of the optimizer of a Trainer that was given one without a name."""


@dataclasses.dataclass(frozen=True)
class Group:
    """The variables that an optimizer updates.

    Attributes:
      optimizer: Optimizer of the group, with a learning rate, schedule and weight decay of its own.
      variables: Regular expressions, searched in the variables' paths, such as "^backbone/". None
        means all variables that no other group names.

    Raises:
      ConfigError: If `variables` is a text, or `optimizer` none of Keras's.
    """

    optimizer: keras.optimizers.Optimizer
    variables: Sequence[str] | None = None

    def __post_init__(self) -> None:
        check_no_text("Group.variables", self.variables)
        if not isinstance(self.optimizer, keras.optimizers.Optimizer):
            raise ConfigError(
                f"Group.optimizer must be a Keras optimizer, got {self.optimizer!r:.80}. Pass an "
                "instance, such as keras.optimizers.SGD(0.1); in a config, write @SGD() with "
                "parentheses."
            )


class ParameterGroups:
    """Several groups of variables, each with its optimizer, for the gradient of one loss.

        optimizer = ddl.optimizers.ParameterGroups(
            {
                "backbone": Group(keras.optimizers.SGD(0.001), ["^backbone/"]),
                "head": Group(keras.optimizers.SGD(0.1)),
            }
        )

    A Trainer takes it wherever it takes an optimizer. Weight penalties, clipping by the global norm
    and the check for overflow see all groups together, as if there were one optimizer.

    Attributes:
      groups: The groups by name.
    """

    def __init__(self, groups: Mapping[str, Group | keras.optimizers.Optimizer]):
        """Checks the groups.

        Args:
          groups: From name to `Group`. An optimizer alone stands for the `Group` of all variables
            that no other group names.

        Raises:
          ConfigError: If there is no group, a name or value is not allowed, two groups take the
            remaining variables, or two groups share an optimizer.
        """
        if not isinstance(groups, Mapping) or not groups:
            raise ConfigError(
                "ParameterGroups takes a dict from name to Group with at least one group, got "
                f"{groups!r:.80}. Write, for example, {{'backbone': Group(SGD(0.1), ['conv']), "
                "'head': SGD(1.0)}."
            )
        self.groups: dict[str, Group] = {}
        for name, group in groups.items():
            _check_name("ParameterGroups", name, "backbone")
            self.groups[name] = group if isinstance(group, Group) else Group(group)
        rest = [name for name, group in self.groups.items() if group.variables is None]
        if len(rest) > 1:
            raise ConfigError(
                f"ParameterGroups: the groups {', '.join(rest)} both take the variables that no "
                "other group names. Give all but one of them Group.variables."
            )
        _check_own("ParameterGroups", self.groups, list(self.groups.values()))


OptimizerOrGroups: TypeAlias = keras.optimizers.Optimizer | ParameterGroups
Optimizers: TypeAlias = OptimizerOrGroups | Mapping[str, OptimizerOrGroups]


def assign(
    groups: Mapping[str, Group], variables: Sequence[keras.Variable]
) -> dict[str, list[keras.Variable]]:
    """Returns the variables of each group, in the given order.

    Args:
      groups: The groups by name.
      variables: All variables to distribute.

    Raises:
      ConfigError: If a pattern is invalid or matches no variable, a variable belongs to no
        group or to two, or a group has no variables.
    """
    indices = {
        name: matching(variables, group.variables, f"Group.variables of the group {name!r}")
        for name, group in groups.items()
        if group.variables is not None
    }
    found: dict[str, list[keras.Variable]] = {name: [] for name in groups}
    rest = [name for name in groups if name not in indices]
    for index, variable in enumerate(variables):
        names = [name for name, own in indices.items() if index in own]
        if len(names) > 1:
            raise ConfigError(
                f"The variable {variable.path} belongs to the parameter groups "
                f"{' and '.join(names)}. Make the patterns of Group.variables exclude each other."
            )
        if not names and not rest:
            raise ConfigError(
                f"The variable {variable.path} belongs to none of the parameter groups "
                f"{', '.join(groups)}. Add a pattern for it, set one group's variables to None to "
                "take the remaining variables, or freeze its layer with trainable = False."
            )
        found[(names or rest)[0]].append(variable)
    for name, own in found.items():
        if not own:
            raise ConfigError(
                f"The parameter group {name!r} has no variables: other groups name them all, or "
                "its list is empty. Remove the group, or correct Group.variables."
            )
    return found


def from_keras_name(optimizer: Any, strategy: Any) -> Any:
    """Returns an optimizer given by Keras's name, such as "adam", with Keras's default arguments.

    Args:
      optimizer: The name; optimizers, parameter groups and dicts of them are returned as they are.
      strategy: Strategy in whose scope the optimizer is created.

    Raises:
      ConfigError: If it is something else, or Keras has no optimizer of this name.
    """
    if isinstance(optimizer, str):
        try:
            with strategy.scope():
                return keras.optimizers.get(optimizer)
        except ValueError:
            known = [name.lower() for name in dir(keras.optimizers)]
            raise ConfigError(
                "Trainer.optimizer must be an optimizer, or the name of one of Keras's, such as "
                f"'adam' or 'sgd', got {optimizer!r:.60}.{did_you_mean(optimizer, known)} Correct "
                "the name, or pass an instance."
            ) from None
    for name, one in optimizer.items() if isinstance(optimizer, Mapping) else [(ONLY, optimizer)]:
        if not isinstance(one, OptimizerOrGroups):
            where = "Trainer.optimizer" if name == ONLY else f"Trainer.optimizer[{name!r}]"
            raise ConfigError(
                f"{where} must be a Keras optimizer, got {one!r:.80}. Pass an instance, such as "
                "keras.optimizers.Adam(1e-3), or a dict of these by the names that a step uses; "
                "the order is ddl.Trainer(task, optimizer, train_data)."
            )
    return optimizer


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
        _check_name("Trainer.optimizer", name, "generator")
    found = {name: _groups(name, one) for name, one in optimizer.items()}
    every = [group for groups in found.values() for group in groups.values()]
    _check_own("Trainer.optimizer", optimizer, every)
    return found


def by_name(optimizer: Any) -> dict[str, Any]:
    """Returns the optimizers by name, with those of parameter groups; a single one by `ONLY`.

    The argument, the names and the errors are those of `groups_by_name`.
    """
    groups = groups_by_name(optimizer).values()
    return {name: group.optimizer for of_name in groups for name, group in of_name.items()}


def last_rates(optimizers: Mapping[str, keras.optimizers.Optimizer]) -> dict[str, float]:
    """Returns the rate of each optimizer's last update, by the name of its figure. Eager."""
    rates = {}
    for name, optimizer in optimizers.items():
        last = max(int(optimizer.iterations.numpy()) - 1, 0)
        rates[figure(LEARNING_RATE, name)] = learning_rate_at(optimizer, last)
    return rates


def figure(kind: str, name: str) -> str:
    """Returns the name of an optimizer's figure, such as "learning_rate" or "learning_rate/NAME".

    Args:
      kind: Kind of the figure.
      name: Name of the optimizer.
    """
    return kind if name == ONLY else f"{kind}/{name}"


def _groups(name: str, optimizer: Any) -> dict[str, Group]:
    if not isinstance(optimizer, ParameterGroups):
        return {name: Group(optimizer)}
    prefix = "" if name == ONLY else f"{name}/"
    return {f"{prefix}{group}": own for group, own in optimizer.groups.items()}


def _check_name(where: str, name: Any, example: str) -> None:
    if name == ONLY or not isinstance(name, str) or not name.isidentifier():
        raise ConfigError(
            f"{where}: a name must be a word of letters, digits and underscores other than "
            f'{ONLY!r}, such as "{example}", got {name!r}.'
        )


def _check_own(where: str, names: Any, groups: Sequence[Group]) -> None:
    if len({id(group.optimizer) for group in groups}) < len(groups):
        raise ConfigError(
            f"{where}: each of {', '.join(names)} needs an optimizer of its own, but two are the "
            "same object. In gin, use a scope for each: @generator/Adam()."
        )
