"""Callbacks of a run: when they are called, what they may do, and the early end."""

import functools
import re

import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl import AfterEvaluation, AfterSave, EarlyStopping, Every
from ddl.errors import ConfigError
from tests.checkpoints.test_checkpoints import TwoWorkers
from tests.run.small import fit, lines, make_trainer, summaries


class Counting:
    def __init__(self):
        self.count = 0

    def __call__(self, event):
        self.count += 1
        tf.summary.image("kernel", np.zeros((1, 2, 2, 1)))
        return {"calls": self.count}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with callbacks of each kind, of which it notes the calls."""
    folder, called = tmp_path_factory.mktemp("run"), []

    def note(kind, event):
        called.append((kind, event.step, sorted(event.figures), event.checkpoint))

    kinds = (Every(4, functools.partial(note, "every")), Every(5, Counting()))
    kinds += (Every(5, lambda event: {"calls": 9}),)  # another figure of one name
    after = [one(functools.partial(note, one.__name__)) for one in (AfterEvaluation, AfterSave)]
    plan = {"eval_every": 4, "checkpoint_every": 8, "train_steps": 8}
    return folder, called, fit(make_trainer(), folder, *kinds, *after, **plan)


def test_evaluations_come_before_periods_and_these_before_saves(run):
    folder, called, _ = run
    order = [(kind, step) for kind, step, _, _ in called]
    assert order[:2] == [("AfterEvaluation", 4), ("every", 4)]
    assert order[2:] == [("AfterEvaluation", 8), ("every", 8), ("AfterSave", 8)]
    assert called[0][2] == ["accuracy", "loss"]
    assert {"accuracy", "loss"} <= set(called[1][2])
    assert called[-1][3] == folder / "checkpoints" / "step-8"


def test_returned_figures_and_summaries_are_written(run):
    folder, _, history = run
    assert [line["calls"] for line in lines(folder) if "calls" in line] == [1, 9]
    assert [row["calls"] for row in history if "calls" in row] == [1]  # as in a resumed run
    assert (5, "kernel", "images") in summaries(folder / "train")


def test_a_callback_with_a_variable_is_refused():
    counting = Counting()
    counting.count = tf.Variable(0)
    with pytest.raises(ConfigError, match="has the variable count, .* of the task"):
        Every(5, counting)


def test_times_have_a_page_of_their_own(run):
    tags = {tag for _, tag, _ in summaries(run[0] / "train")}
    assert {"loss", "accuracy", "learning_rate", "time/examples_per_second"} <= tags


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        ([Every(1, lambda event: 3)], "must return None, or a dict .*got 3"),
        ([Every(1, lambda event: {"loss": 1.0})], "'other/loss'.*got the name 'loss'"),
        ([Every(1, lambda event: event.trainer.train(1))], "Trainer.train was called by"),
        ([AfterSave(lambda event: {"other": 1.0})], "got figures of an AfterSave"),
        ([lambda event: None], r"must be a list of Every.*\[Every\(100, function\)\]"),
    ],
)
def test_mistakes_of_callbacks_are_named(callbacks, message, tmp_path):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        fit(make_trainer(), tmp_path, *callbacks, train_steps=2)


def spoil(event):
    event.trainer.model.layers[0].bias.assign([1.0, 2.0])


def test_an_after_save_that_changes_what_is_saved_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"changed \S*bias after the save"):
        fit(make_trainer(), tmp_path, AfterSave(spoil), train_steps=3)


def test_changes_that_differ_between_workers_are_refused(monkeypatch):
    """The second worker is played: its checksum of the changes is another one."""
    monkeypatch.setattr("ddl.run.callbacks.Workers", lambda strategy: TwoWorkers(other_digest=1.0))
    with pytest.raises(ConfigError, match=r"same changes on all workers.*here \S*bias"):
        fit(make_trainer(), None, Every(1, spoil), train_steps=2)


def test_a_function_of_other_arguments_is_refused():
    with pytest.raises(ConfigError, match=r"Every.function must be a function of \(event\)"):
        Every(1, lambda: None)
    with pytest.raises(ConfigError, match=re.escape("write @Counting()")):
        Every(1, Counting)


def test_a_run_ends_when_evaluations_do_not_improve_and_stays_ended(tmp_path, capsys):
    """At a rate of 0 the first evaluation stays the best."""
    plan = {"eval_every": 2, "train_steps": 20, "progress": True}
    trainer = make_trainer(rate=0.0)
    rule = EarlyStopping("loss", patience=2)
    fit(trainer, tmp_path, rule, **plan)
    assert trainer.step == 6
    assert capsys.readouterr().out.count("loss has not improved on") == 1
    again = make_trainer(rate=0.0)
    fit(again, tmp_path, rule, **plan)
    assert again.step == 6
    longer = make_trainer(rate=0.0)
    ddl.fit(longer, tmp_path, train_steps=8, progress=False)
    assert longer.step == 8
