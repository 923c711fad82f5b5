"""Parity of N replicas with one device: python -m benchmarks.parity.

The benchmark trains each case of tests/training/parity_cases.py for 20 updates, on one device and
under mirrored and central_storage on 2 and 4 virtual devices. It prints the largest absolute
difference in any logged loss, weight, slot, weight average or moving moment.
"""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from benchmarks import command
from benchmarks.report import Plot, Report, Series, Table
from tests.conftest import make_strategy
from tests.training.parity_cases import CASES, differences

PLACES = [("mirrored", 2), ("mirrored", 4), ("central_storage", 2), ("central_storage", 4)]


def largest(name: str, precision: str) -> float:
    """Returns the largest difference over all kinds of figures and all strategies."""
    return max(
        max(differences(name, make_strategy(*place), precision).values()) for place in PLACES
    )


def measure(quick: bool) -> Report:
    """Measures all cases, or only the first if `quick`, as many at a time as there are cores."""
    cases = dict(list(CASES.items())[: 1 if quick else None])
    runs = [(name, "float64") for name in cases]
    runs += [(name, "float32") for name, case in cases.items() if case.in_float32]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), spawn) as pool:
        found = dict(zip(runs, pool.map(largest, *zip(*runs, strict=True)), strict=True))
    rows = [
        [name, *(_power(found.get((name, precision))) for precision in ("float64", "float32"))]
        for name in cases
    ]
    series = []
    for precision in ("float64", "float32"):
        points = [(n, name) for n, name in enumerate(cases, 1) if (name, precision) in found]
        values = [found[name, precision] for _, name in points]
        series.append(Series(precision, [number for number, _ in points], values))
    return Report(
        [Table("Largest differences", ["case", "float64", "float32"], rows)],
        plots=[Plot("Largest differences", "row of the table", "", series, log_y=True)],
    )


def _power(value: float | None) -> str:
    return "–" if value is None else f"{value:.0e}"


if __name__ == "__main__":
    command.main(measure)
