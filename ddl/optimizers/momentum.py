"""SGD with the learning rate outside of the velocity."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from ddl.optimizers.rows import dense


@keras.saving.register_keras_serializable("ddl")
class MomentumSGD(keras.optimizers.SGD):
    """SGD with momentum correction.

    Keras keeps the learning rate η inside the velocity: v ← m·v - η·g, w ← w + v. When η changes,
    the velocity still contains gradients scaled by the old rate. Goyal et al. 2017, "Accurate,
    Large Minibatch SGD", section 3, correct this by v ← m·(η_t / η_(t-1))·v + η_t·g. An equivalent
    form keeps the rate out of the velocity. It stores no earlier rate and never divides by a rate
    of zero:

        v ← m·v + g        w ← w - η·v        (Nesterov: w ← w - η·(g + m·v))

    It equals Keras's SGD while the rate is constant, and PyTorch's at any rate. The velocity is in
    units of the gradient, so a checkpoint of Keras's SGD cannot be resumed with it.

    With momentum, a sparse gradient is converted to a dense one, since momentum moves every row in
    every update.
    """

    def __init__(
        self,
        learning_rate: float | keras.optimizers.schedules.LearningRateSchedule | Callable = 0.01,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float | None = None,
        **kwargs: Any,
    ):
        """Initializes the optimizer; see `keras.optimizers.SGD`.

        Args:
          learning_rate: A float, a schedule, or a function that gives the rate.
          momentum: m above, in [0, 1].
          nesterov: Whether to use Nesterov momentum.
          weight_decay: Decoupled weight decay: w ← w - η·weight_decay·w, before the update.
          **kwargs: Further arguments of `keras.optimizers.SGD`, such as name. The Trainer rejects
            those that duplicate its own, such as clipnorm.
        """
        super().__init__(learning_rate, momentum, nesterov, weight_decay, **kwargs)

    def update_step(
        self, gradient: tf.Tensor | tf.IndexedSlices, variable: tf.Variable, learning_rate: Any
    ) -> None:
        """Updates one variable. Runs in the strategy's update context.

        Args:
          gradient: Reduced gradient, of the variable's shape.
          variable: The variable to update, or a replica-local copy of it.
          learning_rate: Scalar.
        """
        if not self.momentum:  # rows without gradient stay as they are
            super().update_step(tf.cast(gradient, variable.dtype), variable, learning_rate)
            return
        tf.raw_ops.ResourceApplyMomentum(
            var=variable.handle,
            accum=self.momentums[self._get_variable_index(variable)].value.handle,
            lr=tf.cast(learning_rate, variable.dtype),
            grad=dense(gradient, variable),
            # tf.cast would round a Python number to float32 first.
            momentum=tf.constant(self.momentum, variable.dtype),
            use_nesterov=self.nesterov,
        )
