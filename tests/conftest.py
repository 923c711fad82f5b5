"""Four virtual CPU devices for the whole test process, and strategies over them."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import pytest
import tensorflow as tf

from ddl.checkpoints.checkpoints import Checkpoints
from ddl.microbatch import Microbatch
from ddl.random import batch_counter

tf.config.set_visible_devices([], "GPU")
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration() for _ in range(4)],
)


def make_strategy(name: str, replicas: int) -> tf.distribute.Strategy:
    devices = [f"CPU:{index}" for index in range(replicas)]
    if name == "one_device":
        return tf.distribute.OneDeviceStrategy("CPU:0")
    if name == "mirrored":
        return tf.distribute.MirroredStrategy(
            devices, cross_device_ops=tf.distribute.ReductionToOneDevice()
        )
    if name == "central_storage":
        return tf.distribute.experimental.CentralStorageStrategy(
            compute_devices=devices, parameter_device="CPU:0"
        )
    raise ValueError(name)


def microbatch(first_row=0, rows=8, batch=3, seed=5, training=True, mask=None) -> Microbatch:
    """Builds a microbatch, for calling layers without a trainer."""
    return Microbatch(
        seed=seed,
        training=training,
        counter=batch_counter(tf.cast(batch, tf.int64)),
        first_row=first_row,
        rows=rows,
        mask=None if mask is None else tf.constant(mask),
    )


def save(folder, trainer) -> str:
    """Saves a trainer, waits for the save and returns the checkpoint's TensorFlow prefix."""
    checkpoints = Checkpoints(folder, trainer)
    checkpoints.save()
    checkpoints.finish()
    return checkpoints.saved()[-1].prefix


STRATEGIES = [
    ("one_device", 1),
    ("mirrored", 1),
    ("mirrored", 2),
    ("mirrored", 4),
    ("central_storage", 2),
    ("central_storage", 4),
]


# One of each kind, the mirrored one with as many replicas as there are devices.
KINDS = [("one_device", 1), ("mirrored", 4), ("central_storage", 2)]


# One of each kind, for tests in which the number of replicas does not matter: tracing takes time in
# proportion to it.
KINDS_ON_TWO = [("one_device", 1), ("mirrored", 2), ("central_storage", 2)]


def name_of(case: tuple[str, int]) -> str:
    return f"{case[0]}-{case[1]}"


@pytest.fixture(params=KINDS, ids=name_of)
def strategy(request) -> tf.distribute.Strategy:
    """A strategy of each kind, or of those that `for_every_strategy` names."""
    return make_strategy(*request.param)


# For tests that trace little, or stand for their module.
for_every_strategy = pytest.mark.parametrize("strategy", STRATEGIES, indirect=True, ids=name_of)

for_each_kind_on_two = pytest.mark.parametrize("strategy", KINDS_ON_TWO, indirect=True, ids=name_of)


@pytest.fixture(autouse=True)
def _float32_again():
    """Restores Keras's default precision after each test."""
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
