"""Small convolutional networks for images."""

from collections.abc import Sequence

import keras


def cnn(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    blocks: Sequence[Sequence[int]] = ((32, 64),),
    hidden_units: Sequence[int] = (128,),
    block_dropout: float = 0.0,
    hidden_dropout: float = 0.0,
    batch_normalization: bool = False,
    padding: str = "valid",
    input_scale: float = 1 / 255,
) -> keras.Model:
    """Builds a small convolutional network for images.

    Blocks of 3×3 convolutions, each ended by 2×2 max pooling, then dense layers, then logits.

    Args:
      input_shape: Shape of one image: height, width, channels.
      num_classes: Number of logits.
      blocks: For each block, the number of filters of each of its convolutions.
      hidden_units: Width of each dense layer after the blocks.
      block_dropout: Dropout rate after each block.
      hidden_dropout: Dropout rate after each hidden dense layer.
      batch_normalization: Whether synchronized batch normalization (over all replicas) follows each
        convolution.
      padding: Padding of the convolutions, "valid" or "same".
      input_scale: Factor applied to raw inputs; 1/255 maps bytes to [0, 1].

    Returns:
      A model from [batch, *input_shape], any dtype, to logits [batch, num_classes].
    """
    inputs = keras.Input(tuple(input_shape), name="image")
    x = keras.layers.Rescaling(input_scale, name="scale")(inputs)
    for block, convolutions in enumerate(blocks, start=1):
        for number, filters in enumerate(convolutions, start=1):
            name = f"{block}_{number}"
            activation = None if batch_normalization else "relu"
            x = keras.layers.Conv2D(
                filters, 3, padding=padding, activation=activation, name=f"conv_{name}"
            )(x)
            if batch_normalization:
                x = keras.layers.BatchNormalization(synchronized=True, name=f"norm_{name}")(x)
                x = keras.layers.ReLU(name=f"relu_{name}")(x)
        x = keras.layers.MaxPooling2D(name=f"pool_{block}")(x)
        if block_dropout:
            x = keras.layers.Dropout(block_dropout, name=f"block_dropout_{block}")(x)
    x = keras.layers.Flatten(name="flatten")(x)
    for number, units in enumerate(hidden_units, start=1):
        x = keras.layers.Dense(units, activation="relu", name=f"hidden_{number}")(x)
        if hidden_dropout:
            x = keras.layers.Dropout(hidden_dropout, name=f"hidden_dropout_{number}")(x)
    return keras.Model(inputs, keras.layers.Dense(num_classes, name="logits")(x), name="cnn")
