"""Any devices train what a plain loop trains: losses, weights, averages, evaluations, predictions.

`cases.py` describes the runs; `plain_loop.py` is the loop, without ddl. All are in float64, and
agree to 1e-10.
"""

import keras
import numpy as np
import pytest

import ddl
from tests.conftest import name_of
from tests.contract import builders
from tests.contract.cases import BATCH, CASES, ON_TWO, OTHER_NUMBERS, check_parity, expected

ONE, TWO, FOUR = ("one_device", 1), ("mirrored", 2), ("mirrored", 4)
CENTRAL = ("central_storage", 2)


WHERE = {
    "images": (ONE, TWO, FOUR, CENTRAL),
    "tokens": (ONE, TWO),
    "numbers": (ONE, TWO, CENTRAL),
    "a skipped update": (TWO, CENTRAL),
}


@pytest.mark.parametrize(
    ("name", "where"),
    [(name, where) for name, places in WHERE.items() for where in places],
    ids=lambda each: each if isinstance(each, str) else name_of(each),
)
def test_training_equals_the_plain_loop(name, where):
    check_parity(name, where)


@pytest.mark.parametrize("name", ON_TWO)
def test_training_on_two_devices_equals_the_formula(name):
    check_parity(name, TWO, evaluates=False)


@pytest.mark.parametrize("name", ["images", "tokens"])
def test_the_clip_bites_at_some_updates(name):
    """Otherwise the scale of the gradient would not show, or the clip."""
    limit = CASES[name].arguments["clip_norm"]
    norms = expected(name)[1].norms
    assert min(norms) < 0.9 * limit
    assert max(norms) > 1.1 * limit


def check_evaluation(where):
    """Raises AssertionError unless metrics are those of Keras on all examples at once."""
    inputs, labels = OTHER_NUMBERS["x"], (OTHER_NUMBERS["y"][:, 0] > 0).astype("i4")
    weight = np.linspace(0, 2, len(labels)).astype("f4")
    data = {"x": inputs, "label": labels, "weight": weight}
    metrics = ["accuracy", "AUC", keras.metrics.Precision(name="precision")]

    def task():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, "sigmoid")])
        return ddl.Supervised(model, "binary_crossentropy", metrics=metrics, input_name="x")

    make, options = (task, keras.optimizers.SGD), {"eval_data": data, "global_batch_size": BATCH}
    trainer = builders.make_trainer(make, data, where, **options)
    found, chances = trainer.evaluate(), trainer.model(inputs).numpy()
    of_keras = {
        "loss": keras.metrics.BinaryCrossentropy(),
        "accuracy": keras.metrics.BinaryAccuracy(),
        "AUC": keras.metrics.AUC(),
        "precision": keras.metrics.Precision(),
    }
    for name, metric in of_keras.items():
        metric.update_state(labels[:, np.newaxis], chances, weight)
        assert abs(found[name] - float(metric.result())) <= 1e-10, name


@pytest.mark.parametrize("where", [FOUR, CENTRAL], ids=name_of)
def test_an_evaluation_equals_keras_on_all_examples_at_once(where):
    check_evaluation(where)
