"""Bootstrap your own latent (Grill et al. 2020): learns from images without labels."""

import gin
import keras
import tensorflow as tf

import ddl


@gin.register
class Byol:
    """Predicts what an average of the encoder says of another view of the same image."""

    def __init__(self, encoder: keras.Model, decay: float = 0.99) -> None:
        self.online, self.decay = encoder, decay
        self.target = keras.models.clone_model(encoder)
        self.target.set_weights(encoder.get_weights())
        width = encoder.output_shape[-1]
        self.predictor = keras.Sequential(
            [
                keras.Input((width,)),
                keras.layers.Dense(64, "relu"),
                keras.layers.Dense(width, dtype=keras.config.floatx()),
            ]
        )
        self.views = [ddl.layers.RandomShift(1, 1), ddl.layers.Cutout(3)]
        self.exported_models = {"encoder": encoder}

    def view(self, images: tf.Tensor, training: bool) -> tf.Tensor:
        """Returns images shifted and partly covered, by draws of their own."""
        for layer in self.views:
            images = layer(images, training=training)
        return images

    def agreement(self, features: dict, training: bool) -> ddl.PerExample:
        """Returns the distance of the prediction from the target's word on another view."""
        one, other = (self.view(features["image"], training) for _ in range(2))
        said = self.predictor(self.online(one, training=training))
        wanted = tf.cast(self.target(other, training=training), said.dtype)
        said, wanted = (tf.math.l2_normalize(value, axis=-1) for value in (said, wanted))
        return ddl.PerExample(tf.reduce_sum(tf.square(said - wanted), axis=-1))

    def evaluate(self, features: dict) -> ddl.PerExample:
        """Returns the loss of images as they are."""
        return self.agreement(features, training=False)

    def step(self, update: ddl.Update, batch: object) -> None:
        """Updates encoder and predictor, then moves the target towards the encoder."""
        trained = [*self.online.trainable_variables, *self.predictor.trainable_variables]
        update.minimize(self.agreement, batch, trained)
        update.average(self.target, of=self.online, decay=self.decay)
