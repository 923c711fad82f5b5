"""Examples with random access: a length, an index, and one specification of all examples."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ddl.data_new.arrays import Arrays
from ddl.data_new.features import (
    ONE_LENGTH,
    array_of,
    check_weight_spec,
    checked_spec,
    named,
    tensorflow_dtype,
)
from ddl.errors import DataError, check_takes, definition_of
from ddl.seeds import drawn_by_state

Example = Mapping[str, Any]


class Source:
    """Examples with random access, each a dict of features of one shape and dtype.

    `Source(items)` takes anything with `len(items)` and `items[i]`, or `items.__getitems__(list)`
    for many at once: a data source of grain or TFDS (`tfds.data_source`), a Hugging Face data set
    (`.with_format("numpy")`), a PyTorch data set, a user's class, or arrays. A Trainer makes it of
    such data by itself; `decode` is the reason to write it:

        def decode(item, seed):
            image = tf.io.decode_jpeg(item["jpeg"], 3)
            image = tf.image.stateless_random_crop(tf.image.resize(image, [40, 40]), [32, 32, 3], seed)
            return {"image": image, "label": item["label"]}

        source = ddl.data_new.Source(items, decode)

    An item is a dict of arrays, numbers or text, or a tuple (x, y) or (x, y, weight) as Keras takes
    it; "weight", a float, is the example's weight in loss and metrics. An item must depend only on
    its index: augment in `decode` by the seed, or in the model.

    Attributes:
      items: What was given.
      arrays: The arrays, if the examples are their rows; else None.
      element_spec: Shape and dtype of each feature of one example.
      decode: `decode`.
      files: Paths of the files that are read, whose names and sizes several workers compare.
      error: The error that ended the last read, which TensorFlow reports as a text; None if none.
    """

    def __init__(
        self,
        items: Any,
        decode: Callable[[dict[str, tf.Tensor], tf.Tensor], Example] | None = None,
        *,
        files: Sequence[str] = (),
    ):
        """Reads item 0, twice.

        Args:
          items: The items. If they have `rows(indices)`, int64 [b] to a dict of arrays [b, …], that
            reads a block; several threads may call it at once.
          decode: Turns an item, a dict of tensors, into an example, with a seed for TensorFlow's
            stateless random operations: int64 [2], from the run's seed, the epoch and the item. It
            is traced by tf.data, and runs in parallel on the host. None: items are examples.
          files: Paths of the files that are read.

        Raises:
          DataError: If there are no items, item 0 is no example, its shapes vary or two reads of it
            differ, or `decode` draws random numbers without the seed.
          ConfigError: If `decode` does not take (item, seed).
        """
        if isinstance(items, Mapping | tuple):
            items = Arrays(items)
        self.items = items
        self.arrays: dict[str, np.ndarray] | None = None
        self.files = tuple(files)
        self.decode = decode
        self.error: Exception | None = None
        self._lock = threading.Lock()
        self._read_rows = getattr(items, "rows", None)
        self._read_items = getattr(items, "__getitems__", None)
        self._check_protocol()
        self._length = len(items)
        if not self._length:
            raise DataError(f"{self.name} must have at least one example, got 0. Correct its data.")
        if isinstance(items, Arrays):
            self.row_spec = items.spec
            self.arrays = items.arrays if decode is None else None
        else:
            self.row_spec = self._spec_of_first()
        self.element_spec = self.row_spec if decode is None else self._decoded_spec()
        check_weight_spec(self.element_spec, self.name)

    @property
    def name(self) -> str:
        """What messages call the source: the class of its items."""
        return type(self.items).__name__

    def __len__(self) -> int:
        """Returns the number of examples."""
        return self._length

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Reads items, before `decode`. Called by threads of tf.data.

        Args:
          indices: int64 [b], each from 0 to length - 1.

        Returns:
          Features of `row_spec`, [b, …]. Text is an array of Python objects.

        Raises:
          DataError: If an item cannot be read or differs from item 0 in form; names the item.
        """
        try:
            return self._rows(indices)
        except Exception as error:
            self.error = error
            raise

    def _rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        if self._read_rows is not None:
            return self._read_rows(indices)
        numbers = indices.tolist()
        with self._lock:  # a user's object may hold an open file
            items = [self._example(number, item) for number, item in self._read(numbers)]
        columns: dict[str, np.ndarray] = {}
        for name, spec in self.row_spec.items():
            for number, item in zip(numbers, items, strict=True):
                self._check_like_first(number, item, name, spec)
            columns[name] = np.stack([item[name] for item in items])
        return columns

    def _read(self, numbers: list[int]) -> list[tuple[int, Any]]:
        if self._read_items is not None:
            try:
                return list(zip(numbers, self._read_items(numbers), strict=True))
            except DataError:
                raise
            except Exception as error:
                raise _unreadable(self.name, f"items {numbers[:5]}", error) from error
        found = []
        for number in numbers:
            try:
                found.append((number, self.items[number]))
            except DataError:
                raise
            except Exception as error:
                raise _unreadable(self.name, f"item {number:,}", error) from error
        return found

    def _example(self, number: int, item: Any) -> dict[str, np.ndarray]:
        features = named(item, f"Item {number:,} of {self.name}")
        return {name: array_of(value) for name, value in features.items()}

    def _check_protocol(self) -> None:
        for needed in ("__len__", "__getitem__"):
            if not hasattr(self.items, needed):
                raise DataError(
                    f"A source needs __len__ and __getitem__ (or __getitems__), but {self.name} "
                    f"has no {needed}. Pass a generator or a pipeline to ddl.data_new.stream."
                )
        if hasattr(self.items, "columns") and hasattr(self.items, "to_numpy"):
            raise DataError(
                f"A {self.name} is indexed by columns. Pass its columns as arrays: "
                "{name: frame[name].to_numpy() for name in frame}."
            )

    def _spec_of_first(self) -> dict[str, tf.TensorSpec]:
        if self._read_rows is not None:
            first = {name: rows[0] for name, rows in self._read_rows(np.zeros(1, np.int64)).items()}
        else:
            first, again = (self._example(0, self._read([0])[0][1]) for _ in range(2))
            if not are_same(first, again):
                raise DataError(
                    f"Two reads of item 0 of {self.name} differ, so a run could not be repeated or "
                    "resumed. Augment in decode(item, seed) by TensorFlow's stateless operations, "
                    "or in the model."
                )
        return {
            name: tf.TensorSpec(np.shape(value), tensorflow_dtype(name, value), name)
            for name, value in first.items()
        }

    def _check_like_first(
        self, number: int, item: dict[str, np.ndarray], name: str, spec: tf.TensorSpec
    ) -> None:
        value = item.get(name)
        if value is None or item.keys() != self.row_spec.keys():
            given, wanted = ", ".join(sorted(item)), ", ".join(sorted(self.row_spec))
            raise DataError(
                f"Item {number:,} of {self.name} has the features {given}; item 0 has {wanted}. "
                "Give all items the same features."
            )
        if value.shape != spec.shape or tensorflow_dtype(name, value) != spec.dtype:
            raise DataError(
                f"Feature {name!r} of item {number:,} of {self.name} is {value.dtype} of shape "
                f"{value.shape}, that of item 0 {spec.dtype.name} of shape {tuple(spec.shape)}. "
                f"{ONE_LENGTH if value.dtype.name == spec.dtype.name else 'Convert it.'}"
            )

    def _decoded_spec(self) -> dict[str, tf.TensorSpec]:
        check_takes("Source.decode", self.decode, ("item", "seed"))
        traced = tf.function(self._decode_named, autograph=False).get_concrete_function(
            self.row_spec, tf.TensorSpec([2], tf.int64)
        )
        if drawn := drawn_by_state(traced.graph.get_operations()):
            raise DataError(
                f"{definition_of(self.decode)} draws random numbers by {drawn}, which a resumed run "
                "would draw differently. Pass the seed to tf.random.stateless_uniform, "
                "tf.image.stateless_random_flip_left_right or the like, or augment in the model."
            )
        return checked_spec(traced.structured_outputs, definition_of(self.decode))

    @tf.autograph.experimental.do_not_convert
    def _decode_named(self, item: dict[str, tf.Tensor], seed: tf.Tensor) -> dict[str, tf.Tensor]:
        assert self.decode is not None
        return named(self.decode(item, seed), definition_of(self.decode))


def _unreadable(name: str, item: str, error: Exception) -> DataError:
    return DataError(
        f"{name} could not read {item}: {type(error).__name__}: {error}. Correct the data or its "
        "__getitem__."
    )


def are_same(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> bool:
    """Returns whether two examples, or batches, are equal; NaN equals NaN."""
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype
        and (
            np.array_equal(first[name], second[name], equal_nan=True)
            if first[name].dtype.kind in "fc"
            else np.array_equal(first[name], second[name])
        )
        for name in first
    )
