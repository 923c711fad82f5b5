"""ImageNet (ILSVRC 2012) from TFRecord files in their usual format, with the usual crops.

Russakovsky et al. 2015, "ImageNet Large Scale Visual Recognition Challenge". Files are named
train-00000-of-01024 and validation-00000-of-00128, and hold tf.train.Example with "image/encoded",
a JPEG, and "image/class/label", from 1 to 1000.
"""

import os
from collections.abc import Callable, Sequence
from typing import Literal

import tensorflow as tf

from ddl.data.records import RecordSource
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
    """Reads ImageNet, with crops that follow from the run's seed and the epoch.

    For training each image is cropped at random to 8% to 100% of its area at an aspect ratio of 3/4
    to 4/3 and mirrored half of the time (Szegedy et al. 2015, "Going deeper with convolutions";
    Goyal et al. 2017, section 5.1); for the test it is the middle that 224 of 256 pixels are. Both
    are then resized.

    Args:
      split: Which part; "test" is the validation set.
      data_dir: Holds the files; anything that tf.io.gfile reads.
      image_shape: Height, width and 3 channels.
      num_examples: Take the first so many; None: all, 1,281,167 and 50,000.

    Returns:
      Features "image", uint8 [*image_shape], and "label", int64 [], from 0 to 999.

    Raises:
      ConfigError: If images are to have another number of channels.
      DataError: If files are missing, with what to put where.
    """
    height, width, channels = image_shape
    if channels != 3:
        raise ConfigError(f"ImageNet has 3 channels, not {channels}: set image_shape to that")
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
    totals = {file.rpartition("-of-")[2] for file in files}
    if len(totals) == 1 and len(files) == int(totals.pop()):
        return files
    problem = (
        f"{pattern} finds {len(files)} files, which are not a whole set"
        if files
        else f"there is no {pattern}"
        if data_dir
        else "it is not said where (data_dir)"
    )
    raise DataError(
        f"ImageNet is not there: {problem}. Put the TFRecord files of ILSVRC 2012 into one folder, "
        "train-00000-of-01024 to train-01023-of-01024 and validation-00000-of-00128 to "
        "validation-00127-of-00128, with the features image/encoded and image/class/label, and "
        "give it as data_dir. image-net.org has the pictures, for which one has to register."
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
    """A crop as `imagenet` says, or the whole image if ten draws fit none into it."""
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
