"""Tensors in shares."""

import numpy as np
import pytest
import tensorflow as tf

from ddl.step.sharding.shares import (
    copied_share,
    gathered,
    own_share,
    share_of,
    size_of_share,
    summed_to_shares,
)
from tests.conftest import LikeGpus, make_strategy
from tests.step.sharding.trainers import memory_of


@pytest.mark.parametrize(("entries", "replicas", "size"), [(8, 4, 2), (9, 4, 3), (1, 2, 1)])
def test_shares_have_one_size(entries, replicas, size):
    assert size_of_share(tf.TensorShape([entries]), replicas) == size
    value = tf.range(1, entries + 1)
    shares = [share_of(value, replica, replicas).numpy() for replica in range(replicas)]
    assert all(share.shape == (size,) for share in shares)
    whole = np.concatenate(shares)
    np.testing.assert_array_equal(whole[:entries], value)
    assert not whole[entries:].any()


@pytest.mark.parametrize("entries", [64, 63])
def test_copied_shares_have_memory_of_their_own(entries):
    """The first assertion fails once TensorFlow copies, and `copied_share` is no longer needed."""
    value = tf.random.normal([entries])
    assert np.shares_memory(memory_of(share_of(value, 0, 2)), memory_of(value))
    for replica in range(2):
        copied = copied_share(value, replica, 2)
        np.testing.assert_array_equal(copied, share_of(value, replica, 2))
        assert not np.shares_memory(memory_of(copied), memory_of(value))


@pytest.mark.parametrize("collectives", [False, True])
def test_sums_go_to_shares_and_back(gpu_path, collectives):
    """The second tensor is large enough to be exchanged alone."""
    strategy = LikeGpus(4) if collectives else make_strategy("mirrored", 4)
    shapes = [tf.TensorShape(shape) for shape in ([3, 5], [200, 401], [])]

    @tf.function(autograph=False)
    def exchanged():
        def run():
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            values = [tf.reshape(tf.range(s.num_elements()) % 50, s) for s in shapes]
            values = [tf.cast(value * (replica + 1), tf.float32) for value in values]
            shares = summed_to_shares(values)
            wholes = gathered(shares, shapes)
            return shares, wholes, [own_share(whole) for whole in wholes]

        return strategy.experimental_local_results(strategy.run(run))

    for replica, (shares, wholes, owns) in enumerate(exchanged()):
        for share, value, own, shape in zip(shares, wholes, owns, shapes, strict=True):
            total = (10.0 * (np.arange(shape.num_elements()) % 50)).reshape(shape)
            np.testing.assert_array_equal(value, total)
            np.testing.assert_array_equal(share, share_of(tf.constant(value), replica, 4))
            np.testing.assert_array_equal(own, share)
