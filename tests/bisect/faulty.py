"""A small task with a place for a fault at each stage, which begins at a step of the run.

A config names the fault, so that a replay of the run repeats it.
"""

from typing import Any

import gin
import keras
import numpy as np
import tensorflow as tf

import ddl
from ddl import microbatch
from ddl.random import counter_at

STEPS, BATCH, FEATURES = 24, 32, 6
ROWS = STEPS * BATCH  # of one epoch, so that each example is read at one step

# The faults, with the stage that a search must name.
FAULTS = {
    "example swapped": "data",
    "feature shifted": "data",
    "label changed": "data",
    "weight of a row": "data",
    "draw of another stream": "draw",
    "mask off by one row": "draw",
    "mask of one replica": "draw",
    "activation off by rounding": "activation",
    "activation of one row": "activation",
    "another op order": "activation",
    "activation of one replica": "activation",
    "mask rolled after the draw": "activation",
    "loss of one example": "loss",
    "label smoothing": "loss",
    "gradient of one replica scaled": "gradient",
    "gradient clipped by row": "gradient",
    "gradient of one microbatch dropped": "gradient",
    "slot changed": "slot",
    "slot of one variable": "slot",
    "update scaled": "update",
    "weight decay": "update",
}


def _at(step: int) -> tf.Tensor:
    """Whether this is update `step`, counted from 1; as a number of the present pass."""
    current = microbatch.current()
    assert current is not None
    if current.step is None:  # a check before training
        return tf.constant(False)
    return tf.equal(tf.cast(current.step, tf.int64), step - 1)


def _where(fault: Any, changed: tf.Tensor, plain: tf.Tensor) -> tf.Tensor:
    return tf.where(fault, changed, plain)


def _on_replica(number: int) -> tf.Tensor:
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    return tf.equal(tf.cast(replica, tf.int64), number)


def _only_row(x: tf.Tensor, row: int) -> tf.Tensor:
    """A mask [rows, 1, …] of one row of the microbatch."""
    shape = [-1] + [1] * (len(x.shape) - 1)
    return tf.reshape(tf.equal(tf.range(tf.shape(x)[0]), row), shape)


@tf.custom_gradient
def _with_gradient(x: tf.Tensor, factor: tf.Tensor):
    return tf.identity(x), lambda upstream: (upstream * factor, None)


