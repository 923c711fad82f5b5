"""The indices of the examples in the batches of an update."""

from typing import Any

import numpy as np
import tensorflow as tf

from ddl.data.decoded import DecodedSource
from ddl.data.order import batch_indices
from ddl.data.pipeline import BatchPipeline
from ddl.data.source import IndexedSource, Source


def is_numbered(source: Source) -> bool:
    """Returns whether the order of `ddl.data.order` gives the indices of a source's examples."""
    own = type(source).batches
    return source.has_numbered_examples and own in (IndexedSource.batches, DecodedSource.batches)


def indices_of(pipeline: BatchPipeline, first: int, last: int) -> dict[str, np.ndarray] | None:
    """Returns the examples of the batches of some updates, row after row.

    Args:
      pipeline: The pipeline of a source.
      first: The number of batches that the run had consumed before, per batch of an update.
      last: The number afterwards.

    Returns:
      "index", int64 [rows], and "weight", float32 [rows], which is 0 for padding; None if the
      source reads in an order of its own.
    """
    if not is_numbered(pipeline.source):
        return None
    each = pipeline.batches_per_update
    order: dict[str, Any] = {
        "num_examples": pipeline.num_examples,
        "global_batch_size": pipeline.global_batch_size,
        "seed": pipeline.order_seed,
        "shuffle": pipeline.shuffle,
    }
    made = [
        batch_indices(tf.constant(number, tf.int64), **order)
        for number in range(first * each, last * each)
    ]
    return {
        "index": np.concatenate([index.numpy() for index, _ in made]),
        "weight": np.concatenate([weight.numpy() for _, weight in made]),
    }
