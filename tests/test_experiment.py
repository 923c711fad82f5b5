import keras
import pytest

from ddl.errors import ConfigError
from ddl.experiment import Experiment, global_batch_size, set_numerics
from tests.conftest import make_strategy


def experiment(**arguments) -> Experiment:
    values = {"task": None, "optimizer": None, "train_data": None, "global_batch_size": 8}
    return Experiment(**values | arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "neither of them"),
        ({"train_steps": 1, "train_epochs": 1}, "both of them"),
        ({"train_steps": 0}, "train_steps is 0"),
        ({"train_epochs": -1}, "train_epochs is -1"),
        ({"train_steps": 1, "eval_every": 0}, "eval_every is 0"),
        ({"train_steps": 1, "log_every": 0}, "log_every is 0"),
        ({"train_steps": 1, "seed": -1}, "SEED is -1"),
    ],
)
def test_bad_values(arguments, message):
    with pytest.raises(ConfigError, match=message):
        experiment(**arguments)


def test_total_steps():
    assert experiment(train_steps=7).total_steps(23) == 7
    assert experiment(train_epochs=2).total_steps(23) == 46
    assert experiment(train_epochs=0.5).total_steps(23) == 12


def test_global_batch_size():
    assert global_batch_size(total=64) == 64
    with make_strategy("mirrored", 4).scope():
        assert global_batch_size(total=64) == 64
        assert global_batch_size(per_replica=16) == 64
    with make_strategy("one_device", 1).scope():
        assert global_batch_size(per_replica=16) == 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "neither of them"),
        ({"total": 8, "per_replica": 8}, "both of them"),
        ({"total": 0}, "batch size is 0"),
        ({"per_replica": -4}, "batch size is -4"),
    ],
)
def test_bad_batch_sizes(arguments, message):
    with pytest.raises(ConfigError, match=message):
        global_batch_size(**arguments)


def test_the_seed_decides_the_weights():
    def kernel(seed):
        set_numerics("float32", seed)
        layer = keras.layers.Dense(3)
        layer.build((None, 4))
        return layer.kernel.numpy().tolist()

    assert kernel(1) == kernel(1)
    assert kernel(1) != kernel(2)
