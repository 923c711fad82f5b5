"""Changes of variables by `moved` and `average`."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from ddl.errors import ConfigError


def weights_of_both(target: Any, of: Any) -> tuple[list[tf.Variable], list[tf.Variable]]:
    """Returns the weights of the two arguments of `average`.

    Raises:
      ConfigError: If one has no weights, or their shapes differ.
    """
    targets, sources = _weights("target", target), _weights("of", of)
    shapes = [[tuple(v.shape) for v in variables] for variables in (targets, sources)]
    if shapes[0] != shapes[1]:
        raise ConfigError(
            f"update.average: target and `of` must have weights of the same shapes, got "
            f"{shapes[0]} and {shapes[1]}. Build both from the same layers."
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


def move_towards(
    strategy: tf.distribute.Strategy,
    targets: Sequence[tf.Variable],
    sources: Sequence[tf.Variable],
    decay: float | tf.Tensor,
) -> None:
    """Moves variables towards others, keeping the share `decay`. Cross-replica context."""
    share = 1 - tf.cast(decay, tf.float64)
    for variable, source in zip(targets, sources, strict=True):
        how = _move if variable.dtype.is_floating else _assign
        strategy.extended.update(variable, how, args=(source, share))


def add(variable: tf.Variable, value: tf.Tensor) -> tf.Operation:
    """Adds a value to a variable. In the update context of a strategy."""
    return variable.assign_add(tf.convert_to_tensor(value))


def _move(variable: tf.Variable, source: tf.Tensor, share: tf.Tensor) -> tf.Operation:
    """Moves a variable by a share of the distance to a source: `share` is float64 []."""
    distance = tf.cast(source, variable.dtype) - variable
    return variable.assign_add(tf.cast(share, variable.dtype) * distance)


def _assign(variable: tf.Variable, source: tf.Tensor, share: tf.Tensor) -> tf.Operation:
    """Assigns a source to a variable that has no fractions, such as a counter."""
    return variable.assign(tf.cast(source, variable.dtype))
