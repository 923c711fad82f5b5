"""Keras's `PyDataset`: batches by number, from Python."""

import contextlib
import functools
import itertools
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ddl.data.checks import checked_weight
from ddl.data.locking import one_at_a_time
from ddl.data.objects.examples import are_same, check_fits, copied, features_of, spec_of
from ddl.data.order import indices_at, steps_per_epoch
from ddl.data.random_access import RandomAccessSource
from ddl.data.source import Source, checked_element_spec, weighted
from ddl.data.storage.shared_memory import aligned_empty
from ddl.errors import ConfigError, DataError

_KEPT_BATCHES = 16
"""Batches of the PyDataset in memory: several batches of the run may need rows of one of them."""

_ENDLESS = 2**62

_BYTES_AT_ONCE, _SECONDS_AT_ONCE = 1 << 20, 0.01
"""Size and reading time of the batches of the run that one call of Python reads, if several. A call
takes as long as copying some hundred kilobytes."""

_NUMBERS_AT_ONCE = 4096
"""Numbers of batches of the PyDataset that are shuffled at once."""

_KEPT_ORDERS = 8


class PyDatasetSource(Source):
    """A `keras.utils.PyDataset`, whose item number j is a batch of examples.

    Each epoch reads every batch once. Training shuffles the order of the batches, by seed and
    epoch, and leaves the examples within a batch together; a shorter last batch stays the last one.
    A batch of the run takes consecutive examples, so the two batch sizes need not agree. A run
    resumes at once, and each worker reads only the batches that its rows are in. Several threads
    read if its `workers` are more than one. Small batches are read several at a time, if that takes
    less than 10 ms, so an error in one may come up to 15 updates early.
    """

    def __init__(self, data: keras.utils.PyDataset, steps_per_epoch: int | None = None):
        """Reads the first batch twice, and the last one.

        Args:
          data: The batches. A batch must depend only on its index. All but the last must have the
            same number of rows.
          steps_per_epoch: Batches of the run that count as an epoch, for a PyDataset without end
            (`num_batches` is None), whose batches are then read in order.

        Raises:
          ConfigError: If `steps_per_epoch` is missing, below 1, or given for data with an end.
          DataError: If there are no batches, two reads of the first batch differ, the data change
            from epoch to epoch (`on_epoch_end`), or a batch has another form.
        """
        self._data = data
        # Keras, too, reads it in one thread unless it has more workers.
        self._is_thread_safe = getattr(data, "workers", 1) > 1
        self._lock = threading.Lock()
        self._steps = steps_per_epoch
        self._seconds: list[float] = []
        count = _number_of_batches(data)
        check_steps(steps_per_epoch, "the PyDataset", known=count is not None)
        if count == 0:
            raise DataError(
                f"The {type(data).__name__} must have at least one batch, got 0. Correct what it "
                "reads, or its __len__."
            )
        for hook in ("on_epoch_begin", "on_epoch_end"):
            if getattr(type(data), hook, None) is not getattr(keras.utils.PyDataset, hook, None):
                raise DataError(
                    f"{type(data).__name__}.{hook} changes the data from epoch to epoch, so that a "
                    "batch does not follow from its number and a run cannot be resumed. Remove the "
                    "method; training shuffles the order of the batches itself."
                )
        first = copied(self._timed(0))
        if not are_same(first, self._timed(0)):
            raise DataError(
                f"Two reads of batch 0 of the {type(data).__name__} differ, so a run could not be "
                "repeated or resumed. Draw random numbers from a generator that is seeded with the "
                "number of the batch."
            )
        self._rows = _rows_of(first, "batch 0")
        spec = spec_of({name: array[0, ...] for name, array in first.items()})
        self._element_spec = checked_element_spec(spec)
        last = self._rows if count in (None, 1) else _rows_of(self._timed(count - 1), "its last")
        if last > self._rows:
            raise DataError(
                f"The last batch of the {type(data).__name__} must have at most {self._rows} rows, "
                f"as its first one has, got {last}. Return batches of one size; only the last may "
                "be smaller."
            )
        self._length = None if count is None else (count - 1) * self._rows + last
        self._kept = functools.lru_cache(_KEPT_BATCHES)(self._copied)
        self._examples = RandomAccessSource(self._look_up, self._length or _ENDLESS, spec)

    def __len__(self) -> int:
        """Returns the number of examples in an epoch.

        Raises:
          DataError: If the data have no end.
        """
        if self._length is None:
            raise DataError(
                "len() needs data with an end, but this PyDataset is read without end. Call "
                "examples_per_epoch(global_batch_size) of the source."
            )
        return self._length

    @property
    def is_endless(self) -> bool:
        """See `Source`."""
        return self._length is None

    @property
    def element_spec(self) -> dict[str, tf.TensorSpec]:
        """See `Source`."""
        return dict(self._element_spec)

    def examples_per_epoch(self, global_batch_size: int) -> int:
        """See `Source`."""
        return self._length or (self._steps or 0) * global_batch_size

    def steps_per_epoch(self, global_batch_size: int) -> int:
        """See `Source`."""
        return steps_per_epoch(self.examples_per_epoch(global_batch_size), global_batch_size)

    def batches(
        self,
        global_batch_size: int,
        first_batch: int,
        *,
        seed: int,
        shuffle: bool,
        rows: np.ndarray | None = None,
    ) -> tf.data.Dataset:
        """See `Source`."""
        steps = self.steps_per_epoch(global_batch_size)
        of_batch = np.arange(global_batch_size) if rows is None else rows
        size = len(of_batch)
        at_once = min(steps, self._batches_at_once(size))
        names = list(self._element_spec)
        specs = [*self._element_spec.values(), tf.TensorSpec([], tf.float32)]

        def read(first: np.ndarray) -> list[np.ndarray]:
            order = []
            for number in range(int(first), int(first) + at_once):
                epoch, place = (0, number) if self._length is None else divmod(number, steps)
                position = place * global_batch_size + of_batch
                order.append(self._order(position, epoch, seed if shuffle else None))
            index, padding = (np.concatenate(part) for part in zip(*order, strict=True))
            found = [*self._examples.checked_look_up(index), padding]
            return [each.reshape(at_once, size, *each.shape[1:]) for each in found]

        @tf.autograph.experimental.do_not_convert
        def block(first: tf.Tensor) -> dict[str, tf.Tensor]:
            dtypes = [spec.dtype for spec in specs]
            found = tf.numpy_function(read, [first], dtypes, stateful=False)
            for values, spec in zip(found, specs, strict=True):
                values.set_shape([at_once, size, *spec.shape])
            *features, padding = found
            return weighted(checked_weight(dict(zip(names, features, strict=True))), padding)

        blocks = tf.data.Dataset.counter(first_batch, at_once)
        if not self._is_thread_safe:  # several calls would only wait for each other
            return blocks.map(block).unbatch()
        cores = os.cpu_count() or 1
        return blocks.map(block, num_parallel_calls=cores, deterministic=True).unbatch()

    def _batches_at_once(self, size: int) -> int:
        """Returns the number of batches of the run, of `size` rows, that one call reads."""
        # The very first read may be slow once, and the second one of a batch that is kept is fast.
        seconds = sorted(self._seconds)[1]
        fast = int(_SECONDS_AT_ONCE * self._rows / max(seconds * size, 1e-9))
        return max(1, min(fast, self._examples.batches_at_once(size, _BYTES_AT_ONCE)))

    def _order(
        self, position: np.ndarray, epoch: int, seed: int | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the examples at positions of an epoch, int64 [k], and padding, float32 [k].

        Args:
          position: int64 [k].
          epoch: Number of the epoch.
          seed: Seed of the order of the batches; None keeps their order.
        """
        if self._length is None:
            return position, np.ones(len(position), np.float32)
        padding = (position < self._length).astype(np.float32)
        position = position % self._length
        full = self._length // self._rows
        if seed is None or full <= 1:
            return position, padding
        numbers, places = np.divmod(position, self._rows)
        for start, end in _runs(numbers):
            if (number := int(numbers[start])) < full:
                part, place = divmod(number, _NUMBERS_AT_ONCE)
                numbers[start:end] = _shuffled(full, seed, epoch, part)[place]
        return numbers * self._rows + places, padding

    def _look_up(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        numbers, places = np.divmod(indices, self._rows)
        found = {
            name: aligned_empty([len(indices), *spec.shape], spec.dtype.as_numpy_dtype)
            for name, spec in self._element_spec.items()
        }
        for start, end in _runs(numbers):
            number, rows = int(numbers[start]), _as_slice(places[start:end])
            # No other batch of the run needs rows of a batch that is read whole.
            is_whole = isinstance(rows, slice) and rows == slice(0, self._rows_in(number))
            read = self._read(number) if is_whole else contextlib.nullcontext(self._kept(number))
            with read as batch:
                for name, values in batch.items():
                    found[name][start:end] = values[rows]
        return found

    def _copied(self, number: int) -> dict[str, np.ndarray]:
        with self._read(number) as batch:
            return copied(batch)

    @contextlib.contextmanager
    def _read(self, number: int) -> Iterator[dict[str, np.ndarray]]:
        """Reads and checks a batch; the data may fill its arrays anew after the `with` block."""
        lock = contextlib.nullcontext() if self._is_thread_safe else one_at_a_time(self._lock)
        with lock:
            features = self._features(number)
            self._check(features, number)
            yield features

    def _timed(self, number: int) -> dict[str, np.ndarray]:
        """Reads a batch, and notes how long it takes."""
        start = time.perf_counter()
        features = self._features(number)
        self._seconds.append(time.perf_counter() - start)
        return features

    def _features(self, number: int) -> dict[str, np.ndarray]:
        return features_of(self._data[number], f"batch {number} of the {type(self._data).__name__}")

    def _rows_in(self, number: int) -> int:
        """Returns the rows of a batch, of which the last one may have fewer."""
        return (
            self._rows
            if self._length is None
            else min(self._rows, self._length - number * self._rows)
        )

    def _check(self, features: dict[str, np.ndarray], number: int) -> None:
        where = f"batch {number}"
        rows, expected = _rows_of(features, where), self._rows_in(number)
        if rows != expected:
            raise DataError(
                f"All batches of the {type(self._data).__name__} but the last must have "
                f"{self._rows} rows, as batch 0; {where} must have {expected}, got {rows}."
            )
        # All rows of an array have its shape and dtype.
        check_fits({k: v[0, ...] for k, v in features.items()}, self._element_spec, where)


@functools.lru_cache(_KEPT_ORDERS)
def _shuffled(count: int, seed: int, epoch: int, part: int) -> np.ndarray:
    """Returns which of `count` batches stand at some places of a shuffled epoch, int64 [k].

    Args:
      count: Number of full batches of the PyDataset.
      seed: Seed of the order.
      epoch: Number of the epoch.
      part: The places are those from part · `_NUMBERS_AT_ONCE` on, at most as many.
    """
    first = part * _NUMBERS_AT_ONCE
    with tf.device("CPU:0"):
        places = tf.range(first, min(first + _NUMBERS_AT_ONCE, count), dtype=tf.int64)
        epoch_number = tf.constant(epoch, tf.int64)
        return indices_at(places, epoch_number, num_examples=count, seed=seed).numpy()


def _runs(numbers: np.ndarray) -> list[tuple[int, int]]:
    """Returns where runs of equal numbers, int64 [k], begin and end."""
    ends = (np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist()
    return list(itertools.pairwise([0, *ends, len(numbers)]))


def _as_slice(rows: np.ndarray) -> slice | np.ndarray:
    """Returns a slice for consecutive rows, which numpy copies at once; other rows as they are."""
    is_slice = len(rows) == 1 or (rows[1:] - rows[:-1] == 1).all()
    return slice(int(rows[0]), int(rows[-1]) + 1) if is_slice else rows


def check_steps(steps: int | None, data: str, *, known: bool) -> None:
    """Checks the length of an epoch that is given for data.

    Args:
      steps: Batches of an epoch; None if it is not given.
      data: Name of the data in the message.
      known: Whether the data have a length of their own.

    Raises:
      ConfigError: If the length is needed and missing or below 1, or given and not needed.
    """
    if known and steps is not None:
        raise ConfigError(
            f"steps_per_epoch is {steps}, but {data} has a length of its own, which determines the "
            "epoch. Leave steps_per_epoch out."
        )
    if not known and (not isinstance(steps, int) or steps < 1):
        raise ConfigError(
            f"steps_per_epoch must be at least 1, since {data} has no known length, got {steps}. "
            "Set STEPS_PER_EPOCH in the config, or pass steps_per_epoch=… to ddl.data.endless."
        )


def _number_of_batches(data: Any) -> int | None:
    try:
        return data.num_batches
    except NotImplementedError:
        return None


def _rows_of(features: dict[str, np.ndarray], where: str) -> int:
    rows = {array.shape[0] if array.ndim else 0 for array in features.values()}
    if len(rows) != 1 or 0 in rows:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in features.items())
        raise DataError(
            f"All features of {where} of a PyDataset must have the same number of rows, at least "
            f"1, got {shapes}. Return arrays whose first dimensions are equal."
        )
    return rows.pop()
