"""Conversion of arrays, pairs and data sets into a `Source`."""

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from ddl.data.arrays import ArraySource
from ddl.data.source import Source
from ddl.data.stream import StreamSource
from ddl.errors import DataError


def as_source(data: Any) -> Source:
    """Converts data into a `Source`.

    Args:
      data: A `Source`; a mapping of arrays by feature name; a pair (images, labels), which become
        the features "image" and "label"; or an unbatched `tf.data.Dataset` of dicts or of such
        pairs.

    Raises:
      DataError: If `data` has another type, or fails the checks of `ArraySource` or `StreamSource`.
    """
    if isinstance(data, Source):
        return data
    if isinstance(data, tf.data.Dataset):
        return StreamSource(data)
    parts = list(data.values()) if isinstance(data, Mapping) else data
    if isinstance(parts, tuple | list):
        sets = [type(one).__name__ for one in parts if isinstance(one, Source | tf.data.Dataset)]
        if sets:
            raise DataError(
                f"Trainer.train_data and Trainer.eval_data must be one data set each, got "
                f"{len(sets)}: {', '.join(sets)}. Pass one of them; evaluate on another with a "
                "Trainer, or a run with --mode=eval, of its own."
            )
    if isinstance(data, Mapping):
        return ArraySource(data)
    if isinstance(data, tuple | list) and len(data) == 2:
        return ArraySource(image=data[0], label=data[1])
    raise DataError(
        f"Data of type {type(data).__name__} are not supported. Pass a ddl.data source, a mapping "
        "of arrays by feature name, a pair (images, labels), or a tf.data.Dataset of single "
        "examples."
    )
