"""Arrays on the devices: packed, gathered to the bit, and when they lie there."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import kernels

from ddl.data import BatchPipeline, Source
from ddl.data import resident as module
from ddl.data.resident import GPU, HOST, gather, numeric_arrays
from ddl.distribution.path import CPU, taking
from ddl.distribution.path import GPU as GPU_PATH
from ddl.errors import ConfigError
from tests.conftest import make_strategy

INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
FLOATS = ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]
DTYPES = ["bool", *INTEGERS, *FLOATS]
SHAPES = [(), (1,), (2,), (3,), (4,), (5,), (7,), (9,), (3, 3, 1), (2, 4), (0,)]
EXAMPLES = 11

both_packings = pytest.mark.parametrize("packing", [HOST, GPU], ids=["host", "gpu"])


def array(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Random bits, so that integers have all signs and sizes; floats are finite."""
    random = np.random.default_rng(0)
    to = tf.as_dtype(dtype)
    if dtype == "bool" or to.is_floating or to.is_complex:
        return (100 * random.normal(size=(EXAMPLES, *shape))).astype(to.as_numpy_dtype)
    whole = np.frombuffer(random.bytes(8 * EXAMPLES * int(np.prod(shape))), dtype)
    return whole[: EXAMPLES * int(np.prod(shape))].reshape(EXAMPLES, *shape)


def gathered(source, rows, packing):
    placed = {name: tf.constant(packing.packed(each)) for name, each in source.arrays.items()}
    return gather(placed, tf.constant(rows, tf.int64), source.element_spec, packing)


@both_packings
@pytest.mark.parametrize("dtype", DTYPES)
def test_examples_are_gathered_to_the_bit(dtype, packing):
    source = Source({str(shape): array(shape, dtype) for shape in SHAPES})
    for name, values in gathered(source, [10, 0, 3, 3], packing).items():
        expected = source.arrays[name][[10, 0, 3, 3]]
        assert values.dtype == dtype
        assert values.shape == expected.shape
        assert values.numpy().tobytes() == expected.tobytes(), name


@both_packings
@pytest.mark.parametrize("order", ["<", ">"])
def test_arrays_as_they_lie_in_memory(packing, order):
    """Files of images and labels often have the other byte order."""
    kinds = ["i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8"]
    arrays = {kind: np.arange(6).reshape(2, 3).T.astype(order + kind) for kind in kinds}
    arrays |= {"strided": np.arange(12, dtype=np.uint8)[::4]}
    arrays["strided"].flags.writeable = False
    found = gathered(Source(arrays), range(3), packing)
    assert found.pop("strided").numpy().tolist() == [0, 4, 8]
    for values in found.values():
        assert values.numpy().tolist() == [[0, 3], [1, 4], [2, 5]]


def test_on_a_gpu_each_array_is_gathered_where_it_lies():
    registered = kernels.get_registered_kernels_for_op("GatherV2").kernel
    of_gpu = [each.constraint for each in registered if each.device_type == "GPU"]
    rows = [one for each in of_gpu for one in each if one.name == "Tparams"]
    on_gpu = {value for one in rows for value in one.allowed_values.list.type}
    if not on_gpu:
        pytest.skip("this TensorFlow has no GPU kernels")
    for dtype in DTYPES:
        for shape in [(), (3,)]:
            packed = GPU.packed(array(shape, dtype))
            assert packed.dtype != np.int32, f"{dtype} would lie in host memory"
            assert tf.as_dtype(packed.dtype).as_datatype_enum in on_gpu, dtype


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
    with pytest.raises(ConfigError, match=f"Only arrays of .*got {source.name}. Set data_on_dev"):
        BatchPipeline(source, 2, resident=True)
