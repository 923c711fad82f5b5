"""Global batches of static shape, by number, on any strategy."""

from typing import Any, Literal

import numpy as np
import tensorflow as tf

from ddl.data import resident as resident_data
from ddl.data.arrays import ArraySource
from ddl.data.order import batch_indices, index_batches, indices_from
from ddl.data.source import Source, weighted
from ddl.errors import ConfigError
from ddl.microbatch import Microbatch
from ddl.workers import Workers

_RESIDENT_UP_TO_BYTES = 256 << 20
"""Small beside any accelerator's memory, and larger than CIFAR-10 in bytes (154 MB)."""


_SENT_UP_TO_BYTES = 2_000_000_000
"""What fits into a message of TensorFlow, with some room."""


_BATCHES_AHEAD = 4
"""Enough for the host to be ahead of the devices when one batch takes longer than others."""


class BatchPipeline:
    """Batch k of a run, for every k, whatever the devices.

    A global batch of B rows is cut into A microbatches of B/A rows, and each of these is shared
    out: in microbatch m, replica r of R computes the b = B/A/R rows from m·B/A + r·b on. So all
    replicas together see the same rows in the same order however many there are, in each
    microbatch too. The last batch of an epoch is padded to B; padding has weight 0.

    In use, on any strategy:

        iterator = pipeline.iterator(strategy, first_batch)
        arrays = pipeline.resident_arrays(strategy)
        # in a tf.function, cross-replica: strategy.run(step, args=(next(iterator), arrays))
        # in step, replica context: features = pipeline.examples(element, arrays, microbatch)
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
    ):
        """Takes the source.

        Args:
          source: The examples.
          global_batch_size: B. More than the data set has is fine: one padded batch an epoch.
          seed: Of the order, and of what layers draw.
          shuffle: Whether each epoch has an order of its own. Streams keep theirs.
          resident: Whether arrays are kept on the devices and batches gathered there. `auto`
            does so up to 256 MiB. The batches are the same to the bit.
          microbatches: A. B must be a multiple of A · R.

        Raises:
          ConfigError: If the batch size is not positive, or `resident` is True for a source that
            is not made of numeric arrays.
          DataError: If there are no examples.
        """
        self.source = source
        self.global_batch_size = global_batch_size
        self.microbatches = microbatches
        self.num_examples = len(source)
        self.steps_per_epoch = source.steps_per_epoch(global_batch_size)
        self._seed = seed
        self._shuffle = shuffle
        can_reside = isinstance(source, ArraySource) and resident_data.can_reside(source)
        if resident is True and not can_reside:
            raise ConfigError(
                f"only arrays of numbers can be kept on the devices, not a {type(source).__name__}"
                + (" with text" if isinstance(source, ArraySource) else "")
            )
        self.resident = (
            isinstance(source, ArraySource)
            and can_reside
            and (
                resident is True or (resident == "auto" and source.nbytes <= _RESIDENT_UP_TO_BYTES)
            )
        )
        """Whether batches are gathered on the devices."""
        self._placed: tuple[tf.distribute.Strategy, dict[str, Any]] | None = None

    @property
    def always_full(self) -> bool:
        """Whether every weight of every batch is 1."""
        return (
            self.num_examples == self.steps_per_epoch * self.global_batch_size
            and "weight" not in self.source.element_spec
        )

    @property
    def element_spec(self) -> dict[str, tf.TensorSpec]:
        """One example as `examples` gives it, without the batch dimension; has "weight"."""
        return {**self.source.element_spec, "weight": tf.TensorSpec([], tf.float32, "weight")}

    def dataset(self, first_batch: int = 0) -> tf.data.Dataset:
        """Global batches number first_batch, first_batch + 1, … without end, on the host.

        Args:
          first_batch: Number of the first batch, counted from 0 over the whole run.

        Returns:
          Dicts of features [B, …] and "weight", float32 [B].
        """
        return _finished(
            self.source.batches(
                self.global_batch_size, first_batch, seed=self._seed, shuffle=self._shuffle
            )
        )

    def iterator(self, strategy: tf.distribute.Strategy, first_batch: int = 0) -> Any:
        """An endless iterator from batch number `first_batch` on, distributed if devices need it.

        Cross-replica context, eager. `next(iterator)` gives each replica its rows of the next
        batch or, from a plain iterator, all rows of this process, of which `examples` takes a
        replica's own.
        """
        dataset = _finished(
            self._batches(first_batch, self._own_rows(strategy)), ahead=not self.resident
        )
        if Workers(strategy).number > 1:
            # A distributed iterator would ask all workers before each batch whether all have one.
            return iter(dataset)
        if resident_data.on_cpu(strategy) or (strategy.num_replicas_in_sync == 1 and self.resident):
            # All replicas can have all rows: `examples` takes a replica's own without a copy. The
            # distributed iterator would wake a thread of each device in each step.
            return iter(dataset)
        return iter(strategy.experimental_distribute_dataset(dataset))

    def orders_in_graph(self, strategy: tf.distribute.Strategy) -> bool:
        """Whether `batches_from` can take the iterator's place, and no thread is waited for.

        So it is for resident arrays on CPU devices.
        """
        return self.resident and resident_data.on_cpu(strategy)

    def batches_from(
        self, batch: tf.Tensor, strategy: tf.distribute.Strategy
    ) -> dict[str, tf.Tensor]:
        """What the iterator gives for a batch and for some that follow it. Cross-replica.

        Args:
          batch: Number of the first of them, int64 [].
          strategy: The strategy.

        Returns:
          Elements as the iterator's, one after the other along a first dimension.
        """
        made = indices_from(
            batch,
            num_examples=self.num_examples,
            global_batch_size=self.global_batch_size,
            seed=self._seed,
            shuffle=self._shuffle,
            rows=self._own_rows(strategy),
        )
        # `examples` makes weights that are all one by itself.
        return {"index": made["index"]} if self.always_full else made

    def resident_arrays(self, strategy: tf.distribute.Strategy) -> dict[str, Any]:
        """The arrays on the devices, to be handed to `strategy.run`; {} where not resident.

        They are put there at the first call. Cross-replica context, eager or while tracing.
        """
        if not self.resident:
            return {}
        if self._placed is None or self._placed[0] is not strategy:
            assert isinstance(self.source, ArraySource)
            with tf.init_scope():
                self._placed = (strategy, resident_data.place(self.source, strategy))
        return self._placed[1]

    def examples(
        self,
        element: dict[str, tf.Tensor],
        resident: dict[str, tf.Tensor],
        microbatch: tf.Tensor | int = 0,
    ) -> dict[str, tf.Tensor]:
        """A replica's examples of one microbatch. Replica context, in the step.

        Args:
          element: What the iterator gave this replica.
          resident: What `resident_arrays` gave, as `strategy.run` hands it to this replica.
          microbatch: Which one: int32 [], from 0 on.

        Returns:
          Features [b, …] and "weight", float32 [b].
        """
        held = element.get("weight", next(iter(element.values()))).shape[0]
        size = self._rows_of_replica()
        if held != size:
            # A worker's replicas get all rows of the worker, others their own.
            of_replica = size * self.microbatches
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            first = tf.cast(replica, tf.int32) % (held // of_replica) * of_replica
            first += tf.cast(microbatch, tf.int32) * size
            element = {name: _static_slice(rows, first, size) for name, rows in element.items()}
        if self.always_full:
            # A constant, with which the graph is simplified before it runs.
            element = {**element, "weight": tf.ones([size])}
        if not resident:
            return dict(element)
        features = resident_data.gather(resident, element["index"], self.source.element_spec)
        return weighted(features, element["weight"])

    def packed_arrays(self) -> dict[str, np.ndarray]:
        """The arrays of the data as `batch` takes them, to be sent to other processes.

        Raises:
          ConfigError: If the data are not arrays of numbers, or too many bytes for one message.
        """
        if not isinstance(self.source, ArraySource) or not resident_data.can_reside(self.source):
            raise ConfigError(
                f"only arrays of numbers can be sent to workers, not a {type(self.source).__name__}"
                ". Use multi_worker_mirrored, whose workers each read the data."
            )
        if self.source.nbytes > _SENT_UP_TO_BYTES:
            raise ConfigError(
                f"the data have {self.source.nbytes / 1e9:.1f} GB; at the most 2 GB can be sent to "
                "workers. Use multi_worker_mirrored, whose workers each read the data."
            )
        return resident_data.pack(self.source)

    def batch(self, arrays: dict[str, tf.Tensor], number: tf.Tensor) -> dict[str, tf.Tensor]:
        """A whole global batch for one replica, in the form that `examples` takes. In a graph.

        Args:
          arrays: What `packed_arrays` gave, as tensors on this host.
          number: Of the batch, int64 [], counted from 0 over the whole run.
        """
        with tf.device("/device:CPU:0"):
            indices, weight = batch_indices(
                number,
                num_examples=self.num_examples,
                global_batch_size=self.global_batch_size,
                seed=self._seed,
                shuffle=self._shuffle,
            )
            features = resident_data.gather(arrays, indices, self.source.element_spec)
            return weighted(features, weight)

    def microbatch(
        self,
        features: dict[str, tf.Tensor],
        counter: tf.Tensor,
        number: tf.Tensor | int = 0,
        *,
        training: bool,
    ) -> Microbatch:
        """What layers may ask of the rows that `examples` gave. Replica context.

        Args:
          features: These rows.
          counter: `ddl.random.batch_counter` of the global batch.
          number: Of the microbatch in it.
          training: As in `Microbatch`.
        """
        return Microbatch(
            seed=self._seed,
            training=training,
            counter=counter,
            first_row=self._first_row(number),
            rows=self._rows_of_replica(),
            mask=None if self.always_full else features["weight"] > 0,
        )

    def _first_row(self, microbatch: tf.Tensor | int) -> tf.Tensor | int:
        """Where in the global batch the rows of `examples` begin. Replica context.

        Returns:
          int64 []; a Python integer where it is known while tracing.
        """
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        known = tf.get_static_value(replica)
        replica = tf.cast(replica, tf.int64) if known is None else int(known)
        if not isinstance(microbatch, int):
            microbatch = tf.cast(microbatch, tf.int64)
        rows_of_microbatch = self.global_batch_size // self.microbatches
        return microbatch * rows_of_microbatch + replica * self._rows_of_replica()

    def _rows_of_replica(self) -> int:
        """b: rows that a replica computes at once. Replica context."""
        replicas = tf.distribute.get_replica_context().num_replicas_in_sync
        return self.global_batch_size // self.microbatches // replicas

    def _batches(self, first_batch: int, rows: np.ndarray | None) -> tf.data.Dataset:
        """Some rows of each batch, or where to gather them, on the host."""
        if not self.resident:
            return self.source.batches(
                self.global_batch_size,
                first_batch,
                seed=self._seed,
                shuffle=self._shuffle,
                rows=rows,
            )
        return index_batches(
            first_batch,
            num_examples=self.num_examples,
            global_batch_size=self.global_batch_size,
            seed=self._seed,
            shuffle=self._shuffle,
            rows=rows,
        )

    def _own_rows(self, strategy: tf.distribute.Strategy) -> np.ndarray | None:
        """Rows of a global batch that this process computes; None: all as they are.

        They are replica by replica, since they are shared out in this order.
        """
        workers, replicas = Workers(strategy), strategy.num_replicas_in_sync
        if replicas == 1 or (self.microbatches == 1 and workers.number == 1):
            return None
        rows = np.arange(self.global_batch_size).reshape(self.microbatches, replicas, -1)
        return rows.transpose(1, 0, 2).reshape(workers.number, -1)[workers.index]


def _static_slice(rows: tf.Tensor, first: tf.Tensor, size: int) -> tf.Tensor:
    return tf.ensure_shape(rows[first : first + size], [size, *rows.shape[1:]])


def _finished(dataset: tf.data.Dataset, ahead: bool = True) -> tf.data.Dataset:
    options = tf.data.Options()
    options.deterministic = True
    # By choice, not by default: one process reads everything, and in this order.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    # A map and a buffer need no tuner, and letting go of an iterator waits for it to wake up, which
    # it does ever less often, down to once a minute.
    options.autotune.enabled = False
    return (dataset.prefetch(_BATCHES_AHEAD) if ahead else dataset).with_options(options)
