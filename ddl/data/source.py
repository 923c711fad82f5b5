"""Where examples come from: arrays, anything with random access, or a stream.

A source says how many examples it has and what one looks like. Its examples are dicts of
features. A feature named "weight" (float, []) says how much an example counts.
"""

import abc
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from ddl.data.order import index_batches, steps_per_epoch
from ddl.errors import DataError

_CHUNK_BYTES = 1 << 24


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


class ArraySource(IndexedSource):
    """Arrays in memory, one a feature, example by example along the first dimension.

    `ArraySource(image=images, label=labels)` and `ArraySource({"image": images, …})` are the
    same. What is not an array yet is made one by `np.asarray`; dtypes stay as they are.
    """

    def __init__(self, features: Mapping[str, Any] | None = None, /, **named_features: Any):
        """Checks the arrays.

        Args:
          features: Arrays by feature name, each [n, …].
          **named_features: More of them.

        Raises:
          DataError: If there are no features or examples, lengths differ, an array holds Python
            objects, or a float array holds NaN or infinity; or if a feature "weight" is
            not one finite float ≥ 0 an example.
        """
        arrays = {**(features or {}), **named_features}
        if not arrays:
            raise DataError("a data set needs at least one feature, such as image=…")
        self.features: dict[str, np.ndarray] = {
            name: _as_array(name, array) for name, array in arrays.items()
        }
        first, *others = self.features
        self._length = len(self.features[first])
        for name in others:
            if len(self.features[name]) != self._length:
                raise DataError(
                    f"the features {first!r} and {name!r} have {self._length:,} and "
                    f"{len(self.features[name]):,} examples; they need the same number"
                )
        if not self._length:
            raise DataError(f"the feature {first!r} is empty: there are no examples")
        for name, array in self.features.items():
            _check_finite(name, array)
        if "weight" in self.features:
            _check_weight(self.features["weight"])

    def __len__(self) -> int:
        """Number of examples."""
        return self._length

    @property
    def nbytes(self) -> int:
        """Bytes that the arrays take."""
        return sum(array.nbytes for array in self.features.values())

    @property
    def element_spec(self) -> dict[str, tf.TensorSpec]:
        """See `Source`."""
        return {
            name: tf.TensorSpec(array.shape[1:], _tensorflow_dtype(array.dtype), name)
            for name, array in self.features.items()
        }

    def gather(self, indices: tf.Tensor) -> dict[str, tf.Tensor]:
        """See `IndexedSource`."""
        return {name: tf.gather(rows, indices) for name, rows in self._tensors.items()}

    @functools.cached_property
    def _tensors(self) -> dict[str, tf.Tensor]:
        # Eager tensors, made once: a graph captures them by reference, where it would copy a
        # numpy array into itself as a constant at each tracing.
        with tf.init_scope(), tf.device("CPU:0"):
            return {name: tf.constant(array) for name, array in self.features.items()}


