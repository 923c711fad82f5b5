import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.precision import set_precision
from tests.conftest import make_strategy, microbatch

LAYERS = [
    (keras.layers.Dropout, {"rate": 0.3}, (8, 5)),
    (keras.layers.Dropout, {"rate": 0.3, "noise_shape": (None, 1, 4)}, (8, 3, 4)),
    (keras.layers.SpatialDropout1D, {"rate": 0.3}, (8, 5, 6)),
    (keras.layers.SpatialDropout2D, {"rate": 0.3}, (8, 3, 3, 6)),
    (keras.layers.SpatialDropout3D, {"rate": 0.3}, (8, 2, 2, 2, 6)),
    (keras.layers.GaussianDropout, {"rate": 0.3}, (8, 5)),
    (keras.layers.GaussianNoise, {"stddev": 0.3}, (8, 5)),
    (keras.layers.AlphaDropout, {"rate": 0.3}, (8, 5)),
]
every_layer = pytest.mark.parametrize(
    ("layer_class", "arguments", "shape"), LAYERS, ids=[f"{c.__name__}{a}" for c, a, _ in LAYERS]
)


@every_layer
def test_replicas_get_slices_of_what_one_device_gets(layer_class, arguments, shape):
    layer = layer_class(**arguments)
    x = tf.ones(shape)
    with microbatch(rows=8).forward():
        whole = layer(x, training=True).numpy()
    assert (whole != x.numpy()).any()
    for replicas in (2, 4, 8):
        rows = 8 // replicas
        for replica in range(replicas):
            with microbatch(first_row=replica * rows, rows=rows).forward():
                part = layer(x[:rows], training=True)
            np.testing.assert_array_equal(part, whole[replica * rows : (replica + 1) * rows])


@every_layer
def test_drops_in_for_the_one_of_keras(layer_class, arguments, shape):
    """Same arguments, same config, and outside of a trainer the same draws."""
    theirs_class = getattr(keras.layers, layer_class.__name__)
    ours, theirs = layer_class(**arguments, seed=4), theirs_class(**arguments, seed=4)
    assert isinstance(ours, theirs_class)
    x = tf.ones(shape)
    np.testing.assert_array_equal(ours(x, training=True), theirs(x, training=True))
    np.testing.assert_array_equal(ours(x, training=False), x)
    without_name = [{**layer.get_config(), "name": None} for layer in (ours, theirs)]
    assert without_name[0] == without_name[1]
    with microbatch(rows=8).forward():
        np.testing.assert_array_equal(ours(x, training=False), x)


@every_layer
def test_is_saved_with_a_model(layer_class, arguments, shape, tmp_path):
    model = keras.Sequential([keras.Input(shape[1:]), layer_class(**arguments)])
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.layers[0]) is layer_class


@pytest.mark.parametrize("precision", ["float64", "mixed_float16", "mixed_bfloat16"])
def test_the_mask_is_the_same_in_every_precision(precision):
    def mask(precision):
        set_precision(precision)
        layer = keras.layers.Dropout(0.3)
        with microbatch(rows=8).forward():
            return layer(tf.ones([8, 100], layer.compute_dtype), training=True).numpy() != 0

    np.testing.assert_array_equal(mask(precision), mask("float32"))


def test_dropout_keeps_its_share_and_the_mean():
    layer = keras.layers.Dropout(0.3)
    with microbatch(rows=1000).forward():
        y = layer(tf.ones([1000, 100]), training=True).numpy()
    assert (y == 0).mean() == pytest.approx(0.3, abs=0.005)
    # By the share that is kept in 16 bits, so that the mean is right.
    np.testing.assert_allclose(y[y != 0], 65536 / 45875, rtol=1e-6)
    assert ddl.random.as_drawn(0.7) == 45875 / 65536


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dropped_infinities_are_zero_and_their_gradients_too(dtype):
    x = tf.cast(tf.fill([8, 100], np.inf), dtype)
    with tf.GradientTape() as tape, microbatch(rows=8).forward():
        tape.watch(x)
        y = keras.layers.Dropout(0.3, dtype=dtype)(x, training=True)
    gradient = tf.cast(tape.gradient(y, x), tf.float32)
    y = tf.cast(y, tf.float32).numpy()
    assert set(np.unique(y)) == {0.0, np.inf}
    scale = tf.cast(tf.constant(65536 / 45875, dtype), tf.float32).numpy()
    np.testing.assert_array_equal(gradient, np.where(y == 0, 0.0, scale))


def test_bfloat16_is_dropped_bit_for_bit_as_multiply_no_nan_does():
    """TensorFlow has no kernel of multiply_no_nan for bfloat16 on a GPU."""
    x = tf.cast(tf.random.stateless_normal([64, 100], [1, 2]), tf.bfloat16)
    given = tf.cast(tf.random.stateless_normal([64, 100], [3, 4]), tf.bfloat16)
    with tf.GradientTape(persistent=True) as tape, microbatch(rows=64).forward():
        tape.watch(x)
        y = keras.layers.Dropout(0.3, dtype="bfloat16")(x, training=True)
        kept = tf.cast(tf.cast(y, tf.float32) != 0, tf.bfloat16)
        expected = tf.math.multiply_no_nan(x, kept * tf.constant(65536 / 45875, tf.bfloat16))
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(tape.gradient(y, x, given), tape.gradient(expected, x, given))


def test_alpha_dropout_of_all():
    with microbatch(rows=8).forward():
        y = keras.layers.AlphaDropout(1 - 1e-7)(tf.ones([8, 100]), training=True).numpy()
    np.testing.assert_array_equal(y, np.zeros([8, 100]))


