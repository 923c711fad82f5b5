"""The fused operation against Keras's own, in float64; and where it may not take its place."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from ddl.distribution.path import GPU, taking
from ddl.layers import fused_normalization
from ddl.layers.normalization import take_over_moments
from ddl.microbatch import HeldMoments
from tests.conftest import make_strategy, microbatch

RANDOM = np.random.default_rng(0)
SHAPES = [((8, 3), -1), ((8, 5, 3), -1), ((4, 3, 2, 3), 3), ((2, 2, 3, 2, 3), -1)]


@pytest.fixture
def _on_gpu():
    """Chooses for a GPU; these kernels exist on a CPU, too."""
    with taking(GPU):
        yield


def layer_for(shape, axis=-1, dtype="float32", **arguments):
    layer = keras.layers.BatchNormalization(
        axis=axis, momentum=0.7, epsilon=1e-5, dtype=dtype, **arguments
    )
    layer.build(shape)
    for number, variable in enumerate(layer.weights, start=1):
        variable.assign(np.linspace(0.5, number, shape[axis]))
    return layer


def results(layer, inputs, weights):
    """Output, gradients and moments after one call in a trainer."""
    with tf.GradientTape() as tape, microbatch(rows=len(inputs)).forward():
        tape.watch(inputs)
        outputs = layer(inputs, training=True)
        loss = tf.reduce_sum(tf.cast(outputs, tf.float64) * weights)
    sources = [inputs, *(v.value for v in layer.trainable_variables)]
    gradients = tape.gradient(loss, sources)
    assert outputs.dtype == layer.compute_dtype
    moments = (layer.moving_mean, layer.moving_variance)
    return [tf.cast(x, tf.float64).numpy() for x in (outputs, *gradients, *moments)]


def operations(layer, inputs, **where):
    def call(x):
        with microbatch(rows=len(inputs), **where).forward():
            return layer(x, training=True)

    graph = tf.function(call, autograph=False).get_concrete_function(tf.constant(inputs)).graph
    return {operation.type for operation in graph.get_operations()}


@pytest.mark.usefixtures("_on_gpu")
@pytest.mark.parametrize(("shape", "axis"), SHAPES, ids=str)
@pytest.mark.parametrize(
    ("dtype", "rounding"), [("float32", 3e-6), ("mixed_float16", 4e-3), ("mixed_bfloat16", 3e-2)]
)
@pytest.mark.parametrize("arguments", [{}, {"scale": False}], ids=str)
def test_it_computes_what_keras_computes(shape, axis, dtype, rounding, arguments):
    layer = layer_for(shape, axis, dtype, **arguments)
    take_over_moments([layer])
    # Values that every dtype represents, far from zero.
    inputs = np.round(4 * RANDOM.normal(size=shape)) + 16
    weights = RANDOM.normal(size=shape)
    expected = results(layer_for(shape, axis, "float64", **arguments), tf.constant(inputs), weights)
    given = tf.cast(inputs, layer.compute_dtype)
    for ours, theirs in zip(results(layer, given, weights), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=rounding, atol=rounding)
    assert "FusedBatchNormV3" in operations(layer, given)


def test_channels_first():
    """TensorFlow has no such kernel for CPUs, but XLA has."""
    shape = (4, 3, 2, 5)
    layer, inputs = layer_for(shape, 1), RANDOM.normal(size=shape)
    expected = layer_for(shape, 1, "float64")
    outputs = expected(inputs, training=True)

    @tf.function(jit_compile=True)
    def normalized(x):
        return fused_normalization.normalized(layer, x)

    np.testing.assert_allclose(
        normalized(tf.cast(inputs, tf.float32)), outputs, rtol=1e-5, atol=1e-5
    )
    for ours, theirs in zip(layer.variables, expected.variables, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


@pytest.mark.usefixtures("_on_gpu")
def test_second_gradients():
    def second(layer, inputs):
        with tf.GradientTape() as outer, microbatch(rows=8).forward():
            outer.watch(inputs)
            with tf.GradientTape() as inner:
                inner.watch(inputs)
                cubes = tf.reduce_sum(layer(inputs, training=True) ** 3)
            length = tf.reduce_sum(inner.gradient(cubes, inputs) ** 2)
        return outer.gradient(length, inputs).numpy()

    layer, inputs = layer_for((8, 3)), tf.constant(RANDOM.normal(size=(8, 3)))
    take_over_moments([layer])
    expected = second(layer_for((8, 3), dtype="float64"), inputs)
    np.testing.assert_allclose(second(layer, tf.cast(inputs, tf.float32)), expected, rtol=1e-3)


class Changed(keras.layers.BatchNormalization):
    def call(self, inputs, training=None, mask=None):
        return 2 * super().call(inputs, training=training, mask=mask)


ELSEWHERE = {
    "float64": ({"dtype": "float64"}, {}),
    "renormalization": ({"renorm": True}, {}),
    "padding": ({}, {"mask": [True] * 7 + [False]}),
    "one entry a channel": ({"shape": (1, 3)}, {}),
    "another axis": ({"shape": (8, 4, 3, 2), "axis": 2}, {}),
}


@pytest.mark.usefixtures("_on_gpu")
@pytest.mark.parametrize(("of_layer", "where"), ELSEWHERE.values(), ids=ELSEWHERE.keys())
def test_keras_operations_stay(of_layer, where):
    shape = {"shape": (8, 3)} | of_layer
    layer = layer_for(**shape)
    take_over_moments([layer])
    inputs = np.ones(shape["shape"], layer.compute_dtype)
    assert "FusedBatchNormV3" not in operations(layer, inputs, **where)


@pytest.mark.usefixtures("_on_gpu")
def test_so_they_do_for_a_subclass_with_a_call_of_its_own():
    layer = Changed()
    layer.build((8, 3))
    take_over_moments([layer])
    inputs = np.ones((8, 3), np.float32)
    assert "FusedBatchNormV3" not in operations(layer, inputs)


@pytest.mark.usefixtures("_on_gpu")
def test_so_they_do_for_masks_held_moments_and_other_replicas():
    layer, x = layer_for((8, 3)), tf.ones([8, 3])
    alone, holding = microbatch(rows=8), microbatch(rows=8)
    alone.own_moments, holding.held_moments = True, HeldMoments()
    with microbatch(rows=8).forward():
        assert fused_normalization.applies_to(layer, x, None)
        assert not fused_normalization.applies_to(layer, x, tf.ones([8], tf.bool))
        with make_strategy("mirrored", 2).scope():
            assert not fused_normalization.applies_to(layer, x, None)
            with alone.forward():
                assert fused_normalization.applies_to(layer, x, None)
    assert not fused_normalization.applies_to(layer, x, None)  # outside of a trainer
    with holding.forward():
        assert not fused_normalization.applies_to(layer, x, None)


def test_on_cpus_and_compiled_keras_operations_stay():
    layer = layer_for((8, 3))
    take_over_moments([layer])
    x = tf.ones([8, 3])
    applied = []

    def call():
        with microbatch(rows=8).forward():
            applied.append(fused_normalization.applies_to(layer, x, None))

    call()
    make_strategy("mirrored", 2).run(call)
    with taking(GPU):
        call()
        tf.function(call, jit_compile=True)()
    assert applied == [False] * 3 + [True, False]
