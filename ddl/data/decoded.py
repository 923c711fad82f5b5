"""Data sets whose examples are read and decoded one by one."""

import abc
import functools
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from ddl.data.checks import checked_finite
from ddl.data.order import index_batches
from ddl.data.source import Source, read_in_place, weighted
from ddl.errors import DataError
from ddl.seeds import drawn_by_state

_LOOKED_FOR_SECONDS = 60

_MOST_AT_ONCE = 16
"""Examples that one call decodes at most; each is traced, so that more take longer to start."""

_BYTES_AT_ONCE = 1 << 18
"""Bytes of the features of these examples. Large ones take long enough for calls of their own."""

_CALLS_OF_CORE = 4
"""Calls of small examples under way for each core: with fewer, threads wait for the first of them
to be fetched. A large example has a call of its own, which keeps one core busy."""


class DecodedSource(Source):
    """A source that reads and decodes each example on its own, several at once.

    The base class of sources of files. The order is that of all sources with random access: any
    batch is found at once, each epoch is fully shuffled, and each worker reads and decodes only its
    own rows.
    """

    @abc.abstractmethod
    def example(self, index: tf.Tensor, seed: tf.Tensor) -> dict[str, tf.Tensor]:
        """Reads one example. Called while tf.data traces its graph, which runs on the CPU.

        Args:
          index: Number of the example, int64 [], from 0 to length - 1.
          seed: int64 [2], for TensorFlow's stateless random operations. It depends on the run's
            seed, the epoch and the example.

        Returns:
          A tensor for each feature of `element_spec`.
        """

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
        indices = index_batches(
            first_batch,
            num_examples=len(self),
            global_batch_size=global_batch_size,
            seed=seed,
            shuffle=shuffle,
            rows=rows,
        )
        steps = self.steps_per_epoch(global_batch_size)
        size = global_batch_size if rows is None else len(rows)
        return self._decoded(indices, size, first_batch, steps, seed)

    @property
    def _readable(self) -> int:
        """Number of examples that `example` reads."""
        return len(self)

    def describe(self, index: int) -> str:
        """Returns what messages call an example, such as its file."""
        return f"example {index:,}"

    def damaged(self) -> str | None:
        """Looks for the first example that cannot be read, for at most a minute."""
        examples = read_in_place(tf.data.Dataset.range(self._readable), self).map(
            lambda index: self.example(index, tf.zeros([2], tf.int64)),
            num_parallel_calls=os.cpu_count() or 1,
            deterministic=True,
        )
        until = time.monotonic() + _LOOKED_FOR_SECONDS
        read = 0
        try:
            for _ in examples:
                read += 1
                if time.monotonic() > until:
                    return None
        except tf.errors.OpError:
            return f"The first example that cannot be read is {self.describe(read)}."
        return None

    def _read_ahead(self, batches: tf.data.Dataset) -> tf.data.Dataset:
        """Reads what can be read for a whole batch in one call.

        Args:
          batches: Dicts of "index", int64 [b], "seed", int64 [b, 2], and "weight", float32 [b].

        Returns:
          Arguments of `_example_of`, with one row for each example, and "weight".
        """
        return batches

    def _read_ahead_tolerantly(self, batches: tf.data.Dataset) -> tf.data.Dataset:
        """Does the work of `_read_ahead`, but one row that cannot be read fails no others.

        Args:
          batches: As in `_read_ahead`.

        Returns:
          As `_read_ahead`, with "index", and with "is_read", bool [b], if rows may be missing.
        """
        return batches

    def _decoder_of_parts(
        self, read: Callable[[dict[str, tf.Tensor]], dict[str, tf.Tensor]], parts: tf.data.Dataset
    ) -> Callable[[dict[str, tf.Tensor]], Any]:
        """Returns a function that decodes a part of a batch; see `several_at_once`."""
        return several_at_once(read, parts)

    def _example_of(self, row: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Reads an example by a row of `_read_ahead`."""
        return self.example(row["index"], row["seed"])

    def _decoded(
        self,
        indices: tf.data.Dataset,
        size: int,
        first_batch: int,
        steps_per_epoch: int,
        seed: int,
    ) -> tf.data.Dataset:
        """Decodes the examples of batches of "index" and "weight".

        A batch may have "draw", int64 [b]: the numbers of the examples' seeds in an epoch, instead
        of "index".

        Args:
          indices: The batches, of static shape.
          size: Examples of a batch, b.
          first_batch: Number of the first batch.
          steps_per_epoch: Batches of an epoch.
          seed: Seed of the examples' random numbers.

        Returns:
          Features and "weight", [b, …], without NaN or infinity.
        """

        @tf.autograph.experimental.do_not_convert
        def with_seeds(number: tf.Tensor, batch: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            draw = batch.pop("draw", batch["index"])
            return {**batch, "seed": seeds_of(draw, number // steps_per_epoch, seed)}

        ordered = tf.data.Dataset.zip(tf.data.Dataset.counter(first_batch), indices)
        rows = self._read_ahead(read_in_place(ordered, self).map(with_seeds))
        at_once = self._decoded_at_once(size)
        cores = os.cpu_count() or 1
        calls = {"num_parallel_calls": cores if at_once == 1 else _CALLS_OF_CORE * cores}
        draws: list[str | None] = []

        @tf.autograph.experimental.do_not_convert
        def note_draws() -> None:
            draws.append(drawn_by_state(tf.compat.v1.get_default_graph().get_operations()))

        def read(row: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            features = dict(self._example_of(row))
            note_draws()
            return features

        @tf.autograph.experimental.do_not_convert
        def finished(*batch: Any) -> dict[str, tf.Tensor]:
            features, weight = batch
            if at_once > 1:
                features = {name: _joined(each, size) for name, each in features.items()}
                weight = _joined(weight, size)
            return checked_finite(weighted(features, weight))

        if at_once == 1:

            def decode(row: dict[str, tf.Tensor]) -> Any:
                return read(row), row["weight"]

            decoded = rows.unbatch().map(decode, **calls, deterministic=True)
        else:
            parts = rows.map(functools.partial(_split, size=at_once)).unbatch()
            decoded = parts.map(self._decoder_of_parts(read, parts), **calls, deterministic=True)
        if drawn := next(filter(None, draws), None):
            raise DataError(
                f"The examples of {type(self).__name__} must depend only on the data and the seed, "
                f"but draw random numbers by {drawn}, which a resumed run, or one with other "
                "threads, would draw differently. Pass the seed to tf.random.stateless_uniform, "
                "tf.image.stateless_random_flip_left_right or the like, or augment by the layers "
                "of ddl.layers."
            )
        return decoded.batch(size // at_once, drop_remainder=True).map(finished)

    def _decoded_at_once(self, size: int) -> int:
        """Returns the number of examples that one call decodes, a divisor of the batch size.

        A call costs tf.data several times as much as decoding a small example.
        """
        of_example = sum(
            spec.shape.num_elements() * max(spec.dtype.size or 0, 1)
            for spec in self.element_spec.values()
        )
        most = min(_MOST_AT_ONCE, max(1, _BYTES_AT_ONCE // max(of_example, 1)))
        return max(number for number in range(1, most + 1) if size % number == 0)


def seeds_of(draw: tf.Tensor, epoch: tf.Tensor, seed: int) -> tf.Tensor:
    """Returns the seeds of examples in an epoch, int64 [b, 2].

    Args:
      draw: Numbers of the seeds in the epoch, int64 [b]: those of the examples, if an epoch has
        each example once.
      epoch: Number of the epoch, int64 [].
      seed: Seed of the examples' random numbers.
    """
    root = tf.constant([seed % 2**63, 0], tf.int64)
    key = tf.random.experimental.stateless_fold_in(root, epoch)
    # Only the second half of `key` depends on the epoch; a draw mixes both halves.
    drawn = tf.random.stateless_uniform([], key, None, None, tf.int64)
    return tf.stack([tf.fill(tf.shape(draw), drawn), draw], axis=1)


def several_at_once(
    read: Callable[[dict[str, tf.Tensor]], dict[str, tf.Tensor]], parts: tf.data.Dataset
) -> Callable[[dict[str, tf.Tensor]], Any]:
    """Returns a function that decodes the rows of a part of a batch.

    Args:
      read: Decodes a row; traced once.
      parts: The parts, of "weight" and what `read` takes.
    """
    specs = parts.element_spec
    one_row = {name: tf.TensorSpec(s.shape[1:], s.dtype) for name, s in specs.items()}
    del one_row["weight"]
    decode = tf.function(read, input_signature=[one_row])

    @tf.autograph.experimental.do_not_convert
    def decode_rows(part: dict[str, tf.Tensor]) -> Any:
        columns = {name: tf.unstack(part[name]) for name in one_row}
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        decoded = [decode(row) for row in rows]
        features = {name: tf.stack([one[name] for one in decoded]) for name in decoded[0]}
        return features, part["weight"]

    return decode_rows


@tf.autograph.experimental.do_not_convert
def _split(batch: dict[str, tf.Tensor], size: int) -> dict[str, tf.Tensor]:
    """Splits the rows into parts of a size: [b, …] to [b / size, size, …]."""
    return {name: tf.reshape(each, [-1, size, *each.shape[1:]]) for name, each in batch.items()}


def _joined(parts: tf.Tensor, size: int) -> tf.Tensor:
    """Joins the parts of a batch of `size` rows: [parts, rows of a part, …] to [size, …]."""
    rows = tf.reshape(parts, tf.concat([[size], tf.shape(parts)[2:]], axis=0))
    return tf.ensure_shape(rows, [size, *parts.shape[2:]])
