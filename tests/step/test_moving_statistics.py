import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.errors import ConfigError
from ddl.precision import set_precision
from tests.conftest import make_strategy


def normalizing(strategy, *layers, **arguments):
    """A trainer of a model with the given layers, by default a plain BatchNormalization."""
    set_precision("float64")
    keras.utils.set_random_seed(0)
    data = np.random.default_rng(0)
    images = data.normal(size=(32, 3)) + np.arange(32)[:, None]
    with strategy.scope():
        made = [layer() for layer in layers] or [keras.layers.BatchNormalization(momentum=0.5)]
        model = keras.Sequential([keras.Input((3,)), *made, keras.layers.Dense(2)])
        trainer = ddl.Trainer(
            ddl.Classification(model),
            keras.optimizers.SGD(0.1),
            {"image": images, "label": np.arange(32) % 2},
            global_batch_size=32,
            shuffle=False,
            **arguments,
        )
    return trainer, images


def copies(trainer):
    moving_mean = trainer.model.layers[0].moving_mean.value
    local = trainer.strategy.experimental_local_results(moving_mean)
    return [copy.numpy() for copy in local]


def test_moving_moments_of_each_replica_are_averaged_in_each_update():
    trainer, images = normalizing(make_strategy("mirrored", 2), batch_moments="per_replica")
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
    trainer, _ = normalizing(make_strategy("mirrored", 2), RunningMean)
    with pytest.raises(ConfigError, match=r"running_mean.* other replicas.*sum_over_replicas"):
        trainer.train(1)


def test_a_layer_that_moves_in_each_microbatch_is_refused():
    with pytest.raises(ConfigError, match=r"assigns to '.*running_mean.*STEPS = 1"):
        normalizing(make_strategy("one_device", 1), RunningMean, accumulation_steps=2)


def test_central_storage_still_refuses_batch_normalization():
    """Without the aggregation that `allow_replica_writes` gives its variables."""
    strategy = make_strategy("central_storage", 2)
    with strategy.scope():
        layer = keras.layers.BatchNormalization()
        layer.build((None, 1))
    with pytest.raises(ValueError, match="aggregation"):
        strategy.run(lambda: layer(tf.ones([4, 1]), training=True))
