"""Tasks across examples are refused, and all that is not across examples passes."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
import ddl.random
from ddl.data import BatchPipeline, Source
from ddl.errors import ConfigError
from ddl.precision import set_precision
from ddl.step.loss import Loss
from ddl.step.probes import Probes
from ddl.tasks.parts import layers_of, variables_of
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


def check(task, strategy=None, batch=16, modes=(True, False), data=DATA):
    strategy = strategy or tf.distribute.get_strategy()
    pipeline = BatchPipeline(Source(data), batch)
    probes = Probes(task, strategy, [])
    loss = Loss(
        *(task, task.per_example, "", batch),
        lambda loss, training: probes.form(loss, pipeline, training),
        strategy.num_replicas_in_sync,
    )
    for training in modes:
        loss.form(training)


def nt_xent(y, features, training):
    z = tf.math.l2_normalize(tf.concat([y, y + 0.1], 0), 1)
    similar = z @ tf.transpose(z) / 0.5 - 1e9 * tf.eye(z.shape[0])
    count = y.shape[0]
    other = tf.concat([tf.range(count, 2 * count), tf.range(count)], 0)
    both = tf.nn.sparse_softmax_cross_entropy_with_logits(other, similar)
    return both[:count] + both[count:]


def clip(y, features, training):
    logits = tf.math.l2_normalize(y, 1) @ tf.transpose(
        tf.math.l2_normalize(features["x"][:, :4], 1)
    )
    own = tf.range(y.shape[0])
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits
    return losses(own, logits) + losses(own, tf.transpose(logits))


def batch_hard(y, features, training):
    z = tf.math.l2_normalize(y, 1)
    distance = 2 - 2 * z @ tf.transpose(z)
    same = features["label"][:, tf.newaxis] == features["label"]
    positive = tf.reduce_max(tf.where(same, distance, 0.0), 1)
    negative = tf.reduce_min(tf.where(same, 10.0, distance), 1)
    return tf.nn.relu(positive - negative + 0.2)


def square(y):
    return tf.reduce_sum(y**2, 1)


def mixup(y, features, training):
    return square(0.7 * y + 0.3 * y[::-1]) if training else square(y)


def of_pairs(y, features, training):
    pairs = tf.reshape(y, [-1, 2, 4])
    return square(tf.reshape(pairs - pairs[:, ::-1], [-1, 4]))


ACROSS = {
    "NT-Xent": (nt_xent, "loss"),
    "in-batch negatives": (clip, "loss"),
    "batch-hard mining": (batch_hard, "loss"),
    "divided by the largest": (lambda y, f, t: square(y) / tf.reduce_max(square(y)), "loss"),
    "the mean for each": (lambda y, f, t: tf.fill([y.shape[0]], tf.reduce_mean(y)), "loss"),
    "centred": (lambda y, f, t: square(y - tf.reduce_mean(y, 0)), "loss"),
    "mixed in training": (mixup, "loss"),
    "the next row": (lambda y, f, t: square(y - tf.roll(y, 1, 0)), "loss"),
    "pairs": (of_pairs, "loss"),
    "broadcast and averaged": (
        lambda y, f, t: tf.reduce_mean((y[:, :1] - y[:, 0]) ** 2, 1),
        "loss",
    ),
    "weight": (
        lambda y, f, t: ddl.PerExample(square(y), weight=tf.nn.softmax(square(y))),
        "weight",
    ),
    "metric": (
        lambda y, f, t: ddl.PerExample(square(y), {"rank": tf.nn.softmax(square(y))}),
        "metric 'rank'",
    ),
    "only in evaluation": (
        lambda y, f, t: square(y) if t else square(y) / tf.reduce_max(square(y)),
        "loss",
    ),
}


@pytest.mark.parametrize(("output", "what"), ACROSS.values(), ids=ACROSS)
@pytest.mark.parametrize("batch", [1, 16])
def test_what_depends_on_other_rows_is_refused(output, what, batch):
    message = rf"Embedding.*the {what} of an example must not depend on other"
    with pytest.raises(ConfigError, match=message):
        check(Embedding(plain_model(), output), batch=batch)


class OwnMoments(keras.layers.Layer):
    def call(self, inputs, training=False):
        if not training:
            return inputs
        mean, variance = tf.nn.moments(inputs, [0])
        return (inputs - mean) / tf.sqrt(variance + 1e-3)


@pytest.mark.parametrize("strategy", [("one_device", 1), ("mirrored", 2)])
def test_so_is_a_layer_with_statistics_of_its_own(strategy):
    strategy = make_strategy(*strategy)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4), OwnMoments()])
        task = Embedding(model, lambda y, f, t: square(y))
    with pytest.raises(ConfigError, match="training=True: the loss of an example"):
        check(task, strategy)


class Attention(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.attention = keras.layers.MultiHeadAttention(2, 4, dropout=0.3)

    def call(self, inputs, training=False):
        return self.attention(inputs, inputs, use_causal_mask=True, training=training)


class Jitter(keras.layers.Layer):
    draws_by_position = True

    def call(self, inputs, training=False):
        if not training:
            return inputs
        return inputs + tf.cast(ddl.random.normal(self, inputs.shape), inputs.dtype)


class Subclass(keras.layers.BatchNormalization):
    pass


class Twice(keras.layers.Layer):
    """A layer of moments called more than once, and one that is traced apart by its author."""

    def __init__(self):
        super().__init__()
        self.normalization = keras.layers.BatchNormalization(synchronized=True)
        self.dropout = keras.layers.Dropout(0.5)

    @tf.function
    def call(self, inputs, training=False):
        once = self.normalization(inputs, training=training)
        return self.dropout(self.normalization(once**2, training=training), training=training)


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


def tokens(*layers):
    embedding = keras.layers.Embedding
    return lambda: keras.Sequential(
        [keras.Input((5,)), embedding(11, 8, mask_zero=True), *(layer() for layer in layers)]
    )


L = keras.layers
ROW_BY_ROW = {
    "convolutions": ("image", images(lambda: L.Conv2D(4, 3), lambda: L.DepthwiseConv2D(3))),
    "normalization": ("image", images(L.BatchNormalization, lambda: L.BatchNormalization(axis=1))),
    "synchronized": ("image", images(lambda: L.BatchNormalization(synchronized=True), Subclass)),
    "of groups": ("image", images(lambda: L.GroupNormalization(3), L.LayerNormalization)),
    "of weights": ("image", images(lambda: L.SpectralNormalization(L.Conv2D(4, 3)))),
    "unit": ("image", images(L.UnitNormalization, L.RMSNormalization)),
    "adapted": ("image", images(lambda: L.Normalization(mean=1.0, variance=2.0))),
    "dropout": ("image", images(lambda: L.Dropout(0.5), Jitter)),
    "noise": ("image", images(lambda: L.GaussianNoise(1.0), lambda: L.SpatialDropout2D(0.5))),
    "augmentation": (
        "image",
        images(
            lambda: L.RandomFlip(), lambda: L.RandomRotation(0.2), lambda: L.RandomContrast(0.2)
        ),
    ),
    "recurrent": (
        "token",
        tokens(
            lambda: L.LSTM(8, return_sequences=True, dropout=0.2, recurrent_dropout=0.2),
            lambda: L.Bidirectional(L.GRU(4, dropout=0.2)),
        ),
    ),
    "attention": ("token", tokens(Attention, L.Flatten)),
    "twice": ("image", images(Twice)),
    "counting": ("image", images(Counting)),
    "added losses": (
        "image",
        images(
            lambda: L.Conv2D(4, 3, activity_regularizer="l2", kernel_regularizer="l2"),
            lambda: L.ActivityRegularization(0.1),
        ),
    ),
}


PLACES = [
    ("one_device", 1, "float32"),
    ("one_device", 1, "mixed_bfloat16"),
    ("mirrored", 2, "float32"),
    ("central_storage", 2, "float32"),
]


# Recurrent layers take seconds each time.
ROW_BY_ROW_AT = [
    pytest.param(name, place, id=f"{name}-{place[0]}-{place[2]}")
    for name in ROW_BY_ROW
    for place in PLACES
    if name != "recurrent" or place == PLACES[2]
    if name != "counting" or place[0] != "central_storage"  # which needs an aggregation
]


@pytest.mark.parametrize(("name", "place"), ROW_BY_ROW_AT)
def test_row_by_row_passes_and_leaves_all_variables(name, place, caplog):
    inputs, make = ROW_BY_ROW[name]
    *strategy, precision = place
    set_precision(precision)
    strategy = make_strategy(*strategy)
    with strategy.scope():
        task = Embedding(make(), lambda y, f, t: tf.cast(square(y), tf.float32), inputs)
        task.model(tf.zeros([1, *DATA[inputs].shape[1:]], DATA[inputs].dtype))
    variables = variables_of([task, *layers_of(task)])
    before = [variable.numpy() for variable in variables]
    check(task, strategy)
    assert "could not run" not in caplog.text
    for variable, value in zip(variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


@pytest.mark.parametrize("replicas", [1, 2])
def test_within_a_scope_too(replicas):
    strategy = make_strategy("mirrored", replicas)
    with strategy.scope():
        check(Embedding(plain_model(), lambda y, f, t: square(y)), strategy)
        with pytest.raises(ConfigError, match="must not depend on other examples"):
            check(Embedding(plain_model(), nt_xent), strategy)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_losses_of_any_precision(dtype):
    check(Embedding(plain_model(), lambda y, f, t: tf.cast(square(y), dtype)))
    with pytest.raises(ConfigError, match="must not depend on other examples"):
        check(Embedding(plain_model(), lambda y, f, t: tf.cast(nt_xent(y, f, t), dtype)))


def small_part_of_others(y, features, training):
    own = tf.cast(square(y), tf.float32)
    return own + 0.005 * tf.reduce_mean(own)


@pytest.mark.parametrize("precision", ["mixed_bfloat16", "mixed_float16"])
def test_a_small_dependence_in_half_precision(precision):
    set_precision(precision)
    with pytest.raises(ConfigError, match="must not depend on other examples"):
        check(Embedding(plain_model(), small_part_of_others))


@pytest.mark.parametrize("precision", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_tokens_picked_out_of_the_rows_are_no_dependence(precision):
    """Kernels then run at a shape that depends on other rows."""
    set_precision(precision)
    head = keras.layers.Dense(300)
    head.build((None, 4))

    def output(y, features, training):
        picked = features["token"] % 2 == 0
        own = tf.boolean_mask(tf.repeat(y[:, tf.newaxis], 5, 1), picked)
        losses = tf.reduce_logsumexp(head(own), 1)
        rows = tf.cast(tf.where(picked)[:, 0], tf.int32)
        return tf.math.unsorted_segment_sum(losses, rows, y.shape[0])

    check(Embedding(plain_model(), output))


def test_an_error_of_the_task_is_raised_as_it_is():
    def failing(y, features, training):
        raise RuntimeError("of the user's own")

    with pytest.raises(RuntimeError, match="of the user's own"):
        check(Embedding(plain_model(), failing))


def test_an_error_of_values_is_left_to_training(caplog):
    def failing(y, features, training):
        tf.debugging.assert_less(y, -1e9, "of the user's own")
        return square(y)

    check(Embedding(plain_model(), failing))
    assert "could not run" in caplog.text
    assert "assertion failed" in caplog.text


def test_a_division_by_the_batch_size_is_refused():
    with pytest.raises(ConfigError, match="must not depend on other examples"):
        check(Embedding(plain_model(), lambda y, f, t: square(y) / y.shape[0]))


def test_draws_of_the_time_steps_are_refused():
    def output(y, features, training):
        drawn = keras.random.uniform([5, y.shape[0]])
        return square(y) * drawn[1]

    with pytest.raises(ConfigError, match="The first dimension must be the examples"):
        check(Embedding(plain_model(), output))


def test_a_loss_of_a_tensor_of_the_step_is_told_in_a_line(caplog):
    scale = []

    @tf.function
    def step():
        scale.append(tf.constant(2.0) * 1)

    step.get_concrete_function()
    check(Embedding(plain_model(), lambda y, features, training: y[:, 0] * scale[0]), modes=(True,))
    (line,) = (one for one in caplog.messages if "could not run" in one)
    assert "the loss uses a tensor of the step" in line
    assert len(line) < 300


def test_a_negative_weight_is_refused():
    output = lambda y, f, t: ddl.PerExample(square(y), weight=y[:, 0])  # noqa: E731
    with pytest.raises(ConfigError, match="weight of an example must be at least 0.* got -"):
        check(Embedding(plain_model(), output))


def test_few_examples_are_enough():
    data = {name: rows[:3] for name, rows in DATA.items()}
    check(Embedding(plain_model(), lambda y, f, t: square(y)), data=data)
    with pytest.raises(ConfigError, match="must not depend on other examples"):
        check(Embedding(plain_model(), nt_xent), data=data)


def make_trainer(output, strategy):
    with strategy.scope():
        task = Embedding(plain_model(), output)
        optimizer = keras.optimizers.SGD(0.1)
        return ddl.Trainer(task, optimizer, DATA, eval_data=DATA, global_batch_size=8)


def test_the_trainer_checks_before_it_does_anything():
    with pytest.raises(ConfigError, match="the loss of an example must not depend on other"):
        make_trainer(nt_xent, make_strategy("mirrored", 2))


def test_each_loss_is_traced_for_8_and_4_rows_and_for_each_replica_of_the_update():
    calls = []

    def output(y, features, training):
        calls.append((int(y.shape[0]), training))
        return square(y)

    trainer = make_trainer(output, make_strategy("mirrored", 2))
    assert calls == [(8, True), (4, True), (8, False), (4, False)]
    trainer.train(2, progress=False)
    trainer.evaluate()
    assert calls[4:] == [(4, True)] * 2 + [(4, False)] * 2


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


def gathered_negatives(y, features, training):
    others = ddl.gather(y)
    logits = y @ tf.transpose(others.rows)
    logits = tf.where(others.mask, logits, logits.dtype.min)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(others.own, logits)


def gathered_mining(y, features, training):
    others = ddl.gather((y, features["label"]))
    distance = tf.reduce_sum((y[:, tf.newaxis] - others.rows[0]) ** 2, -1)
    same = features["label"][:, tf.newaxis] == others.rows[1]
    return tf.reduce_max(tf.where(same & others.mask, distance, 0.0), 1)


@pytest.mark.parametrize("output", [gathered_negatives, gathered_mining])
def test_a_loss_may_depend_on_gathered_rows(output):
    check(Embedding(plain_model(), output))


def test_gathered_rows_are_held_in_graphs_too():
    model = keras.Sequential(
        [keras.Input((5,)), keras.layers.Embedding(11, 4), keras.layers.GRU(4)]
    )
    check(Embedding(model, gathered_negatives, "token"))


def test_beside_gathered_rows_other_rows_must_not_be_used():
    def output(y, features, training):
        return gathered_negatives(y, features, training) / tf.reduce_max(square(y))

    with pytest.raises(ConfigError, match=r"(?s)depend on other examples.*ddl\.gather\(x\)"):
        check(Embedding(plain_model(), output))


def test_gathered_padding_must_be_left_out():
    def output(y, features, training):
        others = ddl.gather(y)
        logits = y @ tf.transpose(others.rows)
        return tf.nn.sparse_softmax_cross_entropy_with_logits(others.own, logits)

    with pytest.raises(ConfigError, match="the loss of an example must not depend on padding"):
        check(Embedding(plain_model(), output))
