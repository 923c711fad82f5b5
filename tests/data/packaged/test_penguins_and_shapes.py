"""The table and the images that come with ddl, or are drawn by it."""

from importlib import resources

import numpy as np
import pytest

from ddl.data import penguins, romeo_and_juliet, shapes
from ddl.errors import ConfigError, DataError


def test_the_penguins():
    train, test = penguins("train").features, penguins("test").features
    assert [len(each["label"]) for each in (train, test)] == [266, 67]
    numbers = np.concatenate([train["numbers"], test["numbers"]])
    assert numbers.shape == (333, 4)
    np.testing.assert_allclose(numbers.mean(0), [43.99, 17.16, 200.97, 4.207], atol=0.01)
    kinds = {name: np.append(train[name], test[name]) for name in ("label", "island", "sex")}
    counts = {name: np.bincount(values).tolist() for name, values in kinds.items()}
    assert counts == {"label": [146, 68, 119], "island": [163, 123, 47], "sex": [165, 168]}
    rows = {each.tobytes() for each in train["numbers"]}
    assert not rows & {each.tobytes() for each in test["numbers"]}

    mass = penguins("test", "body_mass").features
    np.testing.assert_array_equal(mass["label"], test["numbers"][:, 3])
    np.testing.assert_array_equal(mass["numbers"], test["numbers"][:, :3])
    np.testing.assert_array_equal(mass["species"], test["label"])


def test_a_table_that_is_missing_or_damaged(tmp_path, monkeypatch):
    monkeypatch.setattr(resources, "files", lambda package: tmp_path)
    with pytest.raises(DataError, match="could not be read"):
        penguins("train")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "penguins.csv").write_text("split")
    with pytest.raises(DataError, match="is damaged: its SHA-256 must be"):
        penguins("train")


def test_shapes_have_the_kinds_that_their_pixels_have():
    pixels = shapes("train", "pixels", num_examples=200).features
    kinds = shapes("train", "kinds", num_examples=200).features
    np.testing.assert_array_equal(pixels["image"], kinds["image"])
    assert pixels["image"].shape == (200, 16, 16, 1)
    visible = [(pixels["label"] == kind).any((1, 2)) for kind in (1, 2, 3)]
    np.testing.assert_array_equal(kinds["label"], np.stack(visible, 1))
    assert (np.abs(kinds["label"].mean(0) - 0.5) < 0.15).all()
    inside = pixels["image"][..., 0][pixels["label"] > 0]
    assert inside.mean() > pixels["image"][..., 0][pixels["label"] == 0].mean() + 60
    others = [shapes("test", "pixels", num_examples=200), shapes("train", "pixels", seed=1)]
    assert not any((each.features["image"][0] == pixels["image"][0]).all() for each in others)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "masks"), "shapes.label must be 'pixels' or 'kinds'"),
        (("train", "pixels", {"size": 8}), "shapes.size must be at least 12"),
        (("train", "pixels", {"num_examples": 0}), "got 16 and 0"),
    ],
)
def test_arguments_that_are_refused(arguments, message):
    *given, more = (*arguments, {}) if len(arguments) == 2 else arguments
    with pytest.raises(ConfigError, match=message):
        shapes(*given, **more)


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize(
    "load",
    [
        lambda split, **name: penguins(split, "species", **name),
        lambda split, **name: penguins(split, "body_mass", **name),
        lambda split, **name: shapes(split, "pixels", **name),
        lambda split, **name: shapes(split, "kinds", **name),
        lambda split, **name: romeo_and_juliet(split, 64, **name),
    ],
)
def test_synthetic_data_have_the_same_form(load, split):
    true, synthetic = load(split), load(split, name="synthetic")
    assert synthetic.element_spec == true.element_spec
    assert len(synthetic) == len(true)
    other = load("test" if split == "train" else "train", name="synthetic")
    for name, values in synthetic.features.items():
        if np.issubdtype(values.dtype, np.integer) and name != "image":
            real = next(iter(true.batches(len(true), 0, seed=0, shuffle=False)))[name].numpy()
            assert 0 <= values.min() <= values.max() <= max(real.max(), 255 * ("token" in name))
        count = min(len(values), len(other.features[name]))
        assert (values[:count] != other.features[name][:count]).any()
    with pytest.raises(ConfigError, match="name must be"):
        load(split, name="real")
