"""Data sets of other libraries, whose examples `data[i]` returns."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ddl.data.locking import one_at_a_time
from ddl.data.objects.examples import are_same, check_fits, copied, features_of, spec_of
from ddl.data.random_access import RandomAccessSource
from ddl.errors import DataError, check_takes


def from_items(
    data: Any, decode: Callable[[Any], Any] | None = None, *, thread_safe: bool = False
) -> RandomAccessSource:
    """Builds a source of any object with `len(data)` and `data[i]`.

    These are a map-style data set of PyTorch, a data source of Grain, a list, and many others. An
    object with `__getitems__`, as PyTorch calls it, is asked for all rows of a batch at once.

    Args:
      data: The object. An item must depend only on its index: augment with random numbers that
        follow from the number, or in the model with `ddl.layers`.
      decode: Turns an item into a dict of features or a tuple (x, y) or (x, y, weights); None if
        items are of this form already.
      thread_safe: Whether several threads may read items at once, which is faster. An object that
        holds an open file, for instance, would give them rows of each other.

    Raises:
      DataError: If there are no items, item 0 has another form, or two reads of it differ.
    """
    for needed in ("__len__", "__getitem__"):
        if not hasattr(data, needed):
            raise DataError(
                f"from_items needs an object with __len__ and __getitem__, got "
                f"{type(data).__name__} without {needed}. For data without a length, such as a "
                "generator, use ddl.data.endless."
            )
    if decode is not None:
        check_takes("from_items.decode", decode, ("item",))
    if not len(data):
        raise DataError(
            f"The {type(data).__name__} of from_items must have at least one item, got 0. Correct "
            "what it reads."
        )
    read_all = getattr(data, "__getitems__", None)
    lock = threading.Lock()

    def read(numbers: Sequence[int]) -> list[dict[str, np.ndarray]]:
        # One after the other: each item may fill the same array anew.
        items = read_all(numbers) if read_all else (data[number] for number in numbers)
        return [
            copied(features_of(item if decode is None else decode(item), f"item {number}"))
            for number, item in zip(numbers, items, strict=True)
        ]

    first, again = read([0])[0], read([0])[0]
    if not are_same(first, again):
        raise DataError(
            f"Two reads of item 0 of the {type(data).__name__} differ, so a run could not be "
            "repeated or resumed. Remove random augmentation from it, or draw from a generator "
            "that is seeded with the number of the item."
        )
    spec = spec_of(first)

    def lookup(indices: np.ndarray) -> dict[str, np.ndarray]:
        numbers = indices.tolist()
        if thread_safe:
            rows = read(numbers)
        else:
            with one_at_a_time(lock):
                rows = read(numbers)
        for number, row in zip(numbers, rows, strict=True):
            check_fits(row, spec, f"item {number}")
        return {name: np.stack([row[name] for row in rows]) for name in spec}

    return RandomAccessSource(lookup, len(data), spec)
