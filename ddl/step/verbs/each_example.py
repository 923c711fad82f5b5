"""Gradients of single examples, changed one by one before they are added up."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import keras
import numpy as np
import tensorflow as tf

from ddl.errors import ConfigError
from ddl.step.loss import Loss

OfExample: TypeAlias = Callable[[list[tf.Tensor]], list[tf.Tensor]]
"""Changes the gradients of one example, a tensor of each variable's shape."""


def check_no_batch_moments(layers: Sequence[keras.layers.Layer]) -> None:
    """Raises ConfigError if a layer normalizes over the batch: no example has its own gradient."""
    for layer in layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            raise ConfigError(
                f"update.gradients: with `each`, the gradient of an example must be its own, "
                f"but {layer.name!r} normalizes over the batch. Use GroupNormalization or "
                "LayerNormalization instead of BatchNormalization."
            )


def check_no_gathers(gathers: bool) -> None:
    """Raises ConfigError if a loss reads the rows of other examples."""
    if gathers:
        raise ConfigError(
            "update.gradients: with `each`, the gradient of an example must be its own, but the "
            "loss calls ddl.gather, so that it also has gradients of other examples. Leave out "
            "`each`, or compute the loss of each example from that example alone."
        )


def check_no_remat(is_on: bool) -> None:
    """Raises ConfigError if the backward pass of each example would compute layers again."""
    if is_on:
        raise ConfigError(
            "update.gradients: with `each`, the backward pass runs for every example, and with "
            "Trainer.remat it would compute the layers again for each. Leave Trainer.remat out. To "
            "need less memory, raise accumulation_steps."
        )


def losses_of_examples(loss: Loss, features: dict[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the loss of each example whose gradient `each` changes. Replica context.

    An example with several losses, as of tokens, has the gradient of their weighted mean, so that a
    limit of `each` means the same for any number of losses. The sum of the gradients is divided by
    the sum of the weights of the data, and not of those of the losses: in DP-SGD an example then
    changes the result by at most limit / Σ weight of the data, whatever weights the task returns.

    Args:
      loss: The loss.
      features: The microbatch.

    Returns:
      The losses times the weights of the data, [rows]; and the metric sums, with the sum of the
      weights of the data at the end.

    Raises:
      ConfigError: If the model normalizes over the batch.
    """
    check_no_batch_moments(loss.training.layers)
    of_data = features["weight"]
    weighed, _, sums, weight = loss.weighed(features, training=True)
    rows = weighed.shape[0]
    losses = tf.reduce_sum(tf.reshape(weighed, [rows, -1]), axis=1)
    if loss.training.entries > 1:
        total = tf.reduce_sum(tf.reshape(weight, [rows, -1]), axis=1)
        losses = tf.math.divide_no_nan(losses * tf.cast(of_data, losses.dtype), total)
    count = tf.reduce_sum(tf.cast(of_data, tf.float64))
    return losses, tf.concat([sums, [count]], axis=0)


def sum_of_changed(
    tape: tf.GradientTape,
    losses: tf.Tensor,
    mask: tf.Tensor | None,
    variables: Sequence[tf.Variable],
    each: OfExample,
    scale: tf.Tensor,
    divisor: int,
) -> list[tf.Tensor | None]:
    """Returns Σ each(∇ loss of an example), divided and scaled. Replica context.

    The forward pass is that of the whole microbatch, so random draws and masks are as usual. The
    backward pass runs for all examples at once, by `tf.vectorized_map`.

    Args:
      tape: Persistent tape of the forward pass.
      losses: The weighted loss of each example, times the loss scale: [rows].
      mask: bool [rows], False for rows that do not count; None if all do.
      variables: The variables.
      each: Changes the gradients of one example, without the loss scale.
      scale: The loss scale, float32 [].
      divisor: B, the global batch size, by which an objective is divided.

    Returns:
      One tensor per variable; None for one that the losses do not depend on.

    Raises:
      ConfigError: If `each` returns other shapes, or draws random numbers.
    """
    dtype = losses.dtype
    used = tape.gradient(losses, variables)
    connected = [place for place, gradient in enumerate(used) if gradient is not None]
    rows = losses.shape[0]

    finite = tf.reduce_all(
        [tf.reduce_all(tf.math.is_finite(tf.convert_to_tensor(used[p]))) for p in connected]
    )

    def of_row(row: tf.Tensor) -> list[tf.Tensor]:
        one = tf.one_hot(row, rows, dtype=dtype)
        own = [variables[place] for place in connected]
        gradients = [tf.convert_to_tensor(g) for g in tape.gradient(losses, own, one)]
        unscaled = [gradient / tf.cast(scale, gradient.dtype) for gradient in gradients]
        changed = each(unscaled)
        if not isinstance(changed, list | tuple) or not all(map(tf.is_tensor, changed)):
            raise ConfigError(
                "update.gradients: `each` must return a list with a tensor for each variable, got "
                f"{changed!r:.80}."
            )
        changed = list(changed)
        if [g.shape for g in changed] != [g.shape for g in unscaled]:
            raise ConfigError(
                "update.gradients: `each` must return a tensor of the same shape for each "
                f"variable, {[tuple(g.shape) for g in unscaled]}, got "
                f"{[tuple(g.shape) for g in changed]}."
            )
        if mask is None:
            return changed
        return [tf.where(mask[row], gradient, tf.zeros_like(gradient)) for gradient in changed]

    # An operation that cannot be vectorized runs in a loop over the rows.
    changed = tf.vectorized_map(of_row, tf.range(rows), warn=False)
    sums: list[tf.Tensor | None] = [None] * len(variables)
    for place, values in zip(connected, changed, strict=True):
        factor = tf.cast(scale, values.dtype) / divisor
        total = tf.reduce_sum(values, axis=0) * factor
        # `each` may hide an overflow, such as by tf.clip_by_value.
        sums[place] = tf.where(
            finite, total, tf.fill(tf.shape(total), tf.cast(np.nan, total.dtype))
        )
    return sums
