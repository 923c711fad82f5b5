"""Random numbers of tasks and layers by position in the global batch (`ddl.draws`).

`keras.random` draws by position too. These functions give each owner a stream of its own without
a `keras.random.SeedGenerator`:

    class Jitter(keras.layers.Layer):
        def call(self, x, training=False):
            return x + ddl.random.normal(self, x.shape) if training else x
"""

from typing import Any

import keras
import tensorflow as tf

from ddl import draws, microbatch  # noqa: F401 (replaces the functions of Keras)


def batch_counter(batch: tf.Tensor) -> tf.Tensor:
    """Returns Philox's counter at the first row of a global batch, uint64 [2].

    A training loop computes the counter of the next batch during an update, so that it is ready
    when the next update begins. The random numbers are then computed in parallel with the layers
    before them; a few operations ahead of the draw would make one wait for the other.

    Args:
      batch: Index of the global batch, int64 [], counted from 0 over the whole run.
    """
    return tf.cast(tf.stack([tf.zeros([], tf.int64), batch]), tf.uint64)


def uniform(owner: Any, shape: Any) -> tf.Tensor:
    """Draws numbers uniform in [0, 1). Replica context, or in a step cross-replica context.

    Args:
      owner: The layer or task that draws. Each draw of each owner has its own stream; an integer
        `seed` of the owner selects the stream in place of the trainer's seed. Outside of a trainer
        the numbers come from the owner's `seed_generator`, or else from Keras's global one.
      shape: Shape of the result. In a loss, a first dimension that follows the rows of the
        microbatch gives each example its own numbers; else all examples share them. In a step,
        which has no rows, the numbers are the same on all replicas.

    Returns:
      float32 of that shape.

    Raises:
      ConfigError: If a dimension other than the first follows the rows; or in a `tf.while_loop`,
        `tf.map_fn` or `tf.vectorized_map`, where every iteration would draw the same numbers.
    """
    return keras.random.uniform(shape, dtype="float32", seed=_seed(owner))


def normal(owner: Any, shape: Any) -> tf.Tensor:
    """Draws standard normal numbers, float32; otherwise like `uniform`."""
    return keras.random.normal(shape, dtype="float32", seed=_seed(owner))


def _seed(owner: Any) -> Any:
    generator = getattr(owner, "seed_generator", None)
    return owner if generator is None and microbatch.current() is not None else generator
