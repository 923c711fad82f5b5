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
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from ddl.data.batch import Batch, gather, numeric_arrays, packed
from ddl.data.checks import data_errors
from ddl.data.order import batch_indices
from ddl.data.pipeline import BatchPipeline
from ddl.data.source import Source
from ddl.data.stream import Stream
from ddl.distribution.addresses import ask, silence
from ddl.distribution.cluster import ClusterTimeouts, cluster_role
from ddl.distribution.parameter_servers import NAMES
from ddl.distribution.path import on_host
from ddl.errors import ConfigError, WorkerLost
from ddl.output import say
from ddl.random import batch_counter
from ddl.step.loss import Loss
from ddl.step.state import TrainingState
from ddl.step.sums import fixed_order_of_sums
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


class WorkerBatches:
    """The batches of a pipeline on the workers, which run no Python.

    Arrays are sent to each worker once, and the indices of a batch come with the work. A stream of
    TensorFlow's operations is made on each worker, which reads it whole and takes the batches of
    its work: each batch is computed once, whichever worker gets it.

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
        self._arrays: dict[str, Any] | None = None
        if isinstance(self.source, Stream):
            python = self._python_operation()
            cannot = (
                "" if python is None else f"the stream, which calls {python.name} ({python.op})"
            )
        else:
            arrays = numeric_arrays(self.source) or {}
            size = sum(array.nbytes for array in arrays.values())
            cannot = "" if arrays else self.source.name
            if size > _SENT_UP_TO_BYTES:
                cannot = f"{size / 1e9:.1f} GB of arrays"
            self._arrays = {name: packed(array, False) for name, array in arrays.items()}
        if cannot:
            raise ConfigError(
                "With parameter servers, workers run no Python, and get at most 2 GB of arrays: "
                f"they cannot read {cannot}. Pass arrays of numbers, or ddl.data.stream of a "
                "tf.data.Dataset that needs no Python, or use --strategy=multi_worker_mirrored, "
                "where each worker runs the program."
            )

    def dataset(self) -> tf.data.Dataset:
        """Builds the data set of a worker: its arrays, for ever, or the numbered batches."""
        if self._arrays is not None:  # whose `next` copies nothing
            return tf.data.Dataset.from_tensors(dict(self._arrays)).repeat()
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
        return {"index": tf.io.serialize_tensor(index), "weight": tf.io.serialize_tensor(weight)}

    def received(self, rows: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Returns `rows_of` on the worker: "index", int64 [count, B], and "weight", float32."""
        dtypes = {"index": tf.int64, "weight": tf.float32}
        with on_host():
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
        with on_host():
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

    def _python_operation(self) -> Any:
        """Returns the first operation of the stream that calls Python; None if there is none."""
        made = tf.function(lambda: tf.data.experimental.to_variant(self.dataset()), autograph=False)
        definition = made.get_concrete_function().graph.as_graph_def()
        nodes = [*definition.node, *(n for f in definition.library.function for n in f.node_def)]
        return next((node for node in nodes if node.op in _PYTHON), None)


