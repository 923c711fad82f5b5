"""The training loop on the devices: many updates in one `tf.function`, without Python."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ddl.data.batch import Batch
from ddl.data.checks import data_errors
from ddl.distribution.path import on_host_if_placed, path_of
from ddl.distribution.workers import Workers
from ddl.random import batch_counter
from ddl.step.state import TrainingState
from ddl.step.train_step import TrainStep
from ddl.training.loop.device_errors import device_errors
from ddl.training.loop.input_wait import InputWait
from ddl.training.loop.repeated import Carried, Repeated
from ddl.training.loop.row_tables import RowTables
from ddl.training.loop.stale_traces import explaining_stale_traces
from ddl.training.loop.stop_flag import StopFlag


class TrainingLoop:
    """The loop over updates, each on all replicas. Eager, cross-replica context.

    Attributes:
      trace_count: Number of traces: 1 after the first call, with no retrace later.
      input_wait: Seconds that the loop waited for batches; None if that cannot be measured.
    """

    def __init__(self, update: TrainStep, max_skipped_updates: int, stop: StopFlag):
        """Keeps the arguments; traces nothing.

        Args:
          update: Makes one update.
          max_skipped_updates: Consecutive skipped updates after which the loop ends.
          stop: Flag that ends the loop after the current update, or piece of several updates.
        """
        self.trace_count = 0
        strategy = update.strategy
        # A timestamp that depends on a GPU's tensor would wait for the GPU.
        self.input_wait = None if path_of(strategy).places_order else InputWait()
        self._graph: Any = None
        self._update = update
        self._repeated = Repeated(update, max_skipped_updates, stop)
        self._tables = RowTables(update.pipelines, strategy)
        self._iterators: Any = None
        self._position: tf.Tensor | None = None  # `batches` of the state the iterators stand at
        self._is_traced = False

    @property
    def variables(self) -> list[tf.Variable]:
        """Variables that the traced loop reads or writes, with each replica's copy."""
        return [] if self._graph is None else list(self._graph.variables)

    def trace(self, state: TrainingState) -> None:
        """Traces the loop without running it, at the first call, and prepares the data.

        An error in here leaves model and state unchanged.

        Args:
          state: State to start from.
        """
        self._prepare_iterators(state)
        if self._is_traced:
            return
        with device_errors(), explaining_stale_traces():
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
        with data_errors(*sources), device_errors(), explaining_stale_traces():
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
            name: pipeline.iterator(self._update.strategy, int(state.batches))
            for name, pipeline in self._update.pipelines.items()
            if not pipeline.resident
        }
        self._position = state.batches

    @tf.function(autograph=False)
    def _loop(
        self, iterators: Any, table: Any, first: tf.Tensor, end: tf.Tensor, state: TrainingState
    ) -> TrainingState:
        return self._trained(iterators, table, first, end, state.within_loop()).after_loop(state)

    def _trained(
        self, iterators: Any, table: Any, first: tf.Tensor, end: tf.Tensor, state: TrainingState
    ) -> TrainingState:
        """Repeats the update until step `end`, or until the tables end.

        Args:
          iterators: Iterators over the rows of updates, by the name of the source.
          table: Rows of the resident arrays that each update reads, [updates, rows] on each
            replica, by the name of the source.
          first: Number of the first update of the tables, int64 [].
          end: Step that ends the loop, int64 [].
          state: The state before the loop.
        """
        self.trace_count += 1
        self._graph = tf.compat.v1.get_default_graph()
        pipelines, strategy = self._update.pipelines, self._update.strategy
        resident = {name: own.resident_arrays(strategy) for name, own in pipelines.items()}
        wait, places_order = self.input_wait, path_of(strategy).places_order
        gathers_ahead = self._gathers_ahead()
        with on_host_if_placed(strategy):
            left = end - state.step
            if table:
                left = tf.minimum(left, first + self._tables.length - state.batches)
                before_loop = tf.cast(state.batches - first, tf.int32)
            until = state.batches + left

        def taken() -> dict[str, Any]:
            return {name: next(one) for name, one in iterators.items()}

        def made(number: tf.Tensor, place: tf.Tensor) -> dict[str, Batch]:
            counter = batch_counter(number)
            given = wait.timed(taken) if wait is not None and iterators else taken()
            if places_order:  # a loop takes rows whose device nothing names to the first one
                given = {name: strategy.run(_named, (rows,)) for name, rows in given.items()}
            batches = {name: Batch(rows, {}, counter) for name, rows in given.items()}
            batches |= {
                name: Batch(rows, resident[name], counter, place) for name, rows in table.items()
            }
            return batches

        def made_next(number: tf.Tensor) -> Any:
            if not gathers_ahead:
                return ()
            # After the last batch, this gathers the last batch again; the result is not used.
            number = tf.minimum(number, until - 1)
            ((name, batch),) = made(number, number - first).items()
            return {name: pipelines[name].gathered(batch, strategy)}

        def update(carried: Carried, ahead: Any, turn: Any) -> tuple[Carried, Any]:
            before = state._replace(**carried)
            if ahead:
                return self._updated(ahead, before, made_next)
            place = before.batches - first
            if turn is not None and table and places_order:
                place = before_loop + turn  # int32, which stays on the host
            return self._updated(made(before.batches, place), before, made_next)

        carried, ahead = self._carried(state), made_next(state.batches)
        # Each update takes a row of the tables, whether or not it is skipped.
        of = ("batches", until) if table else ("step", end)
        return state._replace(**self._repeated(update, carried, ahead, *of, left))

    def _gathers_ahead(self) -> bool:
        """Returns whether each update gathers the next one's batch, while it is computed itself.

        With several local replicas or microbatches a loop would carry far more.
        """
        pipelines, strategy = list(self._update.pipelines.values()), self._update.strategy
        return (
            len(pipelines) == 1
            and pipelines[0].resident
            and pipelines[0].microbatches == pipelines[0].batches_per_update == 1
            and Workers(strategy).replicas_of_each == 1
            and not path_of(strategy).places_order
        )

    def _updated(
        self,
        batches: dict[str, Batch],
        before: TrainingState,
        made_next: Callable[[tf.Tensor], Any],
    ) -> tuple[Carried, Any]:
        """Returns the loop variables after an update, and `made_next` of the next batch number."""
        after = self._update(batches, before)
        # The next batch depends on no update: TensorFlow would gather it first and delay the
        # forward pass. The control dependency makes it wait for the loss.
        with tf.control_dependencies([after.sums]):
            # The same number twice: an addition would be a further kernel.
            following = after.batches if self._update.compiler.is_on else before.batches + 1
            return self._carried(after), made_next(following)

    def _carried(self, state: TrainingState) -> Carried:
        """Returns the fields that change: each loop variable costs three operations per update."""
        return {name: getattr(state, name) for name in self._update.changing_fields}


def _named(rows: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Returns a replica's rows by operations of its device."""
    return {name: tf.identity(each) for name, each in rows.items()}
