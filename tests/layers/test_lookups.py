import keras
import numpy as np
import pytest
import tensorflow as tf

from ddl.layers import PartitionedEmbedding, TiedEmbedding, look_up, lookups
from ddl.microbatch import Microbatch
from ddl.random import batch_counter
from tests.conftest import make_strategy

IDS = np.array([[0, 4], [-1, 2]])


class Own(keras.layers.Embedding):
    def call(self, inputs):
        return super().call(inputs) + 1


class Zeros(keras.layers.Embedding):
    @property
    def embeddings(self):
        return self._embeddings * 0.0


def traced(strategy, layer, ids, of_outer=None):
    """The rows that replicas get, the kinds of operations that make them, and the gradient."""
    policy = keras.layers.Layer(dtype=of_outer or "float32")

    @tf.function(autograph=False)
    def run():
        def replica():
            zero = tf.zeros([], tf.int64)
            current = Microbatch(
                seed=None, training=True, counter=batch_counter(zero), first_row=0, rows=2
            )
            with current.forward(), tf.GradientTape() as tape:
                policy.call = lambda x: layer(x)
                rows = policy(tf.constant(ids))
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


@pytest.mark.parametrize(
    ("dtype", "bad"), [("uint32", 2**32 - 1), ("uint64", 2**40 + 2), ("uint64", 2**64 - 1)]
)
@pytest.mark.parametrize("kind", ["Keras's", "tied", "one part", "parts"])
def test_large_ids_without_sign_are_not_those_of_other_rows(kind, dtype, bad):
    """Cast to int32, as by Keras, they are those of row -1, the last, and of row 2."""
    strategy = make_strategy("one_device", 1)
    layer = {
        "Keras's": lambda: keras.layers.Embedding(5, 3),
        "tied": lambda: TiedEmbedding(5, 3),
        "one part": lambda: PartitionedEmbedding(5, 3),
        "parts": lambda: PartitionedEmbedding(5, 3, max_parts=2, min_part_bytes=1),
    }[kind]()
    layer.build()
    lookups.look_up_rows([layer])
    rows, _, _ = traced(strategy, layer, np.array([[0, 4]], dtype))
    np.testing.assert_array_equal(rows, layer(np.array([[0, 4]])))
    with pytest.raises(tf.errors.InvalidArgumentError, match="is not in"):
        traced(strategy, layer, np.array([[0, bad]], dtype))


def test_casts_rows_as_keras_casts_the_table():
    strategy = make_strategy("one_device", 1)
    for own, outer in (("mixed_bfloat16", None), ("float32", "mixed_bfloat16")):
        layer = keras.layers.Embedding(5, 3, dtype=own)
        layer.build()
        expected, _, _ = traced(strategy, layer, IDS, outer)
        lookups.look_up_rows([layer])
        rows, operations, _ = traced(strategy, layer, IDS, outer)
        assert rows.dtype == expected.dtype
        assert "ReadVariableOp" not in operations
        np.testing.assert_array_equal(tf.cast(rows, "float32"), tf.cast(expected, "float32"))


def test_leaves_what_computes_something_else():
    own, zeros, replaced, lora, copied = made = [
        *(kind(5, 3) for kind in (Own, Zeros)),
        *(keras.layers.Embedding(5, 3) for _ in range(3)),
    ]
    for layer in made:
        layer.build()
    plain = replaced.call
    replaced.call = lambda inputs: plain(inputs) * 0.0
    lora.enable_lora(2)
    lora.lora_embeddings_a.assign(np.ones([5, 2]))
    lora.lora_embeddings_b.assign(np.ones([2, 3]))
    lookups.look_up_rows([copied])
    other = keras.layers.Embedding(5, 3)
    other.build()
    vars(other)["call"] = vars(copied)["call"]  # as copy.copy leaves it
    lookups.look_up_rows([*made, other])
    strategy = make_strategy("one_device", 1)
    for layer in (own, zeros, replaced, lora, copied):
        expected = layer(IDS).numpy()
        np.testing.assert_array_equal(traced(strategy, layer, IDS)[0], expected)
    for layer in (zeros, replaced):
        assert not np.any(layer(IDS))
    rows, _, _ = traced(strategy, other, IDS)
    np.testing.assert_array_equal(rows, other.embeddings.numpy()[IDS])


def test_a_stateless_call_reads_the_values_that_it_is_given():
    layer = keras.layers.Embedding(5, 3)
    layer.build()
    lookups.look_up_rows([layer])
    given, ids = tf.reshape(tf.range(15.0), [5, 3]), tf.constant([[3, 0]])
    current = Microbatch(
        seed=None, training=True, counter=batch_counter(tf.zeros([], tf.int64)), first_row=0, rows=2
    )
    with current.forward():
        rows, _ = layer.stateless_call([given], [], ids)
        np.testing.assert_array_equal(rows[0], [[9, 10, 11], [0, 1, 2]])
        with keras.StatelessScope([(layer.embeddings, given)]):
            np.testing.assert_array_equal(look_up(layer.embeddings, ids), rows)
        np.testing.assert_array_equal(layer(ids)[0], layer.embeddings.numpy()[[3, 0]])


def test_tpus_read_their_own_copies(monkeypatch):
    layer = keras.layers.Embedding(5, 3)
    layer.build()
    lookups.look_up_rows([layer])
    strategy = make_strategy("one_device", 1)
    rows, operations, _ = traced(strategy, layer, IDS)
    assert "ReadVariableOp" not in operations
    tpu = tf.distribute.TPUStrategy.__new__(tf.distribute.TPUStrategy)
    monkeypatch.setattr(lookups.tf.distribute, "get_strategy", lambda: tpu)
    assert not lookups._reads_rows()
    monkeypatch.undo()
    monkeypatch.setattr(lookups, "_reads_rows", lambda: False)
    of_tpu, operations, _ = traced(strategy, layer, IDS)
    assert "ReadVariableOp" in operations
    assert "ResourceGather" not in operations
    np.testing.assert_array_equal(of_tpu, rows)
    np.testing.assert_array_equal(look_up(layer.embeddings, tf.constant(IDS % 5)), rows)


def test_looks_up_rows_of_any_variable():
    for variable in (tf.Variable([[1.0], [2.0]]), keras.Variable([[1.0], [2.0]])):
        np.testing.assert_array_equal(look_up(variable, tf.constant([1, 0, 1])), [[2], [1], [2]])
