"""Examples that cannot be read, counted and left out up to a limit."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from ddl.data.checks import checked_finite
from ddl.data.combining.random_access import RandomAccess, with_random_access
from ddl.data.decoded import DecodedSource, several_at_once
from ddl.data.locking import one_at_a_time
from ddl.data.source import IndexedSource
from ddl.errors import ConfigError, DataError

_FAILED = -1.0
"""Weight that marks an example whose reading failed; examples' own weights are at least 0."""


def skip_damaged(data: Any, *, limit: int) -> DecodedSource:
    """Returns a data set whose examples count nothing where they cannot be read, up to a limit.

    Such an example keeps its place in the order, with features of 0 and weight 0, so that all other
    examples stay where they are, on any number of devices and after a resume. A warning names each
    one. Examples with NaN, infinity or a negative weight count as damaged too. Each process counts
    the different examples that it reads, from its start on.

    An example whose reading fails is read once more. It is damaged if its record or file, or the
    data that a function returns, are at fault again. Any other failure, such as a lost connection
    or a missing file, may pass, and stays an error.

    Args:
      data: A source with random access, or what `Trainer.train_data` converts into one.
      limit: Number of damaged examples that a process accepts; one more is an error that names
        them.

    Raises:
      ConfigError: If `limit` is below 1.
      DataError: If the data are a stream.
    """
    if limit < 1:
        raise ConfigError(
            f"skip_damaged.limit must be at least 1, got {limit}. Without skip_damaged, the first "
            "damaged example is an error."
        )
    return _Tolerant(with_random_access(data, "skip_damaged"), limit)


