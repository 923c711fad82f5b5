"""Losses against their definitions, and data that the tasks refuse."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.data import ArraySource
from ddl.errors import ConfigError, DataError
from ddl.models import gpt, mlp, table_mlp, unet

RANDOM = np.random.default_rng(0)


def small_gpt():
    return gpt(11, 6, width=8, heads=2, blocks=1, dropout=0.0)


def small_unet():
    return unet((8, 8, 1), 4, widths=(4, 6))


def probabilities(logits):
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def of_tensors(features):
    return {name: tf.constant(value) for name, value in features.items()}


def test_a_language_model_has_a_loss_for_each_token():
    task = ddl.LanguageModel(small_gpt())
    tokens = RANDOM.integers(0, 11, (3, 7))
    features = {"token": tokens[:, :-1], "next_token": tokens[:, 1:].astype("i4")}
    found = task.per_example(of_tensors(features), False)
    logits = task.model(tokens[:, :-1]).numpy()
    own = np.take_along_axis(probabilities(logits), tokens[:, 1:, None], -1)[..., 0]
    np.testing.assert_allclose(found.loss, -np.log(own), rtol=1e-4)
    np.testing.assert_array_equal(found.metrics["accuracy"], logits.argmax(-1) == tokens[:, 1:])
    assert found.weight is None
    weights = RANDOM.uniform(size=(3, 6))
    found = task.per_example(of_tensors({**features, "token_weight": weights}), False)
    np.testing.assert_array_equal(found.weight, weights)


def test_segmentation_weighs_classes_and_leaves_pixels_out():
    task = ddl.Segmentation(small_unet(), ignored=255, class_weights=[1, 2, 0, 4])
    labels = RANDOM.integers(0, 4, (2, 8, 8))
    labels[0, :4] = 255
    images = RANDOM.integers(0, 256, (2, 8, 8, 1), np.uint8)
    found = task.per_example(of_tensors({"image": images, "label": labels}), False)
    weights = np.array([1, 2, 0, 4])[np.where(labels == 255, 0, labels)] * (labels != 255)
    np.testing.assert_array_equal(found.weight, weights)
    shares = probabilities(task.model(images).numpy())
    own = np.take_along_axis(shares, np.where(labels == 255, 0, labels)[..., None], -1)[..., 0]
    np.testing.assert_allclose(found.loss, -np.log(own), rtol=1e-4)
    assert task.predict({"image": images}).shape == (2, 8, 8)


def test_several_labels():
    task = ddl.MultiLabel(mlp((4,), 3), positive_weights=[1, 2, 3], threshold=0.3)
    features = {"image": RANDOM.normal(size=(5, 4)).astype("f4") * 500}
    features["label"] = RANDOM.integers(0, 2, (5, 3))
    found = task.per_example(of_tensors(features), False)
    shares = task.predict(features).numpy().astype("f8")
    labels = features["label"]
    losses = -(labels * [1, 2, 3] * np.log(shares) + (1 - labels) * np.log(1 - shares))
    np.testing.assert_allclose(found.loss, losses.mean(1), rtol=1e-4)
    right = (shares >= 0.3) == labels
    np.testing.assert_allclose(found.metrics["binary_accuracy"], right.mean(1), rtol=1e-6)
    np.testing.assert_array_equal(found.metrics["exact_match"], right.all(1))


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
    task = ddl.Regression(mlp((4,), 1), loss=loss, huber_delta=0.5)
    features = {"image": RANDOM.normal(size=(6, 4)), "label": RANDOM.normal(size=shape)}
    found = task.per_example(of_tensors(features), False)
    error = task.model(features["image"]).numpy()[:, 0] - features["label"].reshape(-1)
    np.testing.assert_allclose(found.loss, function(error), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.metrics["mean_absolute_error"], abs(error), rtol=1e-4)
    np.testing.assert_allclose(found.metrics["mean_squared_error"], error**2, rtol=1e-4)


def test_regression_compares_shapes_that_only_the_first_call_tells():
    class Unbuilt(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(3)

        def call(self, inputs, training=None):
            return self.dense(inputs)

    features = {"image": np.ones((6, 4)), "label": np.ones(6)}
    task = ddl.Regression(Unbuilt())
    task.check(ArraySource(features))
    with pytest.raises(DataError, match=r"model's outputs, \(3,\), got \(\)"):
        task.per_example(of_tensors(features), False)


def test_distillation_adds_the_teachers_part():
    student, teacher = ddl.Classification(mlp((4,), 3)), mlp((4,), 3)
    task = ddl.Distillation(student, teacher, temperature=2.0, share=0.75)
    features = {"image": RANDOM.normal(size=(6, 4)) * 500, "label": RANDOM.integers(0, 3, 6)}
    found = task.per_example(of_tensors(features), True)
    ours, theirs = (m(features["image"]).numpy().astype("f8") for m in (student.model, teacher))
    own = np.log(probabilities(ours))[np.arange(6), features["label"]]
    distilled = -(probabilities(theirs / 2) * np.log(probabilities(ours / 2))).sum(1)
    np.testing.assert_allclose(found.loss, 0.25 * -own + 0.75 * 4 * distilled, rtol=1e-4)
    np.testing.assert_allclose(found.metrics["label_loss"], -own, rtol=1e-4)
    assert not teacher.trainable_variables


IMAGES = np.zeros((2, 8, 8, 1), np.uint8)
PIXELS = np.zeros((2, 8, 8), np.int64)
TOKENS = np.zeros((2, 6), np.int64)


@pytest.mark.parametrize(
    ("task", "data", "message"),
    [
        (
            lambda: ddl.LanguageModel(small_gpt()),
            {"token": TOKENS},
            "no feature 'next_token', only token.*input_name and label_name of LanguageModel",
        ),
        (
            lambda: ddl.LanguageModel(small_gpt()),
            {"token": TOKENS[:, 1:], "next_token": TOKENS[:, 1:]},
            r"'token' of the data has shape \(5,\), but the model 'gpt' takes \(6,\)",
        ),
        (
            lambda: ddl.LanguageModel(small_gpt()),
            {"token": TOKENS, "next_token": TOKENS + np.array([[0] * 6, [11] * 6])},
            r"Tokens \(feature 'next_token'\) must be from 0 to 10, got 0 to 11 \(first in example "
            r"1\). Set the model's vocabulary",
        ),
        (
            lambda: ddl.LanguageModel(small_gpt()),
            {"token": TOKENS, "next_token": TOKENS, "token_weight": np.ones((2, 5))},
            r"'token_weight' must have a value for each token, shape \(6,\), got \(5,\)",
        ),
        (
            lambda: ddl.LanguageModel(small_gpt()),
            {"token": TOKENS, "next_token": TOKENS, "segment": TOKENS},
            r"'gpt' takes no 'segment', .* Build it with gpt\(…, packed=True\)",
        ),
        (
            lambda: ddl.LanguageModel(small_gpt()),
            {"token": TOKENS, "next_token": TOKENS * 1.0},
            "'next_token' must be integers",
        ),
        (
            lambda: ddl.Segmentation(small_unet()),
            {"image": IMAGES, "label": np.zeros((2, 8, 8, 4))},
            r"an integer for each pixel, shape \(8, 8\), got float64 of shape \(8, 8, 4\)",
        ),
        (
            lambda: ddl.Segmentation(small_unet()),
            {"image": IMAGES, "label": PIXELS + 255},
            "Labels of pixels must be from 0 to 3, got 255 to 255 .*Segmentation.ignored",
        ),
        (
            lambda: ddl.MultiLabel(mlp((8, 8, 1), 3)),
            {"image": IMAGES, "label": np.array([0, 1])},
            r"0 or 1 for each class, shape \(3,\), got int64 of shape \(\)",
        ),
        (
            lambda: ddl.MultiLabel(mlp((8, 8, 1), 3)),
            {"image": IMAGES, "label": np.array([[0, 1, 1], [0, 2, 1]])},
            r"must be 0 or 1, got \[0, 2, 1\] in example 1",
        ),
        (
            lambda: ddl.Regression(mlp((8, 8, 1), 2)),
            {"image": IMAGES, "label": np.zeros(2)},
            r"the shape of the model's outputs, \(2,\), got \(\)",
        ),
        (
            lambda: ddl.Regression(table_mlp(1, numbers=2, categories={"colour": 3})),
            {"numbers": np.zeros((2, 2)), "label": np.zeros(2)},
            "takes the features numbers, colour, but the data have no 'colour', only numbers",
        ),
    ],
)
def test_data_that_do_not_fit(task, data, message):
    with pytest.raises(DataError, match=message):
        task().check(ArraySource(data))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ddl.LanguageModel(mlp((4,), 3)), r"but 'mlp' returns \(None, 3\)"),
        (lambda: ddl.Segmentation(mlp((4,), 3)), r"but 'mlp' returns \(None, 3\)"),
        (lambda: ddl.MultiLabel(small_gpt()), r"but 'gpt' returns \(None, 6, 11\)"),
        (lambda: ddl.MultiLabel(mlp((4,), 3), threshold=1.0), "between 0 and 1, got 1.0"),
        (lambda: ddl.MultiLabel(mlp((4,), 3), positive_weights=[1]), "for each class"),
        (lambda: ddl.Segmentation(small_unet(), class_weights=[1, -1, 1, 1]), "at least 0"),
        (lambda: ddl.Regression(mlp((4,), 1), loss="cubed"), "'squared', 'absolute' or 'huber'"),
        (lambda: ddl.Regression(mlp((4,), 1), loss="huber", huber_delta=0), "above 0, got 0"),
        (lambda: ddl.Regression(keras.layers.Dense(1)), "must be a Keras model"),
        (
            lambda: ddl.Distillation(ddl.Classification(mlp((4,), 3)), mlp((4,), 2)),
            r"the student's classes, \(3,\), but 'mlp' returns \(2,\)",
        ),
        (
            lambda: ddl.Distillation(ddl.Classification(mlp((4,), 3)), mlp((4,), 3), share=2),
            "from 0 to 1, got 4.0 and 2",
        ),
    ],
)
def test_models_and_arguments_that_do_not_fit(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
