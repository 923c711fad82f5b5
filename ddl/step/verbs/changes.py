"""Changes of variables by `moved` and `average`."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ddl.errors import ConfigError


def weights_of_both(target: Any, of: Any) -> tuple[list[tf.Variable], list[tf.Variable]]:
    """Returns the weights of the two arguments of `average`.

    Raises:
      ConfigError: If one has no weights, their shapes differ, or they share a weight.
    """
    targets, sources = _weights("target", target), _weights("of", of)
    shapes = [[tuple(v.shape) for v in variables] for variables in (targets, sources)]
    if shapes[0] != shapes[1]:
        raise ConfigError(
            f"update.average: target and `of` must have weights of the same shapes, got "
            f"{shapes[0]} and {shapes[1]}. Build both from the same layers."
        )
    if {id(v) for v in targets} & {id(v) for v in sources}:
        raise ConfigError(
            "update.average: target and `of` must not share weights, or the target would follow "
            "itself. Make the target with keras.models.clone_model."
        )
    return targets, sources


def _weights(what: str, part: Any) -> list[tf.Variable]:
    """Returns the weights of a model or layer, or of a list of variables."""
    variables = part.weights if isinstance(part, keras.layers.Layer) else part
    if not isinstance(variables, list | tuple) or not variables:
        raise ConfigError(
            f"update.average: {what} must be a Keras model or layer with weights, or a list of "
            f"variables, got {part!r:.80}."
        )
    return [v.value if isinstance(v, keras.Variable) else v for v in variables]


def check_decay(decay: Any) -> None:
    """Raises ConfigError if the decay of `average` is no number from 0 to 1, nor a float scalar."""
    if tf.is_tensor(decay) or isinstance(decay, tf.Variable):
        if decay.dtype.is_floating and decay.shape.rank == 0:
            return
    elif isinstance(decay, int | float | np.number) and 0 <= decay < 1:
        return
    raise ConfigError(
        "update.average: decay must be at least 0 and below 1, a number or a float scalar tensor, "
        f"got {decay!r:.80}."
    )


def move_towards(
    strategy: tf.distribute.Strategy,
    targets: Sequence[tf.Variable],
    sources: Sequence[tf.Variable],
    decay: float | tf.Tensor,
) -> None:
    """Moves variables towards others, keeping the share `decay`. Cross-replica context."""
    varies = tf.is_tensor(decay) or isinstance(decay, tf.Variable)
    # TensorFlow would read a Python number as float32.
    share = 1 - tf.cast(decay if varies else np.float64(decay), tf.float64)
    move = _move_or_assign if varies else _assign if decay == 0 else _move
    for variable, source in zip(targets, sources, strict=True):
        how = move if variable.dtype.is_floating else _assign
        strategy.extended.update(variable, how, args=(source, share))


def add(variable: tf.Variable, value: tf.Tensor) -> tf.Operation:
    """Adds a value to a variable. In the update context of a strategy."""
    return variable.assign_add(tf.convert_to_tensor(value))


def _move(variable: tf.Variable, source: tf.Tensor, share: tf.Tensor) -> tf.Operation:
    """Moves a variable by a share of the distance to a source: `share` is float64 []."""
    return variable.assign_add(_way(variable, tf.cast(source, variable.dtype), share))


def _move_or_assign(variable: tf.Variable, source: tf.Tensor, share: tf.Tensor) -> tf.Operation:
    """Moves a variable as `_move`, or assigns the source if the share, a tensor, is 1."""
    source = tf.cast(source, variable.dtype)
    moved = variable + _way(variable, source, share)
    return variable.assign(tf.where(tf.equal(share, 1), source, moved))


def _way(variable: tf.Variable, source: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
    """Returns the share of the distance to a source, of the variable's dtype."""
    before = tf.convert_to_tensor(variable)
    # A variable may be infinite, such as a mask; inf - inf is NaN.
    distance = tf.where(tf.equal(source, before), tf.zeros_like(source), source - before)
    return tf.cast(share, variable.dtype) * distance


def _assign(variable: tf.Variable, source: tf.Tensor, share: tf.Tensor) -> tf.Operation:
    """Assigns a source: at decay 0, and to a variable that has no fractions, such as a counter."""
    return variable.assign(tf.cast(source, variable.dtype))
