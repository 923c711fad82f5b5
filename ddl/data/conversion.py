"""Conversion of arrays, pairs and data sets into a `Source`."""

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from ddl.data.arrays import ArraySource
from ddl.data.batched import has_changing_order, single_examples, warn_once
from ddl.data.naming import named
from ddl.data.objects.py_dataset import PyDatasetSource
from ddl.data.source import Source
from ddl.data.stream import StreamSource
from ddl.errors import DataError


def sources_by_name(data: Any) -> dict[str, Source]:
    """Converts training data into sources by name; the name is "" if there is only one.

    Args:
      data: As `as_source` takes it, or a mapping from name to such data.

    Raises:
      DataError: If data have another type, or a name is empty.
    """
    sets = Source | tf.data.Dataset | keras.utils.PyDataset | Mapping
    several = isinstance(data, Mapping) and any(isinstance(one, sets) for one in data.values())
    if not several:
        return {"": as_source(data, "Trainer.train_data")}
    if bad := [name for name in data if not isinstance(name, str) or not name]:
        raise DataError(
            f"The name of a source must be a text that is not empty, got {bad[0]!r}. Pass several "
            "sources to Trainer.train_data by name, as in {'labelled': …, 'unlabelled': …}."
        )
    return {name: as_source(one, "Trainer.train_data") for name, one in data.items()}


def as_source(data: Any, argument: str = "") -> Source:
    """Converts data into a `Source`.

    Args:
      data: A `Source`; a mapping of arrays by feature name; a tuple as Keras takes it; a
        `tf.data.Dataset` of dicts or of such tuples, whose elements are examples or batches, which
        are split into examples; or a `keras.utils.PyDataset`, whose items are batches of such. A
        tuple is a pair (images, labels), which become the features "image" and "label"; a pair of a
        dict of features and labels; or one of these with the examples' weights, which become
        "weight".
      argument: Name of the argument that the data are, such as `Trainer.eval_data`, for errors.

    Raises:
      DataError: If `data` has another type, or fails the checks of `ArraySource` or `StreamSource`.
    """
    try:
        return _as_source(data, trains=argument != "Trainer.eval_data")
    except DataError as error:
        if argument:
            error.args = (f"{error}\n  in {argument}",)
        raise


def _as_source(data: Any, trains: bool) -> Source:
    if isinstance(data, Source):
        return data
    if isinstance(data, tf.data.Dataset):
        if has_changing_order(data):
            warn_once(
                data,
                "The order of a shuffle() in the tf.data.Dataset changes with each epoch or "
                "process: a resumed run and the other workers read other batches. Remove it, since "
                "the Trainer shuffles; or pass it a seed and reshuffle_each_iteration=False.",
            )
        return StreamSource(single_examples(data))
    if isinstance(data, keras.utils.PyDataset):
        return PyDatasetSource(data)
    parts = list(data.values()) if isinstance(data, Mapping) else data
    if isinstance(parts, tuple | list):
        sets = [type(one).__name__ for one in parts if isinstance(one, Source | tf.data.Dataset)]
        if sets:
            by_name = "To train on several with a step of your own, pass a dict of them by name."
            remedy = f" {by_name}" if trains and not isinstance(data, Mapping) else ""
            raise DataError(
                f"Expected one data set, got {len(sets)}: {', '.join(sets)}. Pass one of them. "
                "Evaluate on another one with a separate Trainer, or a separate --mode=eval."
                f"{remedy}"
            )
    if isinstance(data, Mapping):
        return ArraySource(data)
    if isinstance(data, tuple | list) and len(data) in (2, 3):
        return ArraySource(named(*data))
    raise DataError(
        f"Data of type {type(data).__name__} are not supported. Pass a ddl.data source, a mapping "
        "of arrays by feature name, a tuple (x, y) or (x, y, weights), a tf.data.Dataset of dicts "
        "or of such tuples, or a keras.utils.PyDataset. ddl.data.from_items takes objects with "
        "__len__ and __getitem__, ddl.data.endless generator functions."
    )
