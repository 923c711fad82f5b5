"""The verdict on one batch."""

import math
import types

import pytest

from ddl.run.plan import RunPlan
from ddl.run.sanity import overfit

FIRST = {"loss": 2.0, "accuracy": 0.1}


@pytest.mark.parametrize(("end", "near"), [(0.02, True), (0.0201, False), (math.nan, False)])
def test_near_zero_is_a_share_of_the_first_loss(end, near):
    text = overfit.verdict(FIRST, {"loss": end}, {}, 300)
    assert "near zero." in text
    assert ("not near zero" not in text) == near
    assert ("Check these causes" in text) != near
    assert ("all 300 updates" in text) != near


@pytest.mark.parametrize("logs", [True, False])
def test_the_first_loss_is_that_of_one_update_logged_or_not(logs):
    history = [{"step": 1, "split": "train", "loss": 3.0}] if logs else []
    peeked = {"loss": math.nan if logs else 3.0}
    first = overfit.FirstLoss(types.SimpleNamespace(history=history, peek_metrics=lambda: peeked))
    assert (first.next_step(0), first.next_step(1)) == (1, None)
    first(1)
    history.append({"step": 2, "split": "train", "loss": 2.0})
    first(2)
    assert first.figures["loss"] == 3.0


def test_each_loss_is_judged():
    text = overfit.verdict({"loss/a": 2.0, "loss/b": 1.0}, {"loss/a": 0.0, "loss/b": 0.5}, {}, 9)
    assert "loss/a 2 at the first update, 0 after 9: 0.00% of the first, near zero." in text
    assert "50.00% of the first, not near zero" in text


def test_a_loss_below_zero_is_not_judged():
    text = overfit.verdict({"loss": -2.0}, {"loss": -9.0}, {}, 9)
    assert "cannot be judged" in text
    assert "Check these causes" not in text


def test_another_loss_in_evaluations_is_told():
    assert "BatchNorm" in overfit.verdict(FIRST, {"loss": 0.001}, {"loss": 1.5}, 300)
    assert "BatchNorm" not in overfit.verdict(FIRST, {"loss": 0.001}, {"loss": 0.001}, 300)


def test_the_plan_is_short_and_saves_at_its_end():
    plan = overfit.plan_of(RunPlan(train_epochs=5, eval_every=2, checkpoint_every=3), 1000)
    assert (plan.train_steps, plan.train_epochs) == (overfit.MOST_UPDATES, None)
    assert (plan.eval_every, plan.checkpoint_every, plan.log_every) == (None, None, 100)
    assert overfit.plan_of(RunPlan(train_steps=8), 10).log_every == 1
