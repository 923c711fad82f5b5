"""Number formats: the dtype policy of the layers, and the loss scale that float16 needs.

float16 gradients underflow; so the loss is multiplied by a scale before the backward pass and
the gradients divided by it after the all-reduce (Micikevicius et al. 2018, "Mixed Precision
Training"). The dynamic scale doubles after `growth_interval` finite updates and halves at each
overflow, whose update is skipped.
"""

import dataclasses
from typing import Literal, get_args

import keras
import tensorflow as tf

from ddl.errors import ConfigError, check_choice

Precision = Literal["float32", "float64", "mixed_float16", "mixed_bfloat16"]

_SMALLEST_SCALE = 1.0
_LARGEST_SCALE = 2.0**24


def set_precision(precision: Precision) -> None:
    """Sets Keras's dtype policy for layers built afterwards in this thread.

    Variables are float32 under the mixed policies, float64 under `float64`.

    Raises:
      ConfigError: If the name is unknown.
    """
    check_choice("precision", precision, get_args(Precision))
    # Optimizers and inputs follow floatx, layers follow the policy.
    keras.config.set_floatx("float64" if precision == "float64" else "float32")
    keras.config.set_dtype_policy(precision)


def set_numerics(precision: Precision, seed: int) -> None:
    """What must stand before a model is built: its number format, and the seed of its weights.

    Args:
      precision: As in `set_precision`.
      seed: Seeds Python's, NumPy's, Keras's and TensorFlow's global generators.

    Raises:
      ConfigError: If one is out of range.
    """
    if not 0 <= seed < 2**31:
        raise ConfigError(f"SEED is {seed}; it lies between 0 and 2^31 - 1")
    set_precision(precision)
    keras.utils.set_random_seed(seed)
    # A global seed of 0 makes tf.data fail on seeds that are tensors (ddl.data.StreamSource).
    tf.random.set_seed(seed + 1)


@dataclasses.dataclass(frozen=True)
class LossScale:
    """The rule by which the loss scale moves; its state travels in the training state.

    Attributes:
      initial: The scale of the first update.
      growth_interval: After how many finite updates in a row the scale doubles; None keeps
        the scale fixed (an overflow is skipped all the same).
    """

    initial: float = 2.0**15
    growth_interval: int | None = 2000

    def __post_init__(self) -> None:
        if not _SMALLEST_SCALE <= self.initial <= _LARGEST_SCALE:
            raise ConfigError(
                f"the initial loss scale is {self.initial}; it lies between 1 and 2^24"
            )
        if self.growth_interval is not None and self.growth_interval < 1:
            raise ConfigError(
                f"growth_interval is {self.growth_interval} updates; it is 1 or more, or None "
                "for a fixed scale"
            )

    def next(
        self, scale: tf.Tensor, finite_updates: tf.Tensor, finite: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """The scale and the run of finite updates after one update.

        Args:
          scale: float32 [], as used in this update.
          finite_updates: int64 [], finite updates since the scale last moved.
          finite: bool [], whether all reduced gradients of this update are finite.

        Returns:
          The two for the next update.
        """
        if self.growth_interval is None:
            return scale, finite_updates
        finite_updates = tf.where(finite, finite_updates + 1, 0)
        grows = finite_updates >= self.growth_interval
        moved = tf.where(finite, tf.where(grows, scale * 2.0, scale), scale / 2.0)
        return (
            tf.clip_by_value(moved, _SMALLEST_SCALE, _LARGEST_SCALE),
            tf.where(grows, tf.zeros_like(finite_updates), finite_updates),
        )
