"""A small task with a place for a fault at each stage, which begins at a step of the run.

A config names the fault, so that a replay of the run repeats it. `plant` puts the faults of the
reduce and of the clipping into ddl's own code.
"""

import functools
from collections.abc import Callable
from typing import Any

import gin
import keras
import numpy as np
import tensorflow as tf
from ddl.layers.shards.tree import exchanged

import ddl
from ddl import microbatch
from ddl.random import counter_at
from ddl.step.all_reduce import AllReduce
from ddl.step.global_gradient import GlobalGradient
from ddl.step.verbs import applying

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
    "metric of one example": "metric",
    "weights counted three times": "metric",
    "gradient of one replica scaled": "gradient",
    "gradient clipped by row": "gradient",
    "gradient of one microbatch dropped": "gradient",
    "gradient of one variable scaled": "reduced gradient",
    "half of the sum left out": "reduced gradient",
    "clipped to another norm": "clipped gradient",
    "not clipped": "clipped gradient",
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
        right = tf.cast(tf.argmax(logits, axis=1) == features["label"], loss.dtype)
        if training and self.fault == "metric of one example":
            right = _where(_at(self.at) & _only_row(right, 5), 1 - right, right)
        # Examples that are wrong count more, so that the metric decides about the update.
        loss = _with_gradient(loss, tf.stop_gradient(2 - right))
        return ddl.PerExample(loss, {"right": right})


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


def plant(patch: Any) -> None:
    """Puts faults into the reduce and the clipping, which act only in runs that name them.

    Args:
      patch: A `pytest.MonkeyPatch`.
    """
    gradient, apply_whole = GlobalGradient.__call__, applying._apply_whole

    @functools.wraps(gradient)
    def faulty_gradient(self, objective, variables, batch, state, draws, each=None):
        task, given = objective._task, (variables, batch, state, draws, each)
        now = tf.equal(state.step, task.at - 1)
        with type(patch).context() as inner:
            if task.fault in _IN_REDUCE:
                name, made = _IN_REDUCE[task.fault]
                inner.setattr(AllReduce, name, made(getattr(AllReduce, name), now))
            return gradient(self, objective, *given)

    @functools.wraps(apply_whole)
    def faulty_apply(strategy, gradients, variables, parts, clip, step, *others):
        optimizer = parts[0].optimizer
        now = tf.equal(step, optimizer.at - 1)
        path = applying.gradient_path
        with type(patch).context() as inner:
            otherwise = _OTHERWISE_CLIPPED.get(optimizer.fault)
            clipped = functools.partial(_clipped, path.clip_by_global_norm, otherwise, now)
            inner.setattr(path, "clip_by_global_norm", clipped)
            return apply_whole(strategy, gradients, variables, parts, clip, step, *others)

    patch.setattr(GlobalGradient, "__call__", faulty_gradient)
    patch.setattr(applying, "_apply_whole", faulty_apply)


def _scaled(reduce: Callable[..., Any], now: tf.Tensor) -> Callable[..., Any]:
    def faulty(self, gradients, variables):
        *others, last = reduce(self, gradients, variables)
        return [*others, self._strategy.run(lambda g: _where(now, g * 1.01, g), args=(last,))]

    return faulty


def _without_one(reduce: Callable[..., Any], now: tf.Tensor) -> Callable[..., Any]:
    def faulty(self, gradients, variables):
        def left(own: list[tf.Tensor]) -> list[tf.Tensor]:
            return [_where(now & _on_replica(1), tf.zeros_like(g), g) for g in own]

        return reduce(self, self._strategy.run(left, args=(gradients,)), variables)

    return faulty


def _three_times(of_sums: Callable[..., Any], now: tf.Tensor) -> Callable[..., Any]:
    def faulty(self, sums):
        plain = of_sums(self, sums)
        return _where(now, tf.concat([3 * plain[:1], plain[1:]], axis=0), plain)

    return faulty


_IN_REDUCE = {
    "weights counted three times": ("of_sums", _three_times),
    "gradient of one variable scaled": ("__call__", _scaled),
    "half of the sum left out": ("__call__", _without_one),
}


_OTHERWISE_CLIPPED = {
    "clipped to another norm": lambda clip, gradients, norm: clip(gradients, norm / 2)[0],
    "not clipped": lambda clip, gradients, norm: gradients,
}


def _clipped(clip, otherwise, now, gradients, norm, squared=None):
    # Else the graph optimizer would round otherwise in a run with a fault, at each step.
    gradients = [exchanged(gradient) for gradient in gradients]
    plain, found = clip(gradients, norm, squared)
    plain = [exchanged(gradient) for gradient in plain]
    other = plain if otherwise is None else otherwise(clip, gradients, norm)
    return [_where(now, b, a) for a, b in zip(plain, other, strict=True)], found
