"""Callbacks in runs of `ddl.fit`: when they are called, and what they may do."""

import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.callbacks import (
    AfterEvaluation,
    AfterSave,
    Every,
)
from ddl.data.pipeline import BatchPipeline
from ddl.errors import ConfigError
from ddl.training.runner import LoopRunner
from tests.callbacks.runs import DATA, events, fit, lines, make_trainer, weights


def test_they_are_called_in_order(trainer, tmp_path):
    """After the evaluation of a step and before its save; the last step alone is no multiple."""
    calls = []

    def note(name):
        return lambda moment: calls.append((moment.step, name))

    def after_save(moment):
        assert moment.checkpoint.with_suffix(".index").exists()
        calls.append((moment.step, f"saved {moment.checkpoint.name}"))

    plan = {"train_steps": 10, "checkpoint_every": 5}
    given = Every(4, note("every")), AfterEvaluation(note("evaluated")), AfterSave(after_save)
    fit(trainer, tmp_path, *given, **plan)
    assert calls == [
        (4, "evaluated"),
        (4, "every"),
        (5, "saved step-5"),
        (8, "evaluated"),
        (8, "every"),
        (10, "evaluated"),
        (10, "saved step-10"),
    ]


def test_the_best_checkpoint_holds_what_callbacks_changed(trainer, tmp_path):
    """It is saved for an evaluation, after which they are called."""

    def change(moment):
        moment.trainer.task.weight.assign(moment.step)

    retention = ddl.Retention(best_metric="loss")
    fit(trainer, tmp_path, Every(4, change), checkpoint_every=None, retention=retention)
    reader = tf.train.load_checkpoint(str(tmp_path / "checkpoints" / "step-4"))
    assert float(reader.get_tensor("task/0000")) == 4.0


@pytest.mark.parametrize("ends", [4, 5, 6])
def test_a_changed_loss_weight_is_resumed(trainer, tmp_path, ends):
    """From a checkpoint of the step of a call too."""

    def rise(moment):
        moment.trainer.task.weight.assign(moment.step / 4)
        return {"weight": moment.trainer.task.weight}

    fit(trainer, None, Every(2, rise))
    straight = weights(trainer)
    fit(other := make_trainer(), tmp_path, Every(2, rise), train_steps=ends)
    fit(other := make_trainer(), tmp_path, Every(2, rise))
    assert float(other.task.weight) == 3.0
    for one, two in zip(weights(other), straight, strict=True):
        np.testing.assert_array_equal(one, two)
    logged = {row["step"]: row["weight"] for row in lines(tmp_path) if "weight" in row}
    assert logged == {step: step / 4 for step in range(2, 13, 2)}
    assert other.history.figures()["weight"][-1] == 3.0


class Counter:
    """A callback with a state of its own."""

    def __init__(self):
        self.calls = tf.Variable(0)
        self.drawn = []

    def __call__(self, moment):
        self.calls.assign_add(1)
        self.drawn.append(moment.random.integers(1000))


def test_variables_of_a_callback_are_saved(trainer, tmp_path):
    straight, beside = Counter(), Counter()
    fit(trainer, None, Every(2, straight), Every(2, beside))
    fit(make_trainer(), tmp_path, Every(2, first := Counter()), train_steps=6)
    second, other = Counter(), make_trainer()
    fit(other, tmp_path, Every(2, second))
    assert int(second.calls) == int(straight.calls) == 6
    assert first.drawn + second.drawn == straight.drawn
    assert len(set(straight.drawn)) == 6
    assert beside.drawn != straight.drawn  # though they have one name
    with pytest.raises(
        ddl.errors.ModelDirectoryError, match="holds variables of callbacks: pass those"
    ):
        fit(make_trainer(), tmp_path, train_steps=14)
    trainer = make_trainer()
    ddl.Checkpoints(tmp_path / "checkpoints", trainer).restore_model()  # to evaluate
    assert trainer.step == 12


def test_figures_are_those_of_the_evaluation_or_of_training(trainer, tmp_path):
    seen = {}

    def note(moment):
        seen[moment.step, "loss" in moment.figures] = moment.figures

    fit(trainer, tmp_path, Every(6, note))
    logged = {row["step"]: row for row in lines(tmp_path) if row["split"] == "train"}
    assert seen[6, True]["loss"] == logged[6]["loss"]
    seen.clear()
    fit(make_trainer(), tmp_path / "other", AfterEvaluation(note))
    evaluated = {row["step"]: row for row in lines(tmp_path / "other") if row["split"] == "eval"}
    assert {step: figures["loss"] for (step, _), figures in seen.items()} == {
        step: row["loss"] for step, row in evaluated.items()
    }


