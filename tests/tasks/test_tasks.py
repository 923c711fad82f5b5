"""Losses and metrics of the tasks against their definitions, and data that they refuse."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.data import Source
from ddl.data.checks import data_errors
from ddl.errors import DataError
from ddl.models import bert, gpt, mlp, table_mlp
from tests.conftest import microbatch

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(6, 4)).astype("f4")
LABELS = np.array([0, 1, 2, 0, 1, 2])


def small_gpt():
    return gpt(11, 6, width=8, heads=2, blocks=1, dropout=0.0)


def small_bert(**options):
    return bert(11, 6, width=8, heads=2, blocks=1, dropout=0.0, **options)


def of_pixels():
    convolution = keras.layers.Conv2D(4, 3, padding="same")
    return keras.Sequential([keras.Input((8, 8, 1)), convolution])


def log_softmax(logits):
    return tf.nn.log_softmax(np.asarray(logits, "f8")).numpy()


def own(values, labels):
    return np.take_along_axis(values, labels[..., None], -1)[..., 0]


def of(task, **features):
    return task.per_example({name: tf.constant(value) for name, value in features.items()}, False)


def test_integer_and_one_hot_labels_give_the_same():
    task = ddl.Classification(mlp((4,), 3), top_k=2)
    integers, rows = (of(task, image=X, label=x) for x in (LABELS, np.eye(3)[LABELS]))
    np.testing.assert_allclose(integers.loss, rows.loss, rtol=1e-5)
    np.testing.assert_allclose(integers.loss, -own(log_softmax(task.model(X)), LABELS), rtol=1e-4)
    smooth = ddl.Classification(task.model, label_smoothing=0.3)
    integers_, rows_ = (of(smooth, image=X, label=x).loss for x in (LABELS, np.eye(3)[LABELS]))
    np.testing.assert_allclose(integers_, rows_, rtol=1e-5)
    with pytest.raises(tf.errors.InvalidArgumentError, match="label value of 3"):
        of(smooth, image=X, label=LABELS + 1)
    for name in ("accuracy", "top_2_accuracy"):
        np.testing.assert_array_equal(integers.metrics[name], rows.metrics[name])
    given = {"from_logits": True, "ignore_class": 0, "reduction": None}
    ignoring = keras.losses.SparseCategoricalCrossentropy(**given)
    found = of(ddl.Classification(task.model, loss=ignoring), image=X, label=LABELS)
    np.testing.assert_array_equal(found.weight, LABELS != 0)


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


OF_CLASSES = {1: 2, np.int64(2): np.float32(0)}  # as of np.unique


def test_segmentation_weighs_classes_and_leaves_pixels_out():
    task = ddl.Segmentation(of_pixels(), ignored=255, class_weight=OF_CLASSES)
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
def test_regression_compares_each_output_with_its_label(shape):
    task, labels = ddl.Regression(mlp((4,), 1)), RANDOM.normal(size=shape)
    found, error = of(task, image=X, label=labels), task.model(X).numpy()[:, 0] - labels.ravel()
    np.testing.assert_allclose(found.loss, error**2, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.metrics["mean_absolute_error"], abs(error), rtol=1e-4)
    assert {"mean_squared_error", "root_mean_squared_error", "r2"} <= found.metrics.keys()


TOKENS, TWO = np.zeros((2, 6), np.int64), np.array([0, 1])


BAD_DATA = [
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
        lambda model: ddl.MaskedLanguageModel(model, ddl.layers.TokenMasking(10, 10)),
        small_bert,
        {"token": TOKENS, "length": TWO},
        "'length', which MaskedLanguageModel does not read, .*'segment' or 'mask_weight'",
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
