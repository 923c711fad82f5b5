"""Examples with random access: a length, an index, and one specification of all examples."""

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ddl.data.arrays import Arrays
from ddl.data.features import (
    ONE_LENGTH,
    array_of,
    check_weight_spec,
    checked_spec,
    named,
    taken_by_tensorflow,
    tensorflow_dtype,
)
from ddl.errors import DataError, check_takes, definition_of
from ddl.seeds import drawn_by_state
from ddl.user_code import repeats

Example = Mapping[str, Any]

_LOOKED_FOR_SECONDS = 60


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
    "entry_weight". An item must depend only on
    its index: augment in `decode` by the seed, or in the model.

    Attributes:
      items: The given items.
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
        """Name of the source in messages: the class of its items."""
        return type(self.items).__name__

    def __len__(self) -> int:
        """Returns the number of examples."""
        return self._length

    def decoded(self, item: dict[str, tf.Tensor], seed: tf.Tensor) -> dict[str, tf.Tensor]:
        """Returns the features that `decode` makes of an item; see `Source`. In a graph."""
        assert self.decode is not None
        example = tf.autograph.experimental.do_not_convert(self.decode)(item, seed)
        return named(example, definition_of(self.decode))

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Reads items, before `decode`. Called by threads of tf.data.

        Args:
          indices: int64 [b], each from 0 to length - 1.

        Returns:
          Features of `row_spec`, [b, …]. Text is an array of Python objects.

        Raises:
          DataError: If an item cannot be read or differs from item 0 in form, which names the item;
            or if a weight is negative, NaN or infinite.
        """
        try:
            rows = self._rows(indices)
            weight = rows.get("weight")
            if weight is not None and not ((weight >= 0) & np.isfinite(weight)).all():
                raise DataError(
                    f"Feature 'weight' of {self.name} must be a finite number of at least 0, got "
                    f"{weight[~((weight >= 0) & np.isfinite(weight))][0]}. Correct it."
                )
            return rows
        except Exception as error:
            self.error = error
            raise

    def undecodable(self, indices: Sequence[int] | None = None) -> DataError | None:
        """Looks for the first item that `decode` fails on, for at most a minute.

        TensorFlow's error does not tell which it is.

        Args:
          indices: Items among which it is; None: all.

        Returns:
          An error that names it, by `items.describe(index)` if the items have it; None if none is
          found.
        """
        until = time.monotonic() + _LOOKED_FOR_SECONDS
        if self.decode is None:
            return None
        for index in range(len(self)) if indices is None else indices:
            rows = self.rows(np.array([index]))
            item = {name: tf.constant(column[0]) for name, column in rows.items()}
            try:
                self.decoded(item, tf.zeros([2], tf.int64))
            except tf.errors.OpError as error:
                describe = getattr(self.items, "describe", f"item {{:,}} of {self.name}".format)
                return DataError(
                    f"{definition_of(self.decode)} failed on {describe(index)}: "
                    f"{first_line(error)}. Correct or remove it."
                )
            if time.monotonic() > until:
                break
        return None

    def _rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        if self._read_rows is not None:
            rows = self._read_rows(indices)
            return {name: taken_by_tensorflow(column) for name, column in rows.items()}
        numbers = indices.tolist()
        with self._lock:  # a user's object may hold an open file
            items = [
                self._example(*each) for each in zip(numbers, self._read(numbers), strict=True)
            ]
        for number, item in zip(numbers, items, strict=True):
            self._check_like_first(number, item)
        return {
            name: taken_by_tensorflow(np.stack([item[name] for item in items]))
            for name in self.row_spec
        }

    def _read(self, numbers: list[int]) -> list[Any]:
        number = numbers[0]
        try:
            if self._read_items is None:
                found = []
                for number in numbers:
                    found.append(self.items[number])
                return found
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
                f"{self.name}.__getitems__ must return one item for each of the {len(numbers):,} "
                f"indices in its list, got {len(found):,}. Correct it."
            )
        return found

    def _example(self, number: int, item: Any) -> dict[str, np.ndarray]:
        what = f"Item {number:,} of {self.name}"
        try:
            return {name: array_of(value, name) for name, value in named(item, what).items()}
        except DataError as error:
            raise error if what in str(error) else DataError(f"{what}: {error}") from error

    def _check_protocol(self) -> None:
        indexed = self._read_items is not None or self._read_rows is not None
        for needed in ("__len__",) if indexed else ("__len__", "__getitem__"):
            if not hasattr(self.items, needed):
                raise DataError(
                    f"A source needs __len__ and __getitem__ (or __getitems__), but {self.name} "
                    f"has no {needed}. Pass a generator or a pipeline to ddl.data.stream."
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
            first, again = (self._example(0, self._read([0])[0]) for _ in range(2))
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

    def _check_like_first(self, number: int, item: dict[str, np.ndarray]) -> None:
        if item.keys() != self.row_spec.keys():
            given, wanted = ", ".join(sorted(item)), ", ".join(sorted(self.row_spec))
            raise DataError(
                f"Item {number:,} of {self.name} has the features {given}; item 0 has {wanted}. "
                "Give all items the same features."
            )
        for name, spec in self.row_spec.items():
            dtype, shape = tensorflow_dtype(name, item[name]), item[name].shape
            if (dtype, shape) != (spec.dtype, tuple(spec.shape)):
                raise DataError(
                    f"Feature {name!r} of item {number:,} of {self.name} is {dtype.name} of shape "
                    f"{shape}, that of item 0 {spec.dtype.name} of shape {tuple(spec.shape)}. "
                    f"{ONE_LENGTH if dtype == spec.dtype else 'Convert it.'}"
                )

    def _decoded_spec(self) -> dict[str, tf.TensorSpec]:
        decode = self.decode
        assert decode is not None
        check_takes("Source.decode", decode, ("item", "seed"))
        traced = tf.function(self.decoded, autograph=False).get_concrete_function(
            self.row_spec, tf.TensorSpec([2], tf.int64)
        )
        if drawn := drawn_by_state(traced.graph.get_operations()):
            raise DataError(
                f"{definition_of(decode)} draws random numbers by {drawn}, which a resumed "
                "run would draw differently. Pass the seed to tf.random.stateless_uniform, "
                "tf.image.stateless_random_flip_left_right or the like, or augment in the model."
            )
        return checked_spec(traced.structured_outputs, definition_of(decode))


def first_line(error: Exception) -> str:
    """Returns the first line of an error's message, without TensorFlow's names of nodes."""
    return re.sub(r"\{\{.*?\}\} | \[Op:.*", "", str(error).splitlines()[0]).rstrip(".")


def are_same(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> bool:
    """Returns whether two examples are equal, numbers to the bit."""
    return first.keys() == second.keys() and all(
        one.dtype == two.dtype
        and one.shape == two.shape
        and (np.array_equal(one, two) if one.dtype == object else one.tobytes() == two.tobytes())
        for one, two in ((first[name], second[name]) for name in first)
    )
