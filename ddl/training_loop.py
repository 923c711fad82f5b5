"""The loop over updates on the devices: one `tf.function`, in which Python is not asked."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ddl.data.checks import data_errors
from ddl.microbatch import explaining_stale_traces
from ddl.random import batch_counter
from ddl.step import UpdateStep
from ddl.stop_flag import StopFlag
from ddl.training_state import TrainingState
from ddl.workers import Workers

_Carried = dict[str, tf.Tensor]


class TrainingLoop:
    """Updates one after the other, each on all replicas. Eager, cross-replica context.

    Attributes:
      trace_count: How often it has been traced: 1 after the first call, for good.
    """

    def __init__(self, update: UpdateStep, max_skipped_updates: int, stop: StopFlag):
        """Traces nothing yet.

        Args:
          update: Makes one update.
          max_skipped_updates: After how many skipped in a row it ends.
          stop: May end it after any update.
        """
        self.trace_count = 0
        self._update = update
        self._max_skipped_updates = max_skipped_updates
        self._stop = stop
        self._iterator: Any = None

    def trace(self, state: TrainingState) -> None:
        """Traces it without running it, so that errors in the task show early.

        Args:
          state: Where training begins.
        """
        self._iterator = self._iterator_from(state)
        with explaining_stale_traces():
            self._loop.get_concrete_function(self._iterator, tf.constant(0, tf.int64), state)

    def run(self, state: TrainingState, end: int) -> TrainingState:
        """Trains from `state` up to step `end`, or as far as it comes, and gives the state then.

        Raises:
          DataError: If the data cannot be read.
          ConfigError: If the task cannot be trained.
        """
        # Let go of while in use: after an error it would be ahead of the state.
        iterator, self._iterator = self._iterator, None
        iterator = iterator or self._iterator_from(state)
        with data_errors(), explaining_stale_traces():
            state = self._loop(iterator, tf.constant(end, tf.int64), state)
        self._iterator = iterator
        return state

    def reset(self) -> None:
        """To be called when the next state is not the one that the last loop ended with."""
        self._iterator = None

    def _iterator_from(self, state: TrainingState) -> Any:
        """None where the loop finds the batches by itself."""
        if self._update.pipeline.orders_in_graph(self._update.strategy):
            return None
        return self._update.pipeline.iterator(self._update.strategy, int(state.batches))

    @tf.function(autograph=False)
    def _loop(self, iterator: Any, end: tf.Tensor, state: TrainingState) -> TrainingState:
        self.trace_count += 1
        resident = self._update.pipeline.resident_arrays(self._update.strategy)
        if iterator is None:
            return self._over_arrays(resident, end, state)

        def update(carried: _Carried, counter: tf.Tensor) -> tuple[_Carried, tf.Tensor]:
            before = state._replace(**carried)
            return self._updated(next(iterator), resident, before, counter, batch_counter)

        carried, _ = tf.while_loop(
            lambda carried, _: self._goes_on(carried) & (carried["step"] < end),
            update,
            (self._carried(state), batch_counter(state.batches)),
        )
        return state._replace(**carried)

    def _over_arrays(self, resident: Any, end: tf.Tensor, state: TrainingState) -> TrainingState:
        """Many batches are ordered in one go; each is gathered while the one before is computed."""
        pipeline, strategy = self._update.pipeline, self._update.strategy
        # For several replicas, or in several parts, only its rows are found ahead.
        gathers_ahead = Workers(strategy).replicas_of_each == 1 and pipeline.microbatches == 1
        arrays = {} if gathers_ahead else resident

        def updates(carried: _Carried) -> tuple[_Carried]:
            first = carried["batches"]
            ordered = pipeline.batches_from(first, strategy)
            count = tf.shape(ordered["index"], tf.int64)[0]
            until = first + tf.minimum(count, end - carried["step"])

            def made(batch: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
                element = {name: rows[batch - first] for name, rows in ordered.items()}
                if gathers_ahead:
                    element = strategy.run(pipeline.examples, (element, resident))
                    if pipeline.always_full:
                        del element["weight"]  # constant ones, which it makes again
                return element, batch_counter(batch)

            def made_next(batch: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
                # After the last one it is made again, for nothing.
                return made(tf.minimum(batch, until - 1))

            def update(carried: _Carried, ahead: Any) -> tuple[_Carried, Any]:
                element, counter = ahead
                before = state._replace(**carried)
                return self._updated(element, arrays, before, counter, made_next)

            # No update comes of less than a batch, so that `until` is not past `end`.
            return tf.while_loop(
                lambda carried, _: self._goes_on(carried) & (carried["batches"] < until),
                update,
                (carried, made(first)),
            )[:1]

        (carried,) = tf.while_loop(
            lambda carried: self._goes_on(carried) & (carried["step"] < end),
            updates,
            (self._carried(state),),
        )
        return state._replace(**carried)

    def _updated(
        self,
        element: Any,
        arrays: Any,
        before: TrainingState,
        counter: tf.Tensor,
        made_next: Callable[[tf.Tensor], Any],
    ) -> tuple[_Carried, Any]:
        """What the loop carries after an update, and what is made of the next batch's number."""

        def updated() -> tuple[_Carried, Any]:
            after = self._update(element, arrays, before, counter)
            # It waits for no update, so that TensorFlow would compute it first of all, and the
            # forward pass would wait for it. So it waits for the loss.
            with tf.control_dependencies([after.sums]):
                return self._carried(after), made_next(before.batches + 1)

        return self._update.traced_apart(updated)

    def _carried(self, state: TrainingState) -> _Carried:
        """Only what changes: each tensor that a loop carries costs three operations an update."""
        return {name: getattr(state, name) for name in self._update.changing_fields}

    def _goes_on(self, carried: _Carried) -> tf.Tensor:
        going = ~self._stop.cuts_loop_short()
        if "skipped_in_a_row" in carried:
            going &= carried["skipped_in_a_row"] < self._max_skipped_updates
        return going
