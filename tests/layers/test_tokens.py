import keras
import numpy as np
import tensorflow as tf

import ddl


def test_logits_share_the_table_and_its_gradient():
    layer = ddl.layers.TiedEmbedding(5, 3)
    tokens = tf.constant([[0, 4], [2, 2]])
    vectors = layer(tokens)
    with tf.GradientTape() as tape:
        logits = layer(layer(tokens), as_logits=True)
        loss = tf.reduce_sum(logits**2)
    table = layer.embeddings.numpy()
    np.testing.assert_allclose(logits, vectors.numpy() @ table.T, rtol=1e-6)
    (gradient,) = tape.gradient(loss, layer.trainable_variables)
    rows = np.eye(5)[tokens.numpy().reshape(-1)]
    inner = 2 * logits.numpy().reshape(-1, 5)
    expected = inner.T @ (rows @ table) + rows.T @ (inner @ table)
    np.testing.assert_allclose(tf.convert_to_tensor(gradient), expected, rtol=1e-5)


def test_no_operation_of_the_gradient_is_larger_than_the_logits():
    """An einsum would hold a table for each position: 8 times the time of the whole model."""
    layer = ddl.layers.TiedEmbedding(50, 16)
    layer.build((None, None))

    @tf.function
    def gradient(vectors):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(vectors, as_logits=True) ** 2)
        return tape.gradient(loss, layer.embeddings.value)

    graph = gradient.get_concrete_function(tf.TensorSpec([4, 8, 16])).graph
    sizes = [out.shape.num_elements() for op in graph.get_operations() for out in op.outputs]
    assert max(size for size in sizes if size) == 4 * 8 * 50


def test_a_class_token_stands_first_and_positions_are_added():
    vectors = tf.random.normal([2, 3, 4])
    token, positions = ddl.layers.ClassToken(), ddl.layers.PositionEmbedding("ones")
    outputs = positions(token(vectors)).numpy()
    np.testing.assert_array_equal(outputs[:, 0], np.ones((2, 4)))
    np.testing.assert_allclose(outputs[:, 1:], vectors + 1)


def test_are_saved_with_a_model(tmp_path):
    tokens = keras.Input((3,), dtype="int64")
    table = ddl.layers.TiedEmbedding(5, 4)
    x = ddl.layers.PositionEmbedding("uniform")(ddl.layers.ClassToken()(table(tokens)))
    model = keras.Model(tokens, table(x, as_logits=True))
    assert model.output_shape == (None, 4, 5)
    model.save(tmp_path / "model.keras")
    inputs = np.array([[0, 1, 4]])
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(inputs), model(inputs))
