"""The inputs of a model among the features of the data."""

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from ddl.errors import ConfigError, DataError
from ddl.layers import PartitionedEmbedding
from ddl.tasks.checks import (
    check_features,
    check_input,
    check_kind,
    check_range,
    fits,
    without_one,
)

_TABLES = (keras.layers.Embedding, PartitionedEmbedding)


def inputs_of(
    model: keras.Model, features: Mapping[str, Any], input_name: str, label_name: str
) -> Any:
    """Returns what a model takes: a tensor, or a dict for a model with inputs by name.

    Args:
      model: The model.
      features: The features of a batch, or their specs.
      input_name: Name of the feature for a model with one input; if there is no such feature, the
        model gets the only one.
      label_name: Name of the label, which is no input.

    Raises:
      ConfigError: If a model with one input has several features to choose from.
    """
    names = names_of(model)
    if names is not None:
        return {name: features[name] for name in names}
    inputs = getattr(model, "inputs", None)
    if inputs and len(inputs) > 1:
        return {k: v for k, v in features.items() if k not in (label_name, "weight")}
    if input_name in features:
        return features[input_name]
    others = {k: v for k, v in features.items() if k not in (label_name, "weight")}
    if len(others) == 1:
        return next(iter(others.values()))
    if inputs and not others:
        return features[input_name]  # the error names the feature
    if inputs and len(inputs) == 1:
        raise ConfigError(
            f"The model {model.name!r} has one input, but the data have the features "
            f"{', '.join(sorted(others))}. Set input_name of the task to one of them."
        )
    return others


def check_inputs(
    model: keras.Model,
    spec: Mapping[str, tf.TensorSpec],
    input_name: str,
    label_name: str,
    task: str,
) -> None:
    """Raises DataError if the data lack an input of the model, or one has another shape.

    Args:
      model: The model.
      spec: One example by feature name.
      input_name: As in `inputs_of`.
      label_name: As in `inputs_of`.
      task: Name of the task.
    """
    if names_of(model) is not None:
        check_named_inputs(model, spec, label_name)
    elif getattr(model, "inputs", None):
        check_features(spec, {"input_name": input_name}, task)
        check_input(model, input_name, spec[input_name])


def check_named_inputs(
    model: keras.Model, spec: Mapping[str, tf.TensorSpec], label_name: str
) -> None:
    """Raises DataError if the data lack an input of a model with inputs by name.

    Args:
      model: The model; one without such inputs fits.
      spec: One example by feature name.
      label_name: As in `inputs_of`.
    """
    names = names_of(model) or []
    for name in names:
        if name not in spec:
            others = ", ".join(sorted(spec.keys() - {label_name}))
            raise DataError(
                f"The model {model.name!r} takes the features {', '.join(names)}, but the data "
                f"have no {name!r}, only {others}. Rename it in the data."
            )
        expected, given = tuple(model.input[name].shape[1:]), tuple(spec[name].shape)
        check_kind(model, name, spec[name], model.input[name].dtype)
        # Keras adds a last dimension of 1, or removes it.
        if not fits(without_one(expected), without_one(given)):
            raise DataError(
                f"Feature {name!r} of the data has shape {given}, but the model {model.name!r} "
                f"takes {expected}. Change the model's sizes, or reshape the feature in the data."
            )


def check_looked_up(model: keras.Model, source: Any, input_name: str) -> None:
    """Raises DataError if integers that a model looks up in a table are beyond the table.

    On CPUs TensorFlow raises an error in the update that looks them up; on GPUs it does not.

    Args:
      model: The model; only the inputs that go straight into a layer for embeddings are checked.
      source: The source; only one that has its features as arrays is checked.
      input_name: As in `inputs_of`.
    """
    for layer in getattr(model, "layers", ()):
        try:
            taken = layer.input if isinstance(layer, _TABLES) else None
        except (AttributeError, ValueError):  # Keras: no input yet, or several
            continue
        if taken is None or not model.inputs:
            continue
        names = names_of(model)
        inputs = model.input if names is not None else {input_name: model.inputs[0]}
        for name in [name for name, each in inputs.items() if each is taken]:
            remedy = (
                f"Give the table {layer.name!r} of {model.name!r} more rows, or number the values "
                "from 0 on in the data."
            )
            check_range(source, name, layer.input_dim, f"Feature {name!r}", remedy)


def names_of(model: keras.Model) -> list[str] | None:
    """Returns the names of a functional model's inputs if they come as a dict."""
    functional = getattr(model, "inputs", None) and not isinstance(model, keras.Sequential)
    own = model.input if functional else None
    return list(own) if isinstance(own, Mapping) else None
