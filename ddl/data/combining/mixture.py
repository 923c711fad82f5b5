"""A mixture of data sets in given shares.

The shares hold in each stretch of 10,000 examples: how many of them come from which source is
fixed, and their places are shuffled by the seed and the number of the stretch. How many examples
of a source precede a batch therefore depends only on the batch's number, and a run resumes
anywhere at once.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ddl.data.combining.concatenation import described, example_of
from ddl.data.combining.random_access import check_same_spec, with_random_access
from ddl.data.decoded import DecodedSource
from ddl.data.order import indices_at
from ddl.errors import ConfigError

_STRETCH = 10_000
"""Examples over which the shares hold exactly. It determines the order, so it must not change."""

_SHARE = "shares must be positive numbers that add up to 1, one for each source"


class Mixture(DecodedSource):
    """Examples of several data sets in given shares, such as 80% and 20%.

    Each source is read in its own order: all its examples once, shuffled, then again in another
    order. A small source with a large share therefore repeats its examples more often. An epoch of
    the mixture is a number of examples and does not hold each example once.
    """

    has_numbered_examples = False

    def __init__(
        self,
        sources: Sequence[Any],
        shares: Sequence[float],
        *,
        num_examples: int | None = None,
        later_shares: Mapping[int, Sequence[float]] | None = None,
    ):
        """Checks sources and shares.

        Args:
          sources: Sources with random access, or what `Trainer.train_data` converts into such. All
            must have the same features in shape and dtype.
          shares: Part of the examples that come from each source, with a resolution of 1/10,000.
          num_examples: Examples of an epoch, which is rounded up to whole batches; None takes the
            sum of the sources' lengths.
          later_shares: Shares from later batches on, by the number of the batch, counted from 0
            over the whole run: {1000: (0.5, 0.5)}.

        Raises:
          ConfigError: If shares are not positive or do not add up to 1, or a number is out of
            range.
          DataError: If there are no sources, their features differ, or one is a stream.
        """
        self._sources = [with_random_access(source, "Mixture") for source in sources]
        self.sources_read = self._sources
        check_same_spec(self._sources, "Mixture")
        self._lengths = np.array([len(source) for source in self._sources], np.int64)
        self._length = int(self._lengths.sum()) if num_examples is None else num_examples
        if self._length < 1:
            raise ConfigError(f"Mixture.num_examples must be at least 1, got {num_examples}.")
        pieces = {0: shares, **(later_shares or {})}
        if later_shares and min(later_shares) < 1:
            raise ConfigError(
                "Mixture.later_shares must begin at batches from 1 on, since Mixture.shares hold "
                f"from batch 0 on; got {min(later_shares)}."
            )
        self._pieces = [
            _Piece(first, _counts(pieces[first], len(self._sources))) for first in sorted(pieces)
        ]

    def __len__(self) -> int:
        """Returns the number of examples of an epoch."""
        return self._length

    @property
    def element_spec(self) -> dict[str, tf.TensorSpec]:
        """See `Source`."""
        return self._sources[0].element_spec

    def example(self, index: tf.Tensor, seed: tf.Tensor) -> dict[str, tf.Tensor]:
        """Reads an example of the sources, which are numbered one after the other."""
        return example_of(self._sources, index, seed)

    def describe(self, index: int) -> str:
        """See `DecodedSource`."""
        return described(self._sources, index)

    def batches(
        self,
        global_batch_size: int,
        first_batch: int,
        *,
        seed: int,
        shuffle: bool,
        rows: np.ndarray | None = None,
    ) -> tf.data.Dataset:
        """See `Source`. Without `shuffle`, each source keeps its order; the places do not."""
        steps = self.steps_per_epoch(global_batch_size)
        chosen = np.arange(global_batch_size) if rows is None else rows

        def indices(batch: np.ndarray) -> list[np.ndarray]:
            found = self._indices(int(batch), global_batch_size, seed, shuffle)
            return [each[chosen] for each in found]

        @tf.autograph.experimental.do_not_convert
        def numbered(batch: tf.Tensor) -> dict[str, tf.Tensor]:
            dtypes = (tf.int64, tf.int64)
            index, draw = tf.numpy_function(indices, [batch], dtypes, stateful=False)
            index.set_shape([len(chosen)])
            draw.set_shape([len(chosen)])
            return {"index": index, "draw": draw, "weight": tf.ones([len(chosen)])}

        made = tf.data.Dataset.counter(first_batch).map(
            numbered, num_parallel_calls=2, deterministic=True
        )
        return self._decoded(made, len(chosen), first_batch, steps, seed)

    @property
    def _readable(self) -> int:
        return int(self._lengths.sum())

    def _indices(
        self, batch: int, size: int, seed: int, shuffle: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the numbers of a batch's examples among those of all sources, int64 [size].

        And numbers for their seeds, int64 [size], which differ in each pass through a source.
        """
        ended = [piece for piece in self._pieces if piece.first_batch <= batch]
        ends = [*(piece.first_batch for piece in ended[1:]), batch]
        lengths = [(end - piece.first_batch) * size for piece, end in zip(ended, ends, strict=True)]
        counted = [
            piece.counted(length, seed) for piece, length in zip(ended, lengths, strict=True)
        ]
        before = np.sum(counted, axis=0)
        chosen = ended[-1].sources((batch - ended[-1].first_batch) * size, size, seed)
        found, passes = np.zeros(size, np.int64), np.zeros(size, np.int64)
        for number, (length, done) in enumerate(zip(self._lengths, before, strict=True)):
            places = np.flatnonzero(chosen == number)
            rank = done + np.arange(len(places))
            first = int(self._lengths[:number].sum())
            found[places] = first + in_epochs(rank, int(length), seed + number, shuffle)
            passes[places] = rank // length
        return found, found + passes * self._readable


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Batches with the same shares.

    Attributes:
      first_batch: The first of them.
      counts: Examples of each source in a stretch, int64 [sources]; they add up to 10,000.
    """

    first_batch: int
    counts: np.ndarray

    def sources(self, start: int, size: int, seed: int) -> np.ndarray:
        """Returns the sources of `size` examples from number `start` of the piece on."""
        stretches = range(start // _STRETCH, (start + size - 1) // _STRETCH + 1)
        all_of_them = np.concatenate([self._stretch(number, seed) for number in stretches])
        return all_of_them[start % _STRETCH :][:size]

    def counted(self, end: int, seed: int) -> np.ndarray:
        """Returns how many of the piece's first `end` examples come from each source."""
        whole, rest = divmod(end, _STRETCH)
        in_rest = self._stretch(whole, seed)[:rest]
        return whole * self.counts + np.bincount(in_rest, minlength=len(self.counts))

    def _stretch(self, number: int, seed: int) -> np.ndarray:
        ordered = np.repeat(np.arange(len(self.counts)), self.counts)
        return ordered[_places(number, seed)]


