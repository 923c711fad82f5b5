"""Misspelt and misused verbs: an error of ddl that names the line, instead of one of Python."""

import copy

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.errors import ConfigError
from ddl.precision import set_precision
from ddl.step.verbs.batches import BatchesBySource, StepBatch
from tests.conftest import make_strategy
from tests.step.verbs.own_steps import data

HERE = r"\n  raised in tests/step/verbs/test_misuse\.py:\d+\n    "


class Misused:
    """A task whose step is given."""

    def __init__(self, step):
        self.model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
        self.slow = keras.models.clone_model(self.model)
        self.slow.trainable = False
        self.own_step = step

    def per_example(self, features, training):
        logits = self.model(features["x"], training=training)
        return ddl.PerExample(
            tf.nn.sparse_softmax_cross_entropy_with_logits(features["label"], logits)
        )

    def wrong_key(self, features, training):
        return ddl.PerExample(self.model(features["lable"])[:, 0])

    def wrong_attribute(self, given, training):
        return ddl.PerExample(self.model(given.x)[:, 0])

    def without_training(self, features):
        return ddl.PerExample(self.model(features["x"])[:, 0])

    def own_key_error(self, features, training):
        return ddl.PerExample({"a": self.model(features["x"])[:, 0]}["b"])

    def step(self, update, batch):
        self.own_step(self, update, batch)


def trainer(step):
    set_precision("float64")
    strategy = make_strategy("one_device", 1)
    with strategy.scope():
        return ddl.Trainer(
            Misused(step),
            keras.optimizers.SGD(0.1),
            data(16),
            global_batch_size=8,
            strategy=strategy,
        )


def gradients(task, update, batch):
    return update.gradients(task.per_example, batch)


MISUSED = [
    # Names
    (lambda t, u, b: u.minimise(t.per_example, b), r"update\.minimise does not.*mean minimize\?"),
    (
        lambda t, u, b: u.optimizer,
        "update.optimizer does not exist. The attributes of update are",
    ),
    (lambda t, u, b: gradients(t, u, b).nrom(), "gradients.nrom does not exist. Did you mean norm"),
    (lambda t, u, b: u.minimize(t.per_exmaple, b), "'per_exmaple'. Did you mean per_example"),
    (lambda t, u, b: u.minimize(t.per_example, b.x), r"A step cannot read batch\.x: each replica"),
    (lambda t, u, b: u.minimize(t.per_example, b["x"]), r"A step cannot read batch\['x'\]"),
    (lambda t, u, b: b.keys(), r"A step cannot read batch\.keys"),
    (lambda t, u, b: list(b), "A step cannot read the batch in a loop"),
    (lambda t, u, b: len(b), r"A step cannot read len\(batch\)"),
    (lambda t, u, b: "x" in b, "A step cannot read 'x' in batch"),
    # Arguments
    (
        lambda t, u, b: u.minimize(t.per_example),
        r"Misused.step: update.minimize takes \(loss, batch, model=None, \*, optimizer=None, "
        r"name=None\), but the call is missing 1 required positional argument: 'batch'\.",
    ),
    (lambda t, u, b: u.minimize(t.per_example, b, modle=t), "the unexpected keyword.*'modle'"),
    (lambda t, u, b: u.minimize(t.per_example, b, t.model, "sgd"), "too many positional arguments"),
    (lambda t, u, b: u.minimize(b, t.per_example), "The function comes first, then the batch"),
    (lambda t, u, b: u.minimize("per_example", b), "a loss must be a function.*'per_example'"),
    (lambda t, u, b: u.minimize(t.without_training, b), r"function of \(features, training\), got"),
    (lambda t, u, b: u.minimize(t.per_example, b, name=3), "needs a name.*got 3"),
    (lambda t, u, b: u.minimize(t.per_example, b, name=""), "needs a name.*got ''"),
    (lambda t, u, b: u.minimize(t.per_example, b, "model"), "must be a Keras model.*got 'model'"),
    (
        lambda t, u, b: u.minimize(t.per_example, b, optimizer=t.model),
        "optimizer must be the name of an optimizer, a text, got <Sequential",
    ),
    (lambda t, u, b: u.apply([1.0]), r"update.apply takes the result of update.gradients, got \[1"),
    (lambda t, u, b: u.moved(t.model, 0.1), "update.moved takes the result.*got 0.1"),
    (lambda t, u, b: u.average(t.slow, of=t.model, decay="0.9"), "decay must be.*got '0.9'"),
    (lambda t, u, b: u.average(t.slow, of=t.model, decay=None), "decay must be at least.*got None"),
    (lambda t, u, b: u.average(t.slow, of=t.model, decay=1.0), "decay must be.*below 1.*got 1.0"),
    (
        lambda t, u, b: u.average(t.slow, of=t.model, decay=tf.constant([0.1, 0.2])),
        r"a float scalar tensor, got <tf.Tensor",
    ),
    (lambda t, u, b: u.average(t.model, of=t.model, decay=0.9), "must not share weights"),
    (lambda t, u, b: u.mean("x", b), r"The function of update.mean must be.*\(features, training"),
    (lambda t, u, b: u.next(None), "update.next takes the batch"),
    # Control flow
    (lambda t, u, b: u.when(u.step, lambda: None), "the condition must be a bool scalar"),
    (lambda t, u, b: u.when(tf.constant([True, False]), lambda: None), "bool scalar.*got <tf.Tens"),
    (lambda t, u, b: u.when(None, lambda: None), "the condition must be a bool scalar.*got None"),
    (lambda t, u, b: u.when(True, print("")), "of update.when must be a function without arg"),
    (lambda t, u, b: u.when(u.step > 1, lambda x: None), r"without arguments, got .*<lambda>\(x\)"),
    (lambda t, u, b: float(u.step), "uses a tensor where Python needs a value"),
    (lambda t, u, b: u.step.numpy(), "uses a tensor where Python needs a value"),
    (lambda t, u, b: np.asarray(u.step), "uses a tensor where Python needs a value"),
    # Gradients
    (lambda t, u, b: gradients(t, u, b) + 1, "Only gradients can be added here, got 1"),
    (lambda t, u, b: 1 - gradients(t, u, b), r"from gradients .* got 1 - gradients. Use map"),
    (lambda t, u, b: gradients(t, u, b).of(3), "argument of Gradients.of must be .*, got 3. Pass"),
    (lambda t, u, b: u.gradients(t.per_example, b, 3), "`model` of update.gradients must .* got 3"),
    (lambda t, u, b: gradients(t, u, b).dot(3), "Only gradients can be multiplied here, got 3"),
    (lambda t, u, b: gradients(t, u, b).and_of(3), "Gradients.and_of takes the result.*got 3"),
    (lambda t, u, b: 1 / gradients(t, u, b), r"got 1 / gradients. Divide by gradients.norm\(\)"),
    (lambda t, u, b: gradients(t, u, b) / 0, "must not be 0, got gradients / 0. Pass another"),
    (lambda t, u, b: gradients(t, u, b) * "a", "a number or a scalar tensor, got 'a'"),
    (lambda t, u, b: gradients(t, u, b) * None, "a number or a scalar tensor, got None"),
    (lambda t, u, b: gradients(t, u, b) * gradients(t, u, b), "Use dot.. for the inner product"),
    (lambda t, u, b: gradients(t, u, b)[0], "Gradients are not a list"),
    (lambda t, u, b: list(gradients(t, u, b)), "Gradients are not a list"),
    (lambda t, u, b: tf.norm(gradients(t, u, b)), "Gradients are not a tensor.*Use norm"),
    (lambda t, u, b: gradients(t, u, b).map(lambda g: g), r"a function of \(gradient, variable\)"),
    (lambda t, u, b: gradients(t, u, b).map(lambda g, v: None), "return a tensor for .*kernel"),
    (
        lambda t, u, b: gradients(t, u, b).map(lambda g, v: tf.reduce_sum(g)),
        r"must return float64 \(6, 3\) for .*kernel, as the gradient is, got float64 \(\)",
    ),
    (
        lambda t, u, b: gradients(t, u, b).map(lambda g, v: tf.cast(g, "float32")),
        r"must return float64 \(6, 3\).*got float32 \(6, 3\)",
    ),
    (lambda t, u, b: u.gradients(t.per_example, b, each=3), "`each` of update.gradients must be"),
]


