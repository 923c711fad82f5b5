"""Layers that the backward pass computes again: the same results, with less kept in memory."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.errors import ConfigError
from ddl.precision import set_precision
from tests.conftest import make_strategy

_RANDOM = np.random.default_rng(0)
DATA = {
    "image": _RANDOM.integers(0, 256, (70, 6, 6, 1)).astype("u1"),
    "label": _RANDOM.integers(0, 3, 70),
}


class Branch(keras.layers.Layer):
    """Draws twice, has no argument `training`, and takes a keyword argument that is a tensor."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.dense = keras.layers.Dense(8, activation="gelu")
        self.dropout = keras.layers.Dropout(0.3)

    def call(self, x, scale=1.0):
        return {"x": self.dropout(self.dense(self.dropout(x))) * scale}


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__(name="subclassed")
        self.first = keras.layers.Dense(8, name="first")
        self.branches = [Branch(name=f"branch_{number}") for number in range(2)]
        self.logits = keras.layers.Dense(3, name="logits")

    def call(self, image):
        x = self.first(tf.cast(tf.reshape(image, [-1, 36]), self.compute_dtype) / 255)
        for branch in self.branches:
            x = branch(x, scale=1.0 + tf.reduce_mean(x, -1, keepdims=True))["x"]
        return self.logits(x)


def nested():
    """A model within a model is a part; so is a layer with a mask and one with dropout."""
    image = keras.Input((6, 6, 1))
    x = keras.layers.Flatten()(keras.layers.Rescaling(1 / 255)(image))
    for number in range(2):
        inner = [keras.layers.Dense(8, "tanh"), keras.layers.Dropout(0.2)]
        x = keras.Sequential(inner, name=f"block_{number}")(x)
    return keras.Model(image, keras.layers.Dense(3, name="logits")(x))


def block(*layers):
    inner = keras.Sequential([layer() for layer in layers], name="block")
    return keras.Sequential([keras.Input((6, 6, 1)), keras.layers.Flatten(), inner])


def normalized():
    return block(lambda: keras.layers.Dense(5), keras.layers.BatchNormalization)


def penalized():
    return block(lambda: keras.layers.Dense(5, activity_regularizer="l2"))


def make(model, place, remat, task=ddl.Classification, **arguments):
    keras.utils.set_random_seed(0)
    strategy = make_strategy(*place)
    with strategy.scope():
        return ddl.Trainer(
            task(model()),
            keras.optimizers.SGD(0.1, momentum=0.9),
            DATA,
            **{"global_batch_size": 32, "seed": 3} | arguments,
            strategy=strategy,
            remat=remat,
        )


def weights(trainer):
    trainer.train(4, progress=False)  # the third batch is padded
    return [v.numpy() for v in [*trainer.task.model.variables, *trainer.optimizer.variables]]


def products(trainer):
    """Number of matrix products in the traced loop."""
    graph = trainer._runner.loop._concrete(trainer.state).graph.as_graph_def()
    return sum(node.op == "MatMul" for one in graph.library.function for node in one.node_def)


@pytest.mark.parametrize(
    ("model", "pattern", "place", "arguments"),
    [
        (nested, "block_*", ("one_device", 1), {"jit_compile": "on"}),
        (Subclassed, "branch_*", ("mirrored", 2), {"accumulation_steps": 2}),
    ],
)
def test_updates_are_the_same(model, pattern, place, arguments):
    set_precision("float64")
    recomputing = make(model, place, pattern, **arguments)
    plain = make(model, place, (), **arguments | {"jit_compile": "off"})
    for one, other in zip(weights(recomputing), weights(plain), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-10)
    assert products(recomputing) > products(plain)


class Each(ddl.Classification):
    def step(self, update, batch):
        update.apply(update.gradients(self.per_example, batch, each=lambda gradients: gradients))


@pytest.mark.parametrize(
    ("model", "remat", "task", "message"),
    [
        (nested, "blok_*", ddl.Classification, "'blok_.' matches none.*block_0"),
        (normalized, "block", ddl.Classification, "'block', which holds BatchNormalization"),
        (penalized, "block", ddl.Classification, "A layer adds a loss"),
        (nested, "block_*", Each, "with `each` does not go with Trainer.remat"),
    ],
)
def test_what_cannot_be_computed_again_is_refused(model, remat, task, message):
    with pytest.raises(ConfigError, match=message):
        make(model, ("one_device", 1), remat, task=task).train(1, progress=False)
