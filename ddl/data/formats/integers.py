"""Integers of files, which ddl gives to the model as int64."""

from collections.abc import Callable

import numpy as np

from ddl.errors import DataError

_MOST = np.iinfo(np.int64).max


def check_int64(values: np.ndarray, described: Callable[[int], str]) -> None:
    """Checks that integers fit into int64, in which those of uint64 above it would be negative.

    Args:
      values: Integers of any shape.
      described: Names a value for the message by its place in the flat array, such as "Column 'id'
        in row 3 of a.csv".

    Raises:
      DataError: If a value is larger.
    """
    if values.dtype.kind != "u" or values.dtype.itemsize < 8 or not values.size:
        return
    flat = values.reshape(-1)
    if (place := int(np.argmax(flat > _MOST))) or flat[0] > _MOST:
        raise DataError(
            f"{described(place)} must be at most {_MOST}, the largest number of int64, got "
            f"{flat[place]}. Correct it; if such numbers are ids, number them anew from 0 on."
        )
