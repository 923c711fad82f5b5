"""The search for the smallest number of microbatches, against trying all of them."""

import pytest

from ddl.cli.fitting.search import smallest_number


@pytest.mark.parametrize("batch", [1, 2, 12, 60, 64, 97, 360])
def test_it_finds_the_smallest_divisor_that_fits(batch):
    divisors = [number for number in range(1, batch + 1) if batch % number == 0]
    for smallest in divisors:
        tried = []
        found = smallest_number(batch, lambda n: tried.append(n) or n >= smallest)  # noqa: B023
        assert found == smallest
        assert len(tried) == len(set(tried))
        assert set(tried) <= set(divisors)


def test_it_doubles_and_bisects():
    tried = []
    assert smallest_number(360, lambda n: tried.append(n) or n >= 18) == 18
    # By doubling, but that 16 is no divisor; then by bisecting between 8 and 18.
    assert tried == [1, 2, 4, 8, 18, 10, 12, 15]


def test_nothing_fits():
    tried = []
    assert smallest_number(6, lambda n: tried.append(n)) is None
    assert tried == [1, 2, 6]
