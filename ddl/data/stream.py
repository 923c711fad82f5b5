"""Sources that can only be read from front to back."""

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from ddl.data.order import steps_per_epoch
from ddl.data.source import ArraySource, Source, checked_element_spec, weighted
from ddl.errors import DataError


class StreamSource(Source):
    """An unbatched `tf.data.Dataset` of dicts, or of (image, label) pairs.

    Each epoch reads it once, in its own order; going on in the middle of an epoch skips what
    came before. A data set that shuffles differently in each iteration starts anew when a run
    goes on. Where runs must be repeatable across interruptions, give a function of the epoch
    that seeds its shuffles by it:
    `StreamSource(lambda epoch: files(seed).shuffle(10_000, seed=epoch), num_examples)`.
    TensorFlow refuses a seed that is a tensor while its global seed is 0; `tf.random.set_seed(1)`.
    """

    def __init__(
        self,
        dataset: tf.data.Dataset | Callable[[tf.Tensor], tf.data.Dataset],
        num_examples: int | None = None,
    ):
        """Takes the data set.

        Args:
          dataset: The examples of every epoch; or a function that makes an epoch's data set from
            its number, int64 [], traced by tf.data.
          num_examples: Examples an epoch: as many are read even if there are more. None asks
            the data set.

        Raises:
          DataError: If the length is unknown or too small, or shapes are not static.
        """
        self._of_epoch = not isinstance(dataset, tf.data.Dataset)
        self._dataset: Any = dataset
        first = self._epoch(tf.constant(0, tf.int64))
        self._element_spec = checked_element_spec(first.element_spec)
        cardinality = int(first.cardinality())
        if num_examples is None:
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
            num_examples = cardinality
        if num_examples < 1:
            raise DataError("the tf.data.Dataset is empty: there are no examples")
        if 0 <= cardinality < num_examples:
            raise DataError(
                f"num_examples is {num_examples:,}, but the tf.data.Dataset has {cardinality:,}"
            )
        self._num_examples = num_examples

    def __len__(self) -> int:
        """Examples an epoch."""
        return self._num_examples

    @property
    def element_spec(self) -> dict[str, tf.TensorSpec]:
        """See `Source`."""
        return dict(self._element_spec)

    def batches(
        self, global_batch_size: int, first_batch: int, *, seed: int = 0, shuffle: bool = False
    ) -> tf.data.Dataset:
        """See `Source`. The order is the data set's own, whatever is asked for."""
        steps = steps_per_epoch(self._num_examples, global_batch_size)
        first_epoch, skipped = divmod(first_batch, steps)

        def padded_epoch(epoch: tf.Tensor) -> tf.data.Dataset:
            examples = self._epoch(epoch).take(self._num_examples)
            # Fewer examples than announced must not pass for a short epoch.
            examples = examples.apply(tf.data.experimental.assert_cardinality(self._num_examples))
            return examples.batch(global_batch_size).map(
                lambda batch: _padded(batch, global_batch_size), num_parallel_calls=2
            )

        if self._of_epoch:
            batches = tf.data.Dataset.counter(first_epoch).flat_map(padded_epoch)
        else:
            batches = padded_epoch(tf.constant(0, tf.int64)).repeat()
        return batches.skip(skipped)

    def _epoch(self, epoch: tf.Tensor) -> tf.data.Dataset:
        dataset = self._dataset(epoch) if self._of_epoch else self._dataset
        if isinstance(dataset.element_spec, tuple) and len(dataset.element_spec) == 2:
            return dataset.map(lambda image, label: {"image": image, "label": label})
        return dataset


def _padded(batch: Mapping[str, tf.Tensor], size: int) -> dict[str, tf.Tensor]:
    """Fills a batch up to `size` rows with its own first ones, at weight 0."""
    count = tf.shape(next(iter(batch.values())))[0]
    rows = tf.range(size)

    def fill(values: tf.Tensor) -> tf.Tensor:
        full = tf.cond(count < size, lambda: tf.gather(values, rows % count), lambda: values)
        return tf.ensure_shape(full, [size, *values.shape[1:]])

    for name, values in batch.items():
        if values.dtype.is_floating:
            message = f"the feature {name!r} holds NaN or infinity"
            batch = {**batch, name: tf.debugging.check_numerics(values, message)}
    filled = {name: fill(values) for name, values in batch.items()}
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
