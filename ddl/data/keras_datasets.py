"""MNIST, Fashion-MNIST and CIFAR-10 through keras.datasets, from the Keras cache or the network."""

import contextlib
import dataclasses
import fcntl
import gzip
import hashlib
import os
import pickle
import socket
import stat
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import keras
import numpy as np
from keras.src.backend import config as keras_config

from ddl.errors import DataError

KerasDatasetName = Literal["mnist", "fashion_mnist", "cifar10"]

_NETWORK_TIMEOUT_SECONDS = 10.0
_UNREADABLE = (
    *(OSError, EOFError, ValueError, KeyError, TypeError, IndexError),
    *(zlib.error, zipfile.BadZipFile, tarfile.TarError, pickle.UnpicklingError),
)


@dataclasses.dataclass(frozen=True)
class _Files:
    """Files that keras.datasets reads for one data set.

    Attributes:
      folder: Folder inside the cache.
      sha256: Checksums that Keras verifies, by file name; None where Keras verifies nothing.
      load: Keras's loader.
      hint: For the error message, the file's name at its source if it differs.
    """

    folder: str
    sha256: dict[str, str | None]
    load: Callable[[], Any]
    hint: str = ""


_DATASETS: dict[KerasDatasetName, _Files] = {
    "mnist": _Files(
        "datasets",
        {"mnist.npz": "731c5ac602752760c8e48fbffcf8c3b850d9dc2a2aedcf2cc48468fc17b673d1"},
        keras.datasets.mnist.load_data,
    ),
    "fashion_mnist": _Files(
        "datasets/fashion-mnist",
        {
            "train-labels-idx1-ubyte.gz": None,
            "train-images-idx3-ubyte.gz": None,
            "t10k-labels-idx1-ubyte.gz": None,
            "t10k-images-idx3-ubyte.gz": None,
        },
        keras.datasets.fashion_mnist.load_data,
    ),
    "cifar10": _Files(
        "datasets",
        {
            "cifar-10-batches-py-target_archive": (
                "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"
            )
        },
        keras.datasets.cifar10.load_data,
        " (cifar-10-python.tar.gz under that name)",
    ),
}


def load_keras_dataset(
    name: KerasDatasetName, split: Literal["train", "test"]
) -> tuple[np.ndarray, np.ndarray]:
    """Loads one split of a data set; a file lock serializes the processes of a user on one machine.

    Args:
      name: "mnist", "fashion_mnist" or "cifar10".
      split: "train" or "test".

    Returns:
      Images, uint8 [n, height, width, channels], and labels, int64 [n].

    Raises:
      DataError: If a file is damaged, or is neither in the cache nor available from the network.
        The message names files, folder and checksums.
    """
    files = _DATASETS[name]
    folder = _cache() / files.folder
    with _turn(folder):
        missing = [file for file in files.sha256 if not (folder / file).exists()]
        for file in files.sha256:
            if file not in missing:
                _check(name, folder / file, files.sha256[file])
        try:
            parts = files.load() if not missing else _download(files, folder, missing)
        except Exception as error:
            # Keras wraps network errors into a bare Exception. If every file was present, an error
            # that is not about file contents is a bug and keeps its traceback.
            if not missing and not isinstance(error, _UNREADABLE):
                raise
            raise _unusable(name, files, folder, missing, error) from error
    images, labels = parts[0 if split == "train" else 1]
    labels = np.asarray(labels).reshape(-1).astype(np.int64)
    images = np.ascontiguousarray(images if images.ndim == 4 else images[..., np.newaxis])
    if len(images) != len(labels) or images.dtype != np.uint8:
        raise DataError(
            f"{name} in {folder} must hold uint8 images and as many labels, but for {split} it "
            f"holds {len(images):,} images of {images.dtype} and {len(labels):,} labels. Remove "
            "the files to download them again."
        )
    return images, labels


def _cache() -> Path:
    # The folder that get_file uses. Keras reads KERAS_HOME only at import; the environment may have
    # changed since.
    home = os.path.expanduser(keras_config.keras_home())
    if not os.access(home, os.W_OK):
        home = os.path.join("/tmp" if os.path.isdir("/tmp") else tempfile.gettempdir(), ".keras")
    return Path(home)


@contextlib.contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """Holds a lock that keeps other processes of this user from checking or filling `folder`."""
    digest = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
    with (_private_folder() / f"{digest}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _private_folder() -> Path:
    """Returns a folder for temporary files that only this user can change.

    Raises:
      DataError: If another user has made it, or may write there.
    """
    folder = Path(tempfile.gettempdir()) / f"ddl-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    # Everybody can make a file of this name in the temporary folder, or a link to a file to
    # overwrite.
    status = folder.lstat()
    if (
        not stat.S_ISDIR(status.st_mode)
        or status.st_uid != os.getuid()
        or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    ):
        raise DataError(
            f"{folder} must be a folder that belongs to this user and that nobody else can write. "
            "Remove it, or set TMPDIR to another folder."
        )
    return folder


def _check(name: str, path: Path, expected: str | None) -> None:
    if expected is not None:
        # On a mismatch Keras would download the file again and overwrite it without asking.
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != expected:
            raise DataError(
                f"{path} is damaged or another version: keras.datasets.{name} expects the SHA-256 "
                f"{expected}, got {found}. Remove the file, or replace it."
            )
    elif path.suffix == ".gz":
        # Keras does not check these files and skips the header: bytes 0, 0, type and rank.
        magic = bytes([0, 0, 8, 3 if "idx3" in path.name else 1])
        try:
            with gzip.open(path) as file:
                found_magic = file.read(4)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(
                f"{path} is damaged: {error}. Remove the file, or replace it."
            ) from error
        if found_magic != magic:
            raise DataError(
                f"{path} is not an IDX file of the expected kind: it must begin with "
                f"{magic.hex()}, got {found_magic.hex()}. Remove the file, or replace it."
            )


def _download(files: _Files, folder: Path, missing: list[str]) -> Any:
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_NETWORK_TIMEOUT_SECONDS)
    done = False
    try:
        parts = files.load()
        done = True
        return parts
    finally:
        socket.setdefaulttimeout(before)
        if not done:
            # After a failure even a complete new file is suspect.
            for file in missing:
                (folder / file).unlink(missing_ok=True)
            for path in made:
                with contextlib.suppress(OSError):
                    path.rmdir()


def _unusable(
    name: str, files: _Files, folder: Path, missing: list[str], error: Exception
) -> DataError:
    if not missing:
        return DataError(
            f"{name} could not be read from {folder}: {type(error).__name__}: {error}. Remove "
            f"{', '.join(files.sha256)} there to download {name} again."
        )
    # Keras's message has the URL before the dashes and the reason after them.
    reason = str(error).rsplit(" -- ", maxsplit=1)[-1]
    wanted = [f"  {file}  SHA-256 {files.sha256[file] or '(none known)'}" for file in missing]
    return DataError(
        f"{name} is not in the Keras cache and could not be downloaded ({reason}). Download the "
        f"following to {folder}{files.hint}, from the address that keras.datasets.{name} names:\n"
        + "\n".join(wanted)
    )
