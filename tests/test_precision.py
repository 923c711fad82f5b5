import keras
import pytest

from ddl.precision import set_numerics, set_precision


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


def test_the_seed_decides_the_weights():
    def kernel(seed):
        set_numerics("float32", seed)
        layer = keras.layers.Dense(3)
        layer.build((None, 4))
        return layer.kernel.numpy().tolist()

    assert kernel(1) == kernel(1)
    assert kernel(1) != kernel(2)
