"""Files in the true formats go through Keras's own loaders; nothing reaches the network."""

import urllib.error

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

    def no_network(origin, target, *_):
        with open(target, "wb") as file:
            file.write(b"half")
        raise urllib.error.URLError("Name or service not known")

    monkeypatch.setattr(file_utils, "urlretrieve", no_network)
    return tmp_path


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "cifar10"])
def test_without_files_or_network_it_says_what_to_put_where(cache, name):
    with pytest.raises(DataError) as caught:
        keras_dataset(name, "train")
    for expected in (str(cache / "datasets"), f"keras.datasets.{name}", "not known"):
        assert expected in str(caught.value)
