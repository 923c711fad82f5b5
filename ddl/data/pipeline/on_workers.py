"""Batches on workers that execute functions of a chief, with parameter servers.

Such a worker runs TensorFlow's operations, but no Python of the program. Arrays are sent to it.
Files it reads itself, if their source reads and decodes by TensorFlow's operations alone: the
examples of each batch follow from its number, so that any worker can read any batch.

The operations are part of the worker's function. A tf.data pipeline in it would be built and
optimized again in each call, which takes about a second.
"""

import os

import numpy as np
import tensorflow as tf

from ddl.data.arrays import is_in_memory
from ddl.data.checks import READ_ON_WORKER, checked_finite, checked_weight
from ddl.data.decoded import DecodedSource, seeds_of
from ddl.data.order import batch_indices
from ddl.data.pipeline.batch import Batch
from ddl.data.pipeline.pipeline import BatchPipeline
from ddl.data.pipeline.resident import IN_FILES
from ddl.data.source import IndexedSource, Source, weighted
from ddl.data.storage.shared_memory import is_shared
from ddl.errors import ConfigError
from ddl.random import batch_counter

_PYTHON = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}

_LEAST_CALLS = 8
"""Examples that are read at a time on few cores: a read waits for the storage."""


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
        self._are_read = _has_numbered_batches(pipeline.source)
        self.arrays: dict[str, np.ndarray] = {}
        if self._are_read:
            self._check()
        else:
            self.arrays = pipeline.packed_arrays()

    def batch(self, arrays: dict[str, tf.Tensor], number: tf.Tensor) -> Batch:
        """Returns a whole global batch. On a worker, in a graph.

        Args:
          arrays: `arrays`, as tensors on this host.
          number: Batch number, int64 [], counted from 0 over the whole run.
        """
        if not self._are_read:
            return self._pipeline.batch(arrays, number)
        with tf.device("/device:CPU:0"), tf.name_scope(READ_ON_WORKER):
            return Batch(self._rows(number), {}, batch_counter(number))

    def _rows(self, number: tf.Tensor) -> dict[str, tf.Tensor]:
        """Reads the examples of a batch as `Source.batches` does."""
        pipeline, source = self._pipeline, self.source
        indices, weight = batch_indices(
            number,
            num_examples=pipeline.num_examples,
            global_batch_size=pipeline.global_batch_size,
            seed=pipeline.order_seed,
            shuffle=pipeline.shuffle,
        )
        if isinstance(source, IndexedSource):
            return weighted(checked_weight(source.gather(indices)), weight)
        assert isinstance(source, DecodedSource)
        steps = source.steps_per_epoch(pipeline.global_batch_size)
        features = tf.map_fn(
            lambda row: dict(source.example(*row)),
            (indices, seeds_of(indices, number // steps, pipeline.order_seed)),
            fn_output_signature=source.element_spec,
            parallel_iterations=max(_LEAST_CALLS, os.cpu_count() or 1),
        )
        size = pipeline.global_batch_size
        shaped = {
            name: tf.ensure_shape(features[name], [size, *spec.shape])
            for name, spec in source.element_spec.items()
        }
        return checked_finite(weighted(shaped, weight))

    def _check(self) -> None:
        """Raises ConfigError if reading needs more than operations and constants."""
        read = tf.function(self._rows, autograph=False)
        graph = read.get_concrete_function(tf.TensorSpec([], tf.int64)).graph
        name = type(self.source).__name__
        definition = graph.as_graph_def()
        nodes = [*definition.node, *(n for f in definition.library.function for n in f.node_def)]
        if python := next((node for node in nodes if node.op in _PYTHON), None):
            raise ConfigError(
                "With parameter servers, workers read data by TensorFlow's operations alone, but "
                f"{name} reads them in Python (operation {python.op}, {python.name}). {IN_FILES}."
            )
        if any(is_shared(outer) for outer, _ in graph.captures):
            raise ConfigError(
                "With parameter servers, workers read data by TensorFlow's operations alone, but "
                f"{name} reads files that are mapped into the chief's memory. {IN_FILES}."
            )
        held = [inner for _, inner in graph.captures if inner.dtype in (tf.resource, tf.variant)]
        if held:
            raise ConfigError(
                "With parameter servers, workers read data by TensorFlow's operations alone, but "
                f"{name} reads an object of the chief's memory ({held[0].name}), such as a "
                "tf.lookup table or a variable. Use constants and tf.gather or tf.case in its "
                "place, or use multi_worker_mirrored, where each worker runs the program."
            )


def _has_numbered_batches(source: Source) -> bool:
    """Returns whether the examples are found by their numbers, which the batch's number gives."""
    if is_in_memory(source):
        return False
    methods = (DecodedSource.batches, IndexedSource.batches)
    return any(type(source).batches is method for method in methods)
