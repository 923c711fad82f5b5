"""Arrays in memory, or mapped from files, as examples."""

from typing import Any

import numpy as np
import tensorflow as tf

from ddl.data.features import array_of, named, taken_by_tensorflow, tensorflow_dtype
from ddl.errors import DataError

_CHUNK = 1 << 24  # weights that are checked at once


class Arrays:
    """Examples that are the rows of arrays. NumPy memory maps are read where they lie.

    Attributes:
      arrays: The arrays by feature, each [n, …]. They are not copied.
    """

    def __init__(self, arrays: Any):
        """Checks the arrays.

        Args:
          arrays: Arrays [n, …] by feature, or a tuple (x, y) or (x, y, weights) of such, where x
            may be a dict. NumPy converts other values.

        Raises:
          DataError: If there are none; if their lengths differ; if an array is a scalar or has a
            dtype that TensorFlow lacks; or if the feature "weight" is not one finite float ≥ 0 per
            example, or 0 for all.
        """
        self.arrays = {
            name: _as_array(name, array) for name, array in named(arrays, "The data", 1).items()
        }
        first, *others = self.arrays
        for name in others:
            if len(self.arrays[name]) != len(self.arrays[first]):
                raise DataError(
                    f"All features must have the same number of examples, but {first!r} has "
                    f"{len(self.arrays[first]):,} and {name!r} has {len(self.arrays[name]):,}. "
                    "Pass arrays whose first dimensions are equal."
                )
        if not len(self):
            raise DataError(
                f"Feature {first!r} must have at least one example, got shape "
                f"{self.arrays[first].shape}. Pass data with examples."
            )
        self.spec = {
            name: tf.TensorSpec(array.shape[1:], tensorflow_dtype(name, array[:1]), name)
            for name, array in self.arrays.items()
        }
        if "weight" in self.arrays:
            _check_weights(self.arrays["weight"])

    def __len__(self) -> int:
        """Returns the number of examples."""
        return len(next(iter(self.arrays.values())))

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns one example."""
        return {name: array[index] for name, array in self.arrays.items()}

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the examples at indices, int64 [b], as arrays [b, …]."""
        return {name: taken_by_tensorflow(array[indices]) for name, array in self.arrays.items()}


def _as_array(name: str, data: Any) -> np.ndarray:
    if isinstance(data, np.ndarray):  # a map of a file stays one
        array = data if isinstance(data, np.memmap) else np.asarray(data)
    else:
        array = array_of(data, name)
    if array.ndim == 0:
        raise DataError(
            f"Feature {name!r} must have one value per example, shape [examples, …], got a single "
            f"value, {array.item()!r:.60}. Pass an array, or repeat the value by np.full."
        )
    if array.dtype == object:
        tensorflow_dtype(name, array)
    return array


def _check_weights(weight: np.ndarray) -> None:
    if weight.ndim != 1 or not tf.as_dtype(weight.dtype).is_floating:
        raise DataError(
            f"Feature 'weight' must be one float per example, got {weight.dtype} of shape "
            f"{weight.shape}. Pass an array [examples]; .astype('float32') converts its numbers."
        )
    some = False
    for start in range(0, len(weight), _CHUNK):
        part = np.asarray(weight[start : start + _CHUNK])
        bad = ~(np.isfinite(part) & (part >= 0))
        if bad.any():
            row = int(np.argmax(bad))
            raise DataError(
                f"Feature 'weight' must be a finite number of at least 0, got {part[row]} in "
                f"example {start + row}. Correct it; an example of weight 0 does not count."
            )
        some = some or bool((part > 0).any())
    if not some:
        raise DataError(
            f"Feature 'weight' is 0 for all {len(weight):,} examples, so no example counts. Give a "
            "positive weight to the examples to train or evaluate on."
        )
