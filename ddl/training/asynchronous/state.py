"""State that asynchronous workers share beside weights and slots, as parameter-server variables.

Workers change these variables with operations that a parameter server runs one after the other, so
that no concurrent change is lost.
"""

import keras
import tensorflow as tf

from ddl.step.state import TrainingState


def count_atomically(optimizer: keras.optimizers.Optimizer) -> None:
    """Makes the optimizer's count of updates exact when several workers increment it.

    Keras reads the count, adds one and writes it back, which loses concurrent updates. This
    function replaces the instance's hook by an add on the parameter server. Schedules and Adam's
    bias corrections read the same count.
    """
    count = optimizer.iterations.value
    optimizer.iterations.assign_add = lambda value: count.assign_add(
        tf.cast(value, count.dtype), read_value=False
    )


class SharedState:
    """The variables in which workers share a `TrainingState`.

    Attributes:
      slots: Largest number of ranges in a loop.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        state: TrainingState,
        optimizer: keras.optimizers.Optimizer,
        slots: int,
    ):
        """Makes the variables.

        Args:
          strategy: The strategy whose parameter servers hold the variables.
          state: A state with the shapes and dtypes of all later ones.
          optimizer: Prepared by `count_atomically`; its count is the step.
          slots: As the attribute.
        """
        self.slots = slots
        self._empty = state.without_metrics()
        self._step = optimizer.iterations.value
        with strategy.scope():
            self._loss_scale = tf.Variable(state.loss_scale, trainable=False)
            self._finite_updates = tf.Variable(state.finite_updates, trainable=False)
            self._skipped_in_a_row = tf.Variable(state.skipped_in_a_row, trainable=False)
            self._skipped = tf.Variable(tf.zeros([], tf.int64), trainable=False)
            self._sums = tf.Variable(state.sums, trainable=False)
            self._gradient_norms = tf.Variable(state.gradient_norms, trainable=False)
            self._begun = tf.Variable(tf.zeros([slots], tf.int64), trainable=False)

    # ------------------------------------------------------------ eager, while no worker computes

    def write(self, state: TrainingState) -> None:
        """Sets the variables to the state from which workers start."""
        for variable, value in (
            (self._loss_scale, state.loss_scale),
            (self._finite_updates, state.finite_updates),
            (self._skipped_in_a_row, state.skipped_in_a_row),
            (self._skipped, tf.zeros([], tf.int64)),
            (self._sums, state.sums),
            (self._gradient_norms, state.gradient_norms),
            (self._begun, tf.zeros([self.slots], tf.int64)),
        ):
            variable.assign(value)

    def read(self, before: TrainingState, batches: int) -> TrainingState:
        """Returns the state after workers have processed `batches` batches.

        Args:
          before: The state last written.
          batches: Number of batches scheduled since.
        """
        step, sums = tf.identity(self._step), self._sums.read_value()
        end = before.batches + batches
        lost = batches - (step - before.step) - self._skipped.read_value()
        finite = tf.reduce_all(tf.math.is_finite(sums))
        return before._replace(
            step=step,
            batches=end,
            skipped_in_a_row=self._skipped_in_a_row.read_value(),
            loss_scale=self._loss_scale.read_value(),
            finite_updates=self._finite_updates.read_value(),
            sums=sums,
            gradient_norms=self._gradient_norms.read_value(),
            diverged_for=before.diverged_for + tf.cast(~finite, tf.int64),
            batches_left_out=before.batches_left_out + tf.maximum(lost, 0),
        )

    # ------------------------------------------------------------ on a worker, in a graph

    def begun(self, slot: tf.Tensor) -> tf.Tensor:
        """Returns how many batches of a slot any worker has started: int64 []."""
        return tf.raw_ops.ResourceGather(resource=self._begun.handle, indices=slot, dtype=tf.int64)

    def begin(self, slot: tf.Tensor) -> tf.Operation:
        """Counts one more started batch of a slot."""
        return tf.raw_ops.ResourceScatterAdd(
            resource=self._begun.handle, indices=slot, updates=tf.ones([], tf.int64)
        )

    def at(self, batch: tf.Tensor) -> TrainingState:
        """Returns the present state for batch number `batch`, int64 [], with metric sums of 0."""
        return self._empty._replace(
            step=self._step.read_value(),
            batches=batch,
            skipped_in_a_row=self._skipped_in_a_row.read_value(),
            loss_scale=self._loss_scale.read_value(),
            finite_updates=self._finite_updates.read_value(),
        )

    def add(self, before: TrainingState, after: TrainingState) -> list[tf.Operation]:
        """Adds the changes of one update to the shared state.

        Args:
          before: The state from `at`.
          after: The state after the update. The optimizer has already counted the step.

        Returns:
          The operations that change the variables.
        """
        made = after.step > before.step
        moved = after.loss_scale != before.loss_scale
        # An update changes the loss scale only if the scale is still the one it used: two
        # concurrent overflows halve the scale once.
        current = self._loss_scale.read_value() == before.loss_scale

        def assign(variable: tf.Variable, value: tf.Tensor) -> tf.Operation:
            return variable.assign(value, read_value=False)

        def count(variable: tf.Variable, one_more: tf.Tensor) -> tf.Operation:
            return tf.cond(
                one_more,
                lambda: variable.assign_add(tf.ones_like(variable), read_value=False),
                lambda: assign(variable, tf.zeros_like(variable)),
            )

        return [
            self._sums.assign_add(after.sums, read_value=False),
            self._gradient_norms.assign_add(after.gradient_norms, read_value=False),
            self._skipped.assign_add(tf.cast(~made, tf.int64), read_value=False),
            count(self._skipped_in_a_row, ~made),
            count(self._finite_updates, made & ~moved),
            tf.cond(
                moved & current,
                lambda: assign(self._loss_scale, after.loss_scale),
                lambda: tf.no_op(),
            ),
        ]
