"""Two cases, of which the second may fail: python -m tests.benchmarks.small_benchmark.

Text.
"""

import os
import sys

from benchmarks import command
from benchmarks.repeats import PROCESS_NUMBER
from benchmarks.report import Report, Table


def measure(quick):
    value = float(os.environ.get(PROCESS_NUMBER, 5))
    yield Report([Table("t", ["", "x"], [["first", value]])])
    if os.environ.get("FAILS") in (None, os.environ.get(PROCESS_NUMBER, "alone")):
        sys.exit("it fails")
    yield Report([Table("t", ["", "x"], [["first", value], ["second", value]])])


if __name__ == "__main__":
    command.main(measure, processes=int(os.environ["PROCESSES"]))
