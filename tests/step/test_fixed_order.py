"""Sums over replicas; and a sum has the same bits whether other readers of its terms ran before."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.distribute import cross_device_ops, cross_device_utils
from tensorflow.python.ops import gen_math_ops

from ddl.distribution import communication
from ddl.step.fixed_order import fixed_order_of_sums
from ddl.step.replicas import AllReduce
from tests.conftest import STRATEGIES, make_strategy

# One for the process, as a strategy of several workers has it: a number names one collective.
KEYS = cross_device_utils.CollectiveKeys()


def collectives(replicas):
    """Mirrored with the collectives that several workers and several GPUs use."""
    devices = [f"CPU:{index}" for index in range(replicas)]
    operations = cross_device_ops.CollectiveAllReduce(
        devices, replicas, tf.distribute.experimental.CommunicationOptions(), KEYS
    )
    return tf.distribute.MirroredStrategy(devices, cross_device_ops=operations)


@pytest.mark.parametrize(
    "where", [*STRATEGIES, ("collectives", 3)], ids=lambda case: f"{case[0]}-{case[1]}"
)
def test_dense_and_sparse_gradients_of_two_dtypes_are_added(where, monkeypatch):
    """In buffers of 60 bytes, which hold several gradients."""
    strategy = collectives(where[1]) if where[0] == "collectives" else make_strategy(*where)
    shapes = {(3, 5): "float32", (5,): "float64", (2, 2, 3): "float32", (6, 2): "float32"}
    with strategy.scope():
        variables = [keras.Variable(np.zeros(shape), dtype=of) for shape, of in shapes.items()]
    replicas = strategy.num_replicas_in_sync
    parts = [
        [np.random.default_rng(replica).normal(size=v.shape).astype(v.dtype) for v in variables[:3]]
        for replica in range(replicas)
    ]
    monkeypatch.setattr(communication, "_BYTES_PER_PACK", 60)
    all_reduce = AllReduce(strategy)

    @tf.function(autograph=False)
    def run():
        def replica():
            number = tf.distribute.get_replica_context().replica_id_in_sync_group
            dense = [tf.gather(tf.stack(values), number) for values in zip(*parts, strict=True)]
            indices = tf.stack([tf.cast(number, tf.int32), 5])
            return [*dense, tf.IndexedSlices(tf.ones([2, 2]), indices, tf.constant([6, 2]))]

        reduced = all_reduce(strategy.run(replica), variables)
        copies = [strategy.experimental_local_results(gradient) for gradient in reduced]
        assert replicas == 1 or isinstance(copies[-1][0], tf.IndexedSlices)
        return [[tf.convert_to_tensor(copy) for copy in own] for own in copies]

    rows = np.zeros([6, 2])
    rows[:replicas] += 1
    rows[5] += replicas
    wanted = [*(np.sum(own, axis=0) for own in zip(*parts, strict=True)), rows]
    for copies, value in zip(run(), wanted, strict=True):
        for copy in copies:
            np.testing.assert_allclose(copy.numpy(), value, rtol=1e-5, atol=1e-6)


_TERMS = [np.random.default_rng(term).normal(size=(64, 64)).astype("f4") for term in range(5)]


def plus(terms):
    first, *others = terms
    for other in others:
        first = first + other
    return first


def gradient_of_many_uses(terms):
    x = tf.zeros_like(terms[0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        uses = [tf.identity(x) for _ in terms]
    return tape.gradient(uses, x, output_gradients=terms)


def bits(add, reader_first):
    """Of a sum of five terms, of which all but the last are also read elsewhere."""
    variables = [tf.Variable(term) for term in _TERMS]

    def read(terms):
        return [tf.reduce_sum(tf.square(term)) for term in terms[:-1]]

    @tf.function(autograph=False)
    def run():
        terms = [tf.sin(variable) for variable in variables]
        if reader_first:
            others = read(terms)
            with tf.control_dependencies(others):
                return add(terms), others
        total = add(terms)
        with tf.control_dependencies([total]):
            return total, read(terms)

    return run()[0].numpy().tobytes()


SUMS = {
    "add_n": tf.add_n,
    "plus": plus,
    "Keras": lambda terms: keras.layers.Add()(terms),
    "gradient": gradient_of_many_uses,
    "tf.distribute": lambda terms: tf.distribute.ReductionToOneDevice().accumulation_fn(terms),
}


@pytest.mark.parametrize("add", SUMS.values(), ids=SUMS)
def test_the_order_is_fixed_and_tensorflow_has_no_fixed_order(add):
    """Else `fixed_order_of_sums` would not be needed any more."""
    plain = gen_math_ops.add_v2, gen_math_ops.add_n
    with fixed_order_of_sums():
        assert bits(add, reader_first=True) == bits(add, reader_first=False)
    assert (gen_math_ops.add_v2, gen_math_ops.add_n) == plain
    assert bits(add, reader_first=True) != bits(add, reader_first=False)
