"""Data sets whose examples are read and decoded one by one."""

import abc
import os
import time

import numpy as np
import tensorflow as tf

from ddl.data.checks import checked_finite
from ddl.data.order import index_batches
from ddl.data.source import Source, weighted

_LOOKED_FOR_SECONDS = 60


class DecodedSource(Source):
    """A source that reads and decodes each example on its own, several at once.

    The base class of sources of files. The order is that of all sources with random access: any
    batch is found at once, each epoch is fully shuffled, and each worker reads and decodes only its
    own rows.
    """

    @abc.abstractmethod
    def example(self, index: tf.Tensor, seed: tf.Tensor) -> dict[str, tf.Tensor]:
        """Reads one example. Called while tf.data traces its graph, which runs on the CPU.

        Args:
          index: Number of the example, int64 [], from 0 to length - 1.
          seed: int64 [2], for TensorFlow's stateless random operations. It depends on the run's
            seed, the epoch and the example.

        Returns:
          A tensor for each feature of `element_spec`.
        """

    def batches(
        self,
        global_batch_size: int,
        first_batch: int,
        *,
        seed: int,
        shuffle: bool,
        rows: np.ndarray | None = None,
    ) -> tf.data.Dataset:
        """See `Source`."""
        indices = index_batches(
            first_batch,
            num_examples=len(self),
            global_batch_size=global_batch_size,
            seed=seed,
            shuffle=shuffle,
            rows=rows,
        )
        steps = self.steps_per_epoch(global_batch_size)
        return (
            self._decoded(indices, first_batch, steps, seed)
            .batch(global_batch_size if rows is None else len(rows), drop_remainder=True)
            .map(checked_finite)
        )

    @property
    def _readable(self) -> int:
        """Number of examples that `example` reads."""
        return len(self)

    def describe(self, index: int) -> str:
        """Returns what messages call an example, such as its file."""
        return f"example {index:,}"

    def damaged(self) -> str | None:
        """Looks for the first example that cannot be read, for at most a minute."""
        examples = tf.data.Dataset.range(self._readable).map(
            lambda index: self.example(index, tf.zeros([2], tf.int64)),
            num_parallel_calls=os.cpu_count() or 1,
            deterministic=True,
        )
        until = time.monotonic() + _LOOKED_FOR_SECONDS
        read = 0
        try:
            for _ in examples:
                read += 1
                if time.monotonic() > until:
                    return None
        except tf.errors.OpError:
            return f"The first example that cannot be read is {self.describe(read)}."
        return None

    def _read_ahead(self, batches: tf.data.Dataset) -> tf.data.Dataset:
        """Reads what can be read for a whole batch in one call.

        Args:
          batches: Dicts of "index", int64 [b], "seed", int64 [b, 2], and "weight", float32 [b].

        Returns:
          What `_example_of` takes, with one row for each example, and "weight".
        """
        return batches

    def _example_of(self, row: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Reads an example by a row of `_read_ahead`."""
        return self.example(row["index"], row["seed"])

    def _decoded(
        self, indices: tf.data.Dataset, first_batch: int, steps_per_epoch: int, seed: int
    ) -> tf.data.Dataset:
        """Decodes the examples of batches of "index" and "weight"; one example is an element.

        A batch may have "draw", int64 [b]: the numbers of the examples' seeds in an epoch, instead
        of "index".
        """
        root = tf.constant([seed % 2**63, 0], tf.int64)

        @tf.autograph.experimental.do_not_convert
        def with_seeds(number: tf.Tensor, batch: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            key = tf.random.experimental.stateless_fold_in(root, number // steps_per_epoch)
            # Only the second half of `key` depends on the epoch; a draw mixes both halves.
            drawn = tf.random.stateless_uniform([], key, None, None, tf.int64)
            draw = batch.pop("draw", batch["index"])
            seeds = tf.stack([tf.fill(tf.shape(draw), drawn), draw], axis=1)
            return {**batch, "seed": seeds}

        def read(row: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            return weighted(dict(self._example_of(row)), row["weight"])

        ordered = tf.data.Dataset.zip(tf.data.Dataset.counter(first_batch), indices)
        return (
            self._read_ahead(ordered.map(with_seeds))
            .unbatch()
            .map(read, num_parallel_calls=os.cpu_count() or 1, deterministic=True)
        )
