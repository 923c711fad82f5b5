import numpy as np
import pytest

from ddl.data import images, synthetic_arrays, synthetic_images
from ddl.errors import ConfigError, DataError

DIGITS = {"image_shape": (8, 8, 1), "num_classes": 10}


def test_digits_by_name():
    source = images("digits", "test", **DIGITS)
    assert source.features["image"].shape == (360, 8, 8, 1)
    assert source.features["label"].dtype == np.int64
    first = images("digits", "test", **DIGITS, num_examples=7)
    np.testing.assert_array_equal(first.features["image"], source.features["image"][:7])


def test_one_hot_labels():
    labels = images("digits", "test", **DIGITS).features["label"]
    rows = images("digits", "test", **DIGITS, one_hot=True).features["label"]
    assert rows.dtype == np.float32
    assert rows.shape == (360, 10)
    np.testing.assert_array_equal(rows.argmax(axis=1), labels)
    np.testing.assert_array_equal(rows.sum(axis=1), 1)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"name": "digit"},
            ConfigError,
            "images.name must be .*, got 'digit'.*Did you mean digits",
        ),
        ({"split": "tset"}, ConfigError, "images.split must be .*, got 'tset'.*Did you mean test"),
        ({"image_shape": (28, 28, 1)}, DataError, r"\(8, 8, 1\), but image_shape is \(28, 28, 1\)"),
        ({"num_classes": 9}, DataError, "has 10 classes, but num_classes is 9"),
        ({"data_dir": "/data"}, ConfigError, "only imagenet is read from a directory; digits"),
        ({"num_examples": 0}, ConfigError, "num_examples must be at least 1, .* got 0"),
        ({"num_examples": 361}, DataError, "at most 360, the number of test images .* got 361"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        images(**{"name": "digits", "split": "test", **DIGITS, **arguments})


def synthetic(split, **kwargs):
    arguments = {"image_shape": (6, 5, 2), "num_classes": 4, "num_examples": 400, **kwargs}
    return synthetic_images(split, **arguments)


def test_synthetic_images_depend_on_seed_and_split_only():
    x, y = synthetic("train")
    assert (x.shape, x.dtype, y.dtype) == ((400, 6, 5, 2), np.uint8, np.int64)
    assert set(y) == {0, 1, 2, 3}
    np.testing.assert_array_equal(x, synthetic("train")[0])
    assert (x != synthetic("train", seed=1)[0]).any()
    assert (x != synthetic("test")[0]).any()
    floats = synthetic("train", dtype="float32")[0]
    assert floats.dtype == np.float32
    assert 0 <= floats.min() < floats.max() <= 1
    assert np.abs(floats * 255 - x).max() <= 1


def test_fewer_synthetic_images_are_the_first_of_more(monkeypatch):
    monkeypatch.setattr("ddl.data.synthetic._CHUNK_VALUES", 60 * 32)
    x, y = synthetic("train")
    fewer_x, fewer_y = synthetic("train", num_examples=77)
    np.testing.assert_array_equal(fewer_x, x[:77])
    np.testing.assert_array_equal(fewer_y, y[:77])


def test_synthetic_classes_of_one_split_tell_those_of_the_other():
    x, y = synthetic("train")
    means = np.stack([x[y == c].mean(axis=0) for c in range(4)])
    x, y = synthetic("test")
    distances = ((x[:, np.newaxis] - means) ** 2).sum(axis=(2, 3, 4))
    assert (distances.argmin(axis=1) == y).mean() > 0.95


def test_synthetic_source_has_the_shape_asked_for():
    source = images("synthetic", "test", image_shape=(3, 4, 1), num_classes=2)
    assert source.features["image"].shape == (2048, 3, 4, 1)
    with pytest.raises(
        ConfigError, match="num_classes of the synthetic images must be at least 1, got 0"
    ):
        images("synthetic", "test", image_shape=(3, 4, 1), num_classes=0)


def test_more_synthetic_data_than_memory():
    with pytest.raises(ConfigError, match=r"num_examples .* need [\d,]+\.0 GB, but this machine"):
        synthetic("train", num_examples=10**15)
    with pytest.raises(ConfigError, match=r"need 4,000,000\.0 GB.* Set a smaller num_examples"):
        synthetic_arrays({"x": ((), "float32")}, 10**15)


def test_synthetic_arrays():
    elements = {"tokens": ((7,), "int32"), "x": ((2, 2), "float64"), "b": ((), "bool")}
    source = synthetic_arrays(elements, 9)
    for name, (shape, dtype) in elements.items():
        assert source.features[name].shape == (9, *shape)
        assert source.features[name].dtype == dtype
    more = synthetic_arrays({"id": ((50,), "int64"), **elements}, 9, below={"id": 10**6})
    assert 10**5 < more.features["id"].max() < 10**6
    with pytest.raises(ConfigError, match="below must give .* got 5 for 'x'. The features are to"):
        synthetic_arrays(elements, 9, below={"x": 5})
    with pytest.raises(ConfigError, match="'s' .* must be a float, integer or boolean, got U3"):
        synthetic_arrays({"s": ((), "U3")}, 9)
