"""The points of a sweep, without processes."""

import math
import statistics

import pytest

from ddl.errors import ConfigError
from ddl.sweep.axes import params, points, run_name


def made(grid=(), lists=(), draw=(), draws=None, seed=0):
    return points(grid, lists, draw, draws, seed)


def test_a_grid_has_every_combination():
    found = made(["LEARNING_RATE = [0.1, 1e-2]", "SEED = [0, 1, 2]"])
    assert len(found) == 6
    assert found[0] == {"LEARNING_RATE": "0.1", "SEED": "0"}
    assert found[-1] == {"LEARNING_RATE": "0.01", "SEED": "2"}
    assert params(found[-1]) == ["LEARNING_RATE = 0.01", "SEED = 2"]


def test_lists_go_together_and_times_the_grid():
    lists = ["mlp.hidden_units = [(32,), (64,)]", "Trainer.optimizer = [@A(), %B]"]
    found = made(["SEED = (3, 4)"], lists)
    assert [tuple(point.values()) for point in found] == [
        ("(32,)", "@A()", "3"),
        ("(32,)", "@A()", "4"),
        ("(64,)", "%B", "3"),
        ("(64,)", "%B", "4"),
    ]


def test_draws_are_of_their_distributions():
    found = made(
        draw=["A = uniform(2, 4)", "B = log_uniform(1e-4, 1e-1)", "C = choice(['x', (1, 2)])"],
        draws=400,
    )
    assert len(found) == 400
    uniform, logs = ([float(point[name]) for point in found] for name in "AB")
    assert 2 <= min(uniform) < 2.1
    assert 3.9 < max(uniform) <= 4
    assert abs(statistics.fmean(uniform) - 3) < 0.15
    assert 1e-4 <= min(logs) < max(logs) <= 1e-1
    # The median of a log-uniform variable is the geometric mean of its ends.
    assert abs(math.log10(statistics.median(logs)) + 2.5) < 0.25
    # Each axis has its own numbers.
    assert abs(statistics.correlation(uniform, list(map(math.log, logs)))) < 0.2
    assert {point["C"] for point in found} == {"'x'", "(1, 2)"}
    assert abs(sum(point["C"] == "'x'" for point in found) - 200) < 50


def test_draws_follow_from_their_seed_and_more_draws_keep_the_first():
    def drawn(draws, seed, *more):
        return made(draw=["A = uniform(0, 1)", *more], draws=draws, seed=seed)

    assert drawn(5, 0) == drawn(9, 0)[:5]
    assert drawn(5, 0) != drawn(5, 1)
    # A further axis does not change the draws of the others.
    assert [{"A": point["A"]} for point in drawn(5, 0, "B = uniform(0, 1)")] == drawn(5, 0)
    assert len({point["A"] for point in drawn(5, 0)}) == 5


def test_each_draw_is_trained_with_each_seed():
    found = made(["SEED = [0, 1]"], draw=["A = uniform(0, 1)"], draws=3)
    assert len(found) == 6
    assert len({point["A"] for point in found}) == 3


def test_the_same_point_is_one_run():
    assert len(made(draw=["A = choice([1])"], draws=5)) == 1


def test_names_are_those_of_folders_and_different():
    found = made(
        ["SEED = [0, 1]"],
        [
            "Trainer.optimizer = [@A(), '@A()', @A, %A]",
            "X = ['a/b', '../..', '" + "x" * 200 + "', '" + "x" * 201 + "']",
        ],
    )
    names = [run_name(point) for point in found]
    assert len(set(names)) == 8
    for name in names:
        assert "/" not in name
        assert not set(name) & set("*?[]' @%")
        assert len(name) < 120
    assert run_name({"SEED": "1", "LR": "0.1"}) == "LR=0.1,SEED=1"
    assert run_name({"B": "1", "A": "2"}) == run_name({"A": "2", "B": "1"})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "at least one binding to vary, got none. Pass --grid"),
        ({"grid": ["A = 3"]}, "--grid must bind a list of values, such as 'A = [3]'"),
        ({"grid": ["A = []"]}, "--grid must have at least one value, got 'A = []'"),
        ({"grid": ["A = [1, 1]"]}, "each value once, got 1 twice"),
        ({"grid": ["A = [1"]}, "--grid 'A = [1': A bracket"),
        ({"grid": ["import os"]}, "--grid must be one binding to a list"),
        ({"grid": ["A = [1]"], "lists": ["A = [2]"]}, "A must be swept once"),
        ({"lists": ["A = [1]", "B = [1, 2]"]}, "A has 1, B has 2"),
        ({"draw": ["A = uniform(0, 1)"]}, "--draws is missing"),
        ({"grid": ["A = [1]"], "draws": 3}, "--draw is missing"),
        ({"draw": ["A = normal(0, 1)"], "draws": 1}, "uniform(…), log_uniform(…) or choice(…)"),
        ({"draw": ["A = uniform(1, 0)"], "draws": 1}, "uniform takes two numbers"),
        ({"draw": ["A = log_uniform(0, 1)"], "draws": 1}, "log_uniform takes two positive"),
        ({"draw": ["A = choice(1, 2)"], "draws": 1}, "choice takes one list"),
        ({"draw": ["A = choice([)"], "draws": 1}, "choice takes one list"),
    ],
)
def test_errors(given, message):
    with pytest.raises(ConfigError) as error:
        made(**given)
    assert message in str(error.value)
