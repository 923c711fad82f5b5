"""Variables of an optimizer: choice by patterns of their paths, and rows of sparse gradients.

Biases and normalization parameters are few and set the scale of the activations. Weight decay on
them has no benefit (Goyal et al. 2017, section 5.1, apply none to batch normalization), and their
norms say nothing about how far a layer may move in one update.
"""

import re
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from ddl.distribution.path import path_of
from ddl.errors import ConfigError, check_no_text

BIAS_AND_NORMALIZATION = (r"(^|/)(bias|beta|gamma|scale)$",)
"""Patterns of the paths of biases and normalization parameters in Keras's layers."""

_MOST_SHOWN = 40  # paths that an error lists


def matching(
    variables: Sequence[keras.Variable], patterns: Sequence[str] | None, argument: str
) -> frozenset[int]:
    """Finds the variables whose paths match any of the patterns.

    Args:
      variables: The variables to search, by paths such as "dense_1/bias".
      patterns: Regular expressions, searched anywhere in a path. None takes
        `BIAS_AND_NORMALIZATION`, which may match nothing.
      argument: Name of the argument that holds the patterns, for the error.

    Returns:
      The indices of the matching variables.

    Raises:
      ConfigError: If a given pattern is not a regular expression, or matches no variable.
    """
    found: set[int] = set()
    for pattern in BIAS_AND_NORMALIZATION if patterns is None else patterns:
        try:
            indices = {n for n, v in enumerate(variables) if re.search(pattern, v.path)}
        except (re.error, TypeError) as error:
            raise ConfigError(
                f"{argument} must contain regular expressions, got {pattern!r} ({error}). Correct "
                "the pattern; re.escape makes one of a path."
            ) from error
        if not indices and patterns is not None:
            paths = ", ".join(variable.path for variable in variables[:_MOST_SHOWN])
            raise ConfigError(
                f"{argument}: each pattern must match a variable, but the pattern {pattern!r} "
                f"matches none of {len(variables):,}: {paths}. Correct or remove it; a path begins "
                "with the name of its model."
            )
        found |= indices
    return frozenset(found)


def exclude_from_weight_decay(
    optimizer: keras.optimizers.Optimizer, patterns: Sequence[str] | None = None
) -> keras.optimizers.Optimizer:
    """Excludes variables from an optimizer's decoupled weight decay.

    Unlike Keras's method of this name, it takes path patterns, works before and after the optimizer
    is built, and raises an error if a pattern matches nothing.

    Args:
      optimizer: Any Keras optimizer with `weight_decay`.
      patterns: Regular expressions, searched in the variables' paths. None excludes biases and
        normalization parameters.

    Returns:
      The same optimizer.

    Raises:
      ConfigError: If the optimizer has no weight decay. Also, here or when the optimizer is built,
        if a pattern is invalid or matches no variable, or `patterns` is a text.
    """
    check_no_text("exclude_from_weight_decay.patterns", patterns)
    if not optimizer.weight_decay:
        raise ConfigError(
            "exclude_from_weight_decay needs an optimizer with Keras's weight_decay, but "
            f"{optimizer.name!r} has none. Set weight_decay, or remove exclude_from_weight_decay. "
            "LARS and LAMB take `exclude` instead."
        )
    build = optimizer.build

    def build_and_exclude(variables: Sequence[keras.Variable]) -> None:
        # Keras may call `build` again on a built optimizer; the call has no effect.
        build(variables)
        indices = matching(variables, patterns, "exclude_from_weight_decay.patterns")
        keys = set(getattr(optimizer, "_exclude_from_weight_decay", ()))
        pattern = getattr(optimizer, "_exclude_from_weight_decay_pattern", None)
        optimizer.exclude_from_weight_decay([variables[index] for index in indices])
        optimizer._exclude_from_weight_decay |= keys  # those of earlier calls
        optimizer._exclude_from_weight_decay_pattern = pattern

    if optimizer.built:
        build_and_exclude(optimizer._trainable_variables)
    else:
        optimizer.build = build_and_exclude
    return optimizer


def subtract_rows(variable: tf.Variable, rows: tf.Tensor, values: tf.Tensor) -> None:
    """Subtracts values from rows of a variable. Runs in the strategy's update context.

    The result has the same bits on each path (`DevicePath.subtracts_at_once`).

    Args:
      variable: A variable [all rows, …], or a replica-local copy of it.
      rows: int32 or int64 [rows]; each index at most once.
      values: [rows, …], in the variable's dtype.
    """
    handle = variable.handle
    if path_of().subtracts_at_once:
        tf.raw_ops.ResourceScatterSub(resource=handle, indices=rows, updates=values)
        return
    before = tf.raw_ops.ResourceGather(resource=handle, indices=rows, dtype=values.dtype)
    tf.raw_ops.ResourceScatterUpdate(resource=handle, indices=rows, updates=before - values)


def dense(gradient: tf.Tensor | tf.IndexedSlices, variable: Any) -> tf.Tensor:
    """Returns a dense gradient of a variable's dtype and static shape; repeated rows are summed.

    The shape of a sparse gradient may be a tensor, as within tf.cond.
    """
    values = tf.cast(tf.convert_to_tensor(gradient), variable.dtype)
    known = values.shape.is_fully_defined()
    return values if known else tf.ensure_shape(values, variable.shape)
