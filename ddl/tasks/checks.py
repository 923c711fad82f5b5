"""Inputs and outputs of a task's model, and checks that data fit them."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from ddl.errors import ConfigError, DataError
from ddl.tasks.parts import layers_of

ENTRY_WEIGHT = "entry_weight"
"""The feature of weights [batch, …] of more than one dimension, as of time steps."""


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
    if not inputs:
        return left
    raise ConfigError(
        f"The model {model.name!r} has one input, but the data have the features "
        f"{', '.join(sorted(left))}. Set input_name of the task to one of them."
    )


def names_of(model: keras.Model) -> list[str] | None:
    """Returns the names of a functional model's inputs if they come as a dict."""
    functional = getattr(model, "inputs", None) and not isinstance(model, keras.Sequential)
    own = model.input if functional else None
    return list(own) if isinstance(own, Mapping) else None


def check_data(task: Any, sources: Mapping[str, Any]) -> None:
    """Checks training data by the task's `check`, and sets scales of inputs that follow the data.

    The data decide once, and no call of the model: augmentations make floats of bytes.

    Args:
      task: The task.
      sources: The sources by name; "" if there is only one, which the task can check.

    Raises:
      ConfigError: If features of integers and others may be the input of a model whose scale
        follows the data, or none may.
    """
    if "" in sources and hasattr(task, "check"):
        task.check(sources[""])
    others = {*getattr(task, "_not_inputs", ("label",)), "weight", ENTRY_WEIGHT}
    for layer in layers_of(task):
        if getattr(layer, "scales_integers_only", False):
            specs = [one for source in sources.values() for one in source.element_spec.items()]
            found = {n: one.dtype for n, one in specs if n not in others and fits(one, layer.input)}
            if len(kinds := {dtype.is_integer for dtype in found.values()}) != 1:
                raise ConfigError(
                    "Set the model's input_scale, 1 for floats or 1/255 for bytes: features like "
                    f"its input, {layer.input.shape[1:]}, must be integers or floats, got {found}."
                )
            layer.scale = 1 / 255 if kinds == {True} else 1.0


def check_inputs(
    model: keras.Model, source: Any, input_name: str, others: Collection[str], task: str
) -> str:
    """Checks that the data have each input of the model, in its shape and kind.

    Integers beyond the rows of a table are found where an input goes straight into a layer for
    embeddings and the source has its features as arrays: TensorFlow raises an error in the update
    that looks them up, but not on GPUs.

    Args:
      model: The model; one whose inputs are not known yet fits.
      source: The source.
      input_name: As in `inputs_of`.
      others: As in `inputs_of`.
      task: Name of the task.

    Returns:
      Name of the only feature that can be an input; if there are several, `input_name`.

    Raises:
      DataError: If the data lack an input of the model, or one has another shape or kind.
      ConfigError: If a model with one input has several features to choose from.
    """
    spec, names = source.element_spec, names_of(model) or []
    left = sorted(spec.keys() - {*others, "weight", ENTRY_WEIGHT})
    if not left or not spec.keys() >= {*names}:
        raise DataError(
            f"The model {model.name!r} of {task} needs {', '.join(names) or 'an input'}, but the "
            f"data have only the features {', '.join(left) or ', '.join(sorted(spec))}. Rename "
            "them, or add the input of the model to the data."
        )
    inputs: Sequence[Any] = getattr(model, "inputs", None) or ()
    taken = {name: model.input[name] for name in names}
    if not names and len(inputs) == 1:
        given = inputs_of(model, spec, input_name, others)
        taken = {name: inputs[0] for name, one in spec.items() if one is given}
    for name, tensor in taken.items():
        _check_input(model, name, spec[name], tensor)
        for layer in model.layers:
            inputs = [x for node in layer._inbound_nodes for x in node.input_tensors]
            if isinstance(layer, keras.layers.Embedding) and any(x is tensor for x in inputs):
                remedy = f"Give the table {layer.name!r} of {model.name!r} more rows."
                check_range(source, name, layer.input_dim, f"Feature {name!r}", remedy)
    return left[0] if len(left) == 1 else input_name


def _check_input(model: keras.Model, name: str, spec: tf.TensorSpec, taken: Any) -> None:
    expected, given = tuple(taken.shape[1:]), tuple(spec.shape)
    wanted, remedy = "", "Convert it in the data, or set input_name to another feature."
    if spec.dtype == tf.string and taken.dtype != "string":
        wanted, got = "numbers", "is text"
    elif spec.dtype.is_floating and tf.as_dtype(taken.dtype).is_integer:
        wanted, got = "must be integers", f"is {spec.dtype.name}"
    elif not fits(spec, taken):
        wanted, got = str(expected), f"has shape {given}"
        remedy = f"Set the size of the model's inputs to {given}, or reshape the feature."
    if wanted:
        raise DataError(
            f"The input (feature {name!r}) {got}, but the model {model.name!r} takes {wanted}. "
            f"{remedy}"
        )


