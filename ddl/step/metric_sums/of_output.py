"""The layout of a loss's metric sums, and the sums, from what the loss returns."""

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from ddl.errors import ConfigError
from ddl.figures import is_reserved
from ddl.layers.broadcasting import broadcasts, with_rank
from ddl.metrics.values import Inputs, OfMean, tensors_by_name
from ddl.step.metric_sums.vector import MetricSums
from ddl.tasks.task import PerExample


def layout_of(output: PerExample, where: str) -> MetricSums:
    """Returns the layout for a loss's output; checks that the metrics add up. Eager.

    Args:
      output: The output; its tensors give only shapes and dtypes.
      where: Name of the loss, for errors.

    Raises:
      ConfigError: If a metric does not add up, or two figures have the same name.
    """
    metrics = output.metrics
    functions = {name: v.function for name, v in metrics.items() if isinstance(v, OfMean)}
    states = {
        name: v.metric.state(
            name,
            tf.TensorSpec(v.labels.shape, v.labels.dtype),
            tf.TensorSpec(v.outputs.shape, v.outputs.dtype),
            _rank_of_weight(v, output),
        )
        for name, v in metrics.items()
        if isinstance(v, Inputs)
    }
    means = ["loss", *(name for name in metrics if name not in states)]
    layout = MetricSums(means, functions, states)
    for name in layout.names:
        if layout.names.count(name) > 1:
            raise ConfigError(f"{where}: two metrics have the figure {name!r}. Rename one of them.")
    return layout


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
    values = {"loss": loss}
    of_states: dict[str, tf.Tensor] = {}
    for name, value in output.metrics.items():
        if isinstance(value, Inputs):
            total = tf.cast(example_weight, tf.float64)
            own = output.weight if value.weight is None else value.weight
            if own is not None:
                total = with_rank(total, own.shape.rank) * tf.cast(own, tf.float64)
                total = tf.broadcast_to(total, tf.shape(value.labels)[: own.shape.rank])
            sums = layout.states[name].sums(value.labels, value.outputs, total)
            of_states[name] = sums
        else:
            values[name] = value.values if isinstance(value, OfMean) else value
    return layout.sums(values, weight, [of_states[name] for name in layout.states])


def check_kinds(output: PerExample, where: str) -> None:
    """Checks that losses, weights and metrics are tensors of dtypes that can be added.

    Args:
      output: The output of the loss.
      where: Name of the loss, for errors.

    Raises:
      ConfigError: If one is not a tensor, or of another dtype, or the metrics are no mapping.
    """
    _check_tensor("losses", output.loss, where)
    if not output.loss.dtype.is_floating:
        raise ConfigError(
            f"{where} must return losses of a floating dtype, got {output.loss.dtype.name}. Cast "
            "them: tf.cast(…, tf.float32)."
        )
    if output.weight is not None:
        _check_tensor("weights", output.weight, where)
    names = list(output.metrics) if isinstance(output.metrics, Mapping) else [None]
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"{where} must return metrics as a dict from name to values, got "
            f"{output.metrics!r:.60}."
        )
    for name, value in output.metrics.items():
        if not isinstance(value, Inputs):
            values = value.values if isinstance(value, OfMean) else value
            _check_tensor(f"the metric {name!r}", values, where)


def _check_tensor(what: str, value: Any, where: str) -> None:
    if not tf.is_tensor(value):
        raise ConfigError(
            f"{where} must return {what} as a tensor, got {type(value).__name__}. Compute it with "
            "TensorFlow or keras.ops."
        )
    if not (value.dtype.is_floating or value.dtype.is_integer or value.dtype.is_bool):
        raise ConfigError(f"{where} must return {what} as numbers, got {value.dtype.name}.")


def check_metrics(output: PerExample, where: str, batch: int) -> None:
    """Checks names and shapes of a loss's metrics.

    Args:
      output: The output of the loss.
      where: Name of the loss, for errors.
      batch: Number of rows.

    Raises:
      ConfigError: If a name is reserved, or a shape does not fit.
    """
    for metric, value in output.metrics.items():
        if not metric:
            raise ConfigError(f"{where}: a metric has the empty name. Name the metric.")
        if is_reserved(metric):
            raise ConfigError(
                f"{where}: the metric name {metric!r} is reserved for ddl. Rename the metric."
            )
        if isinstance(value, Inputs):
            _check_inputs(metric, value, output, where, batch)
            continue
        values = value.values if isinstance(value, OfMean) else value
        if not values.shape.is_compatible_with(output.loss.shape):
            raise ConfigError(
                f"{where} must return one value of the metric {metric!r} for each example, got "
                f"shape {tuple(values.shape)} for losses of shape {tuple(output.loss.shape)}."
            )


def _check_inputs(metric: str, value: Inputs, output: PerExample, where: str, batch: int) -> None:
    shapes = {"labels": value.labels.shape, "outputs": value.outputs.shape}
    for what, shape in shapes.items():
        if shape[0] != batch:
            raise ConfigError(
                f"{where}: the {what} of the metric {metric!r} must have one row for each example, "
                f"{batch}, got shape {tuple(shape)}."
            )
    weight = output.weight if value.weight is None else value.weight
    if weight is None:
        return
    for what, shape in shapes.items():
        if not broadcasts(weight.shape, shape):
            raise ConfigError(
                f"{where}: the weights of the metric {metric!r} have shape {tuple(weight.shape)}, "
                f"which must be the first dimensions of its {what}, got {tuple(shape)}. Pass the "
                "metric weights of its own: metric(labels, outputs, weight)."
            )


def _rank_of_weight(value: Inputs, output: PerExample) -> int:
    weight = output.weight if value.weight is None else value.weight
    return 1 if weight is None else weight.shape.rank


def has_further_dimension(output: PerExample, size: int) -> bool:
    """Returns whether a dimension after the first has a size, in any tensor of an output."""
    shapes = [values.shape for values in _named(output).values()]
    return any(shape.rank and size in shape.as_list()[1:] for shape in shapes)


def check_dimensions(output: PerExample, other: PerExample, where: str) -> None:
    """Checks that no dimension after the first follows the number of rows.

    Args:
      output: The output of the loss for one number of rows.
      other: The output for another number of rows.
      where: Name of the loss, for errors.

    Raises:
      ConfigError: If one does.
    """
    of_rows, of_other_rows = _named(output), _named(other)
    for what, values in of_rows.items():
        first, second = list(values.shape), list(of_other_rows[what].shape)
        for size, then in zip(first[1:], second[1:], strict=False):
            if (size, then) == (first[0], second[0]):
                raise ConfigError(
                    f"{where}: {what} has shape {tuple(first)} "
                    f"for a batch of {first[0]} and {tuple(second)} for a batch of "
                    f"{second[0]}, so its second dimension grows with the batch. It pairs each "
                    "example with all others, like broadcasting [batch, 1] against [batch]. "
                    "Make both shapes equal: tf.squeeze(model(x), -1) - label, or label[:, "
                    "tf.newaxis]."
                )


def _named(output: PerExample) -> dict[str, tf.Tensor]:
    """Returns the tensors of an output by the names that errors use."""
    metrics = {f"the metric {name!r}": v for name, v in tensors_by_name(output.metrics).items()}
    weight = {} if output.weight is None else {"the weight": output.weight}
    return {"the loss": output.loss, **weight, **metrics}
