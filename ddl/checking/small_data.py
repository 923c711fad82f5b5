"""Data cut to a few batches, so that a run of three updates sees a batch with padding."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from ddl.checking.configurations import UPDATES
from ddl.data import IndexedSource
from ddl.data.arrays import is_in_memory, with_rows_of
from ddl.data.source import Source
from ddl.training import assembly


def examples_for(length: int, batch: int) -> int:
    """Returns a number of examples whose last batch in at most `UPDATES` batches is not full.

    The last batch has one row more than half of its rows, so that some parts of it have padding
    alone and one part has padding and examples.

    Args:
      length: Number of examples at hand.
      batch: The global batch size.
    """
    full = min((length - 1) // batch, UPDATES - 1)
    rest = max(1, min(batch // 2 + 1, batch - 1))
    return min(length, full * batch + rest)


class _FirstExamples(IndexedSource):
    """The first examples of a source with random access."""

    def __init__(self, source: IndexedSource, length: int):
        self._source, self._length = source, length

    def __len__(self) -> int:
        return self._length

    @property
    def element_spec(self) -> dict[str, tf.TensorSpec]:
        return {
            name: tf.TensorSpec(spec.shape, tf.float64 if _widens(name, spec.dtype) else spec.dtype)
            for name, spec in self._source.element_spec.items()
        }

    @tf.autograph.experimental.do_not_convert
    def gather(self, indices: tf.Tensor) -> dict[str, tf.Tensor]:
        features = self._source.gather(indices)
        return {
            name: tf.cast(value, tf.float64) if _widens(name, value.dtype) else value
            for name, value in features.items()
        }


def shortened(source: Source, batch: int, notes: list[str]) -> Source:
    """Returns the first examples of a source, with floats in float64.

    Args:
      source: The source.
      batch: The global batch size.
      notes: Gets a line if the source cannot be cut.
    """
    count = source.examples_per_epoch(batch)
    length = examples_for(count, batch)
    if is_in_memory(source):
        return with_rows_of(
            {
                name: values[:length].astype(np.float64)
                if values.dtype.kind == "f" and name != "weight"
                else values[:length]
                for name, values in source.features.items()
            }
        )
    if isinstance(source, IndexedSource):
        return _FirstExamples(source, length)
    if source.steps_per_epoch(batch) > UPDATES or count % batch == 0:
        notes.append(
            f"No batch with padding was checked: {type(source).__name__} reads in sequence and "
            "cannot be cut. Check with a ddl.data.ArraySource of a few examples."
        )
    return source


@contextmanager
def small_data(notes: list[str]) -> Iterator[None]:
    """Cuts the data of each trainer that is made within the `with` block.

    Args:
      notes: Gets a line if a source cannot be cut.
    """
    pipeline = assembly.BatchPipeline

    def of_first_examples(source: Source, global_batch_size: int, **options: Any) -> Any:
        short = shortened(source, global_batch_size, notes)
        return pipeline(short, global_batch_size, **options)

    assembly.BatchPipeline = of_first_examples  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        assembly.BatchPipeline = pipeline  # type: ignore[misc]


def _widens(name: str, dtype: tf.DType) -> bool:
    """Returns whether a feature becomes float64; "weight" stays float32 in ddl."""
    return dtype.is_floating and name != "weight"
