import keras
import numpy as np
import pytest

from ddl.models import cnn, mlp, table_mlp


def test_mlp_of_the_tutorial():
    model = mlp((28, 28, 1), 10, hidden_units=(128,), dropout=0.2)
    assert model.count_params() == 784 * 128 + 128 + 128 * 10 + 10
    L = keras.layers  # noqa: N806
    assert [type(layer) for layer in model.layers[3:]] == [L.Dense, L.Dropout, L.Dense]


def test_cnn_of_the_tutorial():
    model = cnn((28, 28, 1), 10, block_dropout=0.25, hidden_dropout=0.5)
    assert [layer.name for layer in model.layers] == [
        "image",
        "scale",
        "conv_1_1",
        "relu_1_1",
        "conv_1_2",
        "relu_1_2",
        "pool_1",
        "block_dropout_1",
        "flatten",
        "hidden_1",
        "hidden_dropout_1",
        "logits",
    ]
    assert model.get_layer("pool_1").output.shape == (None, 12, 12, 64)


@pytest.mark.parametrize("build", [mlp, cnn])
def test_raw_bytes_come_in_and_logits_go_out(build):
    model = build((8, 8, 1), 10)
    images = np.full((2, 8, 8, 1), 255, np.uint8)
    assert model(images).shape == (2, 10)
    np.testing.assert_allclose(model.get_layer("scale")(images.astype("float32")), 1.0, rtol=1e-6)


def test_the_last_layer_gives_logits():
    assert cnn((8, 8, 1), 10).layers[-1].activation is keras.activations.linear


def test_large_tables_are_split():
    categories = {"colour": 30, "shape": 3}
    whole = table_mlp(1, categories=categories, embedding_width=4)
    split = table_mlp(
        1, categories=categories, embedding_width=4, max_table_parts=2, min_table_part_bytes=64
    )
    assert [v.path for v in whole.weights][:2] == [
        "colour_vectors/embeddings",
        "shape_vectors/embeddings",
    ]
    assert [(v.path, tuple(v.shape)) for v in split.weights][:3] == [
        ("colour_vectors/embeddings_0", (15, 4)),
        ("colour_vectors/embeddings_1", (15, 4)),
        ("shape_vectors/embeddings", (3, 4)),
    ]


def test_a_whole_table_draws_what_keras_draws():
    """A layer that is not used must not draw a seed: weights of earlier runs would change."""
    keras.utils.set_random_seed(3)
    made = table_mlp(2, categories={"a": 4}, embedding_width=3, hidden_units=(5,))
    keras.utils.set_random_seed(3)
    table = keras.layers.Embedding(4, 3)
    dense = [keras.layers.Dense(5), keras.layers.Dense(2)]
    expected = keras.Sequential([keras.Input((), dtype="int64"), table, *dense])
    for one, other in zip(made.weights, expected.weights, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())
