"""Tables of the rows that many updates gather from resident arrays."""

import concurrent.futures
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from ddl.data.batch import on_each_replica
from ddl.data.pipeline import BatchPipeline

_ROWS = 1 << 16  # of a table: a fraction of a second of training
_LEAST, _MOST = 16, 1024  # updates of a table


class RowTables:
    """The tables of a training's resident sources, on each replica. Eager, cross-replica context.

    After the first one, a thread computes the next table while the devices work on the present one.

    Attributes:
      length: Updates of a table.
    """

    def __init__(self, pipelines: Mapping[str, BatchPipeline], strategy: tf.distribute.Strategy):
        """Keeps the arguments; computes nothing.

        Args:
          pipelines: The pipeline of each source, by its name.
          strategy: Strategy of the training.
        """
        self._pipelines = {name: one for name, one in pipelines.items() if one.resident}
        self._strategy = strategy
        rows = [one.global_batch_size * one.batches_per_update for one in self._pipelines.values()]
        self.length = max(_LEAST, min(_MOST, _ROWS // max(rows, default=1)))
        self._first: int | None = None
        self._table: dict[str, Any] = {}
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "ddl-order")
        self._next: tuple[int, concurrent.futures.Future] | None = None

    def at(self, update: int) -> tuple[tf.Tensor, dict[str, Any]]:
        """Returns the tables that hold the rows of an update, and of at least one more if any.

        Args:
          update: Number of the update, counted from 0 over the whole run.

        Returns:
          Number of the first update of the tables, int64 []; and by the name of the source "index",
          int64 [length, rows of a replica], and "weight" if not all are 1, per-replica.
        """
        if not self._pipelines:
            return tf.constant(0, tf.int64), {}
        if self._first is None or not self._first <= update < self._first + self.length:
            rows = self._computed(update)
            with tf.init_scope():
                self._table = {
                    name: on_each_replica(
                        self._strategy,
                        lambda own, each=each: {k: values[own] for k, values in each.items()},
                    )
                    for name, each in rows.items()
                }
            if self.end_at(update):
                following = update + self.length
                self._next = following, self._thread.submit(self._rows, following)
            self._first = update
        return tf.constant(self._first, tf.int64), self._table

    def end_at(self, update: int) -> bool:
        """Returns whether the present tables end before an update."""
        return self._first is not None and update == self._first + self.length

    def _computed(self, update: int) -> dict[str, Any]:
        if self._next is not None and self._next[0] == update:
            return self._next[1].result()
        return self._rows(update)

    def _rows(self, update: int) -> dict[str, Any]:
        return {
            name: one.table(self._strategy, update, self.length)
            for name, one in self._pipelines.items()
        }
