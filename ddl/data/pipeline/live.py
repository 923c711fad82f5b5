"""Batches that are drawn, update by update, from rows that the run itself makes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from ddl.data.pipeline.batch import Batch
from ddl.data.pipeline.datasets import grouped_by_replica
from ddl.data.pipeline.pipeline import BatchPipeline
from ddl.data.replay import ReplayBuffer
from ddl.data.source import Source, weighted
from ddl.distribution.workers import Workers
from ddl.errors import ConfigError
from ddl.random import batch_counter
from ddl.seeds import PHILOX, hashed


class LivePipeline(BatchPipeline):
    """Batches of a `ReplayBuffer`. The update itself draws each batch, so nothing is read ahead."""

    source: ReplayBuffer

    def __init__(self, source: ReplayBuffer, global_batch_size: int, **others: Any):
        """See `BatchPipeline`.

        Raises:
          ConfigError: As `BatchPipeline`, and if the order is not random, as in an evaluation.
        """
        super().__init__(source, global_batch_size, **others)
        if not self.shuffle:
            raise ConfigError(
                "A ReplayBuffer is training data, and is drawn from at random: it cannot be "
                "evaluated, predicted, or read with shuffle=False. Pass buffer.contents() to "
                "evaluate or predict."
            )

    @property
    def always_full(self) -> bool:
        """See `BatchPipeline`: no batch has padding."""
        return "weight" not in self.source.element_spec

    def iterator(
        self, strategy: tf.distribute.Strategy, first_update: int = 0, *, repeats: bool = False
    ) -> Any:
        """Returns None: `rows` takes its place."""
        return None

    def next_batch(
        self, iterator: Any, strategy: tf.distribute.Strategy, number: tf.Tensor
    ) -> Batch:
        """See `BatchPipeline`: the batch of the rows that the buffer holds now."""
        return Batch(self.rows(number, strategy), {}, batch_counter(number))

    def rows(self, update: tf.Tensor, strategy: tf.distribute.Strategy) -> dict[str, tf.Tensor]:
        """Draws the rows of this process in the batches of an update. In a graph, cross-replica.

        Args:
          update: Number of the update, int64 [], counted from 0 over the whole run.
          strategy: Strategy of the training.

        Returns:
          Batches as of the iterator of another pipeline: features [rows, …], grouped by replica.
        """
        number, own = self.batches_per_update, self.own_rows(strategy)
        with tf.device("CPU:0"):
            words = [self._words(update * number + place) for place in range(number)]
            if own is not None:
                words = [tf.gather(of_batch, own) for of_batch in words]
            drawn = tf.concat(words, 0)
            if number > 1:
                order = grouped_by_replica(
                    number, words[0].shape[0], Workers(strategy).replicas_of_each
                )
                drawn = tf.gather(drawn, order)
            return self._weighted(self.source.draw(drawn))

    def first_examples(self, count: int) -> dict[str, tf.Tensor]:
        """Returns the first rows of the buffer, repeated if it has fewer. Eager."""
        with tf.device("CPU:0"):
            features = self.source.draw(tf.constant(np.arange(count), tf.int64))
            return {name: tf.identity(rows) for name, rows in features.items()}

    @contextmanager
    def reading(self, strategy: tf.distribute.Strategy) -> Iterator[None]:
        """Keeps the rows as they are within the `with` block. Eager, on all workers.

        Raises:
          ConfigError: If the workers have added different rows.
        """
        workers = Workers(strategy)
        if workers.number > 1:
            digests = workers.gather(np.array([self.source.digest]))[:, 0]
            if len(set(digests)) > 1:
                workers.barrier()
                other = int(np.argmax(digests != digests[0]))
                raise ConfigError(
                    f"All workers must add the same rows to a ReplayBuffer, but worker {other} "
                    "added others than worker 0. Add them in a callback with on='all', and draw "
                    "random numbers from moment.random."
                )
        with self.source.being_read():
            yield

    def _words(self, batch: tf.Tensor) -> tf.Tensor:
        """Returns the random words of the rows of a batch, int64 [B]."""
        # The low half counts the blocks of a batch's own words.
        counter = tf.cast(tf.stack([tf.zeros_like(batch), batch]), tf.uint64)
        return tf.raw_ops.StatelessRandomUniformFullIntV2(
            shape=[self.global_batch_size],
            key=tf.constant([hashed(self.order_seed, "replay") % 2**64], tf.uint64),
            counter=counter,
            alg=PHILOX,
            dtype=tf.int64,
        )

    def _weighted(self, features: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        if self.always_full:
            return features
        return weighted(features, tf.ones(features["weight"].shape))


def pipeline_type(source: Source) -> type[BatchPipeline]:
    """Returns the class of the pipeline for a source."""
    return LivePipeline if isinstance(source, ReplayBuffer) else BatchPipeline
