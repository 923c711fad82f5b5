"""Gradients of one dtype in one buffer, so that the additions are few."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Layout:
    """Places of gradients in buffers, one for each dtype. Replica context.

    Attributes:
      shapes: Shape of each gradient.
      places: Places of the gradients of each buffer, by dtype.
    """

    shapes: Sequence[tf.TensorShape]
    places: dict[tf.DType, list[int]]

    @classmethod
    def of(cls, variables: Sequence[keras.Variable]) -> "Layout":
        """Returns the layout of the gradients of variables."""
        places: dict[tf.DType, list[int]] = {}
        for place, variable in enumerate(variables):
            places.setdefault(variable.value.dtype, []).append(place)
        return cls([variable.value.shape for variable in variables], places)

    @property
    def specs(self) -> list[tf.TensorSpec]:
        """Shape and dtype of each buffer."""
        return [
            tf.TensorSpec([sum(self._sizes(places))], dtype)
            for dtype, places in self.places.items()
        ]

    def packed(self, gradients: Sequence[Any]) -> list[tf.Tensor]:
        """Returns the buffers of gradients; sparse ones become dense, None zeros."""
        return [
            tf.concat([self._flat(gradients[place], place, dtype) for place in places], axis=0)
            for dtype, places in self.places.items()
        ]

    def unpacked(self, buffers: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the gradients that lie in buffers."""
        found: list[Any] = [None] * len(self.shapes)
        for buffer, places in zip(buffers, self.places.values(), strict=True):
            parts = tf.split(buffer, self._sizes(places))
            for place, part in zip(places, parts, strict=True):
                found[place] = tf.reshape(part, self.shapes[place])
        return found

    def _sizes(self, places: Sequence[int]) -> list[int]:
        return [self.shapes[place].num_elements() for place in places]

    def _flat(self, gradient: Any, place: int, dtype: tf.DType) -> tf.Tensor:
        if gradient is None:
            return tf.zeros(self._sizes([place]), dtype)
        return tf.reshape(tf.convert_to_tensor(gradient), [-1])
