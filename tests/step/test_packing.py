import numpy as np
import pytest
import tensorflow as tf

from ddl.step import packing
from tests.as_on_gpus import as_on_gpus

concat = tf.concat
SHAPES = [(3, 2), (16,), (4, 4), (), (700,), (32,), (5,), (1, 16), (640,)]


def tensors(dtype="float32", seed=0):
    random = np.random.default_rng(seed)
    return [tf.constant(random.normal(size=shape), dtype) for shape in SHAPES]


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    as_on_gpus(monkeypatch)


def test_groups_by_size_dtype_and_alignment():
    given = tensors()
    given[5] = tf.cast(given[5], tf.float64)
    assert packing.groups(given) == [[0, 3, 6], [1, 2, 7], [4], [5], [8]]


def test_small_groups_stay_alone(monkeypatch):
    monkeypatch.setattr(packing, "FEWEST", 4)
    assert packing.groups(tensors()) == [[0], [3], [6], [1, 2, 5, 7], [4], [8]]


def test_no_buffer_is_larger_than_the_limit(monkeypatch):
    monkeypatch.setattr(packing, "_LARGEST_BUFFER", 40)
    assert packing.groups([tf.zeros([16])] * 5) == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("to_keep", [False, True])
def test_unpacks_what_it_packed(to_keep):
    given, others = tensors(), tensors(seed=1)
    packed = packing.Packed(given)
    assert len(packed.buffers) == 4
    buffers = [a - 2 * b for a, b in zip(packed.buffers, packed.alike(others), strict=True)]
    found = packed.unpacked(buffers, to_keep)
    for a, b, result in zip(given, others, found, strict=True):
        np.testing.assert_array_equal(result, a - 2 * b)


def test_few_tensors_share_a_buffer_through_several_operations(monkeypatch):
    monkeypatch.setattr(packing, "FEWEST", 16)
    given = tensors()
    joined = []
    monkeypatch.setattr(packing.tf, "concat", lambda *a, **k: joined.append(1) or concat(*a, **k))

    @tf.function(autograph=False)
    def changed(values):
        own = packing.Packed(values, shared=True).each(lambda buffer: buffer * 2)
        sums = [tf.reduce_sum(buffer) for buffer in packing.Packed(own, shared=True).buffers]
        others = packing.Packed(own[::-1], shared=True).each(lambda buffer: -buffer)
        return packing.Packed(own, shared=True).each(lambda buffer: buffer + 1), sums, others

    found, sums, others = changed(given)
    assert len(joined) == 2  # the second for another order
    assert sum(map(float, sums)) == pytest.approx(sum(2 * float(tf.reduce_sum(x)) for x in given))
    for a, result, other in zip(given, found, others[::-1], strict=True):
        np.testing.assert_array_equal(result, 2 * a + 1)
        np.testing.assert_array_equal(other, -2 * a)
    assert len(packing.Packed(given[:2], shared=True).buffers) == 2


def test_norms_of_each_tensor():
    given = tensors("float64")
    expected = [float(tf.reduce_sum(tf.square(value))) for value in given]
    np.testing.assert_allclose(packing.norms(given) ** 2, expected, rtol=1e-14)
    np.testing.assert_allclose(packing.norms(given[:1]) ** 2, expected[:1], rtol=1e-14)


def test_unstacks_scalars():
    assert [float(x) for x in packing.unstacked(tf.constant([1.0, 2.0, 3.0]))] == [1, 2, 3]
