import keras
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from ddl.precision import LossScale, set_numerics, set_precision


@pytest.mark.parametrize(
    ("precision", "variables", "computes"),
    [
        ("float32", "float32", "float32"),
        ("float64", "float64", "float64"),
        ("mixed_float16", "float32", "float16"),
        ("mixed_bfloat16", "float32", "bfloat16"),
    ],
)
def test_layers_follow_the_policy(precision, variables, computes):
    set_precision(precision)
    layer = keras.layers.Dense(2)
    layer.build((None, 3))
    assert layer.kernel.dtype == variables
    assert layer.compute_dtype == computes


@settings(max_examples=100)
@given(
    exponent=st.integers(0, 24),
    interval=st.integers(1, 4),
    finite=st.lists(st.booleans(), max_size=40),
)
def test_the_loss_scale_moves_as_it_should(exponent, interval, finite):
    rule = LossScale(2.0**exponent, interval)
    scale, run = tf.constant(rule.initial), tf.constant(0, tf.int64)
    expected, since = rule.initial, 0
    for flag in finite:
        scale, run = rule.next(scale, run, tf.constant(flag))
        since = since + 1 if flag else 0
        if not flag:
            expected = max(expected / 2, 1.0)
        elif since == interval:
            expected, since = min(expected * 2, 2.0**24), 0
        assert (float(scale), int(run)) == (expected, since)


def test_the_seed_decides_the_weights():
    def kernel(seed):
        set_numerics("float32", seed)
        layer = keras.layers.Dense(3)
        layer.build((None, 4))
        return layer.kernel.numpy().tolist()

    assert kernel(1) == kernel(1)
    assert kernel(1) != kernel(2)
