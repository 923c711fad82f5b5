"""Base classes of data sources.

A source has a length and the spec of one example. An example is a dict of features. The optional
feature "weight", a float [], is the example's weight in losses and metrics.
"""

import abc
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ddl.data.checks import checked_weight
from ddl.data.order import index_batches, steps_per_epoch
from ddl.errors import DataError


class Source(abc.ABC):
    """A data set.

    Attributes:
      has_numbered_examples: For sources with random access: whether an epoch holds each example
        once, so that examples can be found by their indices.
      files_read: Paths of its files, whose names and sizes several workers compare.
      sources_read: The sources from which it takes its examples.
      maps_files: Whether its graph reads files that are mapped into memory; see `read_in_place`.
      packing_digest: For rows that hold several examples: a number that differs, but for one chance
        in 2^32, if the examples of a row do. None: a row is an example.
    """

    has_numbered_examples = True
    files_read: Sequence[str] = ()
    sources_read: Sequence["Source"] = ()
    maps_files = False
    packing_digest: int | None = None

    @abc.abstractmethod
    def __len__(self) -> int:
        """Returns the number of examples in an epoch."""

    @property
    @abc.abstractmethod
    def element_spec(self) -> dict[str, tf.TensorSpec]:
        """Shape and dtype of each feature of one example; all shapes are static."""

    def steps_per_epoch(self, global_batch_size: int) -> int:
        """Returns the batches per epoch; all but the last one are full.

        Args:
          global_batch_size: B.

        Raises:
          ConfigError: If the batch size is not positive.
        """
        return steps_per_epoch(len(self), global_batch_size)

    def examples_per_epoch(self, global_batch_size: int) -> int:
        """Returns the number of examples in an epoch, which B determines if the data are endless.

        Args:
          global_batch_size: B.
        """
        return len(self)

    @property
    def is_endless(self) -> bool:
        """Whether the data have no known length, so that an epoch is a number of batches."""
        return False

    @abc.abstractmethod
    def batches(
        self,
        global_batch_size: int,
        first_batch: int,
        *,
        seed: int,
        shuffle: bool,
        rows: np.ndarray | None = None,
    ) -> tf.data.Dataset:
        """Builds a host data set without end, of global batches from number `first_batch` on.

        Args:
          global_batch_size: B.
          first_batch: Batch number, counted from 0 over the whole run.
          seed: Seed of the order of the examples, if the source can choose the order.
          shuffle: Whether each epoch has its own order, if the source can choose the order.
          rows: Rows of each batch to return, in this order, int [b]; None returns all B. The source
            need not read the other rows.

        Returns:
          Dicts of features [b, …] and "weight", float32 [b]: the example's weight or 1; 0 for
          the padding of an epoch's last batch, which repeats examples.
        """

    def damaged(self) -> str | None:
        """Looks for an example that cannot be read, after an error; None if none is found."""
        return None


class IndexedSource(Source):
    """A source with random access; the base class for custom ones."""

    def __init_subclass__(cls, **options: Any):
        """Checks that batches read what examples do.

        Raises:
          DataError: If the class overrides `example` alone.
        """
        super().__init_subclass__(**options)
        if "example" in vars(cls) and "gather" not in vars(cls):
            raise DataError(
                f"{cls.__name__} overrides example, but batches of an IndexedSource are read by "
                "gather. Override gather, which takes the indices of several examples, or derive "
                "from ddl.data.DecodedSource."
            )

    def batches(
        self,
        global_batch_size: int,
        first_batch: int,
        *,
        seed: int,
        shuffle: bool,
        rows: np.ndarray | None = None,
    ) -> tf.data.Dataset:
        """See `Source`. Any batch is found at once, and each epoch is fully shuffled."""
        order = index_batches(
            first_batch,
            num_examples=len(self),
            global_batch_size=global_batch_size,
            seed=seed,
            shuffle=shuffle,
            rows=rows,
        )
        return self._looked_up(order, global_batch_size if rows is None else len(rows))

    def _looked_up(self, order: tf.data.Dataset, size: int) -> tf.data.Dataset:
        """Returns the examples of an order's batches.

        Args:
          order: Dicts of "index", int64 [size], and "weight", float32 [size].
          size: Number of examples of a batch.
        """
        return read_in_place(order, self).map(
            lambda batch: weighted(checked_weight(self.gather(batch["index"])), batch["weight"]),
            num_parallel_calls=os.cpu_count() or 1,
            deterministic=True,
        )

    def example(self, index: tf.Tensor, seed: tf.Tensor) -> dict[str, tf.Tensor]:
        """Fetches one example. Called while tf.data traces its graph, which runs on the CPU.

        Args:
          index: int64 [], from 0 to length - 1.
          seed: Not used; sources that decode each example on their own may.

        Returns:
          A tensor for each feature of `element_spec`.
        """
        return {name: rows[0] for name, rows in self.gather(index[tf.newaxis]).items()}

    @abc.abstractmethod
    def gather(self, indices: tf.Tensor) -> dict[str, tf.Tensor]:
        """Fetches examples. Called while tf.data traces its graph, which runs on the CPU.

        Args:
          indices: int64 [b], each from 0 to length - 1.

        Returns:
          A tensor [b, *shape] for each feature of `element_spec`.
        """


