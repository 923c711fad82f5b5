"""Image files in one folder for each class."""

import functools
import glob
import os
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from absl import logging

from ddl.data.source import Arrays, Decode, Example, Source
from ddl.errors import ConfigError, DataError

_ENDINGS = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".webp")


def image_folder(
    directory: str | os.PathLike[str],
    size: Sequence[int],
    *,
    channels: int = 3,
    decode: Decode | None = None,
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
      decode: Makes an example of {"image": uint8 [height, width, channels], "label": int64 []} and
        a seed, as in `Source`.

    Returns:
      Features "image" and "label", as `decode` gets them.

    Raises:
      ConfigError: If `size` or `channels` is out of range.
      DataError: If the folder is missing or holds no folders, a class has no images, or images lie
        beside the folders.
    """
    shape = (*size, channels)
    if len(shape) != 3 or min(shape) < 1 or channels not in (1, 3, 4):
        raise ConfigError(
            f"image_folder needs size, height and width, and 1, 3 or 4 channels, got {shape}."
        )
    items = ImageFiles(directory)

    def decoded(item: dict[str, tf.Tensor], seed: tf.Tensor) -> Example:
        content = tf.io.read_file(item["file"])
        pixels = tf.io.decode_image(content, channels, expand_animations=False)
        example = {"image": resized(pixels, shape), "label": item["label"]}
        return example if decode is None else decode(example, seed)

    # Messages then name the user's function.
    return Source(items, functools.wraps(decode)(decoded) if decode else decoded, files=items.files)


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
        super().__init__(
            {"file": np.array(self.files, object), "label": np.array(labels, np.int64)}
        )
        if others:
            logging.warning("%s: %d files left out, such as %s.", folder, len(others), others[0])

    def describe(self, index: int) -> str:
        """Returns the path of a file, for messages."""
        return self.files[index]


def _class_folders(folder: str) -> list[str]:
    try:
        entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
    except OSError as error:
        raise DataError(
            f"{error}. image_folder needs a folder of images for each class."
        ) from error
    loose = [entry.name for entry in entries if entry.name.lower().endswith(_ENDINGS)]
    classes = sorted(entry.name for entry in entries if entry.is_dir())
    if loose or not classes:
        held = f"{len(loose):,} images, such as {loose[0]}" if loose else "no folders"
        raise DataError(f"{folder} must hold a folder of images for each class, but holds {held}.")
    return classes
