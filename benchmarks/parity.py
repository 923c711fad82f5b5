"""How far N replicas end from one device: python -m benchmarks.parity.

Trains what tests/parity_cases.py lists for 20 updates each, on one device and under mirrored and
central_storage on 2 and 4 virtual devices, and prints the largest absolute difference in any
logged loss, weight, slot, weight average or moving moment.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from benchmarks import report
from benchmarks.report import Report, Table
from tests.conftest import make_strategy
from tests.parity_cases import CASES, differences

PLACES = [("mirrored", 2), ("mirrored", 4), ("central_storage", 2), ("central_storage", 4)]


def largest(name: str, precision: str) -> float:
    """Over all kinds of figures and all places."""
    return max(
        max(differences(name, make_strategy(*place), precision).values()) for place in PLACES
    )


def measure(quick: bool) -> Report:
    """All cases, or the first."""
    rows = [
        [
            name,
            f"{largest(name, 'float64'):.0e}",
            f"{largest(name, 'float32'):.0e}" if case.in_float32 else "–",
        ]
        for name, case in list(CASES.items())[: 1 if quick else None]
    ]
    return Report([Table("Largest differences", ["what is trained", "float64", "float32"], rows)])


if __name__ == "__main__":
    report.main(measure)
