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
from tests.checking.tiny import BATCH, Tiny, cross_entropy, data, layers, sgd, trainer

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


@planted("start", "refused")
def negatives_of_the_replica(**where: Any) -> ddl.Trainer:
    class Local(Tiny):
        def changed(self, loss, features):
            z = tf.math.l2_normalize(self.model(features["x"]), axis=-1)
            return cross_entropy({"label": tf.range(z.shape[0])}, z @ tf.transpose(z)) + loss

    return trainer(Local(), **where)


@planted("loss", "mean over the replica")
def a_division_by_the_rows(**where: Any) -> ddl.Trainer:
    class Divided(Tiny):
        def changed(self, loss, features):
            return loss / tf.cast(tf.shape(features["x"])[0], loss.dtype)

    return trainer(Divided(), **where)


@planted("loss", "division by the number of replicas")
def a_division_by_the_replicas(**where: Any) -> ddl.Trainer:
    class Divided(Tiny):
        def changed(self, loss, features):
            return loss / tf.distribute.get_strategy().num_replicas_in_sync

    return trainer(Divided(), **where)


@planted("loss", "second all-reduce")
def a_second_all_reduce(**where: Any) -> ddl.Trainer:
    class Reduced(Tiny):
        def changed(self, loss, features):
            context = tf.distribute.get_replica_context()
            return context.all_reduce(tf.distribute.ReduceOp.SUM, loss)

    return trainer(Reduced(), **where)


@planted("start", "refused")
def negatives_of_the_batch(**where: Any) -> ddl.Trainer:
    class Contrastive(Tiny):
        def per_example(self, features, training):
            z = tf.math.l2_normalize(self.model(features["x"], training=training), axis=1)
            rows = tf.range(tf.shape(z)[0])
            similar = tf.matmul(z, z, transpose_b=True) / 0.1
            return ddl.PerExample(tf.nn.sparse_softmax_cross_entropy_with_logits(rows, similar))

    return trainer(Contrastive(), **where)


@planted("loss", "depends on the replica")
def a_weight_by_the_replica(**where: Any) -> ddl.Trainer:
    class Weighed(Tiny):
        def changed(self, loss, features):
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            return loss * (1 + tf.cast(replica, loss.dtype))

    return trainer(Weighed(), **where)


@planted("layer", "division by the number of replicas", "other computation")
def another_branch_on_several_replicas(**where: Any) -> ddl.Trainer:
    class Branching(Tiny):
        def __init__(self):
            super().__init__()
            self.squash = layers.Activation("tanh")

        def inputs(self, x):
            return self.squash(x) if tf.distribute.get_strategy().num_replicas_in_sync > 2 else x

    return trainer(Branching(), **where)


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


@planted("gradients", "clip before the reduce")
def signs_before_the_reduce(**where: Any) -> ddl.Trainer:
    @tf.custom_gradient
    def signed(kernel):
        return tf.identity(kernel), lambda upstream: tf.sign(upstream) * 1e-3

    class Signs(Tiny):
        def __init__(self):
            super().__init__()
            self.scale = self.model.layers[0].bias

        def changed(self, loss, features):
            return loss * tf.exp(tf.reduce_sum(signed(tf.convert_to_tensor(self.scale.value))))

    return trainer(Signs(), **where)


@planted("gradients", "padding counted", "layer losses")
def an_activity_regularizer(**where: Any) -> ddl.Trainer:
    penalty = keras.regularizers.L2(0.1)
    return trainer(Tiny(activity_regularizer=penalty), **where)


# ------------------------------------------------------------ random numbers, normalization


@planted("layer", "draw by replica")
def dropout_of_keras(**where: Any) -> ddl.Trainer:
    return trainer(Tiny(layers.Dropout(0.3)), **where)


@planted("layer", "draw by replica")
def noise_of_tensorflow(**where: Any) -> ddl.Trainer:
    class Noisy(Tiny):
        def inputs(self, x):
            return x + tf.random.normal(tf.shape(x), dtype=x.dtype)

    return trainer(Noisy(), **where)


@planted("layer", "draw by replica")
def noise_with_a_fixed_seed(**where: Any) -> ddl.Trainer:
    class Noisy(Tiny):
        def inputs(self, x):
            return x + tf.random.stateless_normal(tf.shape(x), seed=[1, 2], dtype=x.dtype)

    return trainer(Noisy(), **where)


@planted("layer", "draw by replica")
def noise_of_keras(**where: Any) -> ddl.Trainer:
    class Noisy(Tiny):
        def inputs(self, x):
            return x + keras.random.normal(x.shape, dtype=x.dtype)

    return trainer(Noisy(), **where)


@planted("start", "refused")
def noise_of_numpy(**where: Any) -> ddl.Trainer:
    class Noisy(Tiny):
        def inputs(self, x):
            return x + np.random.normal(size=[1, 6])

    return trainer(Noisy(), **where)


@planted("layer", "moments not synchronized")
def plain_batch_normalization(**where: Any) -> ddl.Trainer:
    return trainer(Tiny(layers.BatchNormalization()), **where)


# ------------------------------------------------------------ state


