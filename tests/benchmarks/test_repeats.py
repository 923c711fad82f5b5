import numpy as np
import pytest

from benchmarks.repeats import (
    PROCESS_NUMBER,
    interleaved,
    merged,
    over_processes,
    ratio,
    rotated,
    spread,
)
from benchmarks.report import Bar, Plot, Report, Series, Spread, Table


def test_contenders_take_turns():
    calls = []
    contenders = {name: lambda name=name: calls.append(name) or len(calls) for name in "abc"}
    found = interleaved(contenders, 3)
    assert calls == list("abcbcacab")
    np.testing.assert_array_equal(found["a"], [1, 6, 8])


def test_each_process_begins_with_another_contender(monkeypatch):
    contenders = dict.fromkeys("abc", lambda: 1.0)
    for number, order in enumerate(("abc", "bca", "cab", "abc")):
        monkeypatch.setenv(PROCESS_NUMBER, str(number))
        assert list(rotated(contenders)) == list(order)
        assert list(interleaved(contenders, 1)) == list("abc")  # the tables keep their order


def test_spread_is_of_medians_and_quartiles():
    assert spread([5, 1, 2, 4, 3]) == Spread(3, 2, 4)
    assert ratio([5, 1, 2, 4, 3]) == Spread(3, 2, 4, is_ratio=True)
    assert over_processes([5, 1, 2, 4, 3]) == Spread(3, 1, 5)


@pytest.mark.parametrize(
    ("value", "level"),
    [
        (Spread(1.1, 0.9, 1.2, is_ratio=True), True),
        (Spread(1.1, 1.05, 1.2, is_ratio=True), False),
        (Spread(1.1, 0.9, 1.2), False),
    ],
)
def test_contenders_are_level_if_the_interval_of_their_ratio_holds_1(value, level):
    assert value.is_level is level


def reported(value, note="a", name="row"):
    cell = Spread(value, value - 9, value + 9, is_ratio=True)
    return Report(
        [Table("t", ["", "x", "y"], [[name, cell, 7]])],
        [Bar("what", cell, 1.0)],
        [Plot("p", "", "", [Series("s", ["x"], [value])])],
        [note],
    )


def test_processes_are_merged_to_median_and_range():
    report = merged([reported(1.0), reported(3.0, "b"), reported(2.0)])
    expected = Spread(2.0, 1.0, 3.0, is_ratio=True)
    assert report.tables[0].rows == [["row", expected, 7]]
    assert report.bars[0] == Bar("what", expected, 1.0)
    assert report.plots[0].series[0].y == [Spread(2.0, 1.0, 3.0)]
    assert report.notes == ["a", "b"]


def test_processes_with_other_rows_are_not_merged():
    with pytest.raises(ValueError, match=r"must name the same rows, got \['row', 'other'\]"):
        merged([reported(1.0), reported(3.0, name="other")])
