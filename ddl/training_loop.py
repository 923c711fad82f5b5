"""The loop over updates on the devices: one `tf.function`, in which Python is not asked."""

from typing import Any

import tensorflow as tf

from ddl.data.checks import data_errors
from ddl.microbatch import explaining_stale_traces
from ddl.step import TrainingState, UpdateStep
from ddl.stop_flag import StopFlag


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
        """None where the step computes its rows by itself."""
        if self._update.pipeline.computes_rows_in_step(self._update.strategy):
            return None
        return self._update.pipeline.iterator(self._update.strategy, int(state.batches))

    @tf.function(autograph=False)
    def _loop(self, iterator: Any, end: tf.Tensor, state: TrainingState) -> TrainingState:
        self.trace_count += 1
        pipeline, strategy = self._update.pipeline, self._update.strategy
        resident = pipeline.resident_arrays(strategy)

        def goes_on(state: TrainingState, *_: Any) -> tf.Tensor:
            skips = state.skipped_in_a_row < self._max_skipped_updates
            return (state.step < end) & skips & ~self._stop.cuts_loop_short()

        if iterator is not None:

            def update(state: TrainingState) -> tuple[TrainingState]:
                return (self._update(next(iterator), resident, state),)

            return tf.while_loop(goes_on, update, (state,))[0]

        # The next batch is made beside the update: nothing of an iteration of tf.while begins
        # before the one before has ended. For several replicas only its rows are.
        gathers_ahead = strategy.num_replicas_in_sync == 1 and pipeline.microbatches == 1

        def batch(number: tf.Tensor) -> Any:
            rows = pipeline.rows(number)
            return strategy.run(pipeline.examples, (rows, resident)) if gathers_ahead else rows

        def update_beside(state: TrainingState, element: Any) -> tuple[TrainingState, Any]:
            following = batch(state.batches + 1)
            return self._update(element, {} if gathers_ahead else resident, state), following

        return tf.while_loop(goes_on, update_beside, (state, batch(state.batches)))[0]
