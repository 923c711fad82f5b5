"""Texts that identify the rows of a file of predictions, which a resuming command compares."""

import hashlib
from typing import Any

import numpy as np
import tensorflow as tf

from ddl import config
from ddl.data.checks import data_errors
from ddl.data.pipeline import BatchPipeline
from ddl.data.source import Source
from ddl.data.stream import Stream
from ddl.run.checks.same_on_all_workers import versions
from ddl.tasks.parts import copies_of, layers_of, own_variables_of
from ddl.training.trainer import Trainer

_CHUNK_BYTES = 1 << 24


def identity_of(
    trainer: Trainer, *, source: Source | Stream, batch: int, total: int
) -> dict[str, str]:
    """Describes all that the rows depend on, but the devices. Eager, with the weights restored.

    Args:
      trainer: Predicts.
      source: The data, which are read as `data_digest` says.
      batch: Global batch size.
      total: Number of rows.

    Raises:
      DataError: If the data cannot be read.
    """
    return {
        "checkpoint": f"step {trainer.step:,}",
        "weights": weights_digest(trainer),
        "data": f"{total:,} rows in batches of {batch:,}, digest {data_digest(source, batch)}",
        "config": config.config_text(),
        "versions": versions(),
    }


def weights_digest(trainer: Trainer) -> str:
    """Returns a digest of all variables of the task, as the model holds them now. Eager."""
    layers = layers_of(trainer.task)
    variables = {id(v.value): v.value for layer in layers for v in layer.weights}
    variables |= {id(v): v for v in own_variables_of(trainer.task, layers)}
    found = hashlib.blake2b(digest_size=16)
    for variable in variables.values():
        found.update(np.ascontiguousarray(copies_of(variable)[0].numpy()).tobytes())
    return found.hexdigest()


def data_digest(source: Source | Stream, batch: int) -> str:
    """Returns a digest of the features' names and forms, and of examples. Eager.

    For arrays in memory these are all examples, for a stream those of the first batch, and for
    other data those of the first and the last batch. A stream must read all others
    before its last one.

    Args:
      source: Data with an end.
      batch: Global batch size.

    Raises:
      DataError: If the data cannot be read.
    """
    found = hashlib.blake2b(digest_size=16)
    for name, spec in sorted(source.element_spec.items()):
        found.update(f"{name} {spec.dtype.name} {spec.shape}\n".encode())
    if isinstance(source, Source) and source.arrays is not None:
        for _, array in sorted(source.arrays.items()):
            _add(found, array)
        return found.hexdigest()
    pipeline = BatchPipeline(source, batch, shuffle=False)
    last = (pipeline.steps_per_epoch or 1) - 1 if isinstance(source, Source) else 0
    for number in sorted({0, last}):
        with data_errors(source), tf.device("CPU:0"):
            rows = next(pipeline.iterator(tf.distribute.get_strategy(), number))
            for _, column in sorted(rows.items()):
                _add(found, column.numpy())
    return found.hexdigest()


def _add(found: Any, values: np.ndarray) -> None:
    rows = max(1, _CHUNK_BYTES // max(1, values[:1].nbytes))
    for first in range(0, len(values), rows):
        few = values[first : first + rows]
        if few.dtype.kind == "O":
            for given in few.flat:
                text = given.encode() if isinstance(given, str) else given
                found.update(len(text).to_bytes(8, "little") + text)
        else:
            found.update(np.ascontiguousarray(few).tobytes())
