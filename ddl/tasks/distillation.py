"""Distillation: a small model that learns from the outputs of a larger one."""

from typing import Any

import keras
import tensorflow as tf

from ddl.errors import ConfigError
from ddl.tasks.checks import check_model, in_float32
from ddl.tasks.classification import Classification
from ddl.tasks.task import PerExample


class Distillation:
    """Classification with a teacher: Hinton et al. 2015, "Distilling the Knowledge in a Network".

    The loss is (1 - share) times that of the labels, plus share · T² times the cross-entropy of the
    student's with the teacher's probabilities, both at the temperature T.
    """

    def __init__(
        self,
        student: Classification,
        teacher: keras.Model,
        *,
        temperature: float = 4.0,
        share: float = 0.9,
    ):
        """Initializes the task.

        Args:
          student: The model to train, with its loss of the labels and its metrics.
          teacher: A trained model of the same inputs and classes, which is left as it is; give it
            its weights before, or by `WarmStart`.
          temperature: T, by which logits are divided.
          share: Share of the teacher in the loss, from 0 to 1.

        Raises:
          ConfigError: If a model has other classes, or an argument is out of range.
        """
        check_model(teacher, "Distillation")
        if not temperature > 0 or not 0 <= share <= 1:
            raise ConfigError(
                "Distillation.temperature must be above 0 and Distillation.share from 0 to 1, got "
                f"{temperature} and {share}. The defaults are 4.0 and 0.9."
            )
        teacher.trainable = False
        self.model = student.model
        self.student = student
        self.teacher = teacher
        self._temperature = float(temperature)
        self._share = float(share)

    def per_example(self, features: dict[str, Any], training: bool) -> PerExample:
        """Computes the loss and metrics of a batch. Replica context.

        Args:
          features: As of `Classification`.
          training: Whether to run the student in training mode; the teacher never is.

        Returns:
          The loss [batch]; the student's metrics, its loss of the labels as "label_loss", and
          "agreement", 1 where student and teacher give the same class.
        """
        found, inputs, logits = self.student.forward(features, training)
        outputs = self.teacher(inputs, training=False)
        if not tf.is_tensor(outputs) or not logits.shape.is_compatible_with(outputs.shape):
            raise ConfigError(
                f"Distillation needs a teacher with the student's classes, {logits.shape}, but "
                f"{self.teacher.name!r} returns {getattr(outputs, 'shape', type(outputs))}. Pass a "
                "teacher of the same classes, or change num_classes of the student."
            )
        logits = in_float32(logits)
        teacher = tf.stop_gradient(tf.cast(outputs, logits.dtype))
        temperature = tf.constant(self._temperature, logits.dtype)
        distilled = tf.nn.softmax_cross_entropy_with_logits(
            tf.nn.softmax(teacher / temperature), logits / temperature
        )
        share = tf.constant(self._share, logits.dtype)
        loss = (1 - share) * found.loss + share * tf.square(temperature) * distilled
        agreement = tf.equal(tf.argmax(logits, axis=-1), tf.argmax(teacher, axis=-1))
        metrics = {
            **found.metrics,
            "label_loss": found.loss,
            "agreement": tf.cast(agreement, tf.float32),
        }
        return PerExample(loss, metrics, found.weight)

    def predict(self, features: dict[str, Any]) -> tf.Tensor:
        """Returns the student's outputs [batch, classes]."""
        return self.student.predict(features)

    def check(self, source: Any) -> None:
        """Checks a data source before training: see `Classification.check`."""
        self.student.check(source)
