"""Which sparse gradients become dense in compiled code."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.precision import set_precision
from ddl.step.rows import summing
from ddl.step.rows.dense import dense_if_compiled
from tests.conftest import make_strategy


def is_dense(compiled, rows, table, by_rows):
    """Whether the gradient of so many looked-up rows of a table becomes dense; checks its value."""
    variable = keras.Variable(np.ones((table, 2), "f4"))
    found = []

    @tf.function(jit_compile=compiled)
    def function():
        sparse = tf.IndexedSlices(tf.ones([rows, 2]), tf.zeros([rows], tf.int64), [table, 2])
        kept = {id(variable)} if by_rows else set()
        gradient, none = dense_if_compiled([sparse, None], [variable] * 2, kept)
        assert none is None
        found.append(isinstance(gradient, tf.Tensor))
        return tf.convert_to_tensor(gradient)

    expected = np.zeros((table, 2))
    expected[0] = rows
    np.testing.assert_array_equal(function(), expected)
    return found[0]


@pytest.mark.parametrize(
    ("compiled", "rows", "table", "by_rows", "expected"),
    [
        (False, 8, 8, False, False),  # not compiled: sparse
        (True, 8, 8, True, True),  # as many rows as the table has
        (True, 7, 8, True, False),
        (True, 1, 8, False, True),  # the optimizer computes on all rows anyway
    ],
)
def test_on_one_replica(compiled, rows, table, by_rows, expected):
    assert is_dense(compiled, rows, table, by_rows) == expected


def test_replicas_send_few_rows_sparse():
    with make_strategy("mirrored", 2).scope():
        assert not is_dense(True, 3, 8, False)
        assert is_dense(True, 4, 8, False)


@tf.custom_gradient
def looked_up(table, ids):
    """Rows of a table, with a gradient that does not say how large the table is."""

    def gradient(upstream):
        rows = tf.reshape(upstream, [-1, table.shape[1]])
        return tf.IndexedSlices(rows, tf.reshape(ids, [-1])), None

    return tf.gather(table, ids), gradient


class Rows(keras.layers.Embedding):
    def call(self, inputs):
        return looked_up(tf.convert_to_tensor(self.embeddings.value), inputs)


def trained(jit_compile, rows, optimizer, layer=keras.layers.Embedding, **arguments):
    """A trainer after six updates; some examples have weight 0, so that rows have gradient 0."""
    set_precision("float64")
    keras.utils.set_random_seed(0)
    words = keras.Input((3,), dtype="int64")
    x = layer(rows, 2)(words)
    model = keras.Model(words, keras.layers.Dense(2)(keras.layers.Flatten()(x)))
    generator = np.random.default_rng(0)
    weights = (np.arange(48) % 3 > 0).astype("f4")
    data = generator.integers(0, rows, (48, 3)), generator.integers(0, 2, 48), weights
    arguments = {"global_batch_size": 16, "jit_compile": jit_compile} | arguments
    trainer = ddl.Trainer(ddl.Classification(model), optimizer(0.01), data, **arguments)
    trainer.train(6)
    return trainer


def assert_same(one, other, atol=1e-12):
    for ours, theirs in zip(one.model.get_weights(), other.model.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol)


@pytest.mark.usefixtures("gpu_path")
@pytest.mark.parametrize(
    ("optimizer", "rows", "is_whole"),
    [(keras.optimizers.Adam, 1000, True), (keras.optimizers.Adagrad, 1000, False)],
)
def test_a_compiled_update_computes_the_same(optimizer, rows, is_whole):
    compiled, plain = (trained(choice, rows, optimizer, clip_norm=0.1) for choice in ("on", "off"))
    assert compiled._update.is_whole == is_whole
    assert_same(compiled, plain)


@pytest.mark.usefixtures("gpu_path")
def test_a_gradient_without_a_shape():
    compiled, plain = (
        trained(choice, 40, keras.optimizers.Adagrad, Rows) for choice in ("on", "off")
    )
    assert compiled._update.is_whole
    assert_same(compiled, plain)


@pytest.mark.usefixtures("gpu_path")
def test_microbatches_add_up_rows(monkeypatch):
    """A dense gradient of each would put the whole table into the sum once a microbatch."""
    given = []
    rows_of = summing._rows

    def noted(gradient, variable):
        given.append(isinstance(gradient, tf.IndexedSlices))
        return rows_of(gradient, variable)

    monkeypatch.setattr(summing, "_rows", noted)
    compiled, plain = (
        trained(choice, 1000, keras.optimizers.Adam, accumulation_steps=2)
        for choice in ("on", "off")
    )
    assert given
    assert all(given)
    assert_same(compiled, plain)
