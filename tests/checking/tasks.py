"""Small tasks: right ones, and some with a mistake that people make in loops of their own."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import ddl

layers = keras.layers
EXPECTED: dict[str, tuple[str, str]] = {}
"""The kind of the value that differs first and the cause, by the name of a planted mistake."""


def planted(kind: str, cause: str) -> Any:
    """Registers a factory of a trainer with a mistake."""

    def register(make: Any) -> Any:
        EXPECTED[make.__name__] = kind, cause
        return make

    return register


def data(rows: int = 40) -> dict[str, np.ndarray]:
    """Returns 2.5 batches."""
    drawn = np.random.default_rng(0)
    return {"x": drawn.normal(size=(rows, 6)), "label": drawn.integers(0, 3, rows)}


def classifier(*hidden: Any, **options: Any) -> keras.Model:
    first = layers.Dense(8, "tanh", name="first", **options)
    return keras.Sequential([keras.Input((6,)), first, *hidden, layers.Dense(3, name="last")])


class Tiny:
    """Three classes; a mistake overrides one of its parts."""

    def __init__(self, *hidden: Any, **options: Any) -> None:
        self.model = classifier(*hidden, **options)

    def changed(self, loss: tf.Tensor) -> tf.Tensor:
        return loss

    def metrics(self, is_right: tf.Tensor) -> dict[str, tf.Tensor]:
        return {}

    def per_example(self, features: dict[str, Any], training: bool) -> ddl.PerExample:
        logits = self.model(features["x"], training=training)
        label = features["label"]
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(label, logits)
        is_right = tf.cast(tf.argmax(logits, 1) == tf.cast(label, tf.int64), loss.dtype)
        return ddl.PerExample(self.changed(loss), self.metrics(is_right))


def trained(strategy: Any, task: Any, optimizer: Any = None, **options: Any) -> ddl.Trainer:
    given = {"train_data": data(), "global_batch_size": 16, "strategy": strategy} | options
    return ddl.Trainer(task, optimizer or keras.optimizers.SGD(0.05, momentum=0.9), **given)


# ------------------------------------------------------------ right ones


def batches_of_six(strategy):
    return trained(strategy, Tiny(), eval_data=data(), global_batch_size=6)


def gan(strategy):
    class Gan:
        def __init__(self):
            self.generator = keras.Sequential([keras.Input((4,)), layers.Dense(6)])
            self.critic = classifier()

        def real_or_fake(self, features, training):
            noise = ddl.random.normal(self, (features["x"].shape[0], 4))
            real, fake = self.critic(features["x"]), self.critic(self.generator(noise))
            return ddl.PerExample(tf.nn.softplus(fake[:, 0]) + tf.nn.softplus(-real[:, 0]))

        def fools(self, features, training):
            noise = ddl.random.normal(self, (features["x"].shape[0], 4))
            return ddl.PerExample(tf.nn.softplus(-self.critic(self.generator(noise))[:, 0]))

        def step(self, update, batch):
            update.minimize(self.real_or_fake, batch, self.critic, optimizer="critic")
            update.minimize(self.fools, batch, self.generator, optimizer="generator")

    optimizers = {"critic": keras.optimizers.SGD(0.05), "generator": keras.optimizers.Adam(1e-2)}
    return trained(strategy, Gan(), optimizers)


# ------------------------------------------------------------ losses and metrics


def a_loss_across_examples(strategy):
    class Centred(Tiny):
        def changed(self, loss):
            return loss - 0.5 * tf.reduce_mean(loss)

    return trained(strategy, Centred())


@planted("train figure", "number of devices")
def a_factor_of_the_replicas(strategy):
    class Multiplied(Tiny):
        def changed(self, loss):
            return loss * tf.distribute.get_replica_context().num_replicas_in_sync

    return trained(strategy, Multiplied())


# ------------------------------------------------------------ gradients, state, step, optimizer


class Largest(layers.Layer):
    """Remembers the largest entry of the rows of a replica."""

    def build(self, shape):
        self.largest = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.largest.assign(tf.reduce_max(x))
        return x


@planted("error", "error")
def a_variable_of_each_device(strategy):
    return trained(strategy, Tiny(Largest()))


def _noisy(strategy, drawn):
    class Noisy(Tiny):
        def step(self, update, batch):
            noise = tf.numpy_function(lambda: drawn.normal(size=()), [], tf.float64)
            factor = 1.0 + 0.1 * tf.ensure_shape(noise, [])
            update.apply(update.gradients(self.per_example, batch) * factor)

    return trained(strategy, Noisy())


@planted("weight", "not in the checkpoint")
def noise_of_a_generator_in_python(strategy):
    return _noisy(strategy, np.random.default_rng(0))


@planted("weight", "random")
def noise_without_a_seed(strategy):
    return _noisy(strategy, np.random.default_rng())


@planted("weight", "gradient or optimizer")
def a_rate_by_the_replicas(strategy):
    class Scaling(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            replicas = tf.distribute.get_strategy().num_replicas_in_sync
            super().update_step(gradient, variable, learning_rate * replicas)

    return trained(strategy, Tiny(), Scaling(0.05))


@planted("train figure", "across examples")
def a_batch_for_each_replica(strategy):
    batch = 16 * strategy.num_replicas_in_sync
    return trained(strategy, Tiny(), train_data=data(96), global_batch_size=batch)


class Narrow(layers.Layer):
    """Computes in float32, whatever its dtype."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 8), initializer="glorot_uniform")

    def call(self, x):
        return tf.cast(tf.cast(x, "float32") @ tf.cast(self.kernel, "float32"), x.dtype)


@planted("weight", "rounding")
def a_part_in_float32(strategy):
    return trained(strategy, Tiny(Narrow()))
