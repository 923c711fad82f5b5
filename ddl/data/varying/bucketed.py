"""Batches of examples of about the same length, which need less padding."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ddl.data.checks import checked_finite
from ddl.data.combining.mixture import in_epochs
from ddl.data.combining.random_access import with_random_access
from ddl.data.decoded import DecodedSource
from ddl.data.order import steps_per_epoch
from ddl.data.source import read_in_place, weighted
from ddl.data.varying.lengths import examples_of, lengths_of
from ddl.errors import ConfigError, DataError, check_no_text

_MOST_BUCKETS = 16
"""Each bucket has a trace of the whole update, which takes seconds to minutes for a large model."""


class BucketedSource(DecodedSource):
    """Examples in buckets by length; each batch holds examples of one bucket.

    A batch of a bucket is computed with the features cut to the bucket's length. Each bucket has
    an order of its own in each epoch, and its last batch is padded with rows of weight 0; the
    batches of all buckets are shuffled. All of this is a function of seed, epoch and the lengths,
    so that a run resumes anywhere at once, and all replicas and workers compute the same bucket.

    Attributes:
      boundaries: Length to which each bucket's features are cut, rising; of the buckets that have
        examples.
      width: The last boundary that was given. Batches are read in this shape.
      features: Names of the features that are cut.
    """

    has_numbered_examples = False

    def __init__(
        self,
        data: Any,
        boundaries: Sequence[int],
        *,
        features: Sequence[str] = ("token",),
        length_name: str = "length",
    ):
        """Sorts the examples into buckets.

        Args:
          data: A source with random access, or what `Trainer.train_data` converts into one, such
            as `ddl.data.token_lines`.
          boundaries: Largest length of each bucket, rising. Buckets without examples are left out.
          features: Names of the features that are cut, [longest, …].
          length_name: Name of the feature with the length, an integer []. All lengths are read
            once, unless the source has an attribute `lengths`.

        Raises:
          ConfigError: If boundaries are not positive and rising, or are more than 16; or if
            `features` is a text.
          DataError: If a feature is missing, an example is longer than the last boundary, or the
            data are a stream.
        """
        check_no_text("bucketed.features", features)
        given = [int(each) for each in boundaries]
        if not given or given != sorted(set(given)) or given[0] < 1:
            raise ConfigError(
                f"bucketed.boundaries must be positive and rising lengths, got {boundaries!r}."
            )
        if len(given) > _MOST_BUCKETS:
            raise ConfigError(
                f"bucketed.boundaries must be at most {_MOST_BUCKETS}, since the update is traced "
                f"for each bucket, got {len(given)}."
            )
        self._source = with_random_access(data, "bucketed")
        self.sources_read = [self._source]
        lengths = lengths_of(self._source, length_name, "bucketed")
        if (longest := lengths.max()) > given[-1]:
            raise DataError(
                f"The last of bucketed.boundaries must be at least {longest}, the length of "
                f"example {int(np.argmax(lengths))}, got {given[-1]}. Add a boundary."
            )
        spec = self._source.element_spec
        for name in features:
            if name not in spec or not spec[name].shape.rank:
                raise DataError(
                    f"bucketed.features must name features [longest, …] of the data, got {name!r}. "
                    f"The data have {', '.join(sorted(spec))}."
                )
        narrowest = min(spec[name].shape[0] for name in features)
        if longest > narrowest:
            raise DataError(
                f"Feature {length_name!r} must be at most {narrowest}, the size of "
                f"{', '.join(features)}, got {longest} in example {int(np.argmax(lengths))}."
            )
        self.features = tuple(features)
        self._length_name = length_name
        with tf.init_scope(), tf.device("CPU:0"):  # a graph captures eager tensors by reference
            self._lengths = tf.constant(lengths, tf.int64)
        self.width = given[-1]
        of_example = np.searchsorted(given, lengths)
        used = np.unique(of_example)
        self.boundaries = tuple(given[bucket] for bucket in used)
        self._members = [np.flatnonzero(of_example == bucket) for bucket in used]

    def __len__(self) -> int:
        """Returns the number of examples."""
        return len(self._source)

    @property
    def element_spec(self) -> dict[str, tf.TensorSpec]:
        """Shape and dtype of the features, in the shape of the last boundary."""
        return {
            name: tf.TensorSpec([self.width, *each.shape[1:]], each.dtype, name)
            if name in self.features
            else each
            for name, each in self._source.element_spec.items()
        }

    def steps_per_epoch(self, global_batch_size: int) -> int:
        """Returns the batches of all buckets; the last one of each bucket may be padded."""
        return sum(self._steps(global_batch_size))

    def example(self, index: tf.Tensor, seed: tf.Tensor) -> dict[str, tf.Tensor]:
        """See `DecodedSource`."""
        return self._fitted(self._checked(dict(self._source.example(index, seed)), index), 0)

    def describe(self, index: int) -> str:
        """See `DecodedSource`."""
        if isinstance(self._source, DecodedSource):
            return self._source.describe(index)
        return super().describe(index)

    def batches(
        self,
        global_batch_size: int,
        first_batch: int,
        *,
        seed: int,
        shuffle: bool,
        rows: np.ndarray | None = None,
    ) -> tf.data.Dataset:
        """See `Source`. The features have the shape of the last boundary in all batches."""
        chosen = np.arange(global_batch_size) if rows is None else rows

        def indices(batch: np.ndarray) -> list[np.ndarray]:
            found = self._indices(int(batch), global_batch_size, seed, shuffle)
            return [each[chosen] for each in found]

        @tf.autograph.experimental.do_not_convert
        def numbered(batch: tf.Tensor) -> dict[str, tf.Tensor]:
            index, weight = tf.numpy_function(
                indices, [batch], (tf.int64, tf.float32), stateful=False
            )
            index.set_shape([len(chosen)])
            weight.set_shape([len(chosen)])
            return {"index": index, "weight": weight}

        made = tf.data.Dataset.counter(first_batch).map(
            numbered, num_parallel_calls=2, deterministic=True
        )
        if isinstance(self._source, DecodedSource):
            steps = self.steps_per_epoch(global_batch_size)
            return self._decoded(made, len(chosen), first_batch, steps, seed)

        @tf.autograph.experimental.do_not_convert
        def read(batch: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            index = batch["index"]
            features = self._fitted(self._checked(examples_of(self._source, index), index), 1)
            return weighted(checked_finite(features), batch["weight"])

        in_place = read_in_place(made, self)
        return in_place.map(read, num_parallel_calls=2, deterministic=True)

    def buckets(
        self, global_batch_size: int, first_batch: int, *, seed: int, shuffle: bool
    ) -> tf.data.Dataset:
        """Builds an endless data set of the numbers of the batches' buckets, int32 [].

        Args:
          global_batch_size: B.
          first_batch: As in `Source.batches`, like the other arguments.
          seed: Seed of the order.
          shuffle: Whether each epoch has its own order.
        """

        def bucket_of(batch: np.ndarray) -> np.ndarray:
            place = self._place(int(batch), global_batch_size, seed, shuffle)
            return np.asarray(place[0], np.int32)

        @tf.autograph.experimental.do_not_convert
        def numbered(batch: tf.Tensor) -> tf.Tensor:
            return tf.ensure_shape(
                tf.numpy_function(bucket_of, [batch], tf.int32, stateful=False), []
            )

        return tf.data.Dataset.counter(first_batch).map(numbered)

    def damaged(self) -> str | None:
        """See `Source`."""
        return self._source.damaged()

    def _steps(self, global_batch_size: int) -> list[int]:
        return [steps_per_epoch(len(each), global_batch_size) for each in self._members]

    def _place(
        self, batch: int, global_batch_size: int, seed: int, shuffle: bool
    ) -> tuple[int, int, int]:
        """Returns a batch's bucket, its place among the bucket's batches, and its epoch."""
        ends = np.cumsum(self._steps(global_batch_size))
        steps = int(ends[-1])
        # Of another seed than the orders of the buckets.
        slot = int(in_epochs(np.array([batch]), steps, ~seed, shuffle)[0])
        bucket = int(np.searchsorted(ends, slot, side="right"))
        return bucket, slot - int(ends[bucket - 1] if bucket else 0), batch // steps

    def _indices(
        self, batch: int, size: int, seed: int, shuffle: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the numbers of a batch's examples, int64 [size], and their weights."""
        bucket, place, epoch = self._place(batch, size, seed, shuffle)
        members = self._members[bucket]
        position = place * size + np.arange(size)
        rank = epoch * len(members) + position % len(members)
        chosen = in_epochs(rank, len(members), seed + bucket, shuffle)
        return members[chosen], (position < len(members)).astype(np.float32)

    def _checked(self, features: dict[str, tf.Tensor], index: tf.Tensor) -> dict[str, tf.Tensor]:
        """Returns features, of which none is longer than its bucket."""
        now = tf.cast(features[self._length_name], tf.int64)
        is_same = tf.debugging.Assert(
            tf.reduce_all(now == tf.gather(self._lengths, index)),
            ["The length of an example is not the one that was read first"],
        )
        with tf.control_dependencies([is_same]):
            return {name: tf.identity(values) for name, values in features.items()}

    def _fitted(self, features: dict[str, tf.Tensor], axis: int) -> dict[str, tf.Tensor]:
        """Cuts or pads features to the shape of the last boundary."""
        fitted = dict(features)
        for name in self.features:
            values = features[name]
            missing = self.width - values.shape[axis]
            if missing > 0:
                after = [missing if each == axis else 0 for each in range(values.shape.rank)]
                fitted[name] = tf.pad(values, [[0, each] for each in after])
            else:
                fitted[name] = values[(slice(None),) * axis + (slice(self.width),)]
        return fitted


def bucketed(
    data: Any,
    boundaries: Sequence[int],
    *,
    features: Sequence[str] = ("token",),
    length_name: str = "length",
) -> BucketedSource:
    """Returns the data in batches of about the same length; see `BucketedSource`."""
    return BucketedSource(data, boundaries, features=features, length_name=length_name)
