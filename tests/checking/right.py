"""Steps and tasks without a mistake, in which a check must find nothing."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import ddl
from tests.checking.tiny import Tiny, classifier, cross_entropy, data, layers, sgd, trainer
from tests.step.verbs import own_steps
from tests.tasks.across_examples import InfoNce

NAMES: list[str] = []

_Make = Callable[..., ddl.Trainer]


def right(make: _Make) -> _Make:
    """Registers a factory."""
    NAMES.append(make.__name__)
    return make


def own_step(name: str, **where: Any) -> ddl.Trainer:
    task, optimizer = own_steps.TASKS[name]
    return trainer(task(), optimizer(), **where)


# ------------------------------------------------------------ steps


@right
def gan(**where: Any) -> ddl.Trainer:
    return own_step("Gan", **where)


@right
def sam_with_synchronized_normalization(**where: Any) -> ddl.Trainer:
    return own_step("Sam", **where)


@right
def byol(**where: Any) -> ddl.Trainer:
    return own_step("Byol", **where)


@right
def gradient_surgery(**where: Any) -> ddl.Trainer:
    return own_step("Surgery", **where)


@right
def repeat_when_average_and_a_counter(**where: Any) -> ddl.Trainer:
    return own_step("Critic", **where)


@right
def clipping_by_group(**where: Any) -> ddl.Trainer:
    class Clipping(Tiny):
        def step(self, update, batch):
            gradients = update.gradients(self.per_example, batch)
            first, last = (gradients.of(layer) for layer in self.model.layers)
            first *= tf.minimum(1.0, 0.1 / tf.cast(first.norm(), tf.float32))
            update.apply(first.and_of(last.map(lambda g, v: tf.clip_by_norm(g, 0.1))))

    return trainer(Clipping(), **where)


@right
def an_area_of_keras(**where: Any) -> ddl.Trainer:
    class Area(Tiny):
        auc = ddl.metrics.KerasMetric("AUC")

        def per_example(self, features, training):
            output = super().per_example(features, training)
            chance = 1 - tf.exp(-output.loss)
            return output._replace(metrics={"auc": self.auc(features["label"] > 0, chance)})

    return trainer(Area(), **where)


@right
def a_gradient_penalty(**where: Any) -> ddl.Trainer:
    class Penalized(Tiny):
        def per_example(self, features, training):
            x = tf.convert_to_tensor(features["x"])
            with tf.GradientTape() as tape:
                tape.watch(x)
                logits = self.model(x, training=training)
                top = tf.reduce_max(logits, axis=1)
            slopes = tape.gradient(top, x)
            penalty = tf.square(tf.norm(slopes, axis=1) - 1)
            return ddl.PerExample(cross_entropy(features, logits) + penalty)

    return trainer(Penalized(), **where)


@right
def two_optimizers(**where: Any) -> ddl.Trainer:
    class TwoRates(Tiny):
        def step(self, update, batch):
            gradients = update.gradients(self.per_example, batch)
            update.apply(gradients.of(self.model.layers[0]), "body")
            update.apply(gradients.of(self.model.layers[1]), "head")

    optimizers = {"body": sgd(), "head": keras.optimizers.Adam(1e-2)}
    return trainer(TwoRates(), optimizers, **where)


@right
def a_counter_in_the_step(**where: Any) -> ddl.Trainer:
    class Counting(Tiny):
        def __init__(self):
            super().__init__()
            self.updates = tf.Variable(0, trainable=False, dtype=tf.int64)

        def step(self, update, batch):
            update.minimize(self.per_example, batch)
            self.updates.assign_add(1)

    return trainer(Counting(), **where)


@right
def every_second_update(**where: Any) -> ddl.Trainer:
    class Sometimes(Tiny):
        def step(self, update, batch):
            gradients = update.gradients(self.per_example, batch)
            update.apply(gradients.of(self.model.layers[0]))
            last = gradients.of(self.model.layers[1])
            update.when(update.step % 2 == 0, lambda: update.apply(last))

    return trainer(Sometimes(), **where)


@right
def several_steps_on_a_batch(**where: Any) -> ddl.Trainer:
    class Repeated(Tiny):
        def step(self, update, batch):
            for _ in range(3):
                update.minimize(self.per_example, batch)

    return trainer(Repeated(ddl.layers.Dropout(0.3)), **where)


@right
def a_slow_copy(**where: Any) -> ddl.Trainer:
    class Lookahead(Tiny):
        def __init__(self):
            super().__init__()
            self.slow = classifier()
            self.slow.trainable = False

        def step(self, update, batch):
            update.minimize(self.per_example, batch)
            update.average(self.slow, of=self.model, decay=0.9)

    return trainer(Lookahead(), **where)


# ------------------------------------------------------------ random numbers, normalization


@right
def dropout_by_position(**where: Any) -> ddl.Trainer:
    return trainer(Tiny(ddl.layers.Dropout(0.3)), **where)


@right
def noise_layers_by_position(**where: Any) -> ddl.Trainer:
    noise = [ddl.layers.GaussianNoise(0.1), ddl.layers.AlphaDropout(0.2)]
    return trainer(Tiny(*noise), **where)


@right
def a_variational_autoencoder(**where: Any) -> ddl.Trainer:
    class Autoencoder:
        def __init__(self):
            self.encoder = keras.Sequential([keras.Input((6,)), layers.Dense(8)])
            self.decoder = keras.Sequential([keras.Input((4,)), layers.Dense(6)])

        def per_example(self, features, training):
            mean, log = tf.split(self.encoder(features["x"], training=training), 2, axis=1)
            noise = tf.cast(ddl.random.normal(self, mean.shape), mean.dtype)
            restored = self.decoder(mean + noise * tf.exp(0.5 * log), training=training)
            far = tf.reduce_sum(tf.square(restored - features["x"]), axis=1)
            divergence = 0.5 * tf.reduce_sum(tf.exp(log) + mean**2 - 1 - log, axis=1)
            return ddl.PerExample(far + divergence, {"divergence": divergence})

        def step(self, update, batch):
            trained = [*self.encoder.trainable_variables, *self.decoder.trainable_variables]
            update.minimize(self.per_example, batch, trained)

    return trainer(Autoencoder(), keras.optimizers.Adam(1e-3), **where)


@right
def synchronized_normalization(**where: Any) -> ddl.Trainer:
    return trainer(Tiny(layers.BatchNormalization(synchronized=True)), **where)


@right
def normalization_of_each_example(**where: Any) -> ddl.Trainer:
    return trainer(Tiny(layers.LayerNormalization()), **where)


# ------------------------------------------------------------ weights, models, optimizers


class Tagging:
    """A class for each token, a mask, and sparse gradients of the embedding."""

    def __init__(self):
        words = keras.Input((5,), dtype="int64", name="words")
        self.model = keras.Model(words, layers.Dense(3)(layers.Embedding(7, 4)(words)))

    def per_example(self, features, training):
        logits = self.model(features["words"], training=training)
        label = tf.repeat(features["label"][:, tf.newaxis], 5, axis=1)
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(label, logits)
        return ddl.PerExample(loss, weight=tf.sequence_mask(features["length"], 5, loss.dtype))


@right
def masks_and_sparse_embeddings(**where: Any) -> ddl.Trainer:
    return trainer(Tagging(), keras.optimizers.Adam(1e-2), clip_norm=0.1, **where)


@right
def weights_in_the_data(**where: Any) -> ddl.Trainer:
    weight = np.random.default_rng(1).integers(0, 3, 60).astype("float32")
    return trainer(Tiny(), train_data=data() | {"weight": weight}, **where)


@right
def metrics(**where: Any) -> ddl.Trainer:
    class Measured(Tiny):
        def per_example(self, features, training):
            logits = self.model(features["x"], training=training)
            found = tf.equal(tf.argmax(logits, axis=1), features["label"])
            return ddl.PerExample(
                cross_entropy(features, logits), {"accuracy": tf.cast(found, tf.float32)}
            )

    return trainer(Measured(), **where)


@right
def an_average_of_the_weights(**where: Any) -> ddl.Trainer:
    return trainer(Tiny(), weight_average=ddl.ExponentialMovingAverage(0.9), **where)


@right
def clipping_and_weight_decay(**where: Any) -> ddl.Trainer:
    return trainer(Tiny(), keras.optimizers.AdamW(1e-2), clip_norm=0.01, **where)


@right
def penalties_and_lamb(**where: Any) -> ddl.Trainer:
    task = Tiny(kernel_regularizer=keras.regularizers.L2(0.01))
    return trainer(task, ddl.optimizers.LAMB(1e-2, weight_decay=1e-2), **where)


@right
def a_frozen_teacher(**where: Any) -> ddl.Trainer:
    class Distilled(Tiny):
        def __init__(self):
            super().__init__()
            self.teacher = classifier(layers.Dropout(0.5))
            self.teacher.trainable = False

        def per_example(self, features, training):
            logits = self.model(features["x"], training=training)
            wanted = self.teacher(features["x"], training=False)
            return ddl.PerExample(tf.reduce_sum(tf.square(logits - wanted), axis=1))

    return trainer(Distilled(), **where)


@right
def a_recurrent_model(**where: Any) -> ddl.Trainer:
    class Recurrent(Tiny):
        def __init__(self):
            hidden = [layers.Reshape((3, 2)), layers.GRU(4), layers.Dense(3)]
            self.model = keras.Sequential([keras.Input((6,)), *hidden])

    return trainer(Recurrent(), ddl.optimizers.FusedAdam(1e-2), clip_norm=0.01, **where)


def gathered_negatives(**where: Any) -> ddl.Trainer:
    """Refused with several microbatches, which is no mistake."""
    return trainer(InfoNce(), **where)
