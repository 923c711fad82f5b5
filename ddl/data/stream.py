"""Data sets that can only be read sequentially."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from ddl.data.batched import check_not_batched, optimized
from ddl.data.checks import checked_finite
from ddl.data.naming import named
from ddl.data.order import steps_per_epoch, stream_seeds
from ddl.data.source import Source, checked_element_spec, weighted
from ddl.errors import ConfigError, DataError, check_takes, definition_of

_SHUFFLED_BYTES = 1 << 30
"""Limit for the shuffle buffers of all shards of a stream together, in bytes of host memory."""

_BYTES_OF_TENSOR = 128
"""Overhead of a tensor in a buffer, besides its values."""

_BYTES_OF_TEXT = 1024
"""Estimate for a string in a buffer, since its length is unknown beforehand."""


class StreamSource(Source):
    """A `tf.data.Dataset` of single examples: dicts, or tuples as Keras takes them.

    Each epoch reads the data set once. Training shuffles it through a buffer of `shuffle_buffer`
    examples, in an order that depends only on the run's seed and the epoch. Evaluation, and
    training with `Trainer.shuffle = False`, keep the data set's own order. A buffer smaller than an
    epoch moves no example forward by more than its size: data sorted by class, for instance, stay
    sorted beyond it. An epoch starts when its buffer is full, so a smaller buffer starts sooner.

    Resuming in the middle of an epoch reads and skips the preceding examples. The data set must
    therefore yield the same examples in the same order in each iteration. A data set that shuffles
    with its own seed yields another order when a run resumes. Leave the shuffling to ddl, or pass a
    function of the epoch that seeds its shuffles with the epoch, for instance a shuffle of file
    names: `StreamSource(lambda epoch: records(files.shuffle(1_000, seed=epoch)), num_examples)`.
    ddl may shuffle such a data set again without harm. TensorFlow raises an error for a tensor as
    seed while its global seed is 0; call `tf.random.set_seed(1)`. ddl's own shuffle does not depend
    on the global seed.

    Every worker reads a single stream whole and keeps its rows. With shards, for instance of
    different files, each worker reads only the shards of its rows:
    `StreamSource(lambda epoch, shard: …, num_examples=[1_251, 1_252, …])`. Each of S shards gives
    B/S adjacent rows of every batch, so the batches are the same for any number of workers. Choose
    S as a multiple of the number of workers, for each number that you may use, times the
    microbatches per update. A shard that ends early is padded, so all shards should have about the
    same length.
    """

    def __init__(
        self,
        dataset: tf.data.Dataset | Callable[..., tf.data.Dataset],
        num_examples: int | Sequence[int] | np.ndarray | None = None,
        *,
        windows: bool = False,
        shuffle_buffer: int | None = None,
    ):
        """Checks the data set, and determines its length and its shuffle buffer.

        Args:
          dataset: The examples of every epoch. Or a function, traced by tf.data, from the epoch's
            number, int64 [], to the epoch's data set. For shards, a function of the epoch's number
            and the shard's number, an int from 0 on.
          num_examples: Examples per epoch; further ones are not read. None uses the cardinality of
            the data set. A sequence gives the number for each shard.
          windows: Whether `.batch(n)` of the data set makes examples of n rows each, such as
            windows of a series: `StreamSource(series.batch(50, drop_remainder=True),
            windows=True)`. By default elements made by `batch` raise a DataError.
          shuffle_buffer: Size of the shuffle buffer of each shard, in examples. None: a whole
            epoch, or as many as fit into 1 GiB over all shards, estimated from the shapes and
            dtypes of the features. Each process that reads the stream holds the buffers of its
            shards. 1 keeps the data set's order, for a data set that shuffles itself.

        Raises:
          ConfigError: If there are shards and `dataset` is not a function, or `shuffle_buffer` is
            below 1.
          DataError: If a length is unknown, infinite or too small, there are no shards, shapes are
            not static, or elements are batches.
        """
        if shuffle_buffer is not None and shuffle_buffer < 1:
            raise ConfigError(
                f"StreamSource.shuffle_buffer must be at least 1, got {shuffle_buffer}."
            )
        self._dataset: Any = dataset
        self._of_epoch = not isinstance(dataset, tf.data.Dataset)
        self._of_shard = isinstance(num_examples, Sequence | np.ndarray)
        lengths: Any = num_examples if self._of_shard else [num_examples]
        if self._of_shard and not self._of_epoch:
            raise ConfigError(
                "StreamSource with shards needs a function, got one tf.data.Dataset. Pass "
                "StreamSource(lambda epoch, shard: …, num_examples=[…])."
            )
        if len(lengths) == 0:
            raise DataError(
                "StreamSource.num_examples is an empty list. Pass the number of examples of each "
                "shard."
            )
        if self._of_epoch:
            of_shard = ("epoch", "shard") if self._of_shard else ("epoch",)
            check_takes("StreamSource.dataset", dataset, of_shard)
        first = self._epoch(tf.constant(0, tf.int64), 0)
        check_not_batched(first, windows)  # before the shapes, which batches leave open
        self._element_spec = checked_element_spec(first.element_spec)
        # The lengths of the other shards are checked while they are read.
        self._lengths = [
            _length(first if shard == 0 else None, length) for shard, length in enumerate(lengths)
        ]
        self._dataset = dataset if self._of_epoch else optimized(first)
        # Workers read different shards, and must all find the same size.
        limit = _SHUFFLED_BYTES // len(self._lengths) // _bytes_of(self._element_spec)
        self._shuffle_buffer = max(1, limit) if shuffle_buffer is None else shuffle_buffer
        self._reported = False

    def __len__(self) -> int:
        """Returns the number of examples in an epoch, over all shards."""
        return sum(self._lengths)

    @property
    def shards(self) -> int:
        """Number of shards."""
        return len(self._lengths)

    @property
    def element_spec(self) -> dict[str, tf.TensorSpec]:
        """See `Source`."""
        return dict(self._element_spec)

    def steps_per_epoch(self, global_batch_size: int) -> int:
        """Returns the batches until the longest shard ends.

        Args:
          global_batch_size: B.

        Raises:
          ConfigError: If the batch size is not positive or not a multiple of the number of shards.
        """
        size = self._rows_of_shard(global_batch_size)
        return max(steps_per_epoch(length, size) for length in self._lengths)

    def batches(
        self,
        global_batch_size: int,
        first_batch: int,
        *,
        seed: int = 0,
        shuffle: bool = False,
        rows: np.ndarray | None = None,
    ) -> tf.data.Dataset:
        """See `Source`, and `StreamSource` for the order."""
        if shuffle:
            self._report_small_buffer()
        size = self._rows_of_shard(global_batch_size)
        rows = np.arange(global_batch_size) if rows is None else rows
        shard_of_row = rows // size
        parts = [
            self._shard(
                int(shard),
                global_batch_size,
                first_batch,
                rows[shard_of_row == shard],
                seed if shuffle else None,
            )
            for shard in np.unique(shard_of_row)
        ]
        if len(parts) == 1:
            return parts[0]
        # The parts are in shard order; `rows` may be in another order.
        by_shard = np.argsort(shard_of_row, kind="stable")
        as_asked = np.argsort(by_shard)  # the inverse permutation

        @tf.autograph.experimental.do_not_convert
        def together(*parts: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            whole = {name: tf.concat([part[name] for part in parts], 0) for name in parts[0]}
            return _rows_of(whole, as_asked)

        # `prefetch` gives each shard a thread.
        return tf.data.Dataset.zip(*(part.prefetch(1) for part in parts)).map(together)

    def _shard(
        self,
        shard: int,
        global_batch_size: int,
        first_batch: int,
        rows: np.ndarray,
        seed: int | None,
    ) -> tf.data.Dataset:
        """Builds a data set of some rows of a shard's part of each batch.

        Args:
          shard: Number of the shard.
          global_batch_size: B.
          first_batch: Batch number, counted from 0 over the whole run.
          rows: Rows to return, all of this shard, numbered within the global batch: int [b].
          seed: Seed of the shuffle; None keeps the data set's order.
        """
        size = self._rows_of_shard(global_batch_size)
        steps = self.steps_per_epoch(global_batch_size)
        length = self._lengths[shard]
        first_epoch, skipped = divmod(first_batch, steps)

        @tf.autograph.experimental.do_not_convert
        def finished(batch: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            return _rows_of(_padded(batch, size), rows % size)

        def padded_epoch(epoch: tf.Tensor) -> tf.data.Dataset:
            examples = self._epoch(epoch, shard).take(length)
            # Fewer examples than announced must raise an error, not shorten the epoch.
            examples = examples.apply(tf.data.experimental.assert_cardinality(length))
            if seed is not None and self._shuffle_buffer > 1:
                examples = self._shuffled(examples, length, stream_seeds(seed, epoch, shard))
            batches = examples.batch(size).map(finished, num_parallel_calls=2)
            missing = steps - steps_per_epoch(length, size)
            if not missing:
                return batches
            beginning = self._epoch(epoch, shard).take(min(size, length))
            padding = beginning.batch(size).map(finished)
            return batches.concatenate(
                padding.repeat(missing).map(
                    lambda batch: {**batch, "weight": tf.zeros_like(batch["weight"])}
                )
            )

        if self._of_epoch or seed is not None:
            batches = tf.data.Dataset.counter(first_epoch).flat_map(padded_epoch)
        else:
            batches = padded_epoch(tf.constant(0, tf.int64)).repeat()
        return batches.skip(skipped)

    def _shuffled(
        self, examples: tf.data.Dataset, length: int, seeds: tf.Tensor
    ) -> tf.data.Dataset:
        """Shuffles the examples through the buffer.

        `Dataset.shuffle` would combine the seeds with TensorFlow's global seed.
        """
        spec = self._element_spec
        features = tf.nest.flatten(spec)
        shuffled = tf.raw_ops.ShuffleDataset(
            input_dataset=tf.data.experimental.to_variant(examples),
            buffer_size=tf.constant(min(self._shuffle_buffer, length), tf.int64),
            seed=seeds[0],
            seed2=seeds[1],
            output_types=[feature.dtype for feature in features],
            output_shapes=[feature.shape for feature in features],
            reshuffle_each_iteration=False,
        )
        return tf.data.experimental.from_variant(shuffled, spec)

    def _report_small_buffer(self) -> None:
        longest = max(self._lengths)
        if self._reported or self._shuffle_buffer == 1 or self._shuffle_buffer >= longest:
            return
        self._reported = True
        shards = len(self._lengths)
        logging.warning(
            "The stream shuffles within %s of %s examples%s. Sorted data, for example sorted by "
            "class, stay sorted beyond this buffer. Increase StreamSource.shuffle_buffer, or "
            "shuffle the files or records themselves.",
            f"{self._shuffle_buffer:,}",
            f"{longest:,}",
            f" in each of {shards} shards" if shards > 1 else "",
        )

    def _rows_of_shard(self, global_batch_size: int) -> int:
        shards = len(self._lengths)
        if global_batch_size % shards:
            raise ConfigError(
                f"The global batch size must be a multiple of the {shards} shards of the stream, "
                f"got {global_batch_size}: each shard gives an equal part of a batch. Change it."
            )
        return global_batch_size // shards

    def _epoch(self, epoch: tf.Tensor, shard: int) -> tf.data.Dataset:
        dataset = self._dataset
        if self._of_epoch:
            function = dataset
            dataset = function(epoch, shard) if self._of_shard else function(epoch)
            if not isinstance(dataset, tf.data.Dataset):
                raise DataError(
                    "StreamSource.dataset must return a tf.data.Dataset, got "
                    f"{type(dataset).__name__} from {definition_of(function)}."
                )
        if isinstance(dataset.element_spec, tuple) and len(dataset.element_spec) in (2, 3):
            return dataset.map(named)
        return dataset


def _bytes_of(spec: Mapping[str, tf.TensorSpec]) -> int:
    """Estimates the bytes that an example takes in a shuffle buffer."""
    return sum(
        feature.shape.num_elements()
        * (_BYTES_OF_TEXT if feature.dtype == tf.string else feature.dtype.size)
        + _BYTES_OF_TENSOR
        for feature in spec.values()
    )


def _length(dataset: tf.data.Dataset | None, given: int | None) -> int:
    """Returns the examples to read: the given number, or else the data set's cardinality."""
    cardinality = tf.data.UNKNOWN_CARDINALITY if dataset is None else int(dataset.cardinality())
    given_by_name = given is not None
    if given is None:
        if cardinality == tf.data.UNKNOWN_CARDINALITY:
            raise DataError(
                "The number of examples in the tf.data.Dataset is unknown. Pass it: "
                "StreamSource(dataset, num_examples=…), or use ddl.data.endless."
            )
        if cardinality == tf.data.INFINITE_CARDINALITY:
            raise DataError(
                "The tf.data.Dataset is infinite. Remove its repeat(), pass the examples of an "
                "epoch: StreamSource(dataset, num_examples=…), or use ddl.data.endless."
            )
        given = cardinality
    if given < 1:
        what = (
            f"StreamSource.num_examples must be at least 1, got {given}. Pass the right number."
            if given_by_name
            else "The tf.data.Dataset must have at least one example, got 0. Correct what it reads."
        )
        raise DataError(what)
    if 0 <= cardinality < given:
        raise DataError(
            f"StreamSource.num_examples must be at most {cardinality:,}, the number of examples in "
            f"the tf.data.Dataset, got {given:,}. Pass a smaller one."
        )
    return int(given)


def _rows_of(batch: dict[str, tf.Tensor], rows: np.ndarray) -> dict[str, tf.Tensor]:
    """Returns rows of a batch, or the batch itself if these are all of its rows, in order."""
    if np.array_equal(rows, np.arange(batch["weight"].shape[0])):
        return batch
    return {name: tf.gather(values, rows) for name, values in batch.items()}


def _padded(batch: Mapping[str, tf.Tensor], size: int) -> dict[str, tf.Tensor]:
    """Pads a batch to `size` rows with its own first rows, at weight 0."""
    count = tf.shape(next(iter(batch.values())))[0]
    rows = tf.range(size)

    def fill(values: tf.Tensor) -> tf.Tensor:
        full = tf.cond(count < size, lambda: tf.gather(values, rows % count), lambda: values)
        return tf.ensure_shape(full, [size, *values.shape[1:]])

    filled = {name: fill(values) for name, values in checked_finite(batch).items()}
    return weighted(filled, tf.cast(rows < count, tf.float32))
