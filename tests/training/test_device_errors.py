"""Errors of TensorFlow, sorted: of the data, of a device, of a compiler, of anything else."""

import sys

import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.data.checks import data_errors
from ddl.errors import ConfigError, DataError, DeviceError
from ddl.training.device_errors import device_errors
from tests.conftest import make_strategy
from tests.processes import forked
from tests.training.test_trainer import IMAGES, LABELS, make_trainer


def error(kind, text):
    return kind(None, None, text)


OF_A_GPU = """Graph execution error:

Detected at node gradients/Conv2DBackpropFilter defined at (most recent call last):
  File "/home/me/Datasets/Iterator.py", line 3, in step

{}
\t [[{{{{node gradients/Conv2DBackpropFilter}}}}]]
\t [[while/body/IteratorGetNext/_4]] [Op:__inference__loop_12]"""


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (tf.errors.UnknownError, "Failed to get convolution algorithm."),
        (tf.errors.InvalidArgumentError, "Shapes of all inputs must match."),
        (tf.errors.UnknownError, "Collective ops is aborted by: NCCL: unhandled cuda error"),
        (tf.errors.NotFoundError, "No algorithm worked!"),
        (tf.errors.OutOfRangeError, "The size is out of range."),
        (tf.errors.ResourceExhaustedError, "/data/part-1; No space left on device"),
        (tf.errors.UnimplementedError, "The Conv2D op currently only supports NHWC."),
    ],
)
def test_other_errors_pass_as_they_are(kind, reason):
    raised = error(kind, OF_A_GPU.format(reason))
    with pytest.raises(kind) as caught, data_errors(), device_errors():
        raise raised
    assert caught.value is raised


def test_a_compiler_that_fails_is_no_error_of_the_data():
    @tf.function(jit_compile=True)
    def compiled(x):
        return tf.strings.to_number(tf.strings.as_string(x))

    message = r"^XLA cannot compile the operation AsString \(No registered.*jit_compile"
    with pytest.raises(ConfigError, match=message), data_errors(), device_errors():
        compiled(tf.ones([1]))


def test_too_little_memory_names_the_remedy():
    """In a graph and eagerly; no machine has 16 EB."""
    big = tf.function(lambda n: tf.reduce_sum(tf.zeros([n, 1 << 30, 1 << 30])))
    message = r"memory: OOM when allocating tensor with shape.*allocator \w+\. Raise ACCUMULATION_"
    for call in (big, big.python_function):
        with pytest.raises(DeviceError, match=message) as caught, data_errors(), device_errors():
            call(tf.constant(4))
        assert "[Op:" not in str(caught.value)
        assert "function_node" not in str(caught.value)


class Broken(ddl.Classification):
    """Multiplies matrices that do not fit, which only the running graph finds."""

    def per_example(self, features, training):
        size = tf.cast(tf.reduce_max(features["label"]) + 2, tf.int32)
        wrong = tf.linalg.matmul(tf.ones([size, size]), tf.ones([size + 1, size]))
        result = super().per_example(features, training)
        return result._replace(loss=result.loss + tf.cast(wrong[0, 0], result.loss.dtype))


@pytest.mark.parametrize(
    "reason",
    [
        "indices[0,1] = 50 is not in [0, 50)",
        "Received a label value of 7 which is outside the valid range of [0, 3).",
        "Feature 'x' contains NaN or infinity : Tensor had NaN values",
    ],
)
def test_values_that_kernels_refuse_are_errors_of_the_data(reason):
    with pytest.raises(DataError, match="failed: ") as caught, data_errors(), device_errors():
        raise error(tf.errors.InvalidArgumentError, OF_A_GPU.format(f"(0) INVALID: {reason}"))
    assert reason in str(caught.value)


def test_an_error_of_the_task_in_the_loop_is_none_of_the_data():
    trainer = make_trainer(make_strategy("one_device", 1), task=Broken)
    with pytest.raises(tf.errors.InvalidArgumentError, match="Matrix size-incompatible"):
        trainer.train(1)


def test_data_that_fail_on_two_replicas_are_told():
    weights = np.ones(len(LABELS), np.float32)
    weights[100] = np.nan
    stream = tf.data.Dataset.from_tensor_slices((IMAGES, LABELS, weights))
    with pytest.raises(DataError, match="failed: Feature 'weight' must be a finite number"):
        make_trainer(make_strategy("mirrored", 2), stream).train(10)


@pytest.mark.parametrize(
    "text",
    [
        "A deterministic GPU implementation of AdjustContrastv2 is not currently available.",
        "Determinism is not yet supported in GPU implementation of Bincount.",
        "Deterministic GPU implementation of CropAndResizeBackpropImage not available.",
        "GPU MaxPool gradient ops do not yet have a deterministic XLA implementation.",
        "The GPU implementation of SoftmaxCrossEntropyWithLogits that would have been executed is "
        "not deterministic. Note that the Python API uses an alternative.",
    ],
)
def test_operations_that_are_not_deterministic_are_named(text):
    message = r"--deterministic_ops refuses an operation at gradients/Conv2DB.*: .*(\w+)\. Replace"
    with pytest.raises(ConfigError, match=message) as caught, data_errors(), device_errors():
        raise error(tf.errors.UnimplementedError, OF_A_GPU.format(text))
    assert text.rstrip(".") in str(caught.value)


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
    assert "at Timestamp: Timestamp cannot be called when determinism is enabled." in found[0]
    assert "Random ops require a seed" in found[1]
