"""The search for the smallest number of microbatches that fit."""

from collections.abc import Callable


def smallest_number(batch: int, fits: Callable[[int], bool]) -> int | None:
    """Returns the smallest divisor of a batch that fits, by doubling and bisecting.

    Args:
      batch: Examples per replica and update.
      fits: Returns whether so many microbatches fit into memory; if some number does, so do all
        larger ones. Called at most once for each number.

    Returns:
      The number of microbatches; None if not even microbatches of one example fit.
    """
    numbers = [number for number in range(1, batch + 1) if batch % number == 0]
    last = len(numbers) - 1
    below, place = -1, 0  # the largest place known not to fit, and the next one to try
    while not fits(numbers[place]):
        if place == last:
            return None
        below, double = place, 2 * numbers[place]
        place = next((i for i, number in enumerate(numbers) if number >= double), last)
    while place - below > 1:
        middle = (below + place) // 2
        if fits(numbers[middle]):
            place = middle
        else:
            below = middle
    return numbers[place]
