"""Labeled images: files in a folder for each class, keras.datasets, ImageNet (ILSVRC 2012).

Russakovsky et al. 2015, "ImageNet Large Scale Visual Recognition Challenge". Its TFRecord files are
named train-00000-of-01024 and validation-00000-of-00128. They hold tf.train.Example with
"image/encoded", a JPEG, and "image/class/label", from 1 to 1000.
"""

import fcntl
import glob
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from ddl.data.combine import subset
from ddl.data.readers.packaged import SPLITS, Split, digits, generator
from ddl.data.readers.records import tf_records
from ddl.data.source import Arrays, Source
from ddl.errors import ConfigError, DataError, check_choice

_ENDINGS = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".webp")

_FEATURES = {"image/encoded": ((), "string"), "image/class/label": ((), "int64")}

KerasDatasetName = Literal["mnist", "fashion_mnist", "cifar10"]
ImagesName = Literal["digits", "mnist", "fashion_mnist", "cifar10", "imagenet", "synthetic"]


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
    try:
        with open(Path(tempfile.gettempdir()) / f"ddl-{os.getuid()}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            parts = getattr(keras.datasets, name).load_data()
    except Exception as error:  # Keras raises a bare Exception where the network fails
        # Keras's message has the address before the dashes, and the reason after them.
        reason = str(error).rsplit(" -- ", maxsplit=1)[-1]
        folder = os.path.join(os.environ.get("KERAS_HOME", "~/.keras"), "datasets")
        raise DataError(
            f"{name} could not be read from Keras's cache or downloaded: {type(error).__name__}: "
            f"{reason}. Put what keras.datasets.{name} names into {folder}; remove "
            "damaged files."
        ) from error
    images, labels = parts[SPLITS.index(split)]
    image = images if images.ndim == 4 else images[..., np.newaxis]
    return image, labels.reshape(-1).astype(np.int64)


def imagenet(
    split: Split, data_dir: str | os.PathLike | None, *, image_shape: Sequence[int] = (224, 224, 3)
) -> Source:
    """Reads ImageNet. Random crops depend only on the run's seed, the epoch and the image.

    Each training image is cropped at random to 8% to 100% of its area at an aspect ratio of 3/4 to
    4/3 and mirrored with probability 1/2 (Szegedy et al. 2015, "Going deeper with convolutions";
    Goyal et al. 2017, section 5.1). Each test image is cropped to the central square whose side is
    224/256 of the image's shorter side. Both crops are resized to `image_shape`.

    Args:
      split: "train", or "test" for the validation set.
      data_dir: Folder of the files.
      image_shape: Height, width and 3 channels.

    Returns:
      Features "image", uint8 [*image_shape], and "label", int64 [], from 0 to 999.

    Raises:
      ConfigError: If `image_shape` does not have 3 channels.
      DataError: If files are missing; says which files to put where. Also as `tf_records`.
    """
    if len(image_shape) != 3 or image_shape[2] != 3:
        raise ConfigError(f"imagenet.image_shape must have 3 channels, got {tuple(image_shape)}.")
    check_choice("imagenet.split", split, SPLITS)
    kind = "train" if split == "train" else "validation"
    pattern = os.path.join(data_dir or "", f"{kind}-*-of-*")
    if not data_dir or not glob.glob(pattern):
        problem = f"no file matches {pattern}" if data_dir else "data_dir is not set"
        raise DataError(
            f"ImageNet was not found: {problem}. Put its TFRecord files, train-00000-of-01024 and "
            "on and validation-00000-of-00128 and on, into a folder, and set data_dir to it."
        )

    def decode(item: dict[str, tf.Tensor], seed: tf.Tensor) -> dict[str, tf.Tensor]:
        jpeg = item["image/encoded"]
        window = _random_window(jpeg, seed) if split == "train" else _central_window(jpeg)
        pixels = tf.image.decode_and_crop_jpeg(jpeg, window, channels=3)
        if split == "train":
            pixels = tf.image.stateless_random_flip_left_right(pixels, tf.add(seed, [1, 0]))
        return {"image": resized(pixels, image_shape), "label": item["image/class/label"] - 1}

    return tf_records(pattern, _FEATURES, decode)


def _random_window(jpeg: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Returns a random crop, or the whole image if none of ten draws fits into it."""
    begin, size, _ = tf.image.stateless_sample_distorted_bounding_box(
        tf.image.extract_jpeg_shape(jpeg),
        bounding_boxes=tf.zeros([1, 0, 4]),
        seed=seed,
        min_object_covered=0.0,
        aspect_ratio_range=(3 / 4, 4 / 3),
        area_range=(0.08, 1.0),
        max_attempts=10,
        use_image_if_no_bounding_boxes=True,
    )
    return tf.concat([begin[:2], size[:2]], axis=0)


def _central_window(jpeg: tf.Tensor) -> tf.Tensor:
    shape = tf.image.extract_jpeg_shape(jpeg)[:2]
    side = tf.cast(tf.round(tf.cast(tf.reduce_min(shape), tf.float32) * 224 / 256), tf.int32)
    return tf.concat([(shape - side) // 2, [side, side]], axis=0)


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
      ConfigError: If the name or split is unknown, or `data_dir` is given for others than imagenet.
      DataError: If the data are missing, have another shape or number of classes, or have fewer
        than `num_examples` examples.
    """
    check_choice("images.name", name, get_args(ImagesName))
    check_choice("images.split", split, SPLITS)
    shape = tuple(image_shape)
    if data_dir is not None and name != "imagenet":
        raise ConfigError(f"images.data_dir is for imagenet, got {data_dir!r} for {name}.")
    if name == "imagenet":
        if num_classes != 1000 or one_hot:
            raise ConfigError("imagenet has 1,000 classes, and takes no one_hot.")
        source = imagenet(split, data_dir, image_shape=shape)
        return source if num_examples is None else subset(source, num_examples)
    if name == "synthetic":
        image, label = _synthetic(split, shape, num_classes, num_examples, seed)
    else:
        image, label = digits(split) if name == "digits" else keras_dataset(name, split)
        if (*image.shape[1:], 10) != (*shape, num_classes):
            raise DataError(
                f"{name} has 10 classes and images of shape {image.shape[1:]}, but "
                f"images.num_classes is {num_classes} and images.image_shape {shape}."
            )
    if one_hot:
        label = np.eye(num_classes, dtype=np.float32)[label]
    source = Source({"image": image, "label": label})
    return source if num_examples is None else subset(source, num_examples)


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


def image_folder(
    directory: str | os.PathLike[str], size: Sequence[int], *, channels: int = 3
) -> Source:
    """Reads labelled images from one folder for each class: train/cat/1.jpg, train/dog/7.png.

    Files are JPEG, PNG, BMP, WebP or GIF (first frame), at any depth below the folder of their
    class. A warning counts files of other names; those that begin with a dot are left out without a
    word. All images are resized to one size, with anti-aliasing, regardless of their aspect ratio.
    Training and evaluation data need the same classes.

        source = ddl.data.image_folder("flowers/train", (224, 224))
        source.items.class_names  # ("daisy", "rose", …): the names of labels 0, 1, …

    Args:
      directory: Folder that holds a folder for each class.
      size: Height and width of the images.
      channels: 1 for gray (JPEG and PNG alone), 3 for RGB, 4 for RGBA (PNG and BMP alone).

    Returns:
      Features "image", uint8 [height, width, channels], and "label", int64 [].

    Raises:
      ConfigError: If `size` or `channels` is another.
      DataError: If the folder is missing or holds no folders, a class has no images, or images lie
        beside the folders.
    """
    if np.shape(size) != (2,) or min(size) < 1 or channels not in (1, 3, 4):
        given = f"got size {size!r} and {channels!r} channels"
        raise ConfigError(f"image_folder needs a height, a width, and 1, 3 or 4 channels, {given}.")
    items, shape = ImageFiles(directory), (*size, channels)

    def decode(item: dict[str, tf.Tensor], seed: tf.Tensor) -> dict[str, tf.Tensor]:
        content = tf.io.read_file(item["file"])
        pixels = tf.io.decode_image(content, channels, expand_animations=False)
        return {"image": resized(pixels, shape), "label": item["label"]}

    return Source(items, decode, files=items.files)


def resized(pixels: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
    """Resizes an image with anti-aliasing to uint8 [height, width, channels]."""

    def other() -> tf.Tensor:
        found = tf.image.resize(pixels, shape[:2], antialias=True)
        return tf.saturate_cast(tf.round(found), tf.uint8)

    is_same = tf.reduce_all(tf.equal(tf.shape(pixels)[:2], shape[:2]))
    return tf.ensure_shape(tf.cond(is_same, lambda: pixels, other), shape)


class ImageFiles(Arrays):
    """Paths and labels of image files: items of a `Source`.

    Attributes:
      class_names: Name of each label.
      files: Paths, class by class.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        """Lists the files; reads none of them.

        Args:
          directory: See `image_folder`.

        Raises:
          DataError: See `image_folder`.
        """
        folder, self.files = os.fspath(directory), []
        self.class_names = _class_folders(folder)
        labels: list[int] = []
        others: list[str] = []
        for label, name in enumerate(self.class_names):
            pattern = os.path.join(glob.escape(os.path.join(folder, name)), "**")
            files = sorted(filter(os.path.isfile, glob.glob(pattern, recursive=True)))
            images = [file for file in files if file.lower().endswith(_ENDINGS)]
            others += sorted({*files} - {*images})
            if not images:
                raise DataError(
                    f"{os.path.join(folder, name)} must hold images ({', '.join(_ENDINGS)}), but "
                    f"holds {len(files):,} other files. Add some, or remove the folder."
                )
            self.files += images
            labels += [label] * len(images)
        super().__init__({"file": self.files, "label": labels})
        if others:
            logging.warning("%s: %d files left out, such as %s.", folder, len(others), others[0])

    def describe(self, index: int) -> str:
        """Returns the path of a file, for messages."""
        return self.files[index]


def _class_folders(folder: str) -> list[str]:
    try:
        entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
    except OSError as error:
        raise DataError(f"{error}. image_folder needs a folder for each class.") from error
    loose = [entry.name for entry in entries if entry.name.lower().endswith(_ENDINGS)]
    classes = sorted(entry.name for entry in entries if entry.is_dir())
    if loose or not classes:
        held = f"{len(loose):,} images, such as {loose[0]}" if loose else "no folders"
        raise DataError(f"{folder} must hold a folder of images for each class, but holds {held}.")
    return classes
