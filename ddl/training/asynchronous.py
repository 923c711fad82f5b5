"""Asynchronous training with parameter servers.

The chief splits the batches of a loop into short ranges and schedules each range on a free worker.
For each batch the worker reads the weights from the parameter servers, computes a gradient and
applies it there at once. Workers do not wait for each other. Between a worker's read and its update
the others therefore change the weights, by about one update per other worker. (Dean et al. 2012,
"Large Scale Distributed Deep Networks"; Li et al. 2014, "Scaling Distributed Machine Learning with
the Parameter Server".)

Seed and step determine the batches, as under any strategy, but of a stream after a trainer has
gone back to an earlier state: its workers read on. They determine neither the worker of a
batch nor the order of the updates. Each batch is started at most once. A batch in progress on a
lost worker is left out and replaced by a later batch.

Evaluations and predictions run on the chief alone, which reads the weights from the servers.
"""

import itertools
import time
from typing import Any

import tensorflow as tf

from ddl.data.batch import Batch, gather, numeric_arrays, packed
from ddl.data.checks import data_errors
from ddl.data.order import batch_indices
from ddl.data.stream import Stream
from ddl.distribution.path import on_host
from ddl.errors import ConfigError
from ddl.random import batch_counter, nodes_of
from ddl.step.state import TrainingState
from ddl.step.train_step import TrainStep
from ddl.training.device_errors import device_errors

# Ranges per worker and loop. More ranges leave workers idle for less time at the end of the loop,
# at a higher scheduling cost.
_RANGES_PER_WORKER = 8
_PAUSE = 0.001  # seconds

_SENT_UP_TO_BYTES = 2_000_000_000  # below the 2 GiB limit of a TensorFlow message
_PYTHON = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}


