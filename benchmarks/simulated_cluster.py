"""Simulation of a larger cluster: python -m benchmarks.simulated_cluster.

benchmarks/cluster_model.py computes the time of a step from compute, bytes, latency and bandwidth.
The benchmark checks the model three times before it predicts. The first check uses two workers with
a core each. Latency and bandwidth are fitted to their all-reduces of four sizes, and the CNN's
compute is timed without communication on both cores at once. The model then predicts their step
with communication, to which nothing was fitted. The other checks use published figures: the third
tutorial's Horovod, and ResNet-50 on 256 GPUs by Goyal et al. 2017, "Accurate, Large Minibatch SGD".
Both overlap communication with the backward pass by an unpublished share, so the model gives the
range from no overlap to full overlap.

Only the first check is measured here. The compute of the others and of the forecasts is published:
by the tutorial and by Goyal et al. Latencies and bandwidths of links come from specifications, or
are assumed where none is published. ddl itself has not been measured on several GPUs: its speed-up
on 8 of them is computed for the tutorial's CNN, for which the tutorial measured 7.36 with Horovod.

The model then predicts weak scaling from 8 to 4,096 replicas for both networks, on machines with 8
devices.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from benchmarks import command, networks
from benchmarks.cluster_model import (
    Algorithm,
    Cluster,
    Link,
    Work,
    efficiency,
    fit_link,
    ring,
    step_time,
)
from benchmarks.pinned_workers import WORKERS, PinnedWorkers, strategy_of_process
from benchmarks.repeats import interleaved, spread
from benchmarks.report import Plot, Report, Series, Table
from benchmarks.turns import Turns

BATCH = 64  # per worker
STEPS = 20
SIZES = (1_000, 30_000, 300_000, 1_199_882)  # float32 values; the last is the CNN's gradient
ROUNDS = 7
REPLICAS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)

# ------------------------------------------------------------ parameters and their sources

CNN_WORK, CNN_WORK_OF_HALF = (
    Work(compute=batch / 66_176, gradient_bytes=4 * SIZES[-1]) for batch in (2048, 1024)
)
"""The tutorial's speed on one GPU. The tutorial has 1,024 to 2,048 images per replica."""
PCIE = Link(latency=20e-6, bandwidth=10e9)
"""Assumed, since the tutorial does not name its links. PCIe 3.0 x16 has 15.75 GB/s by its standard,
of which a copy reaches about two thirds; a kernel starts within about 20 µs."""
RESNET_WORK = Work(
    compute=256 / (90 * 1_281_167 / (29 * 3600)),
    gradient_bytes=4 * 25_557_032,
    backward_share=0.120 / 0.232,
)
"""Goyal et al.: 90 epochs of ImageNet in 29 hours on 8 GPUs with 256 images per step, which is
0.232 s per step. The backward pass takes 0.120 s; the model has 25.6 million weights. Communication
within one machine counts as hidden."""
NVLINK = Link(latency=20e-6, bandwidth=20e9)
"""One link of a P100 in one direction, from NVIDIA's specification."""
ETHERNET = Link(latency=50e-6, bandwidth=50e9 / 8)
"""50 Gbit/s per machine, from Goyal et al.; the TCP latency within a building is assumed."""

_HOROVOD = 486_914 / 66_176 / 8
"""The third tutorial's efficiency: images per second on 8 GPUs and on 1, per GPU."""
PUBLISHED: tuple[tuple[str, Work, Cluster, Algorithm, int, int, float], ...] = (
    ("CNN, 2,048 per replica, 1 to 8 GPUs", CNN_WORK, Cluster(PCIE), "ring", 1, 8, _HOROVOD),
    (
        "CNN, 1,024 per replica, 1 to 8 GPUs",
        CNN_WORK_OF_HALF,
        Cluster(PCIE),
        "ring",
        1,
        8,
        _HOROVOD,
    ),
    (
        "ResNet-50, 32 per replica, 8 to 256 GPUs",
        RESNET_WORK,
        Cluster(NVLINK, ETHERNET),
        "halving_doubling",
        8,
        256,
        0.90,
    ),
)
FORECASTS = (
    ("CNN, 2,048 per replica", CNN_WORK, Cluster(PCIE, ETHERNET)),
    ("ResNet-50, 32 per replica", RESNET_WORK, Cluster(NVLINK, ETHERNET)),
)
ALGORITHMS: tuple[Algorithm, ...] = ("ring", "hierarchical", "halving_doubling")


