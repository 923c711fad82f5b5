"""Distillation: a small model that learns from the outputs of a larger one."""

from typing import Any

import keras
import tensorflow as tf

from ddl.errors import ConfigError
from ddl.tasks.checks import one_output, output_shape
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
        if not isinstance(student, Classification):
            raise ConfigError(
                f"Distillation.student must be a ddl.Classification, got {student!r:.60}. Pass "
                "ddl.Classification(model); in a config, write @Classification()."
            )
        if not isinstance(teacher, keras.Model):
            raise ConfigError(
                f"Distillation.teacher must be a Keras model, got {teacher!r:.60}. Pass the model "
                "itself; in a config, write @load_exported() with parentheses."
            )
        if not temperature > 0 or not 0 <= share <= 1:
            raise ConfigError(
                "Distillation.temperature must be above 0 and Distillation.share from 0 to 1, got "
                f"{temperature} and {share}. Correct the one out of range; the defaults are 4.0 "
                "and 0.9."
            )
        of_student, of_teacher = output_shape(student.model), output_shape(teacher)
        if None not in (of_student, of_teacher) and of_student != of_teacher:
            raise ConfigError(
                f"Distillation needs a teacher with the student's classes, {of_student}, but "
                f"{teacher.name!r} returns {of_teacher}. Pass a teacher of the same classes, or "
                "change num_classes of the student."
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
        form, expected = "[batch, classes] (the teacher)", logits.shape[1:]
        targets = one_output(outputs, self.teacher, "Distillation", form, expected)
        teacher = tf.stop_gradient(tf.cast(targets, logits.dtype))
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
        return PerExample(loss, metrics)

    def predict(self, features: dict[str, Any]) -> tf.Tensor:
        """Returns the student's outputs [batch, classes]."""
        return self.student.predict(features)

    def check(self, source: Any) -> None:
        """Checks a data source before training: see `Classification.check`."""
        self.student.check(source)
