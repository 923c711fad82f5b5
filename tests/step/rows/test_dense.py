"""Which sparse gradients become dense in compiled code."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl import optimizers
from ddl.precision import set_precision
from ddl.step.rows.dense import dense_if_compiled
from tests.conftest import make_strategy


def gradients(compiled, rows, table, parts, by_rows):
    variable = keras.Variable(np.ones((table, 2), "f4"))

    @tf.function(jit_compile=compiled)
    def function():
        sparse = tf.IndexedSlices(tf.ones([rows, 2]), tf.zeros([rows], tf.int64), [table, 2])
        kept = {id(variable)} if by_rows else set()
        found, none = dense_if_compiled([sparse, None], [variable] * 2, kept, parts)
        assert none is None
        is_dense.append(isinstance(found, tf.Tensor))
        return tf.convert_to_tensor(found)

    is_dense = []
    expected = np.zeros((table, 2))
    expected[0] = rows
    np.testing.assert_array_equal(function(), expected)
    return is_dense[0]


@pytest.mark.parametrize(
    ("compiled", "rows", "table", "parts", "by_rows", "expected"),
    [
        (False, 8, 8, 1, False, False),  # not compiled: sparse
        (True, 8, 8, 1, True, True),  # as many rows as the table has
        (True, 4, 8, 2, True, True),  # in two microbatches
        (True, 7, 8, 1, True, False),
        (True, 1, 8, 1, False, True),  # the optimizer computes on all rows anyway
    ],
)
def test_on_one_replica(compiled, rows, table, parts, by_rows, expected):
    assert gradients(compiled, rows, table, parts, by_rows) == expected


def test_replicas_send_few_rows_sparse():
    with make_strategy("mirrored", 2).scope():
        assert not gradients(True, 7, 8, 1, False)
        assert gradients(True, 8, 8, 1, False)


@pytest.mark.usefixtures("gpu_path")
@pytest.mark.parametrize("optimizer", [optimizers.FusedAdam, optimizers.LazyAdam])
@pytest.mark.parametrize("rows", [6, 1000])
def test_a_compiled_update_computes_the_same(optimizer, rows):
    def trained(jit_compile):
        set_precision("float64")
        keras.utils.set_random_seed(0)
        words = keras.Input((3,), dtype="int64")
        x = keras.layers.Embedding(rows, 2)(words)
        model = keras.Model(words, keras.layers.Dense(2)(keras.layers.Flatten()(x)))
        generator = np.random.default_rng(0)
        data = generator.integers(0, rows, (40, 3)), generator.integers(0, 2, 40)
        arguments = {"global_batch_size": 8, "jit_compile": jit_compile, "clip_norm": 0.1}
        trainer = ddl.Trainer(ddl.Classification(model), optimizer(0.01), data, **arguments)
        trainer.train(6)
        if jit_compile == "on":
            is_dense = rows == 6 or optimizer is optimizers.FusedAdam
            assert trainer._parts.update.is_whole == is_dense
        return trainer.model.get_weights()

    for one, other in zip(trained("on"), trained("off"), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)
