"""The training loop on the devices: many updates in one `tf.function`, without Python.

self._prepare_iterators   the distributed data sets (`ddl.data.iterators`)
self._batches             an update's batches: from iterators, or by rows of resident arrays
self._update              the update (`ddl.step.train_step`)
self._repeated            the loop over updates, in the form that suits the devices
"""

import concurrent.futures
import uuid
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from ddl.data.batch import Batch, on_each_replica
from ddl.data.checks import data_errors
from ddl.data.pipeline import BatchPipeline
from ddl.distribution.path import on_host, on_host_if_placed, path_of
from ddl.distribution.workers import Workers
from ddl.random import batch_counter
from ddl.step.state import TrainingState
from ddl.step.train_step import TrainStep
from ddl.training.device_errors import device_errors

Carried = dict[str, tf.Tensor]
"""Fields of the state that an update changes, by name."""

# Counts of the state that a loop carries as int32, which TensorFlow keeps on the host.
_COUNTS = ("skipped_in_a_row", "finite_updates")

# Most updates that XLA compiles as one piece. The flag that stops a loop is read between two
# pieces; a loop takes about a second (`ddl.training.pace`).
_AT_ONCE = 32

_ROWS = 1 << 16  # of a table: a fraction of a second of training
_LEAST, _MOST = 16, 1024  # updates of a table


class _HostScalar:
    """A value in host memory, under any strategy.

    A `tf.Variable` made in a strategy's scope would be on every device, and a read would make a GPU
    wait for the earlier updates.
    """

    def __init__(self, value: bool | float, dtype: tf.DType):
        self._dtype = dtype
        with on_host():
            self._handle = tf.raw_ops.VarHandleOp(
                dtype=dtype, shape=[], shared_name=f"ddl {uuid.uuid4()}"
            )
        self.assign(value)

    def assign(self, value: bool | float) -> None:
        """Sets the value. Eager, from any thread."""
        with on_host():
            tf.raw_ops.AssignVariableOp(
                resource=self._handle, value=tf.constant(value, self._dtype)
            )

    def add(self, value: tf.Tensor) -> None:
        """Adds a tensor, in a graph."""
        tf.raw_ops.AssignAddVariableOp(resource=self._handle, value=value)

    def read(self) -> tf.Tensor:
        """Returns the value, []."""
        with on_host():
            read = tf.raw_ops.ReadVariableOp(resource=self._handle, dtype=self._dtype)
        read.set_shape([])
        return read


class StopFlag:
    """A flag that a thread raises and a training loop reads."""

    def __init__(self, workers: Workers) -> None:
        """Makes a lowered flag.

        Args:
          workers: The workers that must stop at the same update.
        """
        self._workers = workers
        self._flag = _HostScalar(False, tf.bool)

    def request(self) -> None:
        """Requests a stop. Eager, from any thread."""
        self._flag.assign(True)

    def withdraw(self) -> None:
        """Withdraws this worker's request. Eager, from any thread."""
        self._flag.assign(False)

    def ends_loop(self) -> tf.Tensor:
        """Returns whether the loop must end before its next update: bool [], in a graph.

        Always False with several workers: they must make the same updates, and call `take` after
        the loop.
        """
        return self._read() if self._workers.number == 1 else tf.constant(False)

    def take(self) -> bool:
        """Returns whether any worker's flag was raised, and lowers the flag.

        Eager, cross-replica context, on all workers.
        """
        raised = self._workers.any(bool(self._read().numpy()))
        if raised:
            self.withdraw()
        return raised

    def _read(self) -> tf.Tensor:
        return self._flag.read()


