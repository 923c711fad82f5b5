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


def test_impossible_sizes_are_refused():
    with pytest.raises(DataError, match="empty"):
        steps_per_epoch(0, 4)
    with pytest.raises(ConfigError, match="0; it is 1 or more"):
        steps_per_epoch(4, 0)


SMALL = [415, 698, 245, 616, 511, 71, 587, 552]
LARGE = [4849, 41319, 34885, 35851, 3448, 9518, 21602, 26245]
