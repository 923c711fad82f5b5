"""A Wasserstein GAN with gradient penalty (Gulrajani et al. 2017) on the digits."""

from typing import Any

import gin
import keras
import tensorflow as tf

import ddl

LATENT = 16
PIXELS = [1, 2, 3]  # axes


@gin.register
class WganGp:
    """A critic, which is updated several times a step, and a generator."""

    def __init__(self, critic_updates: int = 5, penalty: float = 10.0) -> None:
        self.critic_updates, self.penalty = critic_updates, penalty
        dense, layers = keras.layers.Dense, keras.layers
        self.generator = keras.Sequential(
            [
                keras.Input((LATENT,)),
                *[dense(128, "relu"), dense(128, "relu"), dense(64, "sigmoid")],
                layers.Reshape((8, 8, 1)),
            ],
            name="generator",
        )
        self.critic = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.Flatten(),
                dense(128, layers.LeakyReLU(0.2)),
                dense(128, layers.LeakyReLU(0.2)),
                dense(1, use_bias=False, dtype=keras.config.floatx()),
            ],
            name="critic",
        )

    def score(self, images: tf.Tensor, training: bool) -> tf.Tensor:
        """The critic's score of each image."""
        return self.critic(images, training=training)[:, 0]

    def fakes(self, rows: int, training: bool) -> tf.Tensor:
        """Generates images."""
        fakes = self.generator(keras.random.normal((rows, LATENT)), training=training)
        return tf.cast(fakes, keras.config.floatx())

    def criticizes(self, features: dict[str, Any], training: bool) -> ddl.PerExample:
        """The critic's loss; the distance between real and fake images; the critic's slope."""
        real = tf.cast(features["image"], keras.config.floatx()) / 16
        fake = self.fakes(real.shape[0], training)
        share = keras.random.uniform((real.shape[0], 1, 1, 1))
        mixed = real + share * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(mixed)
            score = self.score(mixed, training)
        gradient = tf.convert_to_tensor(tape.gradient(score, mixed))  # each score has one image
        slope = tf.sqrt(tf.reduce_sum(tf.square(gradient), PIXELS) + 1e-12)
        distance = self.score(real, training) - self.score(fake, training)
        loss = self.penalty * tf.square(slope - 1) - distance
        return ddl.PerExample(loss, {"distance": distance, "slope": slope})

    def fools(self, features: dict[str, Any], training: bool) -> ddl.PerExample:
        """The generator's loss."""
        fakes = self.fakes(features["image"].shape[0], training)
        return ddl.PerExample(-self.score(fakes, training))

    def evaluate(self, features: dict[str, Any]) -> ddl.PerExample:
        """The critic's loss for images that it was not trained on."""
        return self.criticizes(features, training=False)

    def step(self, update: ddl.Update, batch: ddl.StepBatch) -> None:
        """Updates the critic with a further batch each time, then the generator."""
        for _ in range(self.critic_updates):
            further = update.next(batch)
            update.minimize(self.criticizes, further, self.critic, optimizer="critic")
        update.minimize(self.fools, batch, self.generator, optimizer="generator")
