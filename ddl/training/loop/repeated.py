"""Repetition of an update, as the devices at hand do it best."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ddl.distribution.path import on_host, on_host_if_placed, path_of
from ddl.step.train_step import TrainStep
from ddl.training.loop.stop_flag import StopFlag

Carried = dict[str, tf.Tensor]
"""Fields of the state that an update changes, by name."""

Turn = Callable[[Carried, Any, Any], tuple[Carried, Any]]
"""An update. Takes and returns the carried fields and what was made ahead. Its last argument is the
number of the turn, int32 [] on the host, or None."""

# Counts of the state that a loop carries as int32, which TensorFlow keeps on the host.
_COUNTS = ("skipped_in_a_row", "finite_updates")

# Most updates that XLA compiles as one piece. The flag that stops a loop is read between two
# pieces; a loop takes about a second (`ddl.training.pace`).
_AT_ONCE = 32


class Repeated:
    """Repeats an update until a count of the state reaches its end. In a graph, cross-replica."""

    def __init__(self, update: TrainStep, max_skipped_updates: int, stop: StopFlag):
        """Keeps the arguments.

        Args:
          update: The update, for what it compiles.
          max_skipped_updates: Consecutive skipped updates after which a loop ends.
          stop: Flag that ends a loop.
        """
        self._update = update
        self._max_skipped_updates = max_skipped_updates
        self._stop = stop

    def __call__(
        self, turn: Turn, carried: Carried, ahead: Any, name: str, end: tf.Tensor, left: tf.Tensor
    ) -> Carried:
        """Returns the carried fields after the last update.

        Args:
          turn: Makes an update.
          carried: The fields before the first update.
          ahead: Batch made ahead for the first update; () if each update makes its own.
          name: Name of the count: "batches", or "step", which skipped updates leave as it is.
          end: Its end, int64 [].
          left: Its distance from the end, int64 [].
        """
        places_order = path_of(self._update.strategy).places_order
        if places_order:
            # A count on the device would be three kernels an update.
            with on_host():
                left = tf.cast(tf.minimum(left, tf.int32.max), tf.int32)
        if places_order and self._update.is_whole and name == "batches":
            return self._update.compiler.whole(
                lambda: self._several_at_once(turn, carried, end, left),
                lambda: self._one_by_one(turn, carried, ahead, name, end, left),
            )
        return self._one_by_one(turn, carried, ahead, name, end, left)

    def _several_at_once(
        self, turn: Turn, carried: Carried, end: tf.Tensor, left: tf.Tensor
    ) -> Carried:
        """Makes up to `_AT_ONCE` updates in one piece, a loop of XLA, and repeats that.

        TensorFlow starts a piece far more slowly than XLA the next turn of its own loop.
        """
        compiled = self._update.compiler

        def piece(carried: Carried) -> Carried:
            last = tf.minimum(carried["batches"] + _AT_ONCE, end)
            (carried,) = tf.while_loop(
                lambda carried: self.goes_on(carried, carried["batches"] < last),
                lambda carried: (turn(carried, (), None)[0],),
                (carried,),
            )
            return carried

        def goes_on(_: Carried, number: tf.Tensor) -> tf.Tensor:
            with on_host():
                return self.unless_stopped(number < left)

        return tf.while_loop(
            goes_on,
            lambda carried, number: (compiled(lambda: piece(carried)), number + _AT_ONCE),
            (carried, tf.constant(0)),
        )[0]

    def _one_by_one(
        self, turn: Turn, carried: Carried, ahead: Any, name: str, end: tf.Tensor, left: tf.Tensor
    ) -> Carried:
        if not self._counts_on_host(carried):
            return tf.while_loop(
                lambda carried, _: self._goes_on_below(carried[name], end, carried),
                lambda carried, ahead: turn(carried, ahead, None),
                (carried, ahead),
            )[0]
        skips = "skipped_in_a_row" in carried
        ahead_by = carried["step"] - carried["batches"]
        own = _with_counts(carried, tf.int32)
        if not skips:
            del own["step"]  # a constant distance from `batches`

        def counted(own: Carried, ahead: Any, number: tf.Tensor, done: Any) -> tuple[Any, ...]:
            given = own if skips else {**own, "step": own["batches"] + ahead_by}
            after, ahead = turn(given, ahead, number)
            with on_host():
                made = [n + tf.cast(tf.equal(after["skipped_in_a_row"], 0), n.dtype) for n in done]
            return {kept: after[kept] for kept in own}, ahead, number + 1, made

        def goes_on(own: Carried, _: Any, number: tf.Tensor, done: Any) -> tf.Tensor:
            with on_host():
                below = (done[0] if done else number) < left
                return self.unless_stopped(self.goes_on(own, below))

        done = [tf.constant(0)] if skips and name == "step" else []
        own, *_ = tf.while_loop(goes_on, counted, (own, ahead, tf.constant(0), done))
        own = _with_counts(own, tf.int64)
        return own if skips else {**own, "step": own["batches"] + ahead_by}

    def _counts_on_host(self, carried: Carried) -> bool:
        """Returns whether the host counts the updates of a loop, so that it waits for none."""
        # With a loss scale, code that XLA compiles tells on the device whether an update counts.
        on_device = self._update.compiler.is_on and "skipped_in_a_row" in carried
        return path_of(self._update.strategy).places_order and not on_device

    def _goes_on_below(self, count: tf.Tensor, end: tf.Tensor, carried: Carried) -> tf.Tensor:
        compiled = self._update.compiler
        return self.unless_stopped(compiled(lambda: self.goes_on(carried, count < end)))

    def goes_on(self, carried: Carried, going: tf.Tensor) -> tf.Tensor:
        """Returns `going`, bool [], or False if too many updates in a row were skipped."""
        if "skipped_in_a_row" in carried:
            going &= carried["skipped_in_a_row"] < self._max_skipped_updates
        return going

    def unless_stopped(self, going: tf.Tensor) -> tf.Tensor:
        """Returns `going`, bool [], or False if the loop is to stop."""
        # The flag lies on the host, which gets the condition anyway.
        with on_host_if_placed(self._update.strategy):
            return going & ~self._stop.ends_loop()


def _with_counts(carried: Carried, dtype: tf.DType) -> Carried:
    """Returns loop variables with the counts of `_COUNTS` in another dtype, from the host."""
    with on_host():
        return carried | {n: tf.cast(carried[n], dtype) for n in _COUNTS if n in carried}
