"""Image files in one folder for each class."""

import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from ddl.data.decoded import DecodedSource
from ddl.errors import ConfigError, DataError, check_no_text

_EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp")


class ImageFolder(DecodedSource):
    """Labelled image files, in one folder for each class: `train/cat/1.jpg`, `train/dog/7.png`.

    Files are JPEG, PNG or BMP, at any depth below the folder of their class; names that begin with
    a dot are left out. A warning counts all other files below the classes' folders, and links to
    folders below them, which are not followed. Each epoch is fully shuffled, and each worker reads
    only its own files.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        image_shape: Sequence[int],
        *,
        classes: Sequence[str] | None = None,
        resize: bool = False,
    ):
        """Lists the files; reads none of them.

        Args:
          folder: Folder that holds a folder for each class.
          image_shape: Height, width and channels (1, 3 or 4) of every example.
          classes: Names of the classes' folders, in the order of their labels. None takes all
            folders, sorted by name. Set it for training and evaluation data where one of them lacks
            a class: a class that is named here may have no folder, or an empty one.
          resize: Whether to resize images of another size, with anti-aliasing, regardless of their
            aspect ratio. Otherwise an image of another size is an error.

        Raises:
          ConfigError: If `image_shape` is not three positive numbers with 1, 3 or 4 channels, or
            `classes` is a text.
          DataError: If the folder is missing or holds no folders; if the folder of a class holds no
            images, and `classes` is None; if images lie beside the folders; if `classes` leaves
            out a folder or names one twice; or if there are no images.
        """
        check_no_text("ImageFolder.classes", classes)
        shape = tuple(image_shape)
        if len(shape) != 3 or min(shape) < 1 or shape[2] not in (1, 3, 4):
            raise ConfigError(
                "ImageFolder.image_shape must be height, width and 1, 3 or 4 channels, such as "
                f"(32, 32, 3), got {image_shape!r}."
            )
        self._shape, self._resize = shape, resize
        folder = os.fspath(folder)
        found = _class_folders(folder)
        self.classes = found if classes is None else list(classes)
        if len({*self.classes}) < len(self.classes):
            doubled = next(name for name in self.classes if self.classes.count(name) > 1)
            raise DataError(
                f"ImageFolder.classes must name each class once, got {doubled!r} several times. "
                "Remove all but one."
            )
        if unnamed := {*found} - {*self.classes}:
            raise DataError(
                f"ImageFolder.classes must name each folder in {folder}, but leaves out "
                f"{', '.join(sorted(unnamed))}. Its classes are {', '.join(self.classes)}. Add "
                "those left out, or move their folders elsewhere."
            )
        files: list[str] = []
        labels: list[int] = []
        left_out: list[str] = []
        for label, name in enumerate(self.classes):
            of_class, others = _images_below(os.path.join(folder, name))
            if not of_class and classes is None:
                raise DataError(
                    f"The folder of class {name!r}, {os.path.join(folder, name)}, holds no images "
                    f"({', '.join(_EXTENSIONS)}){_but(others)}. Put the images of the class there, "
                    "or remove the folder."
                )
            files += of_class
            labels += [label] * len(of_class)
            left_out += others
        if not files:
            raise DataError(
                f"The folders of {folder} hold no images ({', '.join(_EXTENSIONS)})"
                f"{_but(left_out)}. Put the images of each class into its folder."
            )
        if left_out:
            logging.warning(
                "%s files and linked folders below the classes of %s are left out: %s. ImageFolder "
                "reads %s, and follows no links to folders. Convert images of other formats, and "
                "put the folders themselves in place of links.",
                *(f"{len(left_out):,}", folder, _counted(left_out), ", ".join(_EXTENSIONS)),
            )
        self.files_read = files
        with tf.init_scope(), tf.device("CPU:0"):  # a graph captures eager tensors by reference
            self._files, self._labels = tf.constant(files), tf.constant(labels, tf.int64)

    def __len__(self) -> int:
        """Returns the number of files."""
        return len(self._labels)

    @property
    def element_spec(self) -> dict[str, tf.TensorSpec]:
        """Features "image", uint8 [height, width, channels], and "label", int64 []."""
        return {
            "image": tf.TensorSpec(self._shape, tf.uint8, "image"),
            "label": tf.TensorSpec([], tf.int64, "label"),
        }

    def example(self, index: tf.Tensor, seed: tf.Tensor) -> dict[str, tf.Tensor]:
        """See `DecodedSource`. Grey images in files of three channels become grey of three."""
        return self._example_of({"file": self._files[index], "label": self._labels[index]})

    def _read_ahead(self, batches: tf.data.Dataset) -> tf.data.Dataset:
        """Puts file and label in place of their number, unless a subclass reads by the number."""
        if type(self).example is not ImageFolder.example:
            return batches

        @tf.autograph.experimental.do_not_convert
        def named(batch: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            index, weight = batch["index"], batch["weight"]
            file, label = (tf.gather(each, index) for each in (self._files, self._labels))
            return {"file": file, "label": label, "weight": weight}

        return batches.map(named)

    def _example_of(self, row: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Reads the file of a row of `_read_ahead`."""
        if "file" not in row:
            return super()._example_of(row)
        file = row["file"]
        remedy = "Set image_shape to this size, or resize to True."
        image = decoded_image(tf.io.read_file(file), self._shape, file, remedy, self._resize)
        return {"image": image, "label": row["label"]}

    def describe(self, index: int) -> str:
        """See `DecodedSource`."""
        return self._files[index].numpy().decode()


