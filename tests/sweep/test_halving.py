"""The decisions of successive halving, without processes."""

import itertools
import math

import pytest

from ddl.errors import ConfigError
from ddl.sweep.files import Progress
from ddl.sweep.halving import Decision, Halving, decide

TRAIN, STOP_10, WAIT_10 = Decision("train", None), Decision("stop", 10), Decision("wait", 10)
TO_10, TO_20 = Decision("train", 10), Decision("train", 20)


def runs(**values):
    return {name: Progress(values=dict(one)) for name, one in values.items()}


def alone(found):
    return {name: [name] for name in found}


def test_without_rungs_all_train_to_their_end():
    found = runs(a={}, b={10: 1.0})
    assert decide(alone(found), found, None) == {"a": TRAIN, "b": TRAIN}


def test_all_train_to_the_first_rung_and_wait_there():
    found = runs(a={}, b={5: 0.1}, c={5: 0.1, 10: 0.2})
    decisions = decide(alone(found), found, Halving((10, 20), 0.5, "max"))
    assert decisions == {"a": TO_10, "b": TO_10, "c": WAIT_10}


def test_the_best_share_goes_on_rounded_up():
    found = runs(a={10: 0.1}, b={10: 0.3}, c={10: 0.2})
    halving = Halving((10, 20), 0.5, "max")
    assert decide(alone(found), found, halving) == {"a": STOP_10, "b": TO_20, "c": TO_20}
    falling = Halving((10,), 0.3, "min")
    assert decide(alone(found), found, falling) == {"a": TRAIN, "b": STOP_10, "c": STOP_10}


def test_the_decision_does_not_depend_on_what_came_after_the_rung():
    """A run that is stopped has passed its rung, and one that survived has gone on."""
    found = runs(a={10: 0.1, 12: 0.9}, b={10: 0.3, 20: 0.1}, c={9: 0.2, 11: 0.9})
    halving = Halving((10, 20), 0.5, "max")
    decisions = decide(alone(found), found, halving)
    assert decisions == {"a": STOP_10, "b": Decision("wait", 20), "c": TO_20}


def test_a_larger_share_lets_a_stopped_run_go_on():
    found = runs(a={10: 0.1}, b={10: 0.3, 20: 0.4})
    assert decide(alone(found), found, Halving((10,), 0.5, "max"))["a"] == STOP_10
    assert decide(alone(found), found, Halving((10,), 0.6, "max"))["a"] == TRAIN
    assert decide(alone(found), found, None)["a"] == TRAIN


def test_seeds_of_a_setting_stay_together():
    found = runs(a0={10: 0.9}, a1={10: 0.1}, b0={10: 0.6}, b1={10: 0.5})
    groups = {"a": ["a0", "a1"], "b": ["b0", "b1"]}
    decisions = decide(groups, found, Halving((10,), 0.5, "max"))
    assert decisions == {"a0": STOP_10, "a1": STOP_10, "b0": TRAIN, "b1": TRAIN}
    found["b1"].values.clear()  # one seed is still on its way
    decisions = decide(groups, found, Halving((10,), 0.5, "max"))
    assert decisions == {"a0": WAIT_10, "a1": WAIT_10, "b0": WAIT_10, "b1": TO_10}


@pytest.mark.parametrize("ended", ["diverged", "failed"])
def test_a_run_that_ended_before_the_rung_ranks_last(ended):
    found = runs(a={}, b={10: 5.0}, c={10: 6.0})
    setattr(found["a"], ended, True)
    decisions = decide(alone(found), found, Halving((10,), 0.5, "min"))
    assert decisions == {"a": STOP_10, "b": TRAIN, "c": TRAIN}


def test_a_divergence_after_the_rung_changes_no_decision():
    found = runs(a={10: 1.0}, b={10: 5.0}, c={10: math.nan})
    found["a"].diverged = True
    decisions = decide(alone(found), found, Halving((10,), 0.34, "min"))
    assert decisions == {"a": TRAIN, "b": TRAIN, "c": STOP_10}


def test_a_short_run_that_is_finished_counts_with_its_last_value():
    found = runs(a={5: 1.0}, b={10: 5.0})
    found["a"].finished = True
    assert decide(alone(found), found, Halving((10,), 0.5, "min")) == {"a": TRAIN, "b": STOP_10}


def test_the_order_in_which_runs_end_does_not_matter():
    values = {"a": 0.3, "b": 0.1, "c": 0.3, "d": 0.2}
    ends = set()
    for order in itertools.permutations(values):
        found = runs(**{name: {10: values[name]} for name in order})
        decisions = decide({name: [name] for name in values}, found, Halving((10,), 0.25, "max"))
        ends.add(tuple(sorted(name for name, one in decisions.items() if one == TRAIN)))
    assert ends == {("a",)}  # of equal settings, the first one of the definition


@pytest.mark.parametrize("rungs", [(), (0,), (20, 10), (10, 10)])
def test_rungs_must_ascend(rungs):
    with pytest.raises(ConfigError, match="--rungs must be steps in ascending order"):
        Halving(rungs, 0.5, "max")


@pytest.mark.parametrize("keep", [0.0, 1.0, -1.0, math.nan])
def test_a_share_is_between_0_and_1(keep):
    with pytest.raises(ConfigError, match="--keep must be a share"):
        Halving((10,), keep, "max")
