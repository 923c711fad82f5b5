import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import logging

from ddl.data import Source
from ddl.errors import ConfigError, DataError
from ddl.models import mlp
from ddl.tasks import Classification

IMAGES = np.zeros((6, 4, 4, 1), np.uint8)
LABELS = np.array([0, 1, 2, 0, 1, 2])


def task(**arguments) -> Classification:
    return Classification(mlp((4, 4, 1), 3, hidden_units=(5,)), **arguments)


def test_integer_and_one_hot_labels_give_the_same():
    images = tf.random.stateless_uniform([6, 4, 4, 1], [1, 2])
    one = task(top_k=2)
    by_integers = one.per_example({"image": images, "label": tf.constant(LABELS)}, False)
    by_rows = one.per_example({"image": images, "label": tf.one_hot(LABELS, 3)}, False)
    np.testing.assert_allclose(by_integers.loss, by_rows.loss, rtol=1e-6)
    for name in ("accuracy", "top_2_accuracy"):
        np.testing.assert_array_equal(by_integers.metrics[name], by_rows.metrics[name])
    assert by_integers.loss.shape == (6,)


@pytest.mark.parametrize("one_hot", [False, True])
def test_label_smoothing_is_that_of_keras(one_hot):
    reference = keras.losses.CategoricalCrossentropy(
        from_logits=True, label_smoothing=0.1, reduction=None
    )
    made = task(label_smoothing=0.1)
    images = tf.random.stateless_uniform([6, 4, 4, 1], [1, 2], maxval=255.0)
    label = tf.one_hot(LABELS, 3) if one_hot else tf.constant(LABELS)
    loss = made.per_example({"image": images, "label": label}, False).loss
    expected = reference(tf.one_hot(LABELS, 3), made.model(images))
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


@pytest.mark.parametrize("label_smoothing", [1.0, -0.1])
def test_label_smoothing_out_of_range(label_smoothing):
    with pytest.raises(ConfigError, match="label_smoothing must be"):
        task(label_smoothing=label_smoothing)


def test_a_keras_loss():
    loss = keras.losses.CategoricalCrossentropy(
        from_logits=True, label_smoothing=0.1, reduction=None
    )
    features = {"image": tf.constant(IMAGES), "label": tf.one_hot(LABELS, 3)}
    assert task(loss=loss).per_example(features, False).loss.shape == (6,)


def test_a_loss_that_reduces_is_refused():
    with pytest.raises(ConfigError, match="reduction=None"):
        task(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))


@pytest.mark.parametrize("labels", [LABELS, LABELS.astype(np.uint8), np.eye(3)[LABELS]])
def test_good_labels_pass(labels):
    task().check(Source(dict(image=IMAGES, label=labels)))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (LABELS / 255, "from 0 to 2, got float64.*scaled with the inputs. Leave"),
        (LABELS.astype(np.float32), "from 0 to 2, got float32. Convert them"),
        (LABELS + 1, r"from 0 to 2, since the model has 3 classes, got 1 to 3 .first at example 2"),
        (LABELS - 1, "from 0 to 2, .* got -1 to 1"),
        (LABELS[:, np.newaxis], r"shape \(n,\), got \(n, 1\)"),
        (np.array(["cat", "dog"] * 3), "feature 'label' is text. Number the classes: np.unique"),
        (np.eye(4)[LABELS], "the model's 3 classes, got 4"),
        (np.ones((6, 3)), "must be one-hot, got .* in example 0.* use ddl.MultiLabel"),
        (np.eye(3)[LABELS] / 2, "must be one-hot, got .* in example 0"),
    ],
)
def test_bad_labels_are_told(labels, message):
    with pytest.raises(DataError, match=message):
        task().check(Source(dict(image=IMAGES, label=labels)))


def test_images_of_another_shape():
    with pytest.raises(DataError, match=r"shape \(5, 4, 1\).*takes \(4, 4, 1\)"):
        task().check(Source(dict(image=np.zeros((6, 5, 4, 1)), label=LABELS)))


def test_text_is_no_image():
    with pytest.raises(DataError, match="Feature 'image' .* is text, but the model .* numbers"):
        task().check(Source(dict(image=np.array(["a"] * 6), label=LABELS)))


def test_a_missing_feature():
    with pytest.raises(DataError, match="no feature 'label', only image, target"):
        task().check(Source(dict(image=IMAGES, target=LABELS)))


@pytest.mark.parametrize("as_layer", [True, False])
def test_a_softmax_before_a_loss_from_logits_is_warned_of(as_layer, monkeypatch):
    warnings = []
    monkeypatch.setattr(logging, "warning", lambda text, *args: warnings.append(text % args))
    inputs = keras.Input((4, 4, 1))
    x = keras.layers.Dense(3, activation=None if as_layer else "softmax")(
        keras.layers.Flatten()(inputs)
    )
    model = keras.Model(inputs, keras.layers.Softmax()(x) if as_layer else x)
    Classification(model)
    assert len(warnings) == 1
    assert "Remove the softmax" in warnings[0]
    Classification(model, loss=keras.losses.SparseCategoricalCrossentropy(reduction=None))
    assert len(warnings) == 1


@pytest.mark.parametrize("model", [None, "cnn", keras.Sequential])
def test_what_is_no_model(model):
    with pytest.raises(ConfigError, match="Classification.model must be a Keras model, got"):
        Classification(model)


def test_a_model_with_several_outputs_or_an_image():
    inputs = keras.Input((4, 4, 1))
    image = keras.layers.Conv2D(3, 1)(inputs)
    features = {"image": tf.zeros([2, 4, 4, 1]), "label": tf.constant([0, 1])}
    for outputs, got in [(image, r"returns \(2, 4, 4, 3\)"), ([image, image], "returns a list")]:
        made = Classification(keras.Model(inputs, outputs))
        with pytest.raises(ConfigError, match=got):
            made.per_example(features, training=False)
