"""Data without a known length: generators, and pipelines of tf.data that filter or repeat."""

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ddl.data.batched import check_not_batched
from ddl.data.checks import checked_finite, data_errors
from ddl.data.naming import named
from ddl.data.objects.examples import are_same, check_fits, copied, features_of, spec_of
from ddl.data.objects.py_dataset import PyDatasetSource, check_steps
from ddl.data.source import Source, array_of, checked_element_spec, weighted
from ddl.data.storage.shared_memory import aligned_empty
from ddl.errors import DataError, definition_of

_COMPARED = 32
"""Examples that are read twice at the start, to find data that differ from read to read."""


def endless(data: Any, *, steps_per_epoch: int | None = None) -> Source:
    """Builds a source of data without a known length, or without end.

    Args:
      data: Data as `EndlessSource` takes them, or a `keras.utils.PyDataset` without end.
      steps_per_epoch: Batches that count as an epoch. Configs set it as STEPS_PER_EPOCH.

    Raises:
      ConfigError: If `steps_per_epoch` is missing or below 1.
      DataError: As `EndlessSource` and `PyDatasetSource`.
    """
    if isinstance(data, keras.utils.PyDataset):
        return PyDatasetSource(data, steps_per_epoch)
    return EndlessSource(data, steps_per_epoch)