def test_a_long_period_costs_no_loop_and_no_fetch(trainer, start, monkeypatch):
    """A callback that does nothing is one Python call at each of its steps."""
    ends, fetched = [], []
    run_loop, means = LoopRunner.run_loop, type(trainer).peek_metrics
    monkeypatch.setattr(
        LoopRunner, "run_loop", lambda self, end: (ends.append(end), run_loop(self, end))[1]
    )
    monkeypatch.setattr(
        type(trainer), "peek_metrics", lambda self: (fetched.append(1), means(self))[1]
    )
    plan = {"eval_every": None, "checkpoint_every": None, "log_every": 12}
    costs = []
    nothing = Every(24, lambda moment: None), Every(12, lambda moment: None)
    for callbacks in ((), nothing):
        fit(start.again(), None, *callbacks, **plan)
        costs.append((ends.copy(), len(fetched)))
        ends.clear()
        fetched.clear()
    assert costs[0] == costs[1]
    assert costs[0][0] == [12]
    fit(start.again(), None, Every(5, lambda moment: None), **plan)
    assert ends == [5, 10, 12]
    assert len(fetched) == costs[0][1]


def test_tensorboard(trainer, tmp_path):
    def show(moment):
        moment.write.images("pictures", np.zeros([2, 4, 4, 3], "u1"))
        moment.write.text("words", "**two**")
        moment.write.histogram("numbers", moment.trainer.model.variables[0])

    fit(trainer, tmp_path, Every(4, show), AfterEvaluation(show))
    expected = [("pictures", "images"), ("words", "text"), ("numbers", "histograms")]
    for split in ("train", "eval"):
        written = [event for event in events(tmp_path, split) if event[2] != "scalars"]
        assert [event[1:] for event in written if event[0] == 4] == expected
        assert {event[0] for event in written if event[1]} == {4, 8, 12}


def test_a_resumed_run_writes_no_picture_twice(trainer, tmp_path):
    def show(moment):
        moment.write.text("words", "two")
        if moment.step == 8 and not crashed:
            crashed.append(moment.step)
            raise KeyError("own")

    crashed = []
    with pytest.raises(KeyError):
        fit(trainer, tmp_path, Every(2, show))
    fit(make_trainer(), tmp_path, Every(2, show))
    found = [step for step, tag, _ in events(tmp_path, "train") if tag == "words"]
    assert found == [2, 4, 6, 8, 10, 12]


def test_a_callback_ends_the_run(trainer, tmp_path, capsys):
    def enough(moment):
        if moment.step >= 6:
            moment.end("the weight is large")

    callbacks = [Every(50, enough), Every(2, enough)]
    ddl.fit(trainer, tmp_path, train_steps=12, checkpoint_every=3, callbacks=callbacks)
    assert trainer.step == 6
    assert "ends early at step 6: enough: the weight is large." in capsys.readouterr().out
    other = make_trainer()
    ddl.fit(other, tmp_path, train_steps=12, checkpoint_every=3, callbacks=callbacks)
    assert other.step == 6
    assert "The callback enough 2 ended the run at step 6" in capsys.readouterr().out
    fit(other, tmp_path, callbacks[0])
    assert other.step == 12


def test_early_stopping_among_the_callbacks(trainer, tmp_path, capsys):
    plan = {"train_steps": 40, "eval_every": 2, "checkpoint_every": 10}
    rule = ddl.EarlyStopping("accuracy", patience=2, mode="min")
    ddl.fit(trainer, tmp_path, callbacks=[rule], **plan)
    step = trainer.step
    assert step < 40
    assert f"ends early at step {step}: accuracy has not improved" in capsys.readouterr().out
    trainer = make_trainer()
    ddl.fit(trainer, tmp_path, callbacks=[rule], **plan)
    assert f"The run ended early at step {step}" in capsys.readouterr().out


