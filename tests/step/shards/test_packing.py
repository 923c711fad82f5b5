"""Small gradients share a buffer, large ones have their own."""

import keras
import numpy as np
import tensorflow as tf

from ddl.step.shards.packing import Layout

SHAPES = {"float32": [(3,), (200, 100), (2, 2)], "float64": [(5,), (10000,)]}


def test_small_gradients_share_a_buffer():
    variables = [
        keras.Variable(tf.zeros(shape, dtype), dtype=dtype)
        for dtype, shapes in SHAPES.items()
        for shape in shapes
    ]
    layout = Layout.of(variables)
    assert [(spec.dtype.name, spec.shape[0]) for spec in layout.specs] == [
        *(("float32", 7), ("float64", 5)),  # the small ones
        *(("float32", 20000), ("float64", 10000)),
    ]
    generator = np.random.default_rng(0)
    given = [tf.constant(generator.normal(size=v.shape), v.dtype) for v in variables]
    buffers = layout.packed([given[0], given[1], None, *given[3:]])
    assert [buffer.shape for buffer in buffers] == [spec.shape for spec in layout.specs]
    for before, after in zip(given, layout.unpacked(buffers), strict=True):
        expected = before if before is not given[2] else tf.zeros_like(before)
        np.testing.assert_array_equal(after, expected)
