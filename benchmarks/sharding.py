"""Sharded optimizer state: time, bytes on the wire and memory: python -m benchmarks.sharding.

Two workers, pinned to a core each, train a CNN of 1.2 M weights and a perceptron of 4 M weights
with AdamW: one trainer has whole slots, one has shares, and their windows take turns in the same
processes. Ratios are those of a round. Bytes are those that pass the loopback interface, on which
the workers' messages travel, in a window of updates; other programs' are counted, too. The targets:
an update with shares takes at most 1.05 of the time, and sends no more than 1.02 of the bytes.

Then AdamW trains a perceptron of 100 M weights in one process on two virtual devices: Keras's
`fit`, ddl, and ddl with shares, each in a process of its own. Memory is the growth of the process's
peak from before the model is built; slots are those that one replica holds.

Last, two workers train a perceptron of 64 M weights with AdamW, averages of the weights and two
microbatches: with whole slots and averages, with shares, and with the gradients in shares too. From
each figure that of the same run with SGD and without averages is subtracted: the difference is the
memory of slots and averages. The target is 1/2 + 2% of whole slots and averages. The memory between
updates is measured twice. Tensors are those that TensorFlow's allocator counts. It keeps the memory
of freed tensors, so a process stays as large as its largest update. Resident memory is therefore
measured with TF_ENABLE_ONEDNN_OPTS=0, which replaces this allocator by malloc, with one arena of
malloc for all threads, since each arena keeps freed memory, and after malloc_trim.
"""

import ctypes
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
MOST_TIME, MOST_BYTES, MOST_HELD = 1.05, 1.02, 0.52
OF_WORKERS = {
    "whole": {},
    "shares": {"shard_optimizer_state": True},
}
"""Arguments of the Trainer, by the row of the table of two workers."""
MEMORY = ("counted", "tensors", "resident")
ONEDNN = "TF_ENABLE_ONEDNN_OPTS"
M_ARENA_MAX = -8  # of malloc.h
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


def of_worker(case: tuple[str, int, int, bool], turns: Turns) -> None:
    """Reports a worker's memory between updates and its peak, and the counted bytes, in MB.

    Without oneDNN, the memory is the growth of resident memory; else it is that of tensors. The
    counted bytes are those of slots and averages, and of all.
    """
    counts = os.environ[ONEDNN] == "1"
    libc = ctypes.CDLL(None)
    if not counts:
        libc.mallopt(M_ARENA_MAX, 1)
    strategy = strategy_of_process()
    import tensorflow as tf

    import ddl
    from ddl.optimizers import FusedAdamW, FusedSGD
    from ddl.run.memory import held_by_replica
    from ddl.step.observing import observed_by
    from ddl.step.remat.activations import Activations

    def memory() -> np.ndarray:
        if counts:
            info = tf.config.experimental.get_memory_info("CPU:0")
            return np.array([info["current"], info["peak"]]) / 2**20
        libc.malloc_trim(0)
        found = megabytes(os.getpid())
        return np.array([found["present"], found["peak"]])

    name, width, layers, has_slots = case
    data = np.ones([64, width], "f4"), np.zeros([64], "i8")
    tf.zeros([])  # starts TensorFlow
    before = memory()[0]
    with strategy.scope():
        trainer = ddl.Trainer(
            ddl.Classification(perceptron(width, layers)),
            FusedAdamW(1e-4) if has_slots else FusedSGD(1e-4),
            data,
            global_batch_size=16,
            accumulation_steps=2,
            weight_average=ddl.ExponentialMovingAverage() if has_slots else None,
            **OF_WORKERS[name],
        )
    with observed_by(activations := Activations()):
        trainer.train(4, progress=False)
    held = held_by_replica(trainer, activations)
    grown = memory() - before
    while turns.wait():
        turns.report([*grown, (held.slots + held.averages) / 2**20, held.total / 2**20])


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
    width, layers = (500, 2) if quick else (4000, 4)
    held: dict[str, list[np.ndarray]] = {name: [] for name in OF_WORKERS}
    for _ in range(1 if quick else 2):
        for name, of_rounds in held.items():
            of_rounds.append(_memory_of_workers(name, width, layers))
        found = {name: np.array(figures) for name, figures in held.items()}
        of_workers, of_memory = _held_by_workers(found, layers * width**2 / 1e6)
        yield Report([*tables, memory, of_workers], bars if quick else [*bars, *of_memory])


def _held_by_workers(found: dict[str, np.ndarray], millions: float) -> tuple[Table, list[Bar]]:
    """Returns the table and the targets of the workers' memory.

    Args:
      found: Figures of `_memory_of_workers`, [rounds, 2, 2, 4], by the names of `OF_WORKERS`.
      millions: Number of weights.
    """
    columns = ["", "slots and averages counted, MB", "tensors, MB", "resident, MB"]
    columns += ["peak of tensors in an update, MB", "with SGD, MB", "peak counted, MB"]
    rows, bars = [], []
    of = {name: (f[:, 0, 0, 2], *(f[:, 0, :, 0] - f[:, 1, :, 0]).T) for name, f in found.items()}
    for name, figures in found.items():
        peaks = [figures[:, 0, 0, 1], figures[:, 1, 0, 1], figures[:, 0, 0, 3]]
        rows.append([name, *map(repeats.spread, [*of[name], *peaks])])
        if name != "whole":
            for what, ours, whole in zip(MEMORY, of[name], of["whole"], strict=True):
                what = f"slots and averages, {what}: with {name} / whole"
                bars.append(Bar(what, repeats.ratio(ours / whole), MOST_HELD, "at most"))
    title = f"Memory of a worker of two, AdamW and averages of {millions:,.3g} M weights"
    return Table(title, columns, rows), bars


def _of_workers(case: Case, rounds: int) -> np.ndarray:
    """Returns ms and bytes per update, [rounds, contenders, 2]; ms of the slower worker."""
    workers = PinnedWorkers("benchmarks.sharding:contenders", [case], alone=False)
    try:
        return np.array([np.max(workers.windows(), axis=0) for _ in range(rounds)])
    finally:
        workers.close()


def _memory_of_workers(name: str, width: int, layers: int) -> np.ndarray:
    """Returns figures of `of_worker`: [AdamW or SGD, oneDNN or not, 4]; means of the workers."""
    found = np.zeros([2, 2, 4])
    for place, onednn in np.ndindex(2, 2):
        cases = [(name, width, layers, place == 0)]
        environment = {ONEDNN: "01"[onednn == 0]}
        workers = PinnedWorkers("benchmarks.sharding:of_worker", cases, alone=False, **environment)
        try:
            found[place, onednn] = np.mean(workers.windows(), axis=0)
        finally:
            workers.close()
    return found


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