def one_too_many(moment, figures):
    pass


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Every(0, print), "Every.steps must be an integer of at least 1"),
        (lambda: Every(2.5, print), "got 2.5"),
        (lambda: Every(True, print), "got True"),
        (lambda: Every(5, one_too_many), r"function of \(moment\), got .*test_callbacks.py:\d+: o"),
        (lambda: AfterSave(lambda: None), r"AfterSave.function must be a function of \(moment\)"),
        (lambda: AfterEvaluation("show"), "got 'show'"),
        (lambda: Every(5, Counter), "must be a function of"),
        (lambda: Every(5, print, on="cheif"), "Every.on must be 'all' or 'chief', got 'cheif'"),
    ],
)
def test_bad_callbacks(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        ([print], "write Every"),
        (print, "callbacks must be a list"),
        ([ddl.EarlyStopping("top_5_accuracy")], "EarlyStopping.metric must be a metric of the"),
        ([ddl.EarlyStopping(), ddl.EarlyStopping()], "has one EarlyStopping, got 2"),
    ],
)
def test_bad_lists(trainer, callbacks, message):
    with pytest.raises(ConfigError, match=message):
        ddl.fit(trainer, train_steps=2, callbacks=callbacks)
    assert trainer.step == 0


def test_without_evaluation_data():
    with pytest.raises(ConfigError, match=r"AfterEvaluation .print. needs evaluations"):
        ddl.fit(make_trainer(eval_data=None), train_steps=2, callbacks=[AfterEvaluation(print)])


BAD_CALLS = {
    "Trainer.train was called by a callback": lambda moment: moment.trainer.train(1),
    "Trainer.restore was called": lambda moment: moment.trainer.restore(moment.trainer.state),
    "must return None, or a dict from name to number, got 5": lambda moment: 5,
    "got 'high' for 'loudness'": lambda moment: {"loudness": "high"},
    "got the name 'step'": lambda moment: {"step": 5},
    "got the name 'accuracy', .* a prefix, such as 'other/accuracy'": lambda m: {"accuracy": 0.5},
    "got the name 'loss', .* a prefix, such as 'other/loss'": lambda m: m.trainer.evaluate(DATA),
    "got the name 'loss_weight/kl'": lambda moment: {"loss_weight/kl": 0.5},
    "floats from 0 to 1, got values from -1": lambda moment: moment.write.images(
        "x", -np.ones([1, 2, 2, 1])
    ),
    r"images\('x'\) in the callback .*: .* 1, 3 or 4 channels, .* Reshape": lambda moment: (
        moment.write.images("x", np.ones([1, 2, 2]))
    ),
    r"text\('x'\) in the callback .*must be a str, got int. Pass": lambda moment: moment.write.text(
        "x", 5
    ),
    "1 of them not finite. Leave these out": lambda moment: moment.write.histogram("x", [np.nan]),
}


@pytest.mark.parametrize("message", BAD_CALLS)
def test_bad_calls(trainer, message):
    with pytest.raises(ConfigError, match=message):
        fit(trainer, None, Every(2, BAD_CALLS[message]))
    assert trainer.step == 2
    trainer.train(1)  # the trainer is whole


def test_a_callback_cannot_restore(trainer, tmp_path):
    checkpoints = ddl.Checkpoints(tmp_path, trainer)
    checkpoints.save()
    checkpoints.finish()
    for restore in (checkpoints.restore_latest, checkpoints.restore_model):
        with pytest.raises(ConfigError, match="Restoring a checkpoint was called by a callback"):
            fit(trainer, None, Every(2, lambda moment, restore=restore: restore()))
    assert trainer.step == 4


def zeroes(moment):
    moment.trainer.model.variables[0].assign(np.zeros([3, 2]))


AFTER_SAVES = {
    "but after the save, so a resumed": lambda m: m.trainer.task.weight.assign(2.0) and None,
    r"Counter changed what a checkpoint holds": Counter(),
    "zeroes changed what a checkpoint holds": zeroes,
    "returned figures after a save": lambda moment: {"x": 1.0},
    "ends the run after a save": lambda moment: moment.end("enough"),
}


@pytest.mark.parametrize("message", AFTER_SAVES)
def test_nothing_may_change_after_a_save(trainer, tmp_path, message):
    with pytest.raises(ConfigError, match=message):
        fit(trainer, tmp_path, AfterSave(AFTER_SAVES[message]))


def test_pipelines_of_other_sources_are_as_before(trainer):
    assert all(type(one) is BatchPipeline for one in trainer.pipelines.values())
