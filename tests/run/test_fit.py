"""Whole runs from Python: what a resumed one compares, and how it ends."""

import os
import signal
import time

import numpy as np
import pytest

from ddl import Every, find_learning_rate
from ddl.errors import ModelDirectoryError, TrainingInterrupted
from tests.run.small import fit, lines, make_trainer


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    fit(make_trainer(class_weight={1: 5.0}), folder, train_steps=4, checkpoint_every=2)
    return folder


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"class_weight": {1: 50.0}}, ("class_weight", "5.0", "50.0")),
        ({"class_weight": {1: 5.0}, "momentum": 0.9}, ("momentum", "0.0", "0.9")),
        ({"class_weight": {1: 5.0}, "rate": 0.2}, ("optimizer.learning_rate: 0.1", "0.2")),
        ({"class_weight": {1: 5.0}, "activation": "tanh"}, ("Dense.activation", "tanh")),
        ({"class_weight": {1: 5.0}, "seed": 1}, ("seed: 0 → 1",)),
    ],
)
def test_a_resumed_run_of_other_arguments_is_refused(run, arguments, words):
    with pytest.raises(ModelDirectoryError) as raised:
        fit(make_trainer(**arguments), run, train_steps=6)
    assert [word for word in words if word not in str(raised.value)] == []


def test_a_resumed_run_says_so_and_has_the_whole_history(run, capsys):
    trainer = make_trainer(class_weight={1: 5.0})
    history = fit(trainer, run, train_steps=6, progress=True)
    out = capsys.readouterr().out
    assert "devices: CPU:0, OneDeviceStrategy; replicas: 1\nResuming step 4 of an earlier" in out
    assert [row["step"] for row in history if row["split"] == "eval"] == [4, 6]
    find_learning_rate(trainer, steps=10)
    trainer.optimizer.learning_rate = 0.01  # takes effect, since the trainer is at the checkpoint
    fit(trainer, run, train_steps=8, log_every=2)
    assert lines(run, ["train"])[-1]["learning_rate"] == pytest.approx(0.01)


def test_a_trained_trainer_drops_no_updates_and_its_run_is_compared(run, tmp_path):
    trainer = make_trainer(class_weight={1: 5.0})
    trainer.train(4, progress=False)
    with pytest.raises(ModelDirectoryError, match="has made 4 updates"):
        fit(trainer, run, train_steps=20)  # whose own step 4 has other weights
    fit(trainer, tmp_path, train_steps=5)
    with pytest.raises(ModelDirectoryError, match="class_weight"):
        fit(make_trainer(class_weight={1: 50.0}), tmp_path, train_steps=6)


@pytest.mark.parametrize(
    ("number", "error"),
    [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, TrainingInterrupted)],
)
def test_a_signal_saves_and_is_raised(tmp_path, number, error):
    def stop(event):
        if event.step == 2:
            os.kill(os.getpid(), number)
        if event.step >= 2:  # a thread hears of the signal, on a busy machine late
            time.sleep(1)

    trainer = make_trainer(steps_per_loop=1)
    with pytest.raises(error, match=number.name):
        fit(trainer, tmp_path, Every(1, stop), train_steps=50, checkpoint_every=None)
    assert 2 <= trainer.step < 50
    again = make_trainer()
    fit(again, tmp_path, train_steps=trainer.step)
    np.testing.assert_array_equal(again.model.get_weights()[0], trainer.model.get_weights()[0])


def test_the_best_weights_are_restored(tmp_path, capsys):
    """The rate rises after the first evaluation, so that it is the best."""
    trainer = make_trainer()

    def rise(event):
        event.trainer.optimizer.learning_rate = 1e3

    plan = {"eval_every": 4, "train_steps": 8, "restore_best": True, "progress": True}
    fit(trainer, tmp_path, Every(4, rise), **plan)
    assert trainer.step == 4
    assert "the best checkpoint's weights, of step 4" in capsys.readouterr().out
    assert trainer.history[-1]["step"] == 8
