"""What benchmarks make of their figures."""

import json

import numpy as np

from benchmarks import loop_overhead, scaling, simulated_cluster
from benchmarks.loop_overhead import DDL, FIT, FLOOR, ORBIT, TUNED, Case, Found
from benchmarks.report import Spread

CASE = Case("MLP", 25, 1, 10, 3, ((FIT, 4.0), (ORBIT, 1.5), (FLOOR, 1.1)))


def found(**failures):
    times = {DDL: [1.0, 2.0, 1.0], FIT: [5.0, 8.0, 5.0], TUNED: [2.0, 2.0, 2.0]}
    times[FLOOR] = [0.8, 1.6, 0.8]
    return Found({name: np.array(values) for name, values in times.items()}, failures)


def test_bars_are_ratios_within_a_process():
    fit, floor = loop_overhead.bars(CASE, found())  # Orbit has not run
    assert (fit.value, fit.limit, fit.verdict) == (Spread(5.0, 4.0, 5.0, True), 4.0, "met")
    assert (floor.value.median, floor.kind, floor.verdict) == (1.25, "at most", "missed")


def test_tables_name_all_and_leave_out_what_has_not_run():
    row = loop_overhead.ratios({CASE: found()}).rows[0]
    assert row[0] == "MLP 25, one device"
    assert row[1] == Spread(5.0, 4.0, 5.0, True)
    assert row[4] == "–"
    names = [row[0] for row in loop_overhead.milliseconds({CASE: found()}).rows]
    assert names == list(loop_overhead.FUNCTIONS)


def test_a_figure_of_a_process_is_its_median_and_the_faster_tuned_fit_counts(monkeypatch):
    processes = [
        Found({f"{TUNED} (slices)": [5, 5, 9], f"{TUNED} (gather)": [4, 4, 1], DDL: [2, 2, 7]}, {}),
        Found({f"{TUNED} (slices)": [5, 5, 5], f"{TUNED} (gather)": [8, 3, 3], DDL: [1, 1, 1]}, {}),
    ]
    monkeypatch.setattr(loop_overhead, "run_once", lambda case, number: processes.pop(0))
    result = loop_overhead.run_case(CASE, 2)
    np.testing.assert_array_equal(result.times[TUNED], [4, 3])
    np.testing.assert_array_equal(result.times[DDL], [2, 1])
    assert loop_overhead.ratio(result, TUNED) == Spread(2.5, 2.0, 3.0, True)


def test_efficiency_of_devices_that_share_cores_and_of_those_that_do_not():
    speeds = {1: np.array([100.0, 200.0]), 2: np.array([100.0, 200.0])}
    assert scaling.efficiency(speeds, 2, cores_grow=False).median == 100
    assert scaling.efficiency(speeds, 2, cores_grow=True).median == 50


def test_speed_is_the_median_of_the_logs(tmp_path):
    lines = [{"step": 4, "split": "train"}]
    lines += [{"split": "train", "examples_per_second": value} for value in (1.0, 30.0, 20.0)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert scaling.speed_of(str(tmp_path)) == 20


def test_the_model_beside_published_figures():
    rows = {row[0]: row[1:] for row in simulated_cluster.check_published().rows}
    published, none, all_ = rows["ResNet-50, 32 per replica, 8 to 256 GPUs"]
    assert none <= published <= all_
    for published, none, _ in rows.values():
        assert abs(published - none) < 5