class EndlessSource(Source):
    """Examples in the order of a generator or of a `tf.data.Dataset`, again and again.

    Batch k of a run is examples k·B to (k+1)·B - 1, so no batch is padded; if the data end, they
    begin again. ddl does not shuffle them. Every worker reads all examples and keeps its rows.

    A resumed run reads and drops all examples that the run has read before. A function with an
    argument `start` avoids this: it gets the number of the first example.

    The data must be the same each time that they are read. Reading the first examples twice
    finds most data that are not; a difference further on is not found, and makes a resumed run
    differ from an uninterrupted one. A data set that shuffles with a seed of its own must be given
    as a function, so that each read begins with the first order again.
    """

    def __init__(self, data: Any, steps_per_epoch: int | None):
        """Reads the first examples twice.

        Args:
          data: An unbatched `tf.data.Dataset` of dicts, or of tuples as Keras takes them; or a
            function that returns one; or a generator function, or one that returns an iterable, of
            such examples as arrays. A function is called without arguments for each read, or with
            `start`, the number of the first example, if it has an argument of this name; its
            examples must then not end.
          steps_per_epoch: Batches that count as an epoch.

        Raises:
          ConfigError: If `steps_per_epoch` is missing or below 1.
          DataError: If the data are of another type, empty, batched or not of one static shape, if
            two reads differ, or if `start` has no effect.
        """
        check_steps(steps_per_epoch, "the data set", known=False)
        self._steps = steps_per_epoch or 0
        if isinstance(data, Iterator) or not (isinstance(data, tf.data.Dataset) or callable(data)):
            raise DataError(
                f"endless.data must be a tf.data.Dataset, a function that returns one, or a "
                f"generator function, got {type(data).__name__}. An iterator can be read only "
                "once: pass the function that makes it."
            )
        self._data = data
        self._takes_start = callable(data) and "start" in _arguments(data)
        made = self._made(0)
        self._is_dataset = isinstance(made, tf.data.Dataset)
        if self._is_dataset:
            check_not_batched(_with_names(made))
            spec = _with_names(made).element_spec
        else:
            first = next(iter(made), None)
            if first is None:
                raise DataError(_no_examples(self._name))
            spec = spec_of(features_of(first, f"example 0 of {self._name}"))
        self._element_spec = checked_element_spec(spec)
        self._check_repeats()

    def __len__(self) -> int:
        """Raises DataError: the number of examples in an epoch depends on the batch size."""
        raise DataError(
            f"len() needs data with an end, but {self._name} is read without end. Call "
            "examples_per_epoch(global_batch_size) of the source."
        )

    @property
    def is_endless(self) -> bool:
        """See `Source`."""
        return True

    @property
    def element_spec(self) -> dict[str, tf.TensorSpec]:
        """See `Source`."""
        return dict(self._element_spec)

    def examples_per_epoch(self, global_batch_size: int) -> int:
        """See `Source`."""
        return self._steps * global_batch_size

    def steps_per_epoch(self, global_batch_size: int) -> int:
        """See `Source`."""
        return self._steps

    def batches(
        self,
        global_batch_size: int,
        first_batch: int,
        *,
        seed: int = 0,
        shuffle: bool = False,
        rows: np.ndarray | None = None,
    ) -> tf.data.Dataset:
        """See `Source`. The order is that of the data, whatever `shuffle` is."""
        del seed, shuffle
        size = global_batch_size if rows is None else len(rows)

        @tf.autograph.experimental.do_not_convert
        def finished(batch: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            return weighted(checked_finite(batch), tf.ones([size]))

        @tf.autograph.experimental.do_not_convert
        def own(batch: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            return {name: tf.gather(values, rows) for name, values in batch.items()}

        start = first_batch * global_batch_size
        if self._is_dataset:
            batches = self._examples(start).batch(global_batch_size, drop_remainder=True)
            return (batches if rows is None else batches.map(own)).map(finished)
        # One call of Python for a batch; TensorFlow's own generators take one for each example.
        signature = {
            name: tf.TensorSpec([size, *spec.shape], spec.dtype)
            for name, spec in self._element_spec.items()
        }
        return tf.data.Dataset.from_generator(
            lambda: self._generated_batches(start, global_batch_size, rows),
            output_signature=signature,
        ).map(finished)

    @property
    def _name(self) -> str:
        if isinstance(self._data, tf.data.Dataset):
            return "the tf.data.Dataset"
        return definition_of(self._data)

    def _made(self, start: int) -> Any:
        if isinstance(self._data, tf.data.Dataset):
            return self._data
        return self._data(start=start) if self._takes_start else self._data()

    def _examples(self, start: int) -> tf.data.Dataset:
        """Returns the examples of a data set from number `start` on, without end."""
        dataset = _with_names(self._made(start))
        if not self._takes_start:
            dataset = dataset.repeat().skip(start)
        # A data set that ends would end the training in a way that nobody could explain.
        return dataset.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))

    def _generated(self, start: int) -> Iterator[dict[str, np.ndarray]]:
        number = start if self._takes_start else 0
        while True:
            before = number
            for example in self._made(start):
                if number >= start:
                    where = f"example {number} of {self._name}"
                    features = features_of(example, where)
                    check_fits(features, self._element_spec, where)
                    yield features
                number += 1
            if self._takes_start:
                raise DataError(
                    f"{self._name} ended after {number - start} examples from start = {start}. A "
                    "function with the argument start must return examples without end: repeat "
                    "them within it."
                )
            if number == before:
                raise DataError(_no_examples(self._name))

    def _generated_batches(
        self, start: int, size: int, rows: np.ndarray | None
    ) -> Iterator[dict[str, np.ndarray]]:
        """Yields batches of the examples from number `start` on, or these rows of each batch."""
        examples = self._generated(start)
        while True:
            batch = {
                name: aligned_empty([size, *spec.shape], spec.dtype.as_numpy_dtype)
                for name, spec in self._element_spec.items()
            }
            # A generator may fill the same array anew for each example.
            for row, example in enumerate(itertools.islice(examples, size)):
                for name, values in example.items():
                    batch[name][row, ...] = values
            yield batch if rows is None else {name: each[rows] for name, each in batch.items()}

    def _check_repeats(self) -> None:
        with data_errors():
            first, second = (self._first(start=0) for _ in range(2))
        differing = [not are_same(*pair) for pair in zip(first, second, strict=True)]
        if any(differing):
            raise DataError(
                f"Two reads of {self._name} differ, first in example {differing.index(True)}, so a "
                "run could not be repeated or resumed. Seed what is random. If a tf.data.Dataset "
                "shuffles, give the shuffle a seed, and pass a function that makes the data set "
                "anew, since each read of one object may shuffle in another order."
            )
        if self._takes_start:
            later = _COMPARED // 2
            with data_errors():
                begun = self._first(start=later)
            if not are_same(first[later], begun[0]):
                raise DataError(
                    f"{self._name} returned another example for start = {later} than example "
                    f"{later} from start = 0. The function must begin with example number start."
                )

    def _first(self, start: int) -> list[dict[str, np.ndarray]]:
        """Returns the first examples of a fresh read."""
        if not self._is_dataset:
            return [copied(each) for each in itertools.islice(self._generated(start), _COMPARED)]
        examples = self._examples(start).take(_COMPARED).as_numpy_iterator()
        return [{k: array_of(v) for k, v in example.items()} for example in examples]


def _no_examples(name: str) -> str:
    return f"{name} must yield at least one example, got none. Correct what it reads."


def _with_names(dataset: tf.data.Dataset) -> tf.data.Dataset:
    if isinstance(dataset.element_spec, tuple) and len(dataset.element_spec) in (2, 3):
        return dataset.map(named)
    return dataset


def _arguments(function: Any) -> set[str]:
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return set()
