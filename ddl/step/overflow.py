"""Overflow of a gradient: all replicas skip the update, and the loss scale falls.

The check looks at the sum over the replicas: an infinity on one replica makes it infinite on all,
so they decide the same. With shares, each replica checks its share, and all ask each other. A
skipped update leaves weights, slots, averages and moving statistics as they were.

Micikevicius et al. 2018, "Mixed Precision Training".
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import keras
import tensorflow as tf

from ddl.distribution.path import on_host_if_placed
from ddl.distribution.traits import traits_of
from ddl.errors import ConfigError
from ddl.precision import LossScale
from ddl.step.clipping import Gradient, values_of


def all_finite(gradients: Sequence[Gradient]) -> tf.Tensor:
    """Returns whether no gradient, dense or sparse, holds an infinity or a NaN: bool []."""
    each = [tf.reduce_all(tf.math.is_finite(values_of(gradient))) for gradient in gradients]
    return tf.reduce_all(tf.stack(each))


class KeptValues:
    """The values of variables on every replica, read when this object is made.

    They are copies, so that `restore` is exact to the bit. Cross-replica context, in a graph.
    """

    def __init__(self, variables: Sequence[tf.Variable], strategy: tf.distribute.Strategy):
        """Reads the variables.

        Args:
          variables: The strategy's variables; they may differ between replicas.
          strategy: The strategy.
        """
        self._variables = list(variables)
        self._strategy = strategy
        self._values: list[Any] = strategy.run(lambda: [v.read_value() for v in self._variables])

    def restore(self) -> None:
        """Assigns the values on every replica."""
        for variable, value in zip(self._variables, self._values, strict=True):
            update = self._strategy.extended.update
            update(variable, lambda copy, kept: copy.assign(kept), args=(value,))

    def unless_overflow(
        self, finite: tf.Tensor | None, change: Callable[[], tf.Tensor]
    ) -> tf.Tensor:
        """Changes variables if the gradients are finite, and else restores the kept ones.

        Args:
          finite: Whether the sums over the replicas are finite, bool []; None: nobody asked.
          change: Applies gradients and returns their global norm, float64 [].

        Returns:
          The norm; 0 for a skipped update.
        """

        def skip() -> tf.Tensor:
            self.restore()
            return tf.zeros([], tf.float64)

        if finite is None:
            return change()
        with on_host_if_placed(self._strategy):  # which asks once, not once for each device
            finite = tf.identity(finite)
        return tf.cond(finite, change, skip)


def known_loss_scale(
    given: LossScale | Literal["auto"] | None,
    layers: Sequence[keras.layers.Layer],
    strategy: tf.distribute.Strategy,
) -> LossScale | None:
    """Returns the rule of the loss scale; "auto" scales if a layer computes in float16.

    Raises:
      ConfigError: If an asynchronous strategy would have to scale the loss.
    """
    if given == "auto":  # a gradient in float16 may underflow
        given = LossScale() if any(x.compute_dtype == "float16" for x in layers) else None
    if given is not None and traits_of(strategy).asynchronous:
        raise ConfigError(
            "--strategy=parameter_server cannot scale the loss, which float16 needs. Leave out "
            "Trainer.loss_scale, and set PRECISION to 'mixed_bfloat16' or 'float32'."
        )
    return given
