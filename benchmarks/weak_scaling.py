"""Weak scaling of two workers: python -m benchmarks.weak_scaling.

Two processes, pinned to a core each, train together with a fixed batch per worker, on the network
of the third tutorial and the MLP of the second. The limit without communication is the speed of two
concurrent independent runs of ddl on the same cores, which share caches and memory as workers do.
All processes stay alive, and one contender at a time runs a window of updates. A scaling of 91%
means that an update takes 1 / 0.91 of the time of the independent runs.

ddl runs with its defaults. The TensorFlow contender is the loop of its tutorial, with a tf.function
for each step on MultiWorkerMirroredStrategy. The extra time of an update over the independent runs
is split into processor time, which is sending, receiving and adding, and the rest, in which one
worker waits for the other.

Horovod 0.28.1 does not build on this TensorFlow and is left out.
"""

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from benchmarks import command, networks, repeats
from benchmarks.pinned_workers import WORKERS, PinnedWorkers, pin, strategy_of_process
from benchmarks.repeats import spread
from benchmarks.report import Bar, Plot, Report, Series, Table
from benchmarks.turns import Turns

EXAMPLES = 8192


class Case(NamedTuple):
    """A network and batch per worker, the updates in a window, and the target scaling."""

    network: str
    batch: int
    steps: int
    bar: float

    @property
    def name(self) -> str:
        """Name in the table."""
        return f"{self.network}, {self.batch:,} per worker"


CASES = (
    Case("CNN", 512, 3, 0.91),
    Case("CNN", 256, 6, 0.85),
    Case("CNN", 64, 20, 0.72),
    Case("MLP", 1024, 120, 0.60),
)
ALONE, DDL, TENSORFLOW = "independent", "ddl", "TensorFlow"
_ENTRIES = {ALONE: "alone", DDL: "together", TENSORFLOW: "tutorial"}


# ------------------------------------------------------------ in a worker's process


def alone(case: Case, turns: Turns) -> None:
    """Trains as an independent run."""
    take(turns, case.steps, ddl_window(case, strategy_of_process()))


def together(case: Case, turns: Turns) -> None:
    """Trains as a worker of ddl."""
    take(turns, case.steps, ddl_window(case, strategy_of_process()))


def tutorial(case: Case, turns: Turns) -> None:
    """Trains as a worker of TensorFlow's tutorial."""
    take(turns, case.steps, tutorial_window(case))


def take(turns: Turns, steps: int, window: Callable[[int], object]) -> None:
    """Reports the milliseconds of an update, and its milliseconds of processor time."""
    window(2)  # traces
    while turns.wait():
        start, used = time.perf_counter(), time.process_time()
        window(steps)
        times = (time.perf_counter() - start, time.process_time() - used)
        turns.report(tuple(1e3 * seconds / steps for seconds in times))


@functools.cache
def arrays() -> tuple[np.ndarray, np.ndarray]:
    """Returns images of 28 × 28, and labels."""
    from ddl.data import images

    return images(
        "synthetic", "train", image_shape=(28, 28, 1), num_classes=10, num_examples=EXAMPLES
    )


def network_and_optimizer(case: Case) -> tuple[Any, Any]:
    """Builds the network and the optimizer. Call it in the scope of a strategy."""
    import keras

    keras.utils.set_random_seed(0)
    model = networks.cnn() if case.network == "CNN" else networks.mlp()
    return model, keras.optimizers.Adam()


def ddl_window(case: Case, strategy: Any) -> Callable[[int], object]:
    """Returns a function that makes a given number of updates of a trainer."""
    import ddl

    with strategy.scope():
        model, optimizer = network_and_optimizer(case)
        trainer = ddl.Trainer(
            ddl.Classification(model),
            optimizer,
            arrays(),
            global_batch_size=case.batch * strategy.num_replicas_in_sync,
            steps_per_loop=1_000_000,
        )
    return trainer.train


