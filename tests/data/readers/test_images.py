"""Files in the true formats go through Keras's own loaders; nothing reaches the network."""

import gzip
import urllib.error

import numpy as np
import pytest
from keras.src.backend import config as keras_config
from keras.src.utils import file_utils

from ddl.data.readers.images import images, keras_dataset
from ddl.errors import ConfigError, DataError


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder that KERAS_HOME names; Keras has read the variable at import."""
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.setattr(keras_config, "_KERAS_DIR", str(tmp_path))

    def no_network(origin, target, *_):
        with open(target, "wb") as file:
            file.write(b"half")
        raise urllib.error.URLError("Name or service not known")

    monkeypatch.setattr(file_utils, "urlretrieve", no_network)
    return tmp_path


def pixels(count, *shape):
    return np.random.default_rng(count).integers(0, 256, (count, *shape), np.uint8)


def labels(count):
    return np.arange(count, dtype=np.uint8) % 10


def write_fashion_mnist(cache):
    folder = cache / "datasets" / "fashion-mnist"
    folder.mkdir(parents=True)
    for part, count in (("train", 12), ("t10k", 5)):
        header = np.array([0x803, count, 28, 28], ">i4").tobytes()
        content = gzip.compress(header + pixels(count, 28, 28).tobytes())
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(content)
        header = np.array([0x801, count], ">i4").tobytes()
        content = gzip.compress(header + labels(count).tobytes())
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(content)
    return folder


def test_fashion_mnist(cache):
    write_fashion_mnist(cache)
    image, label = keras_dataset("fashion_mnist", "train")
    np.testing.assert_array_equal(image, pixels(12, 28, 28)[..., np.newaxis])
    assert (label.dtype, label.tolist()) == (np.int64, [*range(10), 0, 1])


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "cifar10"])
def test_without_files_or_network_it_says_what_to_put_where(cache, name):
    with pytest.raises(DataError) as caught:
        keras_dataset(name, "train")
    for expected in (str(cache / "datasets"), f"keras.datasets.{name}", "not known"):
        assert expected in str(caught.value)


def test_a_damaged_file_is_refused_and_left_alone(cache):
    path = write_fashion_mnist(cache) / "t10k-images-idx3-ubyte.gz"
    content = path.read_bytes()[:-9]
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"(?s)could not be read from Keras.*remove damaged files"):
        keras_dataset("fashion_mnist", "train")
    assert path.read_bytes() == content


def test_images_by_name(cache):
    write_fashion_mnist(cache)
    given = {"image_shape": (28, 28, 1), "num_classes": 10}
    some = images("fashion_mnist", "train", num_examples=3, one_hot=True, **given).arrays
    np.testing.assert_array_equal(some["image"][..., 0], pixels(12, 28, 28)[:3])
    np.testing.assert_array_equal(some["label"], np.eye(10)[:3])
    assert some["label"].dtype == np.float32
    assert len(images("digits", "test", image_shape=[8, 8, 1], num_classes=10)) == 360


def test_synthetic_images_are_learnable_and_their_splits_share_what_is_learned():
    given = {"image_shape": (6, 6, 1), "num_classes": 3, "num_examples": 60}
    train, test = (images("synthetic", split, **given).arrays for split in ("train", "test"))
    means = np.stack([train["image"][train["label"] == n].mean(0) for n in range(3)])
    distance = ((test["image"][:, np.newaxis] - means) ** 2).sum((2, 3, 4))
    assert (distance.argmin(1) == test["label"]).mean() > 0.95
    assert (train["label"] != test["label"]).any()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"name": "digit"}, ConfigError, "images.name must be 'digits'.*got 'digit'"),
        ({"split": "trian"}, ConfigError, "images.split must be 'train' or 'test', got 'trian'"),
        ({"image_shape": (9, 9, 1)}, DataError, r"\(8, 8, 1\), but .*image_shape \(9, 9, 1\)"),
        ({"num_classes": 9}, DataError, "digits has 10 classes .*num_classes is 9"),
        ({"num_examples": 0}, DataError, "a number from 1 to 360"),
        ({"num_examples": 361}, DataError, "a number from 1 to 360"),
        ({"data_dir": "/data"}, ConfigError, "data_dir is for ImageNet"),
    ],
)
def test_images_that_are_refused(change, error, message):
    given = {"name": "digits", "split": "test", "image_shape": (8, 8, 1), "num_classes": 10}
    with pytest.raises(error, match=message):
        images(**given | change)
