"""The harness: turns, processes, intervals, and what a command writes."""

import os

import numpy as np
import pytest

from benchmarks import harness
from benchmarks.harness import Contender, Failed, Target

CASES = "tests.benchmarks.test_harness:contender"


def contender(case: str):
    """Does what the case says."""
    if case == "fails":
        raise Failed("skipped: why")
    if case == "breaks":
        raise ZeroDivisionError("by zero\nand more")
    if case == "dies":
        os._exit(3)
    return lambda: float(os.environ.get("VALUE", case))


def test_contenders_take_turns_and_another_begins_each_round():
    calls = []
    contenders = {name: lambda name=name: calls.append(name) or len(calls) for name in "abc"}
    found = harness.interleaved(contenders, 3)
    assert calls == list("abcbcacab")
    np.testing.assert_array_equal(found["a"], [1, 6, 8])


def test_contenders_run_in_fresh_processes_and_failures_are_named():
    contenders = {name: Contender(CASES, name) for name in ("1.5", "fails", "breaks", "dies")}
    contenders["workers"] = Contender(CASES, "0", [{"VALUE": "2"}, {"VALUE": "7"}])
    found, notes = harness.compare(contenders, processes=2, rounds=1)
    assert {name: list(values) for name, values in found.items()} == {
        "1.5": [1.5, 1.5],
        "workers": [7.0, 7.0],  # the slowest of those that compute at once
    }
    assert notes == [
        "fails: skipped: why",
        "breaks: ZeroDivisionError: by zero",
        "dies: its process died",
    ]


@pytest.mark.parametrize(
    ("kind", "value", "verdict"),
    [
        ("at least", 1.5, "met"),
        ("at least", 1.4, "missed"),
        ("at least", [1.6, 1.5, 2.0], "met"),
        ("at least", [1.49, 1.4, 2.0], "open"),
        ("at most", [1.45, 1.0, 1.5], "met"),
        ("at most", [1.7, 1.6, 2.0], "missed"),
    ],
)
def test_a_target_is_open_if_the_interval_holds_it(kind, value, verdict):
    assert Target("speed", value, 1.5, kind).verdict == verdict
