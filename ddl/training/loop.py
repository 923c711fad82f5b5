"""The training loop on the devices: many updates in one `tf.function`, without Python.

self._set_iterators   the distributed data sets (`ddl.step.replicas`)
self._batches         an update's batches: from iterators, or by rows of resident arrays
self._train_step      an update (`ddl.step.train_step`)
self._loop            the loop over updates, or over pieces of several that XLA compiles
"""

import concurrent.futures
import functools
import uuid
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from ddl.data.batch import Batch, on_each_replica
from ddl.data.checks import data_errors
from ddl.data.pipeline import BatchPipeline
from ddl.distribution.path import on_host, on_host_if_placed, path_of
from ddl.distribution.workers import Workers
from ddl.random import batch_counter
from ddl.step.replicas import distributed_iterator
from ddl.step.state import TrainingState
from ddl.step.train_step import TrainStep
from ddl.training.device_errors import device_errors

Carried = dict[str, tf.Tensor]
"""Fields of the state that an update changes, by name, and `_LAST_FINITE`."""

_LAST_FINITE = "last_finite"
"""Name of `batches` after the last update with which each sum was finite, int64 [n]."""

# Most updates that XLA compiles as one piece: TensorFlow starts a piece far more slowly than XLA
# the next turn of its own loop. The flag that stops a loop is read between two pieces; a loop takes
# about a second (`ddl.training.pace`).
_AT_ONCE = 32

_ROWS = 1 << 16  # of a table: a fraction of a second of training
_LEAST, _MOST = 16, 1024  # updates of a table
_ENDLESS = 1 << 30


class HostScalar:
    """A value in host memory, under any strategy.

    A `tf.Variable` made in a strategy's scope would be on every device, and a read would make a GPU
    wait for the earlier updates.
    """

    def __init__(self, value: bool | float, dtype: tf.DType):
        """Makes it, with its first value."""
        self._dtype = dtype
        with on_host():
            self._handle = tf.raw_ops.VarHandleOp(
                dtype=dtype, shape=[], shared_name=f"ddl {uuid.uuid4()}"
            )
        self.assign(value)

    def assign(self, value: bool | float) -> None:
        """Sets the value. Eager, from any thread."""
        with on_host():
            value = tf.constant(value, self._dtype)
            tf.raw_ops.AssignVariableOp(resource=self._handle, value=value)

    def add(self, value: tf.Tensor) -> None:
        """Adds a tensor, in a graph."""
        tf.raw_ops.AssignAddVariableOp(resource=self._handle, value=value)

    def read(self) -> tf.Tensor:
        """Returns the value, []."""
        with on_host():
            read = tf.raw_ops.ReadVariableOp(resource=self._handle, dtype=self._dtype)
        read.set_shape([])
        return read


