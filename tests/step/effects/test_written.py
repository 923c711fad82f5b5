"""Variables that a loss writes: refused if no checkpoint holds them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.checkpoints.contents import handles_in, model_parts
from ddl.errors import ConfigError
from ddl.tasks.parts import copies_of, variables_of
from tests.conftest import make_strategy
from tests.step.probed import probed

SPEC = {"x": tf.TensorSpec([3], tf.float32), "weight": tf.TensorSpec([], tf.float32)}


class Task:
    """A task whose loss is what the test makes of the model's output."""

    def __init__(self, change, model=None, **attributes):
        dense = keras.layers.Dense(2)
        self.model = model or keras.Sequential([keras.Input((3,)), dense])
        self.change = change
        vars(self).update(attributes)

    def per_example(self, features, training):
        outputs = self.change(self.model(features["x"], training=training), training)
        return ddl.PerExample(outputs[:, 0] ** 2)


class WithStep(Task):
    def step(self, update, batch):
        update.minimize(self.per_example, batch)


class OfMean(Task):
    """Writes in a function of `update.mean` alone."""

    def per_example(self, features, training):
        return ddl.PerExample(self.model(features["x"], training=training)[:, 0] ** 2)

    def size(self, features, training):
        return self.change(self.model(features["x"], training=training), training)[:, 0]

    def step(self, update, batch):
        update.minimize(self.per_example, batch)
        update.mean(self.size, batch)


def counting(counter):
    def change(outputs, training):
        counter.assign_add(1.0)
        return outputs

    return change


def counter(**arguments):
    return tf.Variable(0.0, trainable=False, name="seen", **arguments)


def counts():
    return counting(counter())


def counts_in_a_loop():
    change = counts()
    return lambda outputs, training: tf.map_fn(lambda row: change(row, training), outputs)


def counts_in_training():
    change = counts()
    return lambda outputs, training: change(outputs, training) if training else outputs


def counts_in_evaluation():
    change = counts()
    return lambda outputs, training: outputs if training else change(outputs, training)


HIDDEN = {
    counts: r"'seen:0', float32 \(\)",
    counts_in_a_loop: r"'seen:0', float32 \(\)",
    counts_in_training: r"'seen:0', float32 \(\)",
    counts_in_evaluation: r"'seen:0', float32 \(\)",
}


@pytest.mark.parametrize(
    ("kind", "name", "make"),
    [
        *((Task, "per_example", make) for make in HIDDEN),
        (WithStep, "per_example", counts),
        (OfMean, "size", counts),
    ],
)
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_written_variable_that_no_attribute_leads_to(replicas, kind, name, make):
    strategy = make_strategy("mirrored" if replicas > 1 else "one_device", replicas)
    with strategy.scope():
        task, optimizer = kind(make()), keras.optimizers.SGD(0.1)
    where = rf"^{kind.__name__}.{name} assigns to a variable {HIDDEN[make]}, to which no"
    with pytest.raises(ConfigError, match=f"{where} attribute of {kind.__name__} leads.* Keep the"):
        ddl.Trainer(
            task,
            optimizer,
            {"x": np.ones([8, 3], "f4")},
            eval_data={"x": np.ones([8, 3], "f4")},
            global_batch_size=4,
            strategy=strategy,
        )


def test_a_variable_made_outside_of_the_scope():
    change, strategy = counts(), make_strategy("mirrored", 2)
    with strategy.scope():
        task = Task(change)
    with pytest.raises(ConfigError, match="Task.per_example assigns to a variable 'seen:0'"):
        probed(task, SPEC, 4, strategy)


class Module(tf.Module):
    """Holds an item."""

    def __init__(self, item):
        super().__init__()
        self.item = item


class Holder(keras.Model):
    """A model with an item that its loss writes."""

    def __init__(self, item):
        super().__init__()
        self.dense = keras.layers.Dense(2)
        self.item = item

    def call(self, x, training=False):
        return self.dense(x)


def of_metric():
    metric = keras.metrics.Mean()

    def change(outputs, training):
        metric.update_state(outputs)
        return outputs

    return metric, change


def of_variable():
    seen = counter(aggregation=tf.VariableAggregation.MEAN)
    return seen, counting(seen)


HOLDS = {
    "attribute": lambda item: {"item": item},
    "list in a dict": lambda item: {"items": {"first": [item]}},
    "module": lambda item: {"item": Module(item)},
    "module in a list": lambda item: {"items": [Module({"first": item})]},
    "nested task": lambda item: {"other": Task(None, item=item)},
    "model": lambda item: {"model": Holder(item)},
    "module of the model": lambda item: {"model": Holder(Module(item))},
    "tracked by the model": lambda item: {"model": Holder(tf.train.Checkpoint(item=item))},
}
MAKES = (of_metric, of_variable)


@pytest.mark.parametrize(
    ("make", "hold", "replicas"),
    [
        *((make, hold, 2) for make in MAKES for hold in list(HOLDS)[:-1]),
        *((make, "attribute", 1) for make in MAKES),
        (of_variable, "tracked by the model", 2),
    ],
)
def test_a_loss_may_write_what_a_checkpoint_holds(make, hold, replicas):
    strategy = make_strategy("mirrored" if replicas > 1 else "one_device", replicas)
    with strategy.scope():
        item, change = make()
        task = Task(change, **HOLDS[hold](item))
        probed(task, SPEC, 4, strategy)
        held = handles_in(tf.train.Checkpoint(**model_parts(task)))
    state = [item] if make is of_variable else variables_of([Module(item)])
    assert state
    assert {id(copy.handle) for v in state for copy in copies_of(v)} <= held


def test_a_loss_may_write_a_variable_of_the_optimizer():
    optimizer = keras.optimizers.SGD(0.1)

    def change(outputs, training):
        optimizer.learning_rate.assign(0.05)
        return outputs

    trainer = ddl.Trainer(
        Task(change), optimizer, {"x": np.ones([8, 3], "f4")}, global_batch_size=4
    )
    trainer.train(1)
    np.testing.assert_allclose(optimizer.learning_rate.numpy(), 0.05)


def test_a_loss_may_read_a_frozen_model_that_no_attribute_leads_to(tmp_path):
    """Also a loaded one, whose functions TensorFlow calls with the handles of its variables."""
    layers = [keras.layers.Dense(2), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    teacher = keras.Sequential([keras.Input((2,)), *layers])
    teacher.export(tmp_path / "teacher", verbose=False)
    loaded = tf.saved_model.load(tmp_path / "teacher")

    def change(outputs, training):
        return outputs - tf.stop_gradient(teacher(outputs, training=False) + loaded.serve(outputs))

    probed(Task(change), SPEC, 4, tf.distribute.get_strategy())