class RowTables:
    """Tables of the rows that many updates gather from resident arrays, on each replica.

    Eager, cross-replica context. A thread computes the next table while the devices work on the
    present one.

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
            with tf.init_scope():
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


class _Input(NamedTuple):
    """What a loop takes its batches from.

    Attributes:
      iterators: Iterators over the rows of updates, by the name of the source.
      resident: Arrays on the devices, by the name of the source.
      table: Rows of the resident arrays that each update reads, [updates, rows] on each replica.
      first: Number of the first update of the tables, int64 [].
      before: Updates of the tables before the loop, int32 [] on the host; None where the devices
        count.
      until: Number of the update after the last one, int64 [].
    """

    iterators: Mapping[str, Any]
    resident: Mapping[str, Any]
    table: Mapping[str, Any]
    first: tf.Tensor
    before: tf.Tensor | None
    until: tf.Tensor


class TrainingLoop:
    """The loop over updates, each on all replicas. Eager, cross-replica context.

    Attributes:
      trace_count: Number of traces: 1 after the first call, with no retrace later.
    """

    def __init__(self, update: TrainStep, max_skipped_updates: int, stop: StopFlag):
        """Keeps the arguments; traces nothing.

        Args:
          update: Makes one update.
          max_skipped_updates: Consecutive skipped updates after which the loop ends.
          stop: Flag that ends the loop after the current update, or piece of several updates.
        """
        self.trace_count = 0
        self._update = update
        self._strategy = update.strategy
        self._max_skipped_updates = max_skipped_updates
        self._stop = stop
        self._places_order = path_of(update.strategy).places_order
        # A timestamp that depends on a GPU's tensor would wait for the GPU.
        self._wait = None if self._places_order else _HostScalar(0.0, tf.float64)
        self._tables = RowTables(update.pipelines, update.strategy)
        self._iterators: Any = None
        self._position: tf.Tensor | None = None  # `batches` of the state the iterators stand at
        self._graph: Any = None
        self._is_traced = False

    @property
    def variables(self) -> list[tf.Variable]:
        """Variables that the traced loop reads or writes, with each replica's copy."""
        return [] if self._graph is None else list(self._graph.variables)

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
        self._prepare_iterators(state)
        if self._is_traced:
            return
        with device_errors():
            self._update.compiler.tracing(lambda: self._concrete(state))
        self._is_traced = True

    def _concrete(self, state: TrainingState) -> Any:
        """Returns TensorFlow's concrete function of the loop."""
        self._prepare_iterators(state)
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
        self._prepare_iterators(state)
        # Not kept while in use: after an error the iterators would be ahead of the state.
        iterators, self._iterators, self._position = self._iterators, None, None
        last = tf.constant(end, tf.int64)
        sources = [pipeline.source for pipeline in self._update.pipelines.values()]
        with data_errors(*sources), device_errors():
            batches = -1
            # A loop ends where a table does. One that is to stop makes no update any more.
            while int(state.step) < end and batches < int(state.batches):
                batches = int(state.batches)
                first, table = self._tables.at(batches)
                state = self._loop(iterators, table, first, last, state)
        self._iterators, self._position = iterators, state.batches
        return state

    def _prepare_iterators(self, state: TrainingState) -> None:
        """Sets the iterators of data that do not reside on the devices to the state's batch."""
        # The same tensor, not an equal number: comparing numbers would fetch one in each loop.
        if self._position is state.batches:
            return
        self._iterators, self._position = None, None
        self._iterators = {
            name: pipeline.iterator(self._strategy, int(state.batches))
            for name, pipeline in self._update.pipelines.items()
            if not pipeline.resident
        }
        self._position = state.batches

    @tf.function(autograph=False)
    def _loop(
        self, iterators: Any, table: Any, first: tf.Tensor, end: tf.Tensor, before: TrainingState
    ) -> TrainingState:
        """Makes the updates up to step `end` if none is skipped, or until the tables end."""
        self.trace_count += 1
        self._graph = tf.compat.v1.get_default_graph()
        state, pipelines = before.within_loop(), self._update.pipelines
        resident = {name: one.resident_arrays(self._strategy) for name, one in pipelines.items()}
        in_table = None
        with on_host_if_placed(self._strategy):
            left = end - state.step
            if table:
                left = tf.minimum(left, first + self._tables.length - state.batches)
                if self._places_order:
                    in_table = tf.cast(state.batches - first, tf.int32)
            given = _Input(iterators, resident, table, first, in_table, state.batches + left)

        def update(carried: Carried, ahead: Any, turn: Any) -> tuple[Carried, Any]:
            return self._updated(given, state._replace(**carried), ahead, turn)

        carried, ahead = self._carried(state), self._gathered_ahead(given, state.batches)
        carried = self._repeated(update, carried, ahead, given, left)
        return state._replace(**carried).after_loop(before)

    def _updated(
        self, given: _Input, before: TrainingState, ahead: Any, turn: Any
    ) -> tuple[Carried, Any]:
        """Makes an update; returns the changed fields, and the next batch if it is made ahead."""
        batches = ahead or self._batches(given, before.batches, turn)
        after = self._update(batches, before)
        # The next batch depends on no update: TensorFlow would gather it first and delay the
        # forward pass. The control dependency makes it wait for the loss.
        with tf.control_dependencies([after.sums]):
            # The same number twice: an addition would be a further kernel.
            following = after.batches if self._update.compiler.is_on else before.batches + 1
            return self._carried(after), self._gathered_ahead(given, following)

    def _carried(self, state: TrainingState) -> Carried:
        """Returns the fields that change: each loop variable costs three operations per update."""
        return {name: getattr(state, name) for name in self._update.changing_fields}

    def _batches(self, given: _Input, number: tf.Tensor, turn: Any = None) -> dict[str, Batch]:
        """Returns the batches of update `number` by source, in turn `turn` of the loop."""
        counter, place = batch_counter(number), number - given.first
        if turn is not None and given.before is not None:
            place = given.before + turn  # int32, which stays on the host
        rows = self._taken(given.iterators)
        if self._places_order:  # a loop takes rows whose device nothing names to the first one
            rows = {name: self._strategy.run(_named, (each,)) for name, each in rows.items()}
        batches = {name: Batch(each, {}, counter) for name, each in rows.items()}
        return batches | {
            name: Batch(each, given.resident[name], counter, place)
            for name, each in given.table.items()
        }

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

    def _gathered_ahead(self, given: _Input, number: tf.Tensor) -> Any:
        """Returns the examples of batch `number`, gathered while the update before is computed.

        () with several local replicas or microbatches, where a loop would carry far more, and
        where the host counts.
        """
        pipelines = list(self._update.pipelines.values())
        (first, *others) = pipelines
        is_one = first.microbatches == first.batches_per_update == 1 and not others
        alone = Workers(self._strategy).replicas_of_each == 1 and not self._places_order
        if not (first.resident and is_one and alone):
            return ()
        # After the last batch, this gathers the last batch again; the result is not used.
        batches = self._batches(given, tf.minimum(number, given.until - 1))
        return {name: first.gathered(batch, self._strategy) for name, batch in batches.items()}

    def _repeated(
        self,
        update: Callable[[Carried, Any, Any], tuple[Carried, Any]],
        carried: Carried,
        ahead: Any,
        given: _Input,
        left: tf.Tensor,
    ) -> Carried:
        """Returns the carried fields after `left` batches, int64 [].

        Args:
          update: Makes an update. Its last argument is the number of the turn, int32 [] on the
            host, or None.
          carried: The fields before the first update.
          ahead: Batch made ahead for the first update; () if each update makes its own.
          given: What the updates read.
          left: Number of batches.
        """
        compiler = self._update.compiler

        def plain() -> Carried:
            def goes_on(carried: Carried, _: Any) -> tf.Tensor:
                below = lambda: self._goes_on(carried, carried["batches"] < given.until)  # noqa: E731
                return self._unless_stopped(compiler(below))

            turn = lambda carried, ahead: update(carried, ahead, None)  # noqa: E731
            return tf.while_loop(goes_on, turn, (carried, ahead))[0]

        if not self._places_order:
            return plain()
        # A count on the device would be three kernels an update.
        with on_host():
            left = tf.cast(tf.minimum(left, tf.int32.max), tf.int32)
        # With a loss scale, code that XLA compiles tells on the device whether an update counts.
        on_device = compiler.is_on and "skipped_in_a_row" in carried
        single = plain if on_device else lambda: self._counted(update, carried, ahead, left)
        if given.iterators or not self._update.is_whole:
            return single()
        return compiler.whole(lambda: self._in_pieces(update, carried, given.until, left), single)

    def _in_pieces(
        self, update: Callable[..., Any], carried: Carried, until: tf.Tensor, left: tf.Tensor
    ) -> Carried:
        """Makes up to `_AT_ONCE` updates in one piece, a loop of XLA, and repeats that.

        TensorFlow starts a piece far more slowly than XLA the next turn of its own loop.
        """

        def piece(carried: Carried) -> Carried:
            last = tf.minimum(carried["batches"] + _AT_ONCE, until)
            return tf.while_loop(
                lambda carried: self._goes_on(carried, carried["batches"] < last),
                lambda carried: (update(carried, (), None)[0],),
                (carried,),
            )[0]

        def goes_on(_: Carried, number: tf.Tensor) -> tf.Tensor:
            with on_host():
                return self._unless_stopped(number < left)

        compiler, start = self._update.compiler, (carried, tf.constant(0))
        turn = lambda own, number: (compiler(lambda: piece(own)), number + _AT_ONCE)  # noqa: E731
        return tf.while_loop(goes_on, turn, start)[0]

    def _counted(
        self, update: Callable[..., Any], carried: Carried, ahead: Any, left: tf.Tensor
    ) -> Carried:
        """Makes one update after the other; the host counts, so that it waits for none."""
        skips = "skipped_in_a_row" in carried
        ahead_by = carried["step"] - carried["batches"]
        own = _with_counts(carried, tf.int32)
        if not skips:
            del own["step"]  # a constant distance from `batches`

        def turn(own: Carried, ahead: Any, number: tf.Tensor) -> tuple[Any, ...]:
            given = own if skips else {**own, "step": own["batches"] + ahead_by}
            after, ahead = update(given, ahead, number)
            with on_host():
                return {kept: after[kept] for kept in own}, ahead, number + 1

        def goes_on(own: Carried, _: Any, number: tf.Tensor) -> tf.Tensor:
            with on_host():
                return self._unless_stopped(self._goes_on(own, number < left))

        own = _with_counts(tf.while_loop(goes_on, turn, (own, ahead, tf.constant(0)))[0], tf.int64)
        return own if skips else {**own, "step": own["batches"] + ahead_by}

    def _goes_on(self, carried: Carried, going: tf.Tensor) -> tf.Tensor:
        """Returns `going`, bool [], or False if too many updates in a row were skipped."""
        if "skipped_in_a_row" in carried:
            going &= carried["skipped_in_a_row"] < self._max_skipped_updates
        return going

    def _unless_stopped(self, going: tf.Tensor) -> tf.Tensor:
        """Returns `going`, bool [], or False if the loop is to stop."""
        # The flag lies on the host, which gets the condition anyway.
        with on_host_if_placed(self._strategy):
            return going & ~self._stop.ends_loop()


def _named(rows: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Returns a replica's rows by operations of its device."""
    return {name: tf.identity(each) for name, each in rows.items()}


def _with_counts(carried: Carried, dtype: tf.DType) -> Carried:
    """Returns loop variables with the counts of `_COUNTS` in another dtype, from the host."""
    with on_host():
        return carried | {n: tf.cast(carried[n], dtype) for n in _COUNTS if n in carried}
