"""Random predictions, weights and paddings for all metrics at once, and scikit-learn's figures."""

import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import ddl
from ddl.metrics import ConfusionCounts, FunctionOfMean, KerasMetric, OfAllOutputs, Perplexity
from ddl.metrics.in_float64 import float64_by_default

SETS = 6
BATCH = 16
CLASSES = 3
TOKENS = 2


def data_of(seed: int) -> dict[str, np.ndarray]:
    """Returns a set of 2 to 40 examples; in most the last batch is padded."""
    random = np.random.default_rng(seed)
    n = int(random.integers(2, 41))
    # Between the thresholds of Keras's AUC, of which there are 200. Some are equal.
    score = (random.integers(0, 199, n) + 0.5) / 199
    label = random.integers(0, 2, n)
    weight = random.choice([0.0, 0.5, 1.0, 2.25], n)
    label[:2], weight[:2] = (0, 1), (0.5, 2.25)  # both labels count
    chances = random.dirichlet(np.ones(CLASSES), n)
    rows = random.normal(size=(2, n, 2))
    pixels = random.dirichlet(np.ones(CLASSES), (n, 2, 2))
    tokens = (random.integers(0, 199, (n, TOKENS)) + 0.5) / 199
    of_tokens = random.integers(0, 2, (n, TOKENS))
    of_tokens[0] = 0, 1
    real = random.choice([0.0, 1.0], (n, TOKENS))
    real[0] = 1
    return {
        "score": score,
        "label": label.astype("i4"),
        "chances": chances,
        "class": random.integers(0, CLASSES, n).astype("i4"),
        "y": rows[0],
        "z": rows[0] + rows[1],
        "pixels": pixels,
        "class_of_pixel": random.integers(0, CLASSES, (n, 2, 2)).astype("i4"),
        "tokens": tokens,
        "of_tokens": of_tokens.astype("i4"),
        "real": real,
        "weight": weight.astype("f4"),
    }


def passing(width: int) -> keras.Model:
    """Returns a model that returns its inputs."""
    inputs = keras.Input((width,), dtype="float64")
    return keras.Sequential([inputs, keras.layers.Activation("linear", dtype="float64")])


class AllMetrics:
    """Reports metrics of what the data hold as outputs; the weight has no effect on these."""

    def __init__(self):
        self.model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, dtype="float64")])
        counts = ("TruePositives", "TrueNegatives", "FalsePositives", "FalseNegatives")
        self.binary = {
            "auc": KerasMetric("AUC"),
            "precision": KerasMetric("Precision"),
            "recall": KerasMetric("recall", {"thresholds": 0.25}),
            **{name: KerasMetric(name) for name in counts},
        }
        self.of_chances = {
            "f1": KerasMetric("F1Score"),
            "f1_macro": KerasMetric(keras.metrics.F1Score(average="macro")),
            "f1_micro": KerasMetric("f1_score", {"average": "micro"}),
            "f1_weighted": KerasMetric("F1Score", {"average": "weighted"}),
            "f2": KerasMetric("FBetaScore", {"beta": 2.0, "average": "macro"}),
        }
        options = {"num_classes": CLASSES, "sparse_y_pred": False}
        self.mean_iou = KerasMetric("MeanIoU", options)
        self.confusion = KerasMetric(ConfusionCounts(CLASSES, sparse_y_pred=False))
        self.r2 = KerasMetric(keras.metrics.R2Score())
        self.rmse = KerasMetric("RootMeanSquaredError")
        self.root = FunctionOfMean(math.sqrt)
        self.tasks = {
            "mae": ddl.Supervised(passing(2), "mse", metrics=["mae"]),
            "top": ddl.Classification(passing(CLASSES), top_k=2),
            "labels": ddl.MultiLabel(passing(TOKENS)),
        }
        self.perplexity = Perplexity()

    def per_example(self, features: dict[str, Any], training: bool) -> ddl.PerExample:
        label, score, y, z = (features[name] for name in ("label", "score", "y", "z"))
        chances, classes = features["chances"], features["class"]
        rows = tf.one_hot(classes, CLASSES, dtype=tf.float64)
        log_loss = -tf.math.log(tf.reduce_sum(rows * chances, axis=1))
        metrics = {name: metric(label, score) for name, metric in self.binary.items()}
        metrics |= {name: metric(rows, chances) for name, metric in self.of_chances.items()}
        metrics |= {
            "iou": self.mean_iou(classes, chances),
            "iou_of_pixels": self.mean_iou(features["class_of_pixel"], features["pixels"]),
            "confusion": self.confusion(classes, chances),
            "r2": self.r2(y, z),
            "rmse": self.rmse(y, z),
            "root": self.root(tf.reduce_mean((y - z) ** 2, axis=1)),
            "perplexity": self.perplexity(log_loss),
            "auc_of_tokens": self.binary["auc"](
                features["of_tokens"], features["tokens"], features["real"]
            ),
        }
        for task, inputs, labels in (
            ("mae", y, z),
            ("top", tf.math.log(chances), classes),
            ("labels", tf.math.log(features["tokens"] / (1 - features["tokens"])), "of_tokens"),
        ):
            labels = features[labels] if isinstance(labels, str) else labels
            own = self.tasks[task].per_example({"image": inputs, "label": labels}, training)
            metrics |= {f"{task}_{name}": value for name, value in own.metrics.items()}
        out = self.model(tf.zeros_like(y) * y, training=training)[:, 0]
        return ddl.PerExample(log_loss + 0.0 * out, metrics)

    def predict(self, features: dict[str, Any]) -> dict[str, tf.Tensor]:
        return {"score": features["score"]}


