"""Which documents stand in which row: the fewest rows that a greedy rule finds.

Krell et al. 2021, "Efficient Sequence Packing without Cross-contamination": documents are placed
by length, the longest first, each in the row with the least free space that holds it. The rule
works on the number of documents of each length, so that its time does not grow with their number.
"""

import bisect
from collections import defaultdict
from typing import NamedTuple, TypeAlias

import numpy as np

_Parts: TypeAlias = tuple[tuple[int, int], ...]


class Packing(NamedTuple):
    """The documents of each row.

    Attributes:
      documents: Numbers of the documents, row after row, int64 [n].
      first: Place in `documents` of the first one of each row, and n, int64 [rows + 1].
    """

    documents: np.ndarray
    first: np.ndarray


def packing(lengths: np.ndarray, row_length: int, seed: int) -> Packing:
    """Packs documents into rows.

    Documents of one length are interchangeable: the seed decides which of them stands where, and
    the order of the documents in a row.

    Args:
      lengths: Length of each document, int64 [n], from 1 to `row_length`.
      row_length: Length of a row.
      seed: Seed, at least 0.
    """
    random = np.random.default_rng([seed, len(lengths)])
    order = random.permutation(len(lengths))
    order = order[np.argsort(lengths[order], kind="stable")]  # shuffled within each length
    counts = np.bincount(lengths, minlength=row_length + 1)
    taken = np.cumsum(counts) - counts  # the next place in `order` for each length
    documents, sizes = [], []
    for rows, parts in _compositions(counts, row_length):
        columns = []
        for length, copies in parts:
            end = taken[length] + rows * copies
            columns.append(order[taken[length] : end].reshape(rows, copies))
            taken[length] = end
        of_rows = random.permuted(np.concatenate(columns, axis=1), axis=1)
        documents.append(of_rows.ravel())
        sizes.append(np.full(rows, of_rows.shape[1]))
    first = np.concatenate([[0], np.cumsum(np.concatenate(sizes))])
    return Packing(np.concatenate(documents).astype(np.int64), first.astype(np.int64))


def _compositions(counts: np.ndarray, row_length: int) -> list[tuple[int, _Parts]]:
    """Returns how many rows hold which numbers of documents of which lengths.

    Args:
      counts: Number of documents of each length, int64 [row_length + 1].
      row_length: Length of a row.
    """
    by_free_space: dict[int, list[tuple[int, _Parts]]] = defaultdict(list)
    spaces: list[int] = []  # those of rows with space, in rising order

    def put(free: int, rows: int, parts: _Parts) -> None:
        if free and not by_free_space[free]:
            bisect.insort(spaces, free)
        by_free_space[free].append((rows, parts))

    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        while left:
            place = bisect.bisect_left(spaces, length)
            if place == len(spaces):
                free, rows = row_length, left
                parts: _Parts = ()
            else:
                free = spaces[place]
                rows, parts = by_free_space[free].pop()
                if not by_free_space[free]:
                    del spaces[place]
            copies = min(free // length, left)
            used = min(rows, left // copies)
            put(free - copies * length, used, (*parts, (length, copies)))
            if parts and used < rows:
                put(free, rows - used, parts)
            left -= used * copies
    return [one for rows in by_free_space.values() for one in rows]
