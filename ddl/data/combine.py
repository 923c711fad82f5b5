"""Parts, folds, concatenations and mixtures of sources, by arithmetic on indices."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from ddl.data.batch import RESIDENT_UP_TO_BYTES
from ddl.data.checks import check_same_classes
from ddl.data.features import described
from ddl.data.order import example_at, in_parts
from ddl.data.source import Source
from ddl.data.stream import Stream
from ddl.errors import ConfigError, DataError, check_choice
from ddl.random import hashed

_Located = Callable[[np.ndarray], np.ndarray]  # indices to those in all sources, int64 [b]


def subset(data: Any, examples: int | Sequence[int] | np.ndarray) -> Source:
    """Returns some examples of a source.

    Args:
      data: A source, or data that `Source` takes.
      examples: The number of examples, from the first on; or their indices, in this order.

    Raises:
      DataError: If there are fewer examples, or an index is out of range.
    """
    (source,) = _alike([data], "subset")
    chosen = np.arange(examples) if isinstance(examples, int | np.integer) else np.asarray(examples)
    is_valid = chosen.ndim == 1 and chosen.dtype.kind in "iu" and chosen.size > 0
    if not is_valid or chosen.min() < 0 or chosen.max() >= len(source):
        raise DataError(
            f"subset.examples must be a number from 1 to {len(source):,}, all of {source.name}, "
            f"or a list of indices below that, got {examples!r:.80}."
        )
    return _combined([source], len(chosen), chosen.astype(np.int64).__getitem__)


def k_fold(
    data: Any, folds: int, fold: int, split: Literal["train", "test"], *, seed: int = 0
) -> Source:
    """Returns one side of a fold of cross-validation.

    Each example is in the test data of exactly one fold, chosen at random, and in the training data
    of all others. The folds differ in size by one example at most. They follow from the number of
    examples, `folds` and `seed` alone, on any machine and whatever the seed of the run. Both sides
    keep the order of the data, and may differ in `decode`, such as augmentation:

        train = ddl.data.k_fold(ddl.data.Source(items, augment), 5, 0, "train")
        test = ddl.data.k_fold(items, 5, 0, "test")

    Args:
      data: A source, or data that `Source` takes.
      folds: Number of folds, at least 2 and at most that of examples.
      fold: Number of the fold, from 0 to `folds` - 1.
      split: "train" for the examples outside of the fold, "test" for those in it.
      seed: Seed of the folds. Give both sides the same.

    Raises:
      ConfigError: If `folds` or `fold` is out of range, or `split` is another.
      DataError: If `data` are a stream, which has no indices.
    """
    (source,) = _alike([data], "k_fold")
    check_choice("k_fold.split", split, ("train", "test"))
    count = len(source)
    if folds not in range(2, count + 1) or fold not in range(int(folds)):
        raise ConfigError(
            f"k_fold.folds must be from 2 to {count:,}, the number of examples, and k_fold.fold "
            f"from 0 to folds - 1, got {folds!r} and {fold!r}."
        )
    of_folds = hashed(int(seed), "k_fold")  # apart from the order of a run
    place = example_at(np.arange(count), 0, num_examples=count, seed=of_folds)
    return subset(source, np.flatnonzero((place % folds == fold) == (split == "test")))


def concatenate(sources: Sequence[Any]) -> Source:
    """Returns all examples of several sources, one source after the other.

    Args:
      sources: Sources, or data that `Source` takes, with the same features in shape and dtype.

    Raises:
      DataError: If there are no sources, or their features differ.
    """
    found = _alike(sources, "concatenate")
    return _combined(found, sum(map(len, found)), np.asarray)


def mix(sources: Sequence[Any], shares: Sequence[float]) -> Source:
    """Returns a mixture of sources in given shares, such as 80% and 20%.

    An epoch is the shortest one that has the shares and holds each example at least once. A source
    whose share is large for its size gives each of its examples several times, k or k + 1. Training
    shuffles all of them together; without shuffle, one order mixes the sources in all epochs.

    Args:
      sources: Sources, or data that `Source` takes, with the same features in shape and dtype.
      shares: Part of the examples that come from each source; they add up to 1.

    Raises:
      ConfigError: If shares are not positive or do not add up to 1.
      DataError: If there are no sources, or their features differ.
    """
    found = _alike(sources, "mix")
    parts = np.asarray(shares, np.float64)
    if parts.shape != (len(found),) or not (parts > 1e-12).all() or abs(parts.sum() - 1) > 1e-6:
        raise ConfigError(f"mix takes {len(found)} positive shares with sum 1, got {shares!r}.")
    lengths = np.array([len(source) for source in found], np.int64)
    counts = np.rint((lengths / parts).max() * parts).astype(np.int64)
    ends = np.cumsum(np.maximum(counts, lengths))

    def located(indices: np.ndarray) -> np.ndarray:
        place = example_at(indices, 0, num_examples=int(ends[-1]), seed=0)
        number, of_source = in_parts(place, ends)
        return np.append(0, np.cumsum(lengths))[number] + of_source % lengths[number]

    return _combined(found, int(ends[-1]), located)


class _Combined:
    """Examples of several sources, by their indices among those of all."""

    def __init__(self, sources: Sequence[Source], length: int, located: _Located):
        self._sources, self._length, self._located = sources, length, located
        self._ends = np.cumsum([len(source) for source in sources])
        self.class_names = getattr(sources[0].items, "class_names", None)

    def __len__(self) -> int:
        return self._length

    def describe(self, index: int) -> str:
        numbers, places = in_parts(self._located(np.array([index])), self._ends)
        return self._sources[numbers[0]].describe(int(places[0]))

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        numbers, indices = in_parts(self._located(indices), self._ends)
        found = np.unique(numbers)
        parts = [self._sources[number].rows(indices[numbers == number]) for number in found]
        if len(parts) == 1:
            return parts[0]
        places = np.argsort(np.argsort(numbers, kind="stable"))
        return {name: np.concatenate([part[name] for part in parts])[places] for name in parts[0]}


def _combined(sources: Sequence[Source], length: int, located: _Located) -> Source:
    items: Any = _Combined(sources, length, located)
    are_arrays = all(one.arrays is not None for one in sources)
    is_small = length * sources[0].row_bytes <= RESIDENT_UP_TO_BYTES  # others are not copied
    if are_arrays and is_small and length <= sum(map(len, sources)):
        items = items.rows(np.arange(length))
    return Source(items, sources[0].decode, files=[f for each in sources for f in each.files])


def _alike(sources: Sequence[Any], user: str) -> list[Source]:
    """Returns data as sources, after checking that their features are the same."""
    if not isinstance(sources, list | tuple) or not sources:
        raise DataError(f"{user} takes a list of at least one source, got {sources!r:.80}.")
    if any(isinstance(one, tf.data.Dataset | keras.utils.PyDataset | Stream) for one in sources):
        raise DataError(
            f"{user} needs examples with indices, got a stream. A tf.data.Dataset has methods of "
            "its own: take, skip, concatenate, sample_from_datasets."
        )
    found = [source if isinstance(source, Source) else Source(source) for source in sources]
    for number, source in enumerate(found):
        given, wanted = described(source.row_spec), described(found[0].row_spec)
        if given != wanted or source.decode != found[0].decode:
            raise DataError(
                f"{user} needs sources of the same features and decode. Number 0 has {wanted}; "
                f"number {number} has {given}. Convert them, or pass Source(reader.items, decode)."
            )
        check_same_classes(found[0], source)
    return found
