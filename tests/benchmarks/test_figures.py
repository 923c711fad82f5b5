"""The figures that benchmarks make of their measurements."""

import numpy as np

from benchmarks import loop_overhead, weak_scaling
from benchmarks.loop_overhead import CASES, DDL, FIT, FLOOR, TUNED


def test_ratios_are_of_the_same_process():
    case, limits = next(iter(CASES.items()))
    times = {DDL: [1.0, 2.0, 1.0], FIT: [5.0, 8.0, 5.0], FLOOR: [0.8, 1.6, 0.8]}
    times |= {TUNED: [3.0, 6.0, 3.0], f"{TUNED}, XLA": [2.0, 4.0, 2.0]}
    of_case = {name: np.array(values) for name, values in times.items()}
    fit, tuned, floor = loop_overhead.targets_of(case, limits, of_case)  # Orbit has not run
    assert (fit.value, fit.limit, fit.verdict) == ([5.0, 4.0, 5.0], 4.0, "met")
    assert tuned.value[0] == 2  # the faster one counts
    assert (floor.value[0], floor.kind, floor.verdict) == (1.25, "at most", "missed")


def test_a_larger_cluster_is_computed_beside_published_figures():
    rows = {row[0]: row[1:] for row in weak_scaling.computed().rows}
    for name in ("CNN, 8 GPUs / 1", "ResNet-50, 256 GPUs / 8"):
        none, full, published = rows[name]
        assert none < full
        assert abs(published - none) < 5
