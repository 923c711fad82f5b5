import numpy as np
import pytest

from ddl.data.readers.packaged import digits, penguins, play, shapes, synthetic
from ddl.errors import ConfigError


def test_the_digits():
    for split, count in (("train", 1437), ("test", 360)):
        images, labels = digits(split)
        assert (images.shape, images.dtype) == ((count, 8, 8, 1), np.uint8)
        assert (images.min(), images.max(), labels.dtype) == (0, 16, np.int64)
        assert np.ptp(np.bincount(labels)) <= 7
    train, test = (digits(split)[0] for split in ("train", "test"))
    assert not {image.tobytes() for image in train} & {image.tobytes() for image in test}


def test_the_penguins():
    train, test = penguins("train").arrays, penguins("test").arrays
    assert [len(each["label"]) for each in (train, test)] == [266, 67]
    numbers = np.concatenate([train["numbers"], test["numbers"]])
    np.testing.assert_allclose(numbers.mean(0), [43.99, 17.16, 200.97, 4.207], atol=0.01)
    kinds = {name: np.append(train[name], test[name]) for name in ("label", "island", "sex")}
    counts = {name: np.bincount(values).tolist() for name, values in kinds.items()}
    assert counts == {"label": [146, 68, 119], "island": [163, 123, 47], "sex": [165, 168]}

    mass = penguins("test", "body_mass").arrays
    np.testing.assert_array_equal(mass["label"], test["numbers"][:, 3])
    np.testing.assert_array_equal(mass["numbers"], test["numbers"][:, :3])
    np.testing.assert_array_equal(mass["species"], test["label"])


def test_the_play_is_arrays_of_windows_of_its_bytes():
    train, test = (play(split, 64).arrays for split in ("train", "test"))
    assert [len(each["token"]) for each in (train, test)] == [(120_215 - 1) // 64, 13_249 // 64]
    assert bytes(train["token"].ravel().tolist()).decode().count("Romeo") > 50
    np.testing.assert_array_equal(train["next_token"][:, :-1], train["token"][:, 1:])
    with pytest.raises(ConfigError, match="length must be at least 1, got 0"):
        play("train", 0)


def test_shapes_have_the_kinds_that_their_pixels_have():
    pixels = shapes("train", "pixels", num_examples=200).arrays
    kinds = shapes("train", "kinds", num_examples=200).arrays
    np.testing.assert_array_equal(pixels["image"], kinds["image"])
    assert pixels["image"].shape == (200, 16, 16, 1)
    visible = [(pixels["label"] == kind).any((1, 2)) for kind in (1, 2, 3)]
    np.testing.assert_array_equal(kinds["label"], np.stack(visible, 1))
    assert (np.abs(kinds["label"].mean(0) - 0.5) < 0.15).all()
    inside = pixels["image"][..., 0][pixels["label"] > 0]
    assert inside.mean() > pixels["image"][..., 0][pixels["label"] == 0].mean() + 60
    for split, seed in (("test", 0), ("train", 1)):
        other = shapes(split, "pixels", num_examples=200, seed=seed).arrays
        assert (other["image"][0] != pixels["image"][0]).any()


FEATURES = {
    "image": ((4, 3), "uint8"),
    "x": ((2,), "float16"),
    "id": ((), "int64"),
    "label": ((1,), "bool"),
}


def test_synthetic_features_of_any_shape():
    arrays = synthetic(FEATURES, 300, below={"id": 1000}).arrays
    assert {name: (each.shape[1:], str(each.dtype)) for name, each in arrays.items()} == FEATURES
    assert (arrays["image"].max(), arrays["id"].max() > 900) == (127, True)
    same, other = (synthetic(FEATURES, 300, seed=seed, below={"id": 1000}) for seed in (0, 1))
    assert all((same.arrays[name] == arrays[name]).all() for name in arrays)
    assert not (other.arrays["id"] == arrays["id"]).all()


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (lambda: digits("eval"), "digits.split must be 'train' or 'test', got 'eval'"),
        (lambda: penguins("train", "mass"), "penguins.label must be 'species' or 'body_mass'"),
        (lambda: play("eval", 8), "play.split must be"),
        (lambda: shapes("train", "masks"), "shapes.label must be 'pixels' or 'kinds'"),
        (lambda: shapes("train", "pixels", size=8), "size >= 12"),
        (lambda: synthetic(FEATURES, 0), "num_examples must be at least 1, got 0"),
        (lambda: synthetic(FEATURES, 1, below={"x": 3}), "synthetic.below .* got 3 for 'x'"),
        (lambda: synthetic({"t": ((), "str")}, 1), "must be numbers or booleans, .*'t'"),
    ],
)
def test_arguments_that_are_refused(load, message):
    with pytest.raises(ConfigError, match=message):
        load()
