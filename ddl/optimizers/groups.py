"""Parameter groups: one gradient, and an optimizer for each group of variables."""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras

from ddl.errors import ConfigError, did_you_mean

ONLY = "optimizer"
"""Name of the optimizer of a Trainer that was given one without a name."""

_MOST_PATHS = 40
"""Most variables that an error lists."""


@dataclasses.dataclass(frozen=True)
class Group:
    """The variables that an optimizer updates.

    Attributes:
      optimizer: Optimizer of the group, with a learning rate, schedule and weight decay of its own.
      variables: Regular expressions, searched in the variables' paths, such as "^backbone/". None
        means all variables that no other group names.
      frozen_until: Step from which the group is updated; before it, its weights and slots keep
        their values, and its gradients count in no norm. The optimizer counts its own updates, so
        its schedule and warm-up begin at this step. 0 means from the start.

    Raises:
      ConfigError: If `frozen_until` is negative, or a pattern is not a regular expression.
    """

    optimizer: keras.optimizers.Optimizer
    variables: Sequence[str] | None = None
    frozen_until: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.variables, str):
            raise ConfigError(
                f"Group.variables must be a list of patterns, got the text {self.variables!r}. "
                f"Write [{self.variables!r}]."
            )
        if self.frozen_until < 0 or self.frozen_until % 1:
            raise ConfigError(
                "Group.frozen_until must be an integer of at least 0, the number of a step, got "
                f"{self.frozen_until}."
            )
        for pattern in self.variables or ():
            try:
                re.compile(pattern)
            except (re.error, TypeError) as error:
                raise ConfigError(
                    f"Group.variables must contain regular expressions, got {pattern!r} ({error}). "
                    "Correct the pattern; re.escape makes one of a path."
                ) from error


class ParameterGroups:
    """Several groups of variables, each with its optimizer, for the gradient of one loss.

        optimizer = ddl.optimizers.ParameterGroups(
            {
                "backbone": Group(keras.optimizers.SGD(0.001), ["^backbone/"], frozen_until=500),
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
                f"{groups!r:.80}. Write, for example, {{'backbone': Group(SGD(0.1), ['^conv']), "
                "'head': SGD(1.0)}."
            )
        for name, group in groups.items():
            check_name("ParameterGroups", name, "backbone")
            if not isinstance(group, Group | keras.optimizers.Optimizer):
                raise ConfigError(
                    f"ParameterGroups: the group {name!r} must be a Group or a Keras optimizer, "
                    f"got {group!r:.80}. Pass an instance; in a config, write @Group() with "
                    "parentheses."
                )
        self.groups = {
            name: group if isinstance(group, Group) else Group(group)
            for name, group in groups.items()
        }
        rest = [name for name, group in self.groups.items() if group.variables is None]
        if len(rest) > 1:
            raise ConfigError(
                f"ParameterGroups: the groups {', '.join(rest)} both take the variables that no "
                "other group names. Give all but one of them Group.variables."
            )
        if len({id(group.optimizer) for group in self.groups.values()}) < len(self.groups):
            raise ConfigError(
                f"ParameterGroups: each of {', '.join(self.groups)} needs an optimizer of its own, "
                "but two are the same object. In gin, use a scope for each: @backbone/SGD()."
            )


def assign(
    groups: Mapping[str, Group], variables: Sequence[keras.Variable]
) -> dict[str, list[keras.Variable]]:
    """Returns the variables of each group, in the given order.

    Args:
      groups: The groups by name.
      variables: All variables to distribute.

    Raises:
      ConfigError: If a pattern matches no variable, a variable belongs to no group or to two, or a
        group has no variables.
    """
    groups_of = {id(variable): _matching(groups, variable.path) for variable in variables}
    _check_patterns(groups, groups_of.values(), variables)
    found: dict[str, list[keras.Variable]] = {name: [] for name in groups}
    rest = next((name for name, group in groups.items() if group.variables is None), None)
    for variable in variables:
        names = list(dict.fromkeys(name for name, _ in groups_of[id(variable)]))
        if len(names) > 1:
            raise ConfigError(
                f"The variable {variable.path} belongs to the parameter groups "
                f"{' and '.join(names)}. Make the patterns of Group.variables exclude each other."
            )
        if not names and rest is None:
            raise ConfigError(
                f"The variable {variable.path} belongs to none of the parameter groups "
                f"{', '.join(groups)}. Add a pattern for it, set one group's variables to None to "
                "take the remaining variables, or freeze its layer with trainable = False."
            )
        found[names[0] if names else str(rest)].append(variable)
    for name, own in found.items():
        if not own:
            raise ConfigError(
                f"The parameter group {name!r} has no variables: other groups name all of "
                f"{_paths(variables)}. Remove the group."
            )
    return found


def _matching(groups: Mapping[str, Group], path: str) -> list[tuple[str, str]]:
    """Returns group and pattern of each pattern that matches the path of a variable."""
    return [
        (name, pattern)
        for name, group in groups.items()
        for pattern in group.variables or ()
        if re.search(pattern, path)
    ]


def _check_patterns(
    groups: Mapping[str, Group],
    matches: Iterable[list[tuple[str, str]]],
    variables: Sequence[keras.Variable],
) -> None:
    """Raises ConfigError if a pattern matches no variable, or a group has an empty list."""
    matched = {match for of_variable in matches for match in of_variable}
    unmatched = []
    for name, group in groups.items():
        if group.variables is not None and not group.variables:
            raise ConfigError(
                f"Group.variables of the parameter group {name!r} must have at least one pattern, "
                "or be None for the variables that no other group names, got an empty list."
            )
        unmatched += [(name, p) for p in group.variables or () if (name, p) not in matched]
    if not unmatched:
        return
    parts = {part for variable in variables for part in variable.path.split("/")}
    given = []
    for name, pattern in unmatched:
        near = did_you_mean(re.sub(r"\W", "", pattern), parts)
        given.append(
            f"The pattern {pattern!r} of the parameter group {name!r} matches no trained "
            f"variable.{near}"
        )
    raise ConfigError(
        "\n".join(given) + f"\nThe trained variables are {_paths(variables)}. Correct the pattern, "
        "or remove it."
    )


def _paths(variables: Sequence[keras.Variable]) -> str:
    """Returns the paths of variables; of many, the first."""
    paths = [variable.path for variable in variables]
    more = f" and {len(paths) - _MOST_PATHS:,} more" if len(paths) > _MOST_PATHS else ""
    return ", ".join(paths[:_MOST_PATHS]) + more


def check_name(where: str, name: Any, example: str) -> None:
    """Raises ConfigError if the name of an optimizer or group is no word, or "optimizer"."""
    if name == ONLY:
        raise ConfigError(
            f"{where}: {ONLY!r} cannot be the name of an optimizer in a dict. Name it by what it "
            f'updates, such as "{example}".'
        )
    if not isinstance(name, str) or not name.isidentifier():
        raise ConfigError(
            f"{where}: a name must be a word of letters, digits and underscores, such as "
            f'"{example}", got {name!r}.'
        )
