"""Cost of saving a checkpoint: python -m benchmarks.checkpoint_cost.

ResNet-50 (25.6 million weights and as many momenta) trains on one device on 32×32 images in batches
of 64. A block is as many updates as fit into 10 seconds, with one checkpoint at its start or with
none. The two kinds alternate, and so does the kind that begins a round. The figure is the ratio of
their times. It includes the finite check of the weights, the snapshot, the copies that the next
update makes, and writing the file to disk: a block with a checkpoint ends when the checkpoint is
written. The benchmark measures the same with the default `tf.train.Checkpoint`, which blocks the
loop. (Its asynchronous option fails with Keras 3 at the second save:
tests/step/test_keras_canaries.py.)
"""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import ddl
from benchmarks import command, report
from benchmarks.repeats import interleaved, seconds, spread
from benchmarks.report import Report, Table
from ddl import distribution
from ddl.checkpoints.checkpoints import Checkpoints
from ddl.checkpoints.retention import Retention

BATCH = 64
SECONDS = 10.0
ROUNDS = {"ddl": 5, "TensorFlow": 2}


def make_trainer() -> ddl.Trainer:
    """Builds a trainer of ResNet-50 on noise."""
    keras.utils.set_random_seed(0)
    strategy = distribution.build_strategy("one_device")
    images = np.random.default_rng(0).normal(size=(BATCH * 8, 32, 32, 3)).astype("f4")
    with strategy.scope():
        network = keras.applications.ResNet50(
            weights=None, input_shape=(32, 32, 3), classes=1000, classifier_activation=None
        )
        return ddl.Trainer(
            ddl.Classification(network),
            keras.optimizers.SGD(1e-4, momentum=0.9),
            (images, np.arange(len(images)) % 10),
            global_batch_size=BATCH,
        )


def ways_to_save(
    trainer: ddl.Trainer, folder: Path
) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """Returns, by name, the function that begins a save and the one that waits for its end."""
    checkpoints = Checkpoints(folder / "ddl", trainer, Retention(last=1))

    def save() -> None:
        trainer.check_finite()
        checkpoints.save()

    theirs = tf.train.Checkpoint(model=trainer.model, optimizer=trainer.optimizer)
    return {
        "ddl": (save, checkpoints.finish),
        "TensorFlow": (lambda: theirs.write(str(folder / "plain")), lambda: None),
    }


def measure(quick: bool) -> Report:
    """Times interleaved blocks with one checkpoint and with none."""
    distribution.configure_devices()
    folder = Path(tempfile.mkdtemp(prefix="checkpoint_cost"))
    trainer = make_trainer()
    trainer.train(3)  # traces
    steps = max(1, round(SECONDS / (seconds(lambda: trainer.train(10)) / 10)))
    if quick:
        steps = 1
    rows = []
    for name, (begin, end) in ways_to_save(trainer, folder).items():
        for _ in range(3):  # until each save also removes an old checkpoint
            trainer.train(1)
            begin()
            end()
        begins = []

        def with_save(begin=begin, end=end, begins=begins) -> None:  # type: ignore[no-untyped-def]
            begins.append(seconds(begin))
            trainer.train(steps)
            end()

        blocks = {
            "with": lambda with_save=with_save: seconds(with_save),
            "without": lambda: seconds(lambda: trainer.train(steps)),
        }
        times = interleaved(blocks, 1 if quick else ROUNDS[name])
        cost = 100 * (times["with"] / times["without"] - 1)
        rows.append([name, spread(cost), *map(spread, (begins, times["without"], times["with"]))])
    size = sum(path.stat().st_size for path in folder.glob("plain.*"))
    shutil.rmtree(folder)
    columns = ["saved by", "cost, %", "call, s", "block without save, s", "block with save, s"]
    table = Table(f"{size / 1e6:.0f} MB per checkpoint, {steps} updates per block", columns, rows)
    return Report([table], plots=[report.plot_of(table, columns[3:], "s")])


if __name__ == "__main__":
    command.main(measure)
