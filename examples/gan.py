"""A generative adversarial network (Goodfellow et al. 2014) on the digits."""

from typing import Any

import gin
import keras
import tensorflow as tf

import ddl

LATENT = 16
cross_entropy = tf.nn.sigmoid_cross_entropy_with_logits


@gin.register
class Gan:
    """Two models, two losses and two optimizers."""

    def __init__(self) -> None:
        dense, layers = keras.layers.Dense, keras.layers
        self.generator = keras.Sequential(
            [
                keras.Input((LATENT,)),
                dense(128, "relu"),
                dense(128, "relu"),
                dense(64, "sigmoid"),
                layers.Reshape((8, 8, 1)),
            ],
            name="generator",
        )
        self.discriminator = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.Flatten(),
                dense(128, layers.LeakyReLU(0.2)),
                keras.layers.Dropout(0.3),
                dense(1, dtype=keras.config.floatx()),  # in float32, also in mixed precision
            ],
            name="discriminator",
        )

    def fakes(self, rows: int, training: bool) -> tf.Tensor:
        """Generates images."""
        return self.generator(keras.random.normal((rows, LATENT)), training=training)

    def real_or_fake(self, features: dict[str, Any], training: bool) -> ddl.PerExample:
        """The discriminator's loss, and how often it scores a real image above a fake one."""
        images = tf.cast(features["image"], keras.config.floatx()) / 16
        real = self.discriminator(images, training=training)[:, 0]
        fake = self.discriminator(self.fakes(real.shape[0], training), training=training)[:, 0]
        loss = cross_entropy(tf.ones_like(real), real) + cross_entropy(tf.zeros_like(fake), fake)
        return ddl.PerExample(loss, {"accuracy": tf.cast(real > fake, real.dtype)})

    def fools(self, features: dict[str, Any], training: bool) -> ddl.PerExample:
        """The generator's loss."""
        fakes = self.fakes(features["image"].shape[0], training)
        fake = self.discriminator(fakes, training=training)[:, 0]
        return ddl.PerExample(cross_entropy(tf.ones_like(fake), fake))

    def step(self, update: ddl.Update, batch: ddl.StepBatch) -> None:
        """Updates the discriminator, then the generator."""
        update.minimize(self.real_or_fake, batch, self.discriminator, optimizer="discriminator")
        update.minimize(self.fools, batch, self.generator, optimizer="generator")
