"""Bootstrap your own latent (Grill et al. 2020): learns from images without labels."""

from typing import Any

import gin
import keras
import tensorflow as tf

import ddl


@gin.register
class Byol:
    """Predicts the output of an average of the encoder for another view of the same image."""

    def __init__(self, encoder: keras.Model, decay: float = 0.99) -> None:
        layers, width = keras.layers, encoder.output_shape[-1]
        # Without the normalization all images soon get nearly the same output.
        normalized = layers.BatchNormalization(center=False, scale=False)
        self.online = keras.Model(encoder.input, normalized(encoder.output))
        self.target = keras.models.clone_model(self.online)
        self.target.set_weights(self.online.get_weights())
        self.decay = decay
        self.predictor = keras.Sequential(
            [
                keras.Input((width,)),
                layers.Dense(64, use_bias=False),
                layers.BatchNormalization(),
                layers.ReLU(),
                layers.Dense(width, dtype=keras.config.floatx()),
            ]
        )
        self.views = [
            ddl.layers.RandomShift(1, 1),
            keras.layers.RandomErasing(1.0, scale=(0.1, 0.15), fill_value=0.0),
        ]
        self.exported_models = {"encoder": self.online}

    def view(self, images: tf.Tensor, training: bool) -> tf.Tensor:
        """Augments the images; each call draws anew."""
        for layer in self.views:
            images = layer(images, training=training)
        return images

    def distance(self, features: dict[str, Any], training: bool) -> ddl.PerExample:
        """The distance between prediction and target, in one direction."""
        one, other = (self.view(features["image"], training) for _ in range(2))
        prediction = self.predictor(self.online(one, training=training))
        target = tf.cast(self.target(other, training=training), prediction.dtype)
        prediction, target = (tf.math.l2_normalize(x, axis=-1) for x in (prediction, target))
        return ddl.PerExample(tf.reduce_sum(tf.square(prediction - target), axis=-1))

    def evaluate(self, features: dict[str, Any]) -> ddl.PerExample:
        """The distance for images that are not augmented."""
        return self.distance(features, training=False)

    def step(self, update: ddl.Update, batch: ddl.StepBatch) -> None:
        """Updates encoder and predictor, then moves the target towards the encoder."""
        trained = [*self.online.trainable_variables, *self.predictor.trainable_variables]
        update.minimize(self.distance, batch, trained)
        update.average(self.target, of=self.online, decay=self.decay)
