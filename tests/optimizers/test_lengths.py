import pytest

from ddl.errors import ConfigError
from ddl.optimizers.lengths import epochs_to_steps, steps_after_warmup, warmup_steps


def test_epochs():
    assert epochs_to_steps(3, 10) == 30
    assert epochs_to_steps(1.1, 110) == 121  # 1.1 * 110 > 121
    assert epochs_to_steps(0.25, 10) == 3
    assert epochs_to_steps([0, 1e-9], 10) == [0, 1]  # any part of an epoch is an update
    assert epochs_to_steps([30, 60, 0.5], 157) == [4710, 9420, 79]


def test_warm_up_in_either_unit():
    assert warmup_steps() == 0
    assert warmup_steps(steps=5) == 5
    assert warmup_steps(epochs=2.5, steps_per_epoch=10) == 25
    assert steps_after_warmup(100, 25) == 75


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: epochs_to_steps(-1, 10), "epochs must be .* at least 0, got -1"),
        (lambda: epochs_to_steps(float("inf"), 10), "epochs must be finite .* got inf"),
        (lambda: epochs_to_steps(1, None), "^epochs_to_steps.st.* got None. Bind it to %STEPS_PER"),
        (lambda: warmup_steps(epochs=1), "steps_per_epoch .* Bind it to %STEPS_PER"),
        (lambda: warmup_steps(5, 5, 10), "exclude each other, got 5 and 5"),
        (lambda: steps_after_warmup(10, 10), "takes 10 updates and the run has 10"),
        (
            lambda: steps_after_warmup(None),
            "^steps_after_warmup.total_st.* Bind it to %TOTAL_STEPS",
        ),
    ],
)
def test_refuses(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
