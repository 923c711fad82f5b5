"""Inputs and outputs of a task's model, and checks that data fit them."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ddl.errors import ConfigError, DataError
from ddl.layers import PartitionedEmbedding

ENTRY_WEIGHT = "entry_weight"
"""The feature of weights [batch, …] of more than one dimension, as of time steps."""

_TABLES = (keras.layers.Embedding, PartitionedEmbedding)


def inputs_of(
    model: keras.Model, features: Mapping[str, Any], input_name: str, others: Collection[str]
) -> Any:
    """Returns what a model takes: a tensor, or a dict for a model with inputs by name.

    Args:
      model: The model.
      features: The features of a batch, or their specs.
      input_name: Name of the feature for a model with one input; if there is no such feature, the
        model gets the only one.
      others: Names of the features that are no inputs, such as labels.

    Raises:
      ConfigError: If a model with one input has several features to choose from.
    """
    names, inputs = names_of(model), getattr(model, "inputs", None)
    if names is not None:
        return {name: features[name] for name in names}
    left = {k: v for k, v in features.items() if k not in {*others, "weight", ENTRY_WEIGHT}}
    if inputs and len(inputs) > 1:
        return left
    if input_name in features or (inputs and not left):
        return features[input_name]  # without any, the error names the feature
    if len(left) == 1:
        return next(iter(left.values()))
    if inputs:
        raise ConfigError(
            f"The model {model.name!r} has one input, but the data have the features "
            f"{', '.join(sorted(left))}. Set input_name of the task to one of them."
        )
    return left


def names_of(model: keras.Model) -> list[str] | None:
    """Returns the names of a functional model's inputs if they come as a dict."""
    functional = getattr(model, "inputs", None) and not isinstance(model, keras.Sequential)
    own = model.input if functional else None
    return list(own) if isinstance(own, Mapping) else None


def check_inputs(
    model: keras.Model, source: Any, input_name: str, others: Collection[str], task: str
) -> None:
    """Raises DataError if the data lack an input of the model, or one has another shape or kind.

    Integers beyond the rows of a table are found where an input goes straight into a layer for
    embeddings and the source has its features as arrays: TensorFlow raises an error in the update
    that looks them up, but not on GPUs.

    Args:
      model: The model; one whose inputs are not known yet fits.
      source: The source.
      input_name: As in `inputs_of`.
      others: As in `inputs_of`.
      task: Name of the task.

    Raises:
      ConfigError: If a model with one input has several features to choose from.
    """
    spec, names = source.element_spec, names_of(model)
    left = sorted(spec.keys() - {*others, "weight", ENTRY_WEIGHT})
    if not left:
        raise DataError(
            f"{task} needs an input beside its labels, got only the features "
            f"{', '.join(sorted(spec))}. Add the input of the model to the data."
        )
    for name in names or ():
        if name not in spec:
            raise DataError(
                f"The model {model.name!r} takes the features {', '.join(names or ())}, but the "
                f"data have no {name!r}, only {', '.join(left)}. Rename it in the data."
            )
    for name, taken in _taken(model, spec, input_name, others):
        _check_input(model, name, spec[name], taken)
        for layer in getattr(model, "layers", ()):
            try:
                looks_up = isinstance(layer, _TABLES) and layer.input is taken
            except (AttributeError, ValueError):  # Keras: no input yet, or several
                continue
            if looks_up:
                remedy = (
                    f"Give the table {layer.name!r} of {model.name!r} more rows, or number the "
                    "values from 0 on in the data."
                )
                check_range(source, name, layer.input_dim, f"Feature {name!r}", remedy)


def _taken(
    model: keras.Model, spec: Mapping[str, Any], input_name: str, others: Collection[str]
) -> Iterator[tuple[str, Any]]:
    """Yields the names of the features and the inputs of the model that take them."""
    inputs = getattr(model, "inputs", None) or ()
    if (names := names_of(model)) is not None:
        yield from ((name, model.input[name]) for name in names)
    elif len(inputs) < 2:
        found = inputs_of(model, spec, input_name, others)
        yield from ((n, one) for one in inputs for n, given in spec.items() if given is found)


def _check_input(model: keras.Model, name: str, spec: tf.TensorSpec, taken: Any) -> None:
    if spec.dtype == tf.string and taken.dtype != "string":
        raise DataError(
            f"Feature {name!r} of the data is text, but the model {model.name!r} takes numbers. "
            "Convert the text to numbers in the data, or set input_name to another feature."
        )
    if spec.dtype.is_floating and tf.as_dtype(taken.dtype).is_integer:
        raise DataError(
            f"Feature {name!r} of the data must be integers, as the model {model.name!r} takes "
            f"them, got {spec.dtype.name}. Convert it in the data."
        )
    expected, given = tuple(taken.shape[1:]), tuple(spec.shape)
    # Keras adds a last dimension of 1, or removes it.
    if not fits(without_one(expected), without_one(given)):
        raise DataError(
            f"Feature {name!r} of the data has shape {given}, but the model {model.name!r} takes "
            f"{expected}. Set the size of the model's inputs to {given}, or reshape the feature."
        )


def fits(expected: Sequence[int | None], given: Sequence[int | None]) -> bool:
    """Returns whether a shape is as expected; None stands for any size."""
    pairs = zip(expected, given, strict=False)
    return len(expected) == len(given) and all(None in pair or pair[0] == pair[1] for pair in pairs)


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
    values = arrays_of(source).get(name)
    if values is None or end is None or not values.size:
        return
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= end:
        row = int(np.argmax(((values < 0) | (values >= end)).reshape(len(values), -1).any(axis=1)))
        raise DataError(
            f"{what} must be from 0 to {end - 1}, got {low} to {high} (first in example {row}). "
            f"{remedy}"
        )


def check_label(
    task: Any,
    spec: tf.TensorSpec,
    name: str,
    form: str,
    shape: Sequence[int | None] | None,
    remedy: str,
    *,
    integers: bool = False,
) -> None:
    """Raises DataError if a label is text or of another shape, or no integer where those are asked.

    Args:
      task: The task.
      spec: The label of one example.
      name: Name of the feature.
      form: The labels that the task needs, in words.
      shape: Shape that the label must have; None stands for any size, or for any shape.
      remedy: The last sentences of the error.
      integers: Whether it must be an integer.
    """
    is_kind = spec.dtype.is_integer if integers else spec.dtype != tf.string
    if not is_kind or not (shape is None or fits(shape, spec.shape)):
        raise DataError(
            f"Labels of {type(task).__name__} must be {form}, shape {_shape_of(shape)}, got "
            f"feature {name!r}: {'text' if spec.dtype == tf.string else spec.dtype.name} of shape "
            f"{_shape_of(spec.shape)}. {remedy}"
        )


def _shape_of(shape: Sequence[int | None] | None) -> str:
    """Writes the shape of an array of n examples."""
    sizes = ["n", *("any" if size is None else str(size) for size in shape or ())]
    return f"({sizes[0]},)" if len(sizes) == 1 else f"({', '.join(sizes)})"


def arrays_of(source: Any) -> Mapping[str, np.ndarray]:
    """Returns the features of a source that are arrays in memory."""
    return getattr(source, "arrays", None) or {}


def in_float32(outputs: tf.Tensor) -> tf.Tensor:
    """Returns a model's outputs in float32, or float64 if they are: losses need the precision."""
    return tf.cast(outputs, tf.float64 if outputs.dtype == tf.float64 else tf.float32)
