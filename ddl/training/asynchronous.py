"""Asynchronous training and evaluation with parameter servers, and the chief's watch over them.

The chief splits the batches of a loop into short ranges and schedules each range on a free worker.
For each batch the worker reads the weights from the parameter servers, computes a gradient and
applies it there at once. Workers do not wait for each other. Between a worker's read and its update
the others therefore change the weights, by about one update per other worker. (Dean et al. 2012,
"Large Scale Distributed Deep Networks"; Li et al. 2014, "Scaling Distributed Machine Learning with
the Parameter Server".)

Seed and step determine the batches, as under any strategy. They determine neither the worker of a
batch nor the order of the updates. Each batch is started at most once. A batch in progress on a
lost worker is left out and replaced by a later batch.
"""

import itertools
import os
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from ddl.data.batch import Batch, gather, numeric_arrays, packed
from ddl.data.checks import data_errors
from ddl.data.order import batch_indices
from ddl.data.pipeline import BatchPipeline
from ddl.data.stream import Stream
from ddl.distribution.addresses import ask, silence
from ddl.distribution.cluster import ClusterTimeouts, cluster_role
from ddl.distribution.parameter_servers import NAMES
from ddl.distribution.path import on_host
from ddl.errors import ConfigError, WorkerLost
from ddl.output import say
from ddl.random import batch_counter
from ddl.step.effects import nodes_of
from ddl.step.state import TrainingState
from ddl.step.train_step import TrainStep
from ddl.training.device_errors import device_errors

# Ranges per worker and loop. More ranges leave workers idle for less time at the end of the loop,
# at a higher scheduling cost.
_RANGES_PER_WORKER = 8
_PAUSE, _WATCH_PAUSE = 0.001, 1.0  # seconds
# A dead parameter server has lost its weights. These seconds let TensorFlow's pending call raise
# first.
_PATIENCE_WITH_THE_DEAD = 5.0

_SENT_UP_TO_BYTES = 2_000_000_000  # below the 2 GiB limit of a TensorFlow message
_PYTHON = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}