def expected_of(data: dict[str, np.ndarray]) -> dict[str, float]:
    """Returns scikit-learn's figures."""
    from sklearn import metrics as sk

    w = data["weight"].astype(np.float64)
    label, score, classes, chances = (data[k] for k in ("label", "score", "class", "chances"))
    guess, names = chances.argmax(1), list(range(CLASSES))
    options: dict[str, Any] = {"sample_weight": w, "zero_division": 0}
    of_two: dict[str, Any] = {"k": 2, "labels": names}
    of_tokens, tokens = data["of_tokens"], data["tokens"]
    (tn, fp), (fn, tp) = sk.confusion_matrix(label, score > 0.5, sample_weight=w, labels=[0, 1])
    found = {
        "auc": sk.roc_auc_score(label, score, sample_weight=w),
        "precision": sk.precision_score(label, score > 0.5, **options),
        "recall": sk.recall_score(label, score > 0.25, **options),
        "TruePositives": tp,
        "TrueNegatives": tn,
        "FalsePositives": fp,
        "FalseNegatives": fn,
        "f2": sk.fbeta_score(classes, guess, beta=2, average="macro", labels=names, **options),
        "iou": iou(classes, guess, w),
        "iou_of_pixels": iou(
            data["class_of_pixel"].ravel(), data["pixels"].argmax(-1).ravel(), np.repeat(w, 4)
        ),
        "r2": sk.r2_score(data["y"], data["z"], sample_weight=w),
        "rmse": sk.mean_squared_error(data["y"], data["z"], sample_weight=w) ** 0.5,
        "mae_mae": sk.mean_absolute_error(data["y"], data["z"], sample_weight=w),
        "top_accuracy": sk.accuracy_score(classes, guess, sample_weight=w),
        "top_top_2_accuracy": sk.top_k_accuracy_score(classes, chances, sample_weight=w, **of_two),
        "labels_binary_accuracy": 1 - sk.hamming_loss(of_tokens, tokens >= 0.5, sample_weight=w),
        "labels_exact_match": sk.accuracy_score(of_tokens, tokens >= 0.5, sample_weight=w),
        "labels_f1_micro": sk.f1_score(of_tokens, tokens >= 0.5, average="micro", **options),
        "labels_f1_macro": sk.f1_score(of_tokens, tokens >= 0.5, average="macro", **options),
        "labels_mean_average_precision": average_precision(of_tokens, tokens, w),
        "labels_auc": sk.roc_auc_score(of_tokens, tokens, average="micro", sample_weight=w),
        "perplexity": math.exp(sk.log_loss(classes, chances, sample_weight=w, labels=names)),
        "auc_of_tokens": sk.roc_auc_score(
            data["of_tokens"].ravel(),
            data["tokens"].ravel(),
            sample_weight=(w[:, None] * data["real"]).ravel(),
        ),
    }
    found |= {"root": found["rmse"], "loss": math.log(found["perplexity"])}
    for average in ("macro", "micro", "weighted"):
        found[f"f1_{average}"] = sk.f1_score(
            classes, guess, average=average, labels=names, **options
        )
    for name, value in enumerate(
        sk.f1_score(classes, guess, average=None, labels=names, **options)
    ):
        found[f"f1/{name}"] = value
    matrix = sk.confusion_matrix(classes, guess, sample_weight=w, labels=names)
    found |= {f"confusion/{i}/{j}": matrix[i, j] for i in names for j in names}
    return {name: float(value) for name, value in found.items()}


def average_precision(labels: np.ndarray, scores: np.ndarray, weight: np.ndarray) -> float:
    """Returns Keras's figure: scikit-learn interpolates in another way."""
    with float64_by_default():
        metric = keras.metrics.AUC(curve="PR", multi_label=True)
        metric.update_state(labels, scores, sample_weight=weight)
        return float(metric.result())


def iou(labels: np.ndarray, guess: np.ndarray, weight: np.ndarray) -> float:
    """Returns the mean over the classes that some label or guess with a weight has."""
    from sklearn.metrics import jaccard_score

    counts = weight > 0
    present = np.union1d(labels[counts], guess[counts])
    return jaccard_score(labels, guess, labels=present, average="macro", sample_weight=weight)


def exact_auc(outputs: dict[str, np.ndarray], features: dict[str, np.ndarray]) -> dict[str, float]:
    """Returns the AUC by ranks, as a function of all outputs."""
    from sklearn.metrics import roc_auc_score

    own = roc_auc_score(features["label"], outputs["score"], sample_weight=features["weight"])
    return {"exact_auc": float(own), "first": float(outputs["score"][0])}


def trainer_on(strategy: tf.distribute.Strategy) -> ddl.Trainer:
    """Returns a trainer with padding and microbatches."""
    with strategy.scope():
        task = AllMetrics()
        optimizer = keras.optimizers.SGD(0.1)
    exact = OfAllOutputs(exact_auc, ["exact_auc", "first"], features=["label", "weight"])
    return ddl.Trainer(
        task,
        optimizer,
        data_of(0),
        global_batch_size=BATCH,
        strategy=strategy,
        accumulation_steps=2,
        corpus_metrics=exact,
    )
