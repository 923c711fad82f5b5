"""Metrics as sums, which add up exactly over replicas, microbatches and steps.

The sums are float64: counts are exact up to 2^53, and rounding stays negligible in a long run.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import typeguard

from ddl.errors import ConfigError
from ddl.figures import is_reserved
from ddl.layers.broadcasting import broadcasts, with_rank
from ddl.metrics.values import Inputs, OfMean, StateSums, tensors_by_name
from ddl.tasks.task import PerExample


class MetricSums:
    """The layout of a vector: Σ weight, Σ weight·value of each mean, sums of the other metrics.

    A single vector needs one reduce per step and one fetch per loop.

    Attributes:
      names: Names of the figures, in the order of `means`.
      metrics: Names of the loss and of the metrics, as the task returns them.
      states: Sums of the metrics that are no means, by their names.
      size: Length of the vector.
    """

    def __init__(self, output: PerExample, where: str):
        """Takes the layout for a loss's output; checks that the metrics add up. Eager.

        Args:
          output: The output; its tensors give only shapes and dtypes.
          where: Name of the loss, for errors.

        Raises:
          ConfigError: If a metric does not add up, or two figures have the same name.
        """
        self.states: dict[str, StateSums] = {}
        self._means: dict[str, Callable[[float], float]] = {"loss": float}
        for name, value in output.metrics.items():
            if isinstance(value, Inputs):
                specs = [tf.TensorSpec(x.shape, x.dtype) for x in (value.labels, value.outputs)]
                weight = _weight_of(value, output)
                rank = 1 if weight is None else weight.shape.rank
                self.states[name] = value.metric.state(name, *specs, rank)
                continue
            self._means[name] = value.function if isinstance(value, OfMean) else float
        figures = [f"{name}{path}" for name, one in self.states.items() for path in one.names]
        self.names = (*self._means, *figures)
        self.metrics = (*self._means, *self.states)
        self._sizes = [1 + len(self._means), *(one.size for one in self.states.values())]
        self.size = sum(self._sizes)
        _check_distinct(self.names, where)

    def zeros(self) -> tf.Tensor:
        """Returns the empty sums: float64 [size]."""
        return tf.zeros([self.size], tf.float64)

    def means(self, sums: tf.Tensor | np.ndarray) -> dict[str, float]:
        """Returns the figures by name, as Python floats; all NaN if the weights sum to 0.

        Args:
          sums: float64 [size].

        Raises:
          ConfigError: If the outputs do not fit a metric.
        """
        (weight, *totals), *of_states = _split(sums, self._sizes)
        pairs = zip(self._means.items(), totals, strict=True)
        figures = {
            name: _value(function, float(total / weight)) if weight else math.nan
            for (name, function), total in pairs
        }
        for (name, state), part in zip(self.states.items(), of_states, strict=True):
            # After a divergence the sums are NaN, which the loss reports.
            is_defined = weight != 0 and np.isfinite([totals[0], *part]).all()
            found = state.figures(part) if is_defined else [math.nan] * len(state.names)
            figures |= {f"{name}{p}": x for p, x in zip(state.names, found, strict=True)}
        return figures


def _split(sums: tf.Tensor | np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    return np.split(np.asarray(sums), np.cumsum(sizes)[:-1])


def _value(function: Callable[[float], float], mean: float) -> float:
    """Returns a function's value; NaN if it has none, such as for a NaN; inf if it overflows."""
    try:
        return math.nan if math.isnan(mean) else float(function(mean))
    except OverflowError:
        return math.inf
    except (ArithmeticError, ValueError):
        return math.nan


