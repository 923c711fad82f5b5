"""Repeats of measurements: interleaved within a process, and merged over processes.

Two processes of one program differ by up to 15%, mostly by where their memory comes to lie. Repeats
within one process do not show that, so contenders are compared over several fresh processes.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from benchmarks.report import Report, Spread

PROCESS_NUMBER = "DDL_BENCHMARK_PROCESS"
"""Environment variable with the number of this process of a benchmark, from 0."""

_Value = TypeVar("_Value")


def interleaved(
    contenders: Mapping[str, Callable[[], float]], rounds: int
) -> dict[str, np.ndarray]:
    """Measures each contender once per round.

    All contenders of a round run under a similar load of the machine. The order rotates from round
    to round and from process to process, so that the first contender changes.

    Args:
      contenders: By name, the function that returns a figure, such as a time.
      rounds: Number of rounds.

    Returns:
      The figures of each contender, [rounds].
    """
    names = list(rotated(contenders))
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(contenders[name]())
    return {name: np.array(values) for name, values in found.items()}


def rotated(contenders: Mapping[str, _Value], places: int | None = None) -> dict[str, _Value]:
    """Returns contenders in another order, since the first may be faster or slower for that alone.

    Args:
      contenders: The contenders by name.
      places: Number of contenders that move to the end; None takes the number of this process of
        the benchmark.
    """
    names = list(contenders)
    first = int(os.environ.get(PROCESS_NUMBER, "0") if places is None else places) % len(names)
    return {name: contenders[name] for name in names[first:] + names[:first]}


def seconds(call: Callable[[], object]) -> float:
    """Returns the seconds that a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def spread(values: Any) -> Spread:
    """Returns median and quartiles of repeats within one process."""
    low, median, high = np.percentile(np.asarray(values, float), (25, 50, 75))
    return Spread(float(median), float(low), float(high))


def ratio(values: Any) -> Spread:
    """Does the same for the ratios of two contenders' figures in each round."""
    return dataclasses.replace(spread(values), is_ratio=True)


def over_processes(medians: Any, *, is_ratio: bool = False) -> Spread:
    """Returns the median and the range of what several processes found."""
    values = np.asarray(medians, float)
    return Spread(float(np.median(values)), float(values.min()), float(values.max()), is_ratio)


def merged(reports: Sequence[Report]) -> Report:
    """Returns the report of a benchmark that ran in several processes.

    Each figure is the median of what the processes found, with their range. The reports must have
    the same tables, rows, targets and plots.
    """
    notes = list(dict.fromkeys(note for each in reports for note in each.notes))
    return Report.from_json(_merged([{**each.as_json(), "notes": notes} for each in reports]))


def _merged(values: list[Any]) -> Any:
    """Merges the same place of several reports, as values of `Report.as_json`."""
    first = values[0]
    if isinstance(first, dict) and "median" in first:
        medians = [value["median"] for value in values]
        return dataclasses.asdict(over_processes(medians, is_ratio=first["is_ratio"]))
    if isinstance(first, dict):
        return {name: _merged([value[name] for value in values]) for name in first}
    if isinstance(first, list | tuple):
        return [_merged([*places]) for places in zip(*values, strict=True)]
    if isinstance(first, str) and any(value != first for value in values):
        raise ValueError(f"The processes of a benchmark must name the same rows, got {values}.")
    if isinstance(first, int | float) and any(value != first for value in values):
        return dataclasses.asdict(over_processes(values))
    return first
