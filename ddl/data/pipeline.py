"""Global batches of static shape, addressed by number, for any strategy."""

import functools
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from ddl.data.batch import Batch, are_resident, gather, placed, row_of, static_slice
from ddl.data.features import checked_weight
from ddl.data.iterators import keep_by
from ddl.data.order import batch_indices, steps_per_epoch
from ddl.data.source import Source
from ddl.data.stream import Stream
from ddl.distribution.path import path_of
from ddl.distribution.workers import Workers
from ddl.microbatch import Microbatch
from ddl.random import batch_counter, hashed

_ENDLESS = 2**62
_SEED, _COUNTS = "ddl_seed", "ddl_counts"  # columns beside the features of an item
_AHEAD = 4  # batches: enough to keep the devices busy when one takes longer than others
_BLOCK_BYTES, _BLOCK_ROWS, _BLOCK = 4 << 20, 2048, 16  # bytes, rows, updates of a call of Python
_UNROLLED, _UNROLLED_BYTES = 16, 64 << 10  # examples that one call of tf.data decodes
_LEAST_THREADS = 8  # of small examples: with two threads, tf.data wakes one for nearly each


class BatchPipeline:
    """Batch k of a run for every k, independent of the devices.

    A global batch of B rows is split into A microbatches of B/A rows. Each microbatch is split
    among the R replicas: in microbatch m, replica r computes the b = B/A/R rows from m·B/A + r·b
    on. All replicas together therefore see the same rows in the same order for every R, in each
    microbatch too. The last batch of an epoch is padded to B rows; padding has weight 0.

    Attributes:
      source: The examples.
      global_batch_size: B.
      microbatches: A.
      seed: Seed of the layers' random numbers.
      order_seed: Seed of the order, and of the draws of `decode`.
      shuffle: Whether each epoch has its own order.
      num_examples: Examples of an epoch; None if the data have no end, or their length is unknown.
      batches_per_update: Batches that an update reads one after the other. Assign before the first
        iterator.
      resident: Whether the arrays lie on the devices, and an update gathers its rows there.
    """

    def __init__(
        self,
        source: Source | Stream,
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
          shuffle: Whether each epoch has its own order; else, and for a stream, the data's own.
          resident: Whether arrays are kept on the devices and batches gathered there. `auto` does
            so up to 256 MiB. The batches are bitwise the same.
          microbatches: A. B must be a multiple of A · R; the pipeline does not check this.
          order_seed: Seed of the order, and of the draws of `decode`; None: `seed`.

        Raises:
          ConfigError: If the batch size is not positive, or `resident` is True for data that are
            not numeric arrays.
        """
        self.source = source
        self.global_batch_size = global_batch_size
        self.microbatches = microbatches
        self.seed = seed
        self.order_seed = seed if order_seed is None else order_seed
        self.shuffle = shuffle
        self.num_examples = len(source) if isinstance(source, Source) else source.num_examples
        self.batches_per_update = 1
        steps_per_epoch(self.num_examples or 1, global_batch_size)  # checks the sizes
        self.resident = are_resident(source, resident)
        self._placed: tuple[tf.distribute.Strategy, dict[str, Any]] | None = None

    @property
    def steps_per_epoch(self) -> int | None:
        """Updates in which each example is read once, rounded up; None as `num_examples`."""
        if self.num_examples is None:
            return None
        batches = steps_per_epoch(self.num_examples, self.global_batch_size)
        return -(-batches // self.batches_per_update)

    def count_examples(self) -> int:
        """Returns the number of examples of an epoch; reads data of unknown length once.

        Raises:
          DataError: If the data have no end.
        """
        if self.num_examples is None:
            assert isinstance(self.source, Stream)
            self.num_examples = self.source.count()
        return self.num_examples

    @property
    def always_full(self) -> bool:
        """Whether every weight of every batch is 1."""
        if "weight" in self.source.element_spec:
            return False
        if self.num_examples is None:
            return isinstance(self.source, Stream) and self.source.is_endless
        return self.num_examples % self.global_batch_size == 0

    @property
    def element_spec(self) -> dict[str, tf.TensorSpec]:
        """Spec of one example as `examples` returns it, without the batch dimension.

        Includes "weight", float32 [].
        """
        return {**self.source.element_spec, "weight": tf.TensorSpec([], tf.float32, "weight")}

    def rows(
        self, strategy: tf.distribute.Strategy, first_update: int = 0, *, repeats: bool = False
    ) -> tuple[tf.data.Dataset, Any]:
        """Returns an endless data set of the rows of updates, and what its iterator must keep.

        Each element holds the rows of this process, grouped by replica; with several workers, those
        of one of its replicas: features, or "index" if the arrays are resident, and "weight".
        Eager.

        Args:
          strategy: Strategy of the training.
          first_update: Number of the first update, counted from 0 over the whole run.
          repeats: Whether to read the first epoch again and again. Later epochs of a mixture, or of
            examples that draw by their seed, are others.
        """
        workers = Workers(strategy)
        reader = functools.partial(self._read, workers)
        dataset = self._updates(first_update, workers, reader)
        if repeats and self.steps_per_epoch is not None:
            dataset = dataset.take(self.steps_per_epoch).repeat()
        dataset = self._sent(dataset, path_of(strategy).has_own_memory)
        if workers.number > 1 and workers.replicas_of_each > 1:
            dataset = _reshaped(dataset, [workers.replicas_of_each, -1], 1).unbatch()
        # More threads than cores take a quarter of the speed of decoding large images.
        is_large = _bytes_of_example(self.source) > _UNROLLED_BYTES
        threads = _cores() if is_large else max(_LEAST_THREADS, _cores())
        return _finished(dataset, not self.resident, threads), reader

    def next_batch(
        self, iterator: Any, strategy: tf.distribute.Strategy, number: tf.Tensor
    ) -> Batch:
        """Returns an iterator's next batch. Cross-replica context, in a graph.

        Args:
          iterator: An iterator of this pipeline (`ddl.step.replicas.distributed_iterator`).
          strategy: Strategy of the training.
          number: Number of the update, int64 [].
        """
        return Batch(next(iterator), self.resident_arrays(strategy), batch_counter(number))

    def table(
        self, strategy: tf.distribute.Strategy, first_update: int, count: int
    ) -> dict[str, np.ndarray]:
        """Computes which rows of the arrays `count` updates read, on this process's replicas.

        Args:
          strategy: Strategy of the training.
          first_update: Number of the first update, counted from 0 over the whole run.
          count: Number of updates.

        Returns:
          "index", int64 [replicas of this process, count, rows of a replica], and "weight",
          float32, unless `always_full`.
        """
        index, weight, _ = self._own_indices(first_update, count, Workers(strategy))
        made = {"index": index} if self.always_full else {"index": index, "weight": weight}
        return {name: np.ascontiguousarray(each.swapaxes(0, 1)) for name, each in made.items()}

    def resident_arrays(self, strategy: tf.distribute.Strategy) -> dict[str, Any]:
        """Returns the arrays on the devices, to pass to `strategy.run`; {} if not resident.

        The first call places the arrays. Cross-replica context, eager or while tracing.
        """
        if not self.resident:
            return {}
        if self._placed is None or self._placed[0] is not strategy:
            self._placed = (strategy, placed(self.source, strategy))
        return self._placed[1]

    def gathered(self, batch: Batch, strategy: tf.distribute.Strategy) -> Batch:
        """Returns the batch with its examples in place of their indices. Cross-replica context.

        For a single replica of this process, and a single microbatch.
        """
        rows = strategy.run(self.examples, (batch,))
        if self.always_full:
            del rows["weight"]  # constant ones, which `examples` makes again
        return Batch(rows, {}, batch.counter)

    def examples(
        self, batch: Batch, microbatch: tf.Tensor | int = 0, number: tf.Tensor | int = 0
    ) -> dict[str, tf.Tensor]:
        """Returns a replica's examples of one microbatch. Replica context, inside the step.

        Args:
          batch: The batches of the update on this replica, as `strategy.run` passes them.
          microbatch: Microbatch number from 0 on, int32 [].
          number: Number of its batch among those of the update, from 0 on, int32 [].

        Returns:
          Features [b, …] and "weight", float32 [b].
        """
        element = batch.rows if isinstance(batch.place, tuple) else row_of(batch)
        size = self._rows_of_replica()
        held = next(iter(element.values())).shape[0]
        if held != size:
            first = (number * self.microbatches + microbatch) * size
            element = {name: static_slice(rows, first, size) for name, rows in element.items()}
        if self.always_full:
            # A constant, so that the graph can be simplified before it runs.
            element = {**element, "weight": tf.ones([size])}
        if batch.arrays:
            features = gather(batch.arrays, element["index"], self.source.element_spec)
            return _weighted(features, element["weight"])
        spec = self.element_spec
        return {name: tf.cast(rows, spec[name].dtype) for name, rows in element.items()}

    def microbatch(
        self, batch: Batch, features: Mapping[str, tf.Tensor], number: Any = 0, **others: Any
    ) -> Microbatch:
        """Builds the `Microbatch` that layers query, for the rows of `examples`. Replica context.

        Args:
          batch: The batch.
          features: The result of `examples`.
          number: Microbatch number within the global batch, int32 [].
          **others: `training`, `step` and `pass_number` of `Microbatch`.
        """
        return Microbatch(
            seed=self.seed,
            counter=batch.counter,
            first_row=self._first_row(number),
            rows=self._rows_of_replica(),
            mask=None if self.always_full else features["weight"] > 0,
            weight=features["weight"],
            **others,
        )

    def first_examples(self, count: int) -> dict[str, tf.Tensor]:
        """Returns the first examples of a run: features, [count, …], and their own "weight" if any.

        Eager. They repeat if there are fewer. A stream is read from its beginning.
        """
        source = self.source
        if isinstance(source, Stream):
            batch = next(iter(source.batches(count, 0).take(1)))
            return {name: batch[name] for name in source.element_spec}
        ((index,), _) = batch_indices(0, 1, **self.order(count))
        with tf.device("CPU:0"):
            rows = {name: tf.constant(column) for name, column in source.rows(index).items()}
            if source.decode is None:
                return rows
            return _decoded(source, rows, self._seeds(index, np.zeros(count, np.int64)))

    def order(self, global_batch_size: int) -> dict[str, Any]:
        """Returns the arguments of `batch_indices` besides the batches."""
        assert isinstance(self.source, Source)
        return {
            "num_examples": len(self.source),
            "global_batch_size": global_batch_size,
            "seed": self.order_seed,
            "shuffle": self.shuffle,
        }

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

    def _updates(
        self, first: int, workers: Workers, reader: Callable[[int, int], dict[str, np.ndarray]]
    ) -> tf.data.Dataset:
        """Builds a data set of the rows of this process in each update, grouped by replica.

        TensorFlow keeps a function of Python for good, so it only gets a weak reference to the
        reader, and through it to the data: the iterator keeps the reader.
        """
        if isinstance(self.source, Stream):
            return self._updates_of_stream(self.source, first, workers)
        source, decodes = self.source, self.source.decode is not None
        specs = {"index": tf.TensorSpec([], tf.int64)} if self.resident else dict(source.row_spec)
        if decodes:
            specs |= {_SEED: tf.TensorSpec([2], tf.int64), _COUNTS: tf.TensorSpec([], tf.float32)}
        else:
            specs["weight"] = tf.TensorSpec([], tf.float32)
        size = self.global_batch_size * self.batches_per_update // workers.number
        row = 8 if self.resident else max(1, source.row_bytes)
        count = max(1, min(_BLOCK_BYTES // (row * size), _BLOCK_ROWS // size, _BLOCK))
        together = _decoded_together(source, size) if decodes else size
        groups = count * size // together
        shape = [groups] * (groups > 1) + [together] * (together > 1)
        found = weakref.ref(reader)

        def read(number: np.ndarray) -> list[np.ndarray]:
            rows = found()(int(number), count)  # type: ignore[misc]
            return [rows[name] for name in specs]

        @tf.autograph.experimental.do_not_convert  # converting takes longer than tracing
        def rows_of(number: tf.Tensor) -> dict[str, tf.Tensor]:
            columns = tf.numpy_function(read, [number], [spec.dtype for spec in specs.values()])
            return {  # tf.reshape would take other shapes of the same size
                name: tf.reshape(tf.ensure_shape(c, [None, *spec.shape]), [*shape, *spec.shape])
                for c, (name, spec) in zip(columns, specs.items(), strict=True)
            }

        @tf.autograph.experimental.do_not_convert
        def decoded(rows: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            seeds, counts = rows.pop(_SEED), rows.pop(_COUNTS)
            decode = source.decoded if together == 1 else functools.partial(_decoded, source)
            return _weighted(decode(rows, seeds), counts)

        # Repeated, so that it counts as endless: tf.distribute asks others whether they have ended.
        numbers = tf.data.Dataset.range(first, _ENDLESS, count).repeat()
        made = numbers.map(rows_of, num_parallel_calls=_cores(), deterministic=True)
        keep_by(reader, read)
        made = made.unbatch() if groups > 1 else made
        if decodes:
            made = made.map(decoded, num_parallel_calls=_cores(), deterministic=True)
        if together == size > 1:
            return made
        made = made.batch(size // together, drop_remainder=True)
        return made if together == 1 else _reshaped(made, [-1], 2)

    def _read(self, workers: Workers, update: int, count: int) -> dict[str, np.ndarray]:
        """Reads the rows of this process in updates, with their weights, padding and seeds."""
        assert isinstance(self.source, Source)
        index, weight, epoch = (x.ravel() for x in self._own_indices(update, count, workers))
        if self.resident:
            return {"index": index, "weight": weight}
        rows = self.source.rows(index)
        if self.source.decode is None:
            own = rows.get("weight")
            return {**rows, "weight": weight if own is None else weight * own.astype(np.float32)}
        return {**rows, _SEED: self._seeds(index, epoch), _COUNTS: weight}

    def _seeds(self, index: np.ndarray, epoch: np.ndarray) -> np.ndarray:
        """Returns the seeds of examples in their epochs, int64 [b, 2]."""
        key = np.array([hashed(self.order_seed, "decode")])
        return np.stack([key + epoch, index], axis=1)

    def _own_indices(self, update: int, count: int, workers: Workers) -> tuple[np.ndarray, ...]:
        """Returns index, weight and epoch of the rows of this process.

        Returns:
          Three arrays, each [count, own replicas, rows of a replica].
        """
        number, own = self.batches_per_update, workers.replicas_of_each
        first, order = update * number, self.order(self.global_batch_size)
        index, weight = batch_indices(first, count * number, **order)
        steps = steps_per_epoch(order["num_examples"], self.global_batch_size)
        epoch = np.arange(first, first + count * number)[:, np.newaxis] // steps
        replicas, begin = workers.number * own, workers.index * own
        shape = count, number, self.microbatches, replicas, -1
        grouped = (
            each.reshape(shape).transpose(0, 3, 1, 2, 4).reshape(count, replicas, -1)
            for each in (index, weight, np.broadcast_to(epoch, index.shape))
        )
        return tuple(each[:, begin : begin + own] for each in grouped)

    def _updates_of_stream(self, stream: Stream, first: int, workers: Workers) -> tf.data.Dataset:
        """Builds `_updates` of a stream, which every worker reads whole."""
        number, shape = self.batches_per_update, (workers.number, workers.replicas_of_each, -1)
        batches = stream.batches(self.global_batch_size, first * number)
        if number > 1:
            batches = _reshaped(batches.batch(number, drop_remainder=True), [-1], 2)
        rows = np.arange(number * self.global_batch_size)
        of_workers = rows.reshape(number, self.microbatches, *shape)
        own = of_workers[:, :, workers.index].transpose(2, 0, 1, 3).ravel()
        if np.array_equal(own, rows):
            return batches
        return batches.map(lambda batch: {name: tf.gather(x, own) for name, x in batch.items()})

    def _sent(self, dataset: tf.data.Dataset, widens: bool) -> tf.data.Dataset:
        """Leaves out weights that are all 1, and widens integers that GPUs would keep on the host.

        TensorFlow keeps int32 in host memory: such a feature would be copied to a GPU, back to the
        host, and to the GPU again.
        """
        left_out = {"weight"} if self.always_full else set()
        kinds = (tf.int32, tf.uint32) if widens else ()
        wide = {name for name, spec in dataset.element_spec.items() if spec.dtype in kinds}

        @tf.autograph.experimental.do_not_convert
        def sent(element: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            element = {name: rows for name, rows in element.items() if name not in left_out}
            return element | {name: tf.cast(element[name], tf.int64) for name in wide}

        return dataset.map(sent) if left_out or wide else dataset


@tf.autograph.experimental.do_not_convert
def _weighted(features: dict[str, tf.Tensor], counts: tf.Tensor) -> dict[str, tf.Tensor]:
    """Adds "weight": the example's own, or 1; `counts` is 1, and 0 for padding."""
    if "weight" in features:
        counts *= checked_weight(features["weight"])
    return {**features, "weight": counts}


def _decoded_together(source: Source, size: int) -> int:
    """Returns how many of `size` examples one call decodes: large ones alone, to copy less."""
    most = max(1, min(_UNROLLED, _UNROLLED_BYTES // max(1, _bytes_of_example(source))))
    return max(n for n in range(1, most + 1) if size % n == 0)


def _bytes_of_example(source: Source | Stream) -> int:
    kinds = source.element_spec.values()
    return sum(one.dtype.size * one.shape.num_elements() for one in kinds)


def _decoded(source: Source, rows: dict[str, tf.Tensor], seeds: Any) -> dict[str, tf.Tensor]:
    """Decodes examples in one function: a call of tf.data takes longer than small examples."""
    columns = {name: tf.unstack(column) for name, column in rows.items()}  # of one: no copy
    examples = [
        source.decoded({name: column[row] for name, column in columns.items()}, seed)
        for row, seed in enumerate(tf.unstack(seeds))
    ]
    return {name: tf.stack([one[name] for one in examples]) for name in examples[0]}


def _reshaped(dataset: tf.data.Dataset, first: Sequence[int], number: int) -> tf.data.Dataset:
    """Replaces the first `number` dimensions of all features by others of the same size."""
    return dataset.map(
        lambda rows: {n: tf.reshape(r, [*first, *r.shape[number:]]) for n, r in rows.items()}
    )


def _finished(dataset: tf.data.Dataset, ahead: bool, threads: int) -> tf.data.Dataset:
    """Returns the data set with the options of all of ddl's; `ahead` prefetches."""
    options = tf.data.Options()
    options.deterministic = True
    # The data set holds exactly this process's rows. Auto-sharding would split them again.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    # A map and a buffer need no autotuning. Destroying an iterator waits for the autotuner's thread
    # to wake up, which it does ever less often, down to once a minute.
    options.autotune.enabled = False
    options.threading.private_threadpool_size = threads
    return (dataset.prefetch(_AHEAD) if ahead else dataset).with_options(options)


def _cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
