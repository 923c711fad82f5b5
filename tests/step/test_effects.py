"""Draws by Python and writes that no checkpoint holds are refused by name."""

import random

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.distribution import path as device_path
from ddl.errors import ConfigError
from ddl.step.effects import check_writes
from tests.conftest import LikeGpus
from tests.contract.builders import make_trainer

ROWS = {"x": np.ones([16, 3])}


class Task:
    """A task whose loss changes the model's output by a function."""

    def __init__(self, change, **attributes):
        self.model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        self.change = change
        vars(self).update(attributes)

    def per_example(self, features, training):
        outputs = self.change(self.model(features["x"], training=training), training)
        return ddl.PerExample(outputs[:, 0] ** 2)


class WithStep(Task):
    """A task whose step changes a variable."""

    def per_example(self, features, training):
        return ddl.PerExample(self.model(features["x"], training=training)[:, 0] ** 2)

    def step(self, update, batch):
        self.change(self)
        update.minimize(self.per_example, batch)


def tried(make, where=("one_device", 1)):
    return make_trainer((make, keras.optimizers.SGD), ROWS, where, eval_data=ROWS)


GENERATOR = np.random.default_rng(1)
DRAWS = {
    "random": lambda outputs, training: outputs + random.random(),
    "in an evaluation": lambda outputs, training: outputs + (0 if training else np.random.rand()),
    "a generator of the task": lambda outputs, training: outputs + GENERATOR.normal(),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_draw_by_python_is_refused(draw):
    with pytest.raises(ConfigError, match=r"Task.per_example draws numbers by Python.* once"):
        tried(lambda: Task(draw, own=GENERATOR))


def test_a_step_must_not_draw_so_either():
    def change(task):
        task.rate.assign(random.random())

    with pytest.raises(ConfigError, match=r"WithStep\.step draws numbers by Python's random"):
        tried(lambda: WithStep(change, rate=tf.Variable(0.0)))


def test_a_draw_by_a_seed_for_the_rows_of_a_replica_is_refused():
    with pytest.raises(ConfigError, match="StatelessRandomGetKeyCounter .* keras.random"):
        tried(
            lambda: Task(
                lambda x, _: x + tf.random.stateless_normal(x.shape, [1, 2], dtype=x.dtype)
            )
        )


EQUAL = {
    "a number that the graph does not hold": lambda outputs, _: outputs + 0 * random.random(),
    "keras.random": lambda outputs, _: outputs + keras.random.uniform([2]),
}


@pytest.mark.parametrize("draw", EQUAL.values(), ids=EQUAL)
def test_equal_traces_are_not_refused(draw):
    tried(lambda: Task(draw))


def counting(place=lambda count, outputs: count() or outputs, **arguments):
    seen = tf.Variable(0.0, trainable=False, name="seen", **arguments)

    def count():
        seen.assign_add(1.0)

    return seen, lambda outputs, training: place(count, outputs) if training else outputs


def averaged():
    return counting(aggregation=tf.VariableAggregation.MEAN)


def in_a_loop(count, outputs):
    return tf.map_fn(lambda row: count() or row, outputs)


def test_a_written_variable_that_no_attribute_leads_to():
    with pytest.raises(ConfigError, match=r"^Task.per_example assigns to the variable .*seen.* to"):
        tried(lambda: Task(counting(in_a_loop)[1]), ("mirrored", 2))


def test_a_step_must_not_write_one_either():
    seen = tf.Variable(0.0, name="seen")
    with pytest.raises(ConfigError, match=r"^WithStep.step assigns to the variable .*seen"):
        tried(lambda: WithStep(lambda task: seen.assign_add(1.0)))


def of_metric():
    metric = keras.metrics.Mean()

    def change(outputs, training):
        metric.update_state(outputs)
        return outputs

    return metric, change


HOLDS = {
    "list in a dict": lambda item: {"items": {"first": [item]}},
    "nested task": lambda item: {"other": Task(None, item=item)},
}


@pytest.mark.parametrize(
    ("make", "hold"), [*((averaged, x) for x in HOLDS), (of_metric, "list in a dict")]
)
def test_a_loss_may_write_what_a_checkpoint_holds(make, hold):
    def task():
        item, change = make()
        return Task(change, **HOLDS[hold](item))

    tried(task, ("mirrored", 2))


def test_the_variables_that_order_collectives_are_not_written():
    with device_path.taking(device_path.GPU):
        strategy = LikeGpus(2)
        with strategy.scope():
            task = Task(lambda outputs, training: outputs)

        @tf.function(autograph=False)
        def summed():
            return strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", 1.0))

        graph = summed.get_concrete_function().graph
    check_writes("here", graph, task, [], strategy)
    with pytest.raises(ConfigError, match="here assigns to the variable"):
        check_writes("here", graph, task, [], tf.distribute.get_strategy())
