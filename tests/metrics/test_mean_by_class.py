"""Means of loss and accuracy by class, against NumPy, on any number of replicas."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.errors import ConfigError
from ddl.metrics import MeanByClass
from ddl.metrics.mean_by_class import SumsByClass
from ddl.precision import set_precision
from ddl.training.results.progress import format_figures
from tests.conftest import make_strategy
from tests.training.parity_cases import WEIGHED

pytestmark = pytest.mark.usefixtures("rows_checked_on_one_device")

CLASSES = 4  # one more than the data have
BATCH = 24


def make_trainer(place, **arguments):
    set_precision("float64")
    keras.utils.set_random_seed(1)
    strategy = make_strategy(*place)
    with strategy.scope():
        model = ddl.models.mlp((6, 6, 1), CLASSES, hidden_units=(4,))
        task = ddl.Classification(model, by_class=True)
        return ddl.Trainer(
            task,
            keras.optimizers.SGD(0.1),
            WEIGHED,
            eval_data=WEIGHED,
            global_batch_size=BATCH,
            **arguments,
        )


def expected(trainer):
    """The means over all examples, with NumPy."""
    labels, weights = WEIGHED["label"], WEIGHED["weight"].astype("f8")
    logits = trainer.predict({"image": WEIGHED["image"]})
    logits = np.asarray(logits, "f8")
    largest = logits.max(1)
    losses = largest + np.log(np.exp(logits - largest[:, None]).sum(1))
    losses -= logits[np.arange(len(labels)), labels]
    right = (logits.argmax(1) == labels).astype("f8")
    return {
        f"{name}_by_class/{k}": np.average(values[labels == k], weights=weights[labels == k])
        for name, values in (("loss", losses), ("accuracy", right))
        for k in range(CLASSES - 1)
    }


@pytest.fixture(scope="module")
def on_one_device():
    trainer = make_trainer(("one_device", 1))
    return trainer.train(9), trainer.evaluate()


def test_equal_those_of_numpy(on_one_device):
    trainer = make_trainer(("one_device", 1))
    found = trainer.evaluate()
    for name, value in expected(trainer).items():
        assert found[name] == pytest.approx(value, abs=1e-10), name
    assert np.isnan(found["loss_by_class/3"])
    assert np.isnan(found["accuracy_by_class/3"])


def test_are_equal_on_two_replicas(on_one_device):
    trainer = make_trainer(("mirrored", 2), accumulation_steps=2)
    for found, wanted in zip((trainer.train(9), trainer.evaluate()), on_one_device, strict=True):
        assert found.keys() == wanted.keys()
        np.testing.assert_allclose(
            list(found.values()), list(wanted.values()), rtol=0, atol=1e-10, equal_nan=True
        )


def test_a_run_logs_them_and_its_console_leaves_them_out(tmp_path, on_one_device):
    ddl.fit(make_trainer(("one_device", 1)), tmp_path, train_steps=2, progress=False)
    first, *_ = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert {"loss_by_class/0", "accuracy_by_class/3"} <= json.loads(first).keys()
    assert json.loads(first)["loss_by_class/3"] is None
    assert "class" not in format_figures(on_one_device[0])


def test_padding_and_labels_outside_of_the_classes_do_not_count():
    sums = SumsByClass(2).sums(
        tf.constant([0, 1, 1, -1, 5]),
        tf.constant([1.0, 2.0, np.nan, 7.0, 7.0]),
        tf.constant([1.0, 0.5, 0.0, 1.0, 1.0], tf.float64),
    )
    np.testing.assert_array_equal(sums, [1, 1, 1, 0.5])
    np.testing.assert_array_equal(SumsByClass(2).figures(sums.numpy()), [1, 2])


@pytest.mark.parametrize("dtype", ["int16", "uint16", "int64"])
def test_an_infinite_value_stays_in_its_class(dtype):
    labels, values = tf.constant([0, 1, 1], dtype), tf.constant([1.0, np.inf, 2.0])
    sums = SumsByClass(2).sums(labels, values, tf.ones([3], tf.float64))
    np.testing.assert_array_equal(sums, [1, np.inf, 1, 2])


def test_the_weight_of_an_example_counts_for_its_tokens():
    labels, values = tf.constant([[0, 1], [1, 1]]), tf.constant([[1.0, 2.0], [3.0, 4.0]])
    sums = SumsByClass(2).sums(labels, values, tf.constant([1.0, 2.0], tf.float64))
    np.testing.assert_array_equal(sums, [1, 2 + 6 + 8, 1, 1 + 2 + 2])


def test_refusals():
    with pytest.raises(ConfigError, match="num_classes must be an integer of at least 1, got 0"):
        MeanByClass(0)
    with pytest.raises(ConfigError, match=r"pass tf.argmax\(labels, -1\)"):
        MeanByClass(3)(tf.zeros([4, 3]), tf.zeros([4]))
    with pytest.raises(ConfigError, match=r"labels of int32 of shape \(4,\) for values of shape"):
        MeanByClass(3)(tf.zeros([4], tf.int32), tf.zeros([4, 2]))
