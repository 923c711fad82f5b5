import keras
import numpy as np
import pytest
import tensorflow as tf

from ddl.errors import ConfigError
from ddl.step import gradients as gradient_path
from ddl.step.gradients import merge_duplicates
from tests.conftest import for_every_strategy, make_strategy


def model_and_optimizer(strategy, **arguments):
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        return model, keras.optimizers.SGD(0.1, **arguments)


def test_refuses_an_optimizer_made_outside_the_scope():
    strategy = make_strategy("mirrored", 2)
    model, _ = model_and_optimizer(strategy)
    with pytest.raises(ConfigError, match="outside the strategy's scope"):
        gradient_path.prepare_optimizer(
            keras.optimizers.SGD(0.1), model.trainable_variables, strategy
        )


@for_every_strategy
def test_apply_takes_gradients_as_they_are(strategy):
    """Holds Keras's private hook: were it renamed, `apply` would sum over replicas again."""
    model, optimizer = model_and_optimizer(strategy)
    variables = model.trainable_variables
    before = [v.numpy() for v in variables]
    gradient_path.prepare_optimizer(optimizer, variables, strategy)

    @tf.function(autograph=False)
    def update():
        def replica():
            optimizer.apply([tf.ones(v.shape) for v in variables], variables)

        strategy.run(replica)

    update()
    for was, variable in zip(before, variables, strict=True):
        np.testing.assert_allclose(variable.numpy(), was - 0.1, rtol=1e-6)


def slices(values, indices):
    return tf.IndexedSlices(tf.constant(values), tf.constant(indices), tf.constant([4, 2]))


def test_gradients_of_several_number_formats_have_one_norm():
    gradients = [tf.constant([3.0]), tf.constant([4.0], tf.float64)]
    clipped, norm = gradient_path.clip_by_global_norm(gradients, 1.0)
    assert (norm.dtype, float(norm)) == (tf.float64, pytest.approx(5.0))
    assert [g.dtype for g in clipped] == [tf.float32, tf.float64]
    np.testing.assert_allclose([float(g[0]) for g in clipped], [0.6, 0.8], rtol=1e-6)


def test_a_repeated_row_is_counted_once():
    repeated = slices([[1.0, 0.0], [2.0, 0.0], [0.0, 4.0]], [1, 1, 3])
    dense = tf.convert_to_tensor(repeated)
    merged = merge_duplicates(repeated)
    clipped, norm = gradient_path.clip_by_global_norm([merged], 1.0)
    expected, expected_norm = gradient_path.clip_by_global_norm([dense], 1.0)
    assert float(norm) == pytest.approx(float(expected_norm))
    np.testing.assert_allclose(tf.convert_to_tensor(clipped[0]), expected[0], rtol=1e-6)
