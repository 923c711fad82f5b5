"""What the pages for those who come from Keras or TensorFlow say of the installed versions."""

import ast
import operator
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.conftest import make_strategy
from tests.documents.pages import PAGES, blocks

FROM = [page for page in PAGES if page.name.startswith("from-")]
THEIRS = [block for page in PAGES for block in blocks(page) if block.language == "py"]


def test_code_of_other_frameworks_stands_on_their_pages():
    assert {block.page.name for block in THEIRS} == {
        "from-keras.md",
        "from-orbit.md",
        "from-tensorflow-tutorial.md",
        "keras-scripts.md",
    }


@pytest.mark.parametrize("block", THEIRS, ids=lambda block: block.page.name)
def test_code_of_other_frameworks_parses(block):
    ast.parse(block.text)


@pytest.mark.parametrize("page", FROM, ids=lambda page: page.name)
def test_names_of_tensorflow(page):
    for name in re.findall(r"(?<![\w.])tf\.([A-Za-z][\w.]*\w)", page.read_text()):
        operator.attrgetter(name)(tf)  # raises AttributeError


@pytest.mark.parametrize("page", FROM, ids=lambda page: page.name)
def test_pages_are_read_in_three_minutes(page):
    assert len(page.read_text().splitlines()) <= 150


class ByTrainStep(keras.Model):
    """The mean of w·x as the loss, by a `train_step`."""

    def __init__(self):
        super().__init__()
        self.layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        self.layer.build((None, 1))
        self.mean = keras.metrics.Mean("mean")
        self.built = True

    def call(self, x):
        return self.layer(x)

    @property
    def metrics(self):
        return [self.mean]

    def train_step(self, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self(x))
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        self.mean.update_state(tf.reduce_mean(x))
        return {"mean": self.mean.result()}


class ByComputeLoss(ByTrainStep):
    """The same loss, by `compute_loss`."""

    metrics = keras.Model.metrics
    train_step = keras.Model.train_step

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return tf.reduce_mean(y_pred) + 1


def fitted(model, replicas, x, batch):
    """Fits one epoch. Returns the change of the weight, and the logs of the epoch."""
    strategy = make_strategy("mirrored", replicas)
    with strategy.scope():
        made = model()
        made.compile(keras.optimizers.SGD(1.0))
        made.optimizer.build(made.trainable_variables)
    dataset = tf.data.Dataset.from_tensor_slices(np.reshape(x, (-1, 1)).astype("f4"))
    logs = made.fit(dataset.batch(batch), epochs=1, verbose=0).history
    return made.layer.kernel.numpy().item(), {name: values[-1] for name, values in logs.items()}


@pytest.mark.parametrize("model", [ByTrainStep, ByComputeLoss])
def test_a_mean_is_summed_over_replicas(model):
    one, _ = fitted(model, 1, np.ones(8), batch=8)
    four, _ = fitted(model, 4, np.ones(8), batch=8)
    assert (one, four) == (-1.0, -4.0)


def test_the_logged_loss_of_compute_loss_is_multiplied_by_the_replicas():
    _, one = fitted(ByComputeLoss, 1, np.ones(8), batch=8)
    _, four = fitted(ByComputeLoss, 4, np.ones(8), batch=8)
    assert (one["loss"], four["loss"]) == (1.0, 4.0)


def test_each_replica_divides_by_its_own_rows():
    """30 examples are split into 8, 8, 8 and 6, and a `Mean` counts each replica alike."""
    full = np.zeros(32)  # `fit` fails if the first batch is not full
    change, logs = fitted(ByTrainStep, 4, [*full, *range(30)], batch=32)
    means = [3.5, 11.5, 19.5, 26.5]
    assert change == -sum(means)
    assert logs["mean"] == sum(means) / 8


def test_a_replica_without_rows_makes_the_mean_nan():
    _, logs = fitted(ByTrainStep, 4, np.zeros(32 + 9), batch=32)
    assert np.isnan(logs["mean"])


def test_compute_average_loss_divides_by_the_rows_of_each_replica():
    """Of 3 examples on two replicas, the one alone weighs as much as the other two together."""
    strategy = make_strategy("mirrored", 2)
    losses = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant([[1.0, 1.0], [10.0]][context.replica_id_in_sync_group])
    )
    averages = strategy.run(tf.nn.compute_average_loss, args=(losses,))
    assert strategy.reduce("SUM", averages, axis=None).numpy() == 5.5  # not 12 / 3


def test_draws_of_tensorflow_differ_between_replicas():
    strategy = make_strategy("mirrored", 2)

    @tf.function
    def draw():
        return strategy.experimental_local_results(strategy.run(lambda: tf.random.normal([8])))

    one, other = draw()
    assert not np.array_equal(one, other)


def test_keras_cannot_build_an_optimizer_within_the_first_step():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])  # with its own all-reduce
    with strategy.scope():
        layer, optimizer = keras.layers.Dense(1), keras.optimizers.Adam()
        layer.build((None, 1))

    def replica_step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(x))
        optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)
        return loss

    @tf.function
    def step(x):
        losses = strategy.run(replica_step, args=(x,))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    dataset = tf.data.Dataset.from_tensor_slices(tf.ones([8, 1])).batch(8)
    (batch,) = strategy.experimental_distribute_dataset(dataset)
    with pytest.raises(tf.errors.InvalidArgumentError, match="placeholder"):
        step(batch)
