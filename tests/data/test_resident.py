"""Arrays on the devices: packed, gathered to the bit, and when they lie there."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import kernels

from ddl.data import BatchPipeline, Source
from ddl.data import resident as module
from ddl.data.resident import gather, numeric_arrays, packed
from ddl.distribution.path import CPU, taking
from ddl.distribution.path import GPU as GPU_PATH
from ddl.errors import ConfigError
from tests.conftest import make_strategy

INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
DTYPES = ["bool", *INTEGERS, "float16", "bfloat16", "float32", "float64", "complex64"]
SHAPES = [(), (1,), (3,), (4,), (9,), (3, 3, 1), (2, 4), (0,)]
EXAMPLES = 11


def array(shape, dtype):
    """Random bits, so that integers have all signs and sizes; floats are finite."""
    random, size = np.random.default_rng(0), EXAMPLES * int(np.prod(shape))
    if dtype not in INTEGERS:
        whole = 100 * random.normal(size=(EXAMPLES, *shape))
        return whole.astype(tf.as_dtype(dtype).as_numpy_dtype)
    return np.frombuffer(random.bytes(8 * size), dtype)[:size].reshape(EXAMPLES, *shape)


@pytest.mark.parametrize("for_gpus", [True, False])
@pytest.mark.parametrize("dtype", [*DTYPES, ">i2", ">u4", ">f8"])
def test_examples_are_gathered_to_the_bit(dtype, for_gpus):
    """Files of images and labels often have the other byte order."""
    if dtype[0] == ">":
        arrays = {"x": np.arange(22).reshape(2, 11).T.astype(dtype)}
    else:
        arrays = {str(shape): array(shape, dtype) for shape in SHAPES}
    source = Source(arrays)
    placed = {n: tf.constant(packed(each, for_gpus)) for n, each in source.arrays.items()}
    found = gather(placed, tf.constant([10, 0, 3, 3], tf.int64), source.element_spec)
    for name, values in found.items():
        expected = source.arrays[name][[10, 0, 3, 3]]
        assert (values.dtype, values.shape) == (source.element_spec[name].dtype, expected.shape)
        expected = np.ascontiguousarray(expected.astype(expected.dtype.newbyteorder("=")))
        assert values.numpy().tobytes() == expected.tobytes(), name


def test_on_a_gpu_each_array_is_gathered_where_it_lies():
    registered = kernels.get_registered_kernels_for_op("GatherV2").kernel
    of_gpu = [each.constraint for each in registered if each.device_type == "GPU"]
    rows = [one for each in of_gpu for one in each if one.name == "Tparams"]
    on_gpu = {value for one in rows for value in one.allowed_values.list.type}
    if not on_gpu:
        pytest.skip("this TensorFlow has no GPU kernels")
    for dtype in DTYPES:
        stored = packed(array((3,), dtype), True)
        assert stored.dtype != np.int32, f"{dtype} would lie in host memory"
        assert tf.as_dtype(stored.dtype).as_datatype_enum in on_gpu, dtype


@pytest.mark.parametrize(("path", "dtype"), [(CPU, tf.int32), (GPU_PATH, tf.int64)])
def test_arrays_lie_once_on_each_replicas_own_device(path, dtype):
    """Packed as its kind of device needs it."""
    pipeline = BatchPipeline(Source({"x": np.arange(8, dtype=np.int32)}), 8, resident=True)
    strategy = make_strategy("mirrored", 4)
    with taking(path):
        placed = pipeline.resident_arrays(strategy)["x"]
    parts = strategy.experimental_local_results(placed)
    assert [part.device[-5:] for part in parts] == ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]
    assert {part.dtype for part in parts} == {dtype}
    assert pipeline.resident_arrays(strategy)["x"] is placed
    assert pipeline.resident_arrays(make_strategy("one_device", 1))["x"] is not placed


def test_small_arrays_of_numbers_reside(monkeypatch):
    arrays = Source({"x": np.zeros(1000, np.uint8)})
    monkeypatch.setattr(module, "_RESIDENT_UP_TO_BYTES", 999)
    assert not BatchPipeline(arrays, 10).resident
    assert BatchPipeline(arrays, 10, resident=True).resident
    monkeypatch.setattr(module, "_RESIDENT_UP_TO_BYTES", 1000)
    assert BatchPipeline(arrays, 10).resident
    assert not BatchPipeline(arrays, 10, resident=False).resident


TEXT, DECODED = Source({"x": ["a", "b"]}), Source({"x": [1, 2]}, lambda item, seed: item)


@pytest.mark.parametrize("source", [TEXT, DECODED, Source([{"x": 1}, {"x": 2}])])
def test_nothing_else_resides(source):
    assert numeric_arrays(source) is None
    assert not BatchPipeline(source, 2).resident
    with pytest.raises(ConfigError, match=f"needs arrays of numbers, got {source.name}"):
        BatchPipeline(source, 2, resident=True)
