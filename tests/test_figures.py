import pytest

from ddl.errors import ConfigError
from ddl.figures import direction_of, is_reserved


@pytest.mark.parametrize(
    ("metric", "direction"),
    [("loss", "min"), ("accuracy", "max"), ("top_5_accuracy", "max"), ("top_10_accuracy", "max")],
)
def test_known_figures(metric, direction):
    assert direction_of(metric, None, "mode") == direction


@pytest.mark.parametrize(
    "metric",
    ["far_off", "closs", "top_k_accuracy"],
)
def test_of_other_figures_nothing_is_guessed(metric):
    with pytest.raises(
        ConfigError, match=f"required for the metric '{metric}'.* Set X.mode = 'max' or"
    ):
        direction_of(metric, None, "X.mode")
    for direction in ("max", "min"):
        assert direction_of(metric, direction, "X.mode") == direction


def test_what_the_config_says_counts():
    assert direction_of("accuracy", "min", "X.mode") == "min"
    with pytest.raises(
        ConfigError, match="X.mode of 'accuracy' must be 'max' or 'min', got 'best'"
    ):
        direction_of("accuracy", "best", "X.mode")


@pytest.mark.parametrize(
    ("metric", "reserved"),
    [
        ("loss", True),
        ("loss/fools", True),
        ("learning_rate/generator", True),
        ("gradient_norm/generator", True),
        ("step", True),
        ("step/seconds", False),
        ("input_share", True),
        ("gpu_utilization/0", True),
        ("recall/loss", False),
    ],
)
def test_names_of_figures_that_ddl_writes(metric, reserved):
    assert is_reserved(metric) == reserved
