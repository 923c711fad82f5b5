"""Misused verbs: refused before training, in an error that names the line and the remedy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.errors import ConfigError
from ddl.precision import set_precision
from tests.conftest import make_strategy
from tests.step.verbs.own_steps import data, perceptron, two_optimizers

HERE = r"\n  raised in tests/step/verbs/test_misuse\.py:\d+\n    "
OUTSIDE, ROWS = tf.Variable(0.0), data(16)
APART = []
"""A model that no attribute of the task leads to."""


class Task:
    """A task whose step is given."""

    def __init__(self, step, **attributes):
        self.model = perceptron(6, 3)
        self.slow = keras.models.clone_model(self.model)
        self.slow.trainable = False
        self.own_step = step
        self.memory = type("Memory", (), {"rows": tf.Variable(tf.zeros([4]), trainable=False)})()
        vars(self).update(attributes)

    def per_example(self, features, training):
        logits = self.model(features["x"], training=training)
        return ddl.PerExample(
            tf.nn.sparse_softmax_cross_entropy_with_logits(features["label"], logits)
        )

    def doubled(self, features, training):
        return self.per_example(features, training)

    def apart(self, features, training):
        apart = self.model(features["x"]) - APART[0](features["x"])
        return ddl.PerExample(tf.reduce_sum(apart, 1))

    def step(self, update, batch):
        self.own_step(self, update, batch)


def trainer(step, optimizer=None, data=None, **attributes):
    set_precision("float64")
    strategy = make_strategy("one_device", 1)
    with strategy.scope():
        APART[:] = [perceptron(6, 3)]
        task = Task(step, **{k: v() if callable(v) else v for k, v in attributes.items()})
        optimizer = optimizer or keras.optimizers.SGD(0.1)
        return ddl.Trainer(task, optimizer, data or ROWS, global_batch_size=8, strategy=strategy)


def minimize(t, u, b):
    u.minimize(t.per_example, b)


def gradients(t, u, b):
    return u.gradients(t.per_example, b)


def within_moved(t, u, b):
    one = gradients(t, u, b)
    with u.moved(t.model, one):
        u.apply(one)


def python_if(t, u, b):
    if u.step > 3:
        minimize(t, u, b)


def tensorflow_draws(t, u, b):
    minimize(t, u, b)
    u.when(u.step > 0, lambda: t.memory.rows.assign(tf.random.normal([4])))


TWO = {"one": data(16), "other": {**data(16), "z": np.ones(16)}}


def of_each_source(t, u, b):
    for one in b.values():
        minimize(t, u, one)


def of_a_branch(t, u, b):
    inside = []
    u.when(u.step > 0, lambda: inside.append(gradients(t, u, b).norm()))
    u.apply(gradients(t, u, b) * inside[0])


MISUSED = {
    "order": (lambda t, u, b: u.minimize(b, t.per_example), "takes a batch.*after the function"),
    "a text": (lambda t, u, b: u.minimize("per_example", b), "a loss must be a function.*'per_ex"),
    "lambda": (lambda t, u, b: u.minimize(lambda f, training: 0, b), "with a name of letters"),
    "a model": (lambda t, u, b: u.minimize(t.per_example, b, "model"), "a Keras model.*'model'"),
    "optimizer": (lambda t, u, b: u.minimize(t.per_example, b, optimizer="a"), "no optimizer 'a'"),
    "decay": (lambda t, u, b: u.average(t.slow, of=t.model, decay=1.0), "to below 1, got 1.0"),
    "shared": (lambda t, u, b: u.average(t.model, of=t.model, decay=0.9), "none of them shared"),
    "condition": (lambda t, u, b: u.when(u.step, lambda: None), "update.when takes a bool scalar"),
    "if": (python_if, "uses a tensor where Python needs a value.*update.when"),
    "product": (lambda t, u, b: gradients(t, u, b) * gradients(t, u, b), "by a scalar alone"),
    "map": (
        lambda t, u, b: gradients(t, u, b).map(lambda g, v: tf.norm(g)),
        "a tensor of the same",
    ),
    "next": (
        lambda t, u, b: u.when(u.step > 0, lambda: u.minimize(t.per_example, u.next(b))),
        "update.next must read as many batches each time",
    ),
    "draws": (
        lambda t, u, b: u.gradients(t.per_example, b, same_draws_as=gradients(t, u, b) * 2.0),
        "same_draws_as must be a result of update.gradients",
    ),
    "moved": (within_moved, "Call update.apply after update.moved"),
    "tf.cond": (
        lambda t, u, b: tf.cond(u.step > 3, lambda: gradients(t, u, b).norm(), lambda: 0.0),
        "must be called in the step itself",
    ),
    "a new variable": (lambda t, u, b: tf.Variable(0.0), "step must not make variables"),
}


@pytest.mark.parametrize(("step", "message"), MISUSED.values(), ids=MISUSED)
def test_misuse_names_the_line_and_the_remedy(step, message):
    with pytest.raises(ConfigError, match=rf"(?s){message}.*{HERE}"):
        trainer(step)


REFUSED = {
    "moved without with": (
        lambda t, u, b: u.moved(t.model, gradients(t, u, b)),
        *({}, "used in a `with` statement"),
    ),
    "an idle optimizer": (
        lambda t, u, b: u.minimize(t.per_example, b, optimizer="generator"),
        *({"optimizer": two_optimizers}, "never uses the optimizer 'discriminator'"),
    ),
    "other verbs in another trace": (
        lambda t, u, b: (minimize(t, u, b), t.traces.append(1), t.traces[1:] and minimize(t, u, b)),
        *({"traces": list}, "calls other verbs than when the Trainer was made"),
    ),
    "one name twice": (
        lambda t, u, b: (minimize(t, u, b), u.minimize(t.doubled, b, name="per_example")),
        *({}, "two losses have the name 'per_example'"),
    ),
    "a variable outside of the scope": (minimize, {"count": OUTSIDE}, "outside the strategy's sc"),
    "an assigned variable that no checkpoint holds": (
        lambda t, u, b: (minimize(t, u, b), t.memory.rows.assign_add(tf.ones([4]))),
        *({}, "assigns to the variable .*, to which no attribute of Task leads"),
    ),
    "a forgotten layer": (
        *(minimize, {"head": lambda: perceptron(6, 1)}),
        "changes no variable of .*kernel.*although they are trainable",
    ),
    "a model outside of the task": (
        lambda t, u, b: u.minimize(t.apart, b),
        *({}, "depends on the trainable variables .*kernel.*nothing updates"),
    ),
    "a trained model outside of the task": (
        lambda t, u, b: u.minimize(t.apart, b, [*t.model.trainable_variables, *APART[0].weights]),
        *({}, "changes the variables .*kernel.*no attribute of the task leads to them"),
    ),
    "gradients of a branch outside of it": (of_a_branch, {}, "uses a value of update.when outside"),
    "a draw of TensorFlow": (
        *(tensorflow_draws, {}),
        "step runs the operation RandomStandardNormal",
    ),
    "all sources": (minimize, {"data": TWO}, "With several sources, pass one of them"),
    "an idle source": (
        lambda t, u, b: minimize(t, u, b["one"]),
        *({"data": TWO}, "never uses the source 'other'"),
    ),
    "one loss of two sources": (of_each_source, {"data": TWO}, "or one has it for two sources"),
}


@pytest.mark.parametrize(("step", "given", "message"), REFUSED.values(), ids=REFUSED)
def test_a_step_that_cannot_be_trained_rightly_is_refused(step, given, message):
    if "optimizer" in given:
        given = {"optimizer": given["optimizer"]()}
    with pytest.raises(ConfigError, match=message):
        trainer(step, **given).trace()


def test_a_verb_after_its_step():
    kept = []
    made = trainer(lambda t, u, b: (kept.append((u, b)), minimize(t, u, b)))
    with pytest.raises(ConfigError, match="not after it"):
        gradients(made.task, *kept[-1])


def test_a_variable_that_a_loss_does_not_see_has_gradient_0():
    """A loss of a step may be of a part of the model."""

    def step(t, u, b):
        own = u.gradients(t.per_example, b, [*t.model.trainable_variables, *t.slow.weights])
        idle = u.gradients(t.per_example, b, t.slow.weights, each=lambda all: all, name="idle")
        t.seen.assign(own.of(t.slow.weights).norm() + idle.norm())
        u.apply(own)

    def seen():
        return tf.Variable(1.0, trainable=False, dtype=tf.float64)

    made = trainer(step, seen=seen)
    before = made.task.slow.get_weights()
    made.train(1)
    assert float(made.task.seen.numpy()) == 0
    found = made.task.slow.get_weights()
    assert all((a == b).all() for a, b in zip(before, found, strict=True))
