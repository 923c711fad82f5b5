import types

import numpy as np
import pytest
import tensorflow as tf
from ddl.data.pipeline.resident import GPU, HOST, gather, pack, packing_for
from tensorflow.python.framework import kernels

from ddl.data import ArraySource
from ddl.devices.path import CPU, TPU, path_of, taking
from ddl.devices.path import GPU as GPU_PATH
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


@both_packings
@pytest.mark.parametrize("dtype", DTYPES)
def test_examples_are_gathered_to_the_bit(dtype, packing):
    source = ArraySource({str(shape): array(shape, dtype) for shape in SHAPES})
    rows = tf.constant([10, 0, 3, 3], tf.int64)
    placed = {name: tf.constant(each) for name, each in pack(source, packing).items()}
    gathered = gather(placed, rows, source.element_spec, packing)
    for name, values in gathered.items():
        expected = source.features[name][rows.numpy()]
        assert values.dtype == dtype
        assert values.shape == expected.shape
        assert values.numpy().tobytes() == expected.tobytes(), name


@both_packings
@pytest.mark.parametrize("dtype", [">i2", ">u2", ">i4", ">u4", ">i8", ">u8", ">f4", ">f8"])
def test_arrays_of_the_other_byte_order(dtype, packing):
    # As files of images and labels often have them.
    source = ArraySource(x=np.arange(6).reshape(3, 2).astype(dtype))
    placed = {name: tf.constant(each) for name, each in pack(source, packing).items()}
    gathered = gather(placed, tf.range(3, dtype=tf.int64), source.element_spec, packing)
    assert gathered["x"].numpy().tolist() == [[0, 1], [2, 3], [4, 5]]


def test_on_a_gpu_each_array_is_gathered_where_it_lies():
    gathered = {
        value
        for kernel in kernels.get_registered_kernels_for_op("GatherV2").kernel
        if kernel.device_type == "GPU"
        for constraint in kernel.constraint
        if constraint.name == "Tparams"
        for value in constraint.allowed_values.list.type
    }
    if not gathered:
        pytest.skip("this TensorFlow has no GPU kernels")
    source = ArraySource({f"{d} {s}": array(s, d) for d in DTYPES for s in [(), (3,)]})
    for name, packed in pack(source, GPU).items():
        assert packed.dtype != np.int32, f"{name} would lie in host memory"
        assert tf.as_dtype(packed.dtype).as_datatype_enum in gathered, name


def test_cpus_gather_bytes_in_words_of_32_bits():
    source = ArraySource({name: array((5,), name) for name in DTYPES})
    packed = {name: each.dtype.name for name, each in pack(source, HOST).items()}
    in_words = dict.fromkeys(["int8", "uint8", "int16", "uint16", "uint32"], "int32")
    assert packed == {name: name for name in DTYPES} | in_words | {"uint64": "int64"}


def of_devices(*devices):
    extended = types.SimpleNamespace(worker_devices=devices)
    return types.SimpleNamespace(extended=extended, _should_use_with_coordinator=False)


def test_the_devices_decide(monkeypatch):
    first = "/job:localhost/replica:0/task:0/device:"
    for path, kind, packing in ((CPU, "CPU", HOST), (GPU_PATH, "GPU", GPU), (TPU, "TPU", HOST)):
        strategy = of_devices(f"{first}{kind}:0", f"{first}{kind}:1")
        assert packing_for(strategy) is packing
        assert path_of(strategy) is path
        with taking(GPU_PATH):
            assert packing_for(strategy) is GPU
    assert packing_for(make_strategy("central_storage", 2)) is HOST
    default = tf.distribute.get_strategy()
    assert packing_for(default) is HOST
    assert path_of(default) is CPU
    # Without a strategy TensorFlow takes the first GPU.
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [f"{first}{kind}:0"])
    assert packing_for(default) is GPU
