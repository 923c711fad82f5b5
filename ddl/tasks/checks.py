"""Checks of a data source that several tasks share."""

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ddl.errors import ConfigError, DataError


def check_features(spec: Mapping[str, tf.TensorSpec], names: Mapping[str, str], task: str) -> None:
    """Raises DataError if the data lack a feature.

    Args:
      spec: One example by feature name.
      names: The names of the features, by the task's argument that gives each.
      task: Name of the task.
    """
    for name in names.values():
        if name not in spec:
            raise DataError(
                f"The data have no feature {name!r}, only {', '.join(sorted(spec))}. Rename it "
                f"in the data, or set {' and '.join(names)} of {task}."
            )


def check_input(model: keras.Model, name: str, spec: tf.TensorSpec) -> None:
    """Raises DataError if a feature does not fit the only input of a model.

    Args:
      model: The model; one whose inputs are not known yet fits.
      name: Name of the feature.
      spec: The feature of one example.
    """
    if not getattr(model, "inputs", None):
        return
    check_kind(model, name, spec, model.inputs[0].dtype)
    expected = tuple(model.inputs[0].shape[1:])
    if not fits(expected, tuple(spec.shape)):
        given = tuple(spec.shape)
        raise DataError(
            f"Feature {name!r} of the data has shape {given}, but the model {model.name!r} takes "
            f"{expected}. Set the size of the model's inputs to {given}, or reshape the feature."
        )


def check_kind(model: keras.Model, name: str, spec: tf.TensorSpec, dtype: str) -> None:
    """Raises DataError if a feature is text or a fraction where a model takes numbers or integers.

    Args:
      model: The model.
      name: Name of the feature.
      spec: The feature of one example.
      dtype: Dtype of the model's input, to which Keras would cast the feature.
    """
    if spec.dtype == tf.string and dtype != "string":
        raise DataError(
            f"Feature {name!r} of the data is text, but the model {model.name!r} takes numbers. "
            "Convert the text to numbers in the data, or set input_name to another feature."
        )
    if spec.dtype.is_floating and tf.as_dtype(dtype).is_integer:
        raise DataError(
            f"Feature {name!r} of the data must be integers, as the model {model.name!r} takes "
            f"them, got {spec.dtype.name}. Convert it in the data."
        )


def fits(expected: Sequence[int | None], given: Sequence[int | None]) -> bool:
    """Returns whether a shape is as expected; None stands for any size."""
    return len(expected) == len(given) and all(
        e is None or e == g for e, g in zip(expected, given, strict=True)
    )


def without_one(shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """Returns a shape without a last dimension of 1."""
    return shape[:-1] if shape and shape[-1] == 1 else shape


def check_model(model: Any, task: str) -> None:
    """Raises ConfigError if `model` is no Keras model."""
    if not isinstance(model, keras.Model):
        raise ConfigError(
            f"{task}.model must be a Keras model, got {model!r:.80}. Pass a keras.Model, or in a "
            "config a reference with parentheses, such as @cnn()."
        )


def output_shape(model: keras.Model) -> tuple[int | None, ...] | None:
    """Returns the shape of the only output without the batch; None if it is not known yet."""
    outputs = getattr(model, "outputs", None)
    return tuple(outputs[0].shape[1:]) if outputs and len(outputs) == 1 else None


def check_range(source: Any, name: str, end: int | None, what: str, remedy: str) -> None:
    """Raises DataError if a feature of integers is not from 0 to `end` - 1.

    Args:
      source: The source; only one that has its features as arrays is checked.
      name: Name of the feature.
      end: The first integer that is too large; None if it is not known.
      what: Description of the feature for the error.
      remedy: The last sentence of the error.
    """
    values = (getattr(source, "arrays", None) or {}).get(name)
    if values is None or end is None or not values.size:
        return
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= end:
        row = int(np.argmax(((values < 0) | (values >= end)).reshape(len(values), -1).any(axis=1)))
        raise DataError(
            f"{what} must be from 0 to {end - 1}, got {low} to {high} (first in example {row}). "
            f"{remedy}"
        )


def one_output(
    outputs: Any, model: keras.Model, task: str, form: str, shape: Sequence[int | None]
) -> tf.Tensor:
    """Returns a model's outputs as `in_float32` does, after a check of their shape.

    Args:
      outputs: The value that the model returned.
      model: The model.
      task: Name of the task.
      form: The shape that the task needs, in words, such as "[batch, classes]".
      shape: The same without the batch; None stands for any size.

    Raises:
      ConfigError: If the outputs are not one tensor of this shape.
    """
    if not tf.is_tensor(outputs):
        got = f"a {type(outputs).__name__}"
    elif outputs.shape.rank is None:
        return in_float32(outputs)
    else:
        given = tuple(outputs.shape[1:])
        if len(given) == len(shape) and all(
            None in pair or pair[0] == pair[1] for pair in zip(given, shape, strict=True)
        ):
            return in_float32(outputs)
        got = f"shape {('batch', *given)}".replace("'", "")
    wanted = f"({', '.join(['batch', *('any' if size is None else str(size) for size in shape)])})"
    raise ConfigError(
        f"{task} needs a model with one output of shape {form}, here {wanted}, but {model.name!r} "
        f"returns {got}. Change the model's last layers, or the labels."
    )


def in_float32(outputs: tf.Tensor) -> tf.Tensor:
    """Returns a model's outputs in float32, or float64 if they are: losses need the precision."""
    return tf.cast(outputs, tf.float64 if outputs.dtype == tf.float64 else tf.float32)
