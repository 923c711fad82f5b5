"""Trainers that compute parts of their models again, and trainers that do not: the same results."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.checkpoints.checkpoints import Checkpoints
from ddl.errors import ConfigError
from ddl.precision import set_precision
from tests.conftest import make_strategy
from tests.step.remat.models import DATA, Subclassed, residual, sequential

BLOCKS = ddl.Remat("block*")


def make(model, strategy, remat, task=ddl.Classification, optimizer=None, **arguments):
    """Builds a trainer; with `remat`, some of its layers are computed again."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        return ddl.Trainer(
            task(model()),
            optimizer or keras.optimizers.SGD(0.1, momentum=0.9),
            DATA,
            **{"global_batch_size": 32, "seed": 3} | arguments,
            remat=remat,
        )


def figures(trainer, steps=4):
    """Losses and all variables after some updates, of which the third has a padded batch."""
    losses = [list(trainer.train(1, progress=False).values()) for _ in range(steps)]
    variables = [v.value for v in [*trainer.task.model.variables, *trainer.optimizer.variables]]
    copies = [trainer.strategy.experimental_local_results(v) for v in variables]
    return [np.array(losses), *(copy.numpy() for each in copies for copy in each)]


class Counts(keras.layers.Layer):
    """Counts its calls."""

    def build(self, _):
        self.count = self.add_weight(shape=[], initializer="ones", trainable=False, name="count")

    def call(self, x, training=False):
        if training:
            self.count.assign(self.count + 1.0)
        return x


class ReadsCount(keras.layers.Layer):
    """Reads the count of a later layer, and scales it with the bias of an earlier one."""

    def __init__(self, counts, dense):
        super().__init__(name="reads")
        self.__dict__["others"] = counts, dense  # not its own layers

    def call(self, x):
        counts, dense = self.__dict__["others"]
        return tf.tanh(x * tf.convert_to_tensor(counts.count) * (1 + dense.bias))


class CallsThem(keras.Model):
    """A subclassed model of these layers."""

    def __init__(self):
        super().__init__(name="calls_them")
        self.dense, self.counts = keras.layers.Dense(4), Counts()
        self.counts.build((None, 4))
        self.reads, self.last = ReadsCount(self.counts, self.dense), keras.layers.Dense(3)

    def call(self, image, training=False):
        x = self.reads(self.dense(tf.reshape(tf.cast(image, self.compute_dtype), [-1, 36]) / 255))
        return self.last(self.counts(x, training=training))


def chain_of_them():
    counts, dense = Counts(), keras.layers.Dense(4)
    counts.build((None, 4))
    return keras.Sequential(
        [
            *(keras.Input((6, 6, 1)), keras.layers.Rescaling(1 / 255), keras.layers.Flatten()),
            *(dense, ReadsCount(counts, dense), counts, keras.layers.Dense(3)),
        ]
    )


@pytest.mark.parametrize("model", [chain_of_them, CallsThem])
def test_variables_of_other_layers_are_read_as_they_were(model):
    """The second computation of "reads" comes after the count has moved."""
    set_precision("float64")
    strategy = make_strategy("one_device", 1)
    ours, plain = (figures(make(model, strategy, r)) for r in (ddl.Remat("reads"), None))
    for one, other in zip(ours, plain, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


def repeats(trainer):
    """The number of operations that are computed again, in the loop that was traced last."""
    loop = trainer._runner.loop
    state = trainer.state
    graph = loop._concrete(state).graph.as_graph_def()
    return sum(
        "again_remat_" in node.name for one in graph.library.function for node in one.node_def
    )


@pytest.mark.parametrize(
    ("model", "remat", "name", "replicas", "arguments"),
    [
        (residual, ddl.Remat(), "mirrored", 2, {"clip_norm": 0.5}),
        (sequential, ddl.Remat(together=4), "central_storage", 2, {}),
        (Subclassed, ddl.Remat("branch_*"), "one_device", 1, {"accumulation_steps": 2}),
    ],
)
def test_updates_are_the_same(model, remat, name, replicas, arguments):
    set_precision("float64")
    strategy = make_strategy(name, replicas)
    trained = make(model, strategy, remat, **arguments)
    ours = figures(trained)
    plain = make(model, strategy, None, **arguments)
    for one, other in zip(ours, figures(plain), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-10)
    assert repeats(trained) > 20
    assert repeats(plain) == 0


def test_compiled_updates_are_the_same():
    set_precision("float64")
    strategy = make_strategy("one_device", 1)
    trained = make(residual, strategy, BLOCKS, jit_compile="on")
    ours = figures(trained)
    for one, other in zip(ours, figures(make(residual, strategy, None)), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-10)
    assert repeats(trained) > 20


class WithPenalty(ddl.Classification):
    """A loss with the norm of its gradient, which differentiates the second computation."""

    def per_example(self, features, training):
        with tf.GradientTape() as tape:
            image = tf.cast(features["image"], self.model.compute_dtype)
            tape.watch(image)
            logits = self.model(image, training=training)
        norms = tf.reduce_sum(tf.square(tape.gradient(logits, image)), axis=[1, 2, 3])
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(features["label"], logits)
        return ddl.PerExample(loss + 100 * norms)


def test_second_derivatives_are_the_same():
    set_precision("float64")
    strategy = make_strategy("one_device", 1)
    model = functools.partial(
        lambda: keras.Sequential(
            [
                keras.Input((6, 6, 1)),
                keras.layers.Flatten(),
                keras.layers.Rescaling(1 / 255),
                *(keras.layers.Dense(5, "tanh", name=f"block{n}") for n in range(3)),
                keras.layers.Dropout(0.2, name="block_dropout"),
                keras.layers.Dense(3),
            ]
        )
    )
    ours = figures(make(model, strategy, ddl.Remat("block*", together=2), task=WithPenalty))
    plain = figures(make(model, strategy, None, task=WithPenalty))
    for one, other in zip(ours, plain, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-10)


def save(folder, trainer):
    checkpoints = Checkpoints(folder, trainer)
    checkpoints.save()
    checkpoints.finish()


def test_gradients_of_single_examples_are_refused():
    class Each(ddl.Classification):
        def step(self, update, batch):
            update.apply(
                update.gradients(self.per_example, batch, each=lambda gradients: gradients)
            )

    set_precision("float32")
    trainer = make(sequential, make_strategy("one_device", 1), ddl.Remat("dense_*"), task=Each)
    with pytest.raises(ConfigError, match="with `each`.*Leave Trainer.remat out"):
        trainer.train(1)


def test_the_argument_is_checked():
    with pytest.raises(ConfigError, match=r"Trainer.remat must be a Remat.*Pass ddl.Remat\(\)"):
        make(sequential, make_strategy("one_device", 1), 2)