def with_sources_read(source: Source) -> Iterator[Source]:
    """Yields a source, and all from which it takes its examples, directly or through others."""
    yield source
    for one in source.sources_read:
        yield from with_sources_read(one)


def read_in_place(dataset: tf.data.Dataset, source: Source) -> tf.data.Dataset:
    """Returns a data set whose maps can take rows of a source without copying all of it.

    TensorFlow optimizes the graph of a data set, in which each tensor that a map reads from outside
    is a constant: a copy in memory. For mapped files these would be whole files.

    Args:
      dataset: Numbers of examples; the result of its maps inherits the option.
      source: The source from which they are taken.
    """
    if not any(one.maps_files for one in with_sources_read(source)):
        return dataset
    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = False
    return dataset.with_options(options)


@tf.autograph.experimental.do_not_convert
def weighted(features: dict[str, tf.Tensor], padding: tf.Tensor) -> dict[str, tf.Tensor]:
    """Adds "weight" to the features: 0 for padding, else the example's own weight or 1.

    Args:
      features: Features [b, …].
      padding: float32 [b], 0 for padding and 1 for examples.

    Returns:
      The features with "weight", float32 [b].
    """
    if "weight" in features:
        padding *= tf.cast(features["weight"], tf.float32)
    return {**features, "weight": padding}


def checked_element_spec(spec: Any) -> dict[str, tf.TensorSpec]:
    """Returns the spec of an example after checking that it allows static batches.

    Raises:
      DataError: If the spec is not a dict of dense tensors of static shape, or "weight" is not a
        float [].
    """
    if not isinstance(spec, Mapping) or not spec:
        raise DataError(
            f"Examples must be dicts of features by name, got {spec!r:.200}. Map them to dicts, "
            "such as {'image': …, 'label': …}."
        )
    for name, feature in spec.items():
        if not isinstance(feature, tf.TensorSpec):
            raise DataError(f"Feature {name!r} must be a dense tensor, got {_not_dense(feature)}")
        if not feature.shape.is_fully_defined():
            raise DataError(
                f"Feature {name!r} must have the same static shape in all examples, got "
                f"{feature.shape}. Pad or crop it to one shape; if all examples have one already, "
                "call tf.ensure_shape, or parse it with tf.io.FixedLenFeature."
            )
    if "weight" in spec and (spec["weight"].shape.rank or not spec["weight"].dtype.is_floating):
        raise DataError(
            f"Feature 'weight' must be one float per example, got {spec['weight'].dtype.name} of "
            f"shape {spec['weight'].shape}. Give each example one number, converted to float32."
        )
    return dict(spec)


def _not_dense(feature: Any) -> str:
    """Returns what a feature is instead of a dense tensor, with the remedy."""
    if isinstance(feature, tf.SparseTensorSpec):
        return (
            "a sparse tensor, as tf.io.VarLenFeature gives. Convert it with tf.sparse.to_dense and "
            "pad it to one length, or parse it with tf.io.FixedLenFeature."
        )
    if isinstance(feature, tf.RaggedTensorSpec):
        return "a ragged tensor. Convert it to one shape: feature.to_tensor(shape=[…])."
    if isinstance(feature, Mapping):
        return f"a dict of {', '.join(map(str, feature))}. Put its features beside the others."
    return f"{feature!r}."


def array_of(value: Any) -> np.ndarray:
    """Converts a value into an array.

    Text in lists becomes an array of Python objects. One of fixed-length text would lose zero bytes
    at the end of each, such as those of a picture file.

    Raises:
      ValueError: If rows have different lengths.
    """
    if isinstance(value, str | bytes):
        return np.array(value, object)
    array = np.asarray(value) if hasattr(value, "dtype") or not _begins_with_text(value) else None
    if array is None or (array.dtype.kind in "US" and not hasattr(value, "dtype")):
        return np.array(value, object)
    return array


def _begins_with_text(value: Any) -> bool:
    while isinstance(value, list | tuple) and value:
        value = value[0]
    return isinstance(value, str | bytes)


def tensorflow_dtype(dtype: np.dtype) -> tf.DType:
    """Returns the TensorFlow dtype for a numpy dtype; text becomes tf.string.

    Raises:
      TypeError: If TensorFlow lacks the dtype.
    """
    return tf.string if dtype.kind in "US" else tf.as_dtype(dtype)
