"""Small gradients of one dtype in one buffer, so that the additions are few."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

_MOST_BYTES = 1 << 16
"""Above this, copying a gradient into a buffer takes longer than an addition of its own."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Places of gradients in buffers: the small ones of a dtype share one. Replica context.

    Attributes:
      shapes: Shape of each gradient.
      buffers: Dtype and places of the gradients of each buffer.
    """

    shapes: Sequence[tf.TensorShape]
    buffers: Sequence[tuple[tf.DType, Sequence[int]]]

    @classmethod
    def of(cls, variables: Sequence[keras.Variable]) -> "Layout":
        """Returns the layout of the gradients of variables."""
        small: dict[tf.DType, list[int]] = {}
        large = []
        for place, variable in enumerate(variables):
            dtype, shape = variable.value.dtype, variable.value.shape
            if shape.num_elements() * dtype.size > _MOST_BYTES:
                large.append((dtype, [place]))
            else:
                small.setdefault(dtype, []).append(place)
        return cls([variable.value.shape for variable in variables], [*small.items(), *large])

    @property
    def specs(self) -> list[tf.TensorSpec]:
        """Shape and dtype of each buffer."""
        return [tf.TensorSpec([sum(self._sizes(places))], dtype) for dtype, places in self.buffers]

    def packed(self, gradients: Sequence[Any]) -> list[tf.Tensor]:
        """Returns the buffers of gradients; sparse ones become dense, None zeros."""
        return [
            tf.concat([self._flat(gradients[place], place, dtype) for place in places], axis=0)
            for dtype, places in self.buffers
        ]

    def unpacked(self, buffers: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the gradients that lie in buffers."""
        found: list[Any] = [None] * len(self.shapes)
        for buffer, (_, places) in zip(buffers, self.buffers, strict=True):
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
