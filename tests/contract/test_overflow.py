"""Updates that overflow are skipped on all replicas; a run that has diverged ends."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.errors import TrainingDiverged
from tests.contract import builders
from tests.contract.noisy_task import Averaging

BATCH = 8  # on two replicas, rows 4 to 7 of a batch lie on the second


def data_of(*batches, overflows=()):
    """Returns batches by their seeds, in the order in which a run without shuffling reads them."""
    rows = [np.random.default_rng(seed).normal(size=(BATCH, 3)) for seed in batches]
    factor = np.ones((len(batches), BATCH))
    factor[list(overflows), 5] = 3e38  # its square is infinite
    x = np.concatenate(rows).astype("float32")
    label, factor = np.arange(len(x)) % 2, factor.astype("float32").ravel()
    return {"x": x, "label": label.astype("int32"), "factor": factor}


class TwoUpdates(Averaging):
    """Applies two gradients; only the loss of the second one has a factor, and overflows."""

    def overflowing(self, features, training):
        losses = self.per_example(features, training).loss
        return ddl.PerExample(losses * tf.square(features["factor"]))

    def step(self, update, batch):
        super().step(update, batch)
        update.minimize(self.overflowing, batch)


def make_trainer(data, **options):
    make = (TwoUpdates, lambda: keras.optimizers.Adam(0.01))
    options = {"policy": "float32", "steps_per_loop": 1, **options}
    return builders.make_trainer(make, data, **options)


def values(trainer):
    """The values on each replica of weights, moments, slots, states and weight averages."""

    def copies(variables):
        local = trainer.strategy.experimental_local_results
        return [[copy.numpy() for copy in local(v.value)] for v in variables]

    task = trainer.task
    own = copies([*task.model.variables, *trainer.optimizer.variables, *task.target.variables])
    with trainer.evaluation_weights():
        return [*own, [task.count.numpy()], *copies(task.model.variables)]


def test_a_late_overflow_on_the_second_replica_undoes_the_whole_step():
    """Nothing changes but the scale."""
    trainer = make_trainer(
        data_of(0, 1, 2, overflows=[1, 2]),
        policy="mixed_float16",
        loss_scale=ddl.LossScale(1024.0),
        weight_average=ddl.ExponentialMovingAverage(0.9),
        max_skipped_updates=2,
    )
    trainer.train(1, progress=False)
    before = values(trainer)
    assert all(np.isfinite(copy).all() for copies in before for copy in copies)
    with pytest.raises(TrainingDiverged, match="gradient"):
        trainer.train(1, progress=False)
    assert trainer.loss_scale == 256
    assert (trainer.step, trainer.skipped_updates) == (1, 2)
    for one, other in zip(values(trainer), before, strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_loss_scale_halves_down_to_1_and_doubles_after_good_updates():
    """With three good updates in a row as its interval. Parity compares the weights."""
    options = {"loss_scale": ddl.LossScale(2.0, growth_interval=3), "where": ("one_device", 1)}
    trainer = make_trainer(data_of(0, 1, 2, 3, 4, 5, overflows=[1, 2]), **options)
    scales = []
    for _ in range(4):
        trainer.train(1, progress=False)
        scales.append(trainer.loss_scale)
    assert scales == [2, 1, 1, 2]
    assert trainer.skipped_updates == 2


def test_a_loss_that_is_not_a_number_ends_the_run_and_names_the_step():
    trainer = make_trainer(data_of(0, 1, 2, overflows=[2]), where=("one_device", 1))
    trainer.train(2, progress=False)
    with pytest.raises(TrainingDiverged, match=r"step 3\b.*loss"):
        trainer.train(1, progress=False)