class SumsOfLosses:
    """The metric sums of all losses of an update, one after the other in one vector.

    Each loss has its own sum of weights, so each has its own denominator.

    Attributes:
      names: Names of the figures. A single loss has those of its `MetricSums`; with several, the
        name "loss" becomes "loss/NAME" with the name of the loss.
    """

    def __init__(self, of_losses: Mapping[str, MetricSums]):
        """Fixes the order of the losses.

        Args:
          of_losses: The layout of each loss, by its name.

        Raises:
          ConfigError: If two losses return a metric of the same name.
        """
        self._of_losses = dict(of_losses)
        several = len(of_losses) > 1
        self._figures = [
            [f"loss/{loss}" if several and name == "loss" else name for name in layout.names]
            for loss, layout in of_losses.items()
        ]
        self.names = tuple(name for names in self._figures for name in names)
        self._sizes = [layout.size for layout in of_losses.values()]
        _check_distinct(self.names, f"The losses {', '.join(of_losses)}")

    def zeros(self) -> tf.Tensor:
        """Returns the empty sums: float64 [size]."""
        return tf.zeros([sum(self._sizes)], tf.float64)

    def joined(self, sums: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """Returns the vector for the sums of each loss, by name."""
        each = [sums[name] for name in self._of_losses]
        return each[0] if len(each) == 1 else tf.concat(each, axis=0)

    def weight(self, sums: tf.Tensor | np.ndarray) -> float:
        """Returns the sum of the weights of all losses, from sums float64 [size]."""
        return float(sum(part[0] for part in _split(sums, self._sizes)))

    def means(self, sums: tf.Tensor | np.ndarray) -> dict[str, float]:
        """Returns the weighted means by the names of the figures, as Python floats.

        A loss without weight, such as one that no update has used (`Update.when`), is left out if
        another has some; else all means are NaN.

        Args:
          sums: float64 [size].
        """
        means: dict[str, float] = {}
        weight, parts = self.weight(sums), _split(sums, self._sizes)
        for layout, part, names in zip(self._of_losses.values(), parts, self._figures, strict=True):
            if part[0] or not weight:
                means |= dict(zip(names, layout.means(part).values(), strict=True))
        return means


# ------------------------------------------------------------ of what a loss returns


def sums_of(
    layout: MetricSums,
    loss: tf.Tensor,
    output: PerExample,
    weight: tf.Tensor | None,
    example_weight: tf.Tensor,
) -> tf.Tensor:
    """Returns the metric sums of a microbatch, float64 [size]. Replica context.

    Args:
      layout: The layout.
      loss: The losses, not in half precision.
      output: The output of the loss.
      weight: The weights, of the shape of the losses; None if all are one.
      example_weight: float32 [batch], 0 for padding.
    """
    names = [name for name in layout.metrics[1:] if name not in layout.states]
    rows = [tf.ones_like(loss), loss, *(_values_of(output.metrics[name]) for name in names)]
    if len({row.dtype for row in rows}) > 1:
        rows = [tf.cast(row, tf.float64) for row in rows]
    products = tf.cast(tf.stack(rows), tf.float64)
    if weight is not None:
        # Rows of weight zero are padding: their values, even infinities, must not count.
        products = tf.math.multiply_no_nan(products, tf.cast(weight, tf.float64))
    sums = [tf.reduce_sum(tf.reshape(products, [len(rows), -1]), axis=1)]
    for name, state in layout.states.items():
        inputs = output.metrics[name]
        total = tf.cast(example_weight, tf.float64)
        if (weights := _weight_of(inputs, output)) is not None:
            total = with_rank(total, weights.shape.rank) * tf.cast(weights, tf.float64)
            total = tf.broadcast_to(total, tf.shape(inputs.labels)[: weights.shape.rank])
        sums.append(state.sums(inputs.labels, inputs.outputs, total))
    return tf.concat(sums, axis=0) if len(sums) > 1 else sums[0]


def _values_of(value: Any) -> Any:
    return value.values if isinstance(value, OfMean) else value


def _weight_of(value: Inputs, output: PerExample) -> tf.Tensor | None:
    return output.weight if value.weight is None else value.weight


def check_output(output: PerExample, where: str, batch: int) -> None:
    """Checks types and shapes of what a loss returned for a number of rows.

    Args:
      output: The output of the loss.
      where: Name of the loss, for errors.
      batch: Number of rows.

    Raises:
      ConfigError: If one is wrong, or if a metric has a reserved name.
    """
    every = typeguard.CollectionCheckStrategy.ALL_ITEMS
    try:
        typeguard.check_type(output, PerExample, collection_check_strategy=every)
    except typeguard.TypeCheckError as error:
        raise ConfigError(
            f"{where} must return a ddl.PerExample of tensors, with metrics as a dict, but {error}."
            " Return ddl.PerExample(losses), of TensorFlow's or keras.ops' tensors."
        ) from None
    for what, value in tensors_of(output).items():
        dtype = value.dtype
        if not dtype.is_floating and (what == "loss" or not (dtype.is_integer or dtype.is_bool)):
            raise ConfigError(
                f"{where} must return numbers, and losses of a floating dtype, got a {what} of "
                f"{dtype.name}. Cast losses: tf.cast(…, tf.float32)."
            )
    losses, weight = output.loss.shape, output.weight
    if losses.rank == 0 or losses[0] != batch:
        got = f"shape {tuple(losses)}" if losses.rank else "a scalar loss"
        raise ConfigError(
            f"{where} must return one loss for each example, shape [rows, …], "
            f"got {got}. Remove the reduce_mean, give a Keras loss reduction=None, and one "
            "such as Dice an axis without the batch: axis=(1, 2, 3)."
        )
    shapes = {} if weight is None else {"weight": weight.shape}
    for metric, value in output.metrics.items():
        if not metric or is_reserved(metric):
            raise ConfigError(f"{where}: the metric name {metric!r} is reserved. Rename it.")
        if isinstance(value, Inputs):
            _check_inputs(metric, value, _weight_of(value, output), where, batch)
        else:
            shapes[f"metric {metric!r}"] = _values_of(value).shape
    for what, shape in shapes.items():
        fits = what == "weight" and broadcasts(shape, losses)
        if not fits and not shape.is_compatible_with(losses):
            raise ConfigError(
                f"{where} must return the {what} in the shape of the losses, {tuple(losses)}, got "
                f"the shape {tuple(shape)}."
            )


def _check_inputs(
    metric: str, value: Inputs, weight: tf.Tensor | None, where: str, batch: int
) -> None:
    least = tf.TensorShape([batch]) if weight is None else weight.shape
    for what, shape in (("labels", value.labels.shape), ("outputs", value.outputs.shape)):
        if shape[0] != batch or not broadcasts(least, shape):
            raise ConfigError(
                f"{where}: the {what} of the metric {metric!r} must have one row for each example, "
                f"{batch}, and its weights, of shape {tuple(least)}, as first dimensions, got "
                f"shape {tuple(shape)}. Pass the metric weights of its own: metric(labels, "
                "outputs, weight)."
            )


def check_dimensions(output: PerExample, other: PerExample, where: str) -> None:
    """Checks that no dimension after the first follows the number of rows.

    Args:
      output: The output of the loss for one number of rows.
      other: The output for another number of rows.
      where: Name of the loss, for errors.

    Raises:
      ConfigError: If one does.
    """
    of_other = tensors_of(other)
    for what, value in tensors_of(output).items():
        one, two = tuple(value.shape), tuple(of_other[what].shape)
        if one and (one[0], two[0]) in zip(one[1:], two[1:], strict=False):
            raise ConfigError(
                f"{where}: the {what} has shape {one} for a batch of {one[0]} and {two} for a "
                f"batch of {two[0]}, so a further dimension grows with the batch. It pairs each "
                "example with all others, like broadcasting [batch, 1] against [batch]. Make both "
                "shapes equal: tf.squeeze(model(x), -1) - label, or label[:, tf.newaxis]."
            )


def tensors_of(output: PerExample) -> dict[str, Any]:
    """Returns the tensors of an output by the names that errors use, after "the"."""
    metrics = {f"metric {name!r}": v for name, v in tensors_by_name(output.metrics).items()}
    weight = {} if output.weight is None else {"weight": output.weight}
    return {"loss": output.loss, **weight, **metrics}


def _check_distinct(names: Sequence[str], where: str) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{where}: two metrics have the figure {name!r}. Rename one of them.")
