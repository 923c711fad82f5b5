"""Losses across examples: without `ddl.gather` refused. Of gathered rows: test_own_steps.py."""

import keras
import pytest
import tensorflow as tf

import ddl
from ddl.errors import ConfigError
from tests.contract.builders import make_trainer
from tests.contract.step_tasks import Clip, examples, mlp, of_classes, similarities


def train(of_task):
    make_trainer((of_task, keras.optimizers.SGD), examples()).train(1, progress=False)


class Across:
    """A classifier whose loss looks at other rows of its replica."""

    def __init__(self):
        self.model = mlp(2)

    def errors(self, features, training):
        outputs = self.model(features["x"], training=training)
        return outputs, tf.reduce_sum(tf.square(outputs - features["noise"][:, :2]), 1)


class NegativesByPosition(Across):
    def per_example(self, features, training):
        outputs, _ = self.errors(features, training)
        keys = self.model(features["noise"], training=training)
        labels = tf.range(tf.shape(outputs)[0])
        return ddl.PerExample(of_classes(labels, similarities(outputs, keys)))


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
        train(of_task)


class WithPadding(Clip):
    """Takes padding for negatives."""

    def per_example(self, features, training):
        images = self.images(features["x"], training=training)
        texts = ddl.gather(self.texts(features["noise"], training=training))
        return ddl.PerExample(of_classes(texts.own, similarities(images, texts.rows)))


def test_a_loss_of_gathered_padding_is_refused_at_the_start():
    with pytest.raises(ConfigError, match="padding.*mask"):
        train(WithPadding)
