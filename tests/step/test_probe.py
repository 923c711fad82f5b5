"""The context in which a task is tried before training."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from ddl.errors import ConfigError
from ddl.step.probe import Probe
from ddl.tasks.parts import copies_of
from ddl.tasks.task import PerExample
from tests.conftest import for_every_strategy, make_strategy

SPEC = {"x": tf.TensorSpec([3], tf.float32), "weight": tf.TensorSpec([], tf.float32)}


class Task:
    """A task whose loss is what the test makes of the model's output."""

    def __init__(self, loss, model=None):
        self.model = model or keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        self.loss = loss
        self.replicas = []

    def per_example(self, features, training):
        context = tf.distribute.get_replica_context()
        self.replicas.append(context and context._replica_id_in_sync_group)
        return PerExample(self.loss(self.model(features["x"], training=training)[:, 0]))


def tried(loss, strategy, training=False, model=None):
    with strategy.scope():
        task = Task(loss, model and model())
    Probe(task, task.per_example, SPEC, strategy, lambda output, rows: None).output(
        training, rows=2
    )
    return task


@pytest.mark.parametrize("training", [False, True])
def test_one_replica_stands_for_all(strategy, training):
    assert tried(lambda y: y, strategy, training).replicas == [0]


def test_a_collective_gets_all_replicas():
    def loss(y):
        context = tf.distribute.get_replica_context()
        return y - context.all_reduce(tf.distribute.ReduceOp.MEAN, y)

    assert set(tried(loss, make_strategy("mirrored", 2)).replicas) == {0, 1}


def test_keras_draws_on_several_replicas(strategy):
    """Without a seed, from a generator that each replica's thread would make."""
    assert tried(lambda y: y + keras.random.uniform(y.shape), strategy).replicas == [0]


def test_a_python_branch_on_a_tensor_is_refused_by_name():
    with pytest.raises(ConfigError, match="Task.per_example uses a tensor where Python needs a"):
        tried(lambda y: y if y[0] > 0 else -y, make_strategy("mirrored", 2))


def unbuilt():
    return keras.Sequential([keras.layers.Dense(2)])


@for_every_strategy
def test_new_layers_are_built_with_their_initial_values(strategy):
    task = tried(lambda y: y, strategy, model=unbuilt)
    assert task.replicas == [None, 0]
    kernel = task.model.variables[0].value
    values = [copy.numpy().tolist() for copy in copies_of(kernel)]
    assert np.abs(values).min() > 0
    assert values.count(values[0]) == len(values)


def test_a_layer_that_the_pass_does_not_call_stays_unbuilt():
    """Another try, in replica context, would make TensorFlow warn of an eager strategy.run."""

    class Partly(Task):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.only_in_training = keras.layers.Dense(1)

    strategy = make_strategy("mirrored", 2)
    with strategy.scope():
        task = Partly(lambda y: y, unbuilt())
    Probe(task, task.per_example, SPEC, strategy, lambda *_: None).output(False, rows=2)
    assert task.replicas == [None, 0]


def test_a_task_that_builds_only_in_replica_context(strategy):
    def loss(y):
        return y * tf.distribute.get_replica_context().num_replicas_in_sync

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(2)

        def call(self, x, training=False):
            assert tf.distribute.get_replica_context()
            return self.dense(x)

    task = tried(loss, strategy, model=Model)
    assert np.abs(task.model.variables[0].numpy()).min() > 0


def test_layers_that_no_attribute_holds():
    hidden = unbuilt()
    strategy = make_strategy("one_device", 1)
    assert tried(lambda y: hidden(y[:, tf.newaxis])[:, 0], strategy).replicas[-1] is None
    assert np.abs(hidden.variables[0].numpy()).min() > 0


def test_the_error_of_the_task_is_that_of_one_replica():
    def loss(y):
        raise KeyError(tf.distribute.get_replica_context())

    with pytest.raises(KeyError, match="ReplicaContext"):
        tried(loss, make_strategy("mirrored", 2))


@pytest.mark.parametrize("make", [lambda: keras.layers.Dense(2), lambda: tf.Variable(1.0)])
def test_a_loss_that_makes_variables_is_refused_by_name(strategy, make):
    """A variable of its own in each call could neither be trained nor saved."""

    def loss(y):
        made = make()
        return made(y[:, None])[:, 0] if isinstance(made, keras.layers.Layer) else made * y

    with pytest.raises(ConfigError, match="Task.per_example makes the variable '.+' in each call"):
        tried(loss, strategy)
