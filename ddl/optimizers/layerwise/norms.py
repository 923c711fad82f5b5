"""Norms of layers, from which LARS and LAMB compute the rate of each layer."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import keras
import tensorflow as tf

from ddl.devices import packing
from ddl.errors import ConfigError
from ddl.optimizers.fused import Together


class ByNorms(Together):
    """Mixin ahead of a Keras optimizer: the rate of a variable follows from two norms.

    One is that of the weights, the other that of the gradient (LARS) or of the direction (LAMB).
    Where a replica holds a share of each variable alone, `compared` returns the share of the
    second value, and `with_norms` gives the norms of the whole ones.
    """

    _given: dict[int, tf.Tensor] | None = None

    def compared(
        self, gradients: Sequence[tf.Tensor], variables: Sequence[keras.Variable]
    ) -> list[tf.Tensor | None]:
        """Returns what an update compares with each variable; changes nothing. Replica context.

        Args:
          gradients: Dense, one per variable.
          variables: Variables that the optimizer was built with.

        Returns:
          A tensor of the variable's shape; None for a variable that has no rate of its own.
        """
        raise NotImplementedError

    @contextmanager
    def with_norms(
        self, variables: Sequence[keras.Variable], norms: Sequence[tf.Tensor]
    ) -> Iterator[None]:
        """Takes norms as given within the `with` block, which must surround the whole trace.

        Args:
          variables: Variables that the optimizer was built with.
          norms: The norm of each variable, and of what is compared with it: [2].
        """
        places = [self._get_variable_index(variable) for variable in variables]
        # Not by an attribute, which Keras would save in checkpoints.
        self.__dict__["_given"] = dict(zip(places, norms, strict=True))
        try:
            yield
        finally:
            del self.__dict__["_given"]

    def _norms(self, place: int, weights: tf.Tensor, other: tf.Tensor) -> list[tf.Tensor]:
        """Returns two norms [] of the variable at a place, in at least float32."""
        if self._given is None:
            return [_norm(weights), _norm(other)]
        dtype = weights.dtype if weights.dtype.size >= 4 else tf.float32
        return tf.unstack(tf.cast(self._given[place], dtype))

    def _norms_of_each(
        self, places: Sequence[int], weights: Sequence[tf.Tensor], others: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Returns `_norms` of several variables of one dtype: [variables] each."""
        if self._given is None:
            return [packing.norms(weights), packing.norms(others)]
        given = tf.stack([self._given[place] for place in places], axis=1)
        return tf.unstack(tf.cast(given, weights[0].dtype))


def or_one(ratio: tf.Tensor, *norms: tf.Tensor) -> tf.Tensor:
    """Returns the ratio, or 1 where one of the norms is zero."""
    return tf.where(tf.reduce_all(tf.stack(norms) > 0), ratio, tf.ones_like(ratio))


def or_ones(ratios: tf.Tensor, norms: tf.Tensor, others: tf.Tensor) -> tf.Tensor:
    """Returns ratios, [n], or 1 where one of two norms is zero."""
    return tf.where(tf.minimum(norms, others) > 0, ratios, tf.ones_like(ratios))


def check_not_negative(optimizer: str, **numbers: float) -> None:
    """Raises ConfigError unless each argument of an optimizer is at least 0."""
    for name, number in numbers.items():
        if not number >= 0:
            raise ConfigError(f"{optimizer}.{name} must be at least 0, got {number}.")


def _norm(values: tf.Tensor) -> tf.Tensor:
    """Returns the Euclidean norm [], in at least float32."""
    return tf.norm(tf.cast(values, tf.float32) if values.dtype.size < 4 else values)
