"""Steps and tasks without a mistake, in which a check must find nothing."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

import ddl
from tests.checking.tiny import Tiny, classifier, layers, sgd, trainer

NAMES: list[str] = []

_Make = Callable[..., ddl.Trainer]


def right(make: _Make) -> _Make:
    """Registers a factory."""
    NAMES.append(make.__name__)
    return make


@right
def gan(**where: Any) -> ddl.Trainer:
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

    optimizers = {"critic": sgd(), "generator": keras.optimizers.Adam(1e-2)}
    return trainer(Gan(), optimizers, **where)


@right
def normalization(**where: Any) -> ddl.Trainer:
    return trainer(Tiny(layers.BatchNormalization()), **where)


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
