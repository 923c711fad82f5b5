import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.distribution.workers import Workers
from ddl.precision import set_precision
from ddl.step.moving_statistics import Statistics, synchronized
from tests.conftest import for_each_kind_on_two, make_strategy, save
from tests.training.overflowing import Overflowing, second_batch_on
from tests.training.test_trainer import DATA


def unsynchronized_trainer(strategy, examples=32, **arguments):
    set_precision("float64")
    keras.utils.set_random_seed(0)
    data = np.random.default_rng(0)
    images = data.normal(size=(examples, 3)) + np.arange(examples)[:, None]
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((3,)),
                keras.layers.BatchNormalization(momentum=0.5),
                keras.layers.Dense(2),
            ]
        )
        trainer = ddl.Trainer(
            ddl.Classification(model),
            keras.optimizers.SGD(0.1),
            {"image": images, "label": np.arange(examples) % 2},
            global_batch_size=32,
            eval_data={"image": images, "label": np.arange(examples) % 2},
            shuffle=False,
            **arguments,
        )
    return trainer, images


def copies(trainer):
    moving_mean = trainer.model.layers[0].moving_mean.value
    local = trainer.strategy.experimental_local_results(moving_mean)
    return [copy.numpy() for copy in local]


def trained_on_two(rule=None):
    trainer, images = unsynchronized_trainer(make_strategy("mirrored", 2), weight_average=rule)
    trainer.train(1)
    first, second = copies(trainer)
    np.testing.assert_allclose(first, images[:16].mean(0) / 2)
    np.testing.assert_allclose(second, images[16:].mean(0) / 2)
    return trainer, (first + second) / 2


def test_statistics_of_replicas_are_averaged_for_an_evaluation_and_come_back():
    trainer, mean = trained_on_two()
    before = copies(trainer)
    with trainer.evaluation_weights():
        for copy in copies(trainer):
            np.testing.assert_allclose(copy, mean, rtol=1e-15)
        inside = trainer.evaluate()
    np.testing.assert_array_equal(copies(trainer), before)
    assert trainer.evaluate() == inside
    np.testing.assert_array_equal(copies(trainer), before)


def test_a_checkpoint_holds_the_mean_of_all_replicas(tmp_path):
    # An average that forgets all else is the moving mean itself.
    trainer, mean = trained_on_two(ddl.ExponentialMovingAverage(0.0, warm_up=False))
    before = copies(trainer)
    reader = tf.train.load_checkpoint(save(tmp_path, trainer))
    saved = [
        reader.get_tensor(name)
        for name, shape in reader.get_variable_to_shape_map().items()
        if ("moving_mean" in name or "averages" in name) and shape == [3]
    ]
    assert sum(np.allclose(value, mean) for value in saved) == 2
    np.testing.assert_array_equal(copies(trainer), before)


class Counter(keras.layers.Layer):
    """Writes an integer, and keeps an infinite constant."""

    def build(self, shape):
        arguments = {"shape": (), "trainable": False}
        self.calls = self.add_weight(name="calls", dtype="int32", initializer="zeros", **arguments)
        self.mask = self.add_weight(
            name="mask", initializer=lambda shape, dtype: tf.constant(-np.inf, dtype), **arguments
        )

    def call(self, x, training=False):
        if training:
            self.calls.assign(self.calls + 1)
        return x + tf.cast(tf.exp(self.mask), x.dtype)


@for_each_kind_on_two
def test_any_variable_that_a_layer_writes(strategy):
    """Each strategy counts, a skipped update restores the count, infinities stay."""
    set_precision("mixed_float16")
    with strategy.scope():
        counter = Counter()
        scaled = keras.layers.Rescaling(1 / 255)
        layers = [scaled, keras.layers.Flatten(), counter, keras.layers.Dense(2)]
        model = keras.Sequential([keras.Input((6, 6, 1)), *layers])
        task = Overflowing(model, second_batch_on(0))
        trainer = ddl.Trainer(
            task,
            keras.optimizers.SGD(1e-4),
            DATA,
            eval_data=DATA,
            global_batch_size=32,
            weight_average=ddl.ExponentialMovingAverage(0.5),
            loss_scale=ddl.LossScale(1024.0),
            max_skipped_updates=1,
        )
    trainer.train(1)
    # Calls the loop: `train` would raise TrainingDiverged and trace the gradients once more.
    trainer.state = trainer._runner.loop.run(trainer.state, 2)
    assert (trainer.step, trainer.skipped_updates) == (1, 1)
    trainer.evaluate()
    assert counter.calls.numpy() == 1
    assert counter.mask.numpy() == -np.inf
    assert all(np.isfinite(v.numpy()).all() for v in trainer.averages.of([layers[-1].kernel.value]))
    assert trainer.averages.of([counter.mask.value])[0].numpy() == -np.inf