class RowTables:
    """Tables of the rows that many updates gather from resident arrays, on each replica.

    Eager, cross-replica context. A thread computes the next table while the devices work on the
    present one.

    Attributes:
      length: Updates of a table.
    """

    def __init__(self, pipelines: Mapping[str, BatchPipeline], strategy: tf.distribute.Strategy):
        """Keeps the pipeline of each source, by its name; computes nothing."""
        self._pipelines = {name: one for name, one in pipelines.items() if one.resident}
        self._strategy = strategy
        rows = [one.global_batch_size * one.batches_per_update for one in self._pipelines.values()]
        self.length = max(_LEAST, min(_MOST, _ROWS // max(rows, default=1)))
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "ddl-order")
        self._coming: dict[int, concurrent.futures.Future] = {}  # by its first update
        self._first = -1
        self._table: dict[str, Any] = {}

    def at(self, update: int) -> tuple[tf.Tensor, dict[str, Any]]:
        """Returns the tables that hold the rows of an update.

        Args:
          update: Number of the update, counted from 0 over the whole run.

        Returns:
          Number of the first update of the tables, int64 []; and by the name of the source "index",
          int64 [length, rows of a replica], and "weight" if not all are 1, per-replica.
        """
        first = update // self.length * self.length
        if self._pipelines and first != self._first:
            coming = self._coming.get(first) or self._thread.submit(self._rows, first)
            following = first + self.length
            self._coming = {following: self._thread.submit(self._rows, following)}
            self._table = {name: self._placed(each) for name, each in coming.result().items()}
            self._first = first
        return tf.constant(first, tf.int64), self._table

    def _placed(self, rows: dict[str, Any]) -> Any:
        return on_each_replica(
            self._strategy, lambda own: {name: values[own] for name, values in rows.items()}
        )

    def _rows(self, update: int) -> dict[str, Any]:
        return {
            name: one.table(self._strategy, update, self.length)
            for name, one in self._pipelines.items()
        }


class TrainingLoop:
    """The loop over updates, each on all replicas. Eager, cross-replica context."""

    def __init__(self, train_step: TrainStep, max_skipped_updates: int, stop: HostScalar):
        """Keeps the arguments; traces nothing.

        Args:
          train_step: Makes one update.
          max_skipped_updates: Consecutive skipped updates after which the loop ends.
          stop: Whether the loop must end after the current update, or piece of several updates.
            Several workers, who must make the same updates, read it after the loop alone.
        """
        gradient, self._train_step = train_step.gradient, train_step
        self._pipelines, self._compiler = gradient.pipelines, gradient.compiler
        self._strategy = gradient.strategy
        self._max_skipped_updates = max_skipped_updates
        self._stop = stop
        self._has_own_memory = path_of(self._strategy).has_own_memory
        # A timestamp that depends on a GPU's tensor would wait for the GPU.
        self._wait = None if self._has_own_memory else HostScalar(0.0, tf.float64)
        self._is_one_of_several = Workers(self._strategy).number > 1
        self._tables = RowTables(self._pipelines, self._strategy)
        self._iterators: dict[str, Any] = {}  # of data that do not reside on the devices
        self._position: tf.Tensor | None = None  # `batches` of the state the iterators stand at
        self._traced: Any = None

    @property
    def variables(self) -> list[tf.Variable]:
        """Variables that the traced loop reads or writes, with each replica's copy."""
        return [] if self._traced is None else list(self._traced.graph.variables)

    def take_waited(self) -> float | None:
        """Returns the seconds that the loop waited for batches since the last call.

        None for batches that are copied to the devices ahead.
        """
        if self._wait is None:
            return None
        waited = float(self._wait.read())
        self._wait.assign(0.0)
        return waited

    def trace(self, state: TrainingState) -> None:
        """Traces the loop without running it, at the first call, and prepares the data.

        An error in here leaves model and state unchanged.

        Args:
          state: State to start from.
        """
        self._set_iterators(state)
        if self._traced is None:
            with device_errors():
                self._traced = self._compiler.tracing(lambda: self._concrete(state))

    def _concrete(self, state: TrainingState) -> Any:
        """Returns TensorFlow's concrete function of the loop."""
        self._set_iterators(state)
        first, table = self._tables.at(int(state.batches))
        end = tf.constant(0, tf.int64)
        return self._loop.get_concrete_function(self._iterators, table, first, end, state)

    def run(self, state: TrainingState, end: int) -> TrainingState:
        """Trains from `state` to step `end` and returns the state reached.

        The loop ends earlier if it is stopped, or after `max_skipped_updates`.

        Raises:
          DataError: If the data cannot be read.
          ConfigError: If the task cannot be trained.
        """
        self._set_iterators(state)
        self._position = None  # after an error the iterators are ahead of the state
        last, batches = tf.constant(end, tf.int64), -1
        sources = [pipeline.source for pipeline in self._pipelines.values()]
        with data_errors(*sources), device_errors():
            # A loop ends where a table does. One that is to stop makes no update any more.
            while int(state.step) < end and batches < int(state.batches):
                batches = int(state.batches)
                first, table = self._tables.at(batches)
                state = self._loop(self._iterators, table, first, last, state)
        self._position = state.batches
        return state

    def _set_iterators(self, state: TrainingState) -> None:
        # The same tensor, not an equal number: comparing numbers would fetch one in each loop.
        if self._position is not state.batches:
            self._iterators = {
                name: distributed_iterator(pipeline, self._strategy, int(state.batches))
                for name, pipeline in self._pipelines.items()
                if not pipeline.resident
            }
            self._position = state.batches

    @tf.function(autograph=False)
    def _loop(
        self, iterators: Any, table: Any, first: tf.Tensor, end: tf.Tensor, before: TrainingState
    ) -> TrainingState:
        """Makes the updates up to step `end` if none is skipped, or until the tables end."""
        compiler = self._compiler
        with on_host_if_placed(self._strategy):
            left = end - before.step
            if table:
                left = tf.minimum(left, first + self._tables.length - before.batches)
            # Places in the table, int32, which stay on the host.
            place = tf.cast(before.batches - first, tf.int32)
            end_place = place + tf.cast(tf.minimum(left, _ENDLESS), tf.int32)
        until, ahead_by = before.batches + left, before.step - before.batches
        start = self._carried(before)
        start[_LAST_FINITE] = before.batches + tf.zeros_like(before.sums, tf.int64)

        def state_of(carried: Carried) -> TrainingState:
            # A counter less in the loop: without a loss scale, each batch is a step.
            fields = {name: carried[name] for name in self._train_step.changing_fields}
            return before._replace(**{"step": carried["batches"] + ahead_by, **fields})

        def updated(carried: Carried, ahead: Any, place: tf.Tensor) -> Carried:
            state = state_of(carried)
            batches = ahead or self._batches(iterators, table, state.batches, place)
            state, are_finite = self._train_step(batches, state)
            # Checked after the loop: if it ended at once, each update would wait for the last one.
            last = tf.where(are_finite, state.batches, carried[_LAST_FINITE])
            return {**self._carried(state), _LAST_FINITE: last}

        def several(carried: Carried) -> Carried:
            last = tf.minimum(carried["batches"] + _AT_ONCE, until)
            return tf.while_loop(
                lambda own: self._goes_on(own, own["batches"] < last),
                lambda own: (updated(own, (), own["batches"] - first),),
                (carried,),
            )[0]

        def repeated(updates: int) -> Carried:
            """Makes one update, or several, in a turn. The host counts them and waits for none."""

            def goes_on(carried: Carried, _: Any, place: tf.Tensor) -> tf.Tensor:
                with on_host_if_placed(self._strategy):
                    stops = tf.constant(False) if self._is_one_of_several else self._stop.read()
                    return self._goes_on(carried, place < end_place) & ~stops

            def turn(carried: Carried, ahead: Any, place: tf.Tensor) -> tuple[Carried, Any, Any]:
                if updates == 1:
                    after = updated(carried, ahead, place)
                    # The next batch depends on no update: TensorFlow would gather it first and
                    # delay the forward pass. The control dependency makes it wait for the loss.
                    with tf.control_dependencies([after["sums"]]):
                        ahead = self._gathered_ahead(table, after["batches"], place + 1)
                else:
                    after = compiler(functools.partial(several, carried))
                with on_host_if_placed(self._strategy):
                    return after, ahead, place + updates

            ahead = self._gathered_ahead(table, before.batches, place) if updates == 1 else ()
            return tf.while_loop(goes_on, turn, (start, ahead, place))[0]

        in_pieces, one_by_one = (functools.partial(repeated, n) for n in (_AT_ONCE, 1))
        carried = one_by_one() if iterators else compiler.whole(in_pieces, one_by_one)
        after = state_of(carried)
        # A sum that is not finite stays so within a loop.
        bad = after.batches - tf.reduce_min(carried[_LAST_FINITE])
        return after._replace(diverged_for=before.diverged_for + bad)

    def _carried(self, state: TrainingState) -> Carried:
        """Returns the fields that change: each loop variable costs three operations per update."""
        return {name: getattr(state, name) for name in self._train_step.changing_fields}

    def _goes_on(self, carried: Carried, going: tf.Tensor) -> tf.Tensor:
        """Returns `going`, bool [], or False if too many updates in a row were skipped."""
        if "skipped_in_a_row" in carried:
            going &= carried["skipped_in_a_row"] < self._max_skipped_updates
        return going

    def _batches(
        self, iterators: Mapping[str, Any], table: Any, number: tf.Tensor, place: tf.Tensor
    ) -> dict[str, Batch]:
        """Returns the batches of an update by source; `place` is that of its rows in the table."""
        counter = batch_counter(number)
        rows = self._taken(iterators)
        if self._has_own_memory:  # a loop takes rows whose device nothing names to the first one
            rows = {name: self._strategy.run(_named, (each,)) for name, each in rows.items()}
        batches = {name: Batch(each, {}, counter) for name, each in rows.items()}
        for name, each in table.items():
            arrays = self._pipelines[name].resident_arrays(self._strategy)
            batches[name] = Batch(each, arrays, counter, place)
        return batches

    def _taken(self, iterators: Mapping[str, Any]) -> dict[str, Any]:
        """Takes the next rows, and adds the seconds until all of them are there."""
        if self._wait is None or not iterators:
            return {name: next(one) for name, one in iterators.items()}
        with on_host():
            before = tf.timestamp()
        with tf.control_dependencies([before]):
            rows = {name: next(one) for name, one in iterators.items()}
        tensors = [x for x in tf.nest.flatten(rows, expand_composites=True) if x is not None]
        with on_host(), tf.control_dependencies(tensors):
            self._wait.add(tf.timestamp() - before)
        return rows

    def _gathered_ahead(self, table: Any, number: tf.Tensor, place: tf.Tensor) -> Any:
        """Returns the examples of batch `number`, gathered while the update before is computed.

        That takes a tenth of the time from an MLP with 512 rows. () with several local replicas or
        microbatches, where a loop would carry far more, and where the host counts.
        """
        ((name, pipeline), *others) = self._pipelines.items()
        is_one = pipeline.microbatches == pipeline.batches_per_update == 1 and not others
        alone = Workers(self._strategy).replicas_of_each == 1 and not self._has_own_memory
        if not (pipeline.resident and is_one and alone):
            return ()
        place = tf.minimum(place, self._tables.length - 1)  # past the end for the last update
        (batch,) = self._batches({}, table, number, place).values()
        return {name: pipeline.gathered(batch, self._strategy)}


def _named(rows: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Returns a replica's rows by operations of its device."""
    return {name: tf.identity(each) for name, each in rows.items()}
