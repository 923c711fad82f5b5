"""Tasks across examples are refused, and all that is not across examples passes."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.data import BatchPipeline, Source
from ddl.errors import ConfigError
from ddl.precision import set_precision
from ddl.tasks.parts import layers_of, variables_of
from ddl.training.probes import Probes
from tests.conftest import make_strategy

_RANDOM = np.random.default_rng(0)
ROWS = 40
DATA = {
    "x": _RANDOM.normal(size=(ROWS, 6)).astype(np.float32),
    "image": _RANDOM.normal(size=(ROWS, 8, 8, 3)).astype(np.float32),
    "token": _RANDOM.integers(0, 11, (ROWS, 5)),
    "label": _RANDOM.integers(0, 4, ROWS),
}


@pytest.fixture(scope="module", autouse=True)
def _rows_checked_once():
    """Checks in each test, unlike in other modules."""


class Embedding:
    """Whatever the test makes of the model's output."""

    def __init__(self, model, output, inputs="x"):
        self.model = model
        self.output = output
        self.inputs = inputs

    def per_example(self, features, training):
        made = self.output(self.model(features[self.inputs], training=training), features, training)
        return made if isinstance(made, ddl.PerExample) else ddl.PerExample(made)


def plain_model() -> keras.Model:
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)])


def check(task, strategy=None, data=DATA):
    strategy = strategy or tf.distribute.get_strategy()
    pipeline = BatchPipeline(Source(data), 16)
    probes = Probes(task, strategy, [])
    for function in (task.per_example, None):  # in training, and in an evaluation
        probes.loss(pipeline, function)


def nt_xent(y, features, training):
    z = tf.math.l2_normalize(tf.concat([y, y + 0.1], 0), 1)
    similar = z @ tf.transpose(z) / 0.5 - 1e9 * tf.eye(z.shape[0])
    count = y.shape[0]
    other = tf.concat([tf.range(count, 2 * count), tf.range(count)], 0)
    both = tf.nn.sparse_softmax_cross_entropy_with_logits(other, similar)
    return both[:count] + both[count:]


def square(y):
    return tf.reduce_sum(y**2, 1)


ACROSS = {
    "NT-Xent": (nt_xent, "loss"),
    "divided by the batch's size": (lambda y, f, t: square(y) / y.shape[0], "loss"),
    "mirrored in training": (lambda y, f, t: square(y + y[::-1] if t else y), "loss"),
    "weight": (
        lambda y, f, t: ddl.PerExample(square(y), weight=tf.nn.softmax(square(y))),
        "weight",
    ),
    "beside one weight": (
        lambda y, f, t: ddl.PerExample(
            square(y) / tf.reduce_max(square(y)), weight=tf.constant(2.0)
        ),
        "loss",
    ),
    "metric": (
        lambda y, f, t: ddl.PerExample(square(y), {"rank": tf.nn.softmax(square(y))}),
        "metric 'rank'",
    ),
    "in evaluation": (lambda y, f, t: square(y) / (1 if t else tf.reduce_max(square(y))), "loss"),
}


@pytest.mark.parametrize(("output", "what"), ACROSS.values(), ids=ACROSS)
def test_what_depends_on_other_rows_is_refused(output, what):
    message = rf"Embedding.*the {what} of an example must not depend on other"
    with pytest.raises(ConfigError, match=message):
        check(Embedding(plain_model(), output))


class Counting(keras.layers.Layer):
    """Writes variables in its forward pass, of which the next pass depends."""

    def __init__(self):
        super().__init__()
        self.seen = {"calls": [tf.Variable(0.0, trainable=False)]}
        self.metric = keras.metrics.Mean()

    def call(self, inputs, training=False):
        calls = self.seen["calls"][0]
        calls.assign_add(1.0)
        self.metric.update_state(inputs)
        return inputs * tf.cast(calls, inputs.dtype)


def images(*layers):
    return lambda: keras.Sequential(
        [keras.Input((8, 8, 3)), *(layer() for layer in layers), keras.layers.Flatten()]
    )


L = keras.layers
ROW_BY_ROW = {
    "drawing": (images(lambda: L.Dropout(0.5), L.RandomFlip), ("mirrored", 2)),
    "counting": (images(Counting), ("one_device", 1)),
}


@pytest.mark.parametrize("name", ROW_BY_ROW)
def test_row_by_row_passes_and_leaves_all_variables(name, caplog):
    make, place = ROW_BY_ROW[name]
    strategy = make_strategy(*place)
    with strategy.scope():
        task = Embedding(make(), lambda y, f, t: square(y), "image")
        task.model(tf.zeros([1, *DATA["image"].shape[1:]]))
    variables = variables_of([task, *layers_of(task)])
    before = [variable.numpy() for variable in variables]
    check(task, strategy)
    assert "could not run" not in caplog.text
    for variable, value in zip(variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


def test_a_small_dependence_is_found_in_half_precision():
    set_precision("mixed_float16")

    def output(y, features, training):
        loss = square(tf.cast(y, tf.float32))
        return loss + 0.005 * tf.reduce_mean(loss)

    with pytest.raises(ConfigError, match="must not depend on other examples"):
        check(Embedding(plain_model(), output))


def test_tokens_picked_out_of_the_rows_are_no_dependence():
    """Kernels then run at a shape that depends on other rows."""
    set_precision("mixed_bfloat16")
    head = keras.layers.Dense(300)
    head.build((None, 4))

    def output(y, features, training):
        picked = features["token"] % 2 == 0
        own = tf.boolean_mask(tf.repeat(y[:, tf.newaxis], 5, 1), picked)
        losses = tf.reduce_logsumexp(head(own), 1)
        rows = tf.cast(tf.where(picked)[:, 0], tf.int32)
        return tf.math.unsorted_segment_sum(losses, rows, y.shape[0])

    check(Embedding(plain_model(), output))


def test_an_error_of_values_is_left_to_training(caplog):
    def failing(y, features, training):
        tf.debugging.assert_less(y, -1e9, "of the user's own")
        return square(y)

    check(Embedding(plain_model(), failing))
    assert "could not run" in caplog.text
    assert "assertion failed" in caplog.text


def test_few_examples_are_enough():
    data = {name: rows[:3] for name, rows in DATA.items()}
    check(Embedding(plain_model(), lambda y, f, t: square(y)), data=data)
    with pytest.raises(ConfigError, match="must not depend on other examples"):
        check(Embedding(plain_model(), nt_xent), data=data)


class Gate(keras.layers.Layer):
    def build(self, shape):
        self.gate = self.add_weight(shape=(), initializer="zeros")

    def call(self, x):
        return x + self.gate * tf.reduce_mean(x, 0)


def test_so_is_a_dependence_behind_a_gate_that_starts_at_zero():
    model = keras.Sequential([keras.Input((6,)), Gate(), keras.layers.Dense(4)])
    with pytest.raises(ConfigError, match="must not depend on other examples"):
        check(Embedding(model, lambda y, features, training: square(y)))
    assert not np.any(model.layers[0].gate.numpy())