class _Workers:
    """The workers of a strategy, each with the data set of some batches."""

    def __init__(self, strategy: tf.distribute.Strategy, batches: WorkerBatches):
        # TensorFlow returns the same coordinator for the same strategy.
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self.slots = _RANGES_PER_WORKER * strategy._num_workers
        self._source = batches.source
        # TensorFlow remakes the data set on a restarted worker.
        self._data = iter(self._coordinator.create_per_worker_dataset(batches.dataset))

    def ranges(self, first: int, total: int) -> Iterator[tuple[int, int]]:
        """Yields the ranges into which batches are split, as pairs (start, end)."""
        number = min(total, self.slots)
        return itertools.pairwise(first + total * place // number for place in range(number + 1))

    def schedule(self, function: Any, *args: Any) -> Any:
        """Schedules `function(data, *args)` on a worker, again if it is lost.

        Returns the result as TensorFlow's `RemoteValue`.
        """
        with device_errors(), data_errors(self._source):
            return self._coordinator.schedule(function, args=(self._data, *args))

    def wait(self) -> None:
        """Waits until all functions are done; `watch_tasks` detects a stalled process."""
        with data_errors(self._source):
            while not self._coordinator.done():
                time.sleep(_PAUSE)


class _SharedState:
    """The variables on parameter servers in which workers share a `TrainingState`.

    Workers change them with operations that a parameter server runs one after the other, so that no
    concurrent change is lost.
    """

    def __init__(self, update: TrainStep, state: TrainingState, slots: int):
        """Makes the variables; the optimizer's count is the step.

        Keras reads that count, adds one and writes it back, which loses concurrent updates. An add
        on the parameter server replaces the instance's hook.
        """
        (optimizer,) = update.optimizers.values()
        count = optimizer.iterations.value
        optimizer.iterations.assign_add = lambda value: count.assign_add(
            tf.cast(value, count.dtype), read_value=False
        )
        self._step: tf.Variable = count
        self._empty = state.without_metrics()
        with update.strategy.scope():
            self._sums = tf.Variable(state.sums, trainable=False)
            self._norms = tf.Variable(state.gradient_norms, trainable=False)
            self._begun = tf.Variable(tf.zeros([slots], tf.int64), trainable=False)

    def write(self, state: TrainingState) -> None:
        """Sets the variables to the state from which workers start. Eager."""
        self._sums.assign(state.sums)
        self._norms.assign(state.gradient_norms)
        self._begun.assign(tf.zeros_like(self._begun))

    def read(self, before: TrainingState, batches: int) -> TrainingState:
        """Returns the state after workers have processed `batches` batches. Eager."""
        step, sums = tf.identity(self._step), self._sums.read_value()
        lost = tf.maximum(batches - (step - before.step), 0)
        finite = tf.reduce_all(tf.math.is_finite(sums))
        return before._replace(
            step=step,
            batches=before.batches + batches,
            sums=sums,
            gradient_norms=self._norms.read_value(),
            diverged_for=before.diverged_for + tf.cast(~finite, tf.int64),
            batches_left_out=before.batches_left_out + lost,
        )

    def begun(self, slot: tf.Tensor) -> tf.Tensor:
        """Returns how many batches of a slot any worker has started: int64 []. On a worker."""
        return tf.raw_ops.ResourceGather(resource=self._begun.handle, indices=slot, dtype=tf.int64)

    def begin(self, slot: tf.Tensor) -> tf.Operation:
        """Counts one more started batch of a slot. On a worker."""
        return tf.raw_ops.ResourceScatterAdd(
            resource=self._begun.handle, indices=slot, updates=tf.ones([], tf.int64)
        )

    def at(self, batch: tf.Tensor) -> TrainingState:
        """Returns the present state for batch number `batch`, int64 [], with metric sums of 0."""
        return self._empty._replace(step=self._step.read_value(), batches=batch)

    def add(self, after: TrainingState) -> list[tf.Operation]:
        """Adds the sums of an update, whose step the optimizer has counted. On a worker."""
        return [
            self._sums.assign_add(after.sums, read_value=False),
            self._norms.assign_add(after.gradient_norms, read_value=False),
        ]


class CoordinatedLoop:
    """The replacement of `ddl.training.loop.TrainingLoop`. Eager, on the chief.

    Attributes:
      trace_count: Number of traces of the workers' function.
      variables: Always empty: variables lie on parameter servers.
    """

    variables: tuple[tf.Variable, ...] = ()

    def __init__(self, update: TrainStep, state: TrainingState):
        """Sends the data arrays to each worker; traces no update.

        Args:
          update: Makes one update.
          state: State to start from.

        Raises:
          ConfigError: If workers can neither be sent the data nor read them.
        """
        self.trace_count = 0
        self._is_traced = False
        self._update = update
        (pipeline,) = update.pipelines.values()
        self._batches = WorkerBatches(pipeline)
        self._workers = _Workers(update.strategy, self._batches)
        self._shared = _SharedState(update, state, self._workers.slots)

    def take_waited(self) -> None:
        """Returns None: the waits of workers are unknown."""

    def trace(self, state: TrainingState) -> None:
        """Traces the workers' function; see `TrainingLoop.trace`."""
        if self._is_traced:
            return
        self._shared.write(state)
        self._schedule(0, int(state.batches), 0)
        self._workers.wait()
        self._is_traced = True

    def run(self, state: TrainingState, end: int) -> TrainingState:
        """Trains to step `end`, or less far if updates were skipped or lost; returns the state.

        Raises:
          WorkerLost: If a parameter server was lost.
          ConfigError: If the task cannot be trained.
        """
        self._shared.write(state)
        total = end - int(state.step)
        for slot, (start, stop) in enumerate(self._workers.ranges(int(state.batches), total)):
            self._schedule(slot, start, stop - start)
        self._workers.wait()
        return self._shared.read(state, total)

    def _schedule(self, slot: int, first: int, count: int) -> None:
        numbers = [tf.constant(number, tf.int64) for number in (slot, first, count)]
        rows = self._batches.rows_of(first, count)
        self._workers.schedule(self._make_updates, rows, *numbers)

    @tf.function(autograph=False)
    def _make_updates(
        self, data: Any, rows: Any, slot: tf.Tensor, first: tf.Tensor, count: tf.Tensor
    ) -> tf.Tensor:
        """Makes updates with `count` batches, from number `first` on. On a worker."""
        self.trace_count += 1
        rows = self._batches.received(rows)

        def updated(number: tf.Tensor) -> tf.Tensor:
            with tf.control_dependencies([self._shared.begin(slot)]):
                before = self._shared.at(first + number)
                batch = self._batches.batch(data, rows, number, before.batches)
                after = self._update({"": batch}, before)
                with tf.control_dependencies(self._shared.add(after)):
                    return number + 1

        # A lost worker may have started this range: its batches are not computed twice.
        return tf.while_loop(
            lambda number: number < count,
            updated,
            (self._shared.begun(slot),),
            parallel_iterations=1,
        )


def sums_of(
    pipeline: BatchPipeline, loss: Loss, batch: Batch, position: tf.Tensor, step: tf.Tensor
) -> tf.Tensor:
    """Returns the metric sums of a replica's batch in an evaluation: float64 [size].

    Args:
      pipeline: The evaluation data.
      loss: Gives the metric sums.
      batch: The batch on this replica.
      position: Batches that the training has read, int64 [].
      step: Updates that the training has made, int64 [].
    """
    features = pipeline.examples(batch)
    microbatch = pipeline.microbatch(batch, features, training=False, step=step, position=position)
    with microbatch.forward():
        return loss(features, training=False)[1]


class CoordinatedEvaluation:
    """The metric sums of an evaluation, whose batches workers share. Eager, on the chief."""

    def __init__(self, loss: Loss, pipeline: BatchPipeline, strategy: tf.distribute.Strategy):
        """Sends the data arrays to each worker; traces no evaluation.

        Args:
          loss: Gives the metric sums.
          pipeline: The evaluation data.
          strategy: The strategy, with parameter servers.

        Raises:
          ConfigError: If workers can neither be sent the data nor read them.
        """
        self._loss, self._pipeline, self._strategy = loss, pipeline, strategy
        self._batches = WorkerBatches(pipeline)
        self._workers = _Workers(strategy, self._batches)

    def sums(self, state: TrainingState) -> tf.Tensor:
        """Returns the metric sums over the data, float64 [size].

        Each range counts once, even if workers computing it are lost.

        Raises:
          WorkerLost: If a parameter server was lost.
        """
        ranges = []
        for start, stop in self._workers.ranges(0, self._pipeline.steps_per_epoch or 0):
            rows = self._batches.rows_of(start, stop - start)
            numbers = [tf.constant(number, tf.int64) for number in (start, stop)]
            given = (rows, *numbers, state.batches, state.step)
            ranges.append(self._workers.schedule(self._sums_of, *given))
        self._workers.wait()
        return tf.add_n([sums.fetch() for sums in ranges])

    @tf.function(autograph=False)
    @fixed_order_of_sums()
    def _sums_of(
        self, data: Any, rows: Any, start: tf.Tensor, stop: tf.Tensor, *now: tf.Tensor
    ) -> tf.Tensor:
        """Returns metric sums over the batches [start, stop): float64 [size]. On a worker."""
        rows, strategy = self._batches.received(rows), self._strategy

        def of_replica(batch: Batch) -> tf.Tensor:
            return sums_of(self._pipeline, self._loss, batch, *now)

        def add_batch(number: tf.Tensor, sums: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            batch = self._batches.batch(data, rows, number - start, number)
            own = strategy.run(of_replica, args=(batch,))
            return number + 1, sums + strategy.reduce("SUM", own, axis=None)

        initial = (start, self._loss.form(False).metrics.zeros())
        return tf.while_loop(lambda number, sums: number < stop, add_batch, initial)[1]


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