@planted("own variables", "state of a replica")
def a_counter_in_a_loss(**where: Any) -> ddl.Trainer:
    class Counting(Tiny):
        def __init__(self):
            super().__init__()
            self.seen = tf.Variable(
                0.0, trainable=False, aggregation=tf.VariableAggregation.SUM, dtype=tf.float64
            )

        def changed(self, loss, features):
            self.seen.assign_add(tf.ones([], tf.float64))
            return loss

    return trainer(Counting(), **where)


@planted("own variables", "state of a replica")
def an_average_in_a_loss(**where: Any) -> ddl.Trainer:
    class Averaging(Tiny):
        def __init__(self):
            super().__init__()
            self.usual = tf.Variable(0.0, trainable=False, dtype=tf.float64)

        def changed(self, loss, features):
            self.usual.assign_add(0.1 * (tf.reduce_mean(loss) - self.usual))
            return loss

    return trainer(Averaging(), **where)


class CountingLayer(layers.Layer):
    """Counts its calls: once for each replica and microbatch."""

    def build(self, shape):
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.calls.assign_add(1.0)
        return x


@planted("statistics", "state of a replica")
def a_counter_in_a_layer(**where: Any) -> ddl.Trainer:
    return trainer(Tiny(CountingLayer()), **where)


@planted("applied gradients", "not in the checkpoint")
def a_schedule_in_python(**where: Any) -> ddl.Trainer:
    class Scheduled(Tiny):
        def __init__(self):
            super().__init__()
            self.updates = 0

        def next_factor(self):
            self.updates += 1
            return np.float64(1 / self.updates)

        def step(self, update, batch):
            factor = tf.ensure_shape(tf.numpy_function(self.next_factor, [], tf.float64), [])
            update.apply(update.gradients(self.per_example, batch) * factor)

    return trainer(Scheduled(), **where)


# ------------------------------------------------------------ step, optimizer, data


@planted("applied gradients", "depends on the replica")
def a_clip_by_map_with_a_limit_of_the_replica(**where: Any) -> ddl.Trainer:
    class Clipping(Tiny):
        def clipped(self, gradient, variable):
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            limit = 0.01 * tf.cast(1 + replica, gradient.dtype)
            return gradient * tf.minimum(limit / tf.norm(gradient), 1.0)

        def step(self, update, batch):
            update.apply(update.gradients(self.per_example, batch).map(self.clipped))

    return trainer(Clipping(), **where)


@planted("own variables", "division by the number of replicas")
def a_counter_of_the_replicas_in_a_step(**where: Any) -> ddl.Trainer:
    replicas = where["strategy"].num_replicas_in_sync

    class Counting(Tiny):
        def __init__(self):
            super().__init__()
            self.seen = tf.Variable(0.0, trainable=False, dtype=tf.float64)

        def step(self, update, batch):
            update.minimize(self.per_example, batch)
            self.seen.assign_add(BATCH * replicas)

    return trainer(Counting(), **where)


@planted("own variables", "state of a replica")
def a_moving_mean_that_a_map_assigns(**where: Any) -> ddl.Trainer:
    class Averaging(Tiny):
        def __init__(self):
            super().__init__()
            self.usual = tf.Variable(
                0.0, trainable=False, aggregation=tf.VariableAggregation.SUM, dtype=tf.float64
            )

        def noted(self, gradient, variable):
            self.usual.assign_add(0.1 * (tf.norm(gradient) - self.usual))
            return gradient

        def step(self, update, batch):
            update.apply(update.gradients(self.per_example, batch).map(self.noted))

    return trainer(Averaging(), **where)


@planted("applied gradients", "not in the checkpoint")
def noise_of_a_generator_in_python(**where: Any) -> ddl.Trainer:
    random = np.random.default_rng(0)

    class Noisy(Tiny):
        def step(self, update, batch):
            noise = tf.numpy_function(lambda: random.normal(size=()), [], tf.float64)
            factor = 1.0 + 0.1 * tf.ensure_shape(noise, [])
            update.apply(update.gradients(self.per_example, batch) * factor)

    return trainer(Noisy(), **where)


@planted("applied gradients", "division by the number of replicas")
def a_step_that_divides_by_the_replicas(**where: Any) -> ddl.Trainer:
    strategy = where["strategy"]

    class Dividing(Tiny):
        def step(self, update, batch):
            replicas = strategy.num_replicas_in_sync
            update.apply(update.gradients(self.per_example, batch) / float(replicas))

    return trainer(Dividing(), **where)


@planted("updated weights", "division by the number of replicas")
def a_rate_by_the_replicas(**where: Any) -> ddl.Trainer:
    class Scaling(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            replicas = tf.distribute.get_strategy().num_replicas_in_sync
            super().update_step(gradient, variable, learning_rate * replicas)

    return trainer(Tiny(), Scaling(0.05), **where)


@planted("start", "refused")
def an_optimizer_that_reduces(**where: Any) -> ddl.Trainer:
    class Reducing(keras.optimizers.SGD):
        def apply(self, grads, trainable_variables=None):
            context = tf.distribute.get_replica_context()
            grads = [context.all_reduce(tf.distribute.ReduceOp.SUM, g) for g in grads]
            super().apply(grads, trainable_variables)

    return trainer(Tiny(), Reducing(0.05), **where)


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


@planted("rows", "data")
def data_without_a_seed(**where: Any) -> ddl.Trainer:
    noise = np.random.default_rng().normal(size=(60, 6))
    return trainer(Tiny(), train_data=data() | {"x": data()["x"] + noise}, **where)