@functools.lru_cache(maxsize=8)  # threads make several batches of a stretch at a time
def _places(stretch: int, seed: int) -> np.ndarray:
    """Returns the shuffled places of a stretch, int64 [10,000]."""
    # Of another seed than the sources' orders.
    return in_epochs(np.arange(_STRETCH) + stretch * _STRETCH, _STRETCH, ~seed, True)


def in_epochs(rank: np.ndarray, length: int, seed: int, shuffle: bool) -> np.ndarray:
    """Returns which of `length` examples are read at these places of an endless sequence.

    Args:
      rank: Consecutive places, int64 [n].
      length: Examples of an epoch; each epoch has an order of its own.
      seed: Seed of the orders.
      shuffle: Whether epochs are shuffled.
    """
    if not shuffle or not len(rank):
        return rank % length
    found = []
    # Eagerly: a graph would need threads of TensorFlow, all of which may wait for this one.
    with tf.device("CPU:0"):
        for epoch in range(int(rank[0]) // length, int(rank[-1]) // length + 1):
            position = tf.constant(rank[rank // length == epoch] % length, tf.int64)
            number = tf.constant(epoch, tf.int64)
            order = indices_at(position, number, num_examples=length, seed=seed)
            found.append(order.numpy())
    return np.concatenate(found)


def _counts(shares: Sequence[float], sources: int) -> np.ndarray:
    """Returns how many of 10,000 examples come from each source, by the largest remainders."""
    given = np.asarray(shares, np.float64)
    if given.shape != (sources,) or not (given > 0).all() or abs(given.sum() - 1) > 1e-6:
        raise ConfigError(f"Mixture.{_SHARE}; there are {sources} sources, got {shares!r}.")
    counts = np.floor(given * _STRETCH).astype(np.int64)
    remainders = given * _STRETCH - counts
    counts[np.argsort(-remainders, kind="stable")[: _STRETCH - counts.sum()]] += 1
    if not counts.all():
        raise ConfigError(f"Mixture.shares must be at least 1/{_STRETCH:,} each, got {shares!r}.")
    return counts
