"""One update against the gradient of the weighted mean, for any sizes, weights and splits."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import ddl
from ddl.errors import TrainingDiverged
from ddl.precision import set_precision
from tests.conftest import make_strategy

RATE = 0.5
TOKENS = 3


class Tokens:
    """A linear model of tokens with a mask; no layer that communicates, so it is quick."""

    def __init__(self):
        x = keras.Input((TOKENS, 2), name="x")
        self.model = keras.Model(x, keras.layers.Dense(1, kernel_initializer="ones")(x))

    def per_example(self, features, training):
        y = self.model(features["x"], training=training)[..., 0]
        return ddl.PerExample((y - features["y"]) ** 2, weight=features["mask"])


@st.composite
def batches(draw):
    """Examples with weights and masks of tokens, some of them zero, but not all."""
    examples = draw(st.integers(1, 24))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    weight = random.uniform(0, 3, examples) * (random.random(examples) < draw(st.floats(0.3, 1)))
    mask = (random.random((examples, TOKENS)) < draw(st.floats(0.3, 1))).astype("f8")
    weight[0], mask[0, 0] = 1.0, 1.0
    return {
        "x": random.normal(size=(examples, TOKENS, 2)),
        "y": random.normal(size=(examples, TOKENS)),
        "mask": mask,
        "weight": weight.astype("f4"),
    }


def weighted_mean_gradient(data):
    """With NumPy: of Σ weight·(y - x·1)² / Σ weight at a kernel of ones, no bias."""
    weight = data["weight"][:, None].astype("f8") * data["mask"]
    error = data["x"].sum(-1) - data["y"]
    kernel = np.einsum("nt,nti->i", 2 * weight * error, data["x"]) / weight.sum()
    loss = (weight * error**2).sum() / weight.sum()
    return loss, kernel[:, None], np.array([(2 * weight * error).sum() / weight.sum()])


# Slow to build, so few examples a place; the sizes, weights and masks are what varies.
@pytest.mark.parametrize(
    ("place", "accumulation_steps"),
    [(("one_device", 1), 1), (("mirrored", 2), 3)],
)
@settings(max_examples=4)
@given(data=batches(), spare=st.integers(0, 2))
def test_an_update_follows_the_weighted_mean(place, accumulation_steps, data, spare):
    strategy = make_strategy(*place)
    unit = strategy.num_replicas_in_sync * accumulation_steps
    batch = (-(-len(data["y"]) // unit) + spare) * unit  # holds all, and as much padding
    set_precision("float64")
    with strategy.scope():
        task, optimizer = Tokens(), keras.optimizers.SGD(RATE)
    trainer = ddl.Trainer(
        task,
        optimizer,
        data,
        global_batch_size=batch,
        strategy=strategy,
        accumulation_steps=accumulation_steps,
    )
    loss, kernel, bias = weighted_mean_gradient(data)
    assert trainer.train(1)["loss"] == pytest.approx(loss, rel=1e-12)
    new_kernel, new_bias = (v.numpy() for v in task.model.trainable_variables)
    np.testing.assert_allclose(new_kernel, 1 - RATE * kernel, rtol=0, atol=1e-12)
    np.testing.assert_allclose(new_bias, -RATE * bias, rtol=0, atol=1e-12)


class HugeRows:
    """An embedding whose row gets two gradients, each finite, that are not so together."""

    def __init__(self):
        words = keras.Input((2,), dtype="int64")
        self.model = keras.Model(words, keras.layers.Embedding(3, 1, name="table")(words))

    def per_example(self, features, training):
        y = self.model(features["words"], training=training)
        return ddl.PerExample(tf.reduce_sum(y, [1, 2]) * 3e38)


def test_rows_are_added_before_they_are_asked_to_be_finite():
    set_precision("float32")
    strategy = make_strategy("mirrored", 2)
    with strategy.scope():
        task, optimizer = HugeRows(), keras.optimizers.SGD(1.0)
    trainer = ddl.Trainer(
        task,
        optimizer,
        {"words": np.ones([2, 2], "i8")},
        global_batch_size=2,
        strategy=strategy,
        loss_scale=ddl.LossScale(1.0, growth_interval=None),
        max_skipped_updates=1,
    )
    before = task.model.weights[0].numpy()
    with pytest.raises(TrainingDiverged):
        trainer.train(1)
    np.testing.assert_array_equal(task.model.weights[0].numpy(), before)
