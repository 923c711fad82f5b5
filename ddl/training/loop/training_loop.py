"""The training loop on the devices: many updates in one `tf.function`, without Python."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ddl.data.checks import data_errors
from ddl.data.pipeline import Batch
from ddl.data.pipeline.placed_order import (
    from_host,
    kept_on_host,
    on_host_if_placed,
    placed,
    rows_at,
)
from ddl.data.pipeline.waiting import InputWait
from ddl.data.source import Source
from ddl.devices.path import path_of
from ddl.distribution.workers import Workers
from ddl.random import batch_counter
from ddl.step.onednn import in_own_graph_if
from ddl.step.state import TrainingState
from ddl.step.update import UpdateStep
from ddl.training.loop.device_errors import device_errors
from ddl.training.loop.repeated import Carried, Repeated
from ddl.training.loop.stale_traces import explaining_stale_traces
from ddl.training.loop.stop_flag import StopFlag


class TrainingLoop:
    """The loop over updates, each on all replicas. Eager, cross-replica context.

    Attributes:
      trace_count: Number of traces: 1 after the first call, with no retrace later.
      input_wait: Seconds that the loop waited for batches; None if that cannot be measured.
    """

    def __init__(self, update: UpdateStep, max_skipped_updates: int, stop: StopFlag):
        """Keeps the arguments; traces nothing.

        Args:
          update: Makes one update.
          max_skipped_updates: Consecutive skipped updates after which the loop ends.
          stop: Flag that ends the loop after the current update, or piece of several updates.
        """
        self.trace_count = 0
        distributes = [p.distributes(update.strategy) for p in update.pipelines.values()]
        self.input_wait = None if any(distributes) else InputWait()
        self._graph: Any = None
        self._update = update
        self._repeated = Repeated(update, max_skipped_updates, stop)
        self._iterator: Any = None
        self._position: tf.Tensor | None = None  # `batches` of the state the iterator stands at
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
        self._prepare_iterator(state)
        if self._is_traced:
            return
        with device_errors(), explaining_stale_traces():
            arguments = self._iterator, tf.constant(0, tf.int64), state
            self._update.compiler.tracing(lambda: self._loop.get_concrete_function(*arguments))
        self._is_traced = True

    def run(self, state: TrainingState, end: int) -> TrainingState:
        """Trains from `state` to step `end` and returns the state reached.

        The loop ends earlier if it is stopped, or after `max_skipped_updates`; on devices with
        their own memory also if it has skipped updates.

        Raises:
          DataError: If the data cannot be read.
          ConfigError: If the task cannot be trained.
        """
        self._prepare_iterator(state)
        # Not kept while in use: after an error the iterator would be ahead of the state.
        iterator, self._iterator, self._position = self._iterator, None, None
        with (
            data_errors(*self._sources),
            device_errors(),
            explaining_stale_traces(),
        ):
            state = self._loop(iterator, tf.constant(end, tf.int64), state)
        self._iterator, self._position = iterator, state.batches
        return state

    @property
    def _sources(self) -> list[Source]:
        return [pipeline.source for pipeline in self._update.pipelines.values()]

    def _prepare_iterator(self, state: TrainingState) -> None:
        """Sets the iterator to the state's batch."""
        # The same tensor, not an equal number: comparing numbers would fetch one in each loop.
        if self._position is state.batches:
            return
        self._iterator, self._position = None, None
        self._iterator = self._iterator_from(state)
        self._position = state.batches

    def _iterator_from(self, state: TrainingState) -> Any:
        """Returns iterators at the state's batches; None if the loop orders batches in-graph."""
        if self._orders_in_graph():
            return None
        first = int(state.batches)
        return {
            name: pipeline.iterator(self._update.strategy, first)
            for name, pipeline in self._update.pipelines.items()
        }

    def _orders_in_graph(self) -> bool:
        strategy, pipelines = self._update.strategy, self._update.pipelines
        return len(pipelines) == 1 and all(p.orders_in_graph(strategy) for p in pipelines.values())

    @tf.function(autograph=False)
    def _loop(self, iterator: Any, end: tf.Tensor, state: TrainingState) -> TrainingState:
        return self._trained(iterator, end, state.within_loop()).after_loop(state)

    def _trained(self, iterator: Any, end: tf.Tensor, state: TrainingState) -> TrainingState:
        self.trace_count += 1
        self._graph = tf.compat.v1.get_default_graph()
        pipelines, strategy = self._update.pipelines, self._update.strategy
        resident = {name: own.resident_arrays(strategy) for name, own in pipelines.items()}
        if iterator is None:
            return self._over_arrays(resident, end, state)

        def taken() -> dict[str, Any]:
            return {name: next(one) for name, one in iterator.items()}

        wait = self.input_wait

        # A loop variable is computed, by kernels of its own on a GPU, even if no layer reads it.
        made_next = (lambda _: ()) if path_of(strategy).places_order else batch_counter

        def update(carried: Carried, ahead: Any, _: Any) -> tuple[Carried, Any]:
            before = state._replace(**carried)
            counter = batch_counter(before.batches) if isinstance(ahead, tuple) else ahead
            given = taken() if wait is None else wait.timed(taken)
            given = {n: pipelines[n].on_devices(rows, strategy) for n, rows in given.items()}
            batches = {n: Batch(given[n], resident[n], counter) for n in pipelines}
            return self._updated(batches, before, made_next)

        with on_host_if_placed(strategy):
            left = end - state.step
        carried, ahead = self._carried(state), made_next(state.batches)
        return state._replace(**self._repeated(update, carried, ahead, "step", end, left))

    def _over_arrays(self, resident: Any, end: tf.Tensor, state: TrainingState) -> TrainingState:
        """Orders many batches at once; gathers each batch while the previous one is computed."""
        ((name, pipeline),) = self._update.pipelines.items()
        resident, strategy = resident[name], self._update.strategy
        # With several local replicas or microbatches, only the indices of the rows are made ahead.
        gathers_ahead = Workers(strategy).replicas_of_each == 1 and pipeline.microbatches == 1
        takes_rows = path_of(strategy).places_order
        gathers_ahead = gathers_ahead and not takes_rows
        arrays = {} if gathers_ahead else resident  # those that the update gathers from

        def order(first: tf.Tensor) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
            ordered = pipeline.batches_from(first, strategy)
            return first, kept_on_host(ordered) if takes_rows else ordered

        def updates(carried: Carried, *ordered_ahead: Any) -> tuple[Any, ...]:
            first, ordered = ordered_ahead or order(carried["batches"])
            ordered = from_host(ordered) if takes_rows else ordered
            count = tf.shape(ordered["index"], tf.int64)[0]
            with on_host_if_placed(strategy):
                left = tf.minimum(count, end - carried["step"])
            until = first + left
            # The host orders these while the devices compute the updates.
            following = order(first + count) if ordered_ahead else ()
            sizes = pipeline.num_examples, pipeline.global_batch_size
            ordered = placed(ordered, *sizes, strategy)

            def made(number: tf.Tensor) -> Batch:
                rows = rows_at(ordered, number - first, strategy)
                if not gathers_ahead:  # the arrays stay out of the loop variables
                    return Batch(rows, {}, batch_counter(number))
                batch = Batch(rows, resident, batch_counter(number))
                return pipeline.gathered(batch, strategy)

            def made_next(number: tf.Tensor) -> Batch | tuple[()]:
                if takes_rows:  # each update takes its own, which needs no loop variable
                    return ()
                # After the last batch, this gathers the last batch again; the result is not used.
                return made(tf.minimum(number, until - 1))

            def update(carried: Carried, ahead: Any, turn: Any) -> tuple[Carried, Any]:
                before = state._replace(**carried)
                if takes_rows:
                    place = carried["batches"] - first if turn is None else turn
                    rows = rows_at(ordered, place, strategy)
                    batch = Batch(rows, arrays, batch_counter(carried["batches"]))
                else:
                    batch = ahead._replace(arrays=arrays)
                return self._updated({name: batch}, before, made_next)

            # An update consumes at least one batch, so `until` cannot lead past step `end`.
            ahead = () if takes_rows else made(first)
            return self._repeated(update, carried, ahead, "batches", until, left), *following

        def goes_on(carried: Carried, *ordered_ahead: Any) -> tf.Tensor:
            going = self._repeated.goes_on(carried, carried["step"] < end)
            if ordered_ahead:  # else, after skipped updates, the batches in between would be lost
                going &= carried["batches"] == ordered_ahead[0]
            return self._repeated.unless_stopped(going)

        ordered_ahead = order(state.batches) if takes_rows else ()
        carried, *_ = tf.while_loop(goes_on, updates, (self._carried(state), *ordered_ahead))
        return state._replace(**carried)

    def _updated(
        self,
        batches: dict[str, Batch],
        before: TrainingState,
        made_next: Callable[[tf.Tensor], Any],
    ) -> tuple[Carried, Any]:
        """Returns the loop variables after an update, and `made_next` of the next batch number."""

        def updated() -> tuple[Carried, Any]:
            after = self._update(batches, before)
            # The next batch depends on no update: TensorFlow would gather it first and delay the
            # forward pass. The control dependency makes it wait for the loss.
            with tf.control_dependencies([after.sums]):
                # The same number twice: an addition would be a further kernel.
                following = after.batches if self._update.compiler.is_on else before.batches + 1
                return self._carried(after), made_next(following)

        return in_own_graph_if(self._update.needs_own_graph, updated)

    def _carried(self, state: TrainingState) -> Carried:
        """Returns the fields that change: each loop variable costs three operations per update."""
        return {name: getattr(state, name) for name in self._update.changing_fields}