# ------------------------------------------------------------ in a worker's process


class Case(NamedTuple):
    """All-reduces of `size` float32 values, or updates of the CNN with `size` images per worker."""

    kind: str
    size: int
    repeats: int


def worker(case: Case, turns: Turns) -> None:
    """Times windows of a case on the worker's core."""
    window = all_reduces(case) if case.kind == "all-reduce" else updates(case)
    window()  # traces
    turns.take(window)


def all_reduces(case: Case) -> Callable[[], object]:
    """Returns a function that runs `case.repeats` all-reduces in sequence."""
    strategy = strategy_of_process()
    import tensorflow as tf

    with strategy.scope():
        variable = tf.Variable(tf.zeros([case.size]))

    def once(count: tf.Tensor, values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        halves = strategy.run(lambda: values / WORKERS)
        pairs = [(halves, variable)]
        (total,) = strategy.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, pairs)
        return count + 1, strategy.experimental_local_results(total)[0]

    @tf.function(autograph=False)
    def loop() -> tf.Tensor:
        start = (tf.constant(0), tf.ones([case.size]))
        return tf.while_loop(lambda count, _: count < case.repeats, once, start)[1][0]

    return lambda: loop().numpy()


def updates(case: Case) -> Callable[[], object]:
    """Returns a function that makes `case.repeats` updates of the CNN."""
    strategy = strategy_of_process()
    import keras

    import ddl

    with strategy.scope():
        model = networks.cnn()
        data = ddl.data.images(
            "synthetic", "train", image_shape=(28, 28, 1), num_classes=10, num_examples=2048
        )
        trainer = ddl.Trainer(
            ddl.Classification(model),
            keras.optimizers.Adam(),
            data,
            global_batch_size=case.size * strategy.num_replicas_in_sync,
            steps_per_loop=case.repeats,
        )
    return lambda: trainer.train(case.repeats)


# ------------------------------------------------------------ in the benchmark's process


def seconds_of(workers: PinnedWorkers, case: Case) -> float:
    """Returns the seconds of one repeat on the slower worker."""
    return max(workers.windows()) / case.repeats


