"""Convolutional networks for images: small ones, and residual ones."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import keras
import numpy as np

from ddl.errors import ConfigError, check_choice
from ddl.models.perceptrons import hidden_layers, scaled


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
    input_scale: float | None = None,
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
      batch_normalization: Whether batch normalization follows each convolution.
      padding: Padding of the convolutions, "valid" or "same".
      input_scale: Factor applied to raw inputs. None: 1/255 for integers, such as bytes,
        and 1 for floats, as a Trainer's training data have them; without a Trainer 1/255.

    Returns:
      A model from [batch, *input_shape], any dtype, to logits [batch, num_classes].
    """
    inputs = keras.Input(tuple(input_shape), name="image")
    x = scaled(inputs, input_scale)
    for block, convolutions in enumerate(blocks, start=1):
        for number, filters in enumerate(convolutions, start=1):
            name = f"{block}_{number}"
            x = keras.layers.Conv2D(filters, 3, padding=padding, name=f"conv_{name}")(x)
            if batch_normalization:
                x = keras.layers.BatchNormalization(name=f"norm_{name}")(x)
            x = keras.layers.ReLU(name=f"relu_{name}")(x)
        x = keras.layers.MaxPooling2D(name=f"pool_{block}")(x)
        if block_dropout:
            x = keras.layers.Dropout(block_dropout, name=f"block_dropout_{block}")(x)
    x = keras.layers.Flatten(name="flatten")(x)
    x = hidden_layers(x, hidden_units, hidden_dropout, "hidden_dropout")
    return keras.Model(inputs, keras.layers.Dense(num_classes, name="logits")(x), name="cnn")


# Mean and standard deviation of ImageNet's red, green and blue, on the byte scale 0 to 255.
_IMAGENET_MEAN = (123.675, 116.28, 103.53)
_IMAGENET_DEVIATION = (58.395, 57.12, 57.375)


def resnet(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    blocks: Sequence[int] = (3, 4, 6, 3),
    width: int = 64,
    bottleneck: bool = True,
    stem: Literal["large", "small"] = "large",
    zero_last_gamma: bool = True,
    kernel_regularizer: keras.regularizers.Regularizer | None = None,
    input_mean: float | Sequence[float] = _IMAGENET_MEAN,
    input_deviation: float | Sequence[float] = _IMAGENET_DEVIATION,
) -> keras.Model:
    """Builds a residual network: He et al. 2015, "Deep residual learning".

    The defaults are ResNet-50 version 1.5: a bottleneck has its stride in the 3×3 convolution.
    Initialization and batch normalization (momentum 0.9, ε 1e-5) follow Goyal et al. 2017,
    "Accurate, Large Minibatch SGD", section 5.1. The paper normalizes over the 32 images of a GPU;
    this model normalizes over the microbatch of all replicas. Microbatches of 32 images over all
    replicas match the paper (ACCUMULATION_STEPS).

    Args:
      input_shape: Shape of one image: height, width, channels. Height and width are free.
      num_classes: Number of logits.
      blocks: Number of residual blocks in each stage. Each stage halves height and width and
        doubles the filters of the previous stage.
      width: Filters of the first stage; a bottleneck outputs four times as many.
      bottleneck: True for blocks of 1×1, 3×3 and 1×1 convolutions; False for two 3×3 convolutions.
      stem: "large" is a 7×7 convolution and pooling, which reduce height and width to a fourth.
        "small" is a 3×3 convolution at full resolution, for images below 64 pixels.
      zero_last_gamma: Whether to initialize the last γ of each block to 0, so that the residual
        branch starts at zero.
      kernel_regularizer: Regularizer of the convolutions and the dense layer. A weight decay of
        0.0001 in the gradient, as in papers, is an L2 of 0.00005: L2's gradient has a factor 2.
      input_mean: Subtracted from raw inputs; one number, or one for each channel.
      input_deviation: Divisor of the centred inputs; one number, or one for each channel.

    Returns:
      A model from [batch, *input_shape], any dtype, to logits [batch, num_classes].

    Raises:
      ConfigError: If `stem` is unknown, `blocks` is empty or has an entry below 1, or mean and
        deviation do not have one value for each channel.
    """
    check_choice("resnet.stem", stem, ("large", "small"))
    if not blocks or min(blocks) < 1:
        raise ConfigError(
            f"resnet.blocks must have at least 1 block in each stage, got {tuple(blocks)}."
        )
    mean, deviation = np.asarray(input_mean), np.asarray(input_deviation)
    if {mean.shape, deviation.shape} - {(), (input_shape[-1],)}:
        raise ConfigError(
            "resnet.input_mean and resnet.input_deviation must be one number, or one for each of "
            f"the {input_shape[-1]} channels, got {input_mean} and {input_deviation}."
        )

    build = _Layers(kernel_regularizer, zero_last_gamma)
    inputs = keras.Input(tuple(input_shape), name="image")
    offset = (-mean / deviation).tolist()
    x = keras.layers.Rescaling((1 / deviation).tolist(), offset, name="scale")(inputs)
    size, stride = (7, 2) if stem == "large" else (3, 1)
    x = build.normalized(build.convolution(x, width, size, stride, "stem"), "stem", relu=True)
    if stem == "large":
        x = keras.layers.ZeroPadding2D(1, name="stem_pool_pad")(x)
        x = keras.layers.MaxPooling2D(3, 2, name="stem_pool")(x)  # zero padding is safe after ReLU
    for stage, count in enumerate(blocks):
        for number in range(1, count + 1):
            stride = 2 if stage > 0 and number == 1 else 1
            name = f"stage{stage + 1}_block{number}"
            x = build.block(x, width * 2**stage, stride, bottleneck, name)
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    small = keras.initializers.RandomNormal(stddev=0.01)
    logits = keras.layers.Dense(
        num_classes, kernel_initializer=small, kernel_regularizer=kernel_regularizer, name="logits"
    )(x)
    return keras.Model(inputs, logits, name="resnet")


