"""The order of the examples. Bounds lie 6 standard deviations from what chance would give."""

import numpy as np
import pytest

from ddl.data import order as module
from ddl.data.order import batch_indices, example_at, steps_per_epoch


def test_up_to_5000_examples_and_around_powers_of_two_and_four_are_permuted():
    for count in [*range(1, 5001), *(2**n + m for n in range(13, 22) for m in (-1, 0, 1))]:
        times = np.bincount(example_at(np.arange(count), count % 3, num_examples=count, seed=count))
        assert len(times) == count, count
        assert (times == 1).all(), count


@pytest.mark.parametrize("num_examples", [1025, 65_537, 10**6, 2**40 - 1, 2**40])
def test_keys_in_reverse_find_the_position_of_an_example(num_examples):
    position = np.random.default_rng(0).integers(0, num_examples, 2_000)
    example = example_at(position, 3, num_examples=num_examples, seed=7)
    assert example.min() >= 0
    assert example.max() < num_examples
    keys = module._round_keys(7, 3)[::-1]
    np.testing.assert_array_equal(module._walked(example, num_examples, keys), position)


@pytest.mark.parametrize("num_examples", [60, 1500, 65_537])
def test_examples_come_to_each_place_as_often_as_by_chance(num_examples):
    """χ² of the first places over epochs and seeds, in 30 classes of examples."""
    of = {"position": np.arange(30), "num_examples": num_examples}
    firsts = [example_at(**of, epoch=n, seed=s) for n in range(150) for s in (0, 1)]
    classes = np.stack(firsts) * 30 // num_examples  # [epochs and seeds, place]
    counts = np.stack([np.bincount(column, minlength=30) for column in classes.T])
    expected = np.bincount(np.arange(num_examples) * 30 // num_examples) / num_examples * 300
    chi2 = ((counts - expected) ** 2 / expected).sum()
    freedom = 30 * 29
    assert abs(chi2 - freedom) < 6 * np.sqrt(2 * freedom)


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
