import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.distribute import cross_device_ops, cross_device_utils

from ddl.distribution.communication import Communication
from ddl.step.sums import AllReduce
from tests.conftest import STRATEGIES, make_strategy

# One for the process, as a strategy of several workers has it: a number names one collective.
KEYS = cross_device_utils.CollectiveKeys()
SHAPES = [(3, 5), (5,), (5, 7), (7,), (2, 2, 3)]


def collectives(replicas):
    """Mirrored with the collectives that several workers and several GPUs use."""
    devices = [f"CPU:{index}" for index in range(replicas)]
    operations = cross_device_ops.CollectiveAllReduce(
        devices, replicas, tf.distribute.experimental.CommunicationOptions(), KEYS
    )
    return tf.distribute.MirroredStrategy(devices, cross_device_ops=operations)


@pytest.fixture(
    params=[*STRATEGIES, ("collectives", 2), ("collectives", 3), ("collectives", 4)],
    ids=lambda case: f"{case[0]}-{case[1]}",
)
def strategy(request):
    name, replicas = request.param
    return collectives(replicas) if name == "collectives" else make_strategy(name, replicas)


def make_variables(strategy, dtypes=("float32",)):
    with strategy.scope():
        return [
            keras.Variable(np.zeros(shape), dtype=dtypes[number % len(dtypes)])
            for number, shape in enumerate(SHAPES)
        ]


def own_gradients(replica, variables):
    """What a replica contributes: other numbers on each."""
    generator = np.random.default_rng(replica)
    return [generator.standard_normal(v.shape).astype(v.dtype) for v in variables]


def sums(strategy, variables, communication):
    """What each local replica holds after the reduce."""
    replicas = strategy.num_replicas_in_sync
    contributions = [own_gradients(replica, variables) for replica in range(replicas)]
    all_reduce = AllReduce(strategy, communication)

    @tf.function(autograph=False)
    def run():
        def replica():
            number = tf.distribute.get_replica_context().replica_id_in_sync_group
            return [
                tf.gather(tf.stack(values), number) for values in zip(*contributions, strict=True)
            ]

        reduced = all_reduce(strategy.run(replica), variables)
        return [strategy.experimental_local_results(gradient) for gradient in reduced]

    return [[copy.numpy() for copy in copies] for copies in run()], contributions


@pytest.mark.parametrize("bytes_per_pack", [0, 60])
def test_sums_over_replicas(strategy, bytes_per_pack):
    communication = Communication(bytes_per_pack=bytes_per_pack)
    reduced, contributions = sums(strategy, make_variables(strategy), communication)
    for copies, parts in zip(reduced, zip(*contributions, strict=True), strict=True):
        for copy in copies:
            np.testing.assert_allclose(copy, np.sum(parts, axis=0), rtol=1e-5, atol=1e-6)


def test_variables_of_two_dtypes(strategy):
    variables = make_variables(strategy, ("float32", "float64"))
    reduced, contributions = sums(strategy, variables, Communication())
    for copies, parts in zip(reduced, zip(*contributions, strict=True), strict=True):
        np.testing.assert_allclose(copies[0], np.sum(parts, axis=0), rtol=1e-5, atol=1e-6)


def test_sparse_gradients_stay_sparse(strategy):
    with strategy.scope():
        table = keras.Variable(np.zeros([6, 2]), dtype="float32")
        dense = keras.Variable(np.zeros([3]), dtype="float32")
    all_reduce = AllReduce(strategy, Communication())

    @tf.function(autograph=False)
    def run():
        def replica():
            number = tf.distribute.get_replica_context().replica_id_in_sync_group
            rows = tf.fill([2, 2], 1.001)
            indices = tf.stack([tf.cast(number, tf.int32), 5])
            return [tf.IndexedSlices(rows, indices, tf.constant([6, 2])), tf.fill([3], 1.001)]

        sparse, other = all_reduce(strategy.run(replica), [table, dense])
        first = strategy.experimental_local_results(sparse)[0]
        return tf.convert_to_tensor(first), strategy.experimental_local_results(other)[0]

    replicas = strategy.num_replicas_in_sync
    expected = np.zeros([6, 2], np.float32)
    expected[:replicas] += np.float32(1.001)
    expected[5] += replicas * np.float32(1.001)
    rows, other = run()
    np.testing.assert_allclose(rows, expected, rtol=1e-6)
    np.testing.assert_allclose(other, np.full(3, replicas * 1.001), rtol=1e-6)


def test_the_last_layers_travel_while_the_first_are_computed():
    """What is sent first needs nothing of the first layers' gradients."""
    strategy = collectives(2)
    with strategy.scope():
        layers = [keras.layers.Dense(8, use_bias=False) for _ in range(4)]
        model = keras.Sequential([keras.Input((8,)), *layers])
    variables = model.trainable_variables
    two_kernels = 2 * 8 * 8 * 4
    all_reduce = AllReduce(strategy, Communication(bytes_per_pack=two_kernels - 4))

    @tf.function(autograph=False)
    def run():
        def replica():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(tf.ones([2, 8])) ** 2)
            gradients = tape.gradient(loss, [v.value for v in variables])
            return [
                tf.identity(gradient, name=f"gradient_of_layer_{number}")
                for number, gradient in enumerate(gradients)
            ]

        return all_reduce(strategy.run(replica), variables)

    graph = run.get_concrete_function().graph
    sent = [op for op in graph.get_operations() if op.type.startswith("Collective")]
    assert len(sent) == 2 * 2, "two buffers on each of two replicas"
    needs = [
        {int(name.rsplit("layer_", 1)[1][0]) for name in ancestors(op) if "gradient_of" in name}
        for op in sent
    ]
    assert needs[:2] == [{2, 3}, {0, 1}]


def ancestors(op):
    """Names of all operations whose values an operation takes, at any remove."""
    found, open_ = set(), [op]
    while open_:
        for value in open_.pop().inputs:
            if value.op.name not in found:
                found.add(value.op.name)
                open_.append(value.op)
    return found
