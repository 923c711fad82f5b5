import numpy as np
import pytest
import tensorflow as tf

from ddl.data.order import SORTED_UP_TO, batch_indices, index_batches, steps_per_epoch
from ddl.errors import ConfigError, DataError


def epoch(number, num_examples, batch_size, **kwargs):
    steps = steps_per_epoch(num_examples, batch_size)
    batches = [
        batch_indices(
            tf.constant(step, tf.int64),
            num_examples=num_examples,
            global_batch_size=batch_size,
            **kwargs,
        )
        for step in range(number * steps, (number + 1) * steps)
    ]
    index = np.concatenate([index for index, _ in batches])
    weight = np.concatenate([weight for _, weight in batches])
    return index, weight


@pytest.mark.parametrize(
    ("num_examples", "batch_size"),
    [(1, 1), (1, 4), (2, 3), (10, 10), (1797, 64), (SORTED_UP_TO, 999), (SORTED_UP_TO + 1, 999)],
)
@pytest.mark.parametrize("seed", [0, -1, 2**63 + 5])
def test_every_example_comes_once_an_epoch(num_examples, batch_size, seed):
    for number in (0, 3):
        index, weight = epoch(number, num_examples, batch_size, seed=seed)
        assert len(index) % batch_size == 0
        assert weight.sum() == num_examples
        assert sorted(index[weight == 1]) == list(range(num_examples))
        assert ((index >= 0) & (index < num_examples)).all()
        assert set(weight) <= {0.0, 1.0}


def times_shown(num_examples, seed=0, epoch=0):
    """How often an epoch in one batch shows each example."""
    index, _ = batch_indices(
        tf.constant(epoch, tf.int64),
        num_examples=num_examples,
        global_batch_size=num_examples,
        seed=seed,
    )
    return np.bincount(index, minlength=num_examples)


def test_small_data_sets_are_permuted():
    powers = [2**k + more for k in range(8, 13) for more in (-1, 0, 1)]
    sizes = {*range(1, 200), *powers, *range(200, 5_001, 23), *range(4_090, 4_110)}
    for num_examples in sorted(sizes):
        assert (times_shown(num_examples) == 1).all(), num_examples


# TensorFlow's cipher has a block of one bit too few for 4^k + 1 examples.
AROUND_POWERS_OF_TWO = [2**k + more for k in range(13, 21) for more in (-1, 0, 1)]
AROUND_POWERS_OF_TWO.append(2**24 + 3)  # float32 cannot hold its index 2²⁴ + 1


@pytest.mark.parametrize("num_examples", AROUND_POWERS_OF_TWO)
def test_data_sets_around_powers_of_two_are_permuted(num_examples):
    shown = times_shown(num_examples, seed=1, epoch=2)
    assert len(shown) == num_examples
    assert (shown == 1).all(), np.flatnonzero(shown != 1)


def test_the_extra_index_of_the_cipher_is_never_shown():
    size = 4**8 + 1
    for seed in range(20):
        shown = times_shown(size, seed)
        assert len(shown) == size
        assert (shown == 1).all()


def test_a_batch_of_a_data_set_of_4_to_the_k_plus_1_is_a_slice_of_its_epoch():
    size = 4**8 + 1
    whole, _ = epoch(1, size, size, seed=5)
    arguments = {"num_examples": size, "global_batch_size": 1000, "seed": 5, "shuffle": True}
    batches = list(index_batches(66, **arguments).take(66))
    index = np.concatenate([batch["index"] for batch in batches])
    np.testing.assert_array_equal(index[:size], whole)


@pytest.mark.parametrize("num_examples", [2**47 + 1, 4**23 + 1, 10**15, 4**24, 2**62, 2**63 - 1])
def test_huge_data_sets_are_shuffled(num_examples):
    index, _ = batch_indices(
        tf.constant(0, tf.int64), num_examples=num_examples, global_batch_size=1000
    )
    assert len(set(index.numpy())) == 1000
    assert index.numpy().min() >= 0
    assert index.numpy().max() < num_examples
    assert 0.3 < index.numpy().mean() / num_examples < 0.7


def test_sizes_that_the_cipher_cannot_permute_are_refused():
    # log2 of 4^26 + 2, a double, is 52: the block would have 52 bits.
    with pytest.raises(DataError, match="cannot be shuffled.*shuffle=False"):
        batch_indices(tf.constant(0, tf.int64), num_examples=4**26 + 3, global_batch_size=8)


