"""Labelled image data sets by name."""

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from ddl.data.arrays import ArraySource
from ddl.data.imagenet import imagenet
from ddl.data.keras_datasets import load_keras_dataset
from ddl.data.packaged.digits import load_digits
from ddl.data.source import Source
from ddl.data.synthetic import synthetic_images
from ddl.errors import ConfigError, DataError, did_you_mean, either

ImagesName = Literal["digits", "mnist", "fashion_mnist", "cifar10", "imagenet", "synthetic"]
Split = Literal["train", "test"]

_CLASSES = {"digits": 10, "mnist": 10, "fashion_mnist": 10, "cifar10": 10, "imagenet": 1000}
_SYNTHETIC_EXAMPLES = {"train": 8192, "test": 2048}


def images(
    name: ImagesName,
    split: Split,
    *,
    image_shape: Sequence[int],
    num_classes: int,
    num_examples: int | None = None,
    one_hot: bool = False,
    seed: int = 0,
    data_dir: str | None = None,
) -> Source:
    """Loads labelled images.

    Args:
      name: `digits` is packaged with ddl; `mnist`, `fashion_mnist` and `cifar10` come from the
        Keras cache or the network; `imagenet` is read from `data_dir` (see `ddl.data.imagenet`);
        `synthetic` is generated.
      split: "train" or "test".
      image_shape: Height, width and channels. Synthetic images get this shape; others must have it,
        except that ImageNet is resized to any height and width.
      num_classes: Number of classes. Synthetic labels get this many; others must have it.
      num_examples: Number of examples to use, from the first on. None uses all; for synthetic
        images, 8,192 for training and 2,048 for the test.
      one_hot: Whether a label is float32 [num_classes] instead of int64 [].
      seed: Seed of synthetic images.
      data_dir: Directory of the ImageNet files. Must be None for `digits`, `mnist`, `fashion_mnist`
        and `cifar10`, which are not read from there.

    Returns:
      Features "image", uint8 [height, width, channels], and "label". All but ImageNet are an
      `ArraySource`.

    Raises:
      ConfigError: If the name or split is unknown, a number is out of range, or `data_dir` is given
        for data that are not read from there.
      DataError: If the data are missing, have another shape or number of classes, or have fewer
        than `num_examples` examples; or if `one_hot` is set for ImageNet.
    """
    _check_one_of("name", name, get_args(ImagesName))
    _check_one_of("split", split, get_args(Split))
    if num_examples is not None and num_examples < 1:
        raise ConfigError(
            f"images.num_examples must be at least 1, or None for all, got {num_examples}."
        )
    shape = tuple(image_shape)
    if name == "imagenet":
        if num_classes != _CLASSES[name] or one_hot:
            raise DataError(
                f"ImageNet has {_CLASSES[name]:,} classes and integer labels, got num_classes = "
                f"{num_classes} and one_hot = {one_hot}. Set num_classes to {_CLASSES[name]} and "
                "one_hot to False."
            )
        return imagenet(split, data_dir, image_shape=shape, num_examples=num_examples)
    if name == "synthetic":
        pixels, labels = synthetic_images(
            split,
            image_shape=shape,
            num_classes=num_classes,
            num_examples=num_examples or _SYNTHETIC_EXAMPLES[split],
            seed=seed,
        )
    else:
        if data_dir is not None:
            raise ConfigError(
                f"images.data_dir is {data_dir!r}, but only imagenet is read from a directory; "
                f"{name} comes from {'ddl itself' if name == 'digits' else 'the Keras cache'}. "
                "Remove images.data_dir."
            )
        pixels, labels = load_digits(split) if name == "digits" else load_keras_dataset(name, split)
        if pixels.shape[1:] != shape:
            raise DataError(
                f"The images of {name} have shape {pixels.shape[1:]}, but image_shape is {shape}. "
                f"Set image_shape to {pixels.shape[1:]}."
            )
        if num_classes != _CLASSES[name]:
            raise DataError(
                f"{name} has {_CLASSES[name]} classes, but num_classes is {num_classes}. Set "
                f"num_classes to {_CLASSES[name]}."
            )
        if num_examples is not None and num_examples > len(pixels):
            raise DataError(
                f"images.num_examples must be at most {len(pixels):,}, the number of {split} "
                f"images of {name}, got {num_examples:,}."
            )
    pixels, labels = pixels[:num_examples], labels[:num_examples]
    if one_hot:
        return ArraySource(image=pixels, label=np.eye(num_classes, dtype=np.float32)[labels])
    return ArraySource(image=pixels, label=labels)


def _check_one_of(what: str, given: str, known: Sequence[str]) -> None:
    if given not in known:
        raise ConfigError(
            f"images.{what} must be {either(known)}, got {given!r}.{did_you_mean(given, known)}"
        )
