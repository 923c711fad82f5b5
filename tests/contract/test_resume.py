"""A run that ended anywhere ends, started again, with the weights that it would have had."""

import json
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
from tests.contract.noisy_task import NoisyTask, few_examples

ROWS, STEPS = 20, 8  # three steps an epoch; the last batch has 4 rows
DATA = few_examples()
PERIODS = {"eval_every": 4, "log_every": 2, "progress": False}


class Task(NoisyTask):
    """The noisy task with a step and two states of its own: a target network and a count."""

    def __init__(self):
        super().__init__()
        self.target = keras.models.clone_model(self.model)
        self.count = tf.Variable(0, dtype=tf.int64)

    def step(self, update, batch):
        self.count.assign_add(1)
        update.minimize(self.per_example, batch)
        update.average(self.target, of=self.model, decay=0.5)


def make_trainer(where=("mirrored", 2), data=DATA):
    """A trainer with Adam, an average of the weights and a loss scale that grows."""
    return builders.make_trainer(
        (Task, lambda: keras.optimizers.Adam(0.01)),
        data,
        where,
        eval_data=DATA,
        shuffle=True,
        seed=3,
        weight_average=ddl.ExponentialMovingAverage(0.9),
        loss_scale=ddl.LossScale(4.0, growth_interval=3),
    )


def values(trainer):
    variables = [*trainer.model.variables, *trainer.optimizer.variables]
    own = [v.numpy() for v in variables]
    own += [*trainer.task.target.get_weights(), trainer.task.count.numpy()]
    with trainer.evaluation_weights():
        return [*own, *trainer.model.get_weights(), trainer.loss_scale, trainer.step]


def lines(folder):
    """The figures of a run, without those of time and memory."""
    names = ("step", "epoch", "loss", "accuracy", "loss_scale")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    figures = [{name: row[name] for name in names if name in row} for row in rows]
    return [{**own, row["split"]: True} for own, row in zip(figures, rows, strict=True)]


def assert_close(found, wanted, tolerance=0.0):
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """An uninterrupted run, and copies of its directory as a kill after each save leaves it."""
    folder = tmp_path_factory.mktemp("straight")
    copies = {}

    def keep(moment):
        copies[moment.step] = shutil.copytree(folder / "run", folder / f"killed-{moment.step}")

    trainer = make_trainer()
    options = {"checkpoint_every": 1, "callbacks": [AfterSave(keep)]}
    ddl.fit(trainer, folder / "run", train_steps=STEPS, **options, **PERIODS)
    return SimpleNamespace(values=values(trainer), lines=lines(folder / "run"), killed_at=copies)


def test_a_killed_run_resumes_to_the_same_bits(straight):
    """At the end of an epoch, with metrics that were not logged yet."""
    folder, trainer = straight.killed_at[3], make_trainer()
    ddl.fit(trainer, folder, train_steps=STEPS, checkpoint_every=1, **PERIODS)
    assert_close(values(trainer), straight.values)
    assert lines(folder) == straight.lines


@pytest.mark.parametrize("where", [("one_device", 1), ("mirrored", 4), ("central_storage", 2)])
def test_a_killed_run_resumes_on_other_devices(straight, where, tmp_path):
    folder = shutil.copytree(straight.killed_at[2], tmp_path / "run")
    trainer = make_trainer(where)
    ddl.fit(trainer, folder, train_steps=STEPS, checkpoint_every=None, **PERIODS)
    assert_close(values(trainer), straight.values, 1e-10)
    for found, wanted in zip(lines(folder), straight.lines, strict=True):
        assert found == pytest.approx(wanted, rel=1e-10)


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


def test_a_run_that_failed_or_was_stopped_resumes_to_the_same_bits(straight, tmp_path):
    """Within an epoch: its data fail, then a callback; then it is asked to stop."""
    options = {"train_steps": STEPS, "checkpoint_every": 2, **PERIODS}

    def source(reads):
        return ddl.data.Source(Failing(reads))

    def fail(moment):
        if moment.step == 5:
            raise OSError("the disk failed")

    def stop(moment):
        if moment.step == 7:
            trainer.request_stop()

    trainer = make_trainer(data=source(40))  # eight steps read 56
    with pytest.raises((DdlError, OSError, tf.errors.OpError), match="the disk failed"):
        ddl.fit(trainer, tmp_path, **options)
    assert trainer.step < 5
    with pytest.raises(OSError, match="the disk failed"):
        ddl.fit(make_trainer(), tmp_path, callbacks=[Every(1, fail)], **options)
    trainer = make_trainer(data=source(1_000))
    ddl.fit(trainer, tmp_path, callbacks=[Every(1, stop)], **options)
    assert trainer.step == 7
    ddl.fit(trainer, tmp_path, **options)
    assert_close(values(trainer), straight.values)
    assert lines(tmp_path) == straight.lines


class Counting:
    """A task whose weights count how often each example was seen."""

    def __init__(self):
        self.model = keras.Sequential([keras.Input((ROWS,)), keras.layers.Dense(1, use_bias=False)])

    def per_example(self, features, training):
        return ddl.PerExample(self.model(features["one_hot"], training=training)[:, 0])


def test_an_epoch_sees_each_example_once_across_resumes(tmp_path):
    def make():
        rate, data = (lambda: keras.optimizers.SGD(4.0)), {"one_hot": np.eye(ROWS)}
        options = {"global_batch_size": 4, "shuffle": True}
        trainer = builders.make_trainer((Counting, rate), data, **options)
        trainer.model.set_weights([np.zeros((ROWS, 1))])
        return trainer

    seen, trainers = {}, [make(), make()]
    for steps, trainer in zip((3, 5, 8, 10), [*trainers, *trainers], strict=True):
        ddl.fit(trainer, tmp_path, train_steps=steps, checkpoint_every=None, progress=False)
        seen[steps] = -trainer.model.get_weights()[0][:, 0]
    np.testing.assert_array_equal(seen[5], np.ones(ROWS))
    np.testing.assert_array_equal(seen[10], np.full(ROWS, 2))
    assert sorted(seen[3]) == [0] * 8 + [1] * 12
    assert sorted(seen[8] - 1) == [0] * 8 + [1] * 12
    assert (seen[3] != seen[8] - 1).any()  # each epoch has an order of its own