@dataclasses.dataclass(frozen=True)
class _Layers:
    """Layer factory with shared initializers and regularizer."""

    kernel_regularizer: keras.regularizers.Regularizer | None
    zero_last_gamma: bool

    def convolution(
        self, x: keras.KerasTensor, filters: int, size: int, stride: int, name: str
    ) -> keras.KerasTensor:
        """Adds a convolution with symmetric padding, as in the papers.

        With strides, Keras's "same" pads asymmetrically.
        """
        if size > 1:
            x = keras.layers.ZeroPadding2D(size // 2, name=f"{name}_pad")(x)
        initializer = keras.initializers.VarianceScaling(2.0, "fan_out", "untruncated_normal")
        return keras.layers.Conv2D(
            filters,
            size,
            strides=stride,
            use_bias=False,
            kernel_initializer=initializer,
            kernel_regularizer=self.kernel_regularizer,
            name=f"{name}_conv",
        )(x)

    def normalized(
        self, x: keras.KerasTensor, name: str, relu: bool = False, last: bool = False
    ) -> keras.KerasTensor:
        gamma = "zeros" if last and self.zero_last_gamma else "ones"
        x = keras.layers.BatchNormalization(
            momentum=0.9, epsilon=1e-5, gamma_initializer=gamma, name=f"{name}_norm"
        )(x)
        return keras.layers.ReLU(name=f"{name}_relu")(x) if relu else x

    def block(
        self, x: keras.KerasTensor, filters: int, stride: int, bottleneck: bool, name: str
    ) -> keras.KerasTensor:
        """Adds a residual block x + f(x), with a projection of x where the shape changes."""
        filters_out = 4 * filters if bottleneck else filters
        shortcut = x
        if stride > 1 or x.shape[-1] != filters_out:
            shortcut = self.convolution(x, filters_out, 1, stride, f"{name}_shortcut")
            shortcut = self.normalized(shortcut, f"{name}_shortcut")
        # (filters, kernel size, stride) of each convolution.
        convolutions = [(filters, 3, stride), (filters, 3, 1)]
        if bottleneck:
            convolutions = [(filters, 1, 1), (filters, 3, stride), (filters_out, 1, 1)]
        for number, (each, size, step) in enumerate(convolutions, start=1):
            last = number == len(convolutions)
            x = self.convolution(x, each, size, step, f"{name}_{number}")
            x = self.normalized(x, f"{name}_{number}", relu=not last, last=last)
        x = keras.layers.Add(name=f"{name}_add")([shortcut, x])
        return keras.layers.ReLU(name=f"{name}_relu")(x)
