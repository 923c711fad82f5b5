"""Data cut to a few batches, so that a run of three updates sees a batch with padding."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from ddl.checking.configurations import UPDATES
from ddl.data.source import Source
from ddl.data.stream import Stream
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


class _FirstItems:
    """The first items of a source, with floats in float64."""

    def __init__(self, source: Source, length: int):
        self._source, self._length = source, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {name: column[0] for name, column in self.rows(np.array([index])).items()}

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {
            name: column.astype(np.float64) if _widens(name, column.dtype) else column
            for name, column in self._source.rows(indices).items()
        }

    def decode(self, item: dict[str, tf.Tensor], seed: tf.Tensor) -> dict[str, tf.Tensor]:
        given = {
            name: tf.cast(item[name], spec.dtype) for name, spec in self._source.row_spec.items()
        }
        return {
            name: tf.cast(value, tf.float64) if _widens(name, value.dtype.as_numpy_dtype) else value
            for name, value in self._source.decoded(given, seed).items()
        }


def shortened(source: Source | Stream, batch: int, notes: list[str]) -> Source | Stream:
    """Returns the first examples of a source, with floats in float64.

    Args:
      source: The source.
      batch: The global batch size.
      notes: Gets a line if the source cannot be cut.
    """
    if isinstance(source, Source):
        items = _FirstItems(source, examples_for(len(source), batch))
        if source.arrays is not None:
            return Source(items.rows(np.arange(len(items))))
        return Source(items, None if source.decode is None else items.decode)
    count = source.num_examples
    if count is None or count > UPDATES * batch or count % batch == 0:
        notes.append(
            "No batch with padding was checked: a stream is read in sequence and cannot be cut. "
            "Check with arrays of a few examples."
        )
    return source


@contextmanager
def small_data(notes: list[str]) -> Iterator[None]:
    """Cuts the data of each trainer that is made within the `with` block.

    Args:
      notes: Gets a line if a source cannot be cut.
    """
    pipeline = assembly.BatchPipeline

    def of_first_examples(source: Source | Stream, global_batch_size: int, **options: Any) -> Any:
        short = shortened(source, global_batch_size, notes)
        return pipeline(short, global_batch_size, **options)

    assembly.BatchPipeline = of_first_examples  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        assembly.BatchPipeline = pipeline  # type: ignore[misc]


def _widens(name: str, dtype: Any) -> bool:
    """Returns whether a feature becomes float64; "weight" stays float32 in ddl."""
    return np.dtype(dtype).kind == "f" and name != "weight"
