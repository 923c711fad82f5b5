"""Keras's `PyDataset`: batches by number, from Python."""

import functools
import itertools
import os
import threading
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

_ROWS_AT_ONCE = 8192
"""Rows that are ordered at once, so that one batch costs only a slice."""


class PyDatasetSource(Source):
    """A `keras.utils.PyDataset`, whose item number j is a batch of examples.

    Each epoch reads every batch once. Training shuffles the order of the batches, by seed and
    epoch, and leaves the examples within a batch together; a shorter last batch stays the last one.
    A batch of the run takes consecutive examples, so the two batch sizes need not agree. A run
    resumes at once, and each worker reads only the batches that its rows are in. Several threads
    read if its `workers` are more than one.
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
        first, again = self._features(0), self._features(0)
        if not are_same(first, again):
            raise DataError(
                f"Two reads of batch 0 of the {type(data).__name__} differ, so a run could not be "
                "repeated or resumed. Draw random numbers from a generator that is seeded with the "
                "number of the batch."
            )
        self._rows = _rows_of(first, "batch 0")
        spec = spec_of({name: array[0, ...] for name, array in first.items()})
        self._element_spec = checked_element_spec(spec)
        last = self._rows if count in (None, 1) else _rows_of(self._features(count - 1), "its last")
        if last > self._rows:
            raise DataError(
                f"The last batch of the {type(data).__name__} must have at most {self._rows} rows, "
                f"as its first one has, got {last}. Return batches of one size; only the last may "
                "be smaller."
            )
        self._length = None if count is None else (count - 1) * self._rows + last
        self._batch = functools.lru_cache(_KEPT_BATCHES)(self._checked_batch)
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
        at_once = min(steps, max(1, _ROWS_AT_ONCE // global_batch_size))
        parts = -(-steps // at_once)
        size = global_batch_size if rows is None else len(rows)

        @tf.autograph.experimental.do_not_convert
        def part(number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            epoch, first = number // parts, number % parts * at_once
            count = tf.minimum(steps - first, at_once)
            places = first + tf.range(count)
            if self._length is None:
                places += epoch * steps
            position = places[:, tf.newaxis] * global_batch_size + tf.range(
                global_batch_size, dtype=tf.int64
            )
            if rows is not None:
                position = tf.gather(position, rows, axis=1)
            flat = tf.reshape(position, [-1])
            moved, weight = self._moved(flat, epoch, seed if shuffle else None)
            return tf.reshape(moved, [-1, size]), tf.reshape(weight, [-1, size])

        @tf.autograph.experimental.do_not_convert
        def batch(position: tf.Tensor, weight: tf.Tensor) -> dict[str, tf.Tensor]:
            return weighted(checked_weight(self._examples.gather(position)), weight)

        epoch, place = divmod(first_batch, steps)
        ordered = tf.data.Dataset.counter(epoch * parts + place // at_once).map(part)
        found = ordered.unbatch().skip(place % at_once)
        if not self._is_thread_safe:  # several calls would only wait for each other
            return found.map(batch)
        return found.map(batch, num_parallel_calls=os.cpu_count() or 1, deterministic=True)

    def _moved(
        self, position: tf.Tensor, epoch: tf.Tensor, seed: int | None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the examples at positions of an epoch, int64 [k], and weights, float32 [k].

        Args:
          position: int64 [k].
          epoch: Number of the epoch, int64 [].
          seed: Seed of the order of the batches; None keeps their order.
        """
        length = self._length
        if length is None:
            return position, tf.ones(tf.shape(position))
        weight = tf.cast(position < length, tf.float32)
        position %= length
        full = length // self._rows
        if seed is not None and full > 1:
            within = position // self._rows
            moved = indices_at(tf.minimum(within, full - 1), epoch, num_examples=full, seed=seed)
            position += (tf.where(within < full, moved, within) - within) * self._rows
        return position, weight

    def _look_up(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        numbers, places = np.divmod(indices, self._rows)
        # Consecutive rows mostly lie in the same batch.
        starts = [0, *(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist(), len(numbers)]
        parts = [
            (self._batch(int(numbers[start])), _as_slice(places[start:end]))
            for start, end in itertools.pairwise(starts)
        ]
        found = {}
        for name, spec in self._element_spec.items():
            found[name] = aligned_empty([len(indices), *spec.shape], spec.dtype.as_numpy_dtype)
            np.concatenate([batch[name][rows] for batch, rows in parts], out=found[name])
        return found

    def _checked_batch(self, number: int) -> dict[str, np.ndarray]:
        features, where = self._features(number), f"batch {number}"
        rows = _rows_of(features, where)
        is_last = self._length is not None and (number + 1) * self._rows >= self._length
        expected = self._length - number * self._rows if is_last and self._length else self._rows
        if rows != expected:
            raise DataError(
                f"All batches of the {type(self._data).__name__} but the last must have "
                f"{self._rows} rows, as batch 0; {where} must have {expected}, got {rows}."
            )
        # All rows of an array have its shape and dtype.
        check_fits({k: v[0, ...] for k, v in features.items()}, self._element_spec, where)
        return features

    def _features(self, number: int) -> dict[str, np.ndarray]:
        where = f"batch {number} of the {type(self._data).__name__}"
        if self._is_thread_safe:
            return copied(features_of(self._data[number], where))
        with one_at_a_time(self._lock):
            return copied(features_of(self._data[number], where))


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
