"""Updates that overflow are skipped on all replicas; a run that has diverged ends."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.errors import TrainingDiverged
from tests.contract import builders

BATCH = 8  # on two replicas, rows 4 to 7 of a batch lie on the second


def data_of(*batches, overflows=()):
    """Returns batches by their seeds, in the order in which a run without shuffling reads them."""
    rows = [np.random.default_rng(seed).normal(size=(BATCH, 3)) for seed in batches]
    factor = np.ones((len(batches), BATCH))
    factor[list(overflows), 5] = 3e38  # its square is infinite
    x = np.concatenate(rows).astype("float32")
    label, factor = np.arange(len(x)) % 2, factor.astype("float32").ravel()
    return {"x": x, "label": label, "factor": factor}


class Task:
    """A classifier with moving moments; each loss times a factor."""

    def __init__(self):
        layers = keras.layers
        normalization = layers.BatchNormalization()
        hidden = [layers.Dense(4, "tanh"), normalization, layers.Dense(2, dtype="float32")]
        self.model = keras.Sequential([keras.Input((3,)), *hidden])

    def per_example(self, features, training):
        logits = self.model(features["x"], training=training)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(features["label"], logits)
        return ddl.PerExample(losses * tf.square(features["factor"]))


def make_trainer(data, *, of_task=Task, **options):
    make = (of_task, lambda: keras.optimizers.Adam(0.01))
    options = {"policy": "float32", "steps_per_loop": 1, **options}
    return builders.make_trainer(make, data, **options)


def values(trainer):
    """The values on each replica of weights, moments, slots, and weight averages."""

    def copies(variables):
        local = trainer.strategy.experimental_local_results
        return [[copy.numpy() for copy in local(v.value)] for v in variables]

    own = copies([*trainer.model.variables, *trainer.optimizer.variables])
    with trainer.evaluation_weights():
        return [*own, *copies(trainer.model.variables)]


def assert_equal(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def test_an_overflow_on_the_second_replica_changes_nothing_but_the_scale():
    trainer = make_trainer(
        data_of(0, 1, 2, overflows=[1, 2]),
        policy="mixed_float16",
        loss_scale=ddl.LossScale(1024.0),
        weight_average=ddl.ExponentialMovingAverage(0.9),
        max_skipped_updates=2,
    )
    trainer.train(1, progress=False)
    assert trainer.loss_scale == 1024
    before = values(trainer)
    assert all(np.isfinite(copy).all() for copies in before for copy in copies)
    with pytest.raises(TrainingDiverged, match="gradient"):
        trainer.train(1, progress=False)
    assert trainer.loss_scale == 256
    assert (trainer.step, trainer.skipped_updates) == (1, 2)
    assert_equal(values(trainer), before)


def test_the_loss_scale_halves_down_to_1_and_doubles_after_good_updates():
    """With three good updates in a row as its interval. Parity compares the weights."""
    options = {"loss_scale": ddl.LossScale(2.0, growth_interval=3)}
    trainer = make_trainer(data_of(0, 1, 2, 3, 4, 5, overflows=[1, 2]), **options)
    scales = []
    for _ in range(4):
        trainer.train(1, progress=False)
        scales.append(trainer.loss_scale)
    assert scales == [2, 1, 1, 2]
    assert trainer.skipped_updates == 2


class TwoUpdates(Task):
    """Two applied gradients, an average and a count; only the second gradient overflows."""

    def __init__(self):
        super().__init__()
        self.target = keras.models.clone_model(self.model)
        self.count = tf.Variable(0, dtype=tf.int64)

    def plain(self, features, training):
        return self.per_example({**features, "factor": tf.ones_like(features["factor"])}, training)

    def step(self, update, batch):
        self.count.assign_add(1)
        update.minimize(self.plain, batch)
        update.average(self.target, of=self.model, decay=0.5)
        update.minimize(self.per_example, batch)


def test_a_late_overflow_undoes_the_whole_step():
    trainer = make_trainer(
        data_of(0, 1, overflows=[1]),
        of_task=TwoUpdates,
        loss_scale=ddl.LossScale(4.0),
        max_skipped_updates=1,
    )
    trainer.train(1, progress=False)
    target = trainer.task.target.get_weights()
    before = values(trainer)
    with pytest.raises(TrainingDiverged):
        trainer.train(1, progress=False)
    assert_equal(values(trainer), before)
    assert_equal(trainer.task.target.get_weights(), target)
    assert trainer.task.count.numpy() == 1


def test_a_loss_that_is_not_a_number_ends_the_run_and_names_the_step():
    trainer = make_trainer(data_of(0, 1, 2, overflows=[2]))
    trainer.train(2, progress=False)
    with pytest.raises(TrainingDiverged, match=r"step 3\b.*loss"):
        trainer.train(1, progress=False)
