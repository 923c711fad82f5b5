import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import ddl
from ddl import figures
from ddl.errors import ConfigError
from ddl.figures import direction_of, is_measured, is_reserved

NAMES = {value for name, value in vars(figures).items() if name.isupper() and type(value) is str}


@pytest.mark.parametrize(
    ("metric", "direction"),
    [("loss", "min"), ("accuracy", "max"), ("top_5_accuracy", "max"), ("top_10_accuracy", "max")],
)
def test_known_figures(metric, direction):
    assert direction_of(metric, None, "mode") == direction


@pytest.mark.parametrize(
    "metric",
    ["far_off", "val_error", "closs", "token_accuracy", "accuracy_drop", "top_k_accuracy"],
)
def test_of_other_figures_nothing_is_guessed(metric):
    with pytest.raises(
        ConfigError, match=f"required for the metric '{metric}'.* Set X.mode = 'max' or"
    ):
        direction_of(metric, None, "X.mode")
    for direction in ("max", "min"):
        assert direction_of(metric, direction, "X.mode") == direction


def test_what_the_config_says_counts_but_a_loss_is_minimized():
    assert direction_of("accuracy", "min", "X.mode") == "min"
    assert direction_of("loss", "min", "X.mode") == "min"
    with pytest.raises(
        ConfigError, match="X.mode must be 'min' for the metric 'loss', .* got 'max'"
    ):
        direction_of("loss", "max", "X.mode")
    with pytest.raises(ConfigError, match="X.mode must be 'max' or 'min', got 'best'"):
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


def test_figures_of_the_machine_are_told_apart():
    names = ("loss", "gpu_utilization/0", "gpu_utilization", "input_share")
    assert [name for name in names if is_measured(name)] == ["gpu_utilization/0", "input_share"]


def written_names(tree: ast.Module) -> Iterator[str]:
    """The texts that a module writes as the name of a figure, or as its part before a slash."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            name: ast.expr = node.slice
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "figure":
            name = node.args[0]
        elif isinstance(node, ast.JoinedStr) and node.values:
            name = node.values[0]
        else:
            continue
        if isinstance(name, ast.JoinedStr) and name.values:
            name = name.values[0]
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            yield name.value.partition("/")[0]


@pytest.mark.parametrize(
    "line", ["f['rewinds'] = 1", "f[f'loss_weight/{name}'] = 1", "figure('gradient_norm', name)"]
)
def test_a_name_that_is_written_is_seen(line):
    assert NAMES & set(written_names(ast.parse(line)))


def test_names_of_figures_stand_in_one_place():
    package = Path(ddl.__file__).parent
    for path in package.rglob("*.py"):
        found = NAMES & set(written_names(ast.parse(path.read_text())))
        assert not found, f"{path.relative_to(package)} writes {found}: take the constants"
