import keras
import numpy as np
import pytest
import tensorflow as tf

from ddl.errors import ConfigError
from ddl.objective import Objective
from ddl.task import PerExample

SPEC = {"x": tf.TensorSpec([3], tf.float32), "weight": tf.TensorSpec([], tf.float32)}


class FreeTask:
    """Returns whatever the test wants of the outputs."""

    def __init__(self, output, **layer_arguments):
        self.model = keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(2, use_bias=False, **layer_arguments)]
        )
        self.output = output

    def per_example(self, features, training):
        return self.output(self.model(features["x"], training=training))


def objective(output, **layer_arguments) -> Objective:
    task = FreeTask(output, kernel_initializer="ones", **layer_arguments)
    return Objective(task, SPEC, 4, tf.distribute.get_strategy())


def features(*weights: float) -> dict[str, tf.Tensor]:
    return {"x": tf.ones([len(weights), 3]), "weight": tf.constant(weights)}


def test_weighted_sum_over_the_constant_batch_size():
    total, sums = objective(lambda y: PerExample(y[:, 0]))(features(1.0, 0.5, 0.0), True)
    assert float(total) == pytest.approx(3 * 1.5 / 4)
    assert sums.numpy().tolist() == [1.5, 4.5]


def test_losses_in_half_precision_are_weighed_in_float32():
    made = objective(lambda y: PerExample(tf.cast(y[:, 0], tf.bfloat16)))
    total, _ = made(features(1.001, 0.0), True)
    assert total.dtype == tf.float32
    assert float(total) == pytest.approx(3 * 1.001 / 4, rel=1e-6)


def test_a_row_of_weight_zero_may_be_anything():
    made = objective(lambda y: PerExample(y[:, 0] * tf.constant([1.0, np.nan])))
    total, sums = made(features(1.0, 0.0), True)
    assert float(total) == pytest.approx(3 / 4)
    assert sums.numpy().tolist() == [1.0, 3.0]


def test_weights_of_tokens():
    mask = tf.constant([[1.0, 0.0]])
    made = objective(lambda y: PerExample(y, {"first": y}, mask))
    assert made.task_weighs
    total, sums = made(features(1.0, 0.5), True)
    assert float(total) == pytest.approx(3 * 1.5 / 4)
    assert sums.numpy().tolist() == [1.5, 4.5, 4.5]
    assert made.metrics.names == ("loss", "first")


def test_losses_added_by_layers_count_as_a_mean_and_penalties_on_weights_do_not():
    made = objective(
        lambda y: PerExample(y[:, 0]),
        activity_regularizer=keras.regularizers.L2(0.5),
        kernel_regularizer=keras.regularizers.L2(100.0),
    )
    total, sums = made(features(1.0, 1.0), True)
    activity = 0.5 * 9.0 * 2  # Keras divides the activity penalty by the batch size
    assert float(total) == pytest.approx((3 * 2 + 2 * activity) / 4)
    assert sums.numpy().tolist() == [2.0, 6.0]
    assert float(made(features(1.0, 1.0), False)[0]) == pytest.approx(3 * 2 / 4)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (lambda y: PerExample(tf.reduce_mean(y)), "returned a scalar loss.*one loss for each"),
        (lambda y: tf.reduce_mean(y), "returned.*Tensor.*ddl.PerExample"),
        (lambda y: PerExample(tf.zeros([5])), r"shape \(5,\) for a batch of 2"),
        (lambda y: PerExample(tf.reduce_mean(y, 0, keepdims=True)[0, :1]), "for a batch of 2"),
        (lambda y: PerExample(y[:, 0], weight=y[:, :1]), r"weight has shape \(2, 1\)"),
        (lambda y: PerExample(y[:, 0], {"step": y[:, 0]}), "cannot be called 'step'"),
        (lambda y: PerExample(y[:, 0], {"mean": tf.reduce_mean(y)}), "metric 'mean' has shape"),
    ],
)
def test_what_cannot_be_weighed_is_refused(output, message):
    with pytest.raises(ConfigError, match=message):
        objective(output)


def test_gradients_do_not_depend_on_the_padding():
    made = objective(lambda y: PerExample(y[:, 0] ** 2))
    variable = made._task.model.trainable_variables[0].value

    def gradient(batch):
        with tf.GradientTape() as tape:
            total, _ = made(batch, True)
        return tape.gradient(total, variable).numpy()

    np.testing.assert_allclose(gradient(features(1.0)), gradient(features(1.0, 0.0)), rtol=1e-6)
