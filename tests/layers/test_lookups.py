import keras
import numpy as np
import pytest
import tensorflow as tf

from ddl.layers import lookups
from tests.conftest import make_strategy, microbatch

IDS = np.array([[0, 4], [-1, 2]])


def traced(strategy, layer, ids):
    """The rows that replicas get, the kinds of operations that make them, and the gradient."""

    @tf.function(autograph=False)
    def run():
        def replica():
            with microbatch(rows=2).forward(), tf.GradientTape() as tape:
                rows = layer(tf.constant(ids))
                total = tf.reduce_sum(tf.cast(rows, tf.float32) ** 2)
            return rows, tape.gradient(total, layer.trainable_variables[0].value)

        return strategy.run(replica)

    operations = {op.type for op in run.get_concrete_function().graph.get_operations()}
    first = [strategy.experimental_local_results(value)[-1] for value in run()]
    return first[0], operations, first[1]


@pytest.mark.parametrize("where", [("one_device", 1), ("mirrored", 2), ("central_storage", 2)])
def test_an_embedding_reads_rows_and_gives_the_bits_of_keras(where):
    strategy = make_strategy(*where)
    with strategy.scope():
        layer = keras.layers.Embedding(5, 3)
        layer.build()
    expected = layer(IDS).numpy()
    _, before, gradient = traced(strategy, layer, IDS)
    assert "ReadVariableOp" in before  # Keras reads the whole table; look whether it still does
    lookups.look_up_rows([layer, keras.layers.Dense(1)])
    rows, operations, sparse = traced(strategy, layer, IDS)
    np.testing.assert_array_equal(rows, expected)
    assert "ResourceGather" in operations
    assert "ReadVariableOp" not in operations
    assert isinstance(sparse, tf.IndexedSlices)
    np.testing.assert_array_equal(tf.convert_to_tensor(sparse), tf.convert_to_tensor(gradient))
    np.testing.assert_array_equal(layer(IDS.astype("float32")).numpy(), expected)  # no trainer


@pytest.mark.parametrize(("dtype", "bad"), [("uint32", 2**32 - 1), ("uint64", 2**40 + 2)])
def test_large_ids_without_sign_are_not_those_of_other_rows(dtype, bad):
    """Cast to int32, as by Keras, they are those of row -1, the last, and of row 2."""
    strategy = make_strategy("one_device", 1)
    layer = keras.layers.Embedding(5, 3)
    layer.build()
    lookups.look_up_rows([layer])
    rows, _, _ = traced(strategy, layer, np.array([[0, 4]], dtype))
    np.testing.assert_array_equal(rows, layer(np.array([[0, 4]])))
    with pytest.raises(tf.errors.InvalidArgumentError, match="is not in"):
        traced(strategy, layer, np.array([[0, bad]], dtype))
