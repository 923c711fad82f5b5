"""Knowledge distillation (Hinton et al. 2015) from an exported teacher.

From the teacher's predictions a student learns with few examples. The task needs no step of its
own: it has one model to train and one loss.
"""

from typing import Any, cast

import gin
import keras
import tensorflow as tf

import ddl


@gin.register
class Distill:
    """A student learns the labels, and a teacher's predictions at a higher temperature."""

    def __init__(
        self, student: keras.Model, teacher: str, temperature: float = 4.0, share: float = 0.9
    ) -> None:
        """Loads the teacher.

        Args:
          student: Maps images to logits; it is trained and exported.
          teacher: The `model.keras` of an export, which maps images to logits.
          temperature: Divisor of both logits; a higher one makes the predictions softer.
          share: Share of the teacher in the loss; 0 trains the student only on the labels.
        """
        self.model, self.temperature, self.share = student, temperature, share
        self.teacher = cast(keras.Model, keras.models.load_model(teacher, compile=False))
        self.teacher.trainable = False

    def per_example(self, features: dict[str, Any], training: bool) -> ddl.PerExample:
        """The mean of both losses, weighted, and both accuracies."""
        image, label = features["image"], features["label"]
        floatx = keras.config.floatx()
        logits = tf.cast(self.model(image, training=training), floatx)
        taught = tf.cast(self.teacher(image, training=False), floatx)
        hard = tf.nn.sparse_softmax_cross_entropy_with_logits(label, logits)
        soft, wanted = (tf.nn.log_softmax(x / self.temperature) for x in (logits, taught))
        divergence = tf.reduce_sum(tf.exp(wanted) * (wanted - soft), axis=-1)
        # The gradient of the divergence falls with the square of the temperature.
        loss = (1 - self.share) * hard + self.share * self.temperature**2 * divergence
        right = {"accuracy": logits, "teacher_accuracy": taught}
        return ddl.PerExample(
            loss,
            {
                name: tf.cast(tf.argmax(values, axis=-1) == label, floatx)
                for name, values in right.items()
            },
        )
