"""Differences between 4 replicas and one device, for stock Keras and for ddl.

  python docs/beside_keras.py

Each case trains one small network for 20 updates with SGD, in float64, on one device and on four
virtual CPU devices, from the same weights, on the same batches in the same order. The printed
number is the largest absolute difference in any weight after training.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

import ddl

UPDATES = 20
CASES = {
    "nothing special": {},
    "clipping by norm": {"clip_norm": 0.1},
    "dropout": {"dropout": 0.5},
    "last batch of 30 among 4 replicas": {"examples": 3 * 64 + 30},
}


def main() -> None:
    """Prints a table."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_visible_devices([], "GPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)
    keras.config.set_floatx("float64")
    print(f"{'largest difference in a weight':32}{'Keras fit':>12}{'ddl':>12}")
    for case, options in CASES.items():
        print(f"{case:32}{difference(with_keras, **options):12.0e}", end="")
        print(f"{difference(with_ddl, **options):12.0e}")


def difference(train, examples: int = 256, dropout: float = 0.0, clip_norm: float | None = None):
    """Returns the largest difference in any weight between one device and four replicas."""
    generator = np.random.default_rng(0)
    images, labels = generator.normal(size=(examples, 16)), generator.integers(0, 10, examples)
    data = (images, labels)
    one = train(tf.distribute.OneDeviceStrategy("CPU:0"), data, dropout, clip_norm)
    devices = [f"CPU:{index}" for index in range(4)]
    four = train(tf.distribute.MirroredStrategy(devices), data, dropout, clip_norm)
    return max(np.abs(a - b).max() for a, b in zip(one, four, strict=True))


def network(dropout: float) -> keras.Model:
    """Returns a network with the same initial weights each time."""
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(32, "relu"), keras.layers.Dropout(dropout, seed=1)]
    return keras.Sequential([keras.Input((16,)), *hidden, keras.layers.Dense(10)])


def with_keras(strategy, data, dropout: float, clip_norm: float | None) -> Sequence[np.ndarray]:
    """Trains with Keras's compile and fit."""
    with strategy.scope():
        model = network(dropout)
        model.compile(
            keras.optimizers.SGD(0.1, global_clipnorm=clip_norm),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    batches = tf.data.Dataset.from_tensor_slices(data).batch(64).repeat()
    model.fit(batches, steps_per_epoch=UPDATES, verbose=0)
    return [v.numpy() for v in model.trainable_variables]


def with_ddl(strategy, data, dropout: float, clip_norm: float | None) -> Sequence[np.ndarray]:
    """Trains with ddl."""
    with strategy.scope():
        task = ddl.Classification(network(dropout))
        optimizer = keras.optimizers.SGD(0.1)
    trainer = ddl.Trainer(
        task,
        optimizer,
        data,
        global_batch_size=64,
        strategy=strategy,
        shuffle=False,
        clip_norm=clip_norm,
    )
    trainer.train(UPDATES)
    return [v.numpy() for v in task.model.trainable_variables]


if __name__ == "__main__":
    main()
