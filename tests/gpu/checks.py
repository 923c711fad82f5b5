"""Checks of the GPU suite. Each returns findings: a figure and the most that it may be.

A check takes the place and its strategy. `tests.gpu.suite` runs them and writes what they find.
"""

import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import ddl
from ddl.precision import set_precision
from tests.conftest import microbatch, save
from tests.gpu import reference
from tests.gpu.places import Place
from tests.training import parity_cases
from tests.training.overflowing import overflowing
from tests.training.test_trainer import all_copies

Strategy = tf.distribute.Strategy

NORMALIZED = parity_cases.CASES["BatchNormalization, accumulation 2"]


class Finding(NamedTuple):
    """A figure and the most that it may be."""

    what: str
    value: float
    most: float


def parity(place: Place, strategy: Strategy) -> Iterator[Finding]:
    """Losses, weights, slots, moments and averages against one CPU.

    In float64; and in float32, without TF32, of the cases that are well conditioned.
    """
    for precision, limit in (("float32", 1e-5), ("float64", 1e-10)):
        cases = {
            name: case
            for name, case in parity_cases.CASES.items()
            if case.in_float32 or precision == "float64"
        }
        for name, expected in reference.on_cpu(precision, list(cases)).items():
            # It draws normal numbers in float32, of which a GPU rounds some otherwise.
            most = max(limit, 1e-6) if "noise" in name else limit
            ours = parity_cases.figures(parity_cases.make_trainer(cases[name], strategy, precision))
            for kind, difference in parity_cases.largest_differences(ours, expected).items():
                yield Finding(f"{precision}, {name}: difference of {kind}", difference, most)


def draws(place: Place, strategy: Strategy) -> Iterator[Finding]:
    """Random numbers beside those of the CPU: to the bit but for normal ones, also in XLA."""

    def drawn(device: str, jit_compile: bool) -> dict[str, np.ndarray]:
        owner, shape = object(), [64, 1000]

        @tf.function(jit_compile=jit_compile)
        def numbers() -> dict[str, tf.Tensor]:
            with microbatch(rows=64).forward():
                uniform = ddl.random.uniform(owner, shape)
                return {"uniform numbers": uniform, "normal": ddl.random.normal(owner, shape)}

        with tf.device(device):
            return {name: value.numpy() for name, value in numbers().items()}

    expected = drawn("CPU:0", False)
    for how in ("not compiled", "compiled"):
        for name, value in drawn(place.device, how == "compiled").items():
            # A normal number has up to 5 as its size, and float32 there steps of 5e-7.
            difference = float(np.max(np.abs(value - expected[name])))
            most = 4e-6 if name == "normal" else 0.0
            yield Finding(f"{name}, {how}: largest difference", difference, most)


def resume(place: Place, strategy: Strategy) -> Iterator[Finding]:
    """A run that was saved in mid epoch, with microbatches and a padded batch."""
    for resident in (True, False):
        arguments = {"data_on_device": resident, "steps_per_loop": 10}
        trainer, resumed = (
            parity_cases.make_trainer(NORMALIZED, strategy, "float32", **arguments)
            for _ in range(2)
        )
        trainer.train(3)
        with tempfile.TemporaryDirectory() as folder:
            save(folder, trainer)
            for steps in (2, 4):
                trainer.train(steps)
            ddl.Checkpoints(folder, resumed).restore_latest()
        resumed.train(6)
        # The largest difference that rounding makes of so few updates, where bits may differ.
        most = 0.0 if place.deterministic or place.on_cpu else 1e-3
        where = "resident data" if resident else "a stream"
        difference = _difference(all_copies(resumed), all_copies(trainer))
        yield Finding(f"{where}: difference of a resumed run", difference, most)


def snapshots(place: Place, strategy: Strategy) -> Iterator[Finding]:
    """A checkpoint that is written while training continues holds the weights of its step."""
    given = NORMALIZED, strategy, "float32"
    trainer, resumed = (parity_cases.make_trainer(*given) for _ in range(2))
    trainer.train(2)
    for number in (1, 2, 3):
        with tempfile.TemporaryDirectory() as folder:
            checkpoints = ddl.Checkpoints(folder, trainer)
            trainer.train(1)
            expected = all_copies(trainer)
            checkpoints.save()
            trainer.train(40)  # while a thread writes
            checkpoints.finish()
            ddl.Checkpoints(folder, resumed).restore_latest()
        difference = _difference(all_copies(resumed), expected)
        yield Finding(f"checkpoint {number}: difference from the weights saved", difference, 0)
        moved = float(_difference(all_copies(trainer), expected) == 0)
        yield Finding(f"checkpoint {number}: training went no further", moved, 0)


