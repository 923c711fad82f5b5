"""Losses against their definitions, and data that the tasks refuse."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.data import Source
from ddl.data.checks import data_errors
from ddl.errors import ConfigError, DataError
from ddl.models import bert, gpt, mlp, table_mlp

RANDOM = np.random.default_rng(0)


def small_gpt():
    return gpt(11, 6, width=8, heads=2, blocks=1, dropout=0.0)


def small_bert():
    return bert(11, 6, width=8, heads=2, blocks=1, dropout=0.0)


def of_pixels():
    layers = [keras.layers.Rescaling(1 / 255), keras.layers.Conv2D(4, 3, padding="same")]
    return keras.Sequential([keras.Input((8, 8, 1), name="image"), *layers], name="pixels")


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


def test_a_masked_language_model_predicts_the_masked_tokens():
    task = ddl.MaskedLanguageModel(small_bert(), ddl.layers.TokenMasking(10, 10, rate=0.5))
    tokens, weights = RANDOM.integers(0, 10, (40, 6)), RANDOM.uniform(0.5, 2, (40, 6))
    weights[:, :2] = 0
    found = task.per_example(of_tensors({"token": tokens, "mask_weight": weights}), False)
    masked = found.weight.numpy() > 0
    assert not masked[:, :2].any()
    assert abs(masked[:, 2:].mean() - 0.5) < 0.15
    np.testing.assert_allclose(found.weight, np.where(masked, weights, 0), rtol=1e-6)
    # Tokens to predict are those of the data, not those that the model sees: they are random or the
    # mask in nine of ten cases, so that a model of the right tokens would have another loss.
    seen = task.masking(tf.constant(tokens)).token.numpy()
    assert (seen != tokens).any()
    assert found.loss.shape == tokens.shape
    shares = probabilities(task.predict({"token": tf.constant(tokens)}).numpy())
    assert shares.shape == (40, 6, 11)

    nothing = ddl.MaskedLanguageModel(small_bert(), ddl.layers.TokenMasking(10, 10, rate=1e-9))
    found = nothing.per_example(of_tensors({"token": tokens}), False)
    own = np.take_along_axis(probabilities(nothing.model(tokens).numpy()), tokens[..., None], -1)[
        ..., 0
    ]
    np.testing.assert_allclose(found.loss, -np.log(own), rtol=1e-4)
    assert not found.weight.numpy().any()


def test_padding_is_never_masked():
    model = bert(11, 6, width=8, heads=2, blocks=1, dropout=0.0, packed=True)
    task = ddl.MaskedLanguageModel(model, ddl.layers.TokenMasking(10, 10, rate=1.0))
    tokens, lengths = RANDOM.integers(0, 10, (3, 6)), np.array([6, 1, 4])
    inside = np.arange(6) < lengths[:, np.newaxis]
    found = task.per_example(of_tensors({"token": tokens, "length": lengths}), True)
    np.testing.assert_array_equal(found.weight, inside)
    rows = {"segment": inside.astype(int), "position": np.tile(np.arange(6), (3, 1))}
    logits = [
        task.predict(of_tensors({"token": tokens, **more})) for more in (rows, {"length": lengths})
    ]
    np.testing.assert_array_equal(*logits)


def test_segmentation_weighs_classes_and_leaves_pixels_out():
    task = ddl.Segmentation(of_pixels(), ignored=255, class_weights=[1, 2, 0, 4])
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
    assert {"root_mean_squared_error", "r2"} <= found.metrics.keys()


def test_regression_compares_shapes_that_only_the_first_call_tells():
    class Unbuilt(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(3)

        def call(self, inputs, training=None):
            return self.dense(inputs)

    features = {"image": np.ones((6, 4)), "label": np.ones(6)}
    task = ddl.Regression(Unbuilt())
    task.check(Source(features))
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
LABELS = np.array([0, 1])
MASKING = ddl.layers.TokenMasking(10, 10)


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
            lambda: ddl.LanguageModel(small_gpt()),
            {"token": TOKENS, "next_token": TOKENS, "token_weight": np.full((2, 6), b"1")},
            "'token_weight' must be numbers, got text",
        ),
        (
            lambda: ddl.MaskedLanguageModel(small_bert(), MASKING),
            {"token": TOKENS, "mask_weight": np.ones(2)},
            r"'mask_weight' must have a value for each token, shape \(6,\), got \(\)",
        ),
        (
            lambda: ddl.MaskedLanguageModel(small_bert(), MASKING),
            {"token": TOKENS, "length": np.ones(2, int)},
            r"'bert' takes no 'segment', .* Build it with bert\(…, packed=True\)",
        ),
        (
            lambda: ddl.MaskedLanguageModel(small_bert(), MASKING),
            {"token": TOKENS, "length": np.ones((2, 1), int)},
            r"'length' must be an integer for each example.*got int64 of shape \(1,\)",
        ),
        (
            lambda: ddl.MaskedLanguageModel(small_bert(), MASKING),
            {"token": TOKENS + 11},
            r"Tokens \(feature 'token'\) must be from 0 to 10, got 11 to 11",
        ),
        (
            lambda: ddl.Segmentation(of_pixels()),
            {"image": IMAGES, "label": np.zeros((2, 8, 8, 4))},
            r"an integer for each pixel, shape \(8, 8\), got float64 of shape \(8, 8, 4\).*argmax",
        ),
        (
            lambda: ddl.Segmentation(of_pixels()),
            {"image": IMAGES, "label": PIXELS[:, 0]},
            r"shape \(8, 8\), got \w+ of shape \(8,\). Resize the masks with the images",
        ),
        (
            lambda: ddl.Classification(mlp((8, 8, 1), 3)),
            {"image": IMAGES, "label": PIXELS},
            r"a one-hot row for each example, but feature 'label' has shape \(8, 8\). Reshape it",
        ),
        (
            lambda: ddl.Segmentation(of_pixels()),
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
            lambda: ddl.MultiLabel(mlp((8, 8, 1), 3)),
            {"image": IMAGES, "label": np.full((2, 3), b"0")},
            r"0 or 1 for each class, shape \(3,\), got string",
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
        (
            lambda: ddl.Classification(table_mlp(2, numbers=2, categories={"colour": 3})),
            {"numbers": np.zeros((2, 4)), "colour": LABELS, "label": LABELS},
            r"'numbers' of the data has shape \(4,\), but the model 'table_mlp' takes \(2,\)",
        ),
        (
            lambda: ddl.Classification(table_mlp(2, categories={"colour": 3})),
            {"colour": LABELS + 2, "label": LABELS},
            r"'colour' must be from 0 to 2, got 2 to 3 \(first in example 1\). Give the table "
            "'colour_vectors' of 'table_mlp' more rows",
        ),
        (
            lambda: ddl.Classification(
                table_mlp(2, categories={"colour": 3}, max_table_parts=2, min_table_part_bytes=32)
            ),
            {"colour": LABELS + 2, "label": LABELS},
            r"'colour' must be from 0 to 2, got 2 to 3 \(first in example 1\)",
        ),
        (
            lambda: ddl.Classification(table_mlp(2, categories={"colour": 3})),
            {"colour": LABELS + 0.5, "label": LABELS},
            "'colour' of the data must be integers, as the model 'table_mlp' takes them, got float",
        ),
    ],
)
def test_data_that_do_not_fit(task, data, message):
    with pytest.raises(DataError, match=message):
        task().check(Source(data))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ddl.LanguageModel(mlp((4,), 3)), r"but 'mlp' returns \(None, 3\)"),
        (
            lambda: ddl.MaskedLanguageModel(mlp((4,), 3), MASKING),
            r"but 'mlp' returns \(None, 3\). .* as ddl.models.bert does",
        ),
        (
            lambda: ddl.MaskedLanguageModel(small_bert(), ddl.layers.TokenMasking(11, 11)),
            "vocabulary of 'bert' must be at least 12, .* but its logits have 11",
        ),
        (
            lambda: ddl.MaskedLanguageModel(small_bert(), keras.layers.Dropout(0.1)),
            "masking must be a ddl.layers.TokenMasking, got .* Pass an instance",
        ),
        (
            lambda: ddl.Classification(
                table_mlp(2, numbers=2), augmentations=[keras.layers.RandomFlip()]
            ),
            "need a model with one input, but 'table_mlp' takes numbers",
        ),
        (
            lambda: table_mlp(2, numbers=2, numbers_deviation=[1.0]),
            r"for each of the 2 numbers, got \[0.0, 0.0\] and \[1.0\]",
        ),
        (lambda: ddl.Segmentation(mlp((4,), 3)), r"but 'mlp' returns \(None, 3\)"),
        (lambda: ddl.MultiLabel(small_gpt()), r"but 'gpt' returns \(None, 6, 11\)"),
        (lambda: ddl.MultiLabel(mlp((4,), 3), threshold=1.0), "between 0 and 1, got 1.0"),
        (lambda: ddl.MultiLabel(mlp((4,), 3), positive_weights=[1]), "for each class"),
        (lambda: ddl.Segmentation(of_pixels(), class_weights=[1, -1, 1, 1]), "at least 0"),
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


class Unbuilt(keras.Model):
    """A model whose shapes only the first call tells."""

    def __init__(self, *layers):
        super().__init__(name="unbuilt")
        self.sequence = layers

    def call(self, inputs, training=None):
        for layer in self.sequence:
            inputs = layer(inputs)
        return [inputs] if not self.sequence else inputs


@pytest.mark.parametrize(
    ("task", "data", "message"),
    [
        (
            lambda: ddl.MultiLabel(Unbuilt(keras.layers.Dense(3))),
            {"image": IMAGES, "label": np.zeros((2, 3))},
            r"MultiLabel needs .* \[batch, classes\], here \(batch, 3\), but 'unbuilt' returns "
            r"shape \(batch, 8, 8, 3\)",
        ),
        (
            lambda: ddl.MultiLabel(Unbuilt()),
            {"image": IMAGES, "label": np.zeros((2, 3))},
            "'unbuilt' returns a list",
        ),
        (
            lambda: ddl.Regression(Unbuilt()),
            {"image": IMAGES, "label": np.zeros(2)},
            "Regression needs a model with one output, but 'unbuilt' returns a list",
        ),
        (
            lambda: ddl.LanguageModel(
                Unbuilt(keras.layers.Embedding(11, 4), keras.layers.Conv1D(11, 2))
            ),
            {"token": TOKENS, "next_token": TOKENS},
            r"LanguageModel needs .*here \(batch, 6, any\), but .* returns shape \(batch, 5, 11\)",
        ),
        (
            lambda: ddl.Distillation(ddl.Classification(mlp((8, 8, 1), 3)), Unbuilt()),
            {"image": IMAGES, "label": np.array([0, 1])},
            r"\(the teacher\), here \(batch, 3\), but 'unbuilt' returns a list",
        ),
    ],
    ids=["rank", "list", "regression", "positions", "teacher"],
)
def test_outputs_that_do_not_fit_are_told_with_their_shapes(task, data, message):
    made = task()
    made.check(Source(data))
    with pytest.raises(ConfigError, match=message):
        made.per_example(of_tensors(data), True)


def test_labels_that_no_check_has_seen_are_refused_by_the_update():
    """Streams have no arrays to check before training."""
    task = ddl.MultiLabel(mlp((8, 8, 1), 3))
    features = of_tensors({"image": IMAGES, "label": np.array([[0, 1, 1], [0, -1, 1]])})
    with pytest.raises(DataError, match="'label' has a value other than 0 and 1"), data_errors():
        task.per_example(features, True)


def test_what_is_beyond_a_table_is_an_error_of_the_data():
    task = ddl.LanguageModel(small_gpt())
    features = {"token": TOKENS + 12, "next_token": TOKENS}

    @tf.function
    def update(given):
        return task.per_example(given, False).loss

    with pytest.raises(DataError, match=r"12 is not in \[0, 11\)"), data_errors():
        update(of_tensors(features))
