"""The state of callbacks: in checkpoints, after a resume, and after a rewind."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from ddl.callbacks import Every
from ddl.errors import ConfigError
from tests.callbacks.runs import fit, make_trainer
from tests.training.rewinding import Start


@pytest.fixture(scope="module")
def start():
    return Start(make_trainer())


@pytest.fixture
def trainer(start):
    trainer = start.again()
    trainer.task.weight.assign(1.0)
    trainer.history.drop_after(-1)
    return trainer


class Critic:
    """A callback that trains a model of its own."""

    def __init__(self):
        self.model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        self.optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        self.optimizer.build(self.model.trainable_variables)

    def __call__(self, moment):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(self.model(tf.ones([1, 1])) - moment.step)
        variables = self.model.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)

    def values(self):
        return [v.numpy() for v in [*self.model.variables, *self.optimizer.variables]]


def test_models_and_optimizers_of_a_callback_are_saved(trainer, tmp_path):
    keras.utils.set_random_seed(5)
    first = Critic()
    fit(trainer, tmp_path, Every(2, first), train_steps=6)
    fit(trainer, tmp_path, Every(2, second := Critic()), train_steps=6)
    assert int(second.optimizer.iterations) == 3
    assert len(second.values()) == 6
    for one, two in zip(first.values(), second.values(), strict=True):
        np.testing.assert_array_equal(one, two)


class Late:
    """A callback that makes its state at the first call."""

    def __init__(self, **attributes):
        vars(self).update(attributes)

    def __call__(self, moment):
        self.make()


LATE = {
    "calls, which": lambda late: setattr(late, "calls", tf.Variable(0)),
    "model/layers/0/_kernel, model/layers/0/bias": lambda late: late.model(tf.ones([1, 2])),
    "optimizer/2": lambda late: late.optimizer.build(LAYER.variables),
    "kernel, .*bias, which": lambda late: late.calls.add(LAYER),
}
LAYER = keras.layers.Dense(1)
LAYER.build([1, 2])


@pytest.mark.parametrize("names", LATE)
def test_a_state_that_no_checkpoint_holds_is_refused(trainer, tmp_path, names):
    late = Late(calls=set(), model=keras.Sequential([keras.layers.Dense(1)]))
    late.optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    late.make = lambda: LATE[names](late)
    with pytest.raises(ConfigError, match=f"Late has the variables .*{names}.* in __init__"):
        fit(trainer, tmp_path, Every(3, late))
    assert trainer.step == 3
