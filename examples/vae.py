"""A variational autoencoder (Kingma and Welling 2014) on the digits.

The task needs no step of its own: one loss trains both networks at once.
"""

from typing import Any

import gin
import keras
import tensorflow as tf

import ddl

DOTS = 16  # a pixel counts the black ones of 16 dots: a binomial distribution


@gin.register
class Vae:
    """Encodes an image as a normal distribution, and decodes a draw from it."""

    def __init__(self, latent: int = 8, width: int = 256) -> None:
        dense, layers, floatx = keras.layers.Dense, keras.layers, keras.config.floatx()
        image = keras.Input((8, 8, 1), name="image")
        hidden = dense(width, "relu")(layers.Flatten()(image))
        mean = dense(latent, dtype=floatx, name="mean")(hidden)
        log_variance = dense(latent, dtype=floatx, name="log_variance")(hidden)
        self.encoder = keras.Model(image, [mean, log_variance], name="encoder")
        self.decoder = keras.Sequential(
            [
                keras.Input((latent,)),
                dense(width, "relu"),
                dense(64, dtype=floatx),
                layers.Reshape((8, 8, 1), dtype=floatx),
            ],
            name="decoder",
        )
        # ddl trains the variables of `model`: those of both.
        self.model = keras.Model(image, [self.decoder(mean), log_variance])
        pixels = [keras.Input((latent,)), self.decoder, layers.Activation("sigmoid")]
        self.exported_models = {"encoder": self.encoder, "decoder": keras.Sequential(pixels)}

    def per_example(self, features: dict[str, Any], training: bool) -> ddl.PerExample:
        """The negative evidence lower bound in nats, without the binomial coefficients."""
        image = tf.cast(features["image"], keras.config.floatx()) / DOTS
        mean, log_variance = self.encoder(image, training=training)
        noise = keras.random.normal(mean.shape)
        logits = self.decoder(mean + tf.exp(log_variance / 2) * noise, training=training)
        pixels = DOTS * tf.nn.sigmoid_cross_entropy_with_logits(image, logits)
        pixels = tf.reduce_sum(pixels, axis=[1, 2, 3])
        divergence = tf.exp(log_variance) + tf.square(mean) - 1 - log_variance
        divergence = tf.reduce_sum(divergence, axis=-1) / 2
        return ddl.PerExample(pixels + divergence, {"pixels": pixels, "divergence": divergence})
