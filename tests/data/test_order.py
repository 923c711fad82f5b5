"""The order of the examples. χ² bounds lie about 6 standard deviations from the mean."""

import numpy as np
import pytest

from ddl.data.order import batch_indices, example_at, position_of, steps_per_epoch
from ddl.errors import ConfigError, DataError


def order(num_examples: int, epoch: int = 0, seed: int = 0) -> np.ndarray:
    return example_at(np.arange(num_examples), epoch, num_examples=num_examples, seed=seed)


def assert_bijection(num_examples: int, **kwargs: int) -> None:
    index = order(num_examples, **kwargs)
    assert index.dtype == np.int64
    assert index.min() >= 0
    times = np.bincount(index)
    assert len(times) == num_examples, num_examples
    assert (times == 1).all(), num_examples


def deviation(observed: np.ndarray) -> float:
    """By how many standard deviations χ² of equally likely counts exceeds its mean."""
    expected, free = observed.mean(), observed.size - 1
    return ((observed - expected) ** 2 / expected).sum() / np.sqrt(2 * free) - np.sqrt(free / 2)


def test_up_to_5000_examples_are_permuted():
    for num_examples in range(1, 5001):
        assert_bijection(num_examples, epoch=num_examples % 3, seed=num_examples)


@pytest.mark.parametrize("power", range(13, 22))
def test_data_around_powers_of_two_and_four_are_permuted(power):
    for more in (-1, 0, 1):
        assert_bijection(2**power + more, epoch=2, seed=1)


@pytest.mark.parametrize("num_examples", [1, 2, 7, 1024, 1025, 4097, 60_000])
def test_position_of_is_the_inverse_of_example_at(num_examples):
    position = position_of(order(num_examples, 3, 5), 3, num_examples=num_examples, seed=5)
    np.testing.assert_array_equal(position, np.arange(num_examples))


