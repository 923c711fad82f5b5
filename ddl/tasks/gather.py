"""The batch as a loss sees it: its own rows, and the rows of all replicas.

A replica computes its share of a batch. A loss that takes negatives only from its own rows has
fewer of them on more replicas, and computes something else. `gather` gives it the rows of all:

    rows           [b, …] on each of R replicas → [R·b, …] on each, by position in the global batch
    gradient       a row gets the gradients of the losses of all replicas: one sum over the replicas
                   in the backward pass. The all-reduce of the weights' gradients stays the same.
    padding        `mask` is False for it, so that it is no negative; its own loss weighs 0
    evaluation     over each batch of the evaluation, on any number of replicas
    microbatches   an error at the start, since the loss would depend on ACCUMULATION_STEPS

The check of row independence holds what was gathered: a loss may depend on other rows only so.
"""

from typing import Any, NamedTuple

import tensorflow as tf

from ddl import microbatch
from ddl.errors import ConfigError
from ddl.layers.across_replicas import gather_over_replicas
from ddl.microbatch import Microbatch


class CurrentBatch(NamedTuple):
    """The rows of a loss: a part of the global batch, on one replica, in one microbatch.

    Attributes:
      mask: bool [rows], False for padding and for examples whose weight in the data is 0.
      weight: float32 [rows], the weight of each example in the data; 0 for padding. The Trainer
        multiplies by it; a loss must not.
      positions: int64 [rows], the position of each row in the global batch.
      step: int64 [], number of updates made so far, also in an evaluation.
      training: Whether this is a training pass.
    """

    mask: tf.Tensor
    weight: tf.Tensor
    positions: tf.Tensor
    step: tf.Tensor
    training: bool


def current_batch() -> CurrentBatch:
    """Returns the rows of the loss that calls it. Replica context.

        def per_example(self, features, training):
            share = tf.minimum(1.0, tf.cast(ddl.current_batch().step, tf.float32) / 1000)
            …

    Raises:
      ConfigError: Outside of a loss that a Trainer runs.
    """
    current = _current("ddl.current_batch", "use update.step")
    weight = tf.ones([current.rows]) if current.weight is None else current.weight
    step = tf.zeros([], tf.int64) if current.step is None else current.step
    return CurrentBatch(weight > 0, weight, positions_of(current), step, current.training)


def _current(function: str, in_step: str) -> Microbatch:
    current = microbatch.current()
    if current is None or not current.rows:  # a step computes no rows
        raise ConfigError(f"{function} needs a loss that a ddl.Trainer runs. In a step, {in_step}.")
    return current


class Gathered(NamedTuple):
    """Rows of all replicas, in the order of their positions in the global batch.

    Attributes:
      rows: The gathered structure, each tensor [global batch, …].
      mask: bool [global batch], False for padding and for examples whose weight in the data is 0.
      own: int64 [rows], the places in `rows` of the rows of the loss that called `gather`.
    """

    rows: Any
    mask: tf.Tensor
    own: tf.Tensor


def gather(x: Any) -> Gathered:
    """Returns the rows of all replicas, for a loss across examples. Replica context.

        def per_example(self, features, training):  # InfoNCE
            queries, keys = self.two_views(features, training)
            others = ddl.gather(keys)
            logits = queries @ tf.transpose(others.rows) / 0.1
            logits = tf.where(others.mask, logits, logits.dtype.min)
            cross_entropy = tf.nn.sparse_softmax_cross_entropy_with_logits
            return ddl.PerExample(cross_entropy(others.own, logits))

    Gradients flow back to all replicas. All replicas must call it alike, outside of loops,
    conditionals and functions.

    Args:
      x: Tensor, or structure of tensors (tuples, lists, dicts), [rows, …] each, with one row for
        each row of the loss; of floating, integer or bool dtypes.

    Raises:
      ConfigError: Outside of a loss that a Trainer runs; with ACCUMULATION_STEPS > 1; in a loop,
        conditional or function; if a tensor has another first dimension than the batch, or another
        dtype.
    """
    current = _current("ddl.gather", "call it in the loss that is passed to update.minimize")
    if not current.in_forward:
        raise ConfigError(
            "ddl.gather must not be called in a loop, a conditional, a tf.function or a "
            "tf.recompute_grad: all replicas call it together. Gather before it."
        )
    tensors = [_checked(one, current.rows) for one in tf.nest.flatten(x)]
    current.has_gathered = True
    gathered = (current.gathering or _over_replicas)(tensors, current)
    return gathered._replace(rows=tf.nest.pack_sequence_as(x, list(gathered.rows)))


class MicrobatchesError(ConfigError):
    """A loss needs its batch as a whole, of which a microbatch has only a part."""

    def __init__(self, reason: str):
        """Writes the message; `reason` says what needs the batch, and why."""
        super().__init__(
            f"{reason}, but accumulation_steps (macro ACCUMULATION_STEPS) splits it. Set it to 1; "
            "if memory runs out, use Trainer.remat, more replicas, or a smaller global batch."
        )


def positions_of(current: Microbatch) -> tf.Tensor:
    """Returns the positions of a microbatch's rows in the global batch, int64 [rows]."""
    return tf.cast(current.first_row, tf.int64) + tf.range(current.rows, dtype=tf.int64)


def _over_replicas(tensors: list[tf.Tensor], current: Microbatch) -> Gathered:
    given = gather_over_replicas([x for x in (*tensors, current.mask) if x is not None])
    rows = given[: len(tensors)]
    mask = tf.ones([rows[0].shape[0]], tf.bool) if current.mask is None else given[-1]
    return Gathered(rows, mask, positions_of(current))


def _checked(value: Any, rows: int) -> tf.Tensor:
    """Returns a tensor of the rows of a microbatch.

    Raises:
      ConfigError: If it is something else.
    """
    tensor = tf.convert_to_tensor(value)
    shape = tensor.shape
    if not shape.rank or shape[0] != rows or not shape.is_fully_defined():
        raise ConfigError(
            f"ddl.gather takes tensors with one row for each of the {rows} rows of the loss, and a "
            f"static shape, got {shape}. Keep the batch as the first dimension; pass two views of "
            "the rows as a tuple, not one below the other."
        )
    if not (tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype.is_bool):
        raise ConfigError(f"ddl.gather takes tensors of numbers or bool, got {tensor.dtype.name}.")
    return tensor
