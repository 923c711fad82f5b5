import pytest

from ddl.errors import ConfigError
from ddl.run_plan import RunPlan


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "neither of them"),
        ({"train_steps": 1, "train_epochs": 1}, "both of them"),
        ({"train_steps": 0}, "train_steps is 0"),
        ({"train_epochs": -1}, "train_epochs is -1"),
        ({"train_steps": 1, "eval_every": 0}, "eval_every is 0"),
        ({"train_steps": 1, "log_every": 0}, "log_every is 0"),
    ],
)
def test_bad_values(arguments, message):
    with pytest.raises(ConfigError, match=message):
        RunPlan(**arguments)


def test_total_steps():
    assert RunPlan(train_steps=7).total_steps(23) == 7
    assert RunPlan(train_epochs=2).total_steps(23) == 46
    assert RunPlan(train_epochs=0.5).total_steps(23) == 12
    assert RunPlan(train_epochs=1.1).total_steps(110) == 121  # as lengths in configs
