"""What asynchronous workers change besides weights and slots, as variables on parameter servers.

Each is moved by operations that a parameter server carries out one after the other, so that nothing
is lost when two workers do it at the same time.
"""

import keras
import tensorflow as tf

from ddl.training_state import TrainingState


def count_natively(optimizer: keras.optimizers.Optimizer) -> None:
    """Makes the optimizer's count of updates exact where several workers move it.

    Keras reads it, adds one and writes it back, which loses updates. This instance's hook adds
    where the variable is. Schedules and the bias corrections of Adam read the same count.
    """
    count = optimizer.iterations.value
    optimizer.iterations.assign_add = lambda value: count.assign_add(
        tf.cast(value, count.dtype), read_value=False
    )


class SharedState:
    """The form of a `TrainingState` that workers share.

    Attributes:
      slots: How many functions may be under way at once.
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
          strategy: Whose parameter servers hold them.
          state: Of the form that all states have.
          optimizer: Prepared by `count_natively`; its count is the step.
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
            self._gradient_noise = tf.Variable(state.gradient_noise, trainable=False)
            self._begun = tf.Variable(tf.zeros([slots], tf.int64), trainable=False)

    # ------------------------------------------------------------ eager, while no worker computes

    def write(self, state: TrainingState) -> None:
        """Sets what workers begin with."""
        for variable, value in (
            (self._loss_scale, state.loss_scale),
            (self._finite_updates, state.finite_updates),
            (self._skipped_in_a_row, state.skipped_in_a_row),
            (self._skipped, tf.zeros([], tf.int64)),
            (self._sums, state.sums),
            (self._gradient_norms, state.gradient_norms),
            (self._gradient_noise, state.gradient_noise),
            (self._begun, tf.zeros([self.slots], tf.int64)),
        ):
            variable.assign(value)

    def read(self, before: TrainingState, batches: int) -> TrainingState:
        """The state after workers have dealt with so many batches.

        Args:
          before: What was written.
          batches: How many.
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
            gradient_noise=self._gradient_noise.read_value(),
            diverged_for=before.diverged_for + tf.cast(~finite, tf.int64),
            batches_left_out=before.batches_left_out + tf.maximum(lost, 0),
        )

    # ------------------------------------------------------------ on a worker, in a graph

    def begun(self, slot: tf.Tensor) -> tf.Tensor:
        """How many batches of a slot were begun with, by whomever: int64 []."""
        return tf.raw_ops.ResourceGather(resource=self._begun.handle, indices=slot, dtype=tf.int64)

    def begin(self, slot: tf.Tensor) -> tf.Operation:
        """Counts one more."""
        return tf.raw_ops.ResourceScatterAdd(
            resource=self._begun.handle, indices=slot, updates=tf.ones([], tf.int64)
        )

    def at(self, batch: tf.Tensor) -> TrainingState:
        """The state that the update with batch number `batch`, int64 [], begins with; no sums."""
        return self._empty._replace(
            step=self._step.read_value(),
            batches=batch,
            skipped_in_a_row=self._skipped_in_a_row.read_value(),
            loss_scale=self._loss_scale.read_value(),
            finite_updates=self._finite_updates.read_value(),
            gradient_noise=self._gradient_noise.read_value(),
        )

    def add(self, before: TrainingState, after: TrainingState) -> list[tf.Operation]:
        """Adds one update to what others have done meanwhile.

        Args:
          before: What `at` gave.
          after: What the update made of it. Its step was counted by the optimizer.
        """
        made = after.step > before.step
        moved = after.loss_scale != before.loss_scale
        # What an update found out of a scale counts while that is the scale: two that overflow at
        # once halve it once.
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
            # An average moves by what an update found beside the average that it began with.
            self._gradient_noise.assign_add(
                after.gradient_noise - before.gradient_noise, read_value=False
            ),
            self._skipped.assign_add(tf.cast(~made, tf.int64), read_value=False),
            count(self._skipped_in_a_row, ~made),
            count(self._finite_updates, made & ~moved),
            tf.cond(
                moved & current,
                lambda: assign(self._loss_scale, after.loss_scale),
                lambda: tf.no_op(),
            ),
        ]