@pytest.mark.parametrize("rate", [0.0, 1e-7, 1 - 1e-7, 1.0])
def test_dropout_of_nothing_and_of_all(rate):
    layer = keras.layers.Dropout(rate)
    with microbatch(rows=8).forward():
        y = layer(tf.ones([8, 100]), training=True).numpy()
    np.testing.assert_array_equal(y, np.full([8, 100], float(round(1 - rate))))


def test_alpha_dropout_keeps_mean_and_variance():
    layer = keras.layers.AlphaDropout(0.2)
    x = tf.random.stateless_normal([2000, 100], [1, 2])
    with microbatch(rows=2000).forward():
        y = layer(x, training=True).numpy()
    assert y.mean() == pytest.approx(0, abs=0.01)
    assert y.std() == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_all_or_nothing(rate):
    with microbatch(rows=8).forward():
        y = keras.layers.Dropout(rate)(tf.ones([8, 4]), training=True)
    np.testing.assert_array_equal(y, np.full([8, 4], 1 - rate))


def test_one_mask_for_the_batch_where_asked_for():
    layer = keras.layers.Dropout(0.5, noise_shape=(1, 20))
    with microbatch(rows=8).forward():
        y = layer(tf.ones([8, 20]), training=True).numpy()
    assert (y == y[0]).all()
    # One row a replica: still the mask of all.
    with microbatch(first_row=5, rows=1).forward():
        np.testing.assert_array_equal(layer(tf.ones([1, 20]), training=True), y[:1])


class Recorder(keras.layers.Layer):
    """Keeps what passed through on each replica, in each microbatch of an update."""

    def build(self, shape):
        arguments = {"trainable": False, "initializer": "zeros"}
        self.seen = self.add_weight(name="seen", shape=shape, dtype="float32", **arguments)
        self.calls = self.add_weight(name="calls", shape=(), dtype="int32", **arguments)

    def call(self, x, training=False):
        if training:
            place = [[self.calls.value % self.seen.shape[0]]]
            self.seen.assign(tf.tensor_scatter_nd_update(self.seen.value, place, x[tf.newaxis]))
            self.calls.assign(self.calls + 1)
        return x


def recorded(strategy, layer_class, steps, accumulation_steps=1, nested=False):
    """Masks of all rows in some steps, in the order of the global batch."""
    replicas = strategy.num_replicas_in_sync
    with strategy.scope():
        inputs = keras.Input((10,), name="image")
        drop = layer_class(0.5, seed=9)
        x = keras.layers.Rescaling(0.0, offset=1.0)(inputs)
        x = Compiled(drop)(x) if nested else drop(x)
        recorder = Recorder()
        recorder.build((accumulation_steps, 24 // replicas // accumulation_steps, 10))
        model = keras.Model(inputs, keras.layers.Dense(2)(recorder(x)))
        trainer = ddl.Trainer(
            ddl.Classification(model),
            keras.optimizers.SGD(0.1),
            (np.zeros([24, 10], "f4"), np.zeros(24, "i8")),
            global_batch_size=24,
            accumulation_steps=accumulation_steps,
        )
    masks = []
    for _ in range(steps):
        trainer.train(1)
        copies = strategy.experimental_local_results(recorder.seen.value)
        # [replica, microbatch, row]: a microbatch is shared out to the replicas.
        seen = np.array([copy.numpy() for copy in copies]).swapaxes(0, 1)
        masks.append(seen.reshape(24, 10) != 0)
    return masks


class Compiled(keras.layers.Layer):
    """Calls a layer from a tf.function of its own, as many models do."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    @tf.function(autograph=False)
    def call(self, x, training=False):
        return self.layer(x, training=training)


@pytest.mark.parametrize(
    ("accumulation_steps", "nested"), [(2, False), (1, True)], ids=["plain", "in a tf.function"]
)
def test_masks_in_training_are_slices_of_one_devices(accumulation_steps, nested):
    arguments = {"steps": 3, "nested": nested}
    one = recorded(make_strategy("one_device", 1), keras.layers.Dropout, **arguments)
    arguments["accumulation_steps"] = accumulation_steps
    several = recorded(make_strategy("mirrored", 2), keras.layers.Dropout, **arguments)
    np.testing.assert_array_equal(several, one)


def test_keras_masks_differ_between_replicas_and_steps():
    check_keras_masks_differ()


def check_keras_masks_differ():
    masks = recorded(make_strategy("mirrored", 2), keras.layers.Dropout, steps=2)
    parts = [part for step in masks for part in np.split(step, 2)]
    for i, one in enumerate(parts):
        for other in parts[i + 1 :]:
            assert 0.2 < (one != other).mean() < 0.8


def test_a_rate_of_zero_draws_nothing_and_moves_no_other_draws():
    x = tf.ones([8, 64])

    def drawn_after(rate):
        first, second = (
            keras.layers.Dropout(rate, name="first"),
            keras.layers.Dropout(0.5, name="last"),
        )

        @tf.function
        def call():
            with microbatch(rows=8).forward():
                return second(first(x, training=True), training=True)

        operations = call.get_concrete_function().graph.get_operations()
        return call().numpy(), sum("Random" in operation.type for operation in operations)

    without, draws = drawn_after(0.0)
    _, draws_of_both = drawn_after(0.25)
    with microbatch(rows=8).forward():
        first, second = keras.layers.Dropout(1e-9), keras.layers.Dropout(0.5)  # rounded to 0
        rounded = second(first(x, training=True), training=True)
    assert (draws, draws_of_both) == (1, 2)
    np.testing.assert_array_equal(rounded, without)
    with microbatch(rows=8).forward():
        ddl.random.uniform(object(), [8])  # the place of the first layer in the order of draws
        np.testing.assert_array_equal(second(x, training=True), without)
