"""What a step draws itself."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.errors import ConfigError
from ddl.precision import set_precision
from tests.conftest import make_strategy
from tests.step.verbs.own_steps import data


class Noisy:
    """Keeps what its step draws."""

    def __init__(self, step):
        self.model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        self.kept = tf.Variable(tf.zeros([4, 2]), trainable=False)
        self.own_step = step

    def per_example(self, features, training):
        return ddl.PerExample(self.model(features["x"])[:, 0])

    def draw(self):
        return ddl.random.normal(self, (2,))

    def keep(self, place, value):
        self.kept.assign(tf.tensor_scatter_nd_update(self.kept, [[place]], [value]))

    def step(self, update, batch):
        self.own_step(self, update, batch)


def kept(step, replicas=2, steps=1, make=Noisy):
    set_precision("float64")
    with make_strategy("mirrored", replicas).scope():
        keras.utils.set_random_seed(0)
        trainer = ddl.Trainer(
            make(step), keras.optimizers.SGD(0.1), data(48), global_batch_size=16, seed=5
        )
    trainer.train(steps)
    copies = trainer.strategy.experimental_local_results(trainer.task.kept)
    for copy in copies:
        np.testing.assert_array_equal(copy.numpy(), copies[0].numpy())
    return copies[0].numpy()


def each_differs(values):
    return len(np.unique(np.ravel(values))) == np.size(values)


def test_each_draw_differs_and_no_number_of_replicas_changes_it():
    def step(task, update, batch):
        update.minimize(task.per_example, batch)
        for place in range(3):
            task.keep(place, task.draw())
        update.when(update.step >= 0, lambda: task.keep(3, task.draw()))

    one, other = kept(step), kept(step, replicas=4)
    assert each_differs(one)
    np.testing.assert_array_equal(one, other)
    assert each_differs([one, kept(step, steps=2)])


def test_a_map_draws_the_same_on_all_replicas_and_later_draws_differ():
    def step(task, update, batch):
        gradients = update.gradients(task.per_example, batch)

        def noise(gradient, variable):
            drawn = ddl.random.normal(task, (gradient.shape.num_elements(),))
            return tf.reshape(tf.cast(drawn, gradient.dtype), gradient.shape)

        first, second = gradients.map(noise), gradients.map(noise)
        task.keep(0, [first.norm(), second.norm()])
        task.keep(1, task.draw())
        update.apply(first)

    values = kept(step)
    assert each_differs(values[:2])


@pytest.mark.parametrize("where", ["map", "step", "branch"])
def test_a_draw_of_tensorflow_is_refused(where):
    """On each replica it gives other numbers."""

    def step(task, update, batch):
        def noisy(gradient, variable=None):
            return gradient + tf.random.normal(gradient.shape, dtype=gradient.dtype)

        def draw():
            task.keep(0, noisy(tf.zeros([2])))

        gradients = update.gradients(task.per_example, batch)
        update.apply(gradients.map(noisy) if where == "map" else gradients)
        if where == "step":
            draw()
        elif where == "branch":
            update.when(update.step > 0, draw)

    with pytest.raises(ConfigError, match="step runs the operation RandomStandardNormal"):
        kept(step)
