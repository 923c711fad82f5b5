"""A class so rare that the accuracy hides it: areas under curves, by thresholds and by ranks."""

import gin
import keras
import numpy as np
import tensorflow as tf

import ddl


@gin.register
def classifier(width: int = 16) -> keras.Model:
    """Maps points [batch, 2] to a logit."""
    hidden = [keras.layers.Dense(width, "relu") for _ in range(2)]
    last = keras.layers.Dense(1, dtype=keras.config.floatx())
    return keras.Sequential([keras.Input((2,)), *hidden, last])


@gin.register
class RareClass:
    """Binary cross-entropy, and areas under the ROC and the precision-recall curve."""

    def __init__(self, model: keras.Model) -> None:
        self.model = model
        self.auc = ddl.metrics.KerasMetric("AUC", {"from_logits": True})
        self.pr_auc = ddl.metrics.KerasMetric("AUC", {"from_logits": True, "curve": "PR"})

    def per_example(self, features: dict[str, tf.Tensor], training: bool) -> ddl.PerExample:
        """Loss, accuracy and areas."""
        label, logit = features["label"], self.model(features["point"], training=training)[:, 0]
        loss = tf.nn.sigmoid_cross_entropy_with_logits(tf.cast(label, logit.dtype), logit)
        right = tf.cast((logit > 0) == (label > 0), logit.dtype)
        areas = {"auc": self.auc(label, logit), "pr_auc": self.pr_auc(label, logit)}
        return ddl.PerExample(loss, {"accuracy": right, **areas})

    def predict(self, features: dict[str, tf.Tensor]) -> tf.Tensor:
        """Returns the logits [batch]."""
        return self.model(features["point"], training=False)[:, 0]


@gin.register
def auc_by_ranks(outputs: np.ndarray, features: dict[str, tf.Tensor]) -> dict[str, float]:
    """Returns the share of pairs of both classes that the logits order correctly, ties as half."""
    _, place, count = np.unique(outputs, return_inverse=True, return_counts=True)
    rank = (np.cumsum(count) - (count - 1) / 2)[place]
    rare = features["label"] > 0
    n = rare.sum()
    return {"auc_by_ranks": (rank[rare].sum() - n * (n + 1) / 2) / (n * (len(rare) - n))}


@gin.register
def points(n: int, seed: int) -> ddl.data.Source:
    """Draws n points; two of a hundred belong to the rare class, a ring around the others."""
    random = np.random.default_rng(seed)
    label = (np.arange(n) % 50 == 0).astype(np.int32)
    angle = random.uniform(0, 2 * np.pi, n)
    radius = np.where(label, 2.5, 0) + random.normal(0, 1, n)
    point = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return ddl.data.Source({"point": point.astype(np.float32), "label": label})
