"""A small U-Net (Ronneberger et al. 2015) that finds disks and squares in noise."""

import gin
import keras
import numpy as np
import tensorflow as tf

import ddl

SIZE = 16
CLASSES = 3  # background, disk, square


@gin.register
def u_net(width: int = 8, depth: int = 2) -> keras.Model:
    """Maps images [batch, SIZE, SIZE, 1] to a logit of each class for each pixel."""
    layers = keras.layers

    def convolved(x: tf.Tensor, level: int) -> tf.Tensor:
        return layers.Conv2D(width * 2**level, 3, padding="same", activation="relu")(x)

    image = keras.Input((SIZE, SIZE, 1))
    x, skipped = image, []
    for level in range(depth):
        x = convolved(x, level)
        skipped.append(x)
        x = layers.MaxPooling2D()(x)
    x = convolved(x, depth)
    for level in reversed(range(depth)):
        x = layers.concatenate([layers.UpSampling2D()(x), skipped[level]])
        x = convolved(x, level)
    return keras.Model(image, layers.Conv2D(CLASSES, 1, dtype=keras.config.floatx())(x))


@gin.register
class Segmentation:
    """Cross-entropy of the pixels, and the mean intersection over union of the classes."""

    def __init__(self, model: keras.Model) -> None:
        self.model = model
        options = {"num_classes": CLASSES, "sparse_y_pred": False}
        self.mean_iou = ddl.metrics.KerasMetric("MeanIoU", options)

    def per_example(self, features: dict, training: bool) -> ddl.PerExample:
        """One loss for each pixel; the metric adds up over pixels."""
        labels = features["label"]
        logits = self.model(features["image"], training=training)
        loss = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
        return ddl.PerExample(loss, {"mean_iou": self.mean_iou(labels, logits)})


@gin.register
def shapes(n: int, seed: int) -> ddl.data.ArraySource:
    """Draws n noisy images of one disk and one square each, and the class of each pixel."""
    random = np.random.default_rng(seed)
    row, column = np.mgrid[:SIZE, :SIZE]
    labels = np.zeros((n, SIZE, SIZE), np.int32)
    for label in labels:
        (y, x), (top, left) = random.integers(3, SIZE - 3, 2), random.integers(0, SIZE - 5, 2)
        label[(row - y) ** 2 + (column - x) ** 2 <= 9] = 1
        label[top : top + 5, left : left + 5] = 2
    images = (labels > 0) + random.normal(0, 0.3, labels.shape)
    return ddl.data.ArraySource(image=images[..., None].astype(np.float32), label=labels)
