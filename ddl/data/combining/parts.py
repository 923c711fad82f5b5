"""Parts of a data set: the first examples, listed examples, and the folds of a cross-validation."""

import os
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from ddl.data.arrays import is_in_memory, with_rows_of
from ddl.data.combining.random_access import RandomAccess, with_random_access
from ddl.data.decoded import DecodedSource
from ddl.data.order import batch_indices
from ddl.data.source import IndexedSource, Source
from ddl.errors import ConfigError, DataError


def subset(
    data: Any, *, first: int | None = None, index_file: str | os.PathLike[str] | None = None
) -> Source:
    """Returns the first examples of a data set, or those that a file lists.

    Args:
      data: A source with random access, or what `Trainer.train_data` converts into one.
      first: Number of examples to use, from the first on.
      index_file: A file with the numbers of the examples to use, in this order: a text file with
        one number a line, or a `.npy` file of integers [n]. The first example is number 0.

    Returns:
      An `ArraySource` if the data are arrays in memory, else a source that reads from `data`.

    Raises:
      ConfigError: If not exactly one of `first` and `index_file` is given.
      DataError: If the file cannot be read, is empty, or a number is repeated or out of range; if
        there are fewer than `first` examples; or if the data are a stream.
    """
    source = with_random_access(data, "subset")
    if first is None and index_file is not None:
        return _selected(source, _numbers_in(os.fspath(index_file), len(source)))
    if first is None or index_file is not None:
        raise ConfigError(
            "subset takes either first, a number of examples, or index_file, a file with their "
            f"numbers, got first = {first!r} and index_file = {index_file!r}. Pass one of them."
        )
    if not 1 <= first <= len(source):
        raise DataError(
            f"subset.first must be from 1 to {len(source):,}, the number of examples of the data, "
            f"got {first:,}."
        )
    return _selected(source, np.arange(first))


def k_fold(
    data: Any,
    *,
    folds: int,
    fold: int,
    part: Literal["train", "held_out"],
    seed: int = 0,
) -> Source:
    """Returns the training part or the held-out part of a fold of a cross-validation.

    The examples are shuffled once, only by `seed` and their number, and cut into `folds` parts
    whose sizes differ by at most 1. Part number `fold` is held out; the others are for training.

    Args:
      data: A source with random access, or what `Trainer.train_data` converts into one.
      folds: Number of parts, at least 2.
      fold: Number of the part that is held out, from 0 to folds - 1.
      part: "train" for the other parts, "held_out" for this one.
      seed: Seed of the shuffle. Training and evaluation data must be given the same.

    Raises:
      ConfigError: If a number or `part` is out of range.
      DataError: If there are fewer examples than folds, or the data are a stream.
    """
    source = with_random_access(data, "k_fold")
    if folds < 2 or not 0 <= fold < folds:
        raise ConfigError(
            "k_fold.folds must be at least 2 and k_fold.fold from 0 to folds - 1, got folds = "
            f"{folds} and fold = {fold}."
        )
    if part not in ("train", "held_out"):
        raise ConfigError(f"k_fold.part must be 'train' or 'held_out', got {part!r}.")
    if len(source) < folds:
        raise DataError(
            f"k_fold needs at least one example for each of {folds} folds, got {len(source)}. Set "
            f"k_fold.folds to at most {len(source)}."
        )
    count = len(source)
    order, _ = batch_indices(
        tf.constant(0, tf.int64), num_examples=count, global_batch_size=count, seed=seed
    )
    bounds = np.linspace(0, count, folds + 1).astype(np.int64)
    held_out = np.zeros(count, bool)
    held_out[order.numpy()[bounds[fold] : bounds[fold + 1]]] = True
    return _selected(source, np.flatnonzero(held_out if part == "held_out" else ~held_out))


def _numbers_in(file: str, count: int) -> np.ndarray:
    """Reads the numbers of examples, int64 [n], each from 0 to count - 1."""
    try:
        if file.endswith(".npy"):
            numbers = np.load(file, allow_pickle=False)
        else:
            numbers = np.loadtxt(file, dtype=np.int64, ndmin=1)
    except (OSError, ValueError) as error:
        raise DataError(
            f"subset.index_file {file!r} could not be read: {error}. It must hold one number of an "
            "example a line, or be a .npy file of integers."
        ) from error
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu" or not len(numbers):
        raise DataError(
            f"subset.index_file {file!r} must hold at least one integer in one column, got "
            f"{numbers.dtype} of shape {numbers.shape}. Write one number of an example a line."
        )
    if outside := [n for n in (numbers.min(), numbers.max()) if not 0 <= n < count]:
        raise DataError(
            f"subset.index_file {file!r} must hold numbers from 0 to {count - 1:,}, since the data "
            f"have {count:,} examples, got {outside[0]}. Correct the file; numbers begin at 0."
        )
    unique, counts = np.unique(numbers, return_counts=True)
    if len(unique) < len(numbers):
        raise DataError(
            f"subset.index_file {file!r} must name each example once, got {unique[counts > 1][0]} "
            f"{counts.max()} times. To use an example more than once, give it a greater weight."
        )
    return numbers.astype(np.int64)


def _selected(source: RandomAccess, numbers: np.ndarray) -> Source:
    """Returns a source of the examples with these numbers, int64 [n]."""
    if is_in_memory(source):
        return with_rows_of({name: array[numbers] for name, array in source.features.items()})
    if isinstance(source, IndexedSource):
        return _SelectedRows(source, numbers)
    return _SelectedExamples(source, numbers)


class _SelectedRows(IndexedSource):
    """Some examples of a source that is looked up by many indices at once."""

    def __init__(self, source: IndexedSource, numbers: np.ndarray):
        self._source = source
        self.sources_read = [source]
        with tf.init_scope(), tf.device("CPU:0"):  # a graph captures eager tensors by reference
            self._numbers = tf.constant(numbers, tf.int64)

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def element_spec(self) -> dict[str, tf.TensorSpec]:
        return self._source.element_spec

    def gather(self, indices: tf.Tensor) -> dict[str, tf.Tensor]:
        return self._source.gather(tf.gather(self._numbers, indices))


class _SelectedExamples(DecodedSource):
    """Some examples of a source that reads each on its own."""

    def __init__(self, source: DecodedSource, numbers: np.ndarray):
        self._source = source
        self.sources_read = [source]
        with tf.init_scope(), tf.device("CPU:0"):
            self._numbers = tf.constant(numbers, tf.int64)

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def element_spec(self) -> dict[str, tf.TensorSpec]:
        return self._source.element_spec

    def example(self, index: tf.Tensor, seed: tf.Tensor) -> dict[str, tf.Tensor]:
        return self._source.example(self._numbers[index], seed)

    def describe(self, index: int) -> str:
        return self._source.describe(int(self._numbers[index]))
