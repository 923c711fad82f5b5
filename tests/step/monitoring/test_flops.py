"""Operations of an update, against their formulas."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from tests.conftest import make_strategy

BATCH, WIDTH, UNITS, CLASSES = 8, 20, 16, 3
# Forward, gradient of the weights, and of the second layer's input alone.
DENSE = 2 * BATCH * (2 * WIDTH * UNITS + 3 * UNITS * CLASSES)


def traced(strategy=None, layers=None, task=None, **options):
    strategy = strategy or make_strategy("one_device", 1)
    with strategy.scope():
        inner = layers or [keras.layers.Dense(UNITS, "relu", name="inner")]
        model = keras.Sequential(
            [keras.Input((WIDTH,)), *inner, keras.layers.Dense(CLASSES, name="last")]
        )
        data = {"image": np.ones([32, WIDTH], "f4"), "label": np.zeros(32, "i4")}
        trainer = ddl.Trainer(
            (task or ddl.Classification)(model),
            keras.optimizers.SGD(0.1),
            data,
            global_batch_size=BATCH,
            strategy=strategy,
            **options,
        )
    assert trainer.model_flops is None
    assert "not been traced" in trainer.reason_without_flops
    trainer.trace()
    return trainer


@pytest.mark.parametrize(
    ("kind", "replicas", "options"),
    [
        ("one_device", 1, {}),
        ("one_device", 1, {"accumulation_steps": 2}),
        ("one_device", 1, {"jit_compile": "on"}),
        ("mirrored", 2, {"accumulation_steps": 2}),
    ],
)
def test_an_update_counts_alike_however_it_is_divided(kind, replicas, options):
    trainer = traced(make_strategy(kind, replicas), **options)
    assert trainer.model_flops == DENSE
    assert trainer.reason_without_flops == ""


def test_what_is_computed_again_does_not_count():
    assert traced(remat=ddl.Remat("*")).model_flops == DENSE


def test_depthwise_and_grouped_convolutions():
    image = keras.layers.Reshape((5, 4, 1)), keras.layers.Conv2D(4, 1, use_bias=False)
    depthwise = keras.layers.DepthwiseConv2D(3, padding="same", use_bias=False)
    grouped = keras.layers.Conv2D(6, 3, groups=2, padding="same", use_bias=False)
    trainer = traced(layers=[*image, depthwise, grouped, keras.layers.Flatten()])
    places = 5 * 4
    first, by_channel = places * 4, places * 3 * 3 * 4
    in_groups, last = places * 3 * 3 * 2 * 6, places * 6 * CLASSES
    assert trainer.model_flops == 2 * BATCH * (2 * first + 3 * (by_channel + in_groups + last))


def test_a_loop_that_decides_is_named():
    layers = [keras.layers.Reshape((5, 4)), keras.layers.LSTM(3)]
    trainer = traced(layers=layers)
    assert trainer.model_flops is None
    assert "decides how often" in trainer.reason_without_flops


class Twice(ddl.Classification):
    """Trains the same model by two gradients; the second one only sometimes."""

    sometimes = False

    def again(self, features, training):
        return ddl.PerExample(self.per_example(features, training).loss)

    def step(self, update, batch):
        update.minimize(self.per_example, batch)
        if not self.sometimes:
            update.minimize(self.again, batch)
            return
        update.when(tf.equal(update.step % 2, 0), lambda: update.minimize(self.again, batch))


class Sometimes(Twice):
    sometimes = True


def test_all_gradients_of_a_step_count():
    assert traced(task=Twice).model_flops == 2 * DENSE


def test_a_condition_that_decides_is_named():
    trainer = traced(task=Sometimes)
    assert trainer.model_flops is None
    assert "a condition or a loop of the step" in trainer.reason_without_flops
