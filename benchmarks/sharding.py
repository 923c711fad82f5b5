"""Sharded optimizer state: time, bytes on the wire and memory: python -m benchmarks.sharding.

Two workers, pinned to a core each, train a CNN of 1.2 M weights and a perceptron of 4 M weights
with AdamW: one trainer has whole slots, one has shares, and their windows take turns in the same
processes. Ratios are those of a round. Bytes are those that pass the loopback interface, on which
the workers' messages travel, in a window of updates; other programs' are counted, too. The targets:
an update with shares takes at most 1.05 of the time, and sends no more than 1.02 of the bytes.

Then AdamW trains a perceptron of 100 M weights in one process on two virtual devices: Keras's
`fit`, ddl, and ddl with shares, each in a process of its own. Memory is the growth of the process's
peak from before the model is built; slots are those that one replica holds.

Last, two workers train a perceptron of 20 M weights with AdamW, averages of the weights and two
microbatches: with whole slots and averages, with shares, and with the gradients in shares too. The
growth of each worker's resident memory stands beside the bytes that `--dry_run` counts.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import command, networks, repeats
from benchmarks.memory import megabytes
from benchmarks.pinned_workers import PinnedWorkers, pin, strategy_of_process
from benchmarks.report import Bar, Report, Table
from benchmarks.turns import Contender, Turns

NAMES = ("whole slots", "shares")
MOST_TIME, MOST_BYTES = 1.05, 1.02
OF_WORKERS = {
    "whole": {},
    "shares": {"shard_optimizer_state": True},
    "shares, of gradients too": {"shard_optimizer_state": True, "shard_gradients": True},
}
"""Arguments of the Trainer, by the row of the table of two workers."""
PROGRAMS = ("Keras fit", "ddl", "ddl with shares")
_SENT = Path("/sys/class/net/lo/statistics/tx_bytes")


class Case(NamedTuple):
    """A network by its name, its width, and the updates of a window."""

    network: str
    width: int
    steps: int


CASES = (Case("CNN", 28, 20), Case("perceptron", 2000, 20))


def perceptron(width: int, layers: int) -> Any:
    """Builds a network of equal dense layers."""
    import keras

    hidden = [keras.layers.Dense(width, "relu") for _ in range(layers)]
    return keras.Sequential([keras.Input([width]), *hidden, keras.layers.Dense(10)])


# ------------------------------------------------------------ in a process that trains


def contenders(case: Case, turns: Turns) -> None:
    """Reports ms and bytes per update, of whole slots and of shares: [2, 2]."""
    pin()
    strategy = strategy_of_process()
    import keras

    import ddl
    from ddl.optimizers import FusedAdamW

    random = np.random.default_rng(0)
    is_cnn = case.network == "CNN"
    shape = (28, 28, 1) if is_cnn else (case.width,)
    data = random.random((2048, *shape), dtype="f4"), random.integers(0, 10, 2048)

    def trainer(shards: bool) -> ddl.Trainer:
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = networks.cnn() if is_cnn else perceptron(case.width, 1)
            return ddl.Trainer(
                ddl.Classification(model),
                FusedAdamW(1e-4),
                data,
                global_batch_size=64 * strategy.num_replicas_in_sync,
                shard_optimizer_state=shards,
            )

    def window(shards: bool) -> Callable[[], object]:
        own = trainer(shards)
        return lambda: own.train(case.steps, progress=False)

    windows = [window(shards) for shards in (False, True)]
    for one in windows:
        one()
    first = 0
    while turns.wait():
        found = np.zeros([2, 2])
        for place in (first, 1 - first):
            before = int(_SENT.read_text())
            found[place, 0] = repeats.seconds(windows[place]) / case.steps * 1e3
            found[place, 1] = (int(_SENT.read_text()) - before) / case.steps
        first = 1 - first
        turns.report(found)


def program(case: tuple[str, int, int], turns: Turns) -> None:
    """Reports the growth of the peak in MB, and the MB of the slots that a replica holds."""
    import keras
    import tensorflow as tf

    import ddl

    name, width, layers = case
    (cpu,) = tf.config.list_physical_devices("CPU")
    devices = [tf.config.LogicalDeviceConfiguration() for _ in range(2)]
    tf.config.set_logical_device_configuration(cpu, devices)
    strategy = ddl.distribution.build_strategy("mirrored")
    data = np.ones([64, width], "f4"), np.zeros([64], "i8")
    before = megabytes(os.getpid())["present"]
    with strategy.scope():
        model = perceptron(width, layers)
        optimizer = keras.optimizers.AdamW(1e-4)
    if name == "Keras fit":
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss)
        model.fit(*data, batch_size=16, epochs=1, verbose=0)
    else:
        shards = name == "ddl with shares"
        trainer = ddl.Trainer(
            *(ddl.Classification(model), optimizer, data),
            global_batch_size=16,
            strategy=strategy,
            shard_optimizer_state=shards,
        )
        trainer.train(4, progress=False)
    grown = megabytes(os.getpid())["peak"] - before
    slots = sum(int(np.prod(v.shape)) * 4 for v in optimizer.variables[2:]) / 2**20
    while turns.wait():
        turns.report((grown, slots))


def resident(case: tuple[str, int, int], turns: Turns) -> None:
    """Reports the growth of a worker's memory, at present and at its peak, and the count, in MB."""
    strategy = strategy_of_process()
    import keras

    import ddl
    from ddl.run.memory import held_by_replica
    from ddl.step.observing import observed_by
    from ddl.step.remat.activations import Activations

    name, width, layers = case
    data = np.ones([64, width], "f4"), np.zeros([64], "i8")
    before = megabytes(os.getpid())["present"]
    with strategy.scope():
        trainer = ddl.Trainer(
            ddl.Classification(perceptron(width, layers)),
            keras.optimizers.AdamW(1e-4),
            data,
            global_batch_size=16,
            accumulation_steps=2,
            weight_average=ddl.ExponentialMovingAverage(),
            **OF_WORKERS[name],
        )
    with observed_by(activations := Activations()):
        trainer.train(4, progress=False)
    held = held_by_replica(trainer, activations)
    now = megabytes(os.getpid())
    of_variables = held.weights + held.slots + held.averages
    while turns.wait():
        found = [now["present"] - before, now["peak"] - before]
        turns.report([*found, of_variables / 2**20, held.total / 2**20])