@pytest.mark.parametrize("replicas", [2, 3])
def test_what_agrees_is_not_changed_by_a_bit(replicas):
    strategy = make_strategy("mirrored", replicas)
    with strategy.scope():
        variable = tf.Variable(np.random.default_rng(0).normal(size=100).astype("f4"))
    before = variable.numpy()
    copies = [strategy.experimental_local_results(variable)]
    with synchronized(copies, Workers(strategy)):
        np.testing.assert_array_equal(variable.numpy(), before)


def test_a_layer_that_learned_outside_of_the_scope():
    """As Normalization does by `adapt`: it is read alone, on every replica."""
    set_precision("float32")
    outside = keras.layers.Normalization()
    outside.adapt(np.array([[1.0], [3.0]], "f4"))
    strategy = make_strategy("mirrored", 2)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((6, 6, 1)), keras.layers.Flatten(), keras.layers.Dense(2)]
        )
        task = ddl.Classification(model, augmentations=[lambda x, training: outside(x)])
        task.normalization = outside
        trainer = ddl.Trainer(
            task,
            keras.optimizers.SGD(1e-5),
            DATA,
            eval_data=DATA,
            global_batch_size=32,
            weight_average=ddl.ExponentialMovingAverage(),
            loss_scale=ddl.LossScale(2.0),
        )
    trainer.train(2)
    assert np.isfinite(trainer.evaluate()["loss"])


def test_frozen_weights_are_no_statistics():
    strategy = make_strategy("one_device", 1)
    with strategy.scope():
        layers = [keras.layers.Dense(2), keras.layers.Dropout(0.5)]
        model = keras.Sequential([keras.Input((3,)), *layers])
        model.trainable = False
        layers.append(keras.layers.BatchNormalization())
        layers[-1].build((None, 3))
    assert len(Statistics(layers, strategy).variables) == 2


def test_a_replica_of_padding_alone_keeps_its_statistics():
    trainer, images = unsynchronized_trainer(make_strategy("mirrored", 4), examples=20)
    trainer.train(1)  # 8 rows a replica: 8, 8, 4 and none that count
    first, _, third, fourth = copies(trainer)
    np.testing.assert_allclose(first, images[:8].mean(0) / 2)
    np.testing.assert_allclose(third, images[16:].mean(0) / 2)
    np.testing.assert_array_equal(fourth, np.zeros(3))


def test_central_storage_trains_a_layer_that_is_not_synchronized():
    trainer, images = unsynchronized_trainer(make_strategy("central_storage", 2))
    trainer.train(1)
    np.testing.assert_allclose(copies(trainer)[0], images.mean(0) / 2)


def mixed_trainer(strategy, precision):
    """One layer that is synchronized, and one that is not and holds a count as well."""
    set_precision(precision)
    keras.utils.set_random_seed(0)
    random = np.random.default_rng(0)
    labels = random.integers(0, 2, 64)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((3,)),
                keras.layers.BatchNormalization(momentum=0.5, synchronized=True),
                keras.layers.Dense(8, "relu"),
                keras.layers.BatchNormalization(momentum=0.5),
                keras.layers.Dense(2, dtype="float32"),
            ]
        )
        return ddl.Trainer(
            ddl.Classification(model),
            keras.optimizers.SGD(0.1, momentum=0.9),
            {"image": random.normal(size=(64, 3)) + 3 * labels[:, None], "label": labels},
            global_batch_size=32,
            strategy=strategy,
        )


@functools.cache
def moving_means_in_float32():
    reference = mixed_trainer(make_strategy("one_device", 1), "float32")
    reference.train(1)
    return [reference.model.layers[index].moving_mean.numpy() for index in (0, 2)]


@pytest.mark.parametrize(
    ("where", "precision"),
    [
        (("one_device", 1), "mixed_float16"),
        (("mirrored", 2), "mixed_float16"),
        (("mirrored", 2), "mixed_bfloat16"),
        (("central_storage", 2), "mixed_float16"),
    ],
    ids=str,
)
def test_batch_normalization_in_mixed_precision(where, precision):
    """The moments are those of one device in float32, up to the rounding of the format."""
    synchronized_means, own_means = moving_means_in_float32()
    trainer = mixed_trainer(make_strategy(*where), precision)
    first = trainer.train(1)["loss"]
    with trainer.evaluation_weights():
        ours = [trainer.model.layers[index].moving_mean.numpy() for index in (0, 2)]
        np.testing.assert_allclose(ours[0], synchronized_means, rtol=0.02, atol=0.02)
        np.testing.assert_allclose(ours[1], own_means, rtol=0.1, atol=0.1)
    assert trainer.train(30)["loss"] < first / 2
    assert trainer.skipped_updates == 0
    assert (trainer.loss_scale is None) == (precision == "mixed_bfloat16")
    for variable in trainer.model.variables:
        assert np.isfinite(variable.numpy()).all()
