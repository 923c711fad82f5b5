"""Files in the true formats go through Keras's own loaders; nothing reaches the network."""

import gc
import gzip
import pickle
import socket
import tarfile
import urllib.error

import numpy as np
import pytest
from keras.src.backend import config as keras_config
from keras.src.utils import file_utils

from ddl.data.readers.images import keras_dataset
from ddl.errors import DataError


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder that KERAS_HOME names; Keras has read the variable at import."""
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.setattr(keras_config, "_KERAS_DIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # a lock that nobody else holds

    def no_network(origin, target, *_):
        with open(target, "wb") as file:
            file.write(b"half")
        raise urllib.error.URLError("Name or service not known")

    monkeypatch.setattr(file_utils, "urlretrieve", no_network)
    return tmp_path


SHAPES = {"mnist": (28, 28), "fashion_mnist": (28, 28), "cifar10": (32, 32, 3)}


def write(folder, name, train, test):
    """Writes what keras.datasets downloads; a split is images and labels, all uint8."""
    for made in ("fashion-mnist", "cifar-10-batches-py"):
        (folder / made).mkdir(parents=True)
    if name == "mnist":
        names = ("x_train", "y_train", "x_test", "y_test")
        np.savez(folder / "mnist", **dict(zip(names, [*train, *test], strict=True)))
    elif name == "fashion_mnist":
        for split, arrays in (("train", train), ("t10k", test)):
            for kind, array in zip(("images-idx3", "labels-idx1"), arrays, strict=True):
                head = np.array([0x800 + array.ndim, *array.shape], ">i4").tobytes()
                with gzip.open(folder / "fashion-mnist" / f"{split}-{kind}-ubyte.gz", "wb") as file:
                    file.write(head + array.tobytes())
    else:  # Keras copies the only image of a training file to the places of 10,000
        files = {f"data_batch_{n + 1}": [each[n : n + 1] for each in train] for n in range(5)}
        for file, (image, label) in {**files, "test_batch": test}.items():
            planes = image.transpose(0, 3, 1, 2).reshape(len(image), -1)
            content = pickle.dumps({b"data": planes, b"labels": label.tolist()}, protocol=3)
            (folder / made / file).write_bytes(content)
        with tarfile.open(folder / "cifar-10-batches-py-target_archive", "w:gz") as archive:
            archive.add(folder / made, made)


@pytest.mark.parametrize("name", SHAPES)
def test_files_in_the_cache_become_images_and_labels(name, cache, monkeypatch):
    # Keras knows the hashes of the real files.
    monkeypatch.setattr(file_utils, "validate_file", lambda *_, **__: True)
    shape, random = SHAPES[name], np.random.default_rng(0)
    image, label = random.integers(0, 256, (10, *shape), np.uint8), np.arange(10, dtype=np.uint8)
    write(cache / "datasets", name, (image[:5], label[:5]), (image[5:], label[5:]))
    for split, own in (("train", slice(5)), ("test", slice(5, 10))):
        images, labels = (found[:: len(found) // 5] for found in keras_dataset(name, split))
        assert (images.dtype, labels.dtype) == (np.uint8, np.int64)
        np.testing.assert_array_equal(images, image[own].reshape(5, *shape[:2], -1))
        np.testing.assert_array_equal(labels, label[own])


@pytest.mark.parametrize("name", SHAPES)
def test_without_files_or_network_it_says_what_to_put_where(cache, name):
    before = socket.getdefaulttimeout(), gc.isenabled(), gc.get_threshold()
    with pytest.raises(DataError) as caught:
        keras_dataset(name, "train")
    for expected in (str(cache / "datasets"), f"keras.datasets.{name}", "not known"):
        assert expected in str(caught.value)
    assert (socket.getdefaulttimeout(), gc.isenabled(), gc.get_threshold()) == before
