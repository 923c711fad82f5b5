"""Sources that can only be read from front to back."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ddl.data.arrays import ArraySource
from ddl.data.checks import checked_finite
from ddl.data.order import steps_per_epoch
from ddl.data.source import Source, checked_element_spec, weighted
from ddl.errors import ConfigError, DataError


class StreamSource(Source):
    """An unbatched `tf.data.Dataset` of dicts, or of (image, label) pairs.

    Each epoch reads it once, in its own order; going on in the middle of an epoch skips what
    came before. A data set that shuffles differently in each iteration starts anew when a run
    goes on. Where runs must be repeatable across interruptions, give a function of the epoch
    that seeds its shuffles by it:
    `StreamSource(lambda epoch: files(seed).shuffle(10_000, seed=epoch), num_examples)`.
    TensorFlow refuses a seed that is a tensor while its global seed is 0; `tf.random.set_seed(1)`.

    One stream is read whole by each worker, which takes its rows of it. In shards, such as of
    different files, each worker reads those alone that its rows come from:
    `StreamSource(lambda epoch, shard: …, num_examples=[1_251, 1_252, …])`. Of S shards each gives
    B/S rows of every batch, side by side, so that the batches are the same on any number of
    workers; give S as a multiple of the workers that may ever train together, times the
    microbatches of an update. A shard that ends early is padded: all should be about as long.
    """

    def __init__(
        self,
        dataset: tf.data.Dataset | Callable[..., tf.data.Dataset],
        num_examples: int | Sequence[int] | np.ndarray | None = None,
    ):
        """Takes the data set.

        Args:
          dataset: The examples of every epoch; or a function that makes an epoch's data set from
            its number, int64 [], traced by tf.data; or, for shards, from that and the shard's
            number, an int from 0 on.
          num_examples: Examples an epoch: as many are read even if there are more. None asks
            the data set. Several numbers: those of each shard.

        Raises:
          ConfigError: If there are shards and `dataset` is not a function.
          DataError: If a length is unknown or too small, or shapes are not static.
        """
        self._dataset: Any = dataset
        self._of_epoch = not isinstance(dataset, tf.data.Dataset)
        self._of_shard = isinstance(num_examples, Sequence | np.ndarray)
        lengths: Any = num_examples if self._of_shard else [num_examples]
        if self._of_shard and not self._of_epoch:
            raise ConfigError(
                "a tf.data.Dataset is one stream; for shards, give a function: "
                "StreamSource(lambda epoch, shard: …, num_examples=[…])"
            )
        if len(lengths) == 0:
            raise DataError("num_examples has no shards")
        first = self._epoch(tf.constant(0, tf.int64), 0)
        self._element_spec = checked_element_spec(first.element_spec)
        # The other shards' lengths are held to while they are read.
        self._lengths = [
            _length(first if shard == 0 else None, length) for shard, length in enumerate(lengths)
        ]

    def __len__(self) -> int:
        """Examples an epoch."""
        return sum(self._lengths)

    @property
    def element_spec(self) -> dict[str, tf.TensorSpec]:
        """See `Source`."""
        return dict(self._element_spec)

    def steps_per_epoch(self, global_batch_size: int) -> int:
        """Batches until the longest shard ends.

        Raises:
          ConfigError: If the shards cannot give equal parts of a batch.
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
        """See `Source`. The order is the data set's own, whatever is asked for."""
        size = self._rows_of_shard(global_batch_size)
        rows = np.arange(global_batch_size) if rows is None else rows
        shard_of_row = rows // size
        parts = [
            self._shard(int(shard), global_batch_size, first_batch, rows[shard_of_row == shard])
            for shard in np.unique(shard_of_row)
        ]
        if len(parts) == 1:
            return parts[0]
        # Shard by shard they come; rows may be asked for in another order.
        by_shard = np.argsort(shard_of_row, kind="stable")
        as_asked = np.argsort(by_shard)  # the inverse permutation

        def together(*parts: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            whole = {name: tf.concat([part[name] for part in parts], 0) for name in parts[0]}
            return _rows_of(whole, as_asked)

        # A thread reads each shard.
        return tf.data.Dataset.zip(*(part.prefetch(1) for part in parts)).map(together)

    def _shard(
        self, shard: int, global_batch_size: int, first_batch: int, rows: np.ndarray
    ) -> tf.data.Dataset:
        """Some rows of its part of each batch; `rows` are numbered as in the whole batch."""
        size = self._rows_of_shard(global_batch_size)
        steps = self.steps_per_epoch(global_batch_size)
        length = self._lengths[shard]
        first_epoch, skipped = divmod(first_batch, steps)

        def finished(batch: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            return _rows_of(_padded(batch, size), rows % size)

        def padded_epoch(epoch: tf.Tensor) -> tf.data.Dataset:
            examples = self._epoch(epoch, shard).take(length)
            # Fewer examples than announced must not pass for a short epoch.
            examples = examples.apply(tf.data.experimental.assert_cardinality(length))
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

        if self._of_epoch:
            batches = tf.data.Dataset.counter(first_epoch).flat_map(padded_epoch)
        else:
            batches = padded_epoch(tf.constant(0, tf.int64)).repeat()
        return batches.skip(skipped)

    def _rows_of_shard(self, global_batch_size: int) -> int:
        shards = len(self._lengths)
        if global_batch_size % shards:
            raise ConfigError(
                f"the global batch size {global_batch_size} is not a multiple of the {shards} "
                "shards of the stream, which each give an equal part of a batch"
            )
        return global_batch_size // shards

    def _epoch(self, epoch: tf.Tensor, shard: int) -> tf.data.Dataset:
        dataset = self._dataset
        if self._of_epoch:
            dataset = dataset(epoch, shard) if self._of_shard else dataset(epoch)
        if isinstance(dataset.element_spec, tuple) and len(dataset.element_spec) == 2:
            return dataset.map(lambda image, label: {"image": image, "label": label})
        return dataset


def _length(dataset: tf.data.Dataset | None, given: int | None) -> int:
    """Examples to read: those given, or as many as the data set has, where it is known."""
    cardinality = tf.data.UNKNOWN_CARDINALITY if dataset is None else int(dataset.cardinality())
    given_by_name = given is not None
    if given is None:
        if cardinality == tf.data.UNKNOWN_CARDINALITY:
            raise DataError(
                "the number of examples in the tf.data.Dataset is unknown; give it: "
                "StreamSource(dataset, num_examples=…)"
            )
        if cardinality == tf.data.INFINITE_CARDINALITY:
            raise DataError(
                "the tf.data.Dataset never ends; remove its repeat(), or say how many "
                "examples make an epoch: StreamSource(dataset, num_examples=…)"
            )
        given = cardinality
    if given < 1:
        what = f"num_examples is {given}" if given_by_name else "the tf.data.Dataset is empty"
        raise DataError(f"{what}: there are no examples")
    if 0 <= cardinality < given:
        raise DataError(f"num_examples is {given:,}, but the tf.data.Dataset has {cardinality:,}")
    return int(given)


def _rows_of(batch: dict[str, tf.Tensor], rows: np.ndarray) -> dict[str, tf.Tensor]:
    """Rows of a batch; the batch as it is where these are all of them, in order."""
    if np.array_equal(rows, np.arange(batch["weight"].shape[0])):
        return batch
    return {name: tf.gather(values, rows) for name, values in batch.items()}


def _padded(batch: Mapping[str, tf.Tensor], size: int) -> dict[str, tf.Tensor]:
    """Fills a batch up to `size` rows with its own first ones, at weight 0."""
    count = tf.shape(next(iter(batch.values())))[0]
    rows = tf.range(size)

    def fill(values: tf.Tensor) -> tf.Tensor:
        full = tf.cond(count < size, lambda: tf.gather(values, rows % count), lambda: values)
        return tf.ensure_shape(full, [size, *values.shape[1:]])

    filled = {name: fill(values) for name, values in checked_finite(batch).items()}
    return weighted(filled, tf.cast(rows < count, tf.float32))


def as_source(data: Any) -> Source:
    """Makes a source of what people have.

    Args:
      data: A `Source`; a mapping of arrays by feature name; a pair (images, labels), which
        become the features "image" and "label"; or an unbatched `tf.data.Dataset` of dicts or
        of such pairs.

    Raises:
      DataError: If it is none of these, or unfit.
    """
    if isinstance(data, Source):
        return data
    if isinstance(data, tf.data.Dataset):
        return StreamSource(data)
    if isinstance(data, Mapping):
        return ArraySource(data)
    if isinstance(data, tuple | list) and len(data) == 2:
        return ArraySource(image=data[0], label=data[1])
    raise DataError(
        f"data of type {type(data).__name__} cannot be used. Give a ddl.data source, a mapping of "
        "arrays by feature name, a pair (images, labels), or a tf.data.Dataset of single examples."
    )
