"""The gradient of max pooling in the training loop: python -m benchmarks.max_pooling.

TensorFlow has two kernels for it, oneDNN's and the plain one, and in the graph of a loop it is not
settled which one it takes (`ddl.onednn`). The third tutorial's CNN at batch 32 on one device is
built many times over, with its update in the graph of the loop and, as ddl has it, in a graph of
its own. TensorFlow's profiler says which kernel each took.
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf

import ddl
from benchmarks import report
from benchmarks.report import Report, Table, spread
from ddl import distribution
from ddl.optimizers import FusedAdam

BATCH = 32
STEPS = 10
BUILDS = 14
WHERE = {"in the loop's graph": False, "in a graph of its own": True}

Loop = Callable[[], object]


def build(in_graph_of_its_own: bool) -> Loop:
    """`STEPS` updates a call."""
    keras.utils.clear_session()
    with distribution.build_strategy("one_device").scope():
        model = ddl.models.cnn((28, 28, 1), 10, block_dropout=0.25, hidden_dropout=0.5)
        data = ddl.data.synthetic_images(
            "train", image_shape=(28, 28, 1), num_classes=10, num_examples=16 * BATCH
        )
        trainer = ddl.Trainer(
            ddl.Classification(model),
            FusedAdam(),
            data,
            global_batch_size=BATCH,
            steps_per_loop=STEPS,
        )
    trainer._objective.loses_kernels_in_loops = in_graph_of_its_own
    return lambda: trainer.train(STEPS)


def takes_onednn(loop: Loop) -> bool:
    """Whether the gradient of max pooling has oneDNN's kernel."""
    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder)
        loop()
        tf.profiler.experimental.stop()
        seen = b"".join(path.read_bytes() for path in Path(folder).rglob("*.xplane.pb"))
    return b":MaxPoolGrad" not in seen


def measure(quick: bool) -> Report:
    """Builds the loops by turns."""
    builds = 2 if quick else BUILDS
    times: dict[tuple[str, bool], list[float]] = {}
    for _ in range(builds):
        for where, own in WHERE.items():
            loop = build(own)
            loop()  # traces
            taken = min(report.seconds(loop) for _ in range(2)) / STEPS * 1e3
            times.setdefault((where, takes_onednn(loop)), []).append(taken)
    rows = [
        [
            f"{where}: {'oneDNN' if fast else 'the plain kernel'}",
            f"{len(taken)} of {builds}",
            spread(taken),
        ]
        for (where, fast), taken in sorted(times.items())
    ]
    return Report([Table("", ["", "times", "ms an update"], rows)])


if __name__ == "__main__":
    report.main(measure)
