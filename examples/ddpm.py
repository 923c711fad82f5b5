"""Denoising diffusion (Ho et al. 2020) on the digits, with averaged weights and drawn samples."""

from typing import Any

import gin
import keras
import numpy as np
import tensorflow as tf

import ddl

STEPS = 100  # from an image to noise
# The share of the image's variance that is left after each step, by the cosine schedule.
KEPT = np.cos(np.pi / 2 * np.linspace(0.01, 0.99, STEPS)) ** 2


@gin.register
def denoiser(width: int = 256, blocks: int = 3) -> keras.Model:
    """Returns a network from (noisy image, step as a share) to the noise."""
    image, share = keras.Input((8, 8, 1)), keras.Input((1,))
    waves = keras.ops.sin(share * np.pi * 2.0 ** np.arange(-1, 5))
    x = keras.layers.Dense(width)(keras.layers.Flatten()(image))
    for _ in range(blocks):
        hidden = keras.layers.Dense(width, "swish")(keras.layers.concatenate([x, waves]))
        x = x + keras.layers.Dense(width)(keras.layers.LayerNormalization()(hidden))
    noise = keras.layers.Dense(64, dtype=keras.config.floatx())(x)
    return keras.Model([image, share], keras.layers.Reshape((8, 8, 1))(noise))


@gin.register
class Diffusion:
    """Predicts the noise in an image after a random number of steps."""

    def __init__(self, model: keras.Model) -> None:
        self.model = model

    def per_example(self, features: dict[str, Any], training: bool) -> ddl.PerExample:
        """The mean squared error of the predicted noise."""
        image = tf.cast(features["image"], keras.config.floatx()) / 8 - 1
        step = tf.cast(keras.random.uniform(image.shape[:1]) * STEPS, "int32")
        noise = keras.random.normal(image.shape)
        kept = tf.gather(tf.cast(KEPT, image.dtype), step)[:, tf.newaxis, tf.newaxis, tf.newaxis]
        noisy = tf.sqrt(kept) * image + tf.sqrt(1 - kept) * noise
        share = tf.cast(step, image.dtype)[:, tf.newaxis] / STEPS
        found = self.model([noisy, share], training=training)
        return ddl.PerExample(tf.reduce_mean(tf.square(found - noise), axis=[1, 2, 3]))


def samples(model: keras.Model, count: int, seed: int = 0) -> np.ndarray:
    """Draws images [count, 8, 8, 1] from -1 to 1, from the last step to the first."""
    random = np.random.default_rng(seed)
    image = random.normal(size=(count, 8, 8, 1))
    for step in reversed(range(STEPS)):
        kept, before = KEPT[step], KEPT[step - 1] if step else 1.0
        noise = model([image, np.full((count, 1), step / STEPS)], training=False).numpy()
        clean = np.clip((image - np.sqrt(1 - kept) * noise) / np.sqrt(kept), -1, 1)
        # The mean and the variance of the step before, given this one and the image (eq. 7).
        ratio = kept / before
        mean = np.sqrt(before) * (1 - ratio) * clean + np.sqrt(ratio) * (1 - before) * image
        variance = (1 - before) * (1 - ratio) / (1 - kept)
        image = mean / (1 - kept) + np.sqrt(variance) * random.normal(size=image.shape)
    return image


@gin.register
def show_samples(event: Any) -> None:
    """Writes images that the averaged weights draw, for TensorBoard."""
    with event.trainer.evaluation_weights():
        images = samples(event.trainer.model, count=16)
    tf.summary.image("samples", np.clip(images / 2 + 0.5, 0, 1), event.step, max_outputs=16)
