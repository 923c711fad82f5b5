"""Columns of a file of predictions: named arrays, one row for each example."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ddl.errors import ConfigError, DataError

OUTPUT = "output"
"""Name of the column of a task that returns one tensor; others of a tuple add a number."""

_TEXT_BYTES = 64  # of the Python object that holds a text


class Column(NamedTuple):
    """The form of a column.

    Attributes:
      name: Its name.
      dtype: Dtype of the values as numpy calls it; "str" for text.
      shape: Shape of the value of one row.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        shape = ", ".join(map(str, self.shape))
        return f"{self.name} {self.dtype} [{shape}]" if shape else f"{self.name} {self.dtype}"


def columns_of(
    outputs: Any, features: Mapping[str, np.ndarray], first_row: int
) -> dict[str, np.ndarray]:
    """Returns the columns of a batch: its features, then its outputs.

    A single output is called "output". The entries of a dict keep their names, those of a tuple are
    numbered; names within others are joined by "/".

    Args:
      outputs: Arrays [b, …], or dicts and tuples of these.
      features: Arrays [b, …] by name.
      first_row: Number of the batch's first row in the data, for errors.

    Returns:
      Arrays [b, …] of numbers, or of objects of class str: numpy's own texts all take the bytes of
      the longest one.

    Raises:
      ConfigError: If two columns have the same name, or an output is complex.
      DataError: If a text is not UTF-8.
    """
    found: dict[str, np.ndarray] = {}
    for name, values in [*features.items(), *_named(outputs, "")]:
        if name in found:
            raise ConfigError(
                f"Two columns of the predictions are called {name!r}. Return the output under "
                "another name from predict, or leave the feature out of Predictions.features."
            )
        found[name] = _storable(name, values, first_row)
    return found


def forms_of(columns: Mapping[str, np.ndarray]) -> list[Column]:
    """Returns the form of each column of a batch."""
    return [
        Column(name, "str" if values.dtype.kind == "O" else values.dtype.name, values.shape[1:])
        for name, values in columns.items()
    ]


def bytes_of_rows(columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns the bytes of each row, int64 [n]; a character of a text counts as one."""
    sizes: Any = 0
    for values in columns.values():
        if values.dtype.kind == "O":
            lengths = np.fromiter(map(len, values.flat), np.int64, values.size)
            each = math.prod(values.shape[1:])
            sizes = sizes + (lengths + _TEXT_BYTES).reshape(len(values), each).sum(1)
        else:
            row = values.dtype.itemsize * math.prod(values.shape[1:])
            sizes = sizes + np.full(len(values), row, np.int64)
    return sizes


def _named(outputs: Any, name: str) -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(outputs, Mapping):
        for key, value in outputs.items():
            yield from _named(value, f"{name}/{key}" if name else str(key))
    elif isinstance(outputs, tuple | list):
        keys: Sequence[Any] = getattr(outputs, "_fields", range(len(outputs)))
        for key, value in zip(keys, outputs, strict=True):
            if isinstance(key, int):
                numbered = f"{name}/{key}" if name else f"{OUTPUT}_{key}"
                yield from _named(value, numbered)
            else:
                yield from _named(value, f"{name}/{key}" if name else key)
    else:
        yield name or OUTPUT, outputs


def _storable(name: str, values: np.ndarray, first_row: int) -> np.ndarray:
    """Returns values that every format can hold without loss."""
    kind = values.dtype.kind
    if kind == "O":
        return _text(name, values, first_row)
    # Dtypes that numpy lacks, such as float8_e5m2, may have the kind of those that it has.
    if kind in "biuf" and values.dtype.isbuiltin == 1:
        return values
    if kind == "c":
        raise ConfigError(
            f"The output {name!r} is complex, which JSON and Parquet do not have. Return its real "
            "and imaginary part from predict."
        )
    return values.astype(np.float32)  # of bfloat16 and the float8 dtypes


def _text(name: str, values: np.ndarray, first_row: int) -> np.ndarray:
    texts = []
    for number, value in enumerate(values.ravel()):
        row = first_row + number // max(1, math.prod(values.shape[1:]))
        try:
            text = value.decode() if isinstance(value, bytes) else str(value)
        except UnicodeDecodeError as error:
            raise DataError(
                f"{name!r} must be UTF-8 text, got {value[:20]!r} in row {row:,} (counted from "
                "0). Leave it out of the predictions, or return numbers."
            ) from error
        if text.endswith("\0"):
            raise DataError(
                f"{name!r} ends with a NUL character in row {row:,} (counted from 0), which numpy "
                "cannot keep. Leave it out of the predictions."
            )
        texts.append(text)
    return np.array(texts, object).reshape(values.shape)
