"""ImageNet (ILSVRC 2012) from TFRecord files in the usual format, with the usual crops.

Russakovsky et al. 2015, "ImageNet Large Scale Visual Recognition Challenge". The files are named
train-00000-of-01024 and validation-00000-of-00128. They hold tf.train.Example with "image/encoded",
a JPEG, and "image/class/label", from 1 to 1000.
"""

import os
from collections.abc import Callable, Sequence
from typing import Literal

import tensorflow as tf

from ddl.data.records import RecordSource
from ddl.data.storage.file_sets import incomplete
from ddl.errors import ConfigError, DataError

_FILES = {"train": "train", "test": "validation"}
_EXAMPLES = {"train": 1_281_167, "test": 50_000}


def imagenet(
    split: Literal["train", "test"],
    data_dir: str | os.PathLike[str] | None,
    *,
    image_shape: Sequence[int] = (224, 224, 3),
    num_examples: int | None = None,
) -> RecordSource:
    """Builds a source of ImageNet whose random crops depend only on run seed, epoch and example.

    Each training image is cropped at random to 8% to 100% of its area at an aspect ratio of 3/4 to
    4/3 and mirrored with probability 1/2 (Szegedy et al. 2015, "Going deeper with convolutions";
    Goyal et al. 2017, section 5.1). Each test image is cropped to the central square whose side is
    224/256 of the image's shorter side. Both crops are resized to `image_shape`.

    Args:
      split: "train", or "test" for the validation set.
      data_dir: Directory of the files; any path that tf.io.gfile reads.
      image_shape: Height, width and 3 channels.
      num_examples: Number of examples to use, from the first on. None uses all: 1,281,167 for
        training, 50,000 for the test.

    Returns:
      Features "image", uint8 [*image_shape], and "label", int64 [], from 0 to 999.

    Raises:
      ConfigError: If `image_shape` does not have 3 channels.
      DataError: If files are missing; the message says which files to put where. Also if
        `RecordSource` cannot read them or they hold too few records.
    """
    height, width, channels = image_shape
    if channels != 3:
        raise ConfigError(
            f"ImageNet images have 3 channels, but image_shape has {channels}. Set the last value "
            "of image_shape to 3."
        )
    files = _files(split, data_dir)
    size = (height, width)
    count = num_examples or _EXAMPLES[split]
    if split == "test":
        return RecordSource(files, lambda record, seed: _example(record, _middle, size), count)
    return RecordSource(
        files,
        lambda record, seed: _example(record, lambda jpeg: _drawn_crop(jpeg, seed), size),
        count,
    )


def _files(split: str, data_dir: str | os.PathLike[str] | None) -> list[str]:
    kind = _FILES[split]
    pattern = os.path.join(data_dir or "", f"{kind}-*-of-*")
    files = sorted(tf.io.gfile.glob(pattern)) if data_dir else []
    problem = incomplete(files, pattern)
    if files and not problem:
        return files
    problem = (
        f"{pattern} matches {len(files)} files, which are not a complete set: {problem}"
        if files
        else f"no file matches {pattern}"
        if data_dir
        else "data_dir is not set"
    )
    raise DataError(
        f"ImageNet was not found: {problem}. Put the TFRecord files of ILSVRC 2012 into one "
        "directory, train-00000-of-01024 to train-01023-of-01024 and validation-00000-of-00128 to "
        "validation-00127-of-00128, with the features image/encoded and image/class/label, and "
        "set data_dir to this directory. The images can be downloaded from image-net.org after "
        "registration."
    )


def _example(
    record: tf.Tensor, cropped: Callable[[tf.Tensor], tf.Tensor], size: tuple[int, int]
) -> dict[str, tf.Tensor]:
    features = tf.io.parse_single_example(
        record,
        {
            "image/encoded": tf.io.FixedLenFeature([], tf.string),
            "image/class/label": tf.io.FixedLenFeature([], tf.int64),
        },
    )
    pixels = tf.image.resize(cropped(features["image/encoded"]), size, antialias=True)
    pixels = tf.saturate_cast(tf.round(pixels), tf.uint8)
    return {
        "image": tf.ensure_shape(pixels, [*size, 3]),
        "label": features["image/class/label"] - 1,
    }


def _drawn_crop(jpeg: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
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
    window = tf.concat([begin[:2], size[:2]], axis=0)
    pixels = tf.image.decode_and_crop_jpeg(jpeg, window, channels=3)
    return tf.image.stateless_random_flip_left_right(pixels, seed + tf.constant([1, 0], tf.int64))


def _middle(jpeg: tf.Tensor) -> tf.Tensor:
    shape = tf.image.extract_jpeg_shape(jpeg)[:2]
    side = tf.cast(tf.round(tf.cast(tf.reduce_min(shape), tf.float32) * 224 / 256), tf.int32)
    window = tf.concat([(shape - side) // 2, [side, side]], axis=0)
    return tf.image.decode_and_crop_jpeg(jpeg, window, channels=3)
