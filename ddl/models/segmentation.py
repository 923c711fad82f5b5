"""A U-Net, which gives each pixel logits."""

from collections.abc import Sequence

import keras

from ddl.errors import ConfigError


def unet(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    widths: Sequence[int] = (64, 128, 256, 512, 1024),
    normalized: bool = True,
    input_scale: float = 1 / 255,
) -> keras.Model:
    """Builds a U-Net: Ronneberger et al. 2015, "U-Net: Convolutional Networks for Biomedical ...".

    The convolutions are padded, so that the logits have the size of the image, and each is followed
    by batch normalization over the microbatch of all replicas; the paper has neither.

    Args:
      input_shape: Shape of one image: height, width, channels.
      num_classes: Number of logits of each pixel.
      widths: Filters of each level; each level halves height and width of the one above.
      normalized: Whether to normalize.
      input_scale: Factor applied to raw inputs; 1/255 maps bytes to [0, 1].

    Returns:
      A model from [batch, *input_shape], any dtype, to logits [batch, height, width, num_classes].

    Raises:
      ConfigError: If there are fewer than two levels, or height or width cannot be halved that
        often.
    """
    factor = 2 ** (len(widths) - 1)
    if len(widths) < 2:
        raise ConfigError(f"unet.widths must have at least 2 levels, got {tuple(widths)}.")
    if any(size is None or size % factor for size in input_shape[:2]):
        raise ConfigError(
            f"unet halves height and width {len(widths) - 1} times, so that they must be multiples "
            f"of {factor}, got {tuple(input_shape[:2])}. Give unet.widths fewer levels, or pad the "
            "images."
        )
    inputs = keras.Input(tuple(input_shape), name="image")
    x = keras.layers.Rescaling(input_scale, name="scale")(inputs)
    skipped = []
    for level, width in enumerate(widths, start=1):
        if level > 1:
            x = keras.layers.MaxPooling2D(2, name=f"down_{level}")(x)
        x = _convolutions(x, width, normalized, f"encode_{level}")
        skipped.append(x)
    for level, width in reversed(list(enumerate(widths[:-1], start=1))):
        x = keras.layers.Conv2DTranspose(width, 2, 2, name=f"up_{level}")(x)
        x = keras.layers.Concatenate(name=f"join_{level}")([skipped[level - 1], x])
        x = _convolutions(x, width, normalized, f"decode_{level}")
    return keras.Model(inputs, keras.layers.Conv2D(num_classes, 1, name="logits")(x), name="unet")


def _convolutions(
    x: keras.KerasTensor, width: int, normalized: bool, name: str
) -> keras.KerasTensor:
    """Adds two convolutions of 3×3."""
    for number in (1, 2):
        x = keras.layers.Conv2D(
            width,
            3,
            padding="same",
            use_bias=not normalized,
            kernel_initializer="he_normal",
            name=f"{name}_{number}_conv",
        )(x)
        if normalized:
            x = keras.layers.BatchNormalization(
                momentum=0.9, synchronized=True, name=f"{name}_{number}_norm"
            )(x)
        x = keras.layers.ReLU(name=f"{name}_{number}_relu")(x)
    return x
