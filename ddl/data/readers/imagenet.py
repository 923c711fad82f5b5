"""ImageNet (ILSVRC 2012) from TFRecord files in the usual format, with the usual crops.

Russakovsky et al. 2015, "ImageNet Large Scale Visual Recognition Challenge". The files are named
train-00000-of-01024 and validation-00000-of-00128. They hold tf.train.Example with "image/encoded",
a JPEG, and "image/class/label", from 1 to 1000.
"""

import glob
import os
from collections.abc import Sequence
from typing import Literal

import tensorflow as tf

from ddl.data.readers.image_folder import resized
from ddl.data.readers.records import tf_records
from ddl.data.source import Source
from ddl.errors import ConfigError, DataError, check_choice

_FEATURES = {
    "image/encoded": tf.io.FixedLenFeature([], tf.string),
    "image/class/label": tf.io.FixedLenFeature([], tf.int64),
}


def imagenet(
    split: Literal["train", "test"],
    data_dir: str | os.PathLike[str] | None,
    *,
    image_shape: Sequence[int] = (224, 224, 3),
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
        raise ConfigError(
            f"imagenet.image_shape must be height, width and 3 channels, got {tuple(image_shape)}."
        )
    check_choice("imagenet.split", split, ("train", "test"))
    kind = "train" if split == "train" else "validation"
    pattern = os.path.join(data_dir or "", f"{kind}-*-of-*")
    if not data_dir or not glob.glob(pattern):
        problem = f"no file matches {pattern}" if data_dir else "data_dir is not set"
        raise DataError(
            f"ImageNet was not found: {problem}. Put the TFRecord files of ILSVRC 2012 into one "
            "folder, train-00000-of-01024 and on and validation-00000-of-00128 and on, with the "
            "features image/encoded and image/class/label, and set data_dir to it. image-net.org "
            "offers the images after registration."
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
