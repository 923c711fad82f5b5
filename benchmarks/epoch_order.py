"""Randomness of the order of examples: python -m benchmarks.epoch_order.

The mean of a batch of b examples drawn at random from 0 … n - 1 has a variance of nearly
(n² - 1)/12/b, for b much smaller than n. The ratio of the measured variance to this value is 1 for
a good shuffle; below 1, batches are more alike than random ones. The benchmark also times 256
indices.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

from benchmarks import command, repeats, report
from benchmarks.report import Report, Spread, Table
from ddl.data import batch_indices

BATCH = 32
EPOCHS = 6


def shuffled(num_examples: int, epoch: int, rounds: int | None) -> np.ndarray:
    """Returns one epoch in ddl's order, or in that of the raw op with `rounds` rounds."""
    if rounds is None:
        index, _ = batch_indices(
            tf.constant(epoch, tf.int64), num_examples=num_examples, global_batch_size=num_examples
        )
    else:
        index = tf.raw_ops.RandomIndexShuffle(
            index=tf.range(num_examples, dtype=tf.int64),
            seed=tf.random.stateless_uniform([3], [epoch, 1], None, None, tf.uint32),
            max_index=tf.constant(num_examples - 1, tf.int64),
            rounds=rounds,
        )
    return index.numpy()


def variance_ratio(num_examples: int, rounds: int | None) -> float:
    """Returns the variance of the batch means relative to that of a random order."""
    whole = num_examples // BATCH * BATCH
    variances = [
        shuffled(num_examples, epoch, rounds)[:whole].reshape(-1, BATCH).mean(axis=1).var()
        for epoch in range(EPOCHS)
    ]
    return float(np.mean(variances) / ((num_examples**2 - 1) / 12 / BATCH))


def microseconds(num_examples: int) -> Spread:
    """Times the computation of 256 indices in ddl's order."""

    @tf.function
    def indices(batch: tf.Tensor) -> tf.Tensor:
        return batch_indices(batch, num_examples=num_examples, global_batch_size=256)[0]

    batch = tf.constant(0, tf.int64)
    indices(batch)
    times = [repeats.seconds(lambda: indices(batch)) for _ in range(100)]
    return repeats.spread(np.array(times) * 1e6)


def measure(quick: bool) -> Report:
    """Measures data sets of several sizes, or only the smallest if `quick`."""
    sizes = (1_437, 4_096, 8_192, 50_000, 60_000, 65_537)[: 1 if quick else None]
    rows = [
        [
            f"{size:,}",
            *(variance_ratio(size, rounds) for rounds in (4, 8, None)),
            microseconds(size),
        ]
        for size in sizes
    ]
    columns = ["examples", "4 rounds", "8 rounds", "ddl", "µs per 256 examples"]
    table = Table("Variance of the batch mean / that of random batches", columns, rows)
    return Report([table], plots=[report.plot_of(table, columns[1:4], "ratio", level=1.0)])


if __name__ == "__main__":
    command.main(measure)
