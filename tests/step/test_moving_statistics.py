import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.errors import ConfigError
from tests.conftest import make_strategy
from tests.contract.builders import make_trainer


def normalizing(make_layer, **arguments):
    """A trainer of a model with a layer, and its images."""

    def task():
        layers = [keras.Input((3,)), make_layer(), keras.layers.Dense(2)]
        return ddl.Classification(keras.Sequential(layers))

    images = np.random.default_rng(0).normal(size=(32, 3)) + np.arange(32)[:, None]
    data = {"image": images, "label": np.arange(32) % 2}
    make, sizes = (task, keras.optimizers.SGD), {"global_batch_size": 32}
    return make_trainer(make, data, **sizes, **arguments), images


def copies(trainer):
    moving_mean = trainer.model.layers[0].moving_mean.value
    local = trainer.strategy.experimental_local_results(moving_mean)
    return [copy.numpy() for copy in local]


def test_moving_moments_of_each_replica_are_averaged_in_each_update():
    layer = functools.partial(keras.layers.BatchNormalization, momentum=0.5)
    trainer, images = normalizing(layer, batch_moments="per_replica")
    trainer.train(1)
    of_replicas = images.reshape(2, 16, 3)
    for copy in copies(trainer):
        np.testing.assert_allclose(copy, images.mean(0) / 2, rtol=1e-14)
    variance = trainer.model.layers[0].moving_variance.numpy()  # not that of all rows
    np.testing.assert_allclose(variance, 0.5 + of_replicas.var(1).mean(0) / 2, rtol=1e-14)


class RunningMean(keras.layers.Layer):
    """Moves a mean by its own rows."""

    def build(self, shape):
        self.seen = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.seen.assign(0.5 * self.seen + 0.5 * tf.reduce_mean(x, 0))
        return x


def test_a_layer_that_writes_other_values_on_other_replicas_is_refused():
    trainer, _ = normalizing(RunningMean)
    with pytest.raises(ConfigError, match=r"running_mean.* other replicas.*sum_over_replicas"):
        trainer.train(1)


def test_a_layer_that_moves_in_each_microbatch_is_refused():
    with pytest.raises(ConfigError, match=r"assigns to '.*running_mean.*Set it to 1"):
        normalizing(RunningMean, accumulation_steps=2)


def test_central_storage_still_refuses_batch_normalization():
    """Without the aggregation that `allow_replica_writes` gives its variables."""
    strategy = make_strategy("central_storage", 2)
    with strategy.scope():
        layer = keras.layers.BatchNormalization()
        layer.build((None, 1))
    with pytest.raises(ValueError, match="aggregation"):
        strategy.run(lambda: layer(tf.ones([4, 1]), training=True))
