import keras
import pytest

from ddl.precision import set_precision


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