def measure_here(quick: bool) -> tuple[dict[int, np.ndarray], dict[str, np.ndarray]]:
    """Measures the seconds of all-reduces by bytes, and of updates alone and together."""
    rounds = 1 if quick else ROUNDS
    step = Case("step", BATCH, 2 if quick else STEPS)
    reduces = [Case("all-reduce", size, max(2, 2_000_000 // size // 20)) for size in SIZES]
    entry, one_thread = "benchmarks.simulated_cluster:worker", {"TF_NUM_INTRAOP_THREADS": "1"}
    together = PinnedWorkers(entry, [*reduces, step], alone=False, **one_thread)
    alone = PinnedWorkers(entry, [step], alone=True, **one_thread)
    try:
        sizes = {}
        for case in reduces:
            seconds_of(together, case)
            times = [seconds_of(together, case) for _ in range(rounds)]
            sizes[4 * case.size] = np.array(times)
            together.next_case()
        groups = {"alone": alone, "together": together}
        windows = {
            name: lambda group=group: seconds_of(group, step) for name, group in groups.items()
        }
        interleaved(windows, 1)
        return sizes, interleaved(windows, rounds)
    finally:
        together.close()
        alone.close()


def check_here(quick: bool) -> tuple[list[Table], list[str]]:
    """Compares the model's prediction for two workers with measurements."""
    sizes, steps = measure_here(quick)
    medians = [float(np.median(times)) for times in sizes.values()]
    link = fit_link([*map(float, sizes)], medians, WORKERS)
    work = Work(float(np.median(steps["alone"])), 4 * SIZES[-1], 0.0)
    # The metrics have their own all-reduce, modelled as an empty message.
    predicted = step_time(work, WORKERS, Cluster(link), "ring", 0.0) + ring(0, WORKERS, link)
    reduces = [
        [f"{size:,}", ring(size, WORKERS, link) * 1e3, spread(times * 1e3)]
        for size, times in sizes.items()
    ]
    rows: list[list[Any]] = [
        [
            f"CNN, {BATCH} per worker",
            spread(predicted / steps["together"]),
            predicted * 1e3,
            spread(steps["together"] * 1e3),
            spread(steps["alone"] * 1e3),
        ]
    ]
    columns = ["", "predicted / measured", "predicted, ms", "measured, ms", "alone, ms"]
    return [
        Table("Two workers on this machine: one training step", columns, rows),
        Table(
            "Two workers on this machine: all-reduces",
            ["bytes", "fitted, ms", "measured, ms"],
            reduces,
        ),
    ], [
        f"Link fitted on this machine: {link.latency * 1e6:.0f} µs and {link.bandwidth / 1e6:,.0f} "
        "MB/s. Nothing overlaps, because the gradients are sent in one piece after the backward "
        "pass."
    ]


def check_published() -> Table:
    """Compares the model's range with published figures."""
    rows = []
    for name, work, cluster, algorithm, base, replicas, published in PUBLISHED:
        none, all_ = (
            100 * efficiency(work, replicas, cluster, algorithm, overlap, base)
            for overlap in (0.0, 1.0)
        )
        rows.append([name, 100 * published, none, all_])
    columns = ["efficiency, %", "published", "model, no overlap", "model, full overlap"]
    return Table("Published figures", columns, rows)


def eight_gpus() -> Table:
    """Computes the speed-up on 8 GPUs for the third tutorial's CNN, beside its published one."""
    rows = []
    for name, work, cluster, algorithm, base, replicas, published in PUBLISHED:
        if (base, replicas) != (1, 8):
            continue
        times = [8 * efficiency(work, 8, cluster, algorithm, overlap) for overlap in (0.0, 1.0)]
        rows.append([name, f"{8 * published:.2f}", *(f"{time:.2f}" for time in times)])
    columns = ["speed relative to one GPU", "published: Horovod", "no overlap", "full overlap"]
    return Table("Speed-up on 8 GPUs: computed, not measured", columns, rows)


def forecast(name: str, work: Work, cluster: Cluster) -> tuple[Table, Plot]:
    """Predicts weak scaling relative to 8 replicas, without overlap and with full overlap."""
    columns, series = ["replicas"], []
    for algorithm in ALGORITHMS:
        for overlap, share in ((0.0, "no overlap"), (1.0, "full overlap")):
            values = [100 * efficiency(work, n, cluster, algorithm, overlap, 8) for n in REPLICAS]
            label = f"{algorithm.replace('_', '-')}, {share}"
            columns.append(label)
            series.append(Series(label, REPLICAS, values))
    rows = [[f"{n:,}", *(s.y[place] for s in series)] for place, n in enumerate(REPLICAS)]
    title = f"{name}: efficiency relative to 8 replicas, %"
    return Table(title, columns, rows), Plot(name, "replicas", "%", series, log_x=True, level=100.0)


def measure(quick: bool) -> Report:
    """Checks the model, then predicts."""
    here, notes = check_here(quick)
    forecasts = [forecast(*one) for one in FORECASTS]
    return Report(
        [*here, check_published(), eight_gpus(), *(table for table, _ in forecasts)],
        plots=[plot for _, plot in forecasts],
        notes=[
            *notes,
            "The model leaves out stragglers and jitter, which grow with the number of machines; "
            "congestion in switches; processors that compute and communicate at once; input, "
            "checkpoints and evaluation; and whether so large a global batch still trains well. "
            "These, and the assumptions about the links, explain published figures below the "
            "model's range.",
        ],
    )


if __name__ == "__main__":
    command.main(measure)
