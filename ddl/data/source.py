"""Examples with random access: a length, an index, and one specification of all examples."""

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ddl.data import features
from ddl.errors import DataError, check_takes, definition_of, repeats
from ddl.random import drawn_by_state

Example = Mapping[str, Any]

Decode = Callable[[dict[str, tf.Tensor], tf.Tensor], Example]
"""A function of an item and a seed that returns an example; see `Source`."""

_MOST_DECODED = 100_000  # which takes minutes


class Arrays:
    """Examples that are the rows of arrays. NumPy memory maps are read where they lie.

    Attributes:
      arrays: The arrays by feature, each [n, …]. They are not copied.
    """

    def __init__(self, arrays: Any):
        """Checks the arrays.

        Args:
          arrays: Arrays [n, …] by feature, or a tuple (x, y) or (x, y, weights) of such, where x
            may be a dict. NumPy converts other values.

        Raises:
          DataError: If there are none; if their lengths differ; or if an array is a scalar or has a
            dtype that TensorFlow lacks.
        """
        given = features.named(arrays, "The data", 1)
        self.arrays = {name: _as_array(name, one) for name, one in given.items()}
        first, *others = self.arrays
        for name in others:
            if len(self.arrays[name]) != len(self.arrays[first]):
                raise DataError(
                    f"All features must have the same number of examples, but {first!r} has "
                    f"{len(self.arrays[first]):,} and {name!r} has {len(self.arrays[name]):,}."
                )

    def __len__(self) -> int:
        """Returns the number of examples."""
        return len(next(iter(self.arrays.values())))

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the examples at indices, int64 [b], as arrays [b, …]."""
        return {name: array[indices] for name, array in self.arrays.items()}


def _as_array(name: str, data: Any) -> np.ndarray:
    # A map of a file stays one; other subclasses become plain arrays.
    array = data if isinstance(data, np.memmap) else features.array_of(data, name, "The data")
    if array.ndim == 0:
        raise DataError(
            f"Feature {name!r} must have shape [examples, …], got one value, {array.item()!r:.60}."
        )
    if array.dtype == object:
        features.tensorflow_dtype(name, array)
    return array


class Source:
    """Examples with random access, each a dict of features of one shape and dtype.

    `Source(items)` takes anything with `len(items)` and `items[i]`, or `items.__getitems__(list)`
    for many at once: a data source of grain or TFDS (`tfds.data_source`), a Hugging Face data set
    (`.with_format("numpy")`), a PyTorch data set, a user's class, or arrays. A Trainer makes it of
    such data on its own; `decode` is the reason to write it:

        def decode(item, seed):
            image = tf.image.resize(tf.io.decode_jpeg(item["jpeg"], 3), [40, 40])
            image = tf.image.stateless_random_crop(image, [32, 32, 3], seed)
            return {"image": image, "label": item["label"]}

        source = ddl.data.Source(items, decode)

    An item is a dict of arrays, numbers or text, or a tuple (x, y) or (x, y, weight) as Keras takes
    it; "weight", a float, is the example's weight in loss and metrics; one of a higher rank becomes
    "entry_weight". An item must depend only on its index: augment in `decode` by the seed, or in
    the model.

    Attributes:
      items: The given items.
      arrays: The arrays, if the examples are their rows; else None.
      element_spec: Shape and dtype of each feature of one example.
      decode: `decode`.
      decoded: A function of an item and its seed that returns the features of the example; None
        without `decode`.
      files: Paths of the files that are read, whose names and sizes several workers compare.
      row_bytes: Bytes of item 0.
      error: The error that ended the last read, which TensorFlow reports as a text; None if none.
    """

    def __init__(self, items: Any, decode: Decode | None = None, *, files: Sequence[str] = ()):
        """Reads item 0, twice.

        Args:
          items: The items. In place of `__getitem__` they may have `rows(indices)`, int64 [b] to a
            dict of arrays [b, …], which reads a block; several threads may call it at once. They
            may then have `describe(index)`, the name of an item for messages.
          decode: Turns an item, a dict of tensors, into an example, with a seed for TensorFlow's
            stateless random operations: int64 [2], from the run's seed, the epoch and the item. It
            is traced without AutoGraph (use `tf.cond` for an `if` on a tensor), and runs in
            parallel on the host. None: items are examples.
          files: Paths of the files that are read.

        Raises:
          DataError: If there are no items, item 0 is no example, its shapes vary or two reads of it
            differ, or `decode` draws random numbers without the seed.
          ConfigError: If `decode` does not take (item, seed).
        """
        if isinstance(items, Mapping | tuple):
            items = Arrays(items)
        self.items, self.files, self.decode = items, tuple(files), decode
        self.arrays = items.arrays if isinstance(items, Arrays) and decode is None else None
        self.error: Exception | None = None
        self.decoded: Any = None
        self._lock = threading.Lock()
        self._alike = features.Alike()
        self._read_items = getattr(items, "__getitems__", None)
        has_items = self._read_items is not None or hasattr(items, "__getitem__")
        self._read_rows = None if has_items else getattr(items, "rows", None)
        self._check_protocol()
        self._length = len(items)
        if not self._length:
            raise DataError(f"{self.name} must have at least one example, got 0. Correct its data.")
        first = self._first()
        self.row_spec = features.checked_spec(features.spec_of(first), self.name)
        sizes = (sum(map(len, v.flat)) if v.dtype == object else v.nbytes for v in first.values())
        self.row_bytes = sum(sizes)
        self.element_spec = self.row_spec if decode is None else self._decoded_spec(decode)
        features.check_weight_spec(self.element_spec, self.name)
        if self.arrays is not None and (weight := self.arrays.get("weight")) is not None:
            features.check_weights(weight, self.describe)
            if not weight.any():
                raise DataError(f"Feature 'weight' is 0 for all {len(weight):,} examples.")

    @property
    def name(self) -> str:
        """Name of the source in messages: the class of its items."""
        return type(self.items).__name__

    def __len__(self) -> int:
        """Returns the number of examples."""
        return self._length

    def describe(self, index: int) -> str:
        """Returns the name of an item for messages; with `items.rows`, by `items.describe`."""
        named = f"item {{:,}} of {self.name}".format
        return (named if self._read_rows is None else getattr(self.items, "describe", named))(index)

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Reads items, before `decode`. Called by threads of tf.data.

        Args:
          indices: int64 [b], each from 0 to length - 1.

        Returns:
          Features of `row_spec`, [b, …]. Text is an array of Python objects.

        Raises:
          DataError: If an item cannot be read or, but with `items.rows`, differs from item 0 in
            form, which names the item; or if a weight is negative, NaN or infinite.
        """
        try:
            rows = self._rows(indices)
            if "weight" in rows:
                features.check_weights(rows["weight"], lambda row: self.describe(indices[row]))
            return rows
        except Exception as error:
            self.error = error
            raise

    def undecodable(self) -> DataError | None:
        """Looks for the first item that `decode` fails on, among the first 100,000.

        TensorFlow's error does not tell which it is.

        Returns:
          An error that names it by `describe`; None if none is found.
        """
        if self.decode is None:
            return None
        for index in range(min(len(self), _MOST_DECODED)):
            rows = self.rows(np.array([index]))
            item = {name: tf.constant(column[0]) for name, column in rows.items()}
            try:
                self.decode(item, tf.zeros([2], tf.int64))  # its errors are shorter than a graph's
            except (tf.errors.OpError, ValueError) as error:  # of shapes that differ
                return DataError(
                    f"{definition_of(self.decode)} failed on {self.describe(index)}: "
                    f"{first_line(error)}. Correct or remove it."
                )
        return None

    def _rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        if self._read_rows is not None:
            block = self._read_rows(indices)
            return {name: features.taken_by_tensorflow(column) for name, column in block.items()}
        numbers = indices.tolist()
        rows: dict[str, np.ndarray] = {}
        # A user's object may hold an open file, and fill the same array for each item.
        with self._lock:
            for row, item in enumerate(self._read(numbers)):
                example = self._alike.arrays(item, f"Item {numbers[row]:,} of {self.name}")
                for name, one in example.items():
                    if not row:
                        kind = object if one.dtype.kind in "US" else one.dtype
                        rows[name] = np.empty((len(numbers), *one.shape), kind)
                    rows[name][row, ...] = one
        return {name: features.taken_by_tensorflow(column) for name, column in rows.items()}

    def _read(self, numbers: list[int]) -> Iterator[Any]:
        number = numbers[0]
        try:
            if self._read_items is None:
                for number in numbers:
                    yield self.items[number]
                return
            found = list(self._read_items(numbers))
        except Exception as error:
            if isinstance(error, DataError) or not repeats(error):
                raise
            several = self._read_items is not None and len(numbers) > 1
            raise DataError(
                f"{self.name} could not read item {number:,}{' or a later one' * several}: "
                f"{type(error).__name__}: {error}. Correct the data or its __getitem__."
            ) from error
        if len(found) != len(numbers):
            raise DataError(
                f"{self.name}.__getitems__ must return {len(numbers):,} items for as many indices, "
                f"got {len(found):,}."
            )
        yield from found

    def _check_protocol(self) -> None:
        indexed = self._read_items is not None or self._read_rows is not None
        needed = ("__len__",) if indexed else ("__len__", "__getitem__")
        if lacking := [method for method in needed if not hasattr(self.items, method)]:
            raise DataError(
                f"A source needs __len__ and __getitem__ (or __getitems__), but {self.name} "
                f"has no {lacking[0]}. Pass a generator or a pipeline to ddl.data.stream."
            )

    def _first(self) -> dict[str, np.ndarray]:
        first, again = (self._rows(np.zeros(1, np.int64)) for _ in range(2))
        if not are_same(first, again):
            raise DataError(
                f"Two reads of item 0 of {self.name} differ, so a run could not be resumed. "
                "Augment in decode(item, seed) by stateless operations, or in the model."
            )
        return {name: column[0, ...] for name, column in first.items()}

    def _decoded_spec(self, decode: Decode) -> dict[str, tf.TensorSpec]:
        check_takes("Source.decode", decode, ("item", "seed"))

        def example(item: dict[str, tf.Tensor], seed: tf.Tensor) -> dict[str, tf.Tensor]:
            made = tf.autograph.experimental.do_not_convert(decode)(item, seed)
            return features.named(made, definition_of(decode))

        self.decoded = tf.function(example, autograph=False).get_concrete_function(
            self.row_spec, tf.TensorSpec([2], tf.int64)
        )
        if drawn := drawn_by_state(self.decoded.graph):
            raise DataError(
                f"{definition_of(decode)} draws random numbers by {drawn}, which a resumed run "
                "would draw differently. Pass the seed to tf.random.stateless_uniform or the like."
            )
        return features.checked_spec(self.decoded.structured_outputs, definition_of(decode))


def first_line(error: Exception) -> str:
    """Returns the first line of an error's message, without TensorFlow's names of nodes."""
    names = r"\{\{.*?\}\} | \[Op:.*|^Error in .* iterator: \S+ "
    return re.sub(names, "", str(error).partition("\n")[0]).rstrip(".")


def are_same(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> bool:
    """Returns whether two examples are equal, NaN included."""
    return first.keys() == second.keys() and all(
        np.array_equal(one, second[name]) or one.tobytes() == second[name].tobytes()
        for name, one in first.items()
    )