def overflow(place: Place, strategy: Strategy) -> Iterator[Finding]:
    """An overflow on any one replica changes no variable of any replica, and halves the scale.

    From batch 1 on, one replica after the other overflows.
    """
    set_precision("mixed_float16")
    keras.utils.set_random_seed(3)
    averages, scale = ddl.ExponentialMovingAverage(0.9), ddl.LossScale(1024.0)
    options = {"weight_average": averages, "loss_scale": scale, "max_skipped_updates": 1}
    with strategy.scope():
        task = overflowing(parity_cases.cnn(), lambda batch: batch - 1)
        data = {name: rows[:128] for name, rows in parity_cases.UNEVEN.items()}
        trainer = ddl.Trainer(task, parity_cases.sgd(), data, global_batch_size=32, **options)
    trainer.train(1)
    before = all_copies(trainer)
    for replica in range(strategy.num_replicas_in_sync):
        # The loop ends at the skipped update; `train` would raise TrainingDiverged.
        state = trainer._runner.loop.run(trainer.state, 2)
        trainer.state = state._replace(skipped_in_a_row=tf.zeros([], tf.int64))
        for what, off in {
            "change of the variables": _difference(all_copies(trainer), before),
            "loss scale, off by": abs((trainer.loss_scale or 0) - 1024 / 2 ** (replica + 1)),
            "skipped updates, off by": abs(trainer.skipped_updates - replica - 1),
        }.items():
            yield Finding(f"replica {replica} overflows: {what}", off, 0)
    trainer.train(1)
    yield Finding("the update after: number of updates, off by", abs(trainer.step - 2), 0)
    moved = float(_difference(all_copies(trainer), before) == 0)
    yield Finding("the update after changed no variable", moved, 0)


def memory(place: Place, strategy: Strategy) -> Iterator[Finding]:
    """Resident data lie on each GPU in their own size, and training does not grow."""
    set_precision("float32")
    images = np.zeros([4096, 64, 64, 16], "u1")
    before = tf.config.experimental.get_memory_info(place.device)
    with strategy.scope():
        layers = [keras.Input(images.shape[1:]), keras.layers.GlobalAveragePooling2D()]
        task = ddl.Classification(keras.Sequential([*layers, keras.layers.Dense(3)]))
        data = {"image": images, "label": np.zeros(len(images), "i4")}
        options = {"global_batch_size": 16, "data_on_device": True}
        trainer = ddl.Trainer(task, keras.optimizers.Adam(1e-3), data, **options)
    trainer.train(200)
    first = tf.config.experimental.get_memory_info(place.device)
    trainer.train(200)
    last = tf.config.experimental.get_memory_info(place.device)
    held = (first["current"] - before["current"]) / images.nbytes
    yield Finding("memory held, in sizes of the resident data", held, 1.1)
    yield Finding("not held by the device, in sizes of the data", max(0.0, 1 - held), 0.05)
    yield Finding("growth of the peak", last["peak"] / first["peak"], 1.01)


CHECKS: dict[str, Callable[[Place, Strategy], Iterator[Finding]]] = {
    check.__name__: check for check in (draws, resume, overflow, snapshots, memory, parity)
}
"""By name, in the order in which a process runs them: the longest last."""

OF_DETERMINISM = ("resume", "snapshots")
"""Those that a place with deterministic operations runs."""


def _difference(some: Any, others: Any) -> float:
    """Returns the largest difference of lists of lists of arrays; of other bits at least 5e-324."""
    largest = 0.0
    for one, other in zip(tf.nest.flatten(some), tf.nest.flatten(others), strict=True):
        if not np.array_equal(one, other):
            difference = np.max(np.abs(np.asarray(one, "f8") - np.asarray(other, "f8")))
            largest = max(largest, float(np.nan_to_num(difference, nan=np.inf)), 5e-324)
    return largest