class Noisy(keras.layers.Layer):
    """Dropout by position, whose mask may have a fault."""

    draws_by_position = True

    def __init__(self, fault: str, at: int):
        super().__init__(name="noisy")
        self.fault, self.at = fault, at

    def call(self, x, training=False):
        if not training or microbatch.current() is None:
            return x
        current = microbatch.current()
        counter = current.counter
        if self.fault in ("mask off by one row", "mask of one replica"):
            now = _at(self.at)
            if self.fault == "mask of one replica":
                now &= _on_replica(1)
            next_row = -(-x.shape[1] // 4)  # four numbers a count
            current.counter = _where(now, counter_at(counter, next_row), counter)
        mask = tf.cast(ddl.random.bernoulli(self, x.shape, 0.8), x.dtype)
        current.counter = counter
        if self.fault == "draw of another stream":
            mask = _where(
                _at(self.at), tf.cast(ddl.random.bernoulli(self, x.shape, 0.8), x.dtype), mask
            )
        if self.fault == "mask rolled after the draw":
            mask = _where(_at(self.at), tf.roll(mask, 1, 0), mask)
        return x * mask


class Middle(keras.layers.Layer):
    """A layer without variables, between two others."""

    def __init__(self, fault: str, at: int):
        super().__init__(name="middle")
        self.fault, self.at = fault, at

    def call(self, x, training=False):
        reverse = tf.reverse(x, [1])
        square = reverse * reverse
        other, x = x + (reverse + square), (x + reverse) + square
        if not training or microbatch.current() is None:
            return x
        now = _at(self.at)
        if self.fault == "activation off by rounding":
            return _where(now, x * (1 + 2**-22), x)
        if self.fault == "activation of one row":
            return _where(now & _only_row(x, 3), x + 0.5, x)
        if self.fault == "activation of one replica":
            return _where(now & _on_replica(1), x * 1.01, x)
        if self.fault == "another op order":
            return _where(now, other, x)
        if self.fault == "gradient of one replica scaled":
            return _with_gradient(x, _where(now & _on_replica(1), 2.0, 1.0))
        if self.fault == "gradient clipped by row":
            return _with_gradient(x, _where(now & _only_row(x, 0), tf.zeros_like(x), 1.0))
        if self.fault == "gradient of one microbatch dropped":
            first = microbatch.current().first_row
            return _with_gradient(x, _where(now & tf.equal(first, 16), 0.0, 1.0))
        return x


@gin.register
class Faulty:
    """Classifies points into three classes, with a fault from a step on."""

    def __init__(self, fault: str = "", at: int = 1):
        self.fault, self.at = fault, at
        layers = keras.layers
        self.model = keras.Sequential(
            [
                keras.Input((FEATURES,)),
                layers.Dense(8, "tanh", name="first"),
                Noisy(fault, at),
                Middle(fault, at),
                layers.Dense(3, name="last"),
            ]
        )

    def per_example(self, features, training):
        logits = self.model(features["x"], training=training)
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(features["label"], logits)
        if training and self.fault == "loss of one example":
            loss = _where(_at(self.at) & _only_row(loss, 5), loss * 2, loss)
        if training and self.fault == "label smoothing":
            loss = _where(_at(self.at), loss * 0.9 + 0.1, loss)
        return ddl.PerExample(loss)


@gin.register
class Points(ddl.data.IndexedSource):
    """Points of three classes; a fault changes some examples."""

    def __init__(self, fault: str = "", examples: Any = ()):
        random = np.random.default_rng(0)
        self._x = random.normal(size=(ROWS, FEATURES)).astype(np.float32)
        self._label = random.integers(0, 3, ROWS)
        self._weight = np.ones(ROWS, np.float32)
        for example in examples:
            if fault == "example swapped":
                self._x[example] = self._x[(example + 1) % ROWS]
                self._label[example] = self._label[(example + 1) % ROWS]
            if fault == "feature shifted":
                self._x[example] += 1
            if fault == "label changed":
                self._label[example] = (self._label[example] + 1) % 3
            if fault == "weight of a row":
                self._weight[example] = 0.5

    def __len__(self):
        return ROWS

    @property
    def element_spec(self):
        return {
            "x": tf.TensorSpec([FEATURES], tf.float32),
            "label": tf.TensorSpec([], tf.int64),
            "weight": tf.TensorSpec([], tf.float32),
        }

    def gather(self, indices):
        arrays = {"x": self._x, "label": self._label, "weight": self._weight}
        return {name: tf.gather(tf.constant(array), indices) for name, array in arrays.items()}


@gin.register
class Momentum(keras.optimizers.SGD):
    """SGD whose slots or weights a fault changes, at a step."""

    def __init__(self, fault: str = "", at: int = 1):
        super().__init__(0.05, momentum=0.9)
        self.fault, self.at = fault, at

    def update_step(self, gradient, variable, learning_rate):
        now = tf.equal(tf.cast(self.iterations.value, tf.int64), self.at - 1)
        slot = self.momentums[self._get_variable_index(variable)]
        if self.fault == "slot changed" or (
            self.fault == "slot of one variable" and "last/bias" in variable.name
        ):
            slot.assign(_where(now, slot.value * 0.5 + 0.01, slot.value))
        super().update_step(gradient, variable, learning_rate)
        new = tf.convert_to_tensor(variable)
        if self.fault == "update scaled":
            variable.assign(_where(now, new * 1.001, new))
        if self.fault == "weight decay":
            variable.assign(_where(now, new - 0.01, new))