def decoded_image(
    encoded: tf.Tensor, shape: Sequence[int], name: tf.Tensor, remedy: str, resize: bool = False
) -> tf.Tensor:
    """Decodes a JPEG, PNG or BMP image, uint8 [height, width, channels]. In a graph.

    Args:
      encoded: The file's bytes, string [].
      shape: Height, width and channels of the result.
      name: Name of the image in the error about another size, string [].
      remedy: Last sentence of this error.
      resize: Whether an image of another size is resized instead.
    """
    pixels = tf.io.decode_image(encoded, channels=shape[2], expand_animations=False)
    if resize:
        pixels = tf.image.resize(pixels, shape[:2], antialias=True)
        return tf.ensure_shape(tf.saturate_cast(tf.round(pixels), tf.uint8), shape)
    size = tf.shape(pixels)
    height, width = shape[:2]
    message: list[Any] = [
        *("The image ", name, " is ", size[0], "×", size[1]),
        f" pixels, expected {height}×{width}. {remedy}",
    ]
    if tf.executing_eagerly():  # in a graph, only a failing assertion joins the pieces
        message = [tf.strings.join([tf.strings.as_string(piece) for piece in message])]
    same = tf.reduce_all(size[:2] == [height, width])
    with tf.control_dependencies([tf.debugging.Assert(same, message)]):
        return tf.ensure_shape(tf.identity(pixels), shape)


def _class_folders(folder: str) -> list[str]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise DataError(
            f"The image folder {folder!r} could not be read: {error.strerror}. It must hold a "
            "folder of images for each class."
        ) from error
    entries = [entry for entry in entries if not entry.name.startswith(".")]
    if loose := [entry.name for entry in entries if _is_image(entry.name) and entry.is_file()]:
        raise DataError(
            f"The image folder {folder!r} must hold folders of images, one for each class, but "
            f"holds {len(loose)} images itself, such as {loose[0]}. Move them into the folder of "
            "their class."
        )
    classes = [entry.name for entry in entries if entry.is_dir()]
    if not classes:
        raise DataError(
            f"The image folder {folder!r} holds no folders. It must hold a folder of images for "
            "each class."
        )
    return classes


def _images_below(folder: str) -> tuple[list[str], list[str]]:
    """Returns the paths of the images, and those of other files and of linked folders."""
    found: list[str] = []
    others: list[str] = []
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        others += [path for name in folders if os.path.islink(path := os.path.join(parent, name))]
        for name in sorted(files):
            if not name.startswith("."):
                (found if _is_image(name) else others).append(os.path.join(parent, name))
    return found, others


def _but(left_out: Sequence[str]) -> str:
    return f", but {_counted(left_out)}" if left_out else ""


def _counted(left_out: Sequence[str]) -> str:
    """Returns how many files have which endings, and an example of each."""
    by_kind: dict[str, list[str]] = {}
    for path in left_out:
        ending = os.path.splitext(path)[1].lower()
        kind = "linked folders" if os.path.isdir(path) else ending or "files without an ending"
        by_kind.setdefault(kind, []).append(path)
    return ", ".join(
        f"{len(paths):,} {kind} (such as {paths[0]})" for kind, paths in sorted(by_kind.items())
    )


def _is_image(name: str) -> bool:
    return name.lower().endswith(_EXTENSIONS)
