import keras
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from ddl.errors import ConfigError
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


def test_unknown_precision():
    with pytest.raises(ConfigError, match="mixed_float16.*got 'float16'"):
        set_precision("float16")


def scales(rule: LossScale, finite: list[bool]) -> list[float]:
    scale, run = tf.constant(rule.initial), tf.constant(0, tf.int64)
    seen = []
    for flag in finite:
        scale, run = rule.next(scale, run, tf.constant(flag))
        seen.append(float(scale))
    return seen


def test_halves_at_an_overflow_and_doubles_after_the_interval():
    rule = LossScale(initial=8.0, growth_interval=2)
    assert scales(rule, [True, True, True, False, True, True]) == [8, 16, 16, 8, 8, 16]


def test_stays_between_one_and_two_to_the_24():
    assert scales(LossScale(initial=2.0), [False] * 3) == [1, 1, 1]
    assert scales(LossScale(initial=2.0**24, growth_interval=1), [True]) == [2.0**24]


def test_a_fixed_scale_does_not_move():
    assert scales(LossScale(initial=64.0, growth_interval=None), [True, False]) == [64, 64]


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


@pytest.mark.parametrize("arguments", [{"initial": 0.5}, {"initial": 2.0**25}])
def test_refuses_a_scale_out_of_range(arguments):
    with pytest.raises(ConfigError, match="must be from 1 to"):
        LossScale(**arguments)


def test_refuses_no_interval():
    with pytest.raises(ConfigError, match="growth_interval must be at least 1 .* got 0"):
        LossScale(growth_interval=0)


def test_the_seed_decides_the_weights():
    def kernel(seed):
        set_numerics("float32", seed)
        layer = keras.layers.Dense(3)
        layer.build((None, 4))
        return layer.kernel.numpy().tolist()

    assert kernel(1) == kernel(1)
    assert kernel(1) != kernel(2)


@pytest.mark.parametrize("seed", [-1, 2**31])
def test_refuses_a_seed_out_of_range(seed):
    with pytest.raises(ConfigError, match=rf"SEED\) must be from 0 .* got {seed}"):
        set_numerics("float32", seed)
