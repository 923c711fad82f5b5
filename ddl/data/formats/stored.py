"""Folders that `ddl.convert` wrote: records of all features, described in `features.json`."""

import json
import os
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from ddl.data.storage.folders import DESCRIPTION, StoredSource
from ddl.errors import DataError


def stored(folder: str | os.PathLike[str], *, num_examples: int | None = None) -> StoredSource:
    """Builds a source of a folder that `ddl.convert` or `ddl.data.storage.store` wrote.

    Args:
      folder: The folder.
      num_examples: Number of examples to use, from the first on. None uses all.

    Raises:
      DataError: If the folder, its description or one of its files is missing or damaged.
    """
    path = os.path.join(os.fspath(folder), DESCRIPTION)
    try:
        with open(path) as file:
            described = json.load(file)
        features, names = described["features"], described["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} could not be read: {error!r}. Write the folder with python -m ddl.convert "
            f"--gin_file=… --output={folder}."
        ) from error
    files = [os.path.join(os.fspath(folder), name) for name in names]
    if missing := [file for file in files if not os.path.isfile(file)]:
        raise DataError(
            f"{missing[0]} was not found; {path} lists it. Copy the whole folder, or write it "
            "again with ddl.convert."
        )
    source = StoredSource(files, lambda record, seed: _decoded(record, features), num_examples)
    if num_examples is None and len(source) != described["examples"]:
        raise DataError(
            f"{folder} must hold {described['examples']:,} examples, as {DESCRIPTION} says, got "
            f"{len(source):,}. Write it again with ddl.convert."
        )
    return source


def _decoded(record: tf.Tensor, features: Mapping[str, Any]) -> dict[str, tf.Tensor]:
    texts = {name: one["shape"] for name, one in features.items() if one["dtype"] == "string"}
    form = {name: tf.io.FixedLenFeature(texts.get(name, []), tf.string) for name in features}
    values = tf.io.parse_single_example(record, form)
    return {
        name: value
        if name in texts
        else tf.reshape(
            tf.io.decode_raw(value, tf.as_dtype(features[name]["dtype"])), features[name]["shape"]
        )
        for name, value in values.items()
    }
