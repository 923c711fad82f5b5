"""Mistakes that people make in loops of their own, each in a tiny task.

They follow threads about Keras, TensorFlow and Lightning: losses that are averaged on a replica,
clips before the all-reduce, masks and noise that repeat on each replica, counters that count twice.
`EXPECTED` says at which stages each may be found, and what its cause is.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import ddl
from tests.checking.tiny import BATCH, Tiny, cross_entropy, layers, sgd, trainer

EXPECTED: dict[str, tuple[str, set[str]]] = {}

_Make = Callable[..., ddl.Trainer]


def planted(stage: str, *causes: str) -> Callable[[_Make], _Make]:
    """Registers a factory, with the stage and the possible causes of its mistake."""

    def register(make: _Make) -> _Make:
        EXPECTED[make.__name__] = stage, set(causes)
        return make

    return register


# ------------------------------------------------------------ losses


@planted("start", "refused")
def a_mean_over_the_replica(**where: Any) -> ddl.Trainer:
    class Mean(Tiny):
        def changed(self, loss, features):
            return tf.reduce_mean(loss) * tf.ones_like(loss)

    return trainer(Mean(), **where)


@planted("loss", "mean over the replica")
def a_division_by_the_rows(**where: Any) -> ddl.Trainer:
    class Divided(Tiny):
        def changed(self, loss, features):
            return loss / tf.cast(tf.shape(features["x"])[0], loss.dtype)

    return trainer(Divided(), **where)


@planted("loss", "second all-reduce")
def a_second_all_reduce(**where: Any) -> ddl.Trainer:
    class Reduced(Tiny):
        def changed(self, loss, features):
            context = tf.distribute.get_replica_context()
            return context.all_reduce(tf.distribute.ReduceOp.SUM, loss)

    return trainer(Reduced(), **where)


@planted("loss", "depends on the replica")
def a_weight_by_the_replica(**where: Any) -> ddl.Trainer:
    class Weighed(Tiny):
        def changed(self, loss, features):
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            return loss * (1 + tf.cast(replica, loss.dtype))

    return trainer(Weighed(), **where)


# ------------------------------------------------------------ gradients


@planted("gradients", "clip before the reduce")
def a_clip_in_a_custom_gradient(**where: Any) -> ddl.Trainer:
    @tf.custom_gradient
    def clipped(x):
        return tf.identity(x), lambda upstream: tf.clip_by_norm(upstream, 0.01)

    class Clipping(Tiny):
        def per_example(self, features, training):
            logits = clipped(self.model(features["x"], training=training))
            return ddl.PerExample(cross_entropy(features, logits))

    return trainer(Clipping(), **where)


@planted("gradients", "padding counted", "layer losses")
def an_activity_regularizer(**where: Any) -> ddl.Trainer:
    penalty = keras.regularizers.L2(0.1)
    return trainer(Tiny(activity_regularizer=penalty), **where)


# ------------------------------------------------------------ random numbers, normalization


@planted("layer", "draw by replica")
def dropout_of_keras(**where: Any) -> ddl.Trainer:
    return trainer(Tiny(layers.Dropout(0.3)), **where)


@planted("layer", "moments of a replica")
def moments_per_replica(**where: Any) -> ddl.Trainer:
    return trainer(Tiny(layers.BatchNormalization()), batch_moments="per_replica", **where)


# ------------------------------------------------------------ state


class RunningMean(layers.Layer):
    """Moves a mean by the rows of its replica."""

    def build(self, shape):
        self.seen = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.seen.assign(0.9 * self.seen + 0.1 * tf.reduce_mean(x, 0))
        return x


@planted("statistics", "state of a replica")
def a_running_mean_in_a_layer(**where: Any) -> ddl.Trainer:
    return trainer(Tiny(RunningMean()), **where)


# ------------------------------------------------------------ step, optimizer, data


@planted("applied gradients", "not in the checkpoint")
def noise_of_a_generator_in_python(**where: Any) -> ddl.Trainer:
    random = np.random.default_rng(0)

    class Noisy(Tiny):
        def step(self, update, batch):
            noise = tf.numpy_function(lambda: random.normal(size=()), [], tf.float64)
            factor = 1.0 + 0.1 * tf.ensure_shape(noise, [])
            update.apply(update.gradients(self.per_example, batch) * factor)

    return trainer(Noisy(), **where)


@planted("updated weights", "division by the number of replicas")
def a_rate_by_the_replicas(**where: Any) -> ddl.Trainer:
    class Scaling(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            replicas = tf.distribute.get_strategy().num_replicas_in_sync
            super().update_step(gradient, variable, learning_rate * replicas)

    return trainer(Tiny(), Scaling(0.05), **where)


@planted("updated weights", "optimizer")
def an_optimizer_with_noise(**where: Any) -> ddl.Trainer:
    class Langevin(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            gradient += tf.random.normal(gradient.shape, stddev=0.1, dtype=gradient.dtype)
            super().update_step(gradient, variable, learning_rate)

    return trainer(Tiny(), Langevin(0.05), **where)


@planted("rows", "data")
def a_batch_for_each_replica(**where: Any) -> ddl.Trainer:
    replicas = where["strategy"].num_replicas_in_sync
    return trainer(Tiny(), sgd(), global_batch_size=BATCH * replicas, **where)