@pytest.mark.parametrize(("step", "message"), MISUSED)
def test_misuse_names_the_line_and_the_remedy(step, message):
    with pytest.raises(ConfigError, match=rf"(?s){message}.*{HERE}"):
        trainer(step)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            "wrong_key",
            r"wrong_key reads features\['lable'\].* label, x. Did you mean label",
        ),
        (
            "wrong_attribute",
            r"wrong_attribute reads features\.x, .* a dict: write features\[",
        ),
    ],
)
def test_a_feature_that_does_not_exist(loss, message):
    with pytest.raises(ConfigError, match=rf"(?s){message}.*{HERE}"):
        trainer(lambda t, u, b: u.minimize(getattr(t, loss), b))


def test_errors_of_the_user_stay_as_they_are():
    with pytest.raises(KeyError, match="^'b'$"):
        trainer(lambda t, u, b: u.minimize(t.own_key_error, b))
    with pytest.raises(ZeroDivisionError):
        trainer(lambda t, u, b: 1 / 0)


def test_an_update_that_was_kept():
    kept = []

    def step(task, update, batch):
        kept.append((update, batch))
        update.minimize(task.per_example, batch)

    task = trainer(step).task
    with pytest.raises(ConfigError, match="update.gradients was called after its step had ended"):
        gradients(task, *kept[-1])


def test_moved_without_with():
    with pytest.raises(ConfigError, match="moves nothing unless it is used in a `with` statement"):
        trainer(lambda t, u, b: u.moved(t.model, gradients(t, u, b)))


@pytest.mark.parametrize("each", [lambda g: g[0], lambda g: None, lambda g: [None] * len(g)])
def test_each_must_return_a_list_of_tensors(each):
    def step(task, update, batch):
        update.apply(update.gradients(task.per_example, batch, each=each))

    with pytest.raises(ConfigError, match=r"`each` must return a list with a tensor for each var"):
        trainer(step).trace()


def test_batches_of_several_sources():
    batches = BatchesBySource(labelled=StepBatch("labelled", 0, None))
    with pytest.raises(ConfigError, match=r"no source 'labeled', but labelled\. Did you mean labe"):
        batches["labeled"]
    with pytest.raises(ConfigError, match=r'batch.labelled does not exist.*batch\["labelled"\]'):
        _ = batches.labelled
    assert not hasattr(batches, "keyz")
    assert copy.copy(batches) == batches
