"""Losses, metrics, data and optimizers as Keras users hand them over."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.errors import ConfigError, DataError
from tests.conftest import make_strategy

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(22, 3)).astype("f4")
Y = X.sum(1).astype("f4")
CLASSES = (Y > 0).astype("i8") + (Y > 1)
WEIGHT = RANDOM.uniform(0.5, 2, 22).astype("f4")
PARTS = {"a": X[:, :2], "b": X[:, 2:]}


def model(outputs=1, activation=None):
    layers = [keras.Input((3,)), keras.layers.Dense(outputs, activation)]
    return keras.Sequential(layers)


def evaluated(task, data, replicas=1):
    """The figures of untrained weights, and the outputs."""
    kind = "mirrored" if replicas > 1 else "one_device"
    with make_strategy(kind, replicas).scope():
        task = task()
        trainer = ddl.Trainer(task, "sgd", data, eval_data=data, global_batch_size=8)
    return trainer.evaluate(), trainer.predict(data)


@pytest.mark.parametrize(
    ("loss", "outputs", "activation", "labels", "metrics"),
    [
        ("mse", 1, None, Y, ["mae", "mean_squared_error"]),
        ("binary_crossentropy", 1, "sigmoid", CLASSES > 0, ["accuracy"]),
        ("sparse_categorical_crossentropy", 3, "softmax", CLASSES, ["accuracy"]),
        ("categorical_crossentropy", 3, "softmax", np.eye(3, dtype="f4")[CLASSES], ["accuracy"]),
    ],
)
def test_figures_are_keras_ones(loss, outputs, activation, labels, metrics):
    keras.utils.set_random_seed(1)
    labels = labels.astype("f4") if labels.dtype == bool else labels
    found, predicted = evaluated(
        lambda: ddl.Supervised(model(outputs, activation), loss, metrics=metrics), (X, labels), 2
    )
    own = keras.Sequential([keras.Input((outputs,)), keras.layers.Identity()])
    own.compile(loss=loss, metrics=metrics)
    expected = own.evaluate(predicted, labels, batch_size=22, verbose=0, return_dict=True)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-5), name


def error_of(labels, outputs):
    return tf.abs(labels - outputs)[:, 0]


@pytest.mark.parametrize(
    "data",
    [
        (X, Y, WEIGHT),
        {"image": X, "label": Y, "weight": WEIGHT},
        ({"image": X}, Y, WEIGHT),
        tf.data.Dataset.from_tensor_slices((X, Y, WEIGHT)),
        tf.data.Dataset.from_tensor_slices(({"image": X}, Y, WEIGHT)),
    ],
    ids=["tuple", "dict", "dict and labels", "stream", "stream of dicts"],
)
def test_forms_of_weighted_data(data):
    found, predicted = evaluated(lambda: ddl.Supervised(model(), "mse", metrics=[error_of]), data)
    errors = predicted[:, 0] - Y
    assert found["loss"] == pytest.approx((errors**2 * WEIGHT).sum() / WEIGHT.sum(), rel=1e-5)
    assert found["error_of"] == pytest.approx((abs(errors) * WEIGHT).sum() / WEIGHT.sum(), rel=1e-5)


def several_inputs():
    inputs = {"a": keras.Input((2,), name="a"), "b": keras.Input((1,), name="b")}
    joined = keras.layers.concatenate(list(inputs.values()))
    return keras.Model(inputs, keras.layers.Dense(1)(joined))


class Subclass(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, inputs, training=False):
        return self.dense(tf.concat([inputs["a"], inputs["b"]], -1))


def list_of_inputs():
    inputs = [keras.Input((2,), name="image"), keras.Input((1,), name="b")]
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.concatenate(inputs)))


@pytest.mark.parametrize("make", [several_inputs, Subclass, list_of_inputs])
@pytest.mark.parametrize("stream", [False, True])
def test_a_model_of_several_inputs(make, stream):
    named = {"image": PARTS["a"], "b": PARTS["b"]} if make is list_of_inputs else PARTS
    data = (named, Y)
    if stream:
        data = tf.data.Dataset.from_tensor_slices(data)
    found, predicted = evaluated(lambda: ddl.Supervised(make(), "mse"), data)
    assert found["loss"] == pytest.approx(((predicted[:, 0] - Y) ** 2).mean(), rel=1e-5)


@pytest.mark.parametrize("labels", [CLASSES, CLASSES[:, None], np.eye(3, dtype="f4")[CLASSES]])
def test_class_weights(labels):
    def task():
        loss = "categorical" if labels.shape[-1] == 3 else "sparse_categorical"
        weights = {0: 3.0, np.int64(2): np.float32(0.25)}  # as of np.unique
        return ddl.Supervised(
            model(3, "softmax"), f"{loss}_crossentropy", class_weight=weights, metrics=["accuracy"]
        )

    found, predicted = evaluated(task, (X, labels))
    weight = np.array([3.0, 1.0, 0.25])[CLASSES]
    losses = -np.log(predicted[np.arange(22), CLASSES])
    for name, values in {"loss": losses, "accuracy": predicted.argmax(1) == CLASSES}.items():
        assert found[name] == pytest.approx((values * weight).sum() / weight.sum(), rel=1e-5)


def test_it_learns_with_an_optimizer_by_name():
    data = {"inputs": X, "label": Y}
    trainer = ddl.Trainer(ddl.Supervised(model(), "mse"), "adam", data, global_batch_size=8)
    assert type(trainer.optimizer) is keras.optimizers.Adam
    before = trainer.evaluate(data)["loss"]
    assert trainer.train(epochs=50)["loss"] < before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss": "msee"}, "name of a Keras loss, .* got 'msee'. Correct the name"),
        ({"loss": keras.losses.MeanSquaredError()}, "Create it with reduction=None"),
        ({"loss": 3}, "must be a name, a Keras loss or a function, got 3"),
        ({"metrics": ["AUC", "AUC"]}, "two metrics with the name 'AUC'"),
        ({"metrics": ["MeanIoU"]}, "cannot make the metric MeanIoU .*num_classes"),
        ({"metrics": ["acuracy"]}, "got 'acuracy'"),
        ({"metrics": "accuracy"}, r"must be a list, got 'accuracy'. Write \['accuracy'\]"),
        ({"class_weight": [1, 2]}, "must be a dict from class to weight"),
        ({"class_weight": {0: -1}}, "weights of at least 0, got 0: -1"),
        ({"class_weight": {"cat": 1}}, "must map integers"),
        ({"class_weight": {0: "1"}}, "must map integers to weights .* got 0: '1'"),
        ({"model": 3}, "must be a Keras model"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ConfigError, match=message):
        ddl.Supervised(**{"model": model(), "loss": "mse", **arguments})


def test_bad_optimizer_name():
    with pytest.raises(ConfigError, match="such as 'adam' or 'sgd', got 'adma'"):
        ddl.Trainer(ddl.Supervised(model(), "mse"), "adma", (X, Y), global_batch_size=8)


@pytest.mark.parametrize(
    ("loss", "metrics", "name"),
    [
        ("categorical_crossentropy", [], "loss 'categorical_crossentropy'"),
        (
            keras.losses.CategoricalCrossentropy(reduction=None),
            [],
            "loss 'categorical_crossentropy'",
        ),
        ("sparse_categorical_crossentropy", ["categorical_accuracy"], "'categorical_accuracy'"),
    ],
)
def test_integer_labels_where_keras_needs_one_hot_rows(loss, metrics, name):
    """Keras's accuracy would take the index of the largest label of the batch as the class."""
    task = ddl.Supervised(model(3, "softmax"), loss, metrics=metrics)
    remedy = r".* got outputs \(\d+, 3\) for labels .* For integer labels, use 'sparse_categorical_"
    with pytest.raises(ConfigError, match=f"{name} of Supervised needs {remedy}"):
        ddl.Trainer(task, "sgd", (X, CLASSES), global_batch_size=8).train(1)


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ({"image": X}, DataError, "no feature 'label', only image"),
        ({"label": Y}, DataError, "got only the features label. Add the input"),
        (({"label": X}, Y), DataError, "x has the feature 'label' too"),
        ((X, Y, WEIGHT, X), DataError, r"a tuple \(x, y\) or \(x, y, weight\)"),
        ((X, np.stack([Y, Y], 1)), ConfigError, r"outputs in the shape of the labels, got .* 2\)"),
        ((X[:, :2], Y), DataError, r"'image' of the data has shape \(2,\), but the model"),
        ((X.astype(str), Y), DataError, "'image' of the data is text, but the model"),
        ((PARTS, Y), ConfigError, "has one input, but the data have the features a, b"),
        ((X, np.full(len(X), "cat")), DataError, "Feature 'label' must be numbers, got text"),
        ((np.full(len(X), "cat"), Y), DataError, "'image' of the data is text, but the model"),
    ],
)
def test_bad_data(data, error, message):
    with pytest.raises(error, match=message):
        ddl.Trainer(ddl.Supervised(model(), "mse"), "sgd", data, global_batch_size=8)


