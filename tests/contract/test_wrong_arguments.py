"""Mistakes in calls from Python: an error in a few lines, before anything is trained wrongly."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl


@pytest.fixture(scope="module", autouse=True)
def _rows_checked_once():
    """Replaces the fixture by which other modules check the rows of equal tasks once."""


X = np.linspace(-1, 1, 48, dtype="float32").reshape(16, 3)
Y = np.arange(16) % 2
DATA = {"image": X, "label": Y}


def network(outputs=2):
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(outputs, name="logits")])


class Own:
    """A task whose loss a test gives, as a function of the outputs."""

    def __init__(self, loss, model=None):
        self.model = model or network()
        self.own = loss

    def per_example(self, features, training):
        made = self.own(self.model(features["image"], training=training))
        return made if isinstance(made, ddl.PerExample | float) else ddl.PerExample(made)


class OwnStep(Own):
    """A task whose step a test gives."""

    def __init__(self, step):
        super().__init__(lambda y: y[:, 0] ** 2)
        self.made = step

    def step(self, update, batch):
        self.made(self, update, batch)


def trainer(task=None, data=DATA, optimizer=None, **arguments):
    task = ddl.Classification(network()) if task is None else task
    optimizer = keras.optimizers.SGD(0.1) if optimizer is None else optimizer
    return ddl.Trainer(task, optimizer, data, **{"global_batch_size": 8, **arguments})


def train(*args, **arguments):
    trainer(*args, **arguments).train(1)


def sgd(**arguments):
    return keras.optimizers.SGD(0.1, **arguments)


def mirrored(replicas=2):
    devices = [f"CPU:{n}" for n in range(replicas)]
    reduction = tf.distribute.ReductionToOneDevice()
    return tf.distribute.MirroredStrategy(devices, cross_device_ops=reduction)


def with_value(value, row=3):
    x = X.copy()
    x[row] = value
    return {"image": x, "label": Y}


def stream(x=X, y=Y):
    return tf.data.Dataset.from_tensor_slices((x, y))


def weighing(weight):
    return tf.data.Dataset.from_tensor_slices((X, Y, np.full(16, weight)))


ARGUMENTS = {
    "a batch that does not divide": (lambda: trainer(accumulation_steps=3), "multiple of 3", "8"),
    "a batch of 8.0": (lambda: trainer(global_batch_size=8.0), "global_batch_size", "8.0"),
    "a batch of True": (lambda: trainer(global_batch_size=True), "global_batch_size", "True"),
    "a batch for replicas": (
        lambda: in_scope(mirrored(4), global_batch_size=6),
        *("4 replicas", "6", "8"),
    ),
    "clip_norm of 0": (lambda: trainer(clip_norm=0.0), "clip_norm", "0.0"),
    "a text as clip_norm": (lambda: trainer(clip_norm="1"), "clip_norm", "'1'"),
    "no microbatch": (lambda: trainer(accumulation_steps=0), "accumulation_steps", "0"),
    "shuffle of a text": (lambda: trainer(shuffle="no"), "shuffle", "'no'"),
    "a number as loss scale": (lambda: trainer(loss_scale=8.0), "loss_scale", "LossScale"),
    "a number as average": (lambda: trainer(weight_average=0.9), "ExponentialMovingAverage"),
    "max_skipped_updates of 0": (lambda: trainer(max_skipped_updates=0), "max_skipped_updates"),
    "a seed of a text": (lambda: trainer(seed="1"), "seed", "'1'"),
    "a strategy by name": (lambda: trainer(strategy="mirrored"), "strategy", "'mirrored'"),
}
TASKS = {
    "a class": (lambda: trainer(ddl.Classification), "Classification", "parentheses"),
    "a model alone": (lambda: trainer(network()), "Keras model", "Classification"),
    "a text": (lambda: trainer("cnn"), "model"),
    "no model": (lambda: ddl.Classification(None), "model", "None"),
    "a loss that is reduced": (
        lambda: ddl.Classification(network(), loss=keras.losses.CategoricalCrossentropy()),
        *("reduction=None",),
    ),
    "an unknown loss": (lambda: ddl.Supervised(network(1), "msee"), "'msee'"),
    "an unknown metric": (lambda: ddl.Supervised(network(1), "mse", metrics=["acuracy"]), "acura"),
    "metrics as a text": (lambda: ddl.Supervised(network(1), "mse", metrics="mae"), "['mae']"),
    "label smoothing": (lambda: ddl.Classification(network(), label_smoothing=1.5), "1.5"),
}
LOSSES = {
    "one mean": (lambda: train(Own(tf.reduce_mean)), "loss", "each example", "scalar"),
    "a number": (lambda: train(Own(lambda y: 3.0)), "PerExample"),
    "integers": (lambda: train(Own(lambda y: tf.cast(y[:, 0], tf.int32))), "int32"),
    "half a batch": (lambda: train(Own(lambda y: y[:4, 0])), "loss", "batch"),
    "a metric named step": (
        lambda: train(Own(lambda y: ddl.PerExample(y[:, 0], {"step": y[:, 0]}))),
        *("'step'", "reserved"),
    ),
    "metrics in a list": (
        lambda: train(Own(lambda y: ddl.PerExample(y[:, 0], [y[:, 0]]))),
        *("metrics", "dict"),
    ),
    "weights of another shape": (
        lambda: train(Own(lambda y: ddl.PerExample(y[:, 0], weight=y))),
        *("weight", "shape"),
    ),
    "weights below 0": (
        lambda: train(Own(lambda y: ddl.PerExample(y[:, 0] ** 2, weight=-(y[:, 0] ** 2) - 1))),
        *("weight", "at least 0"),
    ),
    "other examples": (
        lambda: train(Own(lambda y: tf.nn.softmax(y[:, 0], 0))),
        *("other examples", "ddl.gather"),
    ),
    "the neighbour": (
        lambda: train(Own(lambda y: (y[:, 0] - tf.roll(y[:, 0], 1, 0)) ** 2)),
        *("other examples",),
    ),
    "a variable that it does not see": (
        lambda: train(Own(lambda y: y[:, 0] ** 2, idle_model())),
        "idle/extra",
    ),
    "an absent feature": (
        lambda: trainer(task=Own(lambda y: y[:, 0]), data={"x": X, "label": Y}).train(1),
        *("'image'",),
    ),
}
OPTIMIZERS = {
    "a class": (lambda: trainer(optimizer=keras.optimizers.SGD), "SGD"),
    "an unknown name": (lambda: trainer(optimizer="adma"), "'adma'", "'adam'"),
    "clipnorm": (lambda: trainer(optimizer=sgd(clipnorm=1.0)), "clipnorm", "clip_norm"),
    "use_ema": (lambda: trainer(optimizer=sgd(use_ema=True)), "use_ema", "weight_average"),
    "accumulation": (
        lambda: trainer(optimizer=sgd(gradient_accumulation_steps=2)),
        *("gradient_accumulation_steps", "accumulation_steps"),
    ),
    "Keras's loss scale": (
        lambda: trainer(optimizer=keras.optimizers.LossScaleOptimizer(sgd())),
        *("LossScaleOptimizer",),
    ),
    "one that was used": (lambda: trainer(optimizer=used()), "updates", "new optimizer"),
    "one of other variables": (
        lambda: trainer(optimizer=trainer().optimizer),
        *("other variables",),
    ),
    "a rate that is fixed by the trace": (
        lambda: train(optimizer=keras.optimizers.SGD(lambda: 0.25)),
        *("0.25", "constant"),
    ),
}
SOURCES = {
    "nothing": (lambda: trainer(data={}), "dict of features", "{}"),
    "a text": (lambda: trainer(data="mnist"), "str"),
    "no example": (lambda: trainer(data={"image": X[:0], "label": Y[:0]}), "at least one example"),
    "other lengths": (lambda: trainer(data={"image": X, "label": Y[:9]}), "16", "9"),
    "NaN": (lambda: train(data=with_value(np.nan)), "not finite"),
    "infinity": (lambda: train(data=with_value(np.inf)), "not finite"),
    "NaN in a stream": (lambda: train(data=stream(with_value(np.nan)["image"])), "not finite"),
    "negative weights in a stream": (lambda: train(data=weighing(-1.0)), "'weight'"),
    "text": (lambda: trainer(data=(X.astype(str), Y)), "'image'", "text"),
    "another shape": (lambda: trainer(data=(X[:, :2], Y)), "(2,)", "(3,)"),
    "no labels": (lambda: trainer(data={"image": X, "target": Y}), "'label'", "target"),
    "labels from 1": (lambda: trainer(data=(X, Y + 1)), "from 0 to 1", "2"),
    "labels below 0": (lambda: trainer(data=(X, Y - 1)), "from 0 to 1", "-1"),
    "labels out of range in a stream": (lambda: train(data=stream(y=Y + 5)), "label"),
    "fractions as labels": (lambda: trainer(data=(X, Y / 255)), "Labels", "float64"),
    "labels in a column": (lambda: trainer(data=(X, Y[:, None])), "(n, 1)"),
    "negative weights": (lambda: trainer(data=(X, Y, -np.ones(16))), "weight", "-1"),
    "weights of 0": (lambda: trainer(data=(X, Y, np.zeros(16))), "weight", "0"),
    "epochs of an infinite stream": (
        lambda: trainer(data=stream().repeat()).train(epochs=1, progress=False),
        *("no end", "TRAIN_STEPS"),
    ),
    "evaluation data without a label": (lambda: trainer(eval_data={"image": X}), "'label'"),
    "evaluation data of other labels": (lambda: trainer(eval_data=(X, Y + 1)), "from 0 to 1"),
}
STEPS = {
    "a misspelt verb": (
        lambda: train(OwnStep(lambda t, u, b: u.minimise(t.per_example, b))),
        *("minimise", "minimize"),
    ),
    "a misspelt loss": (
        lambda: train(OwnStep(lambda t, u, b: u.minimize(t.per_exmaple, b))),
        *("per_exmaple", "per_example"),
    ),
    "no batch": (lambda: train(OwnStep(lambda t, u, b: u.minimize(t.per_example))), "batch"),
    "no update": (lambda: train(OwnStep(lambda t, u, b: None)), "gradients"),
    "a list of gradients": (
        lambda: train(OwnStep(lambda t, u, b: u.apply([1.0]))),
        *("update.gradients",),
    ),
    "a read of the batch": (
        lambda: train(OwnStep(lambda t, u, b: u.minimize(t.per_example, b["image"]))),
        *("batch['image']",),
    ),
}
CALLS = {
    "no length": (lambda: trainer().train(), "steps", "epochs"),
    "two lengths": (lambda: trainer().train(steps=1, epochs=1), "steps", "epochs"),
    "steps below 0": (lambda: trainer().train(-1), "steps", "-1"),
    "steps of 2.5": (lambda: trainer().train(2.5), "steps", "2.5"),
    "steps of True": (lambda: trainer().train(True), "steps", "True"),
    "an evaluation without data": (lambda: trainer().evaluate(), "eval_data"),
    "an evaluation of (x, y) in two": (lambda: trainer().evaluate(X, Y), "evaluate((x, y"),
    "a prediction of another shape": (lambda: trainer().predict(X[:, :2]), "(3,)", "(2,)"),
    "a prediction without the input": (lambda: trainer().predict({"label": Y}), "'image'"),
    "another clip_norm": (lambda: setattr(trainer(), "clip_norm", 1.0), "clip_norm", "new Trainer"),
    "a misspelt attribute": (
        lambda: setattr(trainer(), "clip_nrom", 1.0),
        "clip_nrom",
        "clip_norm",
    ),
    "a layer frozen later": (lambda: frozen().train(1), "trainable", "'logits'"),
    "fit without a trainer": (lambda: ddl.fit(DATA, train_steps=1), "Trainer", "dict"),
    "fit without a length": (lambda: ddl.fit(trainer()), "train_steps", "train_epochs"),
    "fit with two lengths": (
        lambda: ddl.fit(trainer(), train_steps=1, train_epochs=1),
        *("train_steps", "train_epochs"),
    ),
    "fit with a period of 0": (
        lambda: ddl.fit(trainer(), train_steps=1, log_every=0),
        *("log_every", "0"),
    ),
    "the best without evaluations": (
        lambda: ddl.fit(trainer(), train_steps=1, restore_best=True),
        *("restore_best", "model_dir"),
    ),
    "gather outside of a loss": (lambda: ddl.gather(tf.ones([8])), "ddl.gather", "loss"),
}


def in_scope(strategy, **arguments):
    with strategy.scope():
        return trainer(strategy=strategy, **arguments)


def outside_of_the_scope():
    return trainer(ddl.Classification(network()), strategy=mirrored())


def idle_model():
    class Idle(keras.layers.Layer):
        def build(self, shape):
            self.extra = self.add_weight(name="extra", shape=(1,))

        def call(self, x):
            return x

    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1), Idle(name="idle")])


def used():
    optimizer = sgd()
    model = network()
    optimizer.apply(
        [tf.zeros_like(v) for v in model.trainable_variables], model.trainable_variables
    )
    return optimizer


def frozen():
    made = trainer()
    made.model.get_layer("logits").trainable = False
    return made


SCOPES = {
    "a model made outside of the scope": (outside_of_the_scope, "scope"),
}
TABLES = {
    "argument": ARGUMENTS,
    "task": TASKS,
    "loss": LOSSES,
    "optimizer": OPTIMIZERS,
    "data": SOURCES,
    "step": STEPS,
    "call": CALLS,
    "strategy": SCOPES,
}
ROWS = {f"{kind}: {name}": row for kind, rows in TABLES.items() for name, row in rows.items()}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
def test_a_mistake_is_named(row):
    call, *words = row
    with pytest.raises(ddl.errors.DdlError) as raised:
        call()
    message = str(raised.value)
    assert [word for word in words if word not in message] == [], message
    assert len(message.splitlines()) <= 6, message


def test_correct_calls_are_accepted():
    """Otherwise rows of the table could be refused for another reason than the mistake."""
    made = trainer(eval_data=(X, Y), clip_norm=1.0, accumulation_steps=2)
    figures = made.train(1)
    assert set(figures) >= {"loss", "accuracy"}
    assert made.evaluate().keys() <= figures.keys()
    assert made.predict(X).shape == (16, 2)
    train(Own(lambda y: y[:, 0] ** 2))
    train(OwnStep(lambda t, u, b: u.minimize(t.per_example, b)))
    in_scope(mirrored()).train(1)
