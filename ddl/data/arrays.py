"""Data sets of arrays in memory."""

import functools
from collections.abc import Mapping
from typing import Any, TypeGuard

import numpy as np
import tensorflow as tf

from ddl.data.source import IndexedSource, array_of, tensorflow_dtype
from ddl.errors import DataError

# Chunk size of the check for NaN and infinity, which allocates a mask per chunk.
_CHUNK_BYTES = 1 << 24


class ArraySource(IndexedSource):
    """A data set of in-memory arrays, one per feature, indexed along the first dimension.

    `ArraySource(image=images, label=labels)` and `ArraySource({"image": images, …})` are
    equivalent. `np.asarray` converts inputs that are not arrays; dtypes stay unchanged.
    Lists of text that ends with zero bytes become arrays of Python objects, which keep them.
    """

    def __init__(self, features: Mapping[str, Any] | None = None, /, **named_features: Any):
        """Checks the arrays.

        Args:
          features: Arrays by feature name, each [n, …].
          **named_features: Further arrays by feature name.

        Raises:
          DataError: If there are no features or no examples; if the lengths differ; if an array is
            a scalar, holds Python objects or has a dtype that TensorFlow lacks; if a floating or
            complex array holds NaN or infinity; or if the feature "weight" is not one finite float
            ≥ 0 per example, or is 0 for all examples.
        """
        arrays = {**(features or {}), **named_features}
        if not arrays:
            raise DataError(
                "ArraySource needs at least one feature, got none. Pass arrays by name, such as "
                "image=…."
            )
        for name in arrays:
            if not isinstance(name, str):
                raise DataError(
                    f"Names of features must be text, such as 'image', got {name!r:.60}. Pass a "
                    "mapping from name to array."
                )
        self.features: dict[str, np.ndarray] = {
            name: _as_array(name, array) for name, array in arrays.items()
        }
        first, *others = self.features
        self._length = len(self.features[first])
        for name in others:
            if len(self.features[name]) != self._length:
                raise DataError(
                    f"All features must have the same number of examples, but {first!r} has "
                    f"{self._length:,} and {name!r} has {len(self.features[name]):,}. Pass arrays "
                    "whose first dimensions are equal."
                )
        if not self._length:
            raise DataError(
                f"Feature {first!r} must have at least one example, got shape "
                f"{self.features[first].shape}. Pass data with examples."
            )
        for name, array in self.features.items():
            _check_finite(name, array)
        if "weight" in self.features:
            _check_weight(self.features["weight"])

    def __len__(self) -> int:
        """Returns the number of examples."""
        return self._length

    @property
    def nbytes(self) -> int:
        """Size of the arrays in bytes."""
        return sum(array.nbytes for array in self.features.values())

    @property
    def element_spec(self) -> dict[str, tf.TensorSpec]:
        """See `Source`."""
        return {
            name: tf.TensorSpec(array.shape[1:], tensorflow_dtype(array.dtype), name)
            for name, array in self.features.items()
        }

    @tf.autograph.experimental.do_not_convert
    def gather(self, indices: tf.Tensor) -> dict[str, tf.Tensor]:
        """See `IndexedSource`."""
        return {name: tf.gather(rows, indices) for name, rows in self._tensors.items()}

    @functools.cached_property
    def _tensors(self) -> dict[str, tf.Tensor]:
        # A graph captures eager tensors by reference. It would copy a numpy array into itself as a
        # constant at each trace.
        with tf.init_scope(), tf.device("CPU:0"):
            return {name: tf.constant(array) for name, array in self.features.items()}


def with_rows_of(rows: Mapping[str, np.ndarray]) -> ArraySource:
    """Returns a source of rows of other sources' `features`, also of text as Python objects."""
    return ArraySource(
        {name: array.tolist() if array.dtype == object else array for name, array in rows.items()}
    )


def is_in_memory(source: Any) -> TypeGuard[ArraySource]:
    """Returns whether the examples of a source are the rows of its arrays.

    Not those of a subclass that changes them as they are read.
    """
    return (
        isinstance(source, ArraySource)
        and type(source).gather is ArraySource.gather
        and type(source).example is ArraySource.example
    )


def _as_array(name: str, data: Any) -> np.ndarray:
    try:
        array = array_of(data)
    except ValueError as error:
        raise DataError(
            f"Feature {name!r} must be an array of numbers or text, with an entry for each "
            f"example, but NumPy could not convert it: {str(error).rstrip('.')}. Pad rows of "
            "different lengths to one length."
        ) from error
    if array.dtype == object and all(isinstance(one, str | bytes) for one in array.flat):
        if hasattr(data, "dtype") and array.size:
            raise DataError(
                f"Feature {name!r} must be an array of numbers or text, got text as Python "
                "objects, as in a column of pandas. Convert it: "
                + (
                    "pass its values as a list, .tolist(), which keeps zero bytes at their end."
                    if isinstance(array.flat[0], bytes)
                    else "np.asarray(…, str)."
                )
            )
        if any(one.endswith("\0" if isinstance(one, str) else b"\0") for one in array.flat):
            return array  # text of fixed length would lose zeros at the end
        array = np.asarray(data)
    if array.dtype == object:
        raise DataError(
            f"Feature {name!r} must have a numeric dtype, got Python objects. Its rows may have "
            "different lengths: pad them to one length."
        )
    if array.ndim == 0:
        raise DataError(
            f"Feature {name!r} must have one value per example, shape [examples, …], got a single "
            f"value, {array.item()!r:.60}. Repeat it for each example, such as by np.full."
        )
    try:
        tensorflow_dtype(array.dtype)
    except TypeError as error:
        raise DataError(
            f"Feature {name!r} has dtype {array.dtype}, which TensorFlow does not support. Convert "
            "it to another dtype."
        ) from error
    return array


def _check_finite(name: str, array: np.ndarray) -> None:
    dtype = tensorflow_dtype(array.dtype)
    if not (dtype.is_floating or dtype.is_complex):
        return
    rows = max(1, _CHUNK_BYTES // max(1, array[0].nbytes))
    count, first = 0, -1
    for start in range(0, len(array), rows):
        bad = ~np.isfinite(array[start : start + rows])
        if bad.any():
            if not count:
                first = start + int(np.argmax(bad.reshape(len(bad), -1).any(axis=1)))
            count += int(np.count_nonzero(bad))
    if count:
        raise DataError(
            f"Feature {name!r} contains {count:,} NaN or infinite values, the first in example "
            f"{first}. Remove or replace them."
        )


def _check_weight(weight: np.ndarray) -> None:
    if weight.ndim != 1 or not tensorflow_dtype(weight.dtype).is_floating:
        raise DataError(
            f"Feature 'weight' must be one float per example, got {weight.dtype} of shape "
            f"{weight.shape}. Pass an array [examples]; .astype('float32') converts its numbers."
        )
    if weight.min() < 0:
        row = int(np.argmin(weight))
        raise DataError(
            f"Feature 'weight' must be at least 0, got {weight[row]} in example {row}. Correct it; "
            "an example of weight 0 does not count."
        )
    if weight.max() == 0:
        raise DataError(
            f"Feature 'weight' is 0 for all {len(weight):,} examples, so no example counts. Give a "
            "positive weight to the examples to train or evaluate on."
        )
