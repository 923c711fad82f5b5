"""The Trainer in plain Python. tests/contract/test_parity.py compares it with a plain loop.

The optimizer is SGD, because Adam hides a wrong scale of the gradient. Nearly all the time goes
into tracing, so a test asserts several things of one traced trainer.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.precision import set_precision
from ddl.training.pace import Pace
from tests.conftest import make_strategy

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


class BySplit(ddl.Classification):
    """Has figures of its own in each split, and notes what Python traces."""

    def __init__(self, model):
        super().__init__(model)
        self.traced = []

    def per_example(self, features, training):
        self.traced.append((int(features["label"].shape[0]), training))
        loss = super().per_example(features, training).loss
        ones = tf.ones_like(loss)
        other = {"noise": 2 * ones, "more": 4 * ones} if training else {"held_out": 3 * ones}
        return ddl.PerExample(loss, {"both": ones, **other})


@pytest.fixture(scope="module")
def trainer():
    return make_trainer(make_strategy("mirrored", 2), task=BySplit, steps_per_loop=10)


def test_one_trace_serves_all_loops(trainer):
    """All operations of a loop are in one graph: Python runs only while the graph is traced."""
    traced, loops = trainer.task.traced, []
    assert traced == [(8, True), (4, True), (8, False), (4, False)]  # the probes'
    trainer.trace()
    assert traced[4:] == [(16, True)] * 2  # once a replica
    trainer.train(25, [loops.append])
    trainer.evaluate()
    trainer.train(15, [loops.append])
    assert loops == [10, 20, 25, 35, 40]
    assert traced[6:] == [(16, False)] * 2


def test_neither_the_length_of_the_loops_nor_an_evaluation_changes_a_bit(trainer):
    """One trainer is set back to its start each time: a second one would be traced again."""
    ends = []
    variables = [v.value for v in [*trainer.model.variables, *trainer.optimizer.variables]]
    start, state = [v.numpy() for v in variables], trainer.state
    for steps_per_loop, calls in ((20, [20]), (1, [20]), (7, [20]), (None, [20]), (None, [7, 13])):
        for variable, value in zip(variables, start, strict=True):
            variable.assign(value)
        trainer.state, trainer._runner._pace = state, Pace(steps_per_loop)
        for steps in calls:
            trainer.train(steps)
            trainer.evaluate()
        ends.append(weights_and_slots(trainer))
    for values in ends:
        for value, expected in zip(values, ends[0], strict=True):
            np.testing.assert_array_equal(value, expected)


def all_copies(trainer) -> list[list[np.ndarray]]:
    """Every replica's copy of weights, moments, slots and averages."""
    variables = [v.value for v in [*trainer.model.variables, *trainer.optimizer.variables]]
    return [
        [copy.numpy() for copy in trainer.strategy.experimental_local_results(variable)]
        for variable in [*variables, *trainer.averages.variables]
    ]


def test_each_split_reports_its_own_figures(trainer):
    assert trainer.metric_names == ("loss", "both", "noise", "more")
    assert trainer.eval_metric_names == ("loss", "both", "held_out")
    trained, evaluated = trainer.train(3), trainer.evaluate()
    assert np.isfinite([trained.pop("loss"), evaluated.pop("loss")]).all()
    assert trained == {"both": 1, "noise": 2, "more": 4}
    assert evaluated == {"both": 1, "held_out": 3}
