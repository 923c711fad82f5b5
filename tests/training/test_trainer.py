"""The Trainer in plain Python. tests/contract/test_parity.py compares it with a plain loop.

The optimizer is SGD, because Adam hides a wrong scale of the gradient. Nearly all the time goes
into tracing, so a test asserts several things of one traced trainer.
"""

import functools

import keras
import numpy as np
import tensorflow as tf

import ddl
from ddl.precision import set_precision
from ddl.training.pace import Pace
from tests.conftest import make_strategy
from tests.training.overflowing import Overflowing
from tests.training.rewinding import Start

_RANDOM = np.random.default_rng(0)
LABELS = _RANDOM.integers(0, 2, 130)
IMAGES = (_RANDOM.integers(0, 155, (130, 6, 6, 1)) + 100 * LABELS.reshape(-1, 1, 1, 1)).astype("u1")
DATA = {"image": IMAGES, "label": LABELS}


def make_trainer(strategy, data=None, batch=32, precision="float64", **arguments):
    """A small CNN with momentum, everything from one seed."""
    set_precision(precision)
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = ddl.models.cnn((6, 6, 1), 2, blocks=((4,),), hidden_units=(8,))
        optimizer = keras.optimizers.SGD(arguments.pop("schedule", 0.05), momentum=0.9)
        return ddl.Trainer(
            arguments.pop("task", ddl.Classification)(model),
            optimizer,
            DATA if data is None else data,
            global_batch_size=batch,
            eval_data=arguments.pop("eval_data", DATA),
            seed=5,
            **arguments,
        )


def weights_and_slots(trainer) -> list[np.ndarray]:
    """Returns all but the states of Keras's seed generators, which no draw of a trainer reads."""
    variables = [v for v in trainer.model.variables if "seed_generator" not in v.path]
    return [v.numpy() for v in [*variables, *trainer.optimizer.variables]]


@functools.cache
def _start_on_two_replicas() -> Start:
    return Start(make_trainer(make_strategy("mirrored", 2)))


def on_two_replicas(steps_per_loop=None) -> ddl.Trainer:
    """Returns a trainer at its start. All callers share the trainer, which is traced once."""
    set_precision("float64")
    trainer = _start_on_two_replicas().again()
    trainer._runner._pace = Pace(steps_per_loop)
    return trainer


def test_one_trace_serves_all_loops():
    """All operations of a loop are in one graph: Python runs only while the graph is traced."""
    traced = []

    class Counted(ddl.Classification):
        def per_example(self, features, training):
            traced.append(training)
            return super().per_example(features, training)

    loops = []
    trainer = make_trainer(make_strategy("mirrored", 2), task=Counted, steps_per_loop=10)
    assert traced.count(True) == 2  # the probes' of 8 and of 4 rows
    trainer.trace()
    assert (trainer.step, trainer.trace_count) == (0, 1)
    assert traced.count(True) == 2 + 2  # once a replica
    trainer.train(25, [loops.append])
    trainer.evaluate()
    trainer.train(15, [loops.append])
    assert loops == [10, 20, 25, 35, 40]
    assert (trainer.trace_count, traced.count(True)) == (1, 4)


def test_neither_the_length_of_the_loops_nor_an_evaluation_changes_a_bit():
    trainer = on_two_replicas(steps_per_loop=20)
    metrics, values = trainer.train(20), weights_and_slots(trainer)
    for steps_per_loop in (1, 7, None):
        trainer = on_two_replicas(steps_per_loop)
        assert trainer.train(20) == metrics
        for value, expected in zip(weights_and_slots(trainer), values, strict=True):
            np.testing.assert_array_equal(value, expected)
    trainer = on_two_replicas()
    trainer.train(7)
    trainer.evaluate()
    trainer.train(13)
    for value, expected in zip(weights_and_slots(trainer), values, strict=True):
        np.testing.assert_array_equal(value, expected)


def overflowing_trainer(strategy, schedule, batch_normalization=True, **arguments):
    set_precision("mixed_float16")
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = ddl.models.cnn(
            (6, 6, 1),
            2,
            blocks=((4,),),
            hidden_units=(8,),
            batch_normalization=batch_normalization,
        )
        return ddl.Trainer(
            Overflowing(model, schedule),
            keras.optimizers.SGD(0.05, momentum=0.9),
            DATA,
            global_batch_size=32,
            loss_scale=ddl.LossScale(1024.0),
            weight_average=ddl.ExponentialMovingAverage(0.9),
            **arguments,
        )


def all_copies(trainer) -> list[list[np.ndarray]]:
    """Every replica's copy of weights, moments, slots and averages."""
    variables = [v.value for v in [*trainer.model.variables, *trainer.optimizer.variables]]
    return [
        [copy.numpy() for copy in trainer.strategy.experimental_local_results(variable)]
        for variable in [*variables, *trainer.averages.variables]
    ]


class ReducesInTraining(keras.layers.Layer):
    """Asks for its replica, as a normalization over all replicas does."""

    def call(self, x, training=False):
        if training:
            replica = tf.distribute.get_replica_context()
            x += 0 * replica.all_reduce("SUM", tf.reduce_mean(x))
        return x


class BySplit:
    """A task whose figures differ between training and evaluation."""

    def __init__(self):
        layers = [
            keras.layers.Flatten(),
            keras.layers.Dense(4),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.1),
            ReducesInTraining(),
            keras.layers.Dense(2),
        ]
        self.model = keras.Sequential([keras.Input((6, 6, 1)), *layers])

    def per_example(self, features, training):
        logits = self.model(tf.cast(features["image"], tf.float32), training=training)
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(features["label"], logits)
        ones = tf.ones_like(loss)
        names = {"both": ones}
        names |= {"noise": 2 * ones, "more": 4 * ones} if training else {"held_out": 3 * ones}
        return ddl.PerExample(loss, names)


def test_each_split_reports_its_own_figures():
    strategy = make_strategy("mirrored", 2)
    with strategy.scope():
        task, optimizer = BySplit(), keras.optimizers.SGD(0.01)
    trainer = ddl.Trainer(
        task, optimizer, DATA, eval_data=DATA, global_batch_size=32, strategy=strategy
    )
    assert trainer.metric_names == ("loss", "both", "noise", "more")
    assert trainer.eval_metric_names == ("loss", "both", "held_out")
    trained, evaluated = trainer.train(3), trainer.evaluate()
    assert np.isfinite([trained.pop("loss"), evaluated.pop("loss")]).all()
    assert trained == {"both": 1, "noise": 2, "more": 4}
    assert evaluated == {"both": 1, "held_out": 3}
    assert trainer.trace_count == 1
