import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.conftest import microbatch

LAYERS = {
    "attention": lambda: keras.layers.MultiHeadAttention(2, 3, dropout=0.4),
    "lstm": lambda: keras.layers.LSTM(3, dropout=0.4),
    "gru": lambda: keras.layers.GRU(3, recurrent_dropout=0.4),
    "gru, not reset after": lambda: keras.layers.GRU(3, dropout=0.4, reset_after=False),
    "rnn": lambda: keras.layers.SimpleRNN(3, dropout=0.4, recurrent_dropout=0.3),
    "both ways": lambda: keras.layers.Bidirectional(keras.layers.LSTM(3, dropout=0.4)),
}
every_layer = pytest.mark.parametrize("name", LAYERS)
INPUTS = np.random.default_rng(0).normal(size=(8, 4, 6)).astype("f4")


def called(name, layer, rows):
    arguments = (INPUTS[rows],) * (2 if name == "attention" else 1)
    return layer(*map(tf.constant, arguments), training=True).numpy()


@every_layer
def test_replicas_get_rows_of_what_one_device_gets(name):
    layer = LAYERS[name]()
    with microbatch(rows=8).forward():
        whole = called(name, layer, slice(0, 8))
    with microbatch(rows=8, batch=4).forward():
        assert (called(name, layer, slice(0, 8)) != whole).any()
    for first in (0, 4):
        with microbatch(first_row=first, rows=4).forward():
            part = called(name, layer, slice(first, first + 4))
        np.testing.assert_allclose(part, whole[first : first + 4], rtol=1e-5, atol=1e-7)


@every_layer
def test_a_trainer_does_not_warn_of_it(name):
    layer = LAYERS[name]()
    called(name, layer, slice(0, 8))
    drawing = [each for each in layer._flatten_layers() if each._seed_generators]
    assert drawing
    assert all(each.draws_by_position for each in drawing)


@every_layer
def test_is_saved_with_a_model(name, tmp_path):
    inputs = keras.Input(INPUTS.shape[1:])
    layer = LAYERS[name]()
    model = keras.Model(inputs, layer(*[inputs] * (2 if name == "attention" else 1)))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.layers[1]) is type(layer)
    np.testing.assert_array_equal(loaded(INPUTS), model(INPUTS))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (keras.layers.LSTM, keras.layers.LSTM),
        (keras.layers.GRU, keras.layers.GRU),
        (keras.layers.SimpleRNN, keras.layers.SimpleRNN),
    ],
)
def test_outside_of_a_trainer_recurrent_layers_draw_as_keras_does(ours, theirs):
    outputs = []
    for layer_class in (ours, theirs):
        keras.utils.set_random_seed(0)
        layer = layer_class(3, dropout=0.4, recurrent_dropout=0.2, seed=1)
        outputs.append(layer(tf.constant(INPUTS), training=True).numpy())
    np.testing.assert_array_equal(*outputs)


def test_masks_have_the_rate_and_keep_the_mean():
    cell = keras.layers.LSTM(3, dropout=0.25).cell
    with microbatch(rows=1000, batch=1).forward():
        mask = cell.get_dropout_mask(tf.ones([1000, 40])).numpy()
    assert {*np.unique(mask)} == {0, np.float32(1 / 0.75)}
    assert (mask == 0).mean() == pytest.approx(0.25, abs=0.01)


@pytest.mark.parametrize("arguments", [{}, {"use_bias": False}, {"output_shape": 5}])
def test_attention_projects_as_keras_does(arguments):
    """The sums are Keras's, and no gradient holds a kernel for each example."""
    x = tf.constant(np.random.default_rng(0).normal(size=(6, 4, 8)))
    found, operations = [], []
    for make in (keras.layers.MultiHeadAttention, keras.layers.MultiHeadAttention):
        layer = make(2, 3, dtype="float64", **arguments)
        layer.build(x.shape, x.shape)
        generator = np.random.default_rng(1)
        for weight in layer.weights:
            weight.assign(generator.normal(size=weight.shape))

        @tf.function
        def gradients(layer=layer):
            with tf.GradientTape() as tape:
                outputs = layer(x, x, use_causal_mask=True)
                loss = tf.reduce_sum(tf.square(outputs))
            variables = [weight.value for weight in layer.trainable_weights]
            return outputs, *map(tf.convert_to_tensor, tape.gradient(loss, variables))

        found.append([each.numpy() for each in gradients()])
        in_graph = gradients.get_concrete_function().graph.get_operations()
        operations.append([o for o in in_graph if o.type == "BatchMatMulV2"])
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-11, atol=1e-11)
    assert not operations[0]
    assert operations[1]  # else Keras needs no help


def test_attention_is_quantized_as_keras_s():
    x = np.random.default_rng(0).normal(size=(2, 4, 8)).astype("float32")
    found = []
    for make in (keras.layers.MultiHeadAttention, keras.layers.MultiHeadAttention):
        inputs = keras.Input((4, 8))
        model = keras.Model(inputs, make(2, 3)(inputs, inputs))
        generator = np.random.default_rng(1)
        model.set_weights([generator.normal(size=w.shape) for w in model.get_weights()])
        model.quantize("int8")
        assert any(weight.dtype == "int8" for weight in model.variables)
        found.append(model(x))
    np.testing.assert_array_equal(*found)
