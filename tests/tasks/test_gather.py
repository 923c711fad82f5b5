"""What `ddl.gather` refuses, and what it returns on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.errors import ConfigError
from tests.conftest import make_strategy, microbatch
from tests.tasks.across_examples import TASKS, InfoNce, build, data


def gathered(x, **options):
    with microbatch(rows=8, **options).forward():
        return ddl.gather(x)


def test_structures_keep_their_form():
    x = {"a": tf.range(8), "b": (tf.ones([8, 2], tf.bfloat16), tf.fill([8], True))}
    mask = [True] * 5 + [False] * 3
    rows, own_mask, own = gathered(x, mask=mask)
    tf.nest.assert_same_structure(rows, x)
    np.testing.assert_array_equal(rows["a"], range(8))
    assert rows["b"][0].dtype == tf.bfloat16
    np.testing.assert_array_equal(own_mask, mask)
    np.testing.assert_array_equal(own, range(8))
    assert gathered(x).mask.numpy().all()


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (1.0, "got a scalar"),
        (tf.ones([4, 8]), r"got the shape \(4, 8\)"),
        (tf.ones([16, 2]), "pass two views of the rows as a tuple"),
        ((tf.ones([8]), tf.ones([3])), r"got the shape \(3,\)"),
        (tf.fill([8], "text"), "got string"),
        (tf.complex(tf.ones([8]), 1.0), "got complex64"),
        ((), "a tensor or a structure of tensors"),
    ],
    ids=["scalar", "short", "two views", "one short", "text", "complex", "nothing"],
)
def test_other_tensors_are_refused(x, message):
    with pytest.raises(ConfigError, match=rf"ddl\.gather takes .*{message}"):
        gathered(x)


def test_outside_of_a_loss_it_is_refused():
    with pytest.raises(ConfigError, match="must be called in a loss that a ddl.Trainer runs"):
        ddl.gather(tf.ones([8]))


class InStep(InfoNce):
    def step(self, update, batch):
        ddl.gather(tf.ones([16]))


class InLoop(InfoNce):
    def gather(self, x):
        gather = super().gather
        return gather(x)._replace(rows=tf.map_fn(lambda row: gather(x).rows[0] + row, x))


class ForEach(InfoNce):
    def step(self, update, batch):
        update.apply(update.gradients(self.per_example, batch, each=lambda gradients: gradients))


class InMean(InfoNce):
    def distance(self, features, training):
        return super().per_example(features, training).loss

    def alone(self, features, training):
        return ddl.PerExample(tf.reduce_sum(self.model(features["x"], training=training) ** 2, 1))

    def step(self, update, batch):
        update.minimize(self.alone, batch)
        update.mean(self.distance, batch)


MISUSES = {
    "in a step": (InStep, {}, "In a step, call it in the loss"),
    "in a loop": (InLoop, {}, "must not be called in a loop"),
    "for each example": (ForEach, {}, "with `each`, the gradient of an example must be its own"),
    "in a mean with microbatches": (
        InMean,
        {"accumulation_steps": 2},
        "InMean.distance calls ddl.gather",
    ),
    "with microbatches": (
        InfoNce,
        {"accumulation_steps": 2},
        r"InfoNce.per_example calls ddl.gather.*Set ACCUMULATION_STEPS = 1.*Trainer.remat",
    ),
}


@pytest.mark.parametrize(("task", "options", "message"), MISUSES.values(), ids=MISUSES)
def test_misuses_are_refused_at_the_start(task, options, message, monkeypatch):
    monkeypatch.setitem(TASKS, "Misused", task)
    with pytest.raises(ConfigError, match=message):
        build("Misused", make_strategy("mirrored", 2), **options).trace()


class Compares(InfoNce):
    def predict(self, features):
        return self.gather(self.model(features["x"])).rows

    def losses(self, features):
        return self.per_example(features, False).loss


def test_an_output_gathers_nothing(monkeypatch):
    """Another function, such as one that returns the losses, may."""
    monkeypatch.setitem(TASKS, "Compares", Compares)
    trainer = build("Compares", make_strategy("one_device", 1))
    with pytest.raises(ConfigError, match="was called in predict, but an output must not depend"):
        trainer.predict(data())
    losses = trainer.predict(data(), function=trainer.task.losses)
    assert losses.mean() == pytest.approx(trainer.evaluate()["loss"], abs=1e-12)


def test_in_an_evaluation_it_covers_the_batch():
    """The mean over batches of 16 and 5 rows, each as a whole, whatever the accumulation."""
    trainer = build("InfoNce", make_strategy("one_device", 1), made={"dropout": False})
    losses = []
    for rows in (slice(0, 16), slice(16, None)):
        x = data()["x"][rows]
        queries, keys = (trainer.task.embedded(view, False) for view in (x, x[:, ::-1]))
        logits = queries @ tf.transpose(keys) / 0.5
        own = range(len(x))
        losses += [*keras.ops.sparse_categorical_crossentropy(own, logits, from_logits=True)]
    assert trainer.evaluate()["loss"] == pytest.approx(np.mean(losses), abs=1e-12)