class _Tolerant(DecodedSource):
    """Reads examples in a graph, and those that fail once more in Python, to see why."""

    def __init__(self, source: RandomAccess, limit: int):
        self._source = source
        self.sources_read = [source]
        self._limit = limit
        self._found: dict[int, str] = {}
        self._lock = threading.Lock()
        self._read_again = tf.function(
            self._read,
            input_signature=[tf.TensorSpec([], tf.int64), tf.TensorSpec([2], tf.int64)],
        )

    def __len__(self) -> int:
        return len(self._source)

    @property
    def element_spec(self) -> dict[str, tf.TensorSpec]:
        weight = tf.TensorSpec([], tf.float32, "weight")
        return {**self._source.element_spec, "weight": weight}

    def describe(self, index: int) -> str:
        if isinstance(self._source, DecodedSource):
            return self._source.describe(index)
        return super().describe(index)

    @tf.autograph.experimental.do_not_convert
    def example(self, index: tf.Tensor, seed: tf.Tensor) -> dict[str, tf.Tensor]:
        spec = self.element_spec
        features = self._tried(self._read, (index, seed), [])
        names = list(spec)

        def again() -> list[tf.Tensor]:
            dtypes = [spec[name].dtype for name in names]
            values = tf.numpy_function(self._second_read, [index, seed], dtypes)
            return [
                tf.ensure_shape(value, spec[name].shape)
                for name, value in zip(names, values, strict=True)
            ]

        failed = features["weight"] < 0
        found = tf.cond(failed, again, lambda: [features[name] for name in names])
        return dict(zip(names, found, strict=True))

    def _read_ahead(self, batches: tf.data.Dataset) -> tf.data.Dataset:
        size = batches.element_spec["index"].shape[0]
        if isinstance(self._source, IndexedSource) or self._decoded_at_once(size) == 1:
            return batches
        return self._source._read_ahead_tolerantly(batches)

    def _decoder_of_parts(
        self, read: Callable[[dict[str, tf.Tensor]], dict[str, tf.Tensor]], parts: tf.data.Dataset
    ) -> Callable[[dict[str, tf.Tensor]], Any]:
        """Decodes a part as if it were whole; after a failure, each of its rows by `read`."""
        specs = parts.element_spec
        size = specs["weight"].shape[0]
        of_rows = several_at_once(self._read_row, parts)
        names = list(self.element_spec)
        signature = [
            tf.TensorSpec([], tf.int64),
            tf.TensorSpec([2], tf.int64),
        ]
        read_one = tf.function(
            lambda index, seed: read({"index": index, "seed": seed}), input_signature=signature
        )

        @tf.autograph.experimental.do_not_convert
        def whole(part: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            is_read = part.get("is_read", tf.constant(True))
            with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(is_read), [is_read])]):
                part = {name: tf.identity(each) for name, each in part.items()}
            return of_rows(part)[0]

        @tf.autograph.experimental.do_not_convert
        def decode_rows(part: dict[str, tf.Tensor]) -> Any:
            features = self._tried(whole, part, [size])

            def each() -> list[tf.Tensor]:
                rows = [
                    read_one(index, seed)
                    for index, seed in zip(
                        tf.unstack(part["index"]), tf.unstack(part["seed"]), strict=True
                    )
                ]
                return [tf.stack([row[name] for row in rows]) for name in names]

            failed = features["weight"][0] < 0
            found = tf.cond(failed, each, lambda: [features[name] for name in names])
            return dict(zip(names, found, strict=True)), part["weight"]

        return decode_rows

    def _tried(
        self, read: Callable[..., dict[str, tf.Tensor]], given: Any, rows: list[int]
    ) -> dict[str, tf.Tensor]:
        """Returns what `read` makes of `given`; features of 0 at weight `_FAILED` if it fails.

        Args:
          read: Makes features [*rows, …], in a graph.
          given: Its argument, or a tuple of them.
          rows: [] for one example, or [number of examples].
        """
        zeros = {
            name: tf.zeros([*rows, *one.shape], one.dtype)
            for name, one in self.element_spec.items()
        }
        blank = tf.data.Dataset.from_tensors({**zeros, "weight": tf.fill(rows, _FAILED)})
        tried = tf.data.Dataset.from_tensors(given).map(read).ignore_errors()
        return tried.concatenate(blank).take(1).get_single_element()

    @tf.autograph.experimental.do_not_convert
    def _read_row(self, row: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        if isinstance(self._source, IndexedSource):
            return self._read(row["index"], row["seed"])
        return self._weighted(self._source._example_of(row))

    @tf.autograph.experimental.do_not_convert
    def _read(self, index: tf.Tensor, seed: tf.Tensor) -> dict[str, tf.Tensor]:
        return self._weighted(self._source.example(index, seed))

    def _weighted(self, example: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        features = checked_finite(dict(example))
        weight = tf.cast(features.get("weight", 1.0), tf.float32)
        return {name: features[name] for name in self._source.element_spec} | {"weight": weight}

    def _second_read(self, index: np.ndarray, seed: np.ndarray) -> list[np.ndarray]:
        """Returns the features of an example whose reading failed, of 0 if it is damaged.

        Raises:
          DataError: If it is one damaged example too many.
          tf.errors.OpError: If reading fails for another reason than the data.
        """
        spec = self.element_spec
        try:
            with tf.device("CPU:0"):
                found = self._read_again(tf.constant(index), tf.constant(seed))
            return [found[name].numpy() for name in spec]
        except (tf.errors.DataLossError, tf.errors.InvalidArgumentError):
            pass  # a DataError of a Python function is an InvalidArgumentError here
        self._note(index)
        return [
            np.full(one.shape, b"", object)
            if one.dtype == tf.string
            else np.zeros(one.shape, one.dtype.as_numpy_dtype)
            for one in spec.values()
        ]

    def _note(self, index: Any) -> None:
        """Counts a damaged example."""
        number = int(index)
        with one_at_a_time(self._lock):
            is_new = number not in self._found
            if is_new:
                self._found[number] = self.describe(number)
            # Not only for a new one: it may belong to a later batch, which is read ahead.
            if len(self._found) > self._limit:
                raise DataError(
                    f"{len(self._found)} examples cannot be read, more than skip_damaged.limit "
                    f"= {self._limit}: {'; '.join(self._found.values())}. Replace them, or "
                    "raise the limit."
                )
            if is_new:
                logging.warning(
                    "%s cannot be read and counts nothing (damaged example %d of at most %d). "
                    "Replace it in the data, so that it counts.",
                    *(self._found[number], len(self._found), self._limit),
                )