def tutorial_window(case: Case) -> Callable[[int], object]:
    """Returns a function that makes a given number of calls of a distributed step."""
    pin()
    import keras
    import tensorflow as tf

    strategy = _tensorflow_strategy()
    batch = case.batch * WORKERS
    with strategy.scope():
        model, _ = network_and_optimizer(case)
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    dataset = tf.data.Dataset.from_tensor_slices(arrays()).shuffle(EXAMPLES).repeat()
    dataset = dataset.batch(batch, drop_remainder=True).prefetch(tf.data.AUTOTUNE)
    iterator = iter(strategy.experimental_distribute_dataset(dataset.with_options(options)))

    def replica_step(inputs: Any) -> tf.Tensor:
        images, labels = inputs
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_sum(losses) / batch
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, [v.value for v in variables]), variables)
        return loss

    @tf.function(autograph=False)
    def step() -> tf.Tensor:
        losses = strategy.run(replica_step, args=(next(iterator),))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    def window(steps: int) -> None:
        for _ in range(steps):
            loss = step()
        loss.numpy()

    return window


@functools.cache
def _tensorflow_strategy() -> Any:
    import tensorflow as tf

    return tf.distribute.MultiWorkerMirroredStrategy()


# ------------------------------------------------------------ in the benchmark's process


def slower(workers: PinnedWorkers) -> tuple[float, ...]:
    """Returns the larger milliseconds per update, and the larger processor milliseconds."""
    return tuple(max(values) for values in zip(*workers.windows(), strict=True))


def measure(quick: bool = False) -> Report:
    """Measures all cases."""
    cases = [case._replace(steps=2) for case in CASES[2:]] if quick else list(CASES)
    rounds = 1 if quick else 5
    groups = {}
    try:
        for name in _ENTRIES:
            entry = f"benchmarks.weak_scaling:{_ENTRIES[name]}"
            groups[name] = PinnedWorkers(entry, cases, alone=name == ALONE)
        found = {}
        for case in cases:
            windows = {name: lambda group=group: slower(group) for name, group in groups.items()}
            repeats.interleaved(windows, 1)  # the first window of each may still allocate memory
            found[case] = repeats.interleaved(windows, rounds)
            for group in groups.values():
                group.next_case()
    finally:
        for group in groups.values():
            group.close()
    return as_report(found)


def as_report(found: dict[Case, dict[str, np.ndarray]]) -> Report:
    """Builds the report from (milliseconds, processor milliseconds), [rounds, 2] each."""
    times, losses, bars, series = [], [], [], []
    for case, of_case in found.items():
        limit = of_case[ALONE]
        for name, values in of_case.items():
            scaling = spread(limit[:, 0] / values[:, 0])
            times.append([f"{case.name}: {name}", scaling, spread(values[:, 0])])
            if name != ALONE:
                more = np.median(values - limit, axis=0)
                losses.append([f"{case.name}: {name}", *map(float, (more[0], more[1]))])
        own = of_case[DDL][:, 0]
        bars.append(Bar(f"{case.name}: scaling of ddl", spread(limit[:, 0] / own), case.bar))
        faster = spread(of_case[TENSORFLOW][:, 0] / own)
        bars.append(Bar(f"{case.name}: TensorFlow's time / ddl's", faster, 1.0))
    for name in _ENTRIES:
        scalings = [spread(c[ALONE][:, 0] / c[name][:, 0]) for c in found.values()]
        series.append(Series(name, [case.name for case in found], scalings))
    return Report(
        [
            Table("Scaling", ["", "fraction of the limit", "ms per update"], times),
            Table(
                "Extra time compared with independent runs",
                ["", "ms", "ms of processor time"],
                losses,
            ),
        ],
        bars,
        [Plot("Two workers", "", "scaling", series, level=1.0)],
    )


if __name__ == "__main__":
    command.main(measure)
