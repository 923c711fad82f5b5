"""Global batches of static shape, addressed by number, for any strategy."""

from typing import Any, Literal

import numpy as np
import tensorflow as tf

from ddl.data.order import batch_indices, index_batches, indices_from
from ddl.data.pipeline.batch import Batch, static_slice
from ddl.data.pipeline.datasets import as_received, as_sent, finished, joined
from ddl.data.pipeline.iterators import iterator_of
from ddl.data.pipeline.placed_order import at_least, first_own_row, on_host_if_placed, on_own_device
from ddl.data.pipeline.resident import ResidentArrays
from ddl.data.source import IndexedSource, Source, weighted
from ddl.devices.path import path_of
from ddl.distribution.workers import Workers
from ddl.microbatch import Microbatch
from ddl.random import batch_counter


class BatchPipeline:
    """Batch k of a run for every k, independent of the devices.

    A global batch of B rows is split into A microbatches of B/A rows. Each microbatch is split
    among the R replicas: in microbatch m, replica r computes the b = B/A/R rows from m·B/A + r·b
    on. All replicas together therefore see the same rows in the same order for every R, in each
    microbatch too. The last batch of an epoch is padded to B rows; padding has weight 0.

    Attributes:
      seed: Seed of the layers' random numbers.
      order_seed: Seed of the order.
      shuffle: Whether each epoch has its own order.

    Usage, with any strategy:

        iterator = pipeline.iterator(strategy, first_batch)
        # in a tf.function, cross-replica:
        batch = pipeline.next_batch(iterator, strategy, number)
        strategy.run(step, args=(batch,))
        # in step, replica context:
        features = pipeline.examples(batch, microbatch)
    """

    def __init__(
        self,
        source: Source,
        global_batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        resident: bool | Literal["auto"] = "auto",
        microbatches: int = 1,
        order_seed: int | None = None,
    ):
        """Decides whether the arrays reside on the devices; places nothing yet.

        Args:
          source: The examples.
          global_batch_size: B. If it exceeds the number of examples, an epoch is one padded batch.
          seed: Seed of the layers' random numbers.
          shuffle: Whether each epoch has its own order; otherwise the source's order is used.
          resident: Whether arrays are kept on the devices and batches gathered there. `auto` does
            so up to 256 MiB. The batches are bitwise the same.
          microbatches: A. B must be a multiple of A · R; the pipeline does not check this.
          order_seed: Seed of the order; None: `seed`.

        Raises:
          ConfigError: If the batch size is not positive or not possible for the source, or
            `resident` is True for a source other than numeric arrays.
          DataError: If there are no examples.
        """
        self.source = source
        self.global_batch_size = global_batch_size
        self.microbatches = microbatches
        self.num_examples = source.examples_per_epoch(global_batch_size)
        self.batches_per_update = 1
        """Batches that an update reads one after the other. Assign before the first iterator."""
        self._batches_per_epoch = source.steps_per_epoch(global_batch_size)
        self.seed = seed
        self.order_seed = seed if order_seed is None else order_seed
        self.shuffle = shuffle
        self._resident = ResidentArrays(source, resident)
        self.resident = self._resident.are_used
        """Whether batches are gathered on the devices."""

    @property
    def steps_per_epoch(self) -> int:
        """Updates in which each example is read once, rounded up."""
        return -(-self._batches_per_epoch // self.batches_per_update)

    @property
    def always_full(self) -> bool:
        """Whether every weight of every batch is 1."""
        return (
            self.num_examples == self._batches_per_epoch * self.global_batch_size
            and "weight" not in self.source.element_spec
        )

    @property
    def element_spec(self) -> dict[str, tf.TensorSpec]:
        """Spec of one example as `examples` returns it, without the batch dimension.

        Includes "weight", float32 [].
        """
        return {**self.source.element_spec, "weight": tf.TensorSpec([], tf.float32, "weight")}

    def iterator(
        self, strategy: tf.distribute.Strategy, first_update: int = 0, *, repeats: bool = False
    ) -> Any:
        """Returns an endless iterator over the batches of updates.

        Cross-replica context, eager. `next(iterator)` gives each replica its rows of the next
        update if the iterator is distributed. A plain iterator gives all rows of this process, and
        `examples` slices a replica's own.

        Args:
          strategy: Strategy of the training.
          first_update: Number of the first update, counted from 0 over the whole run.
          repeats: Whether to read the first epoch of unshuffled data again and again. Later epochs
            of a mixture, or of examples that draw by their seed, are others.
        """
        number = self.batches_per_update
        dataset = self._batches(first_update * number, self.own_rows(strategy))
        if repeats and not isinstance(self.source, IndexedSource):  # its epochs are all the same
            dataset = dataset.take(self.steps_per_epoch * number).repeat()
        if number > 1:
            dataset = joined(dataset, number, Workers(strategy).replicas_of_each)
        path, distributes = path_of(strategy), self.distributes(strategy)
        if distributes or path.places_order:
            dataset = as_sent(dataset, path.packs_int32, self.always_full)
        dataset = finished(dataset, ahead=not self.resident)
        return iterator_of(dataset, strategy if distributes else None)

    def distributes(self, strategy: tf.distribute.Strategy) -> bool:
        """Returns whether `iterator` is distributed: its batches are on the devices."""
        if Workers(strategy).number > 1:
            # It would ask all workers before each batch whether they have data.
            return False
        path = path_of(strategy)
        if self.resident and (path.orders_in_loop or strategy.num_replicas_in_sync == 1):
            return False  # indices are few: all replicas can have all of them
        return path.distributes_batches

    def next_batch(
        self, iterator: Any, strategy: tf.distribute.Strategy, number: tf.Tensor
    ) -> Batch:
        """Returns an iterator's next batch. Cross-replica context, in a graph.

        Args:
          iterator: The result of `iterator`.
          strategy: Strategy of the training.
          number: Number of the update, int64 [].
        """
        rows = self.on_devices(next(iterator), strategy)
        return Batch(rows, self.resident_arrays(strategy), batch_counter(number))

    def orders_in_graph(self, strategy: tf.distribute.Strategy) -> bool:
        """Returns whether `batches_from` replaces the iterator, to avoid waiting for threads."""
        in_loop = path_of(strategy).orders_in_loop
        return self.resident and in_loop and self.batches_per_update == 1

    def batches_from(
        self, batch: tf.Tensor, strategy: tf.distribute.Strategy
    ) -> dict[str, tf.Tensor]:
        """Computes the iterator's elements for a batch and several that follow it. Cross-replica.

        Args:
          batch: Number of the first batch, int64 [].
          strategy: Strategy of the training.

        Returns:
          The iterator's elements, stacked along a new first dimension: "index", int64 [k, rows],
          and "weight", float32 [k, rows], unless `always_full`.
        """
        with on_host_if_placed(strategy):
            made = indices_from(
                batch,
                num_examples=self.num_examples,
                global_batch_size=self.global_batch_size,
                seed=self.order_seed,
                shuffle=self.shuffle,
                rows=self.own_rows(strategy),
                at_least=at_least(strategy),
            )
        # `examples` creates weights that are all 1.
        return {"index": made["index"]} if self.always_full else made

    def on_devices(self, rows: Any, strategy: tf.distribute.Strategy) -> Any:
        """Returns an iterator's element with a replica's own rows on its device. Cross-replica."""
        return on_own_device(rows, self.global_batch_size * self.batches_per_update, strategy)

    def resident_arrays(self, strategy: tf.distribute.Strategy) -> dict[str, Any]:
        """Returns the arrays on the devices, to pass to `strategy.run`; {} if not resident.

        The first call places the arrays. Cross-replica context, eager or while tracing.
        """
        return self._resident.on_devices(strategy)

    def gathered(self, batch: Batch, strategy: tf.distribute.Strategy) -> Batch:
        """Returns the batch with its examples in place of their indices. Cross-replica context.

        For a single replica of this process, and a single microbatch.
        """
        rows = strategy.run(self.examples, (batch,))
        if self.always_full:
            del rows["weight"]  # constant ones, which `examples` makes again
        return batch._replace(rows=rows, arrays={})

    def examples(
        self, batch: Batch, microbatch: tf.Tensor | int = 0, place: tf.Tensor | int = 0
    ) -> dict[str, tf.Tensor]:
        """Returns a replica's examples of one microbatch. Replica context, inside the step.

        Args:
          batch: The batches of the update on this replica, as `strategy.run` passes them.
          microbatch: Microbatch number from 0 on, int32 [].
          place: Place of its batch among those of the update, int32 [].

        Returns:
          Features [b, …] and "weight", float32 [b].
        """
        element = batch.rows
        held = element.get("weight", next(iter(element.values()))).shape[0]
        size = self._rows_of_replica()
        if held != size:
            # From a plain iterator each replica gets all rows of the process.
            of_replica = size * self.microbatches * self.batches_per_update
            first = first_own_row(held, of_replica)
            before = place * self.microbatches  # microbatches of the earlier batches
            part = tf.cast(microbatch, tf.int32)
            first += (part if isinstance(before, int) and not before else before + part) * size
            element = {name: static_slice(rows, first, size) for name, rows in element.items()}
        if self.always_full:
            # A constant, so that the graph can be simplified before it runs.
            element = {**element, "weight": tf.ones([size])}
        if not batch.arrays:
            return as_received(element, self.element_spec)
        features = self._resident.gather(batch.arrays, element["index"])
        return weighted(features, element["weight"])

    def packed_arrays(self) -> dict[str, np.ndarray]:
        """Returns the packed arrays that `batch` reads, to send to other processes.

        Raises:
          ConfigError: If the data are not numeric arrays, or exceed 2 GB, the limit of one message.
        """
        return self._resident.packed_to_send()

    def batch(self, arrays: dict[str, tf.Tensor], number: tf.Tensor) -> Batch:
        """Computes a whole global batch on one replica. In a graph.

        Args:
          arrays: The result of `packed_arrays`, as tensors on this host.
          number: Batch number, int64 [], counted from 0 over the whole run.
        """
        with tf.device("/device:CPU:0"):
            indices, weight = batch_indices(
                number,
                num_examples=self.num_examples,
                global_batch_size=self.global_batch_size,
                seed=self.order_seed,
                shuffle=self.shuffle,
            )
            features = self._resident.gather_sent(arrays, indices)
            rows = weighted(features, weight)
        return Batch(rows, {}, batch_counter(number))

    def microbatch(
        self,
        batch: Batch,
        features: dict[str, tf.Tensor],
        number: tf.Tensor | int = 0,
        *,
        training: bool,
        step: tf.Tensor,
        position: tf.Tensor | None = None,
        draws: int = 0,
    ) -> Microbatch:
        """Builds the `Microbatch` that layers query, for the rows of `examples`. Replica context.

        Args:
          batch: The batch.
          features: The result of `examples`.
          number: Microbatch number within the global batch, int32 [].
          training: As in `Microbatch`.
          step: As in `Microbatch`.
          position: As in `Microbatch`.
          draws: As in `Microbatch`.
        """
        return Microbatch(
            seed=self.seed,
            training=training,
            counter=batch.counter,
            first_row=self._first_row(number),
            rows=self._rows_of_replica(),
            mask=None if self.always_full else features["weight"] > 0,
            position=position,
            draws=draws,
            weight=features["weight"],
            step=step,
        )

    def _first_row(self, microbatch: tf.Tensor | int) -> tf.Tensor | int:
        """Returns the position in the global batch of the first row of `examples`. Replica context.

        Returns:
          int64 [], or a Python integer if it is known while tracing.
        """
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        known = tf.get_static_value(replica)
        replica = tf.cast(replica, tf.int64) if known is None else int(known)
        if not isinstance(microbatch, int):
            microbatch = tf.cast(microbatch, tf.int64)
        rows_of_microbatch = self.global_batch_size // self.microbatches
        return microbatch * rows_of_microbatch + replica * self._rows_of_replica()

    def _rows_of_replica(self) -> int:
        """Returns b, the rows per replica and microbatch. Replica context."""
        replicas = tf.distribute.get_replica_context().num_replicas_in_sync
        return self.global_batch_size // self.microbatches // replicas

    def _batches(self, first_batch: int, rows: np.ndarray | None) -> tf.data.Dataset:
        """Builds a host data set of some rows of each batch, or of their indices if resident."""
        if not self.resident:
            return self.source.batches(
                self.global_batch_size,
                first_batch,
                seed=self.order_seed,
                shuffle=self.shuffle,
                rows=rows,
            )
        return index_batches(
            first_batch,
            num_examples=self.num_examples,
            global_batch_size=self.global_batch_size,
            seed=self.order_seed,
            shuffle=self.shuffle,
            rows=rows,
        )

    def own_rows(self, strategy: tf.distribute.Strategy) -> np.ndarray | None:
        """Returns the rows of a global batch that this process computes; None for all, in order.

        The rows are grouped by replica, the order in which they are distributed.
        """
        workers, replicas = Workers(strategy), strategy.num_replicas_in_sync
        if replicas == 1 or (self.microbatches == 1 and workers.number == 1):
            return None
        rows = np.arange(self.global_batch_size).reshape(self.microbatches, replicas, -1)
        return rows.transpose(1, 0, 2).reshape(workers.number, -1)[workers.index]
