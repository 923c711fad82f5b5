"""A whole run from Python: `ddl.fit`."""

import json
import os
import signal
import sys
import threading

import keras
import numpy as np
import pytest
from ddl.callbacks.early_stopping import EarlyStopping, Evaluations

import ddl
from ddl.errors import ConfigError, DataError, ModelDirectoryError, TrainingInterrupted
from ddl.figures import is_measured
from ddl.run import fit
from ddl.training.actions import EachLoop, Periodic
from tests.conftest import make_strategy
from tests.training.rewinding import Start

RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.normal(size=(40, 3)).astype("f4")
DATA = {"image": IMAGES, "label": (IMAGES.sum(1) > 0).astype("i4")}
PERIODS = {"eval_every": 3, "checkpoint_every": 4, "log_every": 5}


@pytest.fixture(autouse=True)
def _pythons_own_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def make_trainer(**arguments):
    keras.utils.set_random_seed(3)
    with make_strategy("one_device", 1).scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        return ddl.Trainer(
            ddl.Classification(model),
            keras.optimizers.SGD(0.1, momentum=0.9),
            DATA,
            **{"eval_data": DATA, "global_batch_size": 8, "steps_per_loop": 1, **arguments},
        )


@pytest.fixture(scope="module")
def start():
    return Start(make_trainer())


@pytest.fixture
def trainer(start):
    trainer = start.again()
    trainer.history.drop_after(-1)
    return trainer


@pytest.fixture(scope="module")
def straight(start):
    """The weights after 20 steps."""
    trainer = start.again()
    trainer.train(20)
    return values(trainer)


def values(trainer):
    return [v.numpy() for v in [*trainer.model.variables, *trainer.optimizer.variables]]


def assert_same(values, others):
    for one, other in zip(values, others, strict=True):
        np.testing.assert_array_equal(one, other)


