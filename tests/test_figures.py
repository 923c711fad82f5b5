import pytest

from ddl.errors import ConfigError
from ddl.figures import direction_of, is_reserved


def test_the_direction_of_a_figure_is_known_or_given_and_not_guessed():
    known = {"loss": "min", "accuracy": "max", "top_5_accuracy": "max", "top_10_accuracy": "max"}
    assert {name: direction_of(name, None, "mode") for name in known} == known
    assert direction_of("accuracy", "min", "X.mode") == "min"
    for name in ("far_off", "closs", "top_k_accuracy"):
        with pytest.raises(ConfigError, match=f"for the metric '{name}'.* Set X.mode = 'max' or"):
            direction_of(name, None, "X.mode")
    with pytest.raises(ConfigError, match="X.mode of 'accuracy' must be 'max' or 'min', got"):
        direction_of("accuracy", "best", "X.mode")


def test_names_of_figures_that_ddl_writes():
    reserved = ["loss", "loss/fools", "learning_rate/generator", "gradient_norm/x", "step"]
    assert all(map(is_reserved, [*reserved, "input_share", "gpu_utilization/0"]))
    assert not any(map(is_reserved, ["step/seconds", "recall/loss"]))
