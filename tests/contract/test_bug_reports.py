"""Programs in which people of other frameworks met wrong figures or failures.

Those with misleading errors are in test_wrong_arguments.py.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(64, 3)).astype("f4")
Y = RANDOM.normal(size=(64, 1)).astype("f4")


def dense(*units, activation=None):
    layers = [keras.layers.Dense(each, activation) for each in units]
    return keras.Sequential([keras.Input((3,)), *layers])


def test_models_in_a_loop_may_have_a_mirrored_strategy_each():
    """Collectives of two strategies must not meet: they are of other shapes."""
    for units in [(1,), (4, 1), (2, 1)]:
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        with strategy.scope():
            task = ddl.Supervised(dense(*units), "mse")
            trainer = ddl.Trainer(task, "sgd", (X, Y), global_batch_size=16)
        assert np.isfinite(trainer.train(2, progress=False)["loss"])


def test_metrics_count_all_classes_alike():
    """As in Keras, where class weights are for the loss alone."""
    labels = RANDOM.integers(0, 3, 64)
    model = dense(3, activation="softmax")
    right = float((np.argmax(model(X), -1) == labels).mean())
    loss = keras.losses.sparse_categorical_crossentropy(labels, model(X)).numpy()
    weight = np.where(labels == 0, 5.0, 1.0)
    task = ddl.Supervised(
        model, "sparse_categorical_crossentropy", metrics=["accuracy"], class_weight={0: 5.0}
    )
    trainer = ddl.Trainer(task, "sgd", (X, labels), global_batch_size=64)
    found = trainer.train(1, progress=False)
    assert found["accuracy"] == pytest.approx(right, abs=1e-6)
    assert found["loss"] == pytest.approx((loss * weight).sum() / weight.sum(), rel=1e-5)
