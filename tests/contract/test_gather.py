"""Losses across examples: with `ddl.gather` those of the whole batch, without it refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.errors import ConfigError
from tests.conftest import make_strategy

ROWS, BATCH, STEPS = 20, 8, 6  # the last batch of an epoch has 4 rows
cross_entropy = tf.nn.sparse_softmax_cross_entropy_with_logits


def data():
    random = np.random.default_rng(0)
    return {
        "one": random.normal(size=(ROWS, 3)),
        "other": random.normal(size=(ROWS, 3)),
        "label": random.integers(0, 3, ROWS),
    }


def mlp():
    dense = keras.layers.Dense
    return keras.Sequential([keras.Input((3,)), dense(4, "tanh"), dense(2)])


def similarities(queries, keys):
    return queries @ tf.transpose(keys) / 0.5


class SimClr:
    """Chen et al. 2020, NT-Xent: the other view is told from all other rows of both views."""

    def __init__(self):
        self.model = mlp()

    @property
    def models(self):
        return [self.model]

    def views(self, features, training):
        views = (self.model(features[name], training=training) for name in ("one", "other"))
        return tuple(tf.math.l2_normalize(view, -1) for view in views)

    def per_example(self, features, training):
        views = self.views(features, training)
        rows = ddl.gather(views)
        lowest = tf.float64.min
        own = tf.one_hot(rows.own, rows.mask.shape[0], on_value=True, off_value=False)
        losses, found = [], []
        for view, same, other in zip(views, rows.rows, rows.rows[::-1], strict=True):
            pairs = tf.where(rows.mask, similarities(view, other), lowest)
            negatives = tf.where(rows.mask & ~own, similarities(view, same), lowest)
            losses.append(cross_entropy(rows.own, tf.concat([pairs, negatives], 1)))
            found.append(tf.argmax(pairs, 1) == tf.cast(rows.own, tf.int64))
        accuracy = tf.cast(found[0], tf.float64)
        return ddl.PerExample((losses[0] + losses[1]) / 2, {"accuracy": accuracy})

    def plain(self, rows):
        views = self.views(rows, True)
        count = len(rows["one"])
        losses = []
        for view, other in (views, views[::-1]):
            itself = tf.linalg.diag(tf.fill([count], tf.float64.min))
            logits = tf.concat([similarities(view, other), similarities(view, view) + itself], 1)
            losses.append(tf.reduce_mean(cross_entropy(range(count), logits)))
        return (losses[0] + losses[1]) / 2


class Clip:
    """Radford et al. 2021: two encoders, each with its own logits over the rows of the other."""

    def __init__(self):
        self.images, self.texts = mlp(), mlp()

    @property
    def models(self):
        return [self.images, self.texts]

    def per_example(self, features, training):
        images = ddl.gather(self.images(features["one"], training=training))
        texts = ddl.gather(self.texts(features["other"], training=training))

        def loss(queries, keys):
            logits = similarities(tf.gather(queries.rows, queries.own), keys.rows)
            return cross_entropy(keys.own, tf.where(keys.mask, logits, tf.float64.min))

        return ddl.PerExample(loss(images, texts) + loss(texts, images))

    def step(self, update, batch):
        trained = [v for model in self.models for v in model.trainable_variables]
        update.minimize(self.per_example, batch, trained)

    def plain(self, rows):
        logits = similarities(self.images(rows["one"]), self.texts(rows["other"]))
        labels = range(len(rows["one"]))
        losses = cross_entropy(labels, logits) + cross_entropy(labels, tf.transpose(logits))
        return tf.reduce_mean(losses)


def build(of_task):
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    keras.utils.set_random_seed(7)
    return of_task(), keras.optimizers.SGD(0.3, momentum=0.9)


def make_trainer(of_task, replicas):
    strategy = make_strategy("mirrored", replicas)
    with strategy.scope():
        task, optimizer = build(of_task)
    return ddl.Trainer(
        task,
        optimizer,
        data(),
        eval_data=data(),
        global_batch_size=BATCH,
        strategy=strategy,
        shuffle=False,
    )


@pytest.mark.parametrize(("of_task", "replicas"), [(SimClr, 2), (SimClr, 4), (Clip, 4)])
def test_gathered_losses_are_those_of_the_whole_batch(of_task, replicas):
    trainer = make_trainer(of_task, replicas)
    figures = trainer.train(STEPS, progress=False)
    task, optimizer = build(of_task)
    variables = [v for model in task.models for v in model.trainable_variables]
    batches = [{k: v[i : i + BATCH] for k, v in data().items()} for i in range(0, ROWS, BATCH)]
    sizes = [len(rows["one"]) for rows in batches]
    losses = []
    for step in range(STEPS):
        with tf.GradientTape() as tape:
            loss = task.plain(batches[step % 3])
        optimizer.apply(tape.gradient(loss, variables), variables)
        losses.append(float(loss))
    found = [v for model in trainer.task.models for v in model.trainable_variables]
    for one, other in zip(found, variables, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=0, atol=1e-10)
    assert figures["loss"] == pytest.approx(np.average(losses, weights=sizes * 2), rel=1e-10)
    evaluated = np.average([task.plain(rows) for rows in batches], weights=sizes)
    assert trainer.evaluate()["loss"] == pytest.approx(evaluated, rel=1e-10)


class Across:
    """A classifier whose loss looks at other rows of its replica."""

    def __init__(self):
        self.model = mlp()

    def errors(self, features, training):
        outputs = self.model(features["one"], training=training)
        return outputs, tf.reduce_sum(tf.square(outputs - features["other"][:, :2]), 1)


class NegativesByPosition(Across):
    def per_example(self, features, training):
        outputs, _ = self.errors(features, training)
        keys = self.model(features["other"], training=training)
        labels = tf.range(tf.shape(outputs)[0])
        return ddl.PerExample(cross_entropy(labels, similarities(outputs, keys)))


class BatchHard(Across):
    """Hermans et al. 2017: the farthest row of the class and the nearest of another."""

    def per_example(self, features, training):
        outputs, _ = self.errors(features, training)
        distances = tf.reduce_sum(tf.square(outputs[:, None] - outputs[None]), -1)
        alike = features["label"][:, None] == features["label"][None]
        farthest = tf.reduce_max(tf.where(alike, distances, 0.0), 1)
        nearest = tf.reduce_min(tf.where(alike, tf.float64.max, distances), 1)
        return ddl.PerExample(tf.nn.softplus(farthest - tf.minimum(nearest, 100.0)))


class DividedByTheLargest(Across):
    def per_example(self, features, training):
        _, errors = self.errors(features, training)
        return ddl.PerExample(errors / tf.reduce_max(errors))


class DividedByTheMean(Across):
    """Metrics are bound by the same rule as losses."""

    def per_example(self, features, training):
        _, errors = self.errors(features, training)
        return ddl.PerExample(errors, {"relative": errors / tf.reduce_mean(errors)})


@pytest.mark.parametrize(
    "of_task", [NegativesByPosition, BatchHard, DividedByTheLargest, DividedByTheMean]
)
def test_a_loss_across_the_rows_of_a_replica_is_refused_at_the_start(of_task):
    with pytest.raises(ConfigError, match=r"other examples.*ddl\.gather"):
        make_trainer(of_task, 2).train(1, progress=False)


class WithPadding(Clip):
    """Takes padding for negatives."""

    def per_example(self, features, training):
        images = self.images(features["one"], training=training)
        texts = ddl.gather(self.texts(features["other"], training=training))
        return ddl.PerExample(cross_entropy(texts.own, similarities(images, texts.rows)))


def test_a_loss_of_gathered_padding_is_refused_at_the_start():
    with pytest.raises(ConfigError, match="padding.*mask"):
        make_trainer(WithPadding, 2).train(1, progress=False)
