"""On a GPU, layers, augmentations and losses compute nothing on the host.

Not run on a GPU: what TensorFlow has kernels for is looked up.
"""

import keras
import pytest
import tensorflow as tf

import ddl
from ddl.distribution.path import GPU, taking
from ddl.precision import set_precision
from tests.conftest import microbatch
from tests.gpu.placement import on_host
from tests.layers.transforms.test_augmentation import LAYERS as AUGMENTATIONS

ROWS = 16
MOST = ROWS - 1  # elements of a tensor in host memory

LAYERS = [
    keras.layers.Dropout(0.3),
    keras.layers.SpatialDropout1D(0.3),
    keras.layers.GaussianNoise(0.1),
    keras.layers.GaussianDropout(0.3),
    keras.layers.AlphaDropout(0.3),
]
PRECISIONS = ["float32", "mixed_float16", "float64"]


@pytest.fixture(autouse=True)
def _on_gpu():
    with taking(GPU):
        yield


def left_to_host(function, *arguments):
    """What a GPU would leave to the host, forward and backward."""

    @tf.function(autograph=False)
    def traced(*arguments):
        with microbatch(rows=ROWS).forward(), tf.GradientTape() as tape:
            tape.watch([x for x in arguments if x.dtype.is_floating])
            outputs = function(*arguments)
            sources = [x for x in (*arguments, *tape.watched_variables()) if x.dtype.is_floating]
        if not any(x.dtype.is_floating for x in tf.nest.flatten(outputs)):
            return outputs
        gradients = tape.gradient(outputs, sources)
        return outputs, [gradient for gradient in gradients if gradient is not None]

    return on_host(traced.get_concrete_function(*arguments).graph, MOST)


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: type(layer).__name__)
def test_layers_that_draw(layer):
    for precision in PRECISIONS:
        set_precision(precision)
        layer = type(layer).from_config(layer.get_config() | {"dtype": precision})
        inputs = tf.ones([ROWS, 3, 4], layer.compute_dtype)
        assert not left_to_host(lambda x, layer=layer: layer(x, training=True), inputs), precision


@pytest.mark.parametrize(
    ("layer_class", "arguments"), AUGMENTATIONS.values(), ids=AUGMENTATIONS.keys()
)
def test_augmentations(layer_class, arguments):
    layer = layer_class(**arguments)
    for dtype in ("uint8", "float32", "bfloat16"):
        images = tf.zeros([ROWS, 6, 5, 3], dtype)
        assert not left_to_host(lambda x: layer(x, training=True), images), dtype


def cnn():
    return ddl.models.cnn(
        (8, 8, 1), 5, blocks=((3,),), hidden_units=(4,), batch_normalization=True, block_dropout=0.3
    )


def mlp():
    return ddl.models.mlp((8, 8, 1), 5, hidden_units=(4,), dropout=0.2)


def loss_of(task, names, training):
    def loss(*features):
        output = task.per_example(dict(zip(names, features, strict=True)), training)
        return output.loss, output.metrics

    return loss


@pytest.mark.parametrize("precision", ["float32", "mixed_float16"])
@pytest.mark.parametrize("build", [cnn, mlp])
def test_models_and_classification(build, precision):
    set_precision(precision)
    model = build()
    images = tf.zeros([ROWS, *model.input_shape[1:]], tf.uint8)
    task = ddl.Classification(model, top_k=2)
    loss = loss_of(task, ("image", "label"), training=True)
    assert not left_to_host(loss, images, tf.zeros([ROWS], tf.int64))


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_other_labels_and_evaluation(precision):
    set_precision(precision)
    images = tf.zeros([ROWS, 8, 8, 1], tf.uint8)
    of_labels = {
        "one-hot": tf.zeros([ROWS, 5], tf.uint8),
        "smoothed": tf.zeros([ROWS], tf.int64),
    }
    for name, labels in of_labels.items():
        task = ddl.Classification(mlp(), label_smoothing=0.1 * (name == "smoothed"))
        for training in (True, False):
            loss = loss_of(task, ("image", "label"), training)
            assert not left_to_host(loss, images, labels), (name, training)


def test_what_runs_on_the_host_is_found():
    x = tf.ones([ROWS, 3])

    def draws_with_no_kernel(x):
        return tf.math.multiply_no_nan(x, tf.ones_like(x))

    assert not left_to_host(draws_with_no_kernel, x)
    (line, *_) = left_to_host(draws_with_no_kernel, tf.cast(x, tf.bfloat16))
    assert line.startswith("MulNoNan of bfloat16 has no kernel for GPUs")

    def counts_in_int32(x):
        return tf.reduce_sum(tf.cast(x > 0, tf.int32), axis=-1)

    assert any(
        "Sum: input, int32[16, 3], is in host memory" in x for x in left_to_host(counts_in_int32, x)
    )
