"""The loop over updates on the devices: one `tf.function`, in which Python is not asked."""

from typing import Any

import tensorflow as tf

from ddl.data.checks import data_errors
from ddl.microbatch import explaining_stale_traces
from ddl.random import batch_counter
from ddl.step import TrainingState, UpdateStep
from ddl.stop_flag import StopFlag
from ddl.workers import Workers

_Changing = dict[str, tf.Tensor]


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
        resident = self._update.pipeline.resident_arrays(self._update.strategy)
        if iterator is None:
            return self._over_arrays(resident, end, state)

        def update(changing: _Changing, counter: tf.Tensor) -> tuple[_Changing, tf.Tensor]:
            before = state._replace(**changing)
            after = self._update(next(iterator), resident, before, counter)
            with _beside_backward_pass(after):
                return self._changing(after), batch_counter(before.batches + 1)

        start = self._changing(state), batch_counter(state.batches)
        changing, _ = tf.while_loop(
            lambda changing, _: self._goes_on(changing) & (changing["step"] < end), update, start
        )
        return state._replace(**changing)

    def _over_arrays(self, resident: Any, end: tf.Tensor, state: TrainingState) -> TrainingState:
        """Many batches are ordered in one go; each is gathered while the one before is computed."""
        pipeline, strategy = self._update.pipeline, self._update.strategy
        # For several replicas, or in several parts, its rows alone are at hand.
        replicas = strategy.num_replicas_in_sync // Workers(strategy).number
        gathers_ahead = replicas == 1 and pipeline.microbatches == 1

        def updates(changing: _Changing) -> tuple[_Changing]:
            first = changing["batches"]
            following = pipeline.following(first, strategy)
            ordered = tf.shape(following["index"], tf.int64)[0]
            until = first + tf.minimum(ordered, end - changing["step"])

            def made(batch: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
                element = {name: rows[batch - first] for name, rows in following.items()}
                if gathers_ahead:
                    element = strategy.run(pipeline.examples, (element, resident))
                    if pipeline.always_full:
                        del element["weight"]
                return element, batch_counter(batch)

            def update(changing: _Changing, ahead: Any) -> tuple[_Changing, Any]:
                element, counter = ahead
                before = state._replace(**changing)
                arrays = {} if gathers_ahead else resident
                after = self._update(element, arrays, before, counter)
                with _beside_backward_pass(after):
                    return self._changing(after), made(tf.minimum(before.batches + 1, until - 1))

            return tf.while_loop(
                lambda changing, _: self._goes_on(changing) & (changing["batches"] < until),
                update,
                (changing, made(first)),
            )[:1]

        (changing,) = tf.while_loop(
            lambda changing: self._goes_on(changing) & (changing["step"] < end),
            updates,
            (self._changing(state),),
        )
        return state._replace(**changing)

    def _changing(self, state: TrainingState) -> _Changing:
        """What the loop carries: each tensor that it does costs three operations an update."""
        return {name: getattr(state, name) for name in self._update.changes}

    def _goes_on(self, changing: _Changing) -> tf.Tensor:
        going = ~self._stop.cuts_loop_short()
        if "skipped_in_a_row" in changing:
            going &= changing["skipped_in_a_row"] < self._max_skipped_updates
        return going


def _beside_backward_pass(after: TrainingState) -> Any:
    """For what the next update needs of this one's number alone.

    TensorFlow would compute it first of all, since it waits for nothing, and the forward pass
    would wait for it.
    """
    return tf.control_dependencies([after.sums])
