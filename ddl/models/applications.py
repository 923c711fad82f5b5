"""Models of keras.applications by name."""

import inspect
from collections.abc import Sequence
from typing import Any

import keras

from ddl.errors import ConfigError, did_you_mean
from ddl.models.weights import load_weights


def keras_application(
    name: str,
    input_shape: Sequence[int],
    num_classes: int,
    *,
    weights: str | None = None,
    synchronized: bool = True,
    input_scale: float | None = None,
    **arguments: Any,
) -> keras.Model:
    """Builds a model of keras.applications for logits.

    Args:
      name: Name of the function, such as "EfficientNetV2B0".
      input_shape: Shape of one image: height, width, channels.
      num_classes: Number of logits.
      weights: Path of a local file of weights for this number of classes; None initializes them.
      synchronized: Whether batch normalization is over the microbatch of all replicas, and dropout
        draws by position. In Keras's models both depend on the number of replicas.
      input_scale: Factor applied to raw inputs ahead of the model; None applies none. Some of
        Keras's models scale bytes themselves (`include_preprocessing`), others do not.
      **arguments: Further arguments of the function.

    Returns:
      A model from [batch, *input_shape], any dtype, to logits [batch, num_classes].

    Raises:
      ConfigError: If there is no such function, it does not take an argument, or the weights are
        not those of a file, or those of another model.
    """
    functions = {
        key: each for key, each in vars(keras.applications).items() if inspect.isfunction(each)
    }
    if name not in functions:
        raise ConfigError(
            f"keras_application.name must be one of {', '.join(sorted(functions))}, got {name!r}."
            f"{did_you_mean(name, list(functions))}"
        )
    if weights == "imagenet":
        raise ConfigError(
            "keras_application.weights must be the path of a local file, got 'imagenet', which "
            "Keras downloads. Download the file and pass its path."
        )
    taken = inspect.signature(functions[name]).parameters
    unknown = sorted({*arguments} - {*taken})
    if unknown:
        raise ConfigError(
            f"keras.applications.{name} takes no {', '.join(unknown)}. Its arguments are "
            f"{', '.join(taken)}."
        )
    if "classifier_activation" in taken:
        arguments = {"classifier_activation": None, **arguments}
    model = functions[name](
        weights=None, input_shape=tuple(input_shape), classes=num_classes, **arguments
    )
    if weights is not None:
        load_weights(model, weights, "keras_application.weights")
    if synchronized:
        values = model.get_weights()
        model = keras.models.clone_model(model, clone_function=_same_on_all_replicas)
        model.set_weights(values)
    if input_scale is None:
        return model
    inputs = keras.Input(tuple(input_shape), name="image")
    scaled = keras.layers.Rescaling(input_scale, name="scale")(inputs)
    return keras.Model(inputs, model(scaled), name=model.name)


def _same_on_all_replicas(layer: keras.layers.Layer) -> keras.layers.Layer:
    """Returns a copy of a layer that computes the same on any number of replicas."""
    config = layer.get_config()
    if isinstance(layer, keras.layers.BatchNormalization):
        config |= {"synchronized": True}
    return type(layer).from_config(config)
