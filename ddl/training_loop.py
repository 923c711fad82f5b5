"""The loop over updates on the devices: one `tf.function`, in which Python is not asked."""

from typing import Any

import tensorflow as tf

from ddl.data.checks import data_errors
from ddl.microbatch import explaining_stale_traces
from ddl.random import batch_counter
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
        """None where the loop finds the batches by itself."""
        if self._update.pipeline.needs_no_iterator(self._update.strategy):
            return None
        return self._update.pipeline.iterator(self._update.strategy, int(state.batches))

    @tf.function(autograph=False)
    def _loop(self, iterator: Any, end: tf.Tensor, state: TrainingState) -> TrainingState:
        self.trace_count += 1
        pipeline, strategy = self._update.pipeline, self._update.strategy
        resident = pipeline.resident_arrays(strategy)

        # Each tensor that a loop carries costs three operations an update. So what no update
        # changes stays outside; and what draws are counted from is made an update ahead, to be
        # there when that begins.
        def carried(state: TrainingState) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
            changing = {name: getattr(state, name) for name in self._update.moves}
            return changing, batch_counter(state.batches)

        def goes_on(changing: dict[str, tf.Tensor], _: tf.Tensor) -> tf.Tensor:
            going = (changing["step"] < end) & ~self._stop.cuts_loop_short()
            if "skipped_in_a_row" in changing:
                going &= changing["skipped_in_a_row"] < self._max_skipped_updates
            return going

        def update(element: Any, changing: dict[str, tf.Tensor], counter: tf.Tensor) -> Any:
            before = state._replace(**changing)
            return carried(self._update(element, resident, before, counter))

        if iterator is not None:
            last = tf.while_loop(goes_on, lambda *now: update(next(iterator), *now), carried(state))
            return state._replace(**last[0])

        def updates(changing: dict[str, tf.Tensor], counter: tf.Tensor) -> Any:
            """As many as there are batches ordered in one go."""
            first = changing["batches"]
            following = pipeline.following(first, strategy)
            after = first + tf.shape(following["index"], tf.int64)[0]

            def element(batch: tf.Tensor) -> dict[str, tf.Tensor]:
                return {name: batches[batch - first] for name, batches in following.items()}

            return tf.while_loop(
                lambda *now: goes_on(*now) & (now[0]["batches"] < after),
                lambda *now: update(element(now[0]["batches"]), *now),
                (changing, counter),
            )

        return state._replace(**tf.while_loop(goes_on, updates, carried(state))[0])
