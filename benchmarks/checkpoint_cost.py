"""Cost of saving a checkpoint: python -m benchmarks.checkpoint_cost.

ResNet-50 (25.6 million weights and as many momenta) trains on one device on 32×32 images in batches
of 64. A block is as many updates as fit into 10 seconds, with one checkpoint at its start or with
none; the two follow each other in one process. The figure is the ratio of their times. It includes
the finite check of the weights, the snapshot, the copies that the next update makes, and writing
the file to disk: a block with a checkpoint ends when the checkpoint is written. The benchmark
measures the same with the default `tf.train.Checkpoint`, which blocks the loop.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import ddl
from benchmarks import harness
from benchmarks.harness import Contender, Options, Report, Table, seconds, spread
from ddl import distribution

BATCH = 64


def make_trainer() -> ddl.Trainer:
    """Builds a trainer of ResNet-50 on noise."""
    keras.utils.set_random_seed(0)
    images = np.random.default_rng(0).normal(size=(BATCH * 8, 32, 32, 3)).astype("f4")
    shape = {"input_shape": (32, 32, 3), "classes": 1000, "classifier_activation": None}
    with distribution.build_strategy("one_device").scope():
        task = ddl.Classification(keras.applications.ResNet50(weights=None, **shape))
        optimizer = keras.optimizers.SGD(1e-4, momentum=0.9)
        data = images, np.arange(len(images)) % 10
        return ddl.Trainer(task, optimizer, data, global_batch_size=BATCH)


def cost(case: tuple[str, float]) -> Callable[[], float]:
    """Returns a window: the time of a block with a checkpoint / that of one without.

    Args:
      case: Who saves, "ddl" or "TensorFlow"; and the seconds of a block.
    """
    kind, block = case
    distribution.configure_devices()
    trainer, folder = make_trainer(), Path(tempfile.mkdtemp(prefix="checkpoint_cost"))
    trainer.train(3)  # traces
    steps = max(1, round(block / seconds(lambda: trainer.train(10), 10)))
    checkpoints = ddl.Checkpoints(folder, trainer, ddl.Retention(last=1))
    plain = tf.train.Checkpoint(model=trainer.model, optimizer=trainer.optimizer)

    def with_save() -> None:
        if kind == "ddl":
            trainer.check_finite()
            checkpoints.save()
        else:
            plain.write(str(folder / "plain"))
        trainer.train(steps)
        checkpoints.finish()

    return lambda: seconds(with_save) / seconds(lambda: trainer.train(steps))


def measure(options: Options) -> Report:
    """Measures both in several processes."""
    block = 1.0 if options.quick else 10.0
    contenders = {
        kind: Contender("benchmarks.checkpoint_cost:cost", (kind, block))
        for kind in ("ddl", "TensorFlow")
    }
    found, notes = harness.compare(contenders, *((1, 1) if options.quick else (3, 3)))
    rows = [[name, spread(100 * (values - 1))] for name, values in found.items()]
    title = "205 MB per checkpoint, one for a block of 10 seconds"
    return Report([Table(title, ["saved by", "cost, %"], rows)], (), notes)


if __name__ == "__main__":
    harness.main(measure)
