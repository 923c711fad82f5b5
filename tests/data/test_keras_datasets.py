"""Files in the true formats go through Keras's own loaders.

What is not real: the contents, and, where a file is to be accepted, the SHA-256 that ours and
Keras's comparison hold against it. Nothing reaches the network: a download fails as it does
without one.
"""

import gzip
import io
import os
import pickle
import stat
import tarfile
import urllib.error
from pathlib import Path

import numpy as np
import pytest
from ddl.data.keras_datasets import load_keras_dataset
from keras.src.backend import config as keras_config
from keras.src.utils import file_utils

from ddl.data import keras_datasets
from ddl.errors import DataError


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder that KERAS_HOME names; Keras has read the variable at import."""
    monkeypatch.setattr(keras_config, "_KERAS_DIR", str(tmp_path))

    def no_network(origin, target, *_):
        with open(target, "wb") as file:
            file.write(b"half")
        raise urllib.error.URLError("Name or service not known")

    monkeypatch.setattr(file_utils, "urlretrieve", no_network)
    return tmp_path


@pytest.fixture
def any_hash(monkeypatch):
    """Lets made-up files pass the comparison with the published checksums."""
    monkeypatch.setattr(file_utils, "validate_file", lambda *args, **kwargs: True)
    for name, files in keras_datasets._DATASETS.items():
        unchecked = keras_datasets._Files(
            files.folder, dict.fromkeys(files.sha256), files.load, files.hint
        )
        monkeypatch.setitem(keras_datasets._DATASETS, name, unchecked)


def pixels(count, *shape):
    return np.random.default_rng(count).integers(0, 256, (count, *shape), np.uint8)


def labels(count):
    return np.arange(count, dtype=np.uint8) % 10


def test_mnist(cache, any_hash):
    (cache / "datasets").mkdir()
    np.savez(
        cache / "datasets" / "mnist.npz",
        x_train=pixels(12, 28, 28),
        y_train=labels(12),
        x_test=pixels(5, 28, 28),
        y_test=labels(5),
    )
    images, classes = load_keras_dataset("mnist", "test")
    np.testing.assert_array_equal(images, pixels(5, 28, 28)[..., np.newaxis])
    assert (classes.dtype, classes.tolist()) == (np.int64, [0, 1, 2, 3, 4])
    assert len(load_keras_dataset("mnist", "train")[0]) == 12


def write_fashion_mnist(cache):
    folder = cache / "datasets" / "fashion-mnist"
    folder.mkdir(parents=True)
    for part, count in (("train", 12), ("t10k", 5)):
        header = np.array([0x803, count, 28, 28], ">i4").tobytes()
        images = gzip.compress(header + pixels(count, 28, 28).tobytes())
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(images)
        header = np.array([0x801, count], ">i4").tobytes()
        classes = gzip.compress(header + labels(count).tobytes())
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(classes)
    return folder


def test_fashion_mnist(cache):
    write_fashion_mnist(cache)
    images, classes = load_keras_dataset("fashion_mnist", "train")
    np.testing.assert_array_equal(images, pixels(12, 28, 28)[..., np.newaxis])
    assert classes.tolist() == [*range(10), 0, 1]


def test_cifar10(cache, any_hash):
    # Keras wants all 10,000 images a batch; only the first ones are not black.
    # Protocol 2 of Python 2, which wrote the real files, had bytes; Python 3 has them from 3 on.
    (cache / "datasets").mkdir()
    archive = cache / "datasets" / "cifar-10-batches-py-target_archive"
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
            data = np.zeros([10_000, 3072], np.uint8)
            data[:3] = pixels(3, 3072)
            batch = {b"data": data, b"labels": labels(10_000).tolist()}
            content = pickle.dumps(batch, protocol=3)
            info = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    images, classes = load_keras_dataset("cifar10", "test")
    assert images.shape == (10_000, 32, 32, 3)
    planes = pixels(3, 3072).reshape(3, 3, 32, 32)
    np.testing.assert_array_equal(images[:3], planes.transpose(0, 2, 3, 1))
    assert classes.tolist() == labels(10_000).tolist()


@pytest.mark.parametrize(
    ("name", "folder", "files"),
    [
        ("mnist", "datasets", ["mnist.npz  SHA-256 731c5ac6"]),
        (
            "fashion_mnist",
            "datasets/fashion-mnist",
            ["train-labels-idx1-ubyte.gz", "t10k-images-idx3-ubyte.gz"],
        ),
        (
            "cifar10",
            "datasets",
            ["cifar-10-batches-py-target_archive  SHA-256 6d958be0", "cifar-10-python.tar.gz"],
        ),
    ],
)
def test_without_files_or_network_it_says_what_to_put_where(cache, name, folder, files):
    with pytest.raises(DataError) as caught:
        load_keras_dataset(name, "train")
    message = str(caught.value)
    for expected in (str(cache / folder), f"keras.datasets.{name}", "not known)", *files):
        assert expected in message
    assert not list(cache.rglob("*"))


def test_a_download_that_is_not_the_published_file_does_not_stay(cache, monkeypatch):
    def wrong_file(origin, target, *_):
        with open(target, "wb") as file:
            file.write(b"<html>")

    monkeypatch.setattr(file_utils, "urlretrieve", wrong_file)
    with pytest.raises(DataError, match="could not be downloaded"):
        load_keras_dataset("mnist", "train")
    assert not list(cache.rglob("*"))


def test_a_damaged_cached_file_is_named_with_both_checksums_and_left_alone(cache):
    path = cache / "datasets" / "mnist.npz"
    path.parent.mkdir()
    path.write_bytes(b"abc")
    with pytest.raises(DataError, match="expects the SHA-256 731c5ac6.* got ba7816bf"):
        load_keras_dataset("mnist", "train")
    assert path.read_bytes() == b"abc"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no gzip at all", "t10k-images-idx3-ubyte.gz is damaged"),
        (
            gzip.compress(np.array([0x801, 5], ">i4").tobytes()),
            "must begin with 00000803, got 00000801",
        ),
        (gzip.compress(np.array([0x803, 5, 28, 28], ">i4").tobytes() + b"x"), "could not be read"),
        (gzip.compress(np.array([0x803] + [0] * 3, ">i4").tobytes() + bytes(999))[:-9], "ubyte.gz"),
    ],
    ids=["no gzip", "labels for images", "short", "cut off"],
)
def test_a_damaged_idx_file_is_refused(cache, content, message):
    path = write_fashion_mnist(cache) / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_keras_dataset("fashion_mnist", "train")
    assert path.read_bytes() == content


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The shared temporary folder."""
    monkeypatch.setattr(keras_datasets.tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"ddl-{os.getuid()}"


def test_the_lock_is_in_a_folder_of_this_user_alone(temporary):
    for _ in range(2):
        with keras_datasets._turn(Path("anywhere")):
            assert [path.name for path in temporary.parent.iterdir()] == [temporary.name]
    assert stat.S_IMODE(temporary.stat().st_mode) == 0o700


@pytest.mark.parametrize("plant", [lambda at: at.mkdir(mode=0o777), lambda at: at.symlink_to("a")])
def test_a_planted_folder_for_the_lock_is_refused(temporary, plant):
    (temporary.parent / "a").mkdir()
    before = os.umask(0)
    plant(temporary)
    os.umask(before)
    with pytest.raises(DataError, match="nobody else can write"), keras_datasets._turn(Path("a")):
        pass
    assert not list((temporary.parent / "a").iterdir())
