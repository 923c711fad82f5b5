"""Rows that a run makes itself: replay buffers, pools of hard examples, self-play."""

import inspect
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from ddl.data.arrays import ArraySource
from ddl.data.source import Source
from ddl.errors import ConfigError, DataError

_Made = TypeVar("_Made")


class ReplayBuffer(Source):
    """The latest rows that a run has made. Each batch is drawn from them at random.

        buffer = ddl.data.ReplayBuffer(10_000, state=states, reward=rewards)  # the first rows
        trainer = ddl.Trainer(task, optimizer, buffer, global_batch_size=64)
        ddl.fit(trainer, callbacks=[Every(10, lambda moment: buffer.add(play(moment)))], …)

    Batch k is a function of the seed, k and the rows that the buffer holds when its update begins:
    B rows drawn uniformly, with replacement, the same on any devices. Nothing is read ahead. The
    rows are in host memory, once in each process, and in each checkpoint. All workers of a cluster
    must add the same rows; a run with different ones ends with an error.

    It can only be training data, alone or as one of a dict of sources. An epoch has as many rows
    as the buffer has places.

    Attributes:
      capacity: Number of places.
    """

    def __init__(
        self, capacity: int, features: Mapping[str, Any] | None = None, /, **named_features: Any
    ):
        """Allocates the places and adds the first rows, which fix names, shapes and dtypes.

        Args:
          capacity: Largest number of rows to hold; further rows replace the oldest ones.
          features: The first rows, at least one: arrays by feature name, each [n, …].
          **named_features: Further features.

        Raises:
          ConfigError: If the capacity is not an integer of at least 1.
          DataError: As `ddl.data.ArraySource`; for text; and if there are more rows than places.
        """
        if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1:
            raise ConfigError(
                f"ReplayBuffer.capacity must be an integer of at least 1, got {capacity!r:.60}."
            )
        self.capacity = capacity
        first = ArraySource(features, **named_features)
        self._spec = first.element_spec
        for name, spec in self._spec.items():
            if spec.dtype == tf.string:
                raise DataError(
                    f"A ReplayBuffer holds numbers, but feature {name!r} is text. Add its tokens."
                )
        self._rows = {
            name: _on_host(lambda array=array: _places(capacity, array))  # type: ignore[misc]
            for name, array in first.features.items()
        }
        self._added = _on_host(lambda: tf.Variable(0, trainable=False, dtype=tf.int64))
        self._digest = 0
        self._is_read = False  # by a training loop
        self._check_of_task: Callable[[], Callable[[Source], None] | None] = lambda: None
        self.add(first.features)

    def __len__(self) -> int:
        """Returns the capacity: an epoch has that many rows."""
        return self.capacity

    @property
    def element_spec(self) -> dict[str, tf.TensorSpec]:
        """See `Source`."""
        return dict(self._spec)

    @property
    def size(self) -> int:
        """Number of rows that the buffer holds."""
        return min(self.added, self.capacity)

    @property
    def added(self) -> int:
        """Number of rows that were added so far."""
        return int(self._added.numpy())

    @property
    def variables(self) -> dict[str, Any]:
        """The variables that a checkpoint holds."""
        return {"rows": dict(self._rows), "added": self._added}

    @property
    def digest(self) -> int:
        """A checksum, below 2^32, of all rows that this process added."""
        return self._digest

    def add(self, features: Mapping[str, Any] | None = None, /, **named_features: Any) -> None:
        """Adds rows, which replace the oldest ones. Eager, between loops, as in a callback.

        The next update draws from them too.

        Args:
          features: Arrays by feature name, each [n, …], of the dtypes of the first rows.
          **named_features: Further features.

        Raises:
          DataError: If names, shapes or dtypes are not those of the first rows, lengths differ, or
            values are not finite; if there are more rows than places; or if the task of the
            Trainer that was made last refuses them, such as labels out of range.
          ConfigError: In a graph, or while the training loop runs.
        """
        if tf.inside_function():
            raise ConfigError(
                "ReplayBuffer.add was called in a graph, such as that of a step. Call it in a "
                "callback, which runs between loops."
            )
        if self._is_read:
            raise ConfigError(
                "ReplayBuffer.add was called while the training loop runs, so the batches would "
                "depend on timing. Call it in a callback, which runs between loops."
            )
        given = {**(features or {}), **named_features}
        arrays = {name: np.asarray(array) for name, array in given.items()}
        if arrays and all(array.ndim and not len(array) for array in arrays.values()):
            return
        rows = _checked(arrays)
        self._check(rows)
        if (check := self._check_of_task()) is not None:
            check(rows)
        first = self.added
        places = (first + np.arange(len(rows))) % self.capacity
        for name in sorted(self._rows):
            array = np.ascontiguousarray(rows.features[name])
            self._digest = zlib.crc32(array.tobytes(), self._digest)
            with tf.device("CPU:0"):
                self._rows[name].scatter_update(tf.IndexedSlices(tf.constant(array), places))
        self._added.assign(first + len(rows))

    def check_by(self, check: Callable[[Source], None]) -> None:
        """Checks the rows that the buffer holds, and from now on those that `add` gets.

        Args:
          check: A task's `check`, in place of an earlier one. The buffer does not keep the task.

        Raises:
          DataError: As `check`.
        """
        check(self)
        check(_checked(self.contents()))
        is_method = inspect.ismethod(check)
        self._check_of_task = weakref.WeakMethod(check) if is_method else lambda: check

    def contents(self) -> dict[str, np.ndarray]:
        """Returns copies of the rows that the buffer holds, from the oldest on, each [n, …]."""
        added, size = self.added, self.size
        places = (added - size + np.arange(size)) % self.capacity
        with tf.device("CPU:0"):
            return {name: v.sparse_read(places).numpy() for name, v in self._rows.items()}

    def draw(self, words: tf.Tensor) -> dict[str, tf.Tensor]:
        """Returns the rows that random words select. In a graph or eager, on the host.

        Args:
          words: Random int64 [b].

        Returns:
          Features [b, …].
        """
        size = tf.minimum(self._added.read_value(), self.capacity)
        places = tf.bitwise.bitwise_and(words, tf.int64.max) % size
        return {name: rows.sparse_read(places) for name, rows in self._rows.items()}

    @contextmanager
    def being_read(self) -> Iterator[None]:
        """Refuses `add` within the `with` block, from any thread."""
        self._is_read = True
        try:
            yield
        finally:
            self._is_read = False

    def batches(
        self,
        global_batch_size: int,
        first_batch: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        rows: np.ndarray | None = None,
    ) -> tf.data.Dataset:
        """Raises ConfigError: a data set would read ahead of the updates that add rows."""
        raise ConfigError(
            "A ReplayBuffer cannot be part of another source, which would read it ahead of the "
            "updates that fill it. Pass it as training data, or as one of a dict of sources: "
            "train_data={'data': …, 'replay': buffer}."
        )

    def _check(self, rows: ArraySource) -> None:
        """Raises DataError if rows do not fit."""
        given = rows.element_spec
        if given.keys() != self._spec.keys():
            raise DataError(
                "Rows of this ReplayBuffer must have the features "
                f"{', '.join(sorted(self._spec))}, got {', '.join(sorted(given))}."
            )
        for name, spec in self._spec.items():
            if (given[name].shape, given[name].dtype) != (spec.shape, spec.dtype):
                raise DataError(
                    f"Feature {name!r} of this ReplayBuffer must be {spec.dtype.name} of shape "
                    f"{tuple(spec.shape)} for each row, as in its first rows, got "
                    f"{given[name].dtype.name} of shape {tuple(given[name].shape)}. Convert it, "
                    "such as by .astype."
                )
        if len(rows) > self.capacity:
            raise DataError(
                f"A ReplayBuffer of {self.capacity:,} places got {len(rows):,} rows at once. Raise "
                "its capacity, or add fewer rows."
            )


def _checked(arrays: dict[str, np.ndarray]) -> ArraySource:
    """Returns rows with the checks of a data set, but that all may have weight 0."""
    weight = arrays.get("weight")
    if weight is None or np.any(weight):
        return ArraySource(arrays)
    rows = ArraySource({**arrays, "weight": np.ones_like(weight)})
    rows.features["weight"] = weight
    return rows


def _places(capacity: int, array: np.ndarray) -> tf.Variable:
    dtype = array.dtype.newbyteorder("=")
    return tf.Variable(np.zeros([capacity, *array.shape[1:]], dtype), trainable=False)


def _on_host(make: Callable[[], _Made]) -> _Made:
    """Calls a function that makes a variable in host memory, outside of a strategy's scope.

    A scope would give each device a copy. Scopes belong to a thread, so another thread is used.
    """
    made: list[Any] = []

    def run() -> None:
        try:
            with tf.device("CPU:0"):
                made.append(make())
        except BaseException as error:
            made.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(made[0], BaseException):
        raise made[0]
    return made[0]
