"""Multilayer perceptrons."""

from collections.abc import Sequence

import keras


def mlp(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    hidden_units: Sequence[int] = (128,),
    dropout: float = 0.0,
    input_scale: float = 1 / 255,
) -> keras.Model:
    """Builds a multilayer perceptron: flatten, dense layers with ReLU, logits.

    Args:
      input_shape: Shape of one input, such as (28, 28, 1).
      num_classes: Number of logits.
      hidden_units: Width of each hidden layer.
      dropout: Dropout rate after each hidden layer.
      input_scale: Factor applied to raw inputs; 1/255 maps bytes to [0, 1].

    Returns:
      A model from [batch, *input_shape], any dtype, to logits [batch, num_classes].
    """
    inputs = keras.Input(tuple(input_shape), name="image")
    x = keras.layers.Rescaling(input_scale, name="scale")(inputs)
    x = keras.layers.Flatten(name="flatten")(x)
    for number, units in enumerate(hidden_units, start=1):
        x = keras.layers.Dense(units, activation="relu", name=f"hidden_{number}")(x)
        if dropout:
            x = keras.layers.Dropout(dropout, name=f"dropout_{number}")(x)
    return keras.Model(inputs, keras.layers.Dense(num_classes, name="logits")(x), name="mlp")
