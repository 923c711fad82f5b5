"""Arrays in `.npy` and `.npz` files."""

import functools
import os
import zipfile
import zlib
from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from ddl.data.arrays import ArraySource
from ddl.data.random_access import RandomAccessSource
from ddl.data.source import Source
from ddl.data.storage.shared_memory import shared_tensor
from ddl.errors import ConfigError, DataError


def numpy_files(
    files: str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]],
    *,
    names: Mapping[str, str] | None = None,
    in_memory: bool | None = None,
) -> Source:
    """Builds a source of the arrays of an `.npz` file, or of one `.npy` file for each feature.

    Args:
      files: An `.npz` file, or a mapping from the name of a feature to a `.npy` file with an array
        [n, …]: {"image": "images.npy", "label": "labels.npy"}.
      names: For an `.npz` file: names of its arrays by the name of the feature, such as
        {"image": "x_train", "label": "y_train"}. None takes all arrays under their own names.
      in_memory: For `.npy` files: whether to read them into memory at once. Otherwise they are
        memory-mapped, so that a batch reads only its own rows. None reads them if they have at
        most 1 GiB in sum. An `.npz` file is always read.

    Returns:
      An `ArraySource` or a `RandomAccessSource`.

    Raises:
      ConfigError: If `names` is given for `.npy` files, or `in_memory` is False for an `.npz` file.
      DataError: If a file is missing, damaged or holds Python objects; if an array is missing; if
        lengths differ; or if the arrays fail the checks of `ArraySource`.
    """
    if not isinstance(files, Mapping):
        if in_memory is False:
            raise ConfigError(
                "numpy_files.in_memory is False, but the arrays of an .npz file cannot be "
                "memory-mapped. Save each with numpy.save and pass a mapping from feature to file."
            )
        return ArraySource(_of_archive(os.fspath(files), names))
    if names is not None:
        raise ConfigError(
            "numpy_files.names is for an .npz file. For .npy files, the keys of numpy_files.files "
            "are the names of the features."
        )
    arrays = {name: _mapped(os.fspath(file)) for name, file in files.items()}
    if in_memory is None:
        in_memory = sum(array.nbytes for array in arrays.values()) <= 1 << 30
    if in_memory:
        return ArraySource({name: np.array(array) for name, array in arrays.items()})
    lengths = {name: len(array) for name, array in arrays.items()}
    if len({*lengths.values()}) != 1:
        raise DataError(
            "All .npy files must have the same number of examples, got "
            f"{', '.join(f'{name}: {length:,}' for name, length in lengths.items())}. Save arrays "
            "whose first dimensions are equal."
        )
    source = _MappedArrays(arrays)
    source.files_read = [os.fspath(files[name]) for name in sorted(files)]
    return source


class _MappedArrays(RandomAccessSource):
    """Rows of mapped arrays, which TensorFlow gathers from the files without Python."""

    maps_files = True

    def __init__(self, arrays: Mapping[str, np.ndarray]):
        super().__init__(
            lambda indices: {name: array[indices] for name, array in arrays.items()},
            len(next(iter(arrays.values()))),
        )
        self._arrays = arrays

    @functools.cached_property
    def _tensors(self) -> dict[str, tf.Tensor] | None:
        """The arrays in the memory of the files; None if TensorFlow cannot read one there."""
        tensors = {}
        for name, array in self._arrays.items():
            tensor = shared_tensor(array)
            if tensor is None:
                return None
            tensors[name] = tensor
        return tensors

    @tf.autograph.experimental.do_not_convert
    def gather(self, indices: tf.Tensor) -> dict[str, tf.Tensor]:
        tensors = self._tensors
        if tensors is None:
            return super().gather(indices)
        rows = {name: tf.gather(tensor, indices) for name, tensor in tensors.items()}
        floating = [each for each in rows.values() if each.dtype.is_floating]
        finite = [tf.reduce_all(tf.math.is_finite(each)) for each in floating]
        if not finite:
            return rows
        look_up = super().gather  # raises the error that names the example
        return tf.cond(tf.reduce_all(finite), lambda: rows, lambda: look_up(indices))


def _of_archive(file: str, names: Mapping[str, str] | None) -> dict[str, np.ndarray]:
    if not file.endswith(".npz"):
        raise DataError(
            "numpy_files.files must be an .npz file or a mapping from feature to .npy file, got "
            f"{file!r}. Pass a .npy file as a mapping, such as {{'image': {file!r}}}."
        )
    try:
        with np.load(file, allow_pickle=False) as archive:
            names = names or {name: name for name in archive.files}
            if absent := [name for name in names.values() if name not in archive.files]:
                raise DataError(
                    f"{file} has no array {absent[0]!r}; it holds {', '.join(archive.files)}. "
                    "Correct numpy_files.names."
                )
            return {feature: archive[name] for feature, name in names.items()}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(_unreadable(file, ".npz", "savez", error)) from error


def _mapped(file: str) -> np.ndarray:
    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(_unreadable(file, ".npy", "save", error)) from error
    if not isinstance(array, np.ndarray) or array.ndim == 0:
        given = "one number" if isinstance(array, np.ndarray) else "an archive of several arrays"
        raise DataError(
            f"{file} must hold one array [n, …], with an example in each row, got {given}. Write "
            "it with numpy.save(file, array), or pass the path of an .npz file itself."
        )
    return array


def _unreadable(file: str, ending: str, writer: str, error: Exception) -> str:
    return (
        f"{file} could not be read as a file {ending} of numbers or text: {error}. Correct "
        f"numpy_files.files, or write the file again with numpy.{writer}."
    )
