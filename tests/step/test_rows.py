"""Updates of a table take time and memory for the rows of the batch alone."""

import functools
import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.precision import set_precision
from tests.conftest import make_strategy

ROWS = 3001  # no other size of the model
BATCH = 16


@keras.saving.register_keras_serializable("test")
class OneHot(keras.layers.Embedding):
    """Looks rows up by a matrix product, so that the gradient of the table is dense."""

    def call(self, inputs):
        return tf.one_hot(inputs, self.input_dim, dtype=self.compute_dtype) @ self.embeddings


class Bags:
    """A weighted loss of two lookups of one table and one of another, with some ids twice."""

    def __init__(self, layer=keras.layers.Embedding):
        words = keras.Input((4,), dtype="int64", name="words")
        other = keras.Input((), dtype="int64", name="other")
        table = layer(ROWS, 2, name="table")
        columns = [keras.layers.Flatten()(table(words)), table(other), layer(2 * ROWS, 1)(other)]
        x = keras.layers.Concatenate()(columns)
        self.model = keras.Model([words, other], keras.layers.Dense(1)(x))

    def per_example(self, features, training):
        outputs = self.model([features["words"], features["other"]], training=training)
        return ddl.PerExample((outputs[:, 0] - features["y"]) ** 2)


def examples():
    random = np.random.default_rng(1)
    words = np.where(random.random((3 * BATCH, 4)) < 0.5, 7, random.integers(0, ROWS, (48, 4)))
    return {
        "words": words,
        "other": random.integers(0, ROWS, 48),
        "y": random.normal(size=48),
        "weight": random.uniform(0, 2, 48).astype("f4"),
    }


ALL = {"clip_norm": 0.5, "loss_scale": ddl.LossScale(initial=8.0)}


def trainer(where, layer=keras.layers.Embedding, optimizer=keras.optimizers.Adagrad, **arguments):
    set_precision("float64")
    keras.utils.set_random_seed(3)
    strategy = make_strategy(*where)
    with strategy.scope():
        return ddl.Trainer(
            Bags(layer),
            optimizer(0.5),
            examples(),
            global_batch_size=BATCH,
            strategy=strategy,
            **ALL | arguments,
        )


def weights(trained):
    return [variable.numpy() for variable in trained.model.variables]


@functools.cache
def dense_weights():
    """Weights at the start, and after each of two pairs of updates with dense gradients."""
    made = trainer(("one_device", 1), OneHot)
    start = weights(made)
    made.train(2)
    middle = weights(made)
    made.train(2)
    return start, middle, weights(made)


def shapes(made):
    """Shapes of all tensors of the traced loop."""
    made.trace()
    graphs = [made._runner.loop._concrete(made.state).graph]
    while graphs:
        graph = graphs.pop()
        for operation in graph.get_operations():
            yield from (x.shape.as_list() for x in operation.outputs if x.shape.rank)
        functions = [graph._get_function(name) for name in graph._functions]
        graphs += [function.graph for function in functions if hasattr(function, "graph")]


@pytest.mark.parametrize(
    ("where", "arguments"),
    [
        (("one_device", 1), {"accumulation_steps": 4}),
        (("mirrored", 2), {"accumulation_steps": 2}),
    ],
    ids=str,
)
def test_equals_dense_updates_and_has_no_tensor_of_the_tables_size(where, arguments):
    made = trainer(where, **arguments)
    assert not [shape for shape in shapes(made) if {ROWS, 2 * ROWS} & {*shape[:1]}]
    start, middle, end = dense_weights()
    made.train(2)
    for value, expected in zip(weights(made), middle, strict=True):
        np.testing.assert_allclose(value, expected, rtol=0, atol=1e-10)
    made.train(2)
    after = weights(made)
    for value, expected, before in zip(after, end, start, strict=True):
        np.testing.assert_allclose(value, expected, rtol=0, atol=1e-10)
        assert np.abs(value - before).max() > 1e-3


@pytest.mark.usefixtures("gpu_path")
def test_rows_add_up_on_several_gpus():
    made = trainer(("mirrored", 2), accumulation_steps=2, jit_compile="on")
    made.train(2)
    for value, expected in zip(weights(made), dense_weights()[1], strict=True):
        np.testing.assert_allclose(value, expected, rtol=0, atol=1e-10)


def test_a_compiled_update_with_dense_gradients_computes_the_same():
    """XLA merges no rows; a dense gradient costs nothing where the optimizer moves all rows."""
    place, adam = ("one_device", 1), keras.optimizers.Adam
    found, plain = (trainer(place, optimizer=adam, jit_compile=x) for x in ("on", "off"))
    for one in (found, plain):
        one.train(3)
    for ours, theirs in zip(weights(found), weights(plain), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-10)


class Reads:
    """A table that a user's layer reads as a whole."""

    def __init__(self):
        flat = [keras.layers.Flatten(), keras.layers.Dense(1)]
        self.model = keras.Sequential([keras.Input((2,), dtype="int64"), Own(name="own"), *flat])

    def per_example(self, features, training):
        return ddl.PerExample(self.model(features["x"], training=training)[:, 0] ** 2)


@keras.saving.register_keras_serializable("test")
class Own(keras.layers.Layer):
    def build(self, _):
        self.table = self.add_weight(shape=(70_000, 16), name="table")

    def call(self, inputs):
        return keras.ops.take(self.table, inputs, axis=0)


def test_says_at_the_start_which_updates_move_all_rows(caplog):
    set_precision("float32")
    with caplog.at_level(logging.WARNING):
        optimizer = keras.optimizers.AdamW(weight_decay=0.1)
        data = {"x": np.zeros((16, 2), "i8")}
        ddl.Trainer(Reads(), optimizer, data, global_batch_size=8).trace()
    assert "for all 70,000 rows of the table" in caplog.text
    assert "own/table. Looked up by an Embedding, Adagrad and SGD" in caplog.text
