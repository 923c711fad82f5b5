"""Where examples come from.

A source says how many examples it has and what one looks like. Its examples are dicts of
features. A feature named "weight" (float, []) says how much an example counts.
"""

import abc
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from ddl.data.order import index_batches, steps_per_epoch
from ddl.errors import DataError


class Source(abc.ABC):
    """A data set of known length."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Number of examples in an epoch."""

    @property
    @abc.abstractmethod
    def element_spec(self) -> dict[str, tf.TensorSpec]:
        """Shape and dtype of each feature of one example; shapes are fully known."""

    def steps_per_epoch(self, global_batch_size: int) -> int:
        """Batches in which every example comes once; all are full but for the last.

        Raises:
          ConfigError: If the batch size is not positive.
        """
        return steps_per_epoch(len(self), global_batch_size)

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
        """Global batches from number `first_batch` of the run on, without end, on the host.

        Args:
          global_batch_size: B.
          first_batch: Counted from 0 over the whole run.
          seed: Of the order of the examples, where the source can choose it.
          shuffle: Whether each epoch has an order of its own, likewise.
          rows: Which rows of each batch to give, and in which order, int [b]; None: all B. What the
            other rows hold need not be read.

        Returns:
          Dicts of features [b, …] and "weight", float32 [b], 0 for the padding of an epoch's
          last batch, which consists of examples too.
        """


class IndexedSource(Source):
    """A source with random access. Derive from it to bring your own."""

    def batches(
        self,
        global_batch_size: int,
        first_batch: int,
        *,
        seed: int,
        shuffle: bool,
        rows: np.ndarray | None = None,
    ) -> tf.data.Dataset:
        """See `Source`. Any batch is found at once, and each epoch is shuffled whole."""
        return index_batches(
            first_batch,
            num_examples=len(self),
            global_batch_size=global_batch_size,
            seed=seed,
            shuffle=shuffle,
            rows=rows,
        ).map(
            lambda batch: weighted(self.gather(batch["index"]), batch["weight"]),
            num_parallel_calls=os.cpu_count() or 1,
            deterministic=True,
        )

    @abc.abstractmethod
    def gather(self, indices: tf.Tensor) -> dict[str, tf.Tensor]:
        """Fetches examples; called while tf.data traces its graph, on the CPU.

        Args:
          indices: int64 [b], each from 0 to length - 1.

        Returns:
          For each feature of `element_spec` a tensor [b, *shape].
        """


def weighted(features: dict[str, tf.Tensor], padding: tf.Tensor) -> dict[str, tf.Tensor]:
    """Features with "weight": 0 for padding, and else the example's own where it has one."""
    if "weight" in features:
        padding *= tf.cast(features["weight"], tf.float32)
    return {**features, "weight": padding}


def checked_element_spec(spec: Any) -> dict[str, tf.TensorSpec]:
    """Returns the spec of an example after checking that static batches can be made of it.

    Raises:
      DataError: If it is not a dict of dense tensors of known shapes.
    """
    if not isinstance(spec, Mapping) or not spec:
        raise DataError(f"examples must be dicts of features by name; these are {spec!r}")
    for name, feature in spec.items():
        if not isinstance(feature, tf.TensorSpec):
            raise DataError(f"the feature {name!r} is {feature!r}; only dense tensors can be used")
        if not feature.shape.is_fully_defined():
            if feature.shape.rank and feature.shape[0] is None:
                raise DataError(
                    f"the feature {name!r} has shape {feature.shape}: is the data set batched? "
                    "Give single examples, without .batch(…), or features of static shape."
                )
            raise DataError(
                f"the feature {name!r} has shape {feature.shape}; give it a static shape, for "
                "instance by padding or tf.ensure_shape"
            )
    if "weight" in spec and (spec["weight"].shape.rank or not spec["weight"].dtype.is_floating):
        raise DataError(
            f"the feature 'weight' is {spec['weight'].dtype.name} {spec['weight'].shape}; "
            "it is one float an example"
        )
    return dict(spec)


def tensorflow_dtype(dtype: np.dtype) -> tf.DType:
    """What TensorFlow makes of an array of it: text is strings.

    Raises:
      TypeError: If TensorFlow lacks it.
    """
    return tf.string if dtype.kind in "US" else tf.as_dtype(dtype)