class CoordinatedLoop:
    """The replacement of `ddl.training.loop.TrainingLoop`. Eager, on the chief.

    Workers run no Python. Arrays are sent to each worker once, and the indices of a batch come with
    the work. A stream of TensorFlow's operations is made on each worker, which reads it whole and
    takes the batches of its work: each batch is computed once, unless a worker is lost.

    Workers share the state in variables on parameter servers. They change these with operations
    that a parameter server runs one after the other, so that no concurrent change is lost.

    Attributes:
      variables: Always empty: variables lie on parameter servers.
    """

    variables: tuple[tf.Variable, ...] = ()

    def __init__(self, train_step: TrainStep, state: TrainingState):
        """Sends the data arrays to each worker and makes the variables; traces no update.

        Args:
          train_step: Makes one update.
          state: State to start from.

        Raises:
          ConfigError: If workers can neither be sent the data nor read them.
        """
        self._train_step, strategy = train_step, train_step.gradient.strategy
        (self._pipeline,) = train_step.gradient.pipelines.values()
        self._source: Any = self._pipeline.source
        arrays = numeric_arrays(self._source)
        self._arrays = arrays and {name: packed(array, False) for name, array in arrays.items()}
        self._check_data()
        # TensorFlow remakes the data set on a restarted worker. A data set of the user's, unlike a
        # function that uses it, is sent as a graph.
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        made = self._dataset() if self._arrays is None else self._dataset
        self._data = iter(self._coordinator.create_per_worker_dataset(made))
        # Keras reads the optimizer's count, adds one and writes it back, which loses concurrent
        # updates. An add on the parameter server replaces the instance's hook.
        (optimizer,) = train_step.optimizers.values()
        count = optimizer.iterations.value
        optimizer.iterations.assign_add = lambda value: count.assign_add(
            tf.cast(value, count.dtype), read_value=False
        )
        self._step: tf.Variable = count
        self._empty = state.without_metrics()
        self._slots = _RANGES_PER_WORKER * strategy._num_workers
        with strategy.scope():
            self._sums = tf.Variable(state.sums, trainable=False)
            self._norms = tf.Variable(state.gradient_norms, trainable=False)
            # How many batches of each range any worker has started.
            self._begun = tf.Variable(tf.zeros([self._slots], tf.int64), trainable=False)
        self._is_traced = False

    def _check_data(self) -> None:
        """Raises ConfigError unless the data can be sent to workers, or are read without Python."""
        size, cannot = sum(array.nbytes for array in (self._arrays or {}).values()), ""
        if isinstance(self._source, Stream):
            variant = tf.data.experimental.to_variant(self._dataset())
            text = tf.raw_ops.DatasetToGraphV2(input_dataset=variant).numpy()
            nodes = nodes_of(tf.compat.v1.GraphDef.FromString(text))
            if python := next((node for node in nodes if node.op in _PYTHON), None):
                cannot = f"the stream, which calls {python.name} ({python.op})"
        elif not self._arrays or size > _SENT_UP_TO_BYTES:
            cannot = f"{size / 1e9:.1f} GB of arrays" if self._arrays else self._source.name
        if cannot:
            raise ConfigError(
                "With parameter servers, workers run no Python, and get at most 2 GB of arrays: "
                f"they cannot read {cannot}. Pass arrays of numbers, or ddl.data.stream of a "
                "tf.data.Dataset that needs no Python, or use --strategy=multi_worker_mirrored, "
                "where each worker runs the program."
            )

    def _dataset(self) -> tf.data.Dataset:
        """Builds the data set of a worker: its arrays, for ever, or the numbered batches."""
        if self._arrays is not None:  # whose `next` copies nothing
            return tf.data.Dataset.from_tensors(dict(self._arrays)).repeat()
        batches = self._source.batches(self._pipeline.global_batch_size, 0)
        return tf.data.Dataset.zip(tf.data.Dataset.range(2**62), batches)

    def take_waited(self) -> None:
        """Returns None: the waits of workers are unknown."""

    def trace(self, state: TrainingState) -> None:
        """Traces the workers' function; see `TrainingLoop.trace`."""
        if not self._is_traced:
            self._train(state, 0)
            self._is_traced = True

    def run(self, state: TrainingState, end: int) -> TrainingState:
        """Trains to step `end`, or less far if updates were skipped or lost; returns the state.

        Raises:
          WorkerLost: If a parameter server was lost.
          ConfigError: If the task cannot be trained.
        """
        total = end - int(state.step)
        self._train(state, total)
        step, sums = tf.identity(self._step), self._sums.read_value()
        finite = tf.reduce_all(tf.math.is_finite(sums))
        return state._replace(
            step=step,
            batches=state.batches + total,
            sums=sums,
            gradient_norms=self._norms.read_value(),
            diverged_for=state.diverged_for + tf.cast(~finite, tf.int64),
            batches_left_out=state.batches_left_out + tf.maximum(total - (step - state.step), 0),
        )

    def _train(self, state: TrainingState, total: int) -> None:
        """Makes `total` updates, in ranges; with 0, traces alone.

        A range of a lost worker is scheduled again. A stalled process is detected by
        `ddl.distribution.parameter_servers.watch_tasks`.
        """
        self._sums.assign(state.sums)
        self._norms.assign(state.gradient_norms)
        self._begun.assign(tf.zeros_like(self._begun))
        number, first = max(min(total, self._slots), 1), int(state.batches)
        ends = [first + total * place // number for place in range(number + 1)]
        with data_errors(self._source), device_errors():
            for slot, (start, stop) in enumerate(itertools.pairwise(ends)):
                numbers = [tf.constant(n, tf.int64) for n in (start, stop - start, slot)]
                rows = self._rows(start, stop - start)
                self._coordinator.schedule(self._make_updates, (self._data, rows, *numbers))
            while not self._coordinator.done():
                time.sleep(_PAUSE)

    def _rows(self, first: int, count: int) -> dict[str, tf.Tensor]:
        """Returns the rows of a range of batches as texts; {} for a stream."""
        if self._arrays is None:
            return {}
        order = self._pipeline.order(self._pipeline.global_batch_size)
        # As texts, whose form does not depend on `count`: the function is traced once.
        texts = map(tf.io.serialize_tensor, batch_indices(first, count, **order))
        return dict(zip(("index", "weight"), texts, strict=True))

    @tf.function(autograph=False)
    def _make_updates(
        self, data: Any, texts: Any, first: tf.Tensor, count: tf.Tensor, slot: tf.Tensor
    ) -> tf.Tensor:
        """Makes updates with `count` batches, from number `first` on. On a worker."""
        begun, one, rows = self._begun.handle, tf.ones([], tf.int64), {}
        with on_host():
            for name, text in texts.items():  # index, int64 [count, B]; weight, float32
                dtype = tf.int64 if name == "index" else tf.float32
                rows[name] = tf.io.parse_tensor(text, dtype)

        def updated(place: tf.Tensor) -> tf.Tensor:
            begins = tf.raw_ops.ResourceScatterAdd(resource=begun, indices=slot, updates=one)
            with tf.control_dependencies([begins]):
                now = self._empty._replace(step=self._step.read_value(), batches=first + place)
                batch = self._batch(data, rows, place, now.batches)
                after, _ = self._train_step({"": batch}, now)
                sums = self._sums.assign_add(after.sums, read_value=False)
                norms = self._norms.assign_add(after.gradient_norms, read_value=False)
                with tf.control_dependencies([sums, norms]):
                    return place + 1

        # A lost worker may have started this range: its batches are not computed twice.
        start = tf.raw_ops.ResourceGather(resource=begun, indices=slot, dtype=tf.int64)
        return tf.while_loop(lambda place: place < count, updated, (start,), parallel_iterations=1)

    def _batch(
        self, data: Any, rows: dict[str, tf.Tensor], place: tf.Tensor, number: tf.Tensor
    ) -> Batch:
        """Returns a whole global batch, by its place in the range. On a worker, in a graph."""
        with on_host():
            if self._arrays is not None:
                size = self._pipeline.global_batch_size
                index = tf.ensure_shape(rows["index"][place], [size])
                weight = tf.ensure_shape(rows["weight"][place], [size])
                found = gather(next(data), index, self._source.element_spec)
                if "weight" in found:
                    weight *= tf.cast(found["weight"], tf.float32)
                found = {**found, "weight": weight}
            else:
                # A worker that begins later, or takes work again, is ahead of some batches.
                found = tf.while_loop(
                    lambda passed, _: passed < number, lambda *_: next(data), next(data)
                )[1]
        return Batch(found, {}, batch_counter(number))
