import keras
import numpy as np
import pytest
import tensorflow as tf

from ddl.errors import ConfigError
from ddl.step.objective import Objective
from ddl.tasks.task import PerExample

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
        (
            lambda y: PerExample(tf.reduce_mean(y)),
            "must return one loss for each.* got a scalar loss",
        ),
        (lambda y: tf.reduce_mean(y), "must return a ddl.PerExample .* got .*Tensor"),
        (
            lambda y: PerExample(tf.zeros([5])),
            r"the batch, 2, got shape \(5,\). Reduce over the other",
        ),
        (
            lambda y: PerExample(tf.reduce_mean(y, 0, keepdims=True)[0, :1]),
            "first dimension is the batch, 2, got shape",
        ),
        (lambda y: PerExample(y[:, 0], weight=y[:, :1]), r"got weights of shape \(2, 1\)"),
        (lambda y: PerExample(y[:, 0], {"step": y[:, 0]}), "metric name 'step' is reserved"),
        (lambda y: PerExample(y[:, 0], {"": y[:, 0]}), "a metric has the empty name"),
        (lambda y: PerExample(tf.cast(y[:, 0], tf.int32)), "losses of a floating dtype, got int32"),
        (lambda y: PerExample(3.0), "must return losses as a tensor, got float. Compute it with"),
        (lambda y: PerExample(y[:, 0], weight=2.0), "must return weights as a tensor, got float"),
        (lambda y: PerExample(y[:, 0], {"a": None}), "the metric 'a' as a tensor, got NoneType"),
        (
            lambda y: PerExample(y[:, 0], {"a": tf.strings.as_string(y[:, 0])}),
            "must return the metric 'a' as numbers, got string",
        ),
        (lambda y: PerExample(y[:, 0], [y[:, 0]]), "metrics as a dict from name to values, got"),
        (lambda y: PerExample(y[:, 0], {3: y[:, 0]}), "metrics as a dict from name to values, got"),
        (
            lambda y: PerExample(y[:, 0], {"mean": tf.reduce_mean(y)}),
            "metric 'mean' for each .* got shape",
        ),
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


FOLLOWERS = {
    "column against row": lambda y: PerExample(y[:, :1] - y[:, 0]),
    "row against column": lambda y: PerExample(y[:, 0] - y[:, :1]),
    "third dimension": lambda y: PerExample(y[:, :1, tf.newaxis] - y[:, 0]),
    "with the metric": lambda y: PerExample(y[:, :1] - y[:, 0], {"error": y[:, :1] - y[:, 0]}),
}


@pytest.mark.parametrize("output", FOLLOWERS.values(), ids=FOLLOWERS)
def test_a_second_dimension_that_follows_the_batch_is_refused(output):
    with pytest.raises(ConfigError, match="the loss has shape .* its second dimension grows"):
        objective(output)


@pytest.mark.parametrize(
    "output",
    [
        lambda y: PerExample(y, weight=y[:, :1] * y[:, 0]),
        lambda y: PerExample(y, {"pairs": y[:, :1] * y[:, 0]}),
    ],
    ids=["weight", "metric"],
)
def test_so_is_one_that_has_the_size_of_the_losses_by_chance(output):
    with pytest.raises(ConfigError, match=r"shape \(4, 4\) (and|for) losses of shape \(4, 2\)"):
        objective(output)


def test_a_second_dimension_of_its_own_is_not():
    """As large as the batch that the task is tried with, by chance."""
    traced = []

    def output(y):
        traced.append(y.shape[0])
        return PerExample(y, {"each": y}, tf.ones_like(y))

    objective(output)
    assert traced == [2, 4, 2]  # the last one as in training


def test_one_trace_in_each_mode_is_enough_for_a_vector_of_losses():
    traced = []

    def output(y):
        traced.append(y.shape[0])
        return PerExample(y[:, 0])

    objective(output)
    assert traced == [2, 2]  # as in an evaluation, and as in training


@pytest.mark.parametrize("shape", [(), (1,)])
def test_losses_of_keras_bring_labels_to_the_shape_of_predictions(shape):
    loss = keras.losses.MeanSquaredError(reduction=None)
    objective(lambda y: PerExample(loss(tf.ones([y.shape[0], *shape]), y[:, :1])))


class BySplit(FreeTask):
    """Gives other metrics, or weights, in training than in an evaluation."""

    def per_example(self, features, training):
        return self.output(self.model(features["x"], training=training), training)


def by_split(output) -> Objective:
    task = BySplit(output, kernel_initializer="ones")
    return Objective(task, SPEC, 4, tf.distribute.get_strategy())


def test_training_and_evaluation_have_metrics_of_their_own():
    made = by_split(lambda y, training: PerExample(y[:, 0], {"a" if training else "b": y[:, 1]}))
    assert made.metrics.names == ("loss", "a")
    assert made.evaluation_metrics.names == ("loss", "b")
    for training in (True, False):
        assert made(features(1.0, 0.5), training)[1].numpy().tolist() == [1.5, 4.5, 4.5]


def test_weights_that_only_training_gives_are_seen():
    made = by_split(lambda y, training: PerExample(y[:, 0], {}, y[:, 0] if training else None))
    assert made.task_weighs


def test_metrics_are_checked_in_training_too():
    with pytest.raises(ConfigError, match="metric name 'step' is reserved"):
        by_split(lambda y, training: PerExample(y[:, 0], {"step": y[:, 0]} if training else {}))


def test_names_that_depend_on_more_than_the_split():
    made = by_split(lambda y, training: PerExample(y[:, 0], {f"of_{y.shape[0]}": y[:, 0]}))
    for training in (True, False):
        message = "returned of_3; in the check .* returned of_2. Metric names"
        with pytest.raises(ConfigError, match=message):
            made(features(1.0, 1.0, 1.0), training)


def test_what_trains_on_one_batch_size_alone_has_the_metrics_of_an_evaluation():
    def output(y, training):
        # As a layer that keeps the last batch.
        return PerExample(y[:, 0] + tf.ones([3]) if training else y[:, 0], {"same": y[:, 1]})

    made = by_split(output)
    assert made.metrics.names == ("loss", "same")
    assert made(features(1.0, 1.0, 1.0), True)[1].numpy().tolist() == [3.0, 12.0, 9.0]


def test_a_task_for_even_batches_is_tried_with_two_rows_alone():
    def output(y):
        pairs = tf.reshape(y, [-1, 2, y.shape[-1]])
        return PerExample(tf.reshape(pairs, [-1, y.shape[-1]]))

    objective(output)
