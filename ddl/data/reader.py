"""A user's data pass by pass: data sets of tf.data, also of what Python iterables yield."""

import contextlib
import functools
import itertools
import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from ddl.data.batched import AS_BATCHES, described, example_spec
from ddl.data.features import ONE_LENGTH, array_of, named, tensorflow_dtype
from ddl.errors import DataError

_AT_ONCE = 32  # examples that one call of Python reads: tf.data's own batches take one for each


class Reader:
    """Makes the data set of each pass.

    Attributes:
      name: What messages call the data.
      is_constant: Whether all passes read one data set, and no Python.
      batched: Whether elements of the data sets are batches; None if not known.
      first: The data set of pass 0; of an iterable, for its specification alone.
      error: The error that ended the last read in Python; None if none.
    """

    def __init__(self, name: str, data: Any, batched: bool | None):
        """Makes the first data set, and reads the first element of an iterable.

        Args:
          name: What messages call the data.
          data: A `tf.data.Dataset`; or a function of the number of a pass, that returns one or an
            iterable.
          batched: Whether elements are batches; None: not known, and not so for iterables.

        Raises:
          DataError: As `dataset`.
        """
        self.name, self.batched, self.error = name, batched, None
        self.is_constant = isinstance(data, tf.data.Dataset)
        self.first = None
        self._data, self._yields_batches = data, bool(batched)
        self._spec: dict[str, tf.TensorSpec] = {}
        self.first = self.dataset(0)

    def dataset(self, number: int) -> tf.data.Dataset:
        """Returns the data set of a pass, by its number.

        Raises:
          DataError: If there are no elements, or no examples of the features of pass 0, or the
            user's function fails.
        """
        with self._data_errors():
            made = self._data if self.is_constant else self._data(number)
            if not isinstance(made, tf.data.Dataset):
                made = self._from_iterable(made)
            if self.first is not None and made.element_spec != self.first.element_spec:
                raise DataError(
                    f"{self.name} must return the features of epoch 0, {self.first.element_spec}, "
                    f"in each epoch, got {made.element_spec} in epoch {number}."
                )
            return made

    def _from_iterable(self, iterable: Any) -> tf.data.Dataset:
        elements = itertools.starmap(self._checked, enumerate(iterable))
        if self.first is None and next(elements, None) is None:
            raise DataError(f"{self.name} must have at least one example, got none. Correct it.")
        self.batched = True
        spec = {n: tf.TensorSpec([None, *one.shape], one.dtype) for n, one in self._spec.items()}
        batches = functools.partial(self._batches, elements)
        return tf.data.Dataset.from_generator(batches, output_signature=spec)

    def _batches(self, elements: Iterator[dict[str, np.ndarray]]) -> Iterator[dict[str, Any]]:
        with self._data_errors():
            if self._yields_batches:
                yield from elements
            while block := list(itertools.islice(elements, _AT_ONCE)):
                yield {name: np.stack([one[name] for one in block]) for name in self._spec}

    def _checked(self, number: int, element: Any) -> dict[str, np.ndarray]:
        where = f"Element {number:,} of {self.name}"
        # Copies: a generator may fill its arrays anew.
        features = {n: np.array(array_of(value)) for n, value in named(element, where).items()}
        spec = {n: tf.TensorSpec(v.shape, tensorflow_dtype(n, v)) for n, v in features.items()}
        spec = example_spec(spec, self._yields_batches, where)
        self._spec = self._spec or spec
        if spec != self._spec:
            raise DataError(
                f"{where} must be as element 0, {described(self._spec)}, got {described(spec)}. "
                f"{ONE_LENGTH if self._yields_batches else AS_BATCHES}"
            )
        return features

    @contextlib.contextmanager
    def _data_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.error = error
            if not isinstance(error, DataError):
                line = traceback.extract_tb(error.__traceback__)[-1]
                self.error = DataError(
                    f"{self.name} could not be read: {type(error).__name__}: {error} "
                    f"({line.filename}:{line.lineno})."
                )
            raise self.error from error
