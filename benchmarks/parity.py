"""Parity of N replicas with one device: python -m benchmarks.parity.

The benchmark trains each case of tests/training/parity_cases.py for 20 updates, on one device and
under mirrored and central_storage on 2 and 4 virtual devices. It prints the largest absolute
difference in any logged loss, weight, slot, weight average or moving moment.

Replicas add in another order than one device, so each update rounds differently, and training
amplifies the differences. The last table shows this growth: the network and the optimizer of
configs/digits_cnn.gin, in batches of 64, mirrored on 4 virtual devices, compared with one device.
"""

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np

import ddl
from benchmarks import command
from benchmarks.report import Plot, Report, Series, Table
from benchmarks.step_cost import model, optimizer
from ddl.precision import set_precision
from tests.conftest import make_strategy
from tests.training.parity_cases import CASES, differences

UPDATES = (1, 10, 100, 1000)
PLACES = [("mirrored", 2), ("mirrored", 4), ("central_storage", 2), ("central_storage", 4)]


def largest(name: str, precision: str) -> float:
    """Returns the largest difference over all kinds of figures and all strategies."""
    return max(
        max(differences(name, make_strategy(*place), precision).values()) for place in PLACES
    )


def weights(place: tuple[str, int], precision: str, updates: Sequence[int]) -> list[np.ndarray]:
    """Trains on the digits; returns all weights after each of the numbers of updates."""
    set_precision(precision)
    keras.utils.set_random_seed(0)
    with make_strategy(*place).scope():
        trainer = ddl.Trainer(
            ddl.Classification(model()),
            optimizer(),
            ddl.data.digits("train"),
            global_batch_size=64,
        )
    found = []
    for number in updates:
        trainer.train(number - trainer.step)
        values = [np.ravel(v.numpy()) for v in trainer.model.trainable_variables]
        found.append(np.concatenate(values))
    return found


def growth(precision: str, updates: Sequence[int]) -> list[float]:
    """Returns the largest difference of a weight after each of the numbers of updates."""
    one, four = (weights(place, precision, updates) for place in (("one_device", 1), PLACES[1]))
    return [float(np.max(np.abs(a - b))) for a, b in zip(one, four, strict=True)]


def measure(quick: bool) -> Report:
    """Measures all cases, or only the first if `quick`, as many at a time as there are cores."""
    updates = UPDATES[: 2 if quick else None]
    cases = dict(list(CASES.items())[: 1 if quick else None])
    runs = [(name, "float64") for name in cases]
    runs += [(name, "float32") for name, case in cases.items() if case.in_float32]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), spawn) as pool:
        growths = {name: pool.submit(growth, name, updates) for name in ("float64", "float32")}
        found = dict(zip(runs, pool.map(largest, *zip(*runs, strict=True)), strict=True))
    grown = {name: future.result() for name, future in growths.items()}
    rows = [
        [name, *(_power(found.get((name, precision))) for precision in ("float64", "float32"))]
        for name in cases
    ]
    series = []
    for precision in ("float64", "float32"):
        points = [(n, name) for n, name in enumerate(cases, 1) if (name, precision) in found]
        values = [found[name, precision] for _, name in points]
        series.append(Series(precision, [number for number, _ in points], values))
    growth_rows = [
        [f"{number:,}", *(_power(values[place]) for values in grown.values())]
        for place, number in enumerate(updates)
    ]
    growth_series = [Series(name, list(updates), values) for name, values in grown.items()]
    return Report(
        [
            Table("Largest differences", ["case", "float64", "float32"], rows),
            Table("Largest difference of a weight", ["updates", *grown], growth_rows),
        ],
        plots=[
            Plot("Largest differences", "row of the table", "", series, log_y=True),
            Plot("Growth", "updates", "largest difference", growth_series, True, True),
        ],
    )


def _power(value: float | None) -> str:
    return "–" if value is None else f"{value:.0e}"


if __name__ == "__main__":
    command.main(measure)
