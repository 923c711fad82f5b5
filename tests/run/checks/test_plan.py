"""Checks of a run plan against its Trainer."""

from types import SimpleNamespace

import keras
import pytest
from ddl.run.checks.plan import without_effect

import ddl
from ddl.checkpoints.retention import Retention
from ddl.errors import ConfigError
from ddl.optimizers.plateau import ReduceOnPlateau
from ddl.run.plan import RunPlan
from tests.run.test_train import DIGITS_MLP, run


def test_evaluations_need_data(tmp_path):
    without = ("Trainer.eval_data = None", "EVAL_EVERY = 20")
    unused = ("test/images.split",)
    for mode in ("train", "train_and_eval"):
        with pytest.raises(ConfigError, match="EVAL_EVERY is 20, but there is no data to eval"):
            run(tmp_path / "run", *without, allow_unused=unused, mode=mode, **DIGITS_MLP)
    assert list(tmp_path.iterdir()) == []


def noted(evaluates=True, optimizer=None, **plan):
    optimizer = optimizer or keras.optimizers.SGD(0.1)
    trainer = SimpleNamespace(steps_per_epoch=10, optimizer=optimizer)
    return "; ".join(without_effect(RunPlan(**plan), trainer, evaluates))


def test_settings_without_effect_in_a_run_of_this_length_are_noted():
    kept = Retention(every=50)
    assert "Retention.every is 50, but the run ends at step 40, so it has no effect" in noted(
        train_epochs=4, checkpoint_every=50, retention=kept
    )
    assert noted(train_steps=50, checkpoint_every=50, retention=kept) == ""
    best = Retention(best_metric="loss")
    assert "does not evaluate, so Retention.best_metric has no effect" in noted(
        False, train_steps=40, eval_every=10, retention=best
    )
    for eval_every in (None, 40):
        plan = {"train_steps": 40, "eval_every": eval_every, "retention": best}
        assert "the last checkpoint is the best" in noted(**plan)
    assert noted(train_steps=40, eval_every=39, retention=best) == ""


def test_a_patience_beyond_the_run_is_noted():
    optimizer = keras.optimizers.SGD(ReduceOnPlateau(0.1, patience=3))
    assert "the run has only 3 evaluations before its end" in noted(
        optimizer=optimizer, train_steps=40, eval_every=10
    )
    assert noted(optimizer=optimizer, train_steps=41, eval_every=10) == ""
    rule = ddl.EarlyStopping(patience=3)
    for steps, evaluations, effect in (
        (40, 3, "ends early only if loss is NaN in all of them"),
        (30, 2, "never ends early"),
    ):
        assert (
            f"EarlyStopping.patience is 3, but the run has only {evaluations} evaluations before "
            f"its end, so it {effect}."
            in noted(early_stopping=rule, train_steps=steps, eval_every=10)
        )
    assert noted(early_stopping=rule, train_steps=41, eval_every=10) == ""