class BatchWorkers:
    """The workers of a strategy, each with the data of a pipeline. Eager, on the chief.

    Workers run no Python. Arrays are sent to each worker once, and the indices of a batch come with
    the work. A stream of TensorFlow's operations is made on each worker, which reads it whole and
    takes the batches of its work: each batch is computed once, whichever worker gets it.

    Attributes:
      slots: Largest number of ranges into which batches are split.
    """

    def __init__(self, strategy: tf.distribute.Strategy, pipeline: BatchPipeline):
        """Sends the arrays to each worker, or the stream's operations.

        Args:
          strategy: The strategy, with parameter servers.
          pipeline: The batches.

        Raises:
          ConfigError: If the data are neither arrays that can be sent nor a stream of TensorFlow's
            operations alone.
        """
        self._pipeline = pipeline
        self._source: Any = pipeline.source
        arrays = numeric_arrays(self._source)
        self._arrays = arrays and {name: packed(array, False) for name, array in arrays.items()}
        size, cannot = sum(array.nbytes for array in (arrays or {}).values()), ""
        if isinstance(self._source, Stream):
            if (python := self._python_operation()) is not None:
                cannot = f"the stream, which calls {python.name} ({python.op})"
        elif not arrays or size > _SENT_UP_TO_BYTES:
            cannot = f"{size / 1e9:.1f} GB of arrays" if arrays else self._source.name
        if cannot:
            raise ConfigError(
                "With parameter servers, workers run no Python, and get at most 2 GB of arrays: "
                f"they cannot read {cannot}. Pass arrays of numbers, or ddl.data.stream of a "
                "tf.data.Dataset that needs no Python, or use --strategy=multi_worker_mirrored, "
                "where each worker runs the program."
            )
        # TensorFlow returns the same coordinator for the same strategy.
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self.slots = _RANGES_PER_WORKER * strategy._num_workers
        # TensorFlow remakes the data set on a restarted worker.
        self._data = iter(self._coordinator.create_per_worker_dataset(self._dataset))

    def _dataset(self) -> tf.data.Dataset:
        """Builds the data set of a worker: its arrays, for ever, or the numbered batches."""
        if self._arrays is not None:  # whose `next` copies nothing
            return tf.data.Dataset.from_tensors(dict(self._arrays)).repeat()
        batches = self._source.batches(self._pipeline.global_batch_size, 0)
        return tf.data.Dataset.zip(tf.data.Dataset.range(2**62), batches)

    def _python_operation(self) -> Any:
        """Returns the first operation of the stream that calls Python; None if there is none."""
        made = tf.function(
            lambda: tf.data.experimental.to_variant(self._dataset()), autograph=False
        )
        nodes = nodes_of(made.get_concrete_function().graph)
        return next((node for node in nodes if node.op in _PYTHON), None)

    def ranges(self, first: int, total: int) -> Iterator[tuple[int, int]]:
        """Yields the ranges into which batches are split, each as its first batch and length."""
        number = min(total, self.slots)
        ends = [first + total * place // number for place in range(number + 1)]
        return ((start, stop - start) for start, stop in itertools.pairwise(ends))

    def schedule(self, function: Any, first: int, count: int, *tensors: tf.Tensor) -> Any:
        """Schedules a function of a range of batches on a worker, again if the worker is lost.

        Args:
          function: Takes the worker's data and the rows of the range, for `batch`, both numbers as
            int64 [], and the tensors.
          first: Number of the first batch, counted from 0 over the whole run.
          count: Number of batches.
          *tensors: Further arguments.

        Returns:
          The result as TensorFlow's `RemoteValue`.
        """
        rows: dict[str, tf.Tensor] = {}
        if self._arrays is not None:
            order = self._pipeline.order(self._pipeline.global_batch_size)
            # As texts, whose form does not depend on `count`: the function is traced once.
            texts = map(tf.io.serialize_tensor, batch_indices(first, count, **order))
            rows = dict(zip(("index", "weight"), texts, strict=True))
        numbers = [tf.constant(number, tf.int64) for number in (first, count)]
        with device_errors(), data_errors(self._source):
            return self._coordinator.schedule(function, (self._data, rows, *numbers, *tensors))

    def wait(self) -> None:
        """Waits until all functions are done; `watch_tasks` detects a stalled process.

        Raises:
          WorkerLost: If a parameter server was lost.
        """
        with data_errors(self._source):
            while not self._coordinator.done():
                time.sleep(_PAUSE)

    def received(self, rows: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Returns a range's rows: "index", int64 [count, B], "weight", float32. On a worker."""
        dtypes = {"index": tf.int64, "weight": tf.float32}
        with on_host():
            return {name: tf.io.parse_tensor(text, dtypes[name]) for name, text in rows.items()}

    def batch(
        self, data: Any, rows: dict[str, tf.Tensor], place: tf.Tensor, number: tf.Tensor
    ) -> Batch:
        """Returns a whole global batch. On a worker, in a graph.

        Args:
          data: The data of this worker.
          rows: `received` of the range.
          place: Place of the batch in the range, int64 [].
          number: Number of the batch, int64 [], counted from 0 over the whole run.
        """
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


class CoordinatedLoop:
    """The replacement of `ddl.training.loop.TrainingLoop`. Eager, on the chief.

    Workers share the state in variables on parameter servers. They change these with operations
    that a parameter server runs one after the other, so that no concurrent change is lost.

    Attributes:
      trace_count: Number of traces of the workers' function.
      variables: Always empty: variables lie on parameter servers.
    """

    variables: tuple[tf.Variable, ...] = ()

    def __init__(self, update: TrainStep, state: TrainingState):
        """Sends the data arrays to each worker and makes the variables; traces no update.

        Args:
          update: Makes one update.
          state: State to start from.

        Raises:
          ConfigError: If workers can neither be sent the data nor read them.
        """
        self.trace_count = 0
        self._update = update
        strategy, (pipeline,) = update.gradient.strategy, update.gradient.pipelines.values()
        self._workers = BatchWorkers(strategy, pipeline)
        # Keras reads the optimizer's count, adds one and writes it back, which loses concurrent
        # updates. An add on the parameter server replaces the instance's hook.
        (optimizer,) = update.optimizers.values()
        count = optimizer.iterations.value
        optimizer.iterations.assign_add = lambda value: count.assign_add(
            tf.cast(value, count.dtype), read_value=False
        )
        self._step: tf.Variable = count
        self._empty = state.without_metrics()
        with strategy.scope():
            self._sums = tf.Variable(state.sums, trainable=False)
            self._norms = tf.Variable(state.gradient_norms, trainable=False)
            # How many batches of each range any worker has started.
            self._begun = tf.Variable(tf.zeros([self._workers.slots], tf.int64), trainable=False)

    def take_waited(self) -> None:
        """Returns None: the waits of workers are unknown."""

    def trace(self, state: TrainingState) -> None:
        """Traces the workers' function; see `TrainingLoop.trace`."""
        if not self.trace_count:
            self._train(state, [(int(state.batches), 0)])

    def run(self, state: TrainingState, end: int) -> TrainingState:
        """Trains to step `end`, or less far if updates were skipped or lost; returns the state.

        Raises:
          WorkerLost: If a parameter server was lost.
          ConfigError: If the task cannot be trained.
        """
        total = end - int(state.step)
        self._train(state, self._workers.ranges(int(state.batches), total))
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

    def _train(self, state: TrainingState, ranges: Iterable[tuple[int, int]]) -> None:
        self._sums.assign(state.sums)
        self._norms.assign(state.gradient_norms)
        self._begun.assign(tf.zeros_like(self._begun))
        for slot, (first, count) in enumerate(ranges):
            place = tf.constant(slot, tf.int64)
            self._workers.schedule(self._make_updates, first, count, place)
        self._workers.wait()

    @tf.function(autograph=False)
    def _make_updates(
        self, data: Any, rows: Any, first: tf.Tensor, count: tf.Tensor, slot: tf.Tensor
    ) -> tf.Tensor:
        """Makes updates with `count` batches, from number `first` on. On a worker."""
        self.trace_count += 1
        rows, begun = self._workers.received(rows), self._begun.handle
        one = tf.ones([], tf.int64)

        def updated(number: tf.Tensor) -> tf.Tensor:
            begins = tf.raw_ops.ResourceScatterAdd(resource=begun, indices=slot, updates=one)
            with tf.control_dependencies([begins]):
                now = self._empty._replace(step=self._step.read_value(), batches=first + number)
                batch = self._workers.batch(data, rows, number, now.batches)
                after = self._update({"": batch}, now)
                sums = self._sums.assign_add(after.sums, read_value=False)
                norms = self._norms.assign_add(after.gradient_norms, read_value=False)
                with tf.control_dependencies([sums, norms]):
                    return number + 1

        # A lost worker may have started this range: its batches are not computed twice.
        start = tf.raw_ops.ResourceGather(resource=begun, indices=slot, dtype=tf.int64)
        return tf.while_loop(
            lambda number: number < count, updated, (start,), parallel_iterations=1
        )


def watch_tasks(timeouts: ClusterTimeouts) -> None:
    """Probes every worker and parameter server in TF_CONFIG from now on, each in its own thread.

    TensorFlow reassigns the updates of a lost worker to the others and readmits the worker when it
    is back, but waits forever for a task that neither answers nor dies. A lost parameter server, a
    stopped or unreachable worker, and the loss of all workers end this process with the status of
    WorkerLost, even if its main thread is blocked. A worker that died is reported, and training
    continues on the others.

    Args:
      timeouts: Seconds of silence after which a task is lost.
    """
    cluster, gone = cluster_role().cluster, set[str]()
    for kind in ("ps", "worker"):
        for index, address in enumerate(cluster[kind]):
            given = (kind, index, address, gone, len(cluster["worker"]), timeouts)
            threading.Thread(target=_watch, args=given, daemon=True).start()


def _watch(
    kind: str, index: int, address: str, gone: set[str], workers: int, timeouts: ClusterTimeouts
) -> None:
    """Probes a task; all threads share the addresses of workers that are gone."""
    who, heard = f"{NAMES[kind]} {index} at {address}", time.monotonic()
    dead = timeouts._replace(peer=min(_PATIENCE_WITH_THE_DEAD, timeouts.peer))
    while True:
        answer = ask(address, min(timeouts.peer, timeouts.stall, 10 * _WATCH_PAUSE))
        refuses = answer == "refuses"
        if answer == "greets" and address in gone:
            gone.discard(address)
            say(f"{who} is back.")
        elif refuses and kind == "worker" and address not in gone:
            gone.add(address)
            say(f"{who} is lost. The other workers compute its updates until it is back.")
        if answer == "greets" or (refuses and kind == "worker" and len(gone) < workers):
            heard = time.monotonic()
        if silent := silence(answer, heard, dead if refuses and kind == "ps" else timeouts):
            # At once: the main thread may be blocked forever.
            say(f"{who} {silent}. Restart all tasks; they resume from the last checkpoint.")
            os._exit(WorkerLost.exit_status)
        time.sleep(_WATCH_PAUSE)
