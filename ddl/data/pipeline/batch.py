"""A global batch, as a pipeline passes it to the replicas."""

from typing import Any, NamedTuple

import tensorflow as tf


class Batch(NamedTuple):
    """A global batch: what `BatchPipeline.examples` and `microbatch` need of it.

    It is a structure of tensors, so `strategy.run` gives each replica its part.

    Attributes:
      rows: Features or "index" by name, and "weight", of all replicas of this process or of one.
      arrays: `BatchPipeline.resident_arrays` that "index" refers to; {} if `rows` holds features.
      counter: `ddl.random.batch_counter` of the batch's number, uint64 [2].
    """

    rows: Any
    arrays: Any
    counter: tf.Tensor
