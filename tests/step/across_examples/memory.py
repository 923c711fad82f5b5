"""The memory of an update with a loss across examples: python -m tests.step.across_examples.memory.

Prints the growth of the process's peak memory, in MiB, for one microbatch alone, for four
microbatches in three passes, and for the four as one batch, as a line of JSON.
"""

import json
import os
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import ddl
from benchmarks.memory import megabytes

ROWS, WIDTH, LAYERS = 256, 16_384, 6


class Wide:
    """A loss across examples whose activations take far more memory than all else."""

    def __init__(self) -> None:
        activations = [keras.layers.Activation("tanh") for _ in range(LAYERS)]
        hidden = [keras.layers.Dense(WIDTH), *activations, keras.layers.Dense(4)]
        self.model = keras.Sequential([keras.Input((4,)), *hidden])

    def per_example(self, features: dict[str, Any], training: bool) -> ddl.PerExample:
        z = self.model(features["x"], training=training)
        others = ddl.gather(z, across="global_batch")
        logits = tf.where(others.mask, z @ tf.transpose(others.rows), z.dtype.min)
        return ddl.PerExample(tf.nn.sparse_softmax_cross_entropy_with_logits(others.own, logits))


def growth(batch: int, microbatches: int) -> float:
    """Trains for three updates; returns by how much the peak memory grew since before them."""
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(1024, 4)).astype("f4")
    trainer = ddl.Trainer(
        Wide(), "sgd", {"x": x}, global_batch_size=batch, accumulation_steps=microbatches
    )
    trainer.trace()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = megabytes(os.getpid())["present"]
    trainer.train(3)
    return megabytes(os.getpid())["peak"] - before


if __name__ == "__main__":
    # Memory that the process has freed may count later, so the smallest comes first.
    print(json.dumps([growth(ROWS, 1), growth(4 * ROWS, 4), growth(4 * ROWS, 1)]))
