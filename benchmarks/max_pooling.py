"""Gradient of max pooling in the training loop: python -m benchmarks.max_pooling.

TensorFlow has two kernels for this gradient, oneDNN's and the plain one. In the graph of a loop the
choice between them varies (`ddl.step.onednn`). The benchmark builds the third tutorial's CNN at
batch 32 on one device many times, with its update in the graph of the loop and, as in ddl, in a
separate graph. TensorFlow's profiler shows the kernel of each build. The second table shows the
cost of the separate graph where it is not needed: in the second tutorial's MLP at batch 25.
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf

import ddl
from benchmarks import command, repeats, report
from benchmarks.networks import cnn, mlp
from benchmarks.repeats import spread
from benchmarks.report import Report, Table
from ddl import distribution
from ddl.optimizers import FusedAdam

CNN_BATCH, CNN_STEPS, BUILDS = 32, 10, 14
MLP_BATCH, MLP_STEPS, ROUNDS = 25, 1000, 9
WHERE = {"in the loop's graph": False, "in a graph of its own": True}

Loop = Callable[[], object]
Network = Callable[[], keras.Model]


def build(network: Network, batch: int, steps: int, in_own_graph: bool) -> Loop:
    """Builds a loop that makes `steps` updates per call."""
    data = ddl.data.synthetic_images(
        "train", image_shape=(28, 28, 1), num_classes=10, num_examples=16 * batch
    )
    keras.utils.clear_session()
    with distribution.build_strategy("one_device").scope():
        trainer = ddl.Trainer(
            ddl.Classification(network()),
            FusedAdam(),
            data,
            global_batch_size=batch,
            steps_per_loop=steps,
        )
    (objective,) = trainer._parts.update.plan.losses.values()
    objective.needs_own_graph = in_own_graph
    return lambda: trainer.train(steps)


def takes_onednn(loop: Loop) -> bool:
    """Returns whether the gradient of max pooling runs oneDNN's kernel."""
    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder)
        loop()
        tf.profiler.experimental.stop()
        seen = b"".join(path.read_bytes() for path in Path(folder).rglob("*.xplane.pb"))
    onednn, plain = (kernel in seen for kernel in (b":_MklNativeMaxPoolGrad", b":MaxPoolGrad"))
    if onednn == plain:
        raise RuntimeError(
            "The profile must show exactly one of the two kernels, got both or none."
        )
    return onednn


def kernels(builds: int) -> Table:
    """Builds loops with max pooling, both kinds alternately, and counts their kernels."""
    times: dict[tuple[str, bool], list[float]] = {}
    for _ in range(builds):
        for where, own in WHERE.items():
            loop = build(cnn, CNN_BATCH, CNN_STEPS, own)
            loop()  # traces
            taken = min(repeats.seconds(loop) for _ in range(2)) / CNN_STEPS * 1e3
            times.setdefault((where, takes_onednn(loop)), []).append(taken)
    rows = [
        [
            f"{where}: {'oneDNN' if fast else 'the plain kernel'}",
            f"{len(taken)} of {builds}",
            spread(taken),
        ]
        for (where, fast), taken in sorted(times.items())
    ]
    return Table("", ["", "builds", "ms per update"], rows)


def call(rounds: int) -> Table:
    """Measures the cost of the separate graph in a step that does not need it."""
    loops = {where: build(mlp, MLP_BATCH, MLP_STEPS, own) for where, own in WHERE.items()}
    for loop in loops.values():
        loop()  # traces
    timed = {
        where: lambda loop=loop: repeats.seconds(loop) / MLP_STEPS * 1e6
        for where, loop in loops.items()
    }
    found = repeats.interleaved(timed, rounds)
    inlined = found["in the loop's graph"]
    rows = [
        [where, repeats.ratio(times / inlined), spread(times)] for where, times in found.items()
    ]
    return Table("MLP, without pooling", ["", "time / loop's graph", "µs per update"], rows)


def measure(quick: bool) -> Report:
    """Measures both tables."""
    tables = [kernels(2 if quick else BUILDS), call(1 if quick else ROUNDS)]
    plots = [report.plot_of(table, table.columns[-1:], table.columns[-1]) for table in tables]
    return Report(tables, plots=plots)


if __name__ == "__main__":
    command.main(measure)
