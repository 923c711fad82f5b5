"""The state of callbacks: in checkpoints, after a resume, and after a rewind."""

import signal

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.callbacks import Every
from ddl.errors import ConfigError, TrainingInterrupted
from ddl.run.loop import OuterLoop
from tests.callbacks.runs import fit, lines


class Critic:
    """A callback that trains a model of its own."""

    def __init__(self):
        self.model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        self.optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        self.optimizer.build(self.model.trainable_variables)

    def __call__(self, moment):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(self.model(tf.ones([1, 1])) - moment.step)
        variables = self.model.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)

    def values(self):
        return [v.numpy() for v in [*self.model.variables, *self.optimizer.variables]]


def test_models_and_optimizers_of_a_callback_are_saved(trainer, tmp_path):
    keras.utils.set_random_seed(5)
    first = Critic()
    fit(trainer, tmp_path, Every(2, first), train_steps=6)
    fit(trainer, tmp_path, Every(2, second := Critic()), train_steps=6)
    assert int(second.optimizer.iterations) == 3
    assert len(second.values()) == 6
    for one, two in zip(first.values(), second.values(), strict=True):
        np.testing.assert_array_equal(one, two)


class Late:
    """A callback that makes its state at the first call."""

    def __init__(self, **attributes):
        vars(self).update(attributes)

    def __call__(self, moment):
        self.make()


LATE = {
    "Late/calls, which": lambda late: setattr(late, "calls", tf.Variable(0)),
    "dense.*/kernel, .*dense.*/bias": lambda late: late.model(tf.ones([1, 2])),
    "kernel_momentum, .*bias_momentum": lambda late: late.optimizer.build(LAYER.variables),
}
LAYER = keras.layers.Dense(1)
LAYER.build([1, 2])


@pytest.mark.parametrize("names", LATE)
def test_a_state_that_no_checkpoint_holds_is_refused(trainer, tmp_path, names):
    late = Late(model=keras.Sequential([keras.layers.Dense(1)]))
    late.optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    late.make = lambda: LATE[names](late)
    with pytest.raises(ConfigError, match=f"Late has the variables .*{names}.* in __init__"):
        fit(trainer, tmp_path, Every(3, late))
    assert trainer.step == 3


class Spoils:
    """A callback with a state, which makes the weights not finite at the first step 6."""

    def __init__(self, ends=False, signals=False):
        self.calls = tf.Variable(0)
        self._at_six = [lambda moment: moment.end("enough")] if ends else []
        self._at_six += [lambda _: signal.raise_signal(signal.SIGTERM)] if signals else []
        self.steps = []

    def __call__(self, moment):
        self.calls.assign_add(1)
        moment.trainer.task.weight.assign_add(0.5)
        if moment.step == 6 and 6 not in self.steps:
            moment.trainer.model.variables[0].assign(np.full([3, 2], np.nan))
            for do in self._at_six:
                do(moment)
        self.steps.append(moment.step)
        return {"calls": self.calls}


PLAN = {"train_steps": 9, "checkpoint_every": 3, "log_every": 3, "on_divergence": "rewind"}


def test_a_rewind_restores_callbacks_and_forgets_their_end(trainer, tmp_path, capsys):
    callback = Spoils(ends=True)
    ddl.fit(trainer, tmp_path, callbacks=[Every(2, callback)], **PLAN)
    output = capsys.readouterr().out
    assert "The run rewinds to step 3" in output
    assert "Training stopped" not in output
    assert trainer.step == 9
    assert callback.steps == [2, 4, 6, 4, 6, 8]
    assert int(callback.calls) == 4
    assert float(trainer.task.weight) == 3.0
    logged = [(row["step"], row["calls"]) for row in lines(tmp_path) if "calls" in row]
    assert logged == [(2, 1), (4, 2), (6, 3), (8, 4)]
    assert list(trainer.history.figures()["calls"][[0, -2]]) == [1, 4]


def test_a_rewind_forgets_evaluations(trainer, tmp_path, capsys, monkeypatch):
    """Those that end the run, the best one, and the figures of steps that it repeats."""
    rewind, kept = OuterLoop._rewind, []

    def rewound(loop, error):
        assert loop._best_step == loop._evaluated[0] == loop._logged[0] == 6
        rewind(loop, error)
        kept.extend([loop._best_step, loop._evaluated[0], loop._logged[0]])

    monkeypatch.setattr(OuterLoop, "_rewind", rewound)
    monkeypatch.setattr(OuterLoop, "_save_if_best", lambda loop, step: None)
    rule = ddl.EarlyStopping("accuracy", patience=1, mode="min")
    best = ddl.Retention(best_metric="loss")
    callbacks = [rule, Every(2, Spoils())]
    ddl.fit(trainer, tmp_path, callbacks=callbacks, eval_every=3, retention=best, **PLAN)
    assert kept == [-1, -1, -1]
    output = capsys.readouterr().out
    assert "The run rewinds to step 3" in output
    assert "The run ends early at step 6: accuracy has not improved" in output


def test_a_signal_survives_a_rewind(trainer, tmp_path):
    with pytest.raises(TrainingInterrupted, match="stopped on SIGTERM at step 3 of 9"):
        ddl.fit(trainer, tmp_path, callbacks=[Every(2, Spoils(ends=True, signals=True))], **PLAN)
