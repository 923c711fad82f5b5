import pytest

from ddl.checkpoints.retention import Retention
from ddl.errors import ConfigError
from ddl.run.plan import RunPlan


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "TRAIN_STEPS = None and TRAIN_EPOCHS = None. Set one of them.$"),
        (
            {"train_steps": 1, "train_epochs": 1},
            "TRAIN_STEPS = 1 and TRAIN_EPOCHS = 1. Set one of them to None",
        ),
        ({"train_steps": 0}, "RunPlan.train_steps must be greater than 0, got 0"),
        ({"train_steps": 2**53 + 1}, "RunPlan.train_steps must be at most 2.53 = 9,007,199"),
        ({"train_epochs": -1}, "train_epochs must be greater than 0, got -1"),
        ({"train_steps": 1, "eval_every": 0}, "eval_every must be greater than 0, got 0"),
        ({"train_steps": 1, "log_every": 0}, "log_every must be greater than 0, got 0"),
    ],
)
def test_bad_values(arguments, message):
    with pytest.raises(ConfigError, match=message):
        RunPlan(**arguments)


def test_total_steps():
    assert RunPlan(train_steps=7).total_steps(23) == 7
    assert RunPlan(train_epochs=2).total_steps(23) == 46
    assert RunPlan(train_epochs=1e-9).total_steps(23) == 1
    assert RunPlan(train_epochs=0.5).total_steps(23) == 12
    assert RunPlan(train_epochs=1.1).total_steps(110) == 121  # as lengths in configs


@pytest.mark.parametrize(
    ("every", "checkpoint_every", "message"),
    [
        (30, 50, "must be a multiple of CHECKPOINT_EVERY = 50, .*got 30. Set Retention.every = 50"),
        (70, 50, "got 70. Set Retention.every = 50"),
        (130, 50, "Set Retention.every = 150"),
        (25, 50, "Set Retention.every = 50"),
        (30, None, "CHECKPOINT_EVERY is None, .*Set CHECKPOINT_EVERY = 30"),
    ],
)
def test_only_steps_that_are_saved_can_stay(every, checkpoint_every, message):
    with pytest.raises(ConfigError, match=message):
        RunPlan(100, checkpoint_every=checkpoint_every, retention=Retention(every=every))


def test_multiples_of_what_is_saved_can_stay():
    for every in (50, 100, None):
        RunPlan(100, checkpoint_every=50, retention=Retention(every=every))
    RunPlan(100, retention=Retention(every=None))
