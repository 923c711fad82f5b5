"""Figures of metrics against scikit-learn, and metrics that are refused."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import ddl
from ddl.errors import ConfigError
from ddl.metrics import FunctionOfMean, KerasMetric, WeightedMean
from tests.contract.builders import make_trainer

RANDOM = np.random.default_rng(0)
N, CLASSES = 22, 3
WEIGHT = RANDOM.choice([0.0, 0.5, 1.0, 2.25], N).astype("f4")
DATA = {
    "x": RANDOM.normal(size=(N, 3)),
    "label": RANDOM.integers(0, 2, N).astype("i4"),
    # Between the thresholds of Keras's AUC, of which there are 200. Some are equal.
    "score": (RANDOM.integers(0, 199, N) + 0.5) / 199,
    "class": RANDOM.integers(0, CLASSES, N).astype("i4"),
    "chances": RANDOM.dirichlet(np.ones(CLASSES), N),
    "pixels": RANDOM.dirichlet(np.ones(CLASSES), (N, 2, 2)),
    "class_of_pixel": RANDOM.integers(0, CLASSES, (N, 2, 2)).astype("i4"),
    "tokens": (RANDOM.integers(0, 199, (N, 2)) + 0.5) / 199,
    "of_tokens": RANDOM.integers(0, 2, (N, 2)).astype("i4"),
    "real": RANDOM.choice([0.0, 1.0], (N, 2)),
    "y": RANDOM.normal(size=(N, 2)),
    "z": RANDOM.normal(size=(N, 2)),
    "weight": WEIGHT,
}


class AllMetrics:
    """Reports metrics of what the data hold as outputs."""

    def __init__(self):
        self.model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        iou = {"num_classes": CLASSES, "sparse_y_pred": False}
        self.auc, self.iou = KerasMetric("AUC"), KerasMetric("MeanIoU", iou)
        self.recall = KerasMetric("recall", {"thresholds": 0.25})
        self.f1, self.r2 = KerasMetric("F1Score"), KerasMetric(keras.metrics.R2Score())
        self.macro = KerasMetric("f1_score", {"average": "macro"})
        self.root = FunctionOfMean(math.sqrt)

    def per_example(self, features, training):
        label, score, y, z, real = (features[k] for k in ("label", "score", "y", "z", "real"))
        rows = tf.one_hot(features["class"], CLASSES, dtype=tf.float64)
        metrics = {
            "auc": self.auc(label, score),
            "recall": self.recall(label, score),
            "f1": self.f1(rows, features["chances"]),
            "macro": self.macro(rows, features["chances"]),
            "iou": self.iou(features["class_of_pixel"], features["pixels"]),
            "r2": self.r2(y, z),
            "root": self.root(tf.reduce_mean((y - z) ** 2, axis=1)),
            "auc_of_tokens": self.auc(features["of_tokens"], features["tokens"], real),
            "of_tokens": WeightedMean()(features["tokens"], real),
        }
        return ddl.PerExample(self.model(features["x"], training=training)[:, 0] ** 2, metrics)


def expected():
    from sklearn import metrics as sk

    w, data = WEIGHT.astype("f8"), DATA
    label, score, classes = data["label"], data["score"], data["class"]
    guess, names = data["chances"].argmax(1), list(range(CLASSES))
    options = {"sample_weight": w, "zero_division": 0}
    of_tokens = w[:, None] * data["real"]
    f1 = sk.f1_score(classes, guess, average=None, labels=names, **options)
    pixels, found = data["class_of_pixel"].ravel(), data["pixels"].argmax(-1).ravel()
    iou = {"average": "macro", "sample_weight": np.repeat(w, 4), "labels": names}
    return {
        "auc": sk.roc_auc_score(label, score, sample_weight=w),
        "recall": sk.recall_score(label, score > 0.25, **options),
        **{f"f1/{name}": one for name, one in enumerate(f1)},
        "macro": f1.mean(),
        "iou": sk.jaccard_score(pixels, found, **iou),
        "r2": sk.r2_score(data["y"], data["z"], sample_weight=w),
        "root": sk.mean_squared_error(data["y"], data["z"], sample_weight=w) ** 0.5,
        "auc_of_tokens": sk.roc_auc_score(
            data["of_tokens"].ravel(), data["tokens"].ravel(), sample_weight=of_tokens.ravel()
        ),
        "of_tokens": np.average(data["tokens"], weights=of_tokens),
    }


# Keras adds 1e-7 to the denominators of F-scores, and divides intersections in float32.
TOLERANCES = {"f1": 1e-5, "macro": 1e-5, "iou": 1e-6}


def test_figures_on_two_replicas_are_those_of_all_examples():
    """With weights, padding, microbatches and several updates; twice, from 0 again."""
    make, options = (AllMetrics, keras.optimizers.SGD), {"accumulation_steps": 2}
    trainer = make_trainer(make, DATA, eval_data=DATA, **options)
    for _ in range(2):
        for found in (trainer.evaluate(), trainer.train(epochs=1)):
            assert found.keys() == {"loss", *expected()}
            for name, value in expected().items():
                tolerance = TOLERANCES.get(name.partition("/")[0], 1e-12)
                assert found[name] == pytest.approx(value, rel=tolerance, abs=1e-12), name


class _OneSum(keras.metrics.Metric):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.total = self.add_variable((), "zeros", name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(ops.sum(ops.cast(y_pred, self.dtype) * sample_weight))

    def result(self):
        return self.total  # a variable itself, as Keras's documentation shows it


class PerBatch(_OneSum):
    """Adds up the weighted mean of each batch."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(ops.sum(y_pred * sample_weight) / ops.sum(sample_weight))


class Decaying(_OneSum):
    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign(0.9 * self.total + ops.sum(y_pred * sample_weight))


ROW = {"label": (tf.int32, []), "hinge": (tf.int32, [1]), "p": (tf.float32, [])}
ROW |= {"p1": (tf.float32, [1]), "p3": (tf.float32, [3])}


def state_of(metric, labels, outputs):
    specs = [tf.TensorSpec([4, *ROW[name][1]], ROW[name][0]) for name in (labels, outputs)]
    return metric.state("own", *specs, 1)


@pytest.mark.parametrize(
    ("metric", "labels", "outputs", "message"),
    [
        (PerBatch(), "label", "p", "has .* as the sum of those of each example"),
        (Decaying(), "label", "p", "as what is added to an earlier state"),
        # These take the argmax of the labels over the batch, or add up on labels 0 and 1 alone.
        ("CategoricalAccuracy", "label", "p3", "as the sum of those of each example"),
        ("SparseCategoricalAccuracy", "label", "p", "as the sum of those of each example"),
        ("Hinge", "hinge", "p1", "as the sum of those of each example"),
    ],
    ids=str,
)
def test_what_does_not_add_up_is_refused_by_name(metric, labels, outputs, message):
    with pytest.raises(ConfigError, match=r"The metric 'own' \(\w+\) does not add") as error:
        state_of(KerasMetric(metric), labels, outputs)
    assert error.match(message)
    assert error.match("CorpusMetric")