def fits(spec: tf.TensorSpec, taken: Any) -> bool:
    """Returns whether a feature of one example has the shape of a model's input, as for Keras."""
    # A sequence may have one step, so the shapes as they are count, too.
    expected, given = taken.shape[1:], spec.shape
    return any(f(expected).is_compatible_with(f(given)) for f in (tf.TensorShape, without_one))


def check_not_rounded(model: keras.Model, given: Any) -> None:
    """Raises ConfigError if a model converts integers to float16 or bfloat16.

    Keras builds a Sequential without an Input for the dtype in which its first layer computes.
    """
    pairs = zip(getattr(model, "inputs", None) or (), tf.nest.flatten(given), strict=False)
    for taken, one in pairs:
        dtype = tf.as_dtype(one.dtype)
        if dtype.is_integer and dtype.size > 1 and taken.dtype in ("float16", "bfloat16"):
            raise ConfigError(
                f"The model {model.name!r} converts its {dtype.name} input to {taken.dtype}, "
                "which rounds large integers. Begin it with keras.Input(…, dtype='int64')."
            )


def without_one(shape: tuple[int | None, ...]) -> tf.TensorShape:
    """Returns a shape without a last dimension of 1."""
    return tf.TensorShape(shape[:-1] if tuple(shape)[-1:] == (1,) else shape)


def check_model(model: Any, task: str) -> None:
    """Raises ConfigError if `model` is no Keras model."""
    if not isinstance(model, keras.Model):
        raise ConfigError(
            f"{task}.model must be a Keras model, got {model!r:.80}. Pass a keras.Model, or in a "
            "config a reference with parentheses, such as @cnn()."
        )
    for name in ("train_step", "compute_loss", "compute_metrics"):
        if getattr(type(model), name) is not getattr(keras.Model, name):
            raise ConfigError(
                f"{task} does not call the {name} of {model.name!r}. Write it as `per_example` or "
                "`step` of a task (docs/own-step.md), and remove it from the model."
            )


def warn_of_activation(model: keras.Model, takes_logits: bool) -> None:
    """Warns if a model seems to end in probabilities for a loss of logits, or the reverse."""
    ends = getattr(model, "operations", model.layers) or [None]  # operations of keras.ops too
    activation, known = getattr(ends[-1], "activation", None), keras.activations
    is_softmax = isinstance(ends[-1], keras.layers.Softmax) or activation is known.softmax
    if takes_logits and (is_softmax or activation is known.sigmoid):
        kind = "softmax" if is_softmax else "sigmoid"
        found, remedy = f"ends in a {kind}, but the loss takes logits", f"Remove the {kind}."
    elif not takes_logits and getattr(model, "inputs", None) and activation is known.linear:
        found = "ends without an activation, but the loss takes probabilities"
        remedy = "Add a softmax or a sigmoid, or pass a loss with from_logits=True."
    else:
        return
    logging.warning("The model %r %s: the result will be poor. %s", model.name, found, remedy)


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
    low, high = values.min(), values.max()
    if not (low >= 0 and high < end):  # or not a number
        row = int(np.argmin(((values >= 0) & (values < end)).reshape(len(values), -1).all(axis=1)))
        raise DataError(
            f"{what} must be from 0 to {end - 1}, got {low} to {high} (first in example {row}). "
            f"{remedy}"
        )


def check_label(
    task: Any, spec: tf.TensorSpec, name: str, form: str, shape: Sequence[int | None] | None
) -> None:
    """Raises DataError if a feature beside the inputs is text, or of another shape or kind.

    Args:
      task: The task; its `_remedy` ends the error.
      spec: The feature of one example.
      name: Its name.
      form: The form that the task needs, in words; "integers …" must be integers.
      shape: Shape that it must have; None stands for any size, or for any shape.
    """
    is_kind = spec.dtype.is_integer if form.startswith("integer") else spec.dtype != tf.string
    if not is_kind or not (shape is None or spec.shape.is_compatible_with(shape)):
        wanted, given = (str(("n", *x)).replace("'", "") for x in (shape or (), spec.shape))
        kind, remedy = "text" if spec.dtype == tf.string else spec.dtype.name, task._remedy
        if not is_kind and spec.dtype.is_floating:
            remedy = "Cast whole numbers: .astype('int32')."
        elif shape is not None and spec.shape.is_compatible_with([*shape, 1]):
            remedy = "Remove the last axis: label[..., 0]."
        raise DataError(
            f"Labels of {type(task).__name__} must be {form}, shape {wanted}, got feature "
            f"{name!r}: {kind} of shape {given}. {remedy}"
        )


def in_float32(outputs: tf.Tensor) -> tf.Tensor:
    """Returns a model's outputs in float32, or float64 if they are: losses need the precision."""
    return tf.cast(outputs, tf.float64 if outputs.dtype == tf.float64 else tf.float32)
