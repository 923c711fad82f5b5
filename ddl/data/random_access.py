"""Data sets whose examples a Python function looks up."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from ddl.data.checks import checked_weight
from ddl.data.source import (
    IndexedSource,
    array_of,
    checked_element_spec,
    read_in_place,
    tensorflow_dtype,
    weighted,
)
from ddl.errors import DataError, check_takes, definition_of
from ddl.user_code import place_of, repeats

_BYTES_AT_ONCE = 1 << 18
"""Bytes of the batches that one call of Python looks up for a source that `reads_ahead`."""

_MOST_AT_ONCE = 16

_BYTES_OF_TEXT = 256
"""Assumed size of a text, whose length is not known."""


class RandomAccessSource(IndexedSource):
    """A data set behind a Python lookup function: memory-mapped files, ArrayRecord, a database.

    Attributes:
      reads_ahead: Whether one call looks up several small batches, for functions that cost less
        than the call. Others get the indices of one batch.
    """

    reads_ahead = False

    def __init__(
        self,
        lookup: Callable[[np.ndarray], Mapping[str, Any]],
        length: int,
        element_spec: Mapping[str, tf.TensorSpec] | None = None,
    ):
        """Stores the function and, without `element_spec`, looks up example 0.

        Args:
          lookup: Maps indices, int64 [b], to arrays [b, …] by feature name. Several threads call
            it, and it must be deterministic.
          length: Number of examples.
          element_spec: Shape and dtype of each feature of one example; None infers them from
            example 0.

        Raises:
          DataError: If there are no examples, example 0 cannot be looked up, or the spec is not a
            dict of dense tensors of static shape.
        """
        check_takes("RandomAccessSource.lookup", lookup, ("indices",))
        if length < 1:
            raise DataError(f"RandomAccessSource.length must be at least 1, got {length}.")
        self._lookup = lookup
        self._length = length
        if element_spec is None:
            element_spec = {
                name: tf.TensorSpec(array.shape[1:], tensorflow_dtype(array.dtype), name)
                for name, array in self._look_up(np.zeros([1], np.int64)).items()
            }
        self._element_spec = checked_element_spec(element_spec)

    def __len__(self) -> int:
        """Returns the number of examples."""
        return self._length

    @property
    def element_spec(self) -> dict[str, tf.TensorSpec]:
        """See `Source`."""
        return dict(self._element_spec)

    def _looked_up(self, order: tf.data.Dataset, size: int) -> tf.data.Dataset:
        """See `IndexedSource`."""
        at_once = self.batches_at_once(size) if self.reads_ahead else 1
        if at_once == 1:
            return super()._looked_up(order, size)

        @tf.autograph.experimental.do_not_convert
        def looked_up(block: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            features = self.gather(tf.reshape(block["index"], [at_once * size]))
            found = weighted(checked_weight(features), tf.reshape(block["weight"], [-1]))
            return {
                name: tf.reshape(each, [at_once, size, *each.shape[1:]])
                for name, each in found.items()
            }

        blocks = read_in_place(order, self).batch(at_once, drop_remainder=True)
        return blocks.map(looked_up, num_parallel_calls=2, deterministic=True).unbatch()

    def batches_at_once(self, size: int, most_bytes: int = _BYTES_AT_ONCE) -> int:
        """Returns the number of batches of `size` rows, of these bytes, that one call looks up."""
        of_example = sum(
            spec.shape.num_elements()
            * (_BYTES_OF_TEXT if spec.dtype == tf.string else spec.dtype.size)
            for spec in self._element_spec.values()
        )
        return min(_MOST_AT_ONCE, max(1, most_bytes // max(of_example * size, 1)))

    @tf.autograph.experimental.do_not_convert
    def gather(self, indices: tf.Tensor) -> dict[str, tf.Tensor]:
        """See `IndexedSource`.

        A failing lookup stops the step with an error that names the examples.
        """
        names = list(self._element_spec)
        dtypes = [self._element_spec[name].dtype for name in names]
        values = tf.numpy_function(self.checked_look_up, [indices], dtypes, stateful=False)
        rows = dict(zip(names, values, strict=True))
        for name, spec in self._element_spec.items():
            rows[name].set_shape([indices.shape[0], *spec.shape])
        return rows

    def _look_up(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        try:
            found = self._lookup(indices)
        except DataError:
            raise
        except Exception as error:
            if not repeats(error):  # such as a lost connection: a restart may succeed
                raise
            place = place_of(error)
            # In one line, since `data_errors` takes the message from TensorFlow's by lines.
            where = f", raised in {place}" if place else ""
            raise DataError(
                f"Looking up examples {_some(indices)} raised {type(error).__name__}: "
                f"{error}{where}. Correct the function that looks them up, or the data it reads."
            ) from error
        if not isinstance(found, Mapping):
            raise DataError(
                "RandomAccessSource.lookup must return a dict of arrays by feature name, got "
                f"{type(found).__name__} from {definition_of(self._lookup)}."
            )
        return {name: array_of(rows) for name, rows in found.items()}

    def checked_look_up(self, indices: np.ndarray) -> list[np.ndarray]:
        """Looks up examples, int64 [b], and returns their features in the order of `element_spec`.

        Raises:
          DataError: If the function fails, or what it returns does not fit or is not finite.
        """
        rows = self._look_up(indices)
        if set(rows) != set(self._element_spec):
            raise DataError(
                f"Looking up examples {_some(indices)} must return the features "
                f"{', '.join(sorted(self._element_spec))}, got {', '.join(sorted(rows))}."
            )
        for name, spec in self._element_spec.items():
            shape = (len(indices), *spec.shape)
            # Text has dtype object or bytes in numpy, string in TensorFlow.
            same_dtype = spec.dtype == tf.string or rows[name].dtype == spec.dtype.as_numpy_dtype
            if rows[name].shape != shape or not same_dtype:
                raise DataError(
                    f"Looking up examples {_some(indices)} must return {name!r} as "
                    f"{spec.dtype.name} of shape {shape}, got {rows[name].dtype} of shape "
                    f"{rows[name].shape}. Return all examples in the shape and dtype of example 0, "
                    "or of RandomAccessSource.element_spec."
                )
            if spec.dtype.is_floating and not (finite := np.isfinite(rows[name])).all():
                bad = indices[int(np.argmin(finite.reshape(len(indices), -1).all(axis=1)))]
                raise DataError(
                    f"Feature {name!r} must be finite, but looking up examples {_some(indices)} "
                    f"returned NaN or infinity, first in example {bad}. Remove or replace them."
                )
        return [rows[name] for name in self._element_spec]


def _some(indices: np.ndarray) -> str:
    shown = ", ".join(str(index) for index in indices[:5])
    return shown + (", …" if len(indices) > 5 else "")
