"""The figures that benchmarks make of their measurements."""

import numpy as np
import pytest

from benchmarks import loop_overhead, weak_scaling
from benchmarks.loop_overhead import CASES, DDL, FIT, FLOOR, TUNED


def test_ratios_are_of_the_same_process():
    case = next(iter(CASES))
    times = {DDL: [1.0, 2.0, 1.0], FIT: [5.0, 8.0, 5.0], FLOOR: [0.8, 1.6, 0.8]}
    times |= {TUNED: [3.0, 6.0, 3.0], f"{TUNED}, XLA": [2.0, 4.0, 2.0]}
    of_case = {name: np.array(values) for name, values in times.items()}
    fit, tuned, floor = loop_overhead.targets_of(case, of_case)  # Orbit has not run
    assert (fit.value, fit.limit, fit.verdict) == ([5.0, 4.0, 5.0], 4.0, "met")
    assert tuned.value[0] == 2  # the faster one counts
    assert (floor.value[0], floor.kind, floor.verdict) == (1.25, "at most", "missed")


def test_a_larger_cluster_is_computed_beside_published_figures():
    rows = {row[0]: row[1:] for row in weak_scaling.computed().rows}
    for name in ("CNN, 8 GPUs / 1", "ResNet-50, 256 GPUs / 8"):
        none, full, published = rows[name]
        assert none < full
        assert abs(published - none) < 5


def test_an_all_reduce_is_the_sum_of_its_rounds():
    link, between = weak_scaling.Link(1e-5, 1e9), weak_scaling.Link(1e-4, 1e8)
    cluster = weak_scaling.Cluster(link, between, compute=0.1, gradient_bytes=4e6)
    inside = 14 * (1e-5 + 4e6 / 8 / 1e9)  # 7 rounds add up, 7 share
    assert cluster.all_reduce(1) == 0
    assert cluster.all_reduce(8) == pytest.approx(inside)
    halving = 2 * sum(1e-4 + 4e6 / 2**k / 1e8 for k in (1, 2))  # 4 machines
    assert cluster.all_reduce(32) == pytest.approx(inside + halving)
    assert cluster.step_time(32, 0) == 0.1 + cluster.all_reduce(32)
    assert cluster.step_time(32, 1) == 0.1 + cluster.all_reduce(32) - 0.2 / 3
