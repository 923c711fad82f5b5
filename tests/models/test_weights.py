"""Files of weights: of the model, of another one, and of none."""

import keras
import numpy as np
import pytest

import ddl
from ddl.errors import ConfigError
from ddl.models.weights import load_weights


def perceptron(classes=3, hidden=(5, 4)):
    return ddl.models.mlp((4,), classes, hidden_units=hidden)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, model = tmp_path_factory.mktemp("weights"), perceptron()
    paths = {kind: str(folder / f"model{kind}") for kind in (".weights.h5", ".keras", ".h5")}
    model.save_weights(paths[".weights.h5"])
    model.save(paths[".keras"])
    model.save(paths[".h5"])
    (folder / "broken.weights.h5").write_bytes(b"none")
    return paths | {"values": model.get_weights(), "broken": str(folder / "broken.weights.h5")}


@pytest.mark.parametrize("kind", [".weights.h5", ".keras", ".h5"])
def test_weights_of_the_same_model(files, kind):
    model = perceptron()
    load_weights(model, files[kind], "weights")
    for value, expected in zip(model.get_weights(), files["values"], strict=True):
        np.testing.assert_array_equal(value, expected)


@pytest.mark.parametrize(
    ("kind", "model", "message"),
    [
        (
            ".weights.h5",
            lambda: perceptron(7),
            r"another model than 'mlp', which has 3 layers with weights: 2 \(hidden_1, hidden_2\) "
            r"match, 1 \(logits\) do not; the first, 'logits', has shape \(4, 7\) in the model and "
            r"\(4, 3\) in the file. Pass a file of the same architecture",
        ),
        (
            ".keras",
            lambda: perceptron(hidden=(6, 4)),
            r"1 \(logits\) match, 2 \(hidden_1, hidden_2",
        ),
        (".h5", lambda: perceptron(hidden=(5,)), "Layer count mismatch"),
        # All that the model takes is in the file, but the file is of a larger model.
        (
            ".weights.h5",
            lambda: keras.Sequential([keras.Input((4,)), keras.layers.Dense(5)], name="small"),
            r"another model than 'small'.* the file holds 6 arrays and the model takes 2",
        ),
        (".weights.h5", lambda: keras.applications.MobileNet(weights=None), "0 match"),
        ("broken", perceptron, "is no readable file of Keras"),
        ("absent", perceptron, "absent does not exist. Correct the path; model.save"),
    ],
    ids=["classes", "widths", "depth", "larger", "architecture", "broken", "absent"],
)
def test_weights_of_another_model(files, kind, model, message, recwarn):
    path = files.get(kind, str(files["broken"]) + ".absent")
    with pytest.raises(ConfigError, match=message):
        load_weights(model(), path, "keras_application.weights")
    # Keras would warn of each list of layers, in hundreds of lines above the error.
    assert not [one for one in recwarn if "Skipping nested container" in str(one.message)]
