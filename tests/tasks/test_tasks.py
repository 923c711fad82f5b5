"""Losses and metrics of the tasks against their definitions, and data that they refuse."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import logging

import ddl
from ddl.data import Source
from ddl.data.checks import data_errors
from ddl.distribution.path import GPU, taking
from ddl.errors import ConfigError, DataError
from ddl.models import bert, gpt, mlp, table_mlp
from ddl.tasks.classification import cross_entropy
from tests.conftest import microbatch

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(6, 4)).astype("f4")
LABELS = np.array([0, 1, 2, 0, 1, 2])


def small_gpt():
    return gpt(11, 6, width=8, heads=2, blocks=1, dropout=0.0)


def small_bert(**options):
    return bert(11, 6, width=8, heads=2, blocks=1, dropout=0.0, **options)


def of_pixels():
    return keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Conv2D(4, 3, padding="same")])


def log_softmax(logits):
    logits = np.asarray(logits, "f8")
    return (
        logits
        - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - (logits.max(-1, keepdims=True))
    )


def own(values, labels):
    return np.take_along_axis(values, labels[..., None], -1)[..., 0]


def of(task, **features):
    return task.per_example({name: tf.constant(value) for name, value in features.items()}, False)


def test_integer_and_one_hot_labels_give_the_same():
    task = ddl.Classification(mlp((4,), 3), top_k=2)
    integers, rows = (of(task, image=X, label=x) for x in (LABELS, np.eye(3)[LABELS]))
    np.testing.assert_allclose(integers.loss, rows.loss, rtol=1e-5)
    np.testing.assert_allclose(integers.loss, -own(log_softmax(task.model(X)), LABELS), rtol=1e-4)
    for name in ("accuracy", "top_2_accuracy"):
        np.testing.assert_array_equal(integers.metrics[name], rows.metrics[name])


@pytest.mark.parametrize("label", [LABELS, np.eye(3)[LABELS]])
def test_label_smoothing_is_that_of_keras(label):
    loss = keras.losses.CategoricalCrossentropy(True, label_smoothing=0.1, reduction=None)
    task = ddl.Classification(mlp((4,), 3), label_smoothing=0.1)
    expected = loss(np.eye(3)[LABELS], task.model(X))
    np.testing.assert_allclose(of(task, image=X, label=label).loss, expected, rtol=1e-5)
    task = ddl.Classification(task.model, loss=loss)
    np.testing.assert_allclose(of(task, image=X, label=np.eye(3)[LABELS]).loss, expected, rtol=1e-5)


@pytest.mark.parametrize("name", ["loss", "accuracy"])
def test_a_row_with_a_nan_is_wrong(name):
    x = np.where(np.arange(6)[:, None] == 2, np.nan, X)
    found = of(ddl.Classification(mlp((4,), 3), top_k=3), image=x, label=LABELS)
    values = (
        found.loss
        if name == "loss"
        else found.metrics["accuracy"] + found.metrics["top_3_accuracy"]
    )
    assert np.isnan(values[2]) if name == "loss" else values[2] == 0


def test_cross_entropy_of_float64_on_a_gpu_is_the_same_up_to_rounding():
    labels, logits = tf.constant([2, *LABELS]), RANDOM.normal(size=(7, 4)) * 300
    logits[0, 3] = -np.inf
    expected = cross_entropy(labels, tf.constant(logits))
    with taking(GPU):
        np.testing.assert_allclose(cross_entropy(labels, tf.constant(logits)), expected, rtol=1e-14)
        assert np.isnan(cross_entropy([7, -1], tf.constant(logits[1:3]))).all()


@pytest.mark.parametrize("as_layer", [True, False])
def test_a_softmax_before_a_loss_from_logits_is_warned_of(as_layer, monkeypatch):
    warnings = []
    monkeypatch.setattr(logging, "warning", lambda text, *args: warnings.append(text % args))
    last = [keras.layers.Softmax()] if as_layer else []
    dense = keras.layers.Dense(3, activation=None if as_layer else "softmax")
    model = keras.Sequential([keras.Input((4,)), dense, *last])
    ddl.Classification(model)
    assert "Remove the softmax" in warnings[0]
    ddl.Classification(model, loss=keras.losses.SparseCategoricalCrossentropy(reduction=None))
    assert len(warnings) == 1


def test_means_by_class_and_metrics_of_probabilities():
    task = ddl.Classification(mlp((4,), 3), metrics=["AUC"], by_class=True)
    data = {"image": X, "label": LABELS}
    trainer = ddl.Trainer(task, "sgd", data, eval_data=data, global_batch_size=4)
    found, losses = trainer.evaluate(), -own(log_softmax(task.model(X)), LABELS)
    for number in range(3):
        expected = losses[number == LABELS].mean()
        assert found[f"loss_by_class/{number}"] == pytest.approx(expected, rel=1e-4)
    auc = keras.metrics.AUC()(np.eye(3)[LABELS], tf.nn.softmax(task.model(X)))
    assert found["AUC"] == pytest.approx(float(auc), rel=1e-5)


def test_a_language_model_predicts_the_next_token():
    task, tokens = ddl.LanguageModel(small_gpt()), RANDOM.integers(0, 11, (3, 7))
    features = {"token": tokens[:, :-1], "next_token": tokens[:, 1:].astype("i4")}
    losses = -own(log_softmax(task.model(tokens[:, :-1])), tokens[:, 1:])
    found = of(task, **features)
    np.testing.assert_allclose(found.loss, losses.mean(1), rtol=1e-4)
    assert found.weight is None
    weights = RANDOM.uniform(size=(3, 6))
    found = of(task, **features, token_weight=weights)
    np.testing.assert_allclose(found.loss, (losses * weights).sum(1) / weights.sum(1), rtol=1e-4)
    np.testing.assert_allclose(found.weight, weights.sum(1), rtol=1e-6)


def test_a_masked_language_model_predicts_the_masked_tokens():
    masking = ddl.layers.TokenMasking(10, 10, rate=0.5)
    task, tokens = ddl.MaskedLanguageModel(small_bert(), masking), RANDOM.integers(0, 10, (40, 6))
    weights = RANDOM.uniform(0.5, 2, (40, 6)).astype("f4")
    weights[:, :2] = 0
    with microbatch(rows=40).forward():
        found = of(task, token=tokens, mask_weight=weights)
    with microbatch(rows=40).forward():
        masked = masking(tf.constant(tokens), can_mask=weights > 0)
    own_weights = (masked.weight * weights).numpy()
    losses = -own(log_softmax(task.model(masked.token)), tokens)
    np.testing.assert_allclose(found.weight, own_weights.sum(1), rtol=1e-6)
    total = tf.reduce_sum(found.loss * found.weight)
    np.testing.assert_allclose(total, (losses * own_weights).sum(), rtol=1e-4)
    assert task.predict({"token": tf.constant(tokens)}).shape == (40, 6, 11)


def test_padding_is_never_masked():
    masking = ddl.layers.TokenMasking(10, 10, rate=1.0)
    task = ddl.MaskedLanguageModel(small_bert(packed=True), masking)
    tokens, lengths = RANDOM.integers(0, 10, (3, 6)), np.array([6, 1, 4])
    task.check(Source({"token": tokens, "length": lengths}))
    np.testing.assert_array_equal(of(task, token=tokens, length=lengths).weight, lengths)


def test_segmentation_weighs_classes_and_leaves_pixels_out():
    task = ddl.Segmentation(of_pixels(), ignored=255, class_weight={1: 2, 2: 0})
    labels = RANDOM.integers(0, 4, (2, 8, 8))
    labels[0, :4] = 255
    images = RANDOM.integers(0, 256, (2, 8, 8, 1), np.uint8)
    found, known = of(task, image=images, label=labels), np.where(labels == 255, 0, labels)
    weights = np.array([1, 2, 0, 1])[known] * (labels != 255)
    losses = -own(log_softmax(task.model(images)), known)
    np.testing.assert_array_equal(found.weight, weights.sum((1, 2)))
    np.testing.assert_allclose(found.loss * found.weight, (losses * weights).sum((1, 2)), rtol=1e-4)
    np.testing.assert_array_equal(found.metrics["mean_iou"].weight, labels != 255)
    assert task.predict({"image": images}).shape == (2, 8, 8)


def test_several_labels():
    task, labels = ddl.MultiLabel(mlp((4,), 3), threshold=0.3), RANDOM.integers(0, 2, (6, 3))
    found, shares = of(task, image=X, label=labels), np.asarray(task.predict({"image": X}), "f8")
    losses = -(labels * np.log(shares) + (1 - labels) * np.log(1 - shares))
    np.testing.assert_allclose(found.loss, losses.mean(1), rtol=1e-4)
    right = (shares >= 0.3) == labels
    np.testing.assert_allclose(found.metrics["binary_accuracy"], right.mean(1), rtol=1e-6)
    np.testing.assert_array_equal(found.metrics["exact_match"], right.all(1))
    with pytest.raises(DataError, match="has a value other than 0 and 1"), data_errors():
        of(task, image=X, label=labels - 2)  # of a stream, which has no arrays to check


@pytest.mark.parametrize("shape", [(6,), (6, 1)])
@pytest.mark.parametrize(
    ("loss", "function"),
    [
        ("squared", np.square),
        ("absolute", np.abs),
        ("huber", lambda e: np.where(np.abs(e) <= 0.5, e**2 / 2, 0.5 * (np.abs(e) - 0.25))),
    ],
)
def test_regression_compares_each_output_with_its_label(loss, function, shape):
    task, labels = (
        ddl.Regression(mlp((4,), 1), loss=loss, huber_delta=0.5),
        RANDOM.normal(size=shape),
    )
    found, error = of(task, image=X, label=labels), task.model(X).numpy()[:, 0] - labels.ravel()
    np.testing.assert_allclose(found.loss, function(error), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.metrics["mean_absolute_error"], abs(error), rtol=1e-4)
    assert {"mean_squared_error", "root_mean_squared_error", "r2"} <= found.metrics.keys()


IMAGES, PIXELS = np.zeros((2, 8, 8, 1), np.uint8), np.zeros((2, 8, 8), np.int64)
TOKENS, TWO = np.zeros((2, 6), np.int64), np.array([0, 1])
MASKING = ddl.layers.TokenMasking(10, 10)


def image_model(outputs=3):
    return mlp((8, 8, 1), outputs)


def table():
    return table_mlp(2, numbers=2, categories={"colour": 3})


BAD_DATA = [
    (ddl.LanguageModel, small_gpt, {"token": TOKENS}, "no feature 'next_token', only token"),
    (
        ddl.LanguageModel,
        small_gpt,
        {"token": TOKENS[:, 1:], "next_token": TOKENS[:, 1:]},
        r"'token' of the data has shape \(5,\), but the model 'gpt' takes \(6,\)",
    ),
    (
        ddl.LanguageModel,
        small_gpt,
        {"token": TOKENS, "next_token": TOKENS + 11 * TWO[:, None]},
        r"from 0 to 10, got 0 to 11 \(first in example 1\). Set the model's vocabulary",
    ),
    (
        ddl.LanguageModel,
        small_gpt,
        {"token": TOKENS, "next_token": TOKENS, "segment": TOKENS},
        r"'gpt' takes no 'segment', .* Build it with packed=True",
    ),
    (
        ddl.LanguageModel,
        small_gpt,
        {"token": TOKENS, "next_token": TOKENS * 1.0},
        "must be integers.*'next_token': float64",
    ),
    (
        lambda model: ddl.MaskedLanguageModel(model, MASKING),
        small_bert,
        {"token": TOKENS, "length": np.ones(2, int)},
        r"'bert' takes no 'segment', .* Build it with packed=True",
    ),
    (
        ddl.Segmentation,
        of_pixels,
        {"image": IMAGES, "label": PIXELS[:, 0]},
        r"shape \(n, 8, 8\), got .* of shape \(n, 8\). Resize the masks with the images",
    ),
    (
        ddl.Segmentation,
        of_pixels,
        {"image": IMAGES, "label": PIXELS + 255},
        "from 0 to 3, got 255 to 255 .*Segmentation.ignored",
    ),
    (
        ddl.Classification,
        image_model,
        {"image": IMAGES, "label": np.array(["cat", "dog"])},
        "integers from 0 to 2, .*'label': text .* Number the classes",
    ),
    (
        ddl.Classification,
        image_model,
        {"image": IMAGES, "label": np.eye(4)[TWO]},
        r"one-hot rows, shape \(n, 3\), got feature 'label': float64 of shape \(n, 4\)",
    ),
    (
        ddl.MultiLabel,
        image_model,
        {"image": IMAGES, "label": TWO},
        r"0 or 1 for each class, shape \(n, 3\), got .* of shape \(n,\)",
    ),
    (
        ddl.MultiLabel,
        image_model,
        {"image": IMAGES, "label": np.array([[0, 1, 1], [0, 2, 1]])},
        r"must be 0 or 1, got \[0, 2, 1\] in example 1",
    ),
    (
        ddl.Classification,
        table,
        {"numbers": np.zeros((2, 2)), "label": TWO},
        "'table_mlp' of Classification needs numbers, colour, but .* only the features numbers",
    ),
    (
        ddl.Classification,
        lambda: table_mlp(2, categories={"colour": 3}),
        {"colour": TWO + 2, "label": TWO},
        r"'colour' must be from 0 to 2, got 2 to 3 .* Give the table 'colour_vectors'",
    ),
]


@pytest.mark.parametrize(("task", "model", "data", "message"), BAD_DATA)
def test_data_that_do_not_fit(task, model, data, message):
    with pytest.raises(DataError, match=message):
        task(model()).check(Source(data))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ddl.LanguageModel(mlp((4,), 3)), r"but 'mlp' returns \(None, 3\)"),
        (
            lambda: ddl.MaskedLanguageModel(small_bert(), ddl.layers.TokenMasking(11, 11)),
            "vocabulary of 'bert' must be at least 12, .* but its logits have 11",
        ),
        (
            lambda: ddl.Classification(table(), augmentations=[tf.identity]),
            "need a model with one input, but 'table_mlp' takes a dict",
        ),
        (lambda: ddl.Classification(mlp((4,), 3), top_k=0), "at least 1, or None, got 0"),
        (lambda: ddl.Segmentation(mlp((4,), 3)), r"but 'mlp' returns \(None, 3\)"),
        (lambda: ddl.MultiLabel(small_gpt()), r"but 'gpt' returns \(None, 6, 11\)"),
        (lambda: ddl.MultiLabel(mlp((4,), 3), threshold=1.0), "between 0 and 1, .* with 1.0"),
        (lambda: ddl.Regression(mlp((4,), 1), loss="cubed"), "'squared', 'absolute' or 'huber'"),
        (lambda: ddl.Regression(mlp((4,), 1), huber_delta=0), "above 0, got 0"),
        (
            lambda: of(ddl.Classification(mlp((4,), 3)), image=X, label=np.zeros((6, 2, 2), int)),
            r"logits of the shape of the labels, \(6, 2, 2\), .* but 'mlp' returns \(6, 3\)",
        ),
        (
            lambda: of(ddl.Regression(mlp((4,), 3)), image=X, label=np.ones(6)),
            r"needs outputs in the shape of the labels, got outputs \(6, 3\) for labels \(6,\)",
        ),
    ],
)
def test_models_and_arguments_that_do_not_fit(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


class Own:
    def __init__(self):
        self.model = keras.Sequential([])

    def per_example(self, features):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (keras.Sequential([], name="net"), "the Keras model 'net' alone, .* Pass ddl.Classif"),
        (Own, "got the class Own. Create it, with parentheses"),
        ("cnn", "str has no `model`"),
        (
            Own(),
            r"Own.per_example must be a function of \(features, training\), got .*\(features\)",
        ),
    ],
)
def test_what_is_no_task(task, message):
    with pytest.raises(ConfigError, match=message):
        ddl.Trainer(task, None, None, global_batch_size=8)
