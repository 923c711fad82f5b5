"""The tutorials' networks and Keras's `fit`, on any backend of Keras."""

import time
from typing import Any

import keras

from benchmarks.cases import Case
from benchmarks.harness import Window

LAYERS = keras.layers


def mlp(case: Case, dropout: Any) -> keras.Model:
    """Builds the network of the second tutorial."""
    hidden = LAYERS.Flatten(), LAYERS.Dense(128, "relu"), dropout(0.2), LAYERS.Dense(10)
    return keras.Sequential([keras.Input((28, 28, 1)), *hidden])


def cnn(case: Case, dropout: Any) -> keras.Model:
    """Builds the network of the third tutorial."""
    first, second = LAYERS.Conv2D(32, 3, activation="relu"), LAYERS.Conv2D(64, 3, activation="relu")
    hidden = LAYERS.Flatten(), LAYERS.Dense(128, "relu"), dropout(0.5), LAYERS.Dense(10)
    blocks = first, second, LAYERS.MaxPooling2D(), dropout(0.25)
    return keras.Sequential([keras.Input((28, 28, 1)), *blocks, *hidden])


class _LastEpoch(keras.callbacks.Callback):
    """Takes the time of the last epoch of a fit; the first one starts the iterator."""

    seconds = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._start = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seconds = time.perf_counter() - self._start


def fit(model: keras.Model, optimizer: Any, steps: int, data: Any, **compiling: Any) -> Window:
    """Returns a window of `fit` with so many steps."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], **compiling)
    timer = _LastEpoch()
    # With steps_per_epoch an epoch continues the iterator of the last one.
    length = {"epochs": 2, "steps_per_epoch": steps, "verbose": 0}

    def window() -> float:
        model.fit(**data, **length, callbacks=[timer])
        return timer.seconds / steps

    return window
