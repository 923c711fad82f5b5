"""The inverse of the order, against the order itself."""

import pytest
import tensorflow as tf

from ddl.data.order import SORTED_UP_TO, batch_indices, epoch_key, indices_at
from ddl.data.seen import place_of, position_of
from ddl.data.seen.cipher import deciphered
from ddl.errors import ConfigError

# Sorted; a small block; powers of 4, after which a permutation has an index too many; odd numbers;
# blocks of more than 32 bits.
LENGTHS = [
    *(2, 1000, SORTED_UP_TO, SORTED_UP_TO + 1, 60_000),
    *(4**8, 4**8 + 1, 2**17, 2**17 + 1, 4**9, 10**9, 4**15, 10**9 + 7, 10**12, 2**50),
]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (2**40 + 3, 7)])
def test_the_position_of_an_example_is_where_the_order_reads_it(length, seed, epoch):
    positions = sorted({0, 1, length // 3, length // 2, length - 2, length - 1})
    found = indices_at(
        tf.constant(positions, tf.int64),
        tf.constant(epoch, tf.int64),
        num_examples=length,
        seed=seed,
    )
    for position, example in zip(positions, found.numpy().tolist(), strict=True):
        assert position_of(example, epoch, num_examples=length, seed=seed) == position


@pytest.mark.parametrize("length", [4**8, 4**8 + 1, SORTED_UP_TO + 1])
def test_every_example_has_a_position_of_its_own(length):
    few = range(length - 3000, length)
    found = [position_of(example, 2, num_examples=length, seed=5) for example in few]
    assert len(set(found)) == len(found)
    order = indices_at(
        tf.constant(found, tf.int64), tf.constant(2, tf.int64), num_examples=length, seed=5
    )
    assert order.numpy().tolist() == list(few)


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_place_is_a_row_of_its_batch(shuffle):
    order = {"num_examples": 10_001, "global_batch_size": 64, "seed": 9, "shuffle": shuffle}
    for epoch, example in ((0, 0), (3, 10_000), (11, 4321)):
        batch, row = place_of(example, epoch, **order)
        assert batch // 157 == epoch
        indices, weights = batch_indices(tf.constant(batch, tf.int64), **order)
        assert (int(indices[row]), float(weights[row])) == (example, 1.0)


@pytest.mark.parametrize("example", [-1, 100])
def test_an_example_that_does_not_exist(example):
    with pytest.raises(ConfigError, match=rf"from 0 to 99.*got {example}\. Correct --example"):
        position_of(example, 0, num_examples=100, seed=0)


@pytest.mark.parametrize("length", [4**8 + 1, 4**9 + 1])
def test_the_place_of_the_index_that_is_one_too_many(length):
    """The example that the permutation maps to the index `length` stands elsewhere."""
    key = [int(word) for word in epoch_key(5, tf.constant(2, tf.int64)).numpy()]
    position = deciphered(length, key, length)
    (example,) = indices_at(
        tf.constant([position], tf.int64), tf.constant(2, tf.int64), num_examples=length, seed=5
    ).numpy()
    assert deciphered(int(example), key, length) == length
    assert position_of(int(example), 2, num_examples=length, seed=5) == position
