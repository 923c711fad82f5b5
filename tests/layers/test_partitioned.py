import keras
import numpy as np
import pytest
import tensorflow as tf

from ddl.errors import ConfigError
from ddl.layers import PartitionedEmbedding

IDS = np.array([[0, 4, 4], [-1, 2, -7]])


def built(rows=7, width=3, parts=3, **arguments):
    layer = PartitionedEmbedding(rows, width, max_parts=parts, min_part_bytes=1, **arguments)
    layer.build()
    return layer


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_gives_the_vectors_of_one_table(parts):
    layer, table = built(parts=parts), np.random.default_rng(0).normal(size=(7, 3)).astype("f4")
    layer.assign(table)
    assert len(layer.tables) == parts
    np.testing.assert_array_equal(layer.whole(), table)
    for ids in (IDS, IDS.astype("float32"), IDS.astype("int32"), IDS[:0], IDS[0, 0]):
        np.testing.assert_array_equal(layer(ids), table[ids.astype(int)])
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(layer(tf.constant(IDS)) ** 2)
    gradients = tape.gradient(total, [part.value for part in layer.tables])
    assert all(isinstance(each, tf.IndexedSlices) for each in gradients)
    # Each part is asked for its own rows alone.
    assert sum(len(each.indices) for each in gradients) == IDS.size
    whole = tf.Variable(table)
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(tf.gather(whole, IDS % 7) ** 2)
    expected = tf.convert_to_tensor(tape.gradient(total, whole)).numpy()
    for number, gradient in enumerate(gradients):
        np.testing.assert_array_equal(tf.convert_to_tensor(gradient), expected[number::parts])


def test_the_number_of_parts_depends_on_the_arguments_alone():
    def parts(rows, width, dtype="float32", **arguments):
        return PartitionedEmbedding(rows, width, dtype=dtype, **arguments).parts

    assert parts(2**20, 4) == 16  # of 1 MiB
    assert parts(2**20, 4, dtype="float64") == 16
    assert parts(2**20, 4, max_parts=6) == 6
    assert parts(2**20, 4, min_part_bytes=2**23) == 2
    assert parts(1000, 4) == 1
    assert parts(5, 4, min_part_bytes=1) == 5
    assert [tuple(table.shape) for table in built(8, 2, 3).tables] == [(3, 2), (3, 2), (2, 2)]


@pytest.mark.parametrize("given", ["uniform", keras.initializers.RandomNormal(seed=3)])
def test_parts_begin_with_different_numbers(given):
    keras.utils.set_random_seed(4)
    first, again = (built(6, 3, 3, embeddings_initializer=given) for _ in range(2))
    values = [table.numpy() for table in first.tables]
    assert len({value.tobytes() for value in values}) == 3
    if given != "uniform":
        np.testing.assert_array_equal(first.whole(), again.whole())


@pytest.mark.parametrize("given", ["zeros", lambda shape, dtype: tf.fill(shape, tf.cast(2, dtype))])
def test_takes_initializers_that_draw_nothing(given):
    assert len(np.unique(built(embeddings_initializer=given).whole())) == 1


def test_is_saved_and_exported(tmp_path):
    model = keras.Sequential([keras.Input((3,), dtype="int64"), built(name="table")])
    expected = model(IDS).numpy()
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(IDS), expected)
    assert [v.path for v in loaded.weights] == [f"table/embeddings_{n}" for n in range(3)]
    model.export(tmp_path / "exported", verbose=False)
    served = tf.saved_model.load(str(tmp_path / "exported"))
    np.testing.assert_array_equal(served.serve(tf.constant(IDS)), expected)


def test_casts_rows_as_an_embedding_does():
    layer, theirs = built(dtype="mixed_bfloat16"), keras.layers.Embedding(7, 3)
    theirs.build()
    theirs.embeddings.assign(layer.whole())
    assert layer.tables[0].dtype == "float32"
    assert layer(IDS).dtype == tf.bfloat16
    expected = tf.cast(theirs(IDS), tf.bfloat16)
    np.testing.assert_array_equal(tf.cast(layer(IDS), "float32"), tf.cast(expected, "float32"))
    symbolic = layer(keras.Input((5,), dtype="int32"))
    assert (symbolic.shape, symbolic.dtype) == ((None, 5, 3), "bfloat16")


@pytest.mark.parametrize(("bad", "named"), [(7, 7), (-8, -8), (600, 600)])
def test_an_id_beyond_the_table_is_an_error(bad, named):
    layer = built()
    for call in (layer, tf.function(layer)):
        with pytest.raises(tf.errors.InvalidArgumentError, match=rf"\[{named}\] \[ is not in"):
            call(tf.constant([0, bad, 3]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_parts": 0}, "max_parts must be an integer of at least 1, got 0"),
        ({"max_parts": 2.0}, "max_parts must be an integer of at least 1, got 2.0"),
        ({"min_part_bytes": -1}, "min_part_bytes must be an integer of at least 1, got -1"),
    ],
)
def test_a_wrong_number_is_an_error(arguments, message):
    with pytest.raises(ConfigError, match=message):
        PartitionedEmbedding(7, 3, **arguments)


def test_a_table_of_another_shape_is_an_error():
    with pytest.raises(ConfigError, match=r"of shape \(7, 3\), once the layer is built, got \(6,"):
        built(name="table").assign(np.zeros((6, 3)))