@pytest.mark.parametrize("num_examples", [2**32 + 1, 2**39 + 1, 2**40 - 1, 2**40])
def test_huge_data_are_permuted(num_examples):
    """By the inverse, and by indices that differ and are spread evenly."""
    near_ends = [np.arange(50), num_examples - 1 - np.arange(50)]
    far = np.random.default_rng(0).integers(0, num_examples, 20_000)
    positions = np.unique(np.concatenate([*near_ends, far]))
    of = {"epoch": 1, "num_examples": num_examples, "seed": 2}
    index = example_at(positions, **of)
    assert len(np.unique(index)) == len(positions)
    assert index.min() >= 0
    assert index.max() < num_examples
    np.testing.assert_array_equal(position_of(index, **of), positions)
    assert abs(deviation(np.bincount(index * 64 // num_examples, minlength=64))) < 6


@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_positions_of_any_shape(shape):
    for num_examples in (10, 5000):
        positions = np.arange(np.prod(shape, dtype=int)).reshape(shape)
        index = example_at(positions, 0, num_examples=num_examples, seed=0)
        assert index.shape == shape
        np.testing.assert_array_equal(index, order(num_examples)[positions])


@pytest.mark.parametrize("num_examples", [24, 1024, 1025, 4096, 5000, 65_537])
def test_each_position_gets_each_example_equally_often(num_examples):
    """By cells of an 8 × 8 table, over seeds and epochs."""
    cells, orders = np.zeros([8, 8]), max(8, 20_000 // num_examples)
    place = np.arange(num_examples) * 8 // num_examples
    for seed in range(orders):
        np.add.at(cells, (place, order(num_examples, seed % 3, seed) * 8 // num_examples), 1)
    # Rows and columns have equal sums, up to rounding: χ² has 49 degrees of freedom, not 63.
    expected = np.outer(np.bincount(place), np.bincount(place)) / num_examples * orders
    assert abs(((cells - expected) ** 2 / expected).sum() - 49) < 6 * np.sqrt(2 * 49)


@pytest.mark.parametrize("num_examples", [1000, 4096, 50_000])
def test_neighbors_are_unrelated(num_examples):
    """The distance from an example to the next one is as likely as any other."""
    cells = np.zeros(64)
    for seed in range(max(1, 100_000 // num_examples)):
        distance = np.diff(order(num_examples, seed=seed)) % num_examples
        cells += np.bincount((distance - 1) * 64 // (num_examples - 1), minlength=64)
    sizes = np.bincount(np.arange(num_examples - 1) * 64 // (num_examples - 1))
    assert abs(deviation(cells / sizes * sizes.mean())) < 6


@pytest.mark.parametrize("num_examples", [1000, 60_000, 65_537])
def test_batches_are_as_mixed_as_random_ones(num_examples):
    """The mean index of a batch of 32 has variance n²/12/32."""
    means = [order(num_examples, seed=seed)[: num_examples // 32 * 32] for seed in range(8)]
    variance = np.stack(means).reshape(-1, 32).mean(axis=1).var()
    ratio = variance / (num_examples**2 / 12 / 32)
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


def test_any_integer_is_a_seed():
    for num_examples in (100, 5000):
        np.testing.assert_array_equal(
            order(num_examples, seed=-1), order(num_examples, seed=2**64 - 1)
        )
        np.testing.assert_array_equal(
            order(num_examples, seed=np.int64(7)), order(num_examples, seed=7)
        )


@pytest.mark.parametrize("first_batch", [0, 1, 5, 13])
@pytest.mark.parametrize("sizes", [(10, 4), (5, 1), (3, 8), (9097, 1000)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_batches_are_the_same_wherever_a_run_begins(first_batch, sizes, shuffle):
    of = {"num_examples": sizes[0], "global_batch_size": sizes[1], "seed": 3, "shuffle": shuffle}
    whole, later = batch_indices(0, first_batch + 7, **of), batch_indices(first_batch, 7, **of)
    for all_batches, some in zip(whole, later, strict=True):
        np.testing.assert_array_equal(all_batches[first_batch:], some)


@pytest.mark.parametrize("sizes", [(1, 1), (1, 4), (3, 8), (10, 10), (1797, 64), (1025, 999)])
def test_an_epoch_shows_every_example_once_and_pads_at_weight_0(sizes):
    num_examples, batch_size = sizes
    steps = steps_per_epoch(*sizes)
    for epoch in (0, 3):
        index, weight = batch_indices(
            epoch * steps, steps, num_examples=num_examples, global_batch_size=batch_size, seed=-1
        )
        assert index.shape == weight.shape == (steps, batch_size)
        assert (index.dtype, weight.dtype) == (np.int64, np.float32)
        index, weight = index.ravel(), weight.ravel()
        assert sorted(index[:num_examples]) == list(range(num_examples))
        assert weight.tolist() == [1] * num_examples + [0] * (len(weight) - num_examples)
        np.testing.assert_array_equal(index, np.resize(index[:num_examples], len(index)))


def test_unshuffled_order_is_the_stored_one():
    index, _ = batch_indices(6, 4, num_examples=10, global_batch_size=4, shuffle=False)
    assert index.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1], [0, 1, 2, 3]]


def test_a_batch_far_into_a_run():
    index, weight = batch_indices(2**50, 2, num_examples=2**40 - 1, global_batch_size=16)
    assert len(np.unique(index)) == 32
    assert weight.all()


def test_the_order_never_changes():
    """Runs that began with an earlier version are resumed."""
    expected = {
        100: [10, 39, 88, 75, 42, 12, 18, 82],
        1025: [230, 3, 528, 622, 658, 466, 556, 171],
        60_000: [50754, 8362, 23454, 15107, 58563, 18681, 48338, 28291],
        2**24 + 3: [520986, 9700094, 16229715, 8790764, 3242659, 11231431, 15132933, 3715723],
    }
    for num_examples, rows in expected.items():
        index, _ = batch_indices(7, 1, num_examples=num_examples, global_batch_size=8, seed=3)
        assert index[0].tolist() == rows


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ((0, 4), DataError, "from 1 to 1,099,511,627,776 examples, got 0. Pass data with"),
        ((2**40 + 1, 4), DataError, "from 1 to 1,099,511,627,776 examples, got 1,099,511,627,777"),
        ((4, 0), ConfigError, "from 1 to 2,147,483,647, got 0. Correct GLOBAL_BATCH_SIZE"),
        ((4, 2**31), ConfigError, "from 1 to 2,147,483,647, got 2,147,483,648. Correct"),
    ],
)
def test_impossible_sizes_are_refused(sizes, error, message):
    with pytest.raises(error, match=message):
        steps_per_epoch(*sizes)
    with pytest.raises(error, match=message):
        batch_indices(0, 1, num_examples=sizes[0], global_batch_size=sizes[1])
