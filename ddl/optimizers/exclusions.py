"""Parameters that an optimizer treats otherwise: biases and those of normalization layers.

They are few and set the scale of what the others compute. Decay pulls them to zero for nothing
(Goyal et al. 2017, section 5.1, leave it out for batch normalization), and their norms say nothing
of how far a layer may move in one update.
"""

import re
from collections.abc import Sequence

import keras

from ddl.errors import ConfigError

BIAS_AND_NORMALIZATION = (r"(^|/)(bias|beta|gamma|scale)$",)
"""Patterns of the paths of such variables, by the names that Keras's layers give them."""


def excluded(
    variables: Sequence[keras.Variable], patterns: Sequence[str] | None, argument: str
) -> frozenset[int]:
    """Which variables any of the patterns finds.

    Args:
      variables: Whose paths, such as "dense_1/bias", are looked at.
      patterns: Regular expressions; each is searched for anywhere in a path. None takes
        `BIAS_AND_NORMALIZATION`, which a model need not have.
      argument: What the patterns were given as, for the error.

    Returns:
      The places of the variables in the list.

    Raises:
      ConfigError: If a pattern given is no regular expression, or finds no variable.
    """
    found: set[int] = set()
    for pattern in BIAS_AND_NORMALIZATION if patterns is None else patterns:
        try:
            expression = re.compile(pattern)
        except re.error as error:
            raise ConfigError(
                f"{argument}: {pattern!r} is no regular expression ({error})"
            ) from error
        places = {place for place, v in enumerate(variables) if expression.search(v.path)}
        if not places and patterns is not None:
            raise ConfigError(
                f"{argument}: {pattern!r} is found in none of the variables "
                + ", ".join(variable.path for variable in variables)
            )
        found |= places
    return frozenset(found)


def exclude_from_weight_decay(
    optimizer: keras.optimizers.Optimizer, patterns: Sequence[str] | None = None
) -> keras.optimizers.Optimizer:
    """Leaves some variables out of an optimizer's decoupled weight decay.

    As Keras's method of this name, but by paths, before or after the optimizer is built, and with
    an error where a pattern finds nothing.

    Args:
      optimizer: Any Keras optimizer with `weight_decay`.
      patterns: Regular expressions, searched for in the variables' paths; None takes those of
        biases and normalization parameters.

    Returns:
      The same optimizer.

    Raises:
      ConfigError: If the optimizer has no weight decay; or, here or when the optimizer is built,
        if a pattern finds no variable.
    """
    if not optimizer.weight_decay:
        raise ConfigError(
            f"exclude_from_weight_decay: the optimizer {optimizer.name!r} has no weight_decay of "
            "Keras's kind. Give it one, or leave this out. (LARS and LAMB take `exclude`.)"
        )

    def exclude(variables: Sequence[keras.Variable]) -> None:
        places = excluded(variables, patterns, "exclude_from_weight_decay.patterns")
        optimizer.exclude_from_weight_decay([variables[place] for place in places])

    if optimizer.built:
        exclude(optimizer._trainable_variables)
        return optimizer
    build = optimizer.build

    def build_and_exclude(variables: Sequence[keras.Variable]) -> None:
        # Keras calls it again for an optimizer that is built, to no effect.
        build(variables)
        exclude(variables)

    optimizer.build = build_and_exclude
    return optimizer
