"""Numbers that Python or NumPy draws in a trace: refused, since each trace draws others."""

import random
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.errors import ConfigError
from tests.conftest import make_strategy
from tests.step.probed import probed

PICTURE = [4, 4, 3]
SPEC = {"x": tf.TensorSpec(PICTURE), "weight": tf.TensorSpec([])}


class Own(keras.layers.Layer):
    """Adds a number to its inputs that a function draws."""

    def __init__(self, draw, **attributes):
        super().__init__(name="own")
        self.draw = draw
        vars(self).update(attributes)

    def call(self, x, training=False):
        return x + tf.cast(self.draw(self, training), x.dtype)


class Task:
    """A task with a layer before its only weights."""

    def __init__(self, layer, **attributes):
        layers = [layer, keras.layers.Flatten(), keras.layers.Dense(1)]
        self.model = keras.Sequential([keras.Input(PICTURE), *layers])
        vars(self).update(attributes)

    def per_example(self, features, training):
        return ddl.PerExample(self.model(features["x"], training=training)[:, 0])


class WithStep(Task):
    def step(self, update, batch):
        self.draw(self)
        update.minimize(
            lambda features, training: self.per_example(features, training), batch, name="loss"
        )


def tried(layer, strategy=("one_device", 1)):
    strategy = make_strategy(*strategy)
    with strategy.scope():
        task = Task(layer())
    return probed(task, SPEC, 4, strategy)


GENERATORS = {
    "random": lambda layer, training: random.random(),
    "random.choice": lambda layer, training: random.choice([1, 2, 3]),
    "numpy.random": lambda layer, training: np.random.normal(size=3),
    "in training": lambda layer, training: np.random.rand() if training else 0,
    "in an evaluation": lambda layer, training: 0 if training else np.random.rand(),
    "in a branch": lambda layer, training: tf.cond(
        tf.constant([1.0])[0] > 0, lambda: random.random(), lambda: 0.0
    ),
    "numpy.random.Generator": lambda layer, training: layer.of_numpy.normal(),
    "numpy.random.RandomState": lambda layer, training: layer.of_state.normal(),
    "random.Random": lambda layer, training: layer.of_python.random(),
}


@pytest.mark.parametrize("draw", GENERATORS.values(), ids=GENERATORS)
def test_a_draw_by_python_is_refused(draw):
    own = {
        "of_numpy": np.random.default_rng(1),
        "of_state": np.random.RandomState(1),
        "of_python": random.Random(1),
    }
    message = r"Task.per_example draws numbers by Python.* in the layer Own 'own'\. A trace .*once"
    with pytest.raises(ConfigError, match=message):
        tried(lambda: Own(draw, **own))


@pytest.mark.parametrize("strategy", [("one_device", 1), ("mirrored", 2)], ids=str)
def test_so_is_augmix(strategy):
    """It chooses operations by `random.choice`."""
    with pytest.raises(ConfigError, match="layer AugMix 'mixing'.* keras.random"):
        tried(lambda: keras.layers.AugMix((0, 1), chain_depth=1, name="mixing"), strategy)


def _with_a_fixed_seed(layer, training):
    np.random.seed(3)
    return np.random.rand()


def _elsewhere(layer, training):
    """Draws in another thread, as data that are read ahead do."""
    thread = threading.Thread(target=random.random)
    thread.start()
    thread.join()
    return 1.0


EQUAL = {
    "a fixed seed": _with_a_fixed_seed,
    "a generator in the call": lambda layer, training: np.random.default_rng(3).normal(),
    "a number that the graph does not hold": lambda layer, training: 0 * random.random(),
    "a number of another thread": _elsewhere,
    "keras.random": lambda layer, training: keras.random.uniform([3]),
    "SystemRandom": lambda layer, training: bool(layer.of_system),
}


@pytest.mark.parametrize("draw", EQUAL.values(), ids=EQUAL)
def test_equal_traces_are_not_refused(draw):
    tried(lambda: Own(draw, of_system=random.SystemRandom()))


@pytest.mark.parametrize(
    "layer",
    [
        lambda: keras.layers.RandomContrast(0.5),
        lambda: keras.layers.Dropout(0.5),
        lambda: keras.Sequential([keras.layers.Dense(3)]),  # unbuilt: its seeds are Python's
    ],
)
def test_seeds_of_layers_are_not_refused(layer):
    tried(layer)


def trainer(draw):
    strategy = make_strategy("one_device", 1)
    with strategy.scope():
        task = WithStep(keras.layers.Activation("relu"), draw=draw, rate=tf.Variable(0.0))
    data = {"x": np.zeros([8, *PICTURE], np.float32)}
    return ddl.Trainer(task, "sgd", data, global_batch_size=4, strategy=strategy)


def test_a_step_must_not_draw_so_either():
    with pytest.raises(ConfigError, match=r"WithStep\.step draws numbers by Python's random"):
        trainer(lambda task: task.rate.assign(random.random()))


def test_a_step_may_draw_by_keras():
    trainer(lambda task: task.rate.assign(keras.random.uniform([])))