def lines(folder):
    """The lines of metrics.jsonl, as the history has them."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not is_measured(k)} for line in found]


def test_a_run_writes_what_the_command_writes(trainer, straight, tmp_path, capsys):
    history = ddl.fit(trainer, tmp_path / "run", train_steps=20, **PERIODS)
    assert_same(values(trainer), straight)
    written = lines(tmp_path / "run")
    trained = [line["step"] for line in written if line["split"] == "train"]
    evaluated = [line["step"] for line in written if line["split"] == "eval"]
    assert (trained, evaluated) == ([5, 10, 15, 20], [3, 6, 9, 12, 15, 18, 20])
    assert len(list((tmp_path / "run" / "train").iterdir())) == 1
    assert {"step-12.index", "step-16.index", "step-20.index"} <= {
        path.name for path in (tmp_path / "run" / "checkpoints").iterdir()
    }
    assert history is trainer.history
    rows = [{name: v for name, v in row.items() if v == v} for row in history]  # without NaN
    for row, line in zip(rows, written, strict=True):
        assert row.pop("epoch") == pytest.approx(line.pop("epoch"))
        assert row == line
    assert "step 20 · epoch 4.00 · eval · loss" in capsys.readouterr().out


def test_a_new_trainer_resumes_and_gets_the_history(trainer, straight, tmp_path, capsys):
    ddl.fit(trainer, tmp_path, train_steps=8, **PERIODS)
    other = make_trainer()
    other.optimizer.learning_rate = 0.5
    ddl.fit(other, tmp_path, train_epochs=4, **PERIODS)
    assert "Restored step 8" in (shown := capsys.readouterr().out)
    assert "is now 0.1, as in the checkpoint, and no longer 0.5" in shown
    assert_same(values(other), straight)
    assert [row["step"] for row in other.history] == [line["step"] for line in lines(tmp_path)]
    before = (tmp_path / "metrics.jsonl").read_bytes()
    ddl.fit(other, tmp_path, train_steps=20, **PERIODS)
    assert "Raise train_steps or train_epochs" in capsys.readouterr().out
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_what_is_set_between_two_calls_takes_effect(start, tmp_path, capsys):
    """With a directory as without: the trainer that saved the newest checkpoint stays as it is."""
    trained = []
    for model_dir in (None, tmp_path):
        trainer = start.again()
        ddl.fit(trainer, model_dir, train_steps=8, progress=False)
        trainer.optimizer.learning_rate = 0.01
        trainer.model.variables[0].assign(np.ones((3, 2)))
        ddl.fit(trainer, model_dir, train_steps=12)
        assert trainer.learning_rate == pytest.approx(0.01)
        trained.append(values(trainer))
    assert_same(*trained)
    assert "Continuing at step 8" in (shown := capsys.readouterr().out)
    assert "Restored" not in shown
    trainer._runner._lost_at = 12  # as after an error within a loop
    for of_other_updates in (False, True):
        if of_other_updates:
            start.again().train(12)
        ddl.fit(trainer, tmp_path, train_steps=12)
        assert "Restored step 12" in capsys.readouterr().out
        assert_same(values(trainer), trained[1])


def test_epochs_are_the_default_periods(trainer, tmp_path):
    history = ddl.fit(trainer, tmp_path, train_epochs=2, progress=False)
    assert [(row["step"], row["split"]) for row in history] == [
        (5, "train"),
        (5, "eval"),
        (10, "train"),
        (10, "eval"),
    ]


def test_without_a_directory_nothing_is_written(trainer, straight, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    ddl.fit(trainer, train_steps=12)
    ddl.fit(trainer, train_steps=20, progress=False)
    assert_same(values(trainer), straight)
    assert not list(tmp_path.iterdir())
    assert "Done: step 12" in capsys.readouterr().out


def test_progress_false_prints_nothing(trainer, tmp_path, capsys):
    ddl.fit(trainer, tmp_path, train_steps=3, progress=False)
    assert capsys.readouterr() == ("", "")


def test_interrupts_save_and_the_same_call_resumes(trainer, straight, tmp_path):
    """At random moments: restoring, training, evaluating, saving. A slow machine gets longer."""
    random = np.random.default_rng(1)
    interrupted = 0
    for number in range(60):
        delay = random.uniform(0, 0.03 * (1 + number))
        timer = threading.Timer(delay, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        try:
            ddl.fit(trainer, tmp_path, train_steps=20, progress=False, **PERIODS)
            timer.join()  # an interrupt after the run
        except KeyboardInterrupt:
            interrupted += 1
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert trainer.step == int(trainer.optimizer.iterations.numpy())
        if trainer.step == 20:
            break
    assert interrupted > 1
    assert trainer.step == 20
    assert_same(values(trainer), straight)
    evaluated = [line["step"] for line in lines(tmp_path) if line["split"] == "eval"]
    assert evaluated == [3, 6, 9, 12, 15, 18, 20]


@pytest.mark.parametrize(
    ("number", "error"),
    [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, TrainingInterrupted)],
)
def test_a_signal_ends_the_run_after_saving(trainer, straight, tmp_path, number, error):
    def interrupts(step):
        if step == 7:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), 0)

    def waits(step):
        while step == 7 and not trainer._runner.stop._read():
            pass

    actions = [EachLoop(interrupts), EachLoop(waits)]
    with pytest.raises(error):
        ddl.fit(trainer, tmp_path, train_steps=20, actions=actions, progress=False)
    assert (tmp_path / "checkpoints" / "step-7.index").exists()
    ddl.fit(trainer, tmp_path, train_steps=20, progress=False)
    assert_same(values(trainer), straight)


def test_a_signal_after_the_last_update_says_that_none_is_lost(trainer):
    action = EachLoop(lambda step: step == 2 and os.kill(os.getpid(), signal.SIGTERM))
    message = "SIGTERM arrived when the run had ended, so no update is lost.* with model_dir"
    with pytest.raises(TrainingInterrupted, match=message):
        ddl.fit(trainer, train_steps=2, actions=[action], progress=False)
    assert trainer.step == 2


@pytest.mark.parametrize("has_prompt", [False, True])
def test_a_second_signal_does_not_end_an_interactive_session(trainer, monkeypatch, has_prompt):
    if has_prompt:
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with fit._stopping(trainer) as stop:
        assert stop._second_ends != has_prompt


def test_an_action_ends_the_run_without_an_error(trainer, tmp_path, capsys):
    action = Periodic(6, lambda step: trainer.request_stop(), 20)
    ddl.fit(trainer, tmp_path, train_steps=20, actions=[action])
    assert trainer.step == 6
    assert "stopped on request at step 6" in capsys.readouterr().out


def test_a_thread_has_no_signals(trainer, tmp_path):
    arguments = {"train_steps": 4, "progress": False}
    thread = threading.Thread(target=ddl.fit, args=(trainer, tmp_path), kwargs=arguments)
    thread.start()
    thread.join()
    assert trainer.step == 4


class FromList:
    """Gives the evaluations of a trainer losses from a list."""

    def __init__(self, trainer, losses):
        self.losses = losses
        self.own = trainer._evaluations.run
        object.__setattr__(trainer._evaluations, "run", self)

    def __call__(self, state):
        return {**self.own(state), "loss": self.losses[int(state.step)]}


LOSSES = {2: 3.0, 4: 1.0, 6: 2.0, 7: 0.1, 8: 1.5, 10: 0.5, 12: 0.4, 14: 0.3, 16: 0.2}


@pytest.fixture
def losses(trainer):
    yield FromList(trainer, LOSSES).losses
    del trainer._evaluations.run


@pytest.mark.usefixtures("losses")
@pytest.mark.parametrize("stopped_at", [None, 4, 6])
def test_the_run_ends_early_with_its_best_weights(trainer, tmp_path, stopped_at, capsys):
    """Also if it was stopped in between: it counts the evaluations before."""
    plan = {"eval_every": 2, "checkpoint_every": 5, "early_stopping": EarlyStopping(patience=2)}
    if stopped_at is not None:
        ddl.fit(trainer, tmp_path, train_steps=stopped_at, **plan)
    for _ in range(2):  # the second call has nothing to do
        ddl.fit(trainer, tmp_path, train_steps=16, restore_best=True, **plan)
        assert trainer.step == 4
        assert trainer.history[-1]["step"] == 8
        assert "step 8: loss has not improved on 1, of step 4, in 2" in capsys.readouterr().out
    assert max(line["step"] for line in lines(tmp_path)) == 8
    trainer.train(1)


@pytest.mark.usefixtures("losses")
def test_without_a_directory_a_second_call_counts_the_evaluations_of_the_first(trainer, capsys):
    plan = {"eval_every": 2, "early_stopping": EarlyStopping(patience=2)}
    ddl.fit(trainer, train_steps=6, **plan)  # the best is that of step 4
    trainer.train(1, progress=False)
    trainer.evaluate()  # of the user's own: not a multiple of eval_every
    for _ in range(2):  # the second call has nothing to do
        ddl.fit(trainer, train_steps=16, **plan)
        assert trainer.step == 8
        assert "loss has not improved on 1, of step 4, in 2" in capsys.readouterr().out


@pytest.mark.usefixtures("losses")
def test_the_best_weights_of_a_whole_run(trainer, tmp_path):
    ddl.fit(trainer, tmp_path, train_steps=8, eval_every=2, restore_best=True, progress=False)
    assert trainer.step == 4


def test_evaluations():
    found = Evaluations(EarlyStopping("accuracy", 2))
    assert not found.are_over
    for step, value in ((1, 0.5), (2, 0.5), (3, 0.6), (4, None), (5, 0.6)):
        assert not found.are_over
        found.add(step, value)
    assert found.best_step == 3
    assert found.are_over
    assert str(found) == "accuracy has not improved on 0.6, of step 3, in 2 evaluations"
    found.drop_after(4)
    assert not found.are_over


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"patience": 0}, "at least 1, got 0"),
        ({"patience": 1.5}, "an integer, got 1.5"),
        ({"metric": "val_loss"}, "Write 'loss'"),
        ({"metric": "error"}, "mode is required for the metric 'error'"),
    ],
)
def test_bad_early_stopping(arguments, message):
    with pytest.raises(ConfigError, match=message):
        EarlyStopping(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "fit needs a length, either train_steps or train_epochs, got neither"),
        ({"train_steps": 3, "train_epochs": 1}, "train_steps = 3 and train_epochs = 1"),
        ({"train_steps": -1}, "train_steps must be an integer greater than 0, got -1"),
        ({"train_steps": 2.5}, "train_steps must be an integer greater than 0, got 2.5"),
        ({"train_epochs": "5"}, "train_epochs must be a number greater than 0, got '5'"),
        ({"train_epochs": -0.5}, "train_epochs must be a number greater than 0"),
        ({"train_steps": 3, "eval_every": 0}, "eval_every must be 'epoch', or an integer"),
        ({"train_steps": 3, "eval_every": "step"}, "eval_every must be 'epoch'"),
        ({"train_steps": 3, "log_every": None}, "log_every must be an integer or 'epoch'"),
        ({"train_steps": 3, "restore_best": True}, "restore_best needs checkpoints"),
        ({"train_steps": 3, "on_divergence": "rewind"}, "'rewind' needs checkpoints"),
        ({"train_steps": 3, "model_dir": ""}, "model_dir must be the path of a directory"),
        ({"train_steps": 3, "actions": 5}, "actions must be a list"),
        (
            {"train_steps": 3, "early_stopping": EarlyStopping("top_5_accuracy")},
            "must be a metric of the evaluation",
        ),
    ],
)
def test_bad_arguments(trainer, arguments, message):
    with pytest.raises(ConfigError, match=message):
        ddl.fit(trainer, **arguments)
    assert trainer.step == 0


def test_a_trainer_is_needed():
    with pytest.raises(ConfigError, match="fit needs a ddl.Trainer, got dict"):
        ddl.fit(DATA, train_epochs=5)


def test_without_evaluation_data():
    trainer = make_trainer(eval_data=None)
    for given in ({"eval_every": 5}, {"early_stopping": EarlyStopping()}):
        with pytest.raises(ConfigError, match=r"\w+ needs evaluation data"):
            ddl.fit(trainer, train_steps=2, **given)
    ddl.fit(trainer, train_steps=2, progress=False)
    assert [row["split"] for row in trainer.history] == ["train"]


def test_updates_that_no_checkpoint_has_are_not_dropped(trainer, tmp_path):
    ddl.fit(trainer, tmp_path, train_steps=4, progress=False)
    trainer.train(3)
    with pytest.raises(ModelDirectoryError, match="up to step 4, but the trainer has made 7"):
        ddl.fit(trainer, tmp_path, train_steps=20)
    assert trainer.step == 7


def test_data_that_cannot_be_read(tmp_path):
    with pytest.raises(DataError, match="label"):
        make_trainer(eval_data={"image": IMAGES})
