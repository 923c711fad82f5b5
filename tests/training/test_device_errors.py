"""Errors of TensorFlow, sorted: of the data, of a device, of a compiler, of anything else."""

import sys

import pytest
import tensorflow as tf

from ddl.data.checks import data_errors
from ddl.errors import DeviceError
from ddl.training.device_errors import device_errors
from tests.processes import forked


def test_too_little_memory_names_the_remedy():
    """In a graph and eagerly; no machine has 16 EB."""
    big = tf.function(lambda n: tf.reduce_sum(tf.zeros([n, 1 << 30, 1 << 30])))
    message = r"memory: OOM when allocating tensor with shape.*allocator \w+\. Raise accumulation_"
    for call in (big, big.python_function):
        with pytest.raises(DeviceError, match=message) as caught, data_errors(), device_errors():
            call(tf.constant(4))
        assert "[Op:" not in str(caught.value)
        assert "function_node" not in str(caught.value)


@pytest.mark.processes
def test_what_tensorflow_refuses_under_determinism_is_recognized(tmp_path):
    """On CPUs it refuses few operations: random ones without any seed, and the time."""
    code = """
import tensorflow as tf
from ddl.errors import ConfigError
from ddl.training.device_errors import device_errors
tf.config.experimental.enable_op_determinism()
for call in (tf.timestamp, lambda: tf.random.uniform([2])):
    try:
        with device_errors():
            tf.function(call)()
    except ConfigError as error:
        print(error)
"""
    (tmp_path / "program.py").write_text(code)
    command = [sys.executable, str(tmp_path / "program.py")]
    done = forked.run(command, capture_output=True, text=True, check=True)
    found = done.stdout.splitlines()
    assert len(found) == 2
    assert "Timestamp cannot be called when determinism is enabled." in found[0]
    assert "Random ops require a seed" in found[1]