def test_a_loss_of_ones_own_may_take_text():
    def loss(labels, outputs):
        return tf.cast(tf.equal(labels, "cat"), outputs.dtype) * outputs[:, 0] ** 2

    data = (X, np.full(len(X), "cat"))
    ddl.Trainer(ddl.Supervised(model(), loss), "sgd", data, global_batch_size=8)


def test_a_compiled_model_alone_is_refused_with_the_remedy():
    compiled = model()
    compiled.compile("adam", "mse", metrics=["mae"])
    remedy = r"ddl.Supervised\(model, 'mse', metrics=\['mae'\]\), and model.optimizer"
    with pytest.raises(ConfigError, match=remedy):
        ddl.Trainer(compiled, "adam", (X, Y), global_batch_size=8)
    task = ddl.Supervised(compiled, "mse", metrics=["mae"])
    trainer = ddl.Trainer(task, compiled.optimizer, (X, Y), global_batch_size=8)
    assert trainer.train(1).keys() == {"loss", "mae"}  # as the remedy says
    with pytest.raises(ConfigError, match=r"'mse'.*, and a new Adam as the optimizer"):
        ddl.Trainer(compiled, "adam", (X, Y), global_batch_size=8)
    compiled.compile("sgd", keras.losses.MeanSquaredError())
    remedy = r"ddl.Supervised\(model, keras.losses.MeanSquaredError\(…, reduction=None\)\)"
    with pytest.raises(ConfigError, match=remedy):
        ddl.Trainer(compiled, "adam", (X, Y), global_batch_size=8)
