"""Conversion of the data that users pass into a `Source` or a `Stream`."""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from ddl.data.source import Source
from ddl.data.stream import Stream, stream
from ddl.errors import DataError

_SETS = (Source, Stream, tf.data.Dataset, keras.utils.PyDataset)


def as_source(data: Any, argument: str = "The data") -> Source | Stream:
    """Returns the examples that data stand for.

    Args:
      data: A source or stream of `ddl.data`; arrays: a dict by feature, or a tuple (x, y) or (x, y,
        weights), whose parts become the features "input", "label" and "weight" unless x is a dict;
        an object with `__len__` and `__getitem__` (see `Source`); or a `tf.data.Dataset`, a
        `keras.utils.PyDataset` or a function that returns an iterator (see `stream`).
      argument: Name of the argument that the data are, such as `Trainer.eval_data`, for errors.

    Raises:
      DataError: If the data are of another kind, or fail the checks of their reader.
    """
    if isinstance(data, Source | Stream):
        return data
    if isinstance(data, str | os.PathLike):
        raise DataError(
            f"{argument} must be arrays, a data set or what a reader returns, got the "
            f"{type(data).__name__} {data!r:.60}. Read files by ddl.data.tf_records and others."
        )
    if hasattr(data, "iloc"):
        raise DataError(f"{argument} is a pandas table. Pass (x.to_numpy(), y.to_numpy()).")
    parts = list(data.values()) if isinstance(data, Mapping) else data
    if isinstance(parts, tuple | list) and any(isinstance(one, _SETS) for one in parts):
        raise DataError(
            f"{argument} must be one data set, got {[type(one).__name__ for one in parts]}. Join "
            "sets by ddl.data.concatenate or mix, or pass Trainer.train_data a dict by name."
        )
    try:
        is_function = callable(data) and not hasattr(type(data), "__getitem__")
        if isinstance(data, tf.data.Dataset | keras.utils.PyDataset | Iterator) or is_function:
            return stream(data)
        return Source(tuple(data) if isinstance(data, list) and _is_pair(data) else data)
    except DataError as error:
        error.args = (f"{error}\n  in {argument}",)
        raise


def sources_by_name(data: Any) -> dict[str, Source | Stream]:
    """Returns training data as sources by name; the name is "" if there is only one.

    Args:
      data: As `as_source` takes it, or a mapping from name to such data.

    Raises:
      DataError: If data are of another kind, or a name is empty.
    """
    if not isinstance(data, Mapping) or not any(map(_is_set, data.values())):
        return {"": as_source(data, "Trainer.train_data")}
    if bad := [name for name in data if not isinstance(name, str) or not name]:
        raise DataError(f"A source in Trainer.train_data needs a name of text, got {bad[0]!r}.")
    return {name: as_source(one, f"Trainer.train_data[{name!r}]") for name, one in data.items()}


def _is_set(data: Any) -> bool:
    """Returns whether a value of a mapping is a data set of its own, and no feature."""
    if isinstance(data, tuple | list):
        return _is_pair(data)
    is_array = hasattr(data, "__array__") or isinstance(data, range | str | bytes | tf.RaggedTensor)
    has_items = hasattr(data, "__getitem__") or hasattr(data, "__getitems__")
    return not is_array and (has_items or callable(data) or isinstance(data, (*_SETS, Iterator)))


def _is_pair(data: Sequence[Any]) -> bool:
    """Returns whether it is x, y or x, y, weights of arrays, and no sequence of items."""
    return len(data) in (2, 3) and all(hasattr(one, "__array__") for one in data)