class RandomAccessSource(IndexedSource):
    """Examples that a Python function looks up: memory-mapped files, ArrayRecord, a database."""

    def __init__(
        self,
        lookup: Callable[[np.ndarray], Mapping[str, Any]],
        length: int,
        element_spec: Mapping[str, tf.TensorSpec] | None = None,
    ):
        """Takes the function.

        Args:
          lookup: Maps indices, int64 [b], to arrays [b, …] by feature name. It is called from
            several threads and must give the same answer whenever it is asked.
          length: Number of examples.
          element_spec: Shape and dtype of one example's features; None: looked up at example 0.

        Raises:
          DataError: If there are no examples, or the first cannot be looked up.
        """
        if length < 1:
            raise DataError(f"a data set of {length} examples: there is nothing to look up")
        self._lookup = lookup
        self._length = length
        if element_spec is None:
            element_spec = {
                name: tf.TensorSpec(array.shape[1:], _tensorflow_dtype(array.dtype), name)
                for name, array in self._look_up(np.zeros([1], np.int64)).items()
            }
        self._element_spec = checked_element_spec(element_spec)

    def __len__(self) -> int:
        """Number of examples."""
        return self._length

    @property
    def element_spec(self) -> dict[str, tf.TensorSpec]:
        """See `Source`."""
        return dict(self._element_spec)

    def gather(self, indices: tf.Tensor) -> dict[str, tf.Tensor]:
        """See `IndexedSource`. A failing lookup stops the step with a message that names it."""
        names = list(self._element_spec)
        dtypes = [self._element_spec[name].dtype for name in names]
        values = tf.numpy_function(self._checked_look_up, [indices], dtypes, stateful=False)
        rows = dict(zip(names, values, strict=True))
        for name, spec in self._element_spec.items():
            rows[name].set_shape([indices.shape[0], *spec.shape])
        return rows

    def _look_up(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        try:
            return {name: np.asarray(rows) for name, rows in self._lookup(indices).items()}
        except Exception as error:
            raise DataError(
                f"looking up examples {_some(indices)} failed with {type(error).__name__}: {error}"
            ) from error

    def _checked_look_up(self, indices: np.ndarray) -> list[np.ndarray]:
        rows = self._look_up(indices)
        if set(rows) != set(self._element_spec):
            raise DataError(
                f"looking up examples {_some(indices)} gave the features "
                f"{', '.join(sorted(rows))}; expected {', '.join(sorted(self._element_spec))}"
            )
        for name, spec in self._element_spec.items():
            shape = (len(indices), *spec.shape)
            # tf.numpy_function knows text as objects or bytes, TensorFlow as string.
            same_dtype = spec.dtype == tf.string or rows[name].dtype == spec.dtype.as_numpy_dtype
            if spec.dtype.is_floating and not np.isfinite(rows[name]).all():
                raise DataError(
                    f"looking up examples {_some(indices)} gave NaN or infinity in {name!r}"
                )
            if rows[name].shape != shape or not same_dtype:
                raise DataError(
                    f"looking up examples {_some(indices)} gave {name!r} as {rows[name].dtype} "
                    f"{rows[name].shape}; expected {spec.dtype.name} {shape}"
                )
        return [rows[name] for name in self._element_spec]


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


def _as_array(name: str, data: Any) -> np.ndarray:
    try:
        array = np.asarray(data)
    except ValueError as error:
        raise DataError(f"the feature {name!r} is not an array: {error}") from error
    if array.dtype == object:
        raise DataError(
            f"the feature {name!r} is an array of Python objects (rows of different lengths?); "
            "give it a number dtype"
        )
    if array.ndim == 0:
        raise DataError(f"the feature {name!r} is a single value; it needs one value an example")
    try:
        _tensorflow_dtype(array.dtype)
    except TypeError as error:
        raise DataError(
            f"the feature {name!r} has dtype {array.dtype}, which TensorFlow lacks"
        ) from error
    return array


def _tensorflow_dtype(dtype: np.dtype) -> tf.DType:
    return tf.string if dtype.kind in "US" else tf.as_dtype(dtype)


def _check_finite(name: str, array: np.ndarray) -> None:
    dtype = _tensorflow_dtype(array.dtype)
    if not (dtype.is_floating or dtype.is_complex):
        return
    rows = max(1, _CHUNK_BYTES // max(1, array[0].nbytes))
    count, first = 0, -1
    for start in range(0, len(array), rows):
        bad = ~np.isfinite(array[start : start + rows])
        if bad.any():
            if not count:
                first = start + int(np.argmax(bad.reshape(len(bad), -1).any(axis=1)))
            count += int(np.count_nonzero(bad))
    if count:
        raise DataError(
            f"the feature {name!r} holds {count:,} values that are NaN or infinite, the first in "
            f"example {first}"
        )


def _check_weight(weight: np.ndarray) -> None:
    if weight.ndim != 1 or not _tensorflow_dtype(weight.dtype).is_floating:
        raise DataError(
            f"the feature 'weight' is {weight.dtype} {weight.shape}; it is one float an example"
        )
    if weight.min() < 0:
        row = int(np.argmin(weight))
        raise DataError(f"the feature 'weight' is negative: {weight[row]} in example {row}")


def _some(indices: np.ndarray) -> str:
    shown = ", ".join(str(index) for index in indices[:5])
    return shown + (", …" if len(indices) > 5 else "")
