"""The order of the examples. Bounds lie 6 standard deviations from what chance would give."""

import numpy as np
import pytest

from ddl.data.order import batch_indices, example_at, position_of, steps_per_epoch
from ddl.errors import ConfigError, DataError


def order(num_examples: int, epoch: int = 0, seed: int = 0) -> np.ndarray:
    return example_at(np.arange(num_examples), epoch, num_examples=num_examples, seed=seed)


def assert_bijection(num_examples: int, **kwargs: int) -> None:
    times = np.bincount(order(num_examples, **kwargs))
    assert len(times) == num_examples, num_examples
    assert (times == 1).all(), num_examples


def test_up_to_5000_examples_are_permuted():
    for num_examples in range(1, 5001):
        assert_bijection(num_examples, epoch=num_examples % 3, seed=num_examples)


@pytest.mark.parametrize("power", range(13, 22))
def test_examples_around_powers_of_two_and_four_are_permuted(power):
    for more in (-1, 0, 1):
        assert_bijection(2**power + more, epoch=2, seed=1)


@pytest.mark.parametrize("num_examples", [1, 7, 1024, 1025, 4097, 60_000, 2**39 + 1, 2**40])
def test_position_of_is_the_inverse_of_example_at(num_examples):
    """Where the examples are too many for a list: at both ends, and at some in between."""
    of = {"epoch": 1, "num_examples": num_examples, "seed": 2}
    places = np.arange(min(num_examples, 50))
    far = np.random.default_rng(0).integers(0, num_examples, 20_000)
    positions = np.unique(np.concatenate([places, num_examples - 1 - places, far]))
    index = example_at(positions, **of)
    assert index.min() >= 0
    assert index.max() < num_examples
    np.testing.assert_array_equal(position_of(index, **of), positions)
    if num_examples > 2**32:
        observed = np.bincount(index * 64 // num_examples, minlength=64)
        assert_likely(observed, np.full(64, len(index) / 64), 63)


def assert_likely(observed: np.ndarray, expected: np.ndarray, freedom: int) -> None:
    """χ² has mean `freedom` and variance 2 · `freedom`."""
    assert abs(((observed - expected) ** 2 / expected).sum() - freedom) < 6 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("num_examples", [24, 1024, 1025, 4096, 5000, 65_537])
def test_each_position_gets_each_example_equally_often(num_examples):
    """By the cells of a table of 8 × 8, whose rows and columns have given sums."""
    cells, orders = np.zeros([8, 8]), max(8, 20_000 // num_examples)
    place = np.arange(num_examples) * 8 // num_examples
    for seed in range(orders):
        np.add.at(cells, (place, order(num_examples, seed % 3, seed) * 8 // num_examples), 1)
    sums = np.bincount(place)
    assert_likely(cells, np.outer(sums, sums) / num_examples * orders, 49)


@pytest.mark.parametrize("num_examples", [1000, 60_000, 65_537])
def test_batches_are_as_mixed_as_random_ones(num_examples):
    """The mean index of a batch of 32 has variance n²/12/32."""
    whole = [order(num_examples, seed=seed)[: num_examples // 32 * 32] for seed in range(8)]
    ratio = np.reshape(whole, [-1, 32]).mean(axis=1).var() / (num_examples**2 / 12 / 32)
    assert abs(ratio - 1) < 6 * np.sqrt(2 / (8 * num_examples / 32))


@pytest.mark.parametrize("num_examples", [1000, 8192])
def test_epochs_and_seeds_have_unrelated_orders(num_examples):
    orders = [order(num_examples, epoch, 0) for epoch in (0, 1, 2, 2**40)]
    orders += [order(num_examples, 0, seed) for seed in (1, -1, 2**32, 2**63 + 5)]
    orders.append(np.arange(num_examples))
    for i, first in enumerate(orders):
        for second in orders[i + 1 :]:
            assert abs(np.corrcoef(first, second)[0, 1]) < 6 / np.sqrt(num_examples)
            # Unrelated orders agree at a number of positions that is Poisson distributed, mean 1.
            assert np.count_nonzero(first == second) < 12


@pytest.mark.parametrize("first_batch", [0, 5, 13])
@pytest.mark.parametrize("sizes", [(10, 4), (5, 1), (3, 8), (9097, 1000)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_batches_are_the_same_wherever_a_run_begins(first_batch, sizes, shuffle):
    of = {"num_examples": sizes[0], "global_batch_size": sizes[1], "seed": 3, "shuffle": shuffle}
    whole, later = batch_indices(0, first_batch + 7, **of), batch_indices(first_batch, 7, **of)
    for all_batches, some in zip(whole, later, strict=True):
        np.testing.assert_array_equal(all_batches[first_batch:], some)


@pytest.mark.parametrize("sizes", [(1, 1), (1, 4), (3, 8), (10, 10), (1797, 64), (1025, 999)])
def test_an_epoch_shows_every_example_once_and_pads_at_weight_0(sizes):
    of = {"num_examples": sizes[0], "global_batch_size": sizes[1]}
    steps = steps_per_epoch(*sizes)
    for epoch in (0, 3, 2**40):
        index, weight = batch_indices(epoch * steps, steps, **of, seed=np.int64(-1))
        assert index.shape == weight.shape == (steps, sizes[1])
        assert (index.dtype, weight.dtype) == (np.int64, np.float32)
        index, weight = index.ravel(), weight.ravel()
        assert sorted(index[: sizes[0]]) == list(range(sizes[0]))
        assert weight.tolist() == [1] * sizes[0] + [0] * (len(weight) - sizes[0])
        np.testing.assert_array_equal(index, np.resize(index[: sizes[0]], len(index)))


def test_unshuffled_order_is_the_stored_one():
    index, _ = batch_indices(6, 4, num_examples=10, global_batch_size=4, shuffle=False)
    assert index.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1], [0, 1, 2, 3]]


def test_the_order_never_changes():
    index, _ = batch_indices(7, 1, num_examples=2**24 + 3, global_batch_size=4, seed=3)
    assert index[0].tolist() == [10500938, 14949628, 3304908, 4901678]


IMPOSSIBLE = [
    ((0, 4), DataError, "from 1 to 1,099,511,627,776 examples, got 0"),
    ((2**40 + 1, 4), DataError, "from 1 to 1,099,511,627,776 examples, got 1,099,511,627,777"),
    ((4, 0), ConfigError, "from 1 to 2,147,483,647, got 0"),
    ((4, 2**31), ConfigError, "from 1 to 2,147,483,647, got 2,147,483,648"),
]


@pytest.mark.parametrize(("sizes", "error", "message"), IMPOSSIBLE)
def test_impossible_sizes_are_refused(sizes, error, message):
    with pytest.raises(error, match=message):
        batch_indices(0, 1, num_examples=sizes[0], global_batch_size=sizes[1])
