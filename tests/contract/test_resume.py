"""A run that ended anywhere ends, started again, with the weights that it would have had."""

import shutil
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl import AfterSave, Every
from ddl.errors import DdlError
from tests.contract import builders
from tests.contract.commands import results
from tests.contract.noisy_task import Averaging, few_examples

ROWS, STEPS = 20, 8  # three steps an epoch; the last batch has 4 rows
DATA = few_examples()
PERIODS = {"eval_every": 4, "log_every": 2, "progress": False}


def make_trainer(where=("mirrored", 2), data=DATA):
    """A trainer with Adam, an average of the weights and a loss scale that grows."""
    return builders.make_trainer(
        (Averaging, lambda: keras.optimizers.Adam(0.01)),
        data,
        where,
        eval_data=DATA,
        shuffle=True,
        seed=3,
        weight_average=ddl.ExponentialMovingAverage(0.9),
        loss_scale=ddl.LossScale(4.0, growth_interval=3),
    )


def values(trainer):
    own = [v.numpy() for v in [*trainer.model.variables, *trainer.optimizer.variables]]
    own += [*trainer.task.target.get_weights(), trainer.task.count.numpy()]
    with trainer.evaluation_weights():
        return [*own, *trainer.model.get_weights(), trainer.loss_scale, trainer.step]


def assert_close(found, wanted, tolerance=0.0):
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """An uninterrupted run, and copies of its directory as a kill after each save leaves it."""
    folder = tmp_path_factory.mktemp("straight")
    copies = {}

    def keep(event):
        copies[event.step] = shutil.copytree(folder / "run", folder / f"killed-{event.step}")

    trainer = make_trainer()
    options = {"checkpoint_every": 1, "callbacks": [AfterSave(keep)]}
    ddl.fit(trainer, folder / "run", train_steps=STEPS, **options, **PERIODS)
    return SimpleNamespace(values=values(trainer), lines=results(folder / "run"), killed_at=copies)


@pytest.mark.parametrize("where", [("one_device", 1), ("central_storage", 4)])
def test_a_killed_run_resumes_on_other_devices(straight, where, tmp_path):
    folder = shutil.copytree(straight.killed_at[2], tmp_path / "run")
    trainer = make_trainer(where)
    ddl.fit(trainer, folder, train_steps=STEPS, checkpoint_every=None, **PERIODS)
    assert_close(values(trainer), straight.values, 1e-10)
    for found, wanted in zip(results(folder), straight.lines, strict=True):
        assert found[0] == wanted[0]
        numbers = [np.array(row[1:], "f8") for row in (found, wanted)]  # None becomes NaN
        np.testing.assert_allclose(*numbers, rtol=1e-10)


class Failing:
    """Examples that cannot be read any more after so many reads."""

    def __init__(self, reads):
        self._left = reads

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        if self._left == 0:
            raise OSError("the disk failed")
        self._left -= 1
        return {name: values[index] for name, values in DATA.items()}


def test_a_run_that_was_killed_failed_and_stopped_resumes_to_the_same_bits(straight):
    """At the end of an epoch, with metrics that were not logged yet; then within the next one."""
    folder = straight.killed_at[3]
    options = {"train_steps": STEPS, "checkpoint_every": 1, **PERIODS}
    failing = make_trainer(data=ddl.data.Source(Failing(reads=30)))
    with pytest.raises((DdlError, OSError, tf.errors.OpError), match="the disk failed"):
        ddl.fit(failing, folder, **options)
    trainer = make_trainer()
    stop = Every(1, lambda event: trainer.request_stop() if event.step == 7 else None)
    ddl.fit(trainer, folder, callbacks=[stop], **options)
    assert trainer.step == 7
    ddl.fit(trainer, folder, **options)
    assert_close(values(trainer), straight.values)
    assert results(folder) == straight.lines
