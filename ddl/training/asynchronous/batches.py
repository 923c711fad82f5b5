"""Batches on the workers of parameter servers, which run no Python.

Arrays are sent to each worker once, and the indices of a batch come with the work. A stream of
TensorFlow's operations is made on each worker, which reads it whole and takes the batches of its
work: each batch is computed once, whichever worker gets it.
"""

from typing import Any

import numpy as np
import tensorflow as tf

from ddl.data.batch import Batch, gather, numeric_arrays, packed
from ddl.data.order import batch_indices
from ddl.data.pipeline import BatchPipeline
from ddl.data.source import Source
from ddl.data.stream import Stream
from ddl.errors import ConfigError
from ddl.random import batch_counter

_SENT_UP_TO_BYTES = 2_000_000_000  # below the 2 GiB limit of a TensorFlow message
_PYTHON = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}
_REMEDY = (
    "Pass arrays of numbers, or ddl.data.stream of a tf.data.Dataset that needs no Python, or use "
    "--strategy=multi_worker_mirrored, where each worker runs the program."
)


class WorkerBatches:
    """The batches of a pipeline, as functions on workers take them.

    Attributes:
      source: The source of the pipeline.
    """

    def __init__(self, pipeline: BatchPipeline):
        """Looks how workers get the examples. Eager, on the chief.

        Args:
          pipeline: The batches.

        Raises:
          ConfigError: If the data are neither arrays that can be sent nor a stream of TensorFlow's
            operations alone.
        """
        self._pipeline, self.source = pipeline, pipeline.source
        self._arrays: dict[str, np.ndarray] | None = None
        if isinstance(self.source, Stream):
            self._check_operations()
            return
        arrays = numeric_arrays(self.source)
        size = sum(array.nbytes for array in (arrays or {}).values())
        if arrays is None or size > _SENT_UP_TO_BYTES:
            what = self.source.name if arrays is None else f"{size / 1e9:.1f} GB of arrays"
            raise ConfigError(
                "With parameter servers, workers run no Python, and get at most 2 GB of arrays: "
                f"they cannot read {what}. {_REMEDY}"
            )
        self._arrays = {name: packed(array, False) for name, array in arrays.items()}

    def dataset(self) -> tf.data.Dataset:
        """Builds the data set of a worker: its arrays, for ever, or the numbered batches."""
        if self._arrays is not None:
            return tf.data.Dataset.from_tensors(
                dict(self._arrays)
            ).repeat()  # `next` copies nothing
        assert isinstance(self.source, Stream)
        batches = self.source.batches(self._pipeline.global_batch_size, 0)
        return tf.data.Dataset.zip(tf.data.Dataset.range(2**62), batches)

    def rows_of(self, first: int, count: int) -> dict[str, tf.Tensor]:
        """Returns which rows of the arrays form batches, to send along with the work. Eager.

        Args:
          first: Number of the first batch, counted from 0 over the whole run.
          count: Number of batches.

        Returns:
          "index" and "weight" for `received`, as texts, whose form does not depend on `count`, so
          that the workers' function is traced once; {} for a stream.
        """
        if self._arrays is None:
            return {}
        assert isinstance(self.source, Source)
        pipeline = self._pipeline
        index, weight = batch_indices(
            first,
            count,
            num_examples=len(self.source),
            global_batch_size=pipeline.global_batch_size,
            seed=pipeline.order_seed,
            shuffle=pipeline.shuffle,
        )
        rows = {"index": index, "weight": weight}
        return {name: tf.io.serialize_tensor(each) for name, each in rows.items()}

    def received(self, rows: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Returns `rows_of` on the worker: "index", int64 [count, B], and "weight", float32."""
        dtypes = {"index": tf.int64, "weight": tf.float32}
        with tf.device("/device:CPU:0"):
            return {name: tf.io.parse_tensor(text, dtypes[name]) for name, text in rows.items()}

    def batch(
        self, data: Any, rows: dict[str, tf.Tensor], place: tf.Tensor, number: tf.Tensor
    ) -> Batch:
        """Returns a whole global batch. On a worker, in a graph.

        Args:
          data: The iterator of `dataset` on this worker.
          rows: `received` of the work.
          place: Place of the batch in the work, int64 [].
          number: Number of the batch, int64 [], counted from 0 over the whole run.
        """
        with tf.device("/device:CPU:0"):
            if self._arrays is not None:
                size = self._pipeline.global_batch_size
                index = tf.ensure_shape(rows["index"][place], [size])
                weight = tf.ensure_shape(rows["weight"][place], [size])
                found = gather(next(data), index, self.source.element_spec)
                if "weight" in found:
                    weight *= tf.cast(found["weight"], tf.float32)
                found = {**found, "weight": weight}
            else:
                # A worker that begins later, or takes work again, is ahead of some batches.
                found = tf.while_loop(
                    lambda passed, _: passed < number, lambda *_: next(data), next(data)
                )[1]
        return Batch(found, {}, batch_counter(number))

    def _check_operations(self) -> None:
        """Raises ConfigError if the stream calls Python."""
        made = tf.function(lambda: tf.data.experimental.to_variant(self.dataset()), autograph=False)
        definition = made.get_concrete_function().graph.as_graph_def()
        nodes = [*definition.node, *(n for f in definition.library.function for n in f.node_def)]
        python = next((node for node in nodes if node.op in _PYTHON), None)
        if python is not None:
            raise ConfigError(
                "With parameter servers, workers run no Python, but the stream reads its examples "
                f"by the operation {python.name} ({python.op}). {_REMEDY}"
            )
