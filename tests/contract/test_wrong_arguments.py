"""Mistakes in calls from Python: an error in a few lines, before anything is trained wrongly."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl import PerExample
from tests.conftest import make_strategy


@pytest.fixture(scope="module", autouse=True)
def _rows_checked_once():
    """Replaces the fixture by which other modules check the rows of equal tasks once."""


X = np.linspace(-1, 1, 48, dtype="float32").reshape(16, 3)
Y = np.arange(16) % 2
DATA = {"image": X, "label": Y}
IMAGES = (np.ones((16, 4, 3, 1), "f4"), np.ones((16, 4, 3, 1), "f4"))
DICE = keras.losses.Dice(reduction=None)  # over the whole batch
SPARSE = "sparse_categorical_crossentropy"
of_classes = tf.nn.sparse_softmax_cross_entropy_with_logits


def network(outputs=2):
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(outputs, name="logits")])


class Own:
    """A task whose loss a test gives, as a function of the outputs."""

    def __init__(self, loss, model=None):
        self.model = model or network()
        self.own = loss

    def per_example(self, features, training):
        made = self.own(self.model(features["image"], training=training))
        return made if isinstance(made, PerExample | float) else PerExample(made)


class OwnStep(Own):
    """A task whose step a test gives."""

    def __init__(self, step):
        super().__init__(lambda y: y[:, 0] ** 2)
        self.made = step

    def step(self, update, batch):
        return self.made(self, update, batch)


def trainer(task=None, data=DATA, optimizer=None, **arguments):
    task = ddl.Classification(network()) if task is None else task
    optimizer = keras.optimizers.SGD(0.1) if optimizer is None else optimizer
    return ddl.Trainer(task, optimizer, data, **{"global_batch_size": 8, **arguments})


def train(*args, **arguments):
    trainer(*args, **arguments).train(1)


def sgd(**arguments):
    return keras.optimizers.SGD(0.1, **arguments)


def with_value(value, row=3):
    x = X.copy()
    x[row] = value
    return {"image": x, "label": Y}


def stream(*arrays):
    return tf.data.Dataset.from_tensor_slices(arrays or (X, Y))


def relative_metric(y):
    """Metrics are bound by the same rule as losses."""
    return PerExample(y[:, 0], {"relative": y[:, 0] / tf.reduce_mean(y[:, 0])})


def batch_hard(y):
    """Hermans et al. 2017: the farthest row of a class and the nearest of another."""
    distances = tf.reduce_sum(tf.square(y[:, None] - y[None]), -1)
    alike = y[:, None, 0] * y[None, :, 0] > 0
    farthest = tf.reduce_max(tf.where(alike, distances, 0.0), 1)
    nearest = tf.reduce_min(tf.where(alike, tf.float32.max, distances), 1)
    return tf.nn.softplus(farthest - tf.minimum(nearest, 100.0))


def in_batch_negatives(y):
    return of_classes(tf.range(y.shape[0]), y @ tf.transpose(y))


def with_padding(y):
    """Takes gathered padding for negatives."""
    rows = ddl.gather(y)
    return of_classes(rows.own, y @ tf.transpose(rows.rows))


def of_images():
    return keras.Sequential([keras.Input((4, 3, 1)), keras.layers.Conv2D(1, 1)])


def of_two_inputs():
    one, other = keras.Input((3,), name="one"), keras.Input((3,), name="other")
    return keras.Model([one, other], keras.layers.Dense(1)(keras.layers.Add()([one, other])))


def in_scope(replicas, **arguments):
    strategy = make_strategy("mirrored", replicas)
    with strategy.scope():
        return trainer(strategy=strategy, **arguments)


def idle_model():
    class Idle(keras.layers.Layer):
        def build(self, shape):
            self.extra = self.add_weight(name="extra", shape=(1,))

        def call(self, x):
            return x

    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1), Idle(name="idle")])


def used():
    optimizer = sgd()
    optimizer.iterations.assign(1)
    return optimizer


def changed(of, name, value):
    made = trainer()
    setattr({"layer": made.model.get_layer("logits"), **vars(made)}[of], name, value)
    return made


# The call as somebody writes it, then words of the message.
MISTAKES = [
    # arguments of the Trainer
    ("trainer(accumulation_steps=3)", "multiple of 3", "8"),
    ("trainer(global_batch_size=8.0)", "global_batch_size", "8.0"),
    ("trainer(global_batch_size=True)", "global_batch_size", "True"),
    ("in_scope(4, global_batch_size=6)", "4 replicas", "6", "8"),
    ("trainer(clip_norm=0.0)", "clip_norm", "0.0"),
    ("trainer(clip_norm='1')", "clip_norm", "'1'"),
    ("trainer(max_skipped_updates=0)", "max_skipped_updates"),
    # tasks
    ("trainer(ddl.Classification)", "Classification", "parentheses"),
    ("trainer(network())", "Keras model", "Classification"),
    ("ddl.Classification(None)", "model", "None"),
    ("ddl.Supervised(network(), keras.losses.CategoricalCrossentropy())", "reduction=None"),
    ("ddl.Supervised(network(1), 'msee')", "'msee'"),
    ("ddl.Supervised(network(1), 'mse', metrics=['acuracy'])", "acura"),
    ("ddl.Supervised(network(1), 'mse', metrics='mae')", "['mae']"),
    ("ddl.Supervised(network(), SPARSE, class_weight='balanced')", "class_weight", "'balanced'"),
    ("ddl.Classification(network(), label_smoothing=1.5)", "1.5"),
    # losses
    ("train(Own(tf.reduce_mean))", "loss", "each example", "scalar"),
    ("train(Own(lambda y: 3.0))", "PerExample"),
    ("train(Own(lambda y: tf.cast(y[:, 0], tf.int32)))", "int32"),
    ("train(Own(lambda y: y[:4, 0]))", "loss", "batch"),
    ("train(Own(lambda y: PerExample(y[:, 0], {'step': y[:, 0]})))", "'step'", "reserved"),
    ("train(Own(lambda y: PerExample(y[:, 0], [y[:, 0]])))", "metrics", "dict"),
    ("train(Own(lambda y: PerExample(y[:, 0], weight=y)))", "weight", "shape"),
    ("train(Own(lambda y: PerExample(y[:, 0], weight=-tf.exp(y[:, 0]))))", "weight", "at least 0"),
    ("train(Own(lambda y: (y[:, 0] - tf.roll(y[:, 0], 1, 0)) ** 2))", "other examples"),
    ("train(Own(lambda y: y[:, 0] ** 2, idle_model()))", "idle/extra", "trainable = False"),
    ("trainer(task=Own(lambda y: y[:, 0]), data={'x': X, 'label': Y}).train(1)", "'image'"),
    (
        "train(Own(lambda y: y[:, 0] - tf.ones(8, 'float64')))",
        "'image' float32",
        "tf.cast",
        "astype",
    ),
    ("train(Own(in_batch_negatives))", "other examples", "ddl.gather"),
    ("train(Own(relative_metric))", "other examples", "ddl.gather"),
    ("train(Own(batch_hard))", "other examples", "ddl.gather"),
    ("train(Own(with_padding))", "padding", "mask"),
    ("train(ddl.Supervised(network(), SPARSE), (X, np.eye(2)[Y]))", "one-hot", "(8, 2)"),
    ("train(ddl.Supervised(of_images(), DICE), data=IMAGES)", "axis=(1, 2, 3)"),
    # optimizers
    ("trainer(optimizer=keras.optimizers.SGD)", "SGD"),
    ("trainer(optimizer='adma')", "'adma'", "Did you mean adam"),
    ("trainer(optimizer=sgd(clipnorm=1.0))", "clipnorm", "clip_norm"),
    ("trainer(optimizer=sgd(use_ema=True))", "use_ema", "weight_average"),
    ("trainer(optimizer=sgd(gradient_accumulation_steps=2))", "Trainer's accumulation_steps"),
    ("trainer(optimizer=keras.optimizers.LossScaleOptimizer(sgd()))", "LossScaleOptimizer"),
    ("trainer(optimizer=used())", "updates", "new optimizer"),
    ("trainer(optimizer=trainer().optimizer)", "other variables"),
    ("train(optimizer=keras.optimizers.SGD(lambda: 0.25))", "0.25", "constant"),
    # data
    ("trainer(data={})", "dict of features", "{}"),
    ("trainer(data='mnist')", "str"),
    ("trainer(data={'image': X[:0], 'label': Y[:0]})", "at least one example"),
    ("trainer(data={'image': X, 'label': Y[:9]})", "16", "9"),
    ("train(data=with_value(np.nan))", "not finite"),
    ("train(data=stream(with_value(np.nan)['image'], Y))", "not finite"),
    ("train(data=stream(X, Y, -np.ones(16)))", "'weight'"),
    ("trainer(data=(X.astype(str), Y))", "'input'", "text"),
    ("trainer(data=(X[:, 0], Y))", "shape ()", "(3,)"),
    ("trainer(data={'image': X, 'target': Y})", "'label'", "target"),
    ("trainer(data=(X, Y + 1))", "from 0 to 1", "2"),
    ("trainer(ddl.Supervised(network(), SPARSE), (X, Y - 1))", "from 0 to 1", "-1"),
    ("train(data=stream(X, Y + 5))", "label"),
    ("trainer(data=(X, Y / 255))", "Labels", "float64"),
    ("trainer(data=(X, Y[:, None]))", "(n, 1)"),
    ("trainer(data=(X, Y, -np.ones(16)))", "weight", "-1"),
    ("trainer(data=(X, Y, np.zeros(16)))", "weight", "0"),
    ("trainer(data=stream().repeat()).train(epochs=1, progress=False)", "no end", "TRAIN_STEPS"),
    ("trainer(eval_data={'image': X})", "'label'"),
    ("trainer(eval_data=stream().repeat())", "no end", "take"),
    ("trainer(eval_data=(X, Y + 1))", "from 0 to 1"),
    ("trainer(ddl.Supervised(of_two_inputs(), 'mse'), ([X, X], Y))", "2 arrays as x", "dict by"),
    # steps of verbs
    ("train(OwnStep(lambda t, u, b: u.minimise(t.per_example, b)))", "minimise", "minimize"),
    ("train(OwnStep(lambda t, u, b: u.minimize(t.per_exmaple, b)))", "per_exmaple", "per_example"),
    ("train(OwnStep(lambda t, u, b: u.minimize(t.per_example)))", "batch"),
    ("train(OwnStep(lambda t, u, b: None))", "gradients"),
    ("train(OwnStep(lambda t, u, b: {'norm': 1.0}))", "OwnStep.step must return None", "metrics"),
    ("train(OwnStep(lambda t, u, b: u.apply([1.0])))", "update.gradients"),
    ("train(OwnStep(lambda t, u, b: u.minimize(t.per_example, b['image'])))", "batch['image']"),
    # calls of a trainer, and of ddl.fit
    ("trainer().train()", "steps", "epochs"),
    ("trainer().train(steps=1, epochs=1)", "steps", "epochs"),
    ("trainer().train(-1)", "steps", "-1"),
    ("trainer().train(2.5)", "steps", "2.5"),
    ("trainer().evaluate()", "eval_data"),
    ("trainer().evaluate(X, Y)", "evaluate((x, y"),
    ("trainer().predict(X[:, :2])", "(3,)", "(2,)"),
    ("trainer().predict({'label': Y})", "'image'"),
    ("setattr(trainer(), 'clip_norm', 1.0)", "clip_norm", "new Trainer"),
    ("setattr(trainer(), 'clip_nrom', 1.0)", "clip_nrom", "clip_norm"),
    ("changed('layer', 'trainable', False).train(1)", "trainable", "'logits'"),
    ("changed('optimizer', 'momentum', 0.9).train(1)", "momentum of SGD", "0.0, got 0.9"),
    ("ddl.fit(DATA, train_steps=1)", "fit.trainer", "Trainer", "{'image'"),
    ("ddl.fit(trainer())", "train_steps", "train_epochs"),
    ("ddl.fit(trainer(), train_steps=1, train_epochs=1)", "train_steps", "train_epochs"),
    ("ddl.fit(trainer(), train_steps=1, log_every=0)", "log_every", "0"),
    ("ddl.fit(trainer(), train_steps=2.5)", "train_steps", "2.5"),
    ("ddl.fit(trainer(), train_steps=1, warm_start='runs/a')", "warm_start", "WarmStart", "runs/a"),
    ("ddl.fit(trainer(), train_steps=1, trackers=[3])", "fit.trackers", "Tracker", "[3]"),
    ("ddl.fit(trainer(), '', train_steps=1)", "model_dir", "empty"),
    ("ddl.fit(trainer(), train_steps=1, restore_best=True)", "restore_best", "model_dir"),
    ("ddl.fit(trainer(), train_steps=1, profile=(0, 1))", "profile", "model_dir"),
    ("ddl.evaluate(DATA, 'runs/a')", "evaluate.trainer", "Trainer", "{'image'"),
    ("ddl.predict(trainer(), 'a.npz', features='label')", "predict.features", "Sequence", "label"),
    ("ddl.find_learning_rate(network())", "find_learning_rate.trainer", "Trainer", "Sequential"),
    ("ddl.export(network(), 'a')", "export.trainer", "Trainer", "Sequential"),
    ("ddl.export(trainer(), 'a/model.keras')", "into a folder", "a/model.keras"),
    ("ddl.gather(tf.ones([8]))", "ddl.gather", "loss"),
    # strategies
    ("trainer(ddl.Classification(network()), strategy=make_strategy('mirrored', 2))", "scope"),
]


@pytest.mark.parametrize("row", MISTAKES, ids=lambda row: row[0])
def test_a_mistake_is_named(row):
    call, *words = row
    with pytest.raises(ddl.errors.DdlError) as raised:
        eval(call, globals())
    message = str(raised.value)
    assert [word for word in words if word not in message] == [], message
    assert len(message.splitlines()) <= 6, message


def test_correct_calls_are_accepted():
    """Otherwise rows of the table could be refused for another reason than the mistake."""
    made = trainer(eval_data=(X, Y), clip_norm=1.0, accumulation_steps=2)
    figures = made.train(1)
    assert {"loss", "accuracy"} <= made.evaluate().keys() <= figures.keys()
    assert made.predict(X).shape == (16, 2)
    train(Own(lambda y: y[:, 0] ** 2))
    train(ddl.Supervised(network(), SPARSE), (X, Y))
    train(OwnStep(lambda t, u, b: u.minimize(t.per_example, b)))
    in_scope(2).train(1)
