"""Batches on workers that execute functions of a chief, with parameter servers.

Such a worker runs TensorFlow's operations, but no Python of the program. Arrays are sent to it.
Files it reads itself, if their source reads and decodes by TensorFlow's operations alone: the
examples of each batch follow from its number, so that any worker can read any batch.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from ddl.data.arrays import is_in_memory
from ddl.data.decoded import DecodedSource
from ddl.data.pipeline.batch import Batch
from ddl.data.pipeline.datasets import finished
from ddl.data.pipeline.pipeline import BatchPipeline
from ddl.data.pipeline.resident import IN_FILES
from ddl.data.source import IndexedSource, Source
from ddl.data.storage.by_graph import by_graph_alone
from ddl.errors import ConfigError
from ddl.random import batch_counter

_PYTHON = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}


class WorkerBatches:
    """The batches of a pipeline, as a function on a worker makes them.

    Attributes:
      source: The source of the pipeline.
      arrays: Arrays to send to each worker; {} if workers read the examples themselves.
    """

    def __init__(self, pipeline: BatchPipeline):
        """Looks how workers get the examples. Eager, on the chief.

        Args:
          pipeline: The batches.

        Raises:
          ConfigError: If the data are neither arrays that can be sent nor read by TensorFlow's
            operations alone.
        """
        self._pipeline, self.source = pipeline, pipeline.source
        self._are_read = _in_numbered_order(pipeline.source)
        self.arrays: dict[str, np.ndarray] = {}
        if self._are_read:
            self._check()
        else:
            self.arrays = pipeline.packed_arrays()

    def reader(
        self, arrays: dict[str, tf.Tensor], first: tf.Tensor, count: tf.Tensor
    ) -> Callable[[tf.Tensor], Batch]:
        """Returns a function of a batch's number that returns the batch. On a worker, in a graph.

        Args:
          arrays: `arrays`, as tensors on this host.
          first: Number of the first batch, int64 []. The function is called for each batch from
            this one on, in order.
          count: Number of batches, int64 []; no other batch is read ahead.
        """
        if not self._are_read:
            return lambda number: self._pipeline.batch(arrays, number)
        with tf.device("/device:CPU:0"), by_graph_alone():
            batches = iter(finished(self._batches(first).take(count)))

        def read(number: tf.Tensor) -> Batch:
            with tf.device("/device:CPU:0"):
                return Batch(next(batches), {}, batch_counter(number))

        return read

    def _batches(self, first: tf.Tensor) -> tf.data.Dataset:
        pipeline = self._pipeline
        return pipeline.source.batches(
            pipeline.global_batch_size,
            first,  # type: ignore[arg-type]  # as well as an int
            seed=pipeline.order_seed,
            shuffle=pipeline.shuffle,
        )

    def _check(self) -> None:
        """Raises ConfigError if reading needs more than operations and constants."""

        @tf.function(autograph=False)
        def read(first: tf.Tensor) -> Any:
            with by_graph_alone():
                return next(iter(self._batches(first)))

        graph = read.get_concrete_function(tf.TensorSpec([], tf.int64)).graph
        name = type(self.source).__name__
        definition = graph.as_graph_def()
        nodes = [*definition.node, *(n for f in definition.library.function for n in f.node_def)]
        if python := next((node for node in nodes if node.op in _PYTHON), None):
            raise ConfigError(
                "With parameter servers, workers read data by TensorFlow's operations alone, but "
                f"{name} reads them in Python (operation {python.op}, {python.name}). {IN_FILES}."
            )
        held = [inner for _, inner in graph.captures if inner.dtype in (tf.resource, tf.variant)]
        if held:
            raise ConfigError(
                "With parameter servers, workers read data by TensorFlow's operations alone, but "
                f"{name} reads an object of the chief's memory ({held[0].name}), such as a "
                "tf.lookup table or a variable. Use constants and tf.gather or tf.case in its "
                "place, or use multi_worker_mirrored, where each worker runs the program."
            )


def _in_numbered_order(source: Source) -> bool:
    """Returns whether a batch's examples are read by their numbers, which the batch's give."""
    if is_in_memory(source):
        return False
    methods = (DecodedSource.batches, IndexedSource.batches)
    return any(type(source).batches is method for method in methods)