# ------------------------------------------------------------ in the benchmark's process


def measure(quick: bool) -> Iterator[Report]:
    """Measures the workers, then the programs; yields what is measured so far."""
    tables: list[Table] = []
    bars: list[Bar] = []
    rows: list[list[Any]] = []
    for case in CASES:
        case = case._replace(steps=3) if quick else case
        found = _of_workers(case, 1 if quick else 15)
        time = repeats.ratio(found[:, 1, 0] / found[:, 0, 0])
        sent = repeats.ratio(found[:, 1, 1] / np.maximum(found[:, 0, 1], 1))
        figures = [repeats.spread(found[:, place, 0]) for place in (0, 1)]
        figures += [repeats.spread(found[:, place, 1] / 1e6) for place in (0, 1)]
        rows.append([case.network, time, sent, *figures])
        if not quick:
            bars.append(
                Bar(f"{case.network}: time with shares / whole", time, MOST_TIME, "at most")
            )
            bars.append(
                Bar(f"{case.network}: bytes with shares / whole", sent, MOST_BYTES, "at most")
            )
        columns = ["", "time / whole", "bytes / whole", *(f"ms, {name}" for name in NAMES)]
        columns += [f"MB sent, {name}" for name in NAMES]
        tables = [Table("An update on two workers", columns, rows)]
        yield Report(tables, bars)
    width, layers = (500, 2) if quick else (4472, 5)
    peaks: list[list[Any]] = []
    for name in PROGRAMS:
        grown = _of_program(name, width, layers)
        peaks.append([name, *grown])
        weights = layers * width * width / 1e6
        title = f"Peak memory with AdamW, {weights:,.3g} M weights on two virtual devices"
        memory = Table(title, ["", "growth of the peak, MB", "slots of a replica, MB"], peaks)
        yield Report([*tables, memory], bars)
    width, layers = (500, 2) if quick else (2000, 5)
    grown_of_workers: list[list[Any]] = []
    for name in OF_WORKERS:
        grown_of_workers.append([name, *_memory_of_workers(name, width, layers)])
        title = (
            f"Memory of a worker of two, AdamW and averages of {layers * width * width / 1e6:,.3g} "
            "M weights"
        )
        columns = ["", "growth at the end, MB", "growth of the peak, MB"]
        columns += ["counted: weights, slots, averages, MB", "counted with gradients, MB"]
        yield Report([*tables, memory, Table(title, columns, grown_of_workers)], bars)


def _of_workers(case: Case, rounds: int) -> np.ndarray:
    """Returns ms and bytes per update, [rounds, contenders, 2]; ms of the slower worker."""
    workers = PinnedWorkers("benchmarks.sharding:contenders", [case], alone=False)
    try:
        return np.array([np.max(workers.windows(), axis=0) for _ in range(rounds)])
    finally:
        workers.close()


def _memory_of_workers(name: str, width: int, layers: int) -> list[float]:
    """Returns the figures of `resident`, of the worker with the most."""
    workers = PinnedWorkers("benchmarks.sharding:resident", [(name, width, layers)], alone=False)
    try:
        return [float(figure) for figure in np.max(workers.windows(), axis=0)]
    finally:
        workers.close()


def _of_program(name: str, width: int, layers: int) -> tuple[float, float]:
    """Returns the growth of the peak, and the slots of a replica, in MB."""
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    one = Contender("benchmarks.sharding:program", [(name, width, layers)], environment)
    try:
        grown, slots = one.window()
        return float(grown), float(slots)
    finally:
        one.close()


if __name__ == "__main__":
    command.main(measure)
