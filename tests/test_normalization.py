import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.errors import ConfigError
from ddl.microbatch import Microbatch
from ddl.normalization import batch_moments, take_over_moments
from ddl.precision import set_precision
from tests.conftest import make_strategy

RANDOM = np.random.default_rng(0)


def microbatch(counts) -> Microbatch:
    zero = tf.zeros([], tf.int64)
    counts = None if counts is None else tf.constant(counts)
    rows = 8 if counts is None else len(counts)
    return Microbatch(seed=0, training=True, batch=zero, first_row=zero, rows=rows, counts=counts)


def moments(inputs, counts=None, axis=-1, moving=None):
    axes = [a for a in range(inputs.ndim) if a != axis % inputs.ndim]
    channels = inputs.shape[axis]
    moving = moving or (np.zeros(channels, inputs.dtype), np.ones(channels, inputs.dtype))
    counts = None if counts is None else tf.constant(counts)

    def replica():
        return batch_moments(
            tf.constant(inputs), axes, counts, list(map(tf.constant, moving)), synchronized=True
        )

    return [m.numpy() for m in make_strategy("one_device", 1).run(replica)]


@pytest.mark.parametrize("shape", [(8, 3), (8, 4, 5, 3)])
@pytest.mark.parametrize("axis", [-1, 1])
def test_moments_of_the_rows_that_count(shape, axis):
    inputs = RANDOM.normal(size=shape)
    counts = np.array([True] * 5 + [False] * 3)
    axes = tuple(a for a in range(inputs.ndim) if a != axis % inputs.ndim)
    for given, rows in ((None, inputs), (counts, inputs[:5])):
        mean, variance = moments(inputs, given, axis)
        np.testing.assert_allclose(mean, rows.mean(axes), atol=1e-14)
        np.testing.assert_allclose(variance, rows.var(axes), atol=1e-14)


def test_moments_under_a_mask_of_tokens():
    inputs, counts = RANDOM.normal(size=(8, 4, 3)), RANDOM.random((8, 4)) < 0.5
    mean, variance = moments(inputs, counts)
    np.testing.assert_allclose(mean, inputs[counts].mean(0), atol=1e-14)
    np.testing.assert_allclose(variance, inputs[counts].var(0), atol=1e-14)


def test_a_mean_far_from_zero_loses_no_digits():
    """Σx² - (Σx)² in float32 would be all rounding here."""
    inputs = (RANDOM.normal(size=(1000, 2)) + 1e4).astype("f4")
    moving = (np.full(2, 1e4, "f4"), np.ones(2, "f4"))
    _, variance = moments(inputs, moving=moving)
    np.testing.assert_allclose(variance, inputs.astype("f8").var(0), rtol=1e-3)


def test_the_moving_moments_where_nothing_counts():
    moving = (np.array([1.0, 2.0]), np.array([3.0, 4.0]))
    mean, variance = moments(np.full((4, 2), np.inf), np.zeros(4, bool), moving=moving)
    np.testing.assert_array_equal(mean, moving[0])
    np.testing.assert_array_equal(variance, moving[1])


def layer_moved_by(inputs, counts, **arguments):
    """Moving mean and variance after one call: with momentum 0 those of the batch."""
    layer = keras.layers.BatchNormalization(momentum=0.0, **arguments)
    layer.build(inputs.shape)
    take_over_moments(layer)
    with microbatch(counts).forward():
        make_strategy("one_device", 1).run(lambda: layer(tf.constant(inputs), training=True))
    return layer.moving_mean.numpy(), layer.moving_variance.numpy()


@pytest.mark.parametrize("synchronized", [True, False])
def test_padding_never_reaches_the_moments(synchronized):
    """Also holds Keras's private hook: were it renamed, padding would be counted again."""
    inputs = RANDOM.normal(size=(8, 3)).astype("f4")
    inputs[5:] = np.inf
    counts = [True] * 5 + [False] * 3
    mean, variance = layer_moved_by(inputs, counts, synchronized=synchronized)
    np.testing.assert_allclose(mean, inputs[:5].mean(0), rtol=1e-5)
    np.testing.assert_allclose(variance, inputs[:5].var(0), rtol=1e-5)


def test_parts_of_examples_count_as_they_do():
    inputs = RANDOM.normal(size=(8, 3)).astype("f4")
    mean, _ = layer_moved_by(inputs, [True, True, False, False])
    np.testing.assert_allclose(mean, inputs[:4].mean(0), rtol=1e-5)
    with pytest.raises(ConfigError, match="8 rows for 3 examples"):
        layer_moved_by(inputs, [True, True, False])


@pytest.mark.parametrize("synchronized", [True, False])
def test_elsewhere_it_is_keras_own(synchronized):
    def trained(takes_over):
        layer = keras.layers.BatchNormalization(synchronized=synchronized)
        layer.build((8, 3))
        if takes_over:
            take_over_moments(layer)
        inputs = np.random.default_rng(0).normal(size=(8, 3))
        return layer(inputs, training=True).numpy(), layer.moving_variance.numpy()

    for ours, theirs in zip(trained(True), trained(False), strict=True):
        np.testing.assert_array_equal(ours, theirs)


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


@pytest.mark.parametrize("what", ["evaluation", "checkpoint"])
def test_statistics_of_replicas_are_averaged(what, tmp_path):
    from ddl.checkpoints import Checkpoints

    average = ddl.ExponentialMovingAverage(0.0, warm_up=False)
    trainer, images = unsynchronized_trainer(make_strategy("mirrored", 2), weight_average=average)
    trainer.train(1)
    first, second = copies(trainer)
    np.testing.assert_allclose(first, images[:16].mean(0) / 2)
    np.testing.assert_allclose(second, images[16:].mean(0) / 2)
    mean = (first + second) / 2
    if what == "evaluation":
        trainer.evaluate()
    else:
        path = Checkpoints(tmp_path, trainer).save()
        reader = tf.train.load_checkpoint(path)
        saved = [
            reader.get_tensor(name)
            for name, shape in reader.get_variable_to_shape_map().items()
            if ("moving_mean" in name or "weight_average" in name) and shape == [3]
        ]
        # The moving mean itself, and its average, which forgets all else.
        assert sum(np.allclose(value, mean) for value in saved) == 2
    for copy in copies(trainer):
        np.testing.assert_allclose(copy, mean, rtol=1e-15)
    average_of_mean = trainer.weight_average.of(trainer._statistics.variables)[0]
    for copy in trainer.strategy.experimental_local_results(average_of_mean):
        np.testing.assert_allclose(copy.numpy(), mean, rtol=1e-15)


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
