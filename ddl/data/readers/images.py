"""Labeled images by name: MNIST and the like through keras.datasets, digits, synthetic ones."""

import contextlib
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import keras
import numpy as np

from ddl.data.readers.imagenet import imagenet
from ddl.data.readers.packaged import SPLITS, Split, digits, generator
from ddl.data.source import Source
from ddl.errors import ConfigError, DataError, check_choice

KerasDatasetName = Literal["mnist", "fashion_mnist", "cifar10"]
ImagesName = Literal["digits", "mnist", "fashion_mnist", "cifar10", "imagenet", "synthetic"]

_CACHED = {
    "mnist": "mnist.npz",
    "fashion_mnist": "fashion-mnist/{train,t10k}-{images-idx3,labels-idx1}-ubyte.gz",
    "cifar10": "cifar-10-batches-py-target_archive (cifar-10-python.tar.gz under this name)",
}
"""The files that keras.datasets reads, by their paths in the folder `datasets` of its cache."""


def keras_dataset(name: KerasDatasetName, split: Split) -> tuple[np.ndarray, np.ndarray]:
    """Loads MNIST, Fashion-MNIST or CIFAR-10 from Keras's cache, or else from the network.

    Processes of one machine take turns, so that one downloads.

    Args:
      name: "mnist", "fashion_mnist" or "cifar10".
      split: "train" or "test".

    Returns:
      Images, uint8 [n, height, width, channels], and labels, int64 [n].

    Raises:
      ConfigError: If `name` or `split` is another.
      DataError: If the files are damaged, or neither in the cache nor to be had from the network.
        The message names the files and where to put them.
    """
    check_choice("keras_dataset.name", name, get_args(KerasDatasetName))
    check_choice("keras_dataset.split", split, SPLITS)
    cache = _cache()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / "ddl.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            parts = getattr(keras.datasets, name).load_data()
    except Exception as error:  # Keras raises a bare Exception where the network fails
        # Keras's message has the address before the dashes, and the reason after them.
        reason = str(error).rsplit(" -- ", maxsplit=1)[-1]
        raise DataError(
            f"{name} could not be read from Keras's cache or downloaded: {type(error).__name__}: "
            f"{reason}. Remove damaged files, and put what keras.datasets.{name} names at "
            f"{cache}/datasets/{_CACHED[name]}."
        ) from error
    images, labels = parts[SPLITS.index(split)]
    image = images if images.ndim == 4 else images[..., np.newaxis]
    return image, labels.reshape(-1).astype(np.int64)


def _cache() -> Path:
    """Returns the folder in which `keras.utils.get_file` looks, after making it."""
    home = Path(os.environ.get("KERAS_HOME", "~/.keras")).expanduser()
    with contextlib.suppress(OSError):
        home.mkdir(parents=True, exist_ok=True)
    return home if os.access(home, os.W_OK) else Path("/tmp/.keras")


def images(
    name: ImagesName,
    split: Split,
    *,
    image_shape: Sequence[int],
    num_classes: int,
    num_examples: int | None = None,
    data_dir: str | None = None,
    one_hot: bool = False,
    seed: int = 0,
) -> Source:
    """Loads labeled images by name, so that a config names its data by a macro.

    Args:
      name: `digits` is packaged with ddl; `mnist`, `fashion_mnist` and `cifar10` come from
        `keras_dataset`, `imagenet` from `ddl.data.imagenet`; `synthetic` are noisy copies of one
        random image a class, which both splits share: easy to learn, not trivial.
      split: "train" or "test".
      image_shape: Height, width and channels. Synthetic images get this shape; others must have it.
      num_classes: Number of classes. Synthetic labels get this many; others must have it.
      num_examples: Number of examples to use, from the first on. None uses all; of synthetic
        images there are then 8,192 for training and 2,048 for the test.
      data_dir: Folder of the records of `imagenet`; None for all others.
      one_hot: Whether a label is float32 [num_classes] instead of int64 [].
      seed: Seed of synthetic images.

    Returns:
      Features "image", uint8 [height, width, channels], and "label".

    Raises:
      ConfigError: If the name or split is unknown, or a number is out of range.
      DataError: If the data are missing, have another shape or number of classes, or have fewer
        than `num_examples` examples.
    """
    check_choice("images.name", name, get_args(ImagesName))
    check_choice("images.split", split, SPLITS)
    shape = tuple(image_shape)
    if min(num_classes, *shape) < 1 or (num_examples is not None and num_examples < 1):
        raise ConfigError(
            "images.image_shape, num_classes and num_examples must be at least 1, got "
            f"{shape}, {num_classes} and {num_examples}."
        )
    if (name == "imagenet") != (data_dir is not None) and name != "synthetic":
        raise ConfigError(
            f"images.data_dir is the folder of ImageNet's records, got {data_dir!r} with "
            f"images.name = {name!r}. Set both, or neither."
        )
    if name == "imagenet":
        if num_classes != 1000 or num_examples is not None or one_hot:
            raise ConfigError(
                "imagenet has 1,000 classes, and takes neither num_examples nor one_hot, got "
                f"{num_classes}, {num_examples} and {one_hot}."
            )
        return imagenet(split, data_dir, image_shape=shape)
    if name == "synthetic":
        image, label = _synthetic(split, shape, num_classes, num_examples, seed)
    else:
        image, label = digits(split) if name == "digits" else keras_dataset(name, split)
        if (*image.shape[1:], 10) != (*shape, num_classes):
            raise DataError(
                f"{name} has 10 classes and images of shape {image.shape[1:]}, but "
                f"images.num_classes is {num_classes} and images.image_shape {shape}. Set them to "
                "those of the data."
            )
        if num_examples is not None and num_examples > len(image):
            raise DataError(
                f"images.num_examples must be at most {len(image):,}, the number of {split} "
                f"images of {name}, got {num_examples:,}."
            )
        image, label = image[:num_examples], label[:num_examples]
    if one_hot:
        label = np.eye(num_classes, dtype=np.float32)[label]
    return Source({"image": image, "label": label})


def _synthetic(
    split: Split, shape: tuple[int, ...], num_classes: int, count: int | None, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns noisy copies of one random image a class, uint8 [n, …], and labels, int64 [n]."""
    count = count or (8192 if split == "train" else 2048)
    originals = generator(seed, 4).random((num_classes, *shape), np.float32)
    random = generator(seed, SPLITS.index(split))
    label = random.integers(0, num_classes, count)
    image = np.empty((count, *shape), np.uint8)
    for row, number in enumerate(label):  # one by one, since the noise has four times their size
        noise = random.standard_normal(shape, np.float32)
        image[row] = np.clip(originals[number] + 0.25 * noise, 0, 1) * 255
    return image, label