# Beyond SORTED_UP_TO, 8 batches of 1,000 are made at once: 10 an epoch, the last of 97.
@pytest.mark.parametrize("first_batch", [0, 1, 5, 13])
@pytest.mark.parametrize(("num_examples", "batch_size"), [(10, 4), (9_097, 1_000), (9_097, 10_000)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_data_set_of_batches_begins_anywhere(first_batch, num_examples, batch_size, shuffle):
    arguments = {
        "num_examples": num_examples,
        "global_batch_size": batch_size,
        "seed": 3,
        "shuffle": shuffle,
    }
    batches = index_batches(first_batch, **arguments).take(12)
    for number, batch in enumerate(batches, start=first_batch):
        index, weight = batch_indices(tf.constant(number, tf.int64), **arguments)
        np.testing.assert_array_equal(batch["index"], index)
        np.testing.assert_array_equal(batch["weight"], weight)
        assert batch["index"].shape == (batch_size,)


def test_unshuffled_order_is_the_stored_one_and_padding_comes_last():
    index, weight = epoch(2, 10, 4, shuffle=False)
    assert index.tolist() == [*range(10), 0, 1]
    assert weight.tolist() == [1] * 10 + [0, 0]


@pytest.mark.parametrize("num_examples", [1797, 8192])
def test_epochs_and_seeds_have_unrelated_orders(num_examples):
    orders = [epoch(number, num_examples, 500, seed=0)[0][:num_examples] for number in range(3)]
    orders.append(epoch(0, num_examples, 500, seed=1)[0][:num_examples])
    orders.append(np.arange(num_examples))
    for i, first in enumerate(orders):
        for second in orders[i + 1 :]:
            assert abs(np.corrcoef(first, second)[0, 1]) < 0.12
            # Equal positions follow a Poisson distribution of mean 1 for unrelated orders.
            assert np.count_nonzero(first == second) < 12


@pytest.mark.parametrize("num_examples", [1797, 60_000, 65_537])
def test_batches_are_as_mixed_as_random_ones(num_examples):
    # The mean index of a batch of 32 has variance n²/12/32 if the order is random. With the four
    # rounds of tf.random.experimental.index_shuffle this ratio is 0.26 for 60,000 examples.
    ratios = []
    for seed in range(4):
        index, _ = epoch(0, num_examples, num_examples, seed=seed)
        means = index[: num_examples // 32 * 32].reshape(-1, 32).mean(axis=1)
        ratios.append(means.var() / (num_examples**2 / 12 / 32))
    assert 0.75 < np.mean(ratios) < 1.25


def test_the_order_never_changes():
    # Checkpoints of earlier versions count on these very numbers.
    small, _ = batch_indices(
        tf.constant(7, tf.int64), num_examples=1000, global_batch_size=8, seed=3
    )
    large, _ = batch_indices(
        tf.constant(7000, tf.int64), num_examples=50_000, global_batch_size=8, seed=3
    )
    assert small.numpy().tolist() == SMALL
    assert large.numpy().tolist() == LARGE
    for size, expected in BY_SIZE.items():
        index, _ = batch_indices(
            tf.constant(7, tf.int64), num_examples=size, global_batch_size=8, seed=3
        )
        assert index.numpy().tolist() == expected


def test_impossible_sizes_are_refused():
    with pytest.raises(DataError, match="at least one example, got 0. Pass data with examples"):
        steps_per_epoch(0, 4)
    with pytest.raises(ConfigError, match="at least 1, got 0. Correct GLOBAL_BATCH_SIZE"):
        steps_per_epoch(4, 0)


# Rows 0 to 7 of batch 7 with seed 3.
BY_SIZE = {
    4097: [82, 1714, 1038, 1758, 3170, 2668, 3598, 2418],
    65_536: [52617, 1714, 58017, 26826, 57456, 26036, 36852, 26418],
    65_538: [45133, 2988, 1062, 39336, 7205, 56436, 46685, 21513],
    262_144: [134099, 98850, 72471, 188930, 221261, 130981, 46685, 198623],
    1_000_000: [837492, 935007, 416778, 949858, 155473, 757653, 18869, 278622],
}
SMALL = [415, 698, 245, 616, 511, 71, 587, 552]
LARGE = [4849, 41319, 34885, 35851, 3448, 9518, 21602, 26245]


def test_more_rows_than_tensorflow_counts_are_refused():
    assert steps_per_epoch(10, 2**31 - 1) == 1
    with pytest.raises(ConfigError, match="at most 2,147,483,647, .* got 2,147,483,648. Set a"):
        steps_per_epoch(10, 2**31)
