"""The warning at the start of a run whose operations do not repeat their bits."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.step.effects import repetition

DATA = {"image": np.ones([16, 6, 6, 1], "f4"), "label": np.arange(16) % 3}


class Crops(keras.layers.Layer):
    """Crops the middle of an image, in a conditional."""

    def call(self, x):
        def cropped():
            rows = tf.shape(x)[0]
            boxes = tf.tile([[0.1, 0.1, 0.9, 0.9]], [rows, 1])
            return tf.image.crop_and_resize(x, boxes, tf.range(rows), [6, 6])

        return tf.cond(tf.reduce_sum(x) > 0, cropped, lambda: x)

    def compute_output_shape(self, shape):
        return shape


class Counts(keras.layers.Layer):
    """Sums the weights of classes."""

    def call(self, x):
        flat = tf.reshape(x, [-1, 36])
        classes = tf.cast(tf.argsort(flat), tf.int32) % 4
        weights = tf.stop_gradient(flat)
        counts = tf.math.bincount(classes, weights, minlength=4, maxlength=4, axis=-1)
        return counts * tf.reduce_mean(flat, axis=1, keepdims=True)

    def compute_output_shape(self, shape):
        return (shape[0], 4)


def warnings(layer, caplog):
    layers = [keras.Input((6, 6, 1)), keras.layers.Conv2D(1, 1), layer(), keras.layers.Flatten()]
    model = keras.Sequential([*layers, keras.layers.Dense(3)])
    trainer = ddl.Trainer(ddl.Classification(model), "sgd", DATA, global_batch_size=8)
    caplog.clear()
    trainer.trace()
    return [text for text in caplog.messages if "adds in varying order" in text]


def test_an_operation_that_varies_is_told(caplog, monkeypatch):
    (text,) = warnings(Crops, caplog)
    assert "crop_and_resize by its images (CropAndResizeGradImage)" in text
    assert text.endswith("--deterministic_ops mends it.")
    monkeypatch.setattr(repetition, "is_op_determinism_enabled", lambda: True)
    assert warnings(Crops, caplog) == []
    (text,) = warnings(Counts, caplog)
    assert "tf.math.bincount with weights (DenseBincount)" in text
    assert "--deterministic_ops does not mend it" in text


@pytest.mark.parametrize("layer", [keras.layers.ReLU, lambda: keras.layers.MaxPooling2D(2)])
def test_other_operations_are_not(layer, caplog):
    assert warnings(layer, caplog) == []
