"""Wide residual networks for small images."""

from collections.abc import Sequence

import keras

from ddl import layers
from ddl.errors import ConfigError


def wide_resnet(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    depth: int = 28,
    widening: int = 10,
    dropout: float = 0.0,
    input_mean: float = 127.5,
    input_deviation: float = 63.75,
) -> keras.Model:
    """Builds a wide residual network: Zagoruyko and Komodakis 2016, "Wide Residual Networks".

    The defaults are WRN-28-10. Batch normalization (momentum 0.9, ε 1e-5) is over the microbatch of
    all replicas.

    Args:
      input_shape: Shape of one image: height, width, channels. Height and width are free.
      num_classes: Number of logits.
      depth: Number of layers, 6·n + 4 for n blocks in each of three stages.
      widening: Factor of the filters 16, 32 and 64 of the stages.
      dropout: Dropout rate between the convolutions of a block.
      input_mean: Subtracted from raw inputs.
      input_deviation: Divisor of the centred inputs.

    Returns:
      A model from [batch, *input_shape], any dtype, to logits [batch, num_classes].

    Raises:
      ConfigError: If `depth` is not 6·n + 4 for an n of at least 1, or `widening` is below 1.
    """
    count, rest = divmod(depth - 4, 6)
    if rest or count < 1:
        raise ConfigError(
            f"wide_resnet.depth must be 6·n + 4, such as 16, 22, 28 or 40, got {depth}."
        )
    if widening < 1:
        raise ConfigError(f"wide_resnet.widening must be at least 1, got {widening}.")
    inputs = keras.Input(tuple(input_shape), name="image")
    x = keras.layers.Rescaling(1 / input_deviation, -input_mean / input_deviation, name="scale")(
        inputs
    )
    x = _convolution(x, 16, 3, 1, "stem")
    for stage, filters in enumerate((16, 32, 64)):
        for number in range(1, count + 1):
            stride = 2 if stage and number == 1 else 1
            name = f"stage{stage + 1}_block{number}"
            x = _block(x, filters * widening, stride, dropout, name)
    x = _activated(x, "last")
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(
        inputs, keras.layers.Dense(num_classes, name="logits")(x), name="wide_resnet"
    )


def _block(
    x: keras.KerasTensor, filters: int, stride: int, dropout: float, name: str
) -> keras.KerasTensor:
    """Adds a block: twice normalization, ReLU and convolution, and a shortcut."""
    branch = _activated(x, f"{name}_1")
    shortcut = x
    if stride > 1 or x.shape[-1] != filters:
        shortcut = _convolution(branch, filters, 1, stride, f"{name}_shortcut")
    branch = _activated(_convolution(branch, filters, 3, stride, f"{name}_1"), f"{name}_2")
    if dropout:
        branch = layers.Dropout(dropout, name=f"{name}_dropout")(branch)
    branch = _convolution(branch, filters, 3, 1, f"{name}_2")
    return keras.layers.Add(name=f"{name}_add")([shortcut, branch])


def _activated(x: keras.KerasTensor, name: str) -> keras.KerasTensor:
    x = keras.layers.BatchNormalization(
        momentum=0.9, epsilon=1e-5, synchronized=True, name=f"{name}_norm"
    )(x)
    return keras.layers.ReLU(name=f"{name}_relu")(x)


def _convolution(
    x: keras.KerasTensor, filters: int, size: int, stride: int, name: str
) -> keras.KerasTensor:
    if size > 1:  # with strides, Keras's "same" pads asymmetrically
        x = keras.layers.ZeroPadding2D(size // 2, name=f"{name}_pad")(x)
    return keras.layers.Conv2D(
        filters,
        size,
        strides=stride,
        use_bias=False,
        kernel_initializer="he_normal",
        name=f"{name}_conv",
    )(x)
