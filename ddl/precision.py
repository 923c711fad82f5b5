"""Number formats: the dtype policy of the layers, and the loss scale for float16.

float16 gradients underflow. The loss is therefore multiplied by a scale before the backward pass,
and the gradients are divided by it after the all-reduce (Micikevicius et al. 2018, "Mixed Precision
Training"). The dynamic scale doubles after `growth_interval` finite updates. It halves at each
overflow, and that update is skipped.
"""

import dataclasses
from typing import Literal, get_args

import keras
import tensorflow as tf

from ddl.choices import check_seed
from ddl.errors import ConfigError, check_choice

Precision = Literal["float32", "float64", "mixed_float16", "mixed_bfloat16"]

_SMALLEST_SCALE = 1.0
_LARGEST_SCALE = 2.0**24

_chosen: set[str] = set()  # "tf32" after a call of `set_tf32`


def set_precision(precision: Precision) -> None:
    """Sets Keras's dtype policy for layers built afterwards in this thread.

    Variables are float32 under `float32` and the mixed policies, float64 under `float64`.

    Raises:
      ConfigError: If `precision` is unknown.
    """
    check_choice("precision", precision, get_args(Precision))
    # Optimizers and inputs follow floatx, layers follow the policy.
    keras.config.set_floatx("float64" if precision == "float64" else "float32")
    keras.config.set_dtype_policy(precision)


def set_tf32(enabled: bool) -> None:
    """Sets whether GPUs round float32 inputs of matrix products and convolutions to TF32.

    TF32 keeps 10 of the 23 bits of the mantissa; sums stay in float32. GPUs from NVIDIA's Ampere
    on then multiply several times faster. TensorFlow's default is True; `ddl.main` sets False
    unless `--tf32=on` is given. CPUs are not affected.
    """
    tf.config.experimental.enable_tensor_float_32_execution(enabled)
    _chosen.add("tf32")


def uses_tf32_unasked() -> bool:
    """Returns whether TF32 is on by TensorFlow's default, without a call of `set_tf32`."""
    return not _chosen and tf.config.experimental.tensor_float_32_execution_enabled()


def set_numerics(precision: Precision, seed: int) -> None:
    """Sets the number format and the global seeds. Call it before building a model.

    Args:
      precision: As in `set_precision`.
      seed: Seed of Python's, NumPy's, Keras's and TensorFlow's global generators.

    Raises:
      ConfigError: If `precision` is unknown or `seed` is not between 0 and 2^31 - 1.
    """
    check_seed(seed)
    set_precision(precision)
    keras.utils.set_random_seed(seed)
    # A global seed of 0 makes tf.data fail on seeds that are tensors.
    tf.random.set_seed(seed + 1)


@dataclasses.dataclass(frozen=True)
class LossScale:
    """The update rule of the loss scale. The training state holds the scale itself.

    Attributes:
      initial: Scale of the first update, between 1 and 2^24.
      growth_interval: Number of consecutive finite updates after which the scale doubles. None
        keeps the scale fixed; an update that overflows is still skipped.

    Raises:
      ConfigError: If a value is out of range.
    """

    initial: float = 2.0**15
    growth_interval: int | None = 2000

    def __post_init__(self) -> None:
        if not _SMALLEST_SCALE <= self.initial <= _LARGEST_SCALE:
            raise ConfigError(f"LossScale.initial must be from 1 to 2^24, got {self.initial}.")
        if self.growth_interval is not None and self.growth_interval < 1:
            raise ConfigError(
                "LossScale.growth_interval must be at least 1 update, or None for a fixed scale, "
                f"got {self.growth_interval}."
            )

    def next(
        self, scale: tf.Tensor, finite_updates: tf.Tensor, finite: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the scale and the count of finite updates after one update.

        Args:
          scale: float32 [], the scale of this update.
          finite_updates: int64 or int32 [], number of finite updates since the scale last changed.
          finite: bool [], whether all reduced gradients of this update are finite.

        Returns:
          `scale` and `finite_updates` of the next update, with the same shapes and dtypes.
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
