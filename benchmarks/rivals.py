"""Keras's fit and Orbit, for any model, optimizer and batches of (inputs, labels).

Each keeps the mean of the loss and the accuracy, on one device without a strategy, and reports the
seconds of an update in each turn. Labels are integers for each row, or for each token of a row.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

from benchmarks.report import PEERS
from benchmarks.turns import Failed, Turns


class WaitForTurn(keras.callbacks.Callback):
    """A callback that makes each epoch of a fit wait for its turn and reports its time."""

    def __init__(self, turns: Turns, parts: int) -> None:
        super().__init__()
        self._turns = turns
        self._parts = parts
        self._start = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Waits for the turn; ends the fit when the case is over."""
        if not self._turns.wait():
            raise StopIteration
        self._start = tf.timestamp().numpy()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Reports the seconds of the epoch, divided by its parts."""
        self._turns.report(float(tf.timestamp().numpy() - self._start) / self._parts)


def batches(arrays: tuple[np.ndarray, np.ndarray], size: int) -> tf.data.Dataset:
    """Builds an endless pipeline of batches, in the order of the arrays, which costs least."""
    options = tf.data.Options()
    options.autotune.enabled = False  # an iterator that ends may wait a minute for the tuner
    whole = tf.data.Dataset.from_tensor_slices(arrays).batch(size, drop_remainder=True)
    return whole.cache().repeat().prefetch(2).with_options(options)


def losses(model: keras.Model, inputs: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the cross-entropies and the logits of a model in training mode."""
    logits = model(inputs, training=True)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits), logits


def fit(
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    data: tf.data.Dataset,
    steps: int,
    turns: Turns,
    *,
    steps_per_execution: int = 1,
    jit_compile: bool | str = "auto",
) -> None:
    """Runs one `fit`, of which each epoch of `steps` updates is a window."""
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        steps_per_execution=steps_per_execution,
        jit_compile=jit_compile,
    )
    forever = {"epochs": 10**6, "steps_per_epoch": steps, "verbose": 0, "shuffle": False}
    try:
        model.fit(data, **forever, callbacks=[WaitForTurn(turns, steps)])
    except StopIteration:
        return


def orbit(
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    data: tf.data.Dataset,
    steps: int,
    turns: Turns,
) -> None:
    """Runs Orbit's StandardTrainer, whose loop of `steps` updates is a tf.while.

    Raises:
      Failed: If Orbit is not installed.
    """
    if not (PEERS / "orbit").exists():
        raise Failed(
            "skipped, because it is not installed. Install it with `make benchmarks/peers`."
        )
    sys.path.append(str(PEERS))
    import orbit as package

    optimizer.build(model.trainable_variables)

    class Trainer(package.StandardTrainer):
        def __init__(self) -> None:
            self.model, self.optimizer = model, optimizer
            self.loss = keras.metrics.Mean()
            self.accuracy = keras.metrics.SparseCategoricalAccuracy()
            super().__init__(data)

        def train_loop_begin(self) -> None:
            self.loss.reset_state()
            self.accuracy.reset_state()

        def train_step(self, iterator: Any) -> None:
            inputs, labels = next(iterator)
            with tf.GradientTape() as tape:
                each, logits = losses(model, inputs, labels)
                loss = tf.reduce_mean(each)
            variables = model.trainable_variables
            optimizer.apply(tape.gradient(loss, [v.value for v in variables]), variables)
            self.loss.update_state(each)
            self.accuracy.update_state(labels, logits)

        def train_loop_end(self) -> dict[str, float]:
            return {"loss": float(self.loss.result()), "accuracy": float(self.accuracy.result())}

    trainer, count = Trainer(), tf.constant(steps)
    turns.take(lambda: trainer.train(count), steps)


def bare_loop(
    update: Callable[[tf.Tensor, tf.Tensor, tf.Tensor], None],
    arrays: tuple[np.ndarray, np.ndarray],
    size: int,
    steps: int,
    turns: Turns,
) -> None:
    """Runs a bare step in a tf.while of `steps` updates, on slices of the arrays.

    Args:
      update: Makes an update from its number, from 1 on, and a batch of inputs and labels.
      arrays: Inputs and labels, of a whole number of batches.
      size: Rows of a batch.
      steps: Updates of a window.
      turns: Gives the turns.
    """
    inputs, labels = map(tf.constant, arrays)
    count = len(arrays[0]) // size

    def step(number: tf.Tensor) -> tuple[tf.Tensor]:
        first = number % count * size
        update(number + 1, inputs[first : first + size], labels[first : first + size])
        return (number + 1,)

    @tf.function(autograph=False)
    def loop() -> tf.Tensor:
        return tf.while_loop(lambda number: number < steps, step, (tf.constant(0, tf.int64),))[0]

    turns.take(lambda: loop().numpy(), steps)
