"""Losses across examples: python -m benchmarks across_examples.

SimCLR (examples/simclr.py) learns from the 1,437 training digits without labels, at batch 128. A
linear classifier, fitted by least squares to the outputs of its encoder for the labelled training
digits, is tested on the 360 test digits: beside one of the pixels, and one of the encoder before
training.

The second table compares negatives from the whole batch, as `ddl.gather` gives them, with those
from a share of the batch, as each of several replicas has without it. A share is computed on one
device by a mask, so that all else is the same: data, order, augmentations, weights. "Found" is how
often the other view of a test digit is the nearest one of its batch. Figures are medians of the
seeds, in brackets the lowest and the highest.
"""

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import ddl
from benchmarks import command, repeats
from benchmarks.report import Bar, Cell, Report, Spread, Table

BATCH = 128
REPLICAS = (1, 4, 16)
UPDATES, SEEDS = 2000, 3
_RIDGE = 1.0
_EXAMPLES = Path(__file__).parents[1] / "examples"


def encoder() -> keras.Model:
    """Returns the encoder of examples/simclr.gin, with its initial weights."""
    return ddl.models.cnn(
        (8, 8, 1),
        num_classes=64,
        blocks=((32,), (64,)),
        hidden_units=(64,),
        padding="same",
        input_scale=1 / 16,
    )


def probed(features: Any) -> float:
    """Returns the accuracy of a linear classifier of features on the test digits, in percent.

    Args:
      features: Maps images, float32 [n, 8, 8, 1] from 0 to 16, to features [n, width].
    """
    (given, labels), (held_out, expected) = map(ddl.data.load_digits, ("train", "test"))
    known, other = (np.asarray(features(x.astype(np.float32)), float) for x in (given, held_out))
    mean, deviation = known.mean(axis=0), known.std(axis=0) + 1e-6
    known, other = (
        np.pad((x - mean) / deviation, ((0, 0), (0, 1)), constant_values=1) for x in (known, other)
    )
    covariance = known.T @ known + _RIDGE * np.eye(known.shape[1])
    weights = np.linalg.solve(covariance, known.T @ np.eye(10)[labels])
    return float(100 * np.mean((other @ weights).argmax(axis=1) == expected))


@contextlib.contextmanager
def negatives_of(replicas: int) -> Iterator[None]:
    """Lets losses compare an example only with those that its replica would have."""
    gather, share = ddl.gather, BATCH // replicas

    def of_share(*args: Any, **kwargs: Any) -> Any:
        gathered = gather(*args, **kwargs)
        places = tf.range(gathered.mask.shape[0], dtype=tf.int64) // share
        own = places == gathered.own[:, tf.newaxis] // share
        return gathered._replace(mask=gathered.mask & own)

    with mock.patch.object(ddl, "gather", of_share, create=True):
        yield


def trained(replicas: int, seed: int, updates: int) -> tuple[float, float]:
    """Trains SimCLR; returns the probe of its encoder, and how often the other view is found."""
    keras.utils.set_random_seed(seed)
    sys.path.insert(0, str(_EXAMPLES))
    task = importlib.import_module("simclr").SimClr(encoder())
    rate = keras.optimizers.schedules.ExponentialDecay(0.05, 600, 0.5)
    optimizer = keras.optimizers.SGD(rate, momentum=0.9, nesterov=True)
    trainer = ddl.Trainer(
        task, optimizer, ddl.data.load_digits("train"), global_batch_size=BATCH, seed=seed
    )
    with negatives_of(replicas):
        trainer.train(updates)
    # In training mode, as the views of an evaluation are the same; over all negatives.
    fresh = ddl.Trainer(
        _Found(task),
        keras.optimizers.SGD(0.0),
        ddl.data.load_digits("test"),
        global_batch_size=BATCH,
    )
    found = 100 * fresh.train(fresh.steps_per_epoch)["found"]
    return probed(lambda x: task.exported_models["encoder"].predict(x, verbose=0)), found


class _Found:
    """The loss of another task."""

    def __init__(self, task: Any):
        self.task, self.model = task, task.model

    def per_example(self, features: dict[str, Any], training: bool) -> ddl.PerExample:
        return self.task.per_example(features, training)


def measure(quick: bool) -> Iterator[Report]:
    """Trains with the negatives of each number of replicas."""
    updates, seeds = (20, 2) if quick else (UPDATES, SEEDS)
    keras.utils.set_random_seed(0)
    untrained = encoder()
    plain: list[list[Cell]] = [
        ["the pixels", probed(lambda x: x.reshape(len(x), -1))],
        ["encoder before training", probed(lambda x: untrained.predict(x, verbose=0))],
    ]
    rows: list[list[Cell]] = []
    for replicas in REPLICAS:
        ends = [trained(replicas, seed, updates) for seed in range(seeds)]
        probe, found = (repeats.over_processes([*values]) for values in zip(*ends, strict=True))
        name = "the batch" if replicas == 1 else f"one of {replicas} replicas"
        rows.append([name, BATCH // replicas, probe, found])
        yield _report(plain, rows)


def _report(plain: list[list[Cell]], rows: list[list[Cell]]) -> Report:
    probe = rows[0][2]
    assert isinstance(probe, Spread)
    columns = ["negatives from", "examples", "accuracy of the probe, %", "found, %"]
    tables = [
        Table("Linear probe", ["features", "accuracy, %"], [*plain, ["SimCLR", probe]]),
        Table(f"Negatives at batch {BATCH}", columns, rows),
    ]
    pixels = float(plain[0][1])  # type: ignore[arg-type]
    return Report(
        tables, [Bar("probe of SimCLR, minus that of the pixels", probe.median - pixels, 0)]
    )


if __name__ == "__main__":
    command.main(measure)
