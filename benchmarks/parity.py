"""How far N replicas end from one device: python -m benchmarks.parity.

Trains what tests/parity_cases.py lists for 20 updates each, on one device and under mirrored and
central_storage on 2 and 4 virtual devices, and prints the largest absolute difference in any
logged loss, weight, slot, weight average or moving moment, as a table in Markdown.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from tests.conftest import make_strategy
from tests.parity_cases import CASES, differences

PLACES = [("mirrored", 2), ("mirrored", 4), ("central_storage", 2), ("central_storage", 4)]


def largest(name: str, precision: str) -> float:
    """Over all kinds of figures and all places."""
    return max(
        max(differences(name, make_strategy(*place), precision).values()) for place in PLACES
    )


def main() -> None:
    """Prints the table."""
    print("| what is trained | float64 | float32 |\n|---|---|---|")
    for name, case in CASES.items():
        in_float32 = f"{largest(name, 'float32'):.0e}" if case.in_float32 else "–"
        print(f"| {name} | {largest(name, 'float64'):.0e} | {in_float32} |", flush=True)


if __name__ == "__main__":
    main()
