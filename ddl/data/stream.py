"""Data that can only be read in sequence: a user's tf.data pipeline, generator or PyDataset."""

import collections
import contextlib
import functools
import inspect
import itertools
import traceback
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from ddl.data.batched import AS_BATCHES, described, elements_of, example_spec
from ddl.data.features import (
    ONE_LENGTH,
    array_of,
    check_weight_spec,
    checked_weight,
    named,
    tensorflow_dtype,
)
from ddl.data.order import steps_per_epoch
from ddl.data.source import are_same, first_line
from ddl.errors import DataError, check_takes, definition_of

_COMPARED = 32  # examples that are read twice at the start
_AT_ONCE = 32  # examples that one call of Python reads: tf.data's own batches take one for each
_SECONDS = 10.0  # between two reports of progress


def stream(data: Any, *, batched: bool | None = None, length: int | None = None) -> "Stream":
    """Takes a pipeline as it is, in its own order: ddl does not shuffle it.

    A Trainer makes it of a `tf.data.Dataset` on its own. Examples are dicts of features, or tuples
    (x, y) or (x, y, weight) as Keras takes them, or batches of such. Batches are taken apart and
    put together at the global batch size. One pass follows another; the last batch of each is
    padded with weight 0. Repeated data have no end and no padding.

    A resumed run reads and drops the examples that came before, and every worker reads all examples
    and keeps its rows. So two reads must give the same examples. The first ones are read twice, and
    a note is logged if they differ. To shuffle, pass a function of the epoch:

        ddl.data.stream(lambda epoch: files().shuffle(10_000, seed=epoch))

    Args:
      data: One of
        - a `tf.data.Dataset`;
        - a function that returns a `tf.data.Dataset` or an iterable, such as a generator function,
          without arguments or with the argument `epoch`, the number of the pass from 0 on. It is
          called in Python for each pass, and some times more at the start;
        - a `keras.utils.PyDataset`, whose batches are read in order by one thread;
          `on_epoch_begin` and `on_epoch_end` are called once for each pass. Where epochs are
          asked for, one pass is read to count its examples.
      batched: Whether elements are batches. None: those that an operation of tf.data has batched,
        those whose features have one unknown first dimension, and those of a PyDataset. Pass False
        for windows that `batch` has made, and True for a generator of batches.
      length: Examples of a pass; further ones are not read. None: found out where tf.data tells it.

    Raises:
      DataError: If there are no examples, they are not of one static shape, or fewer than `length`.
    """
    if length is not None and length < 1:
        raise DataError(f"stream.length must be at least 1, got {length}.")
    if isinstance(data, tf.data.Dataset):
        return Stream("The tf.data.Dataset", data, batched, length)
    if isinstance(data, keras.utils.PyDataset):
        found = Stream(type(data).__name__, _Epochs(data), True, length)
        found.is_endless = data.num_batches is None and length is None
        return found
    if not callable(data):
        raise DataError(
            "stream.data must be a tf.data.Dataset, a PyDataset, or a function that returns a data "
            f"set or an iterable, got {type(data).__name__}. Pass the function that makes it."
        )
    taken = {"epoch"} & inspect.signature(data).parameters.keys()
    check_takes("stream.data, which may take the argument epoch,", data, (), tuple(taken))
    return Stream(
        definition_of(data), lambda epoch: data(**dict.fromkeys(taken, epoch)), batched, length
    )


class Stream:
    """Examples that are read in sequence, pass after pass. `stream` makes it.

    Attributes:
      name: Name of the data in messages.
      element_spec: Shape and dtype of each feature of one example.
      files: Empty: the files are the user's.
      num_examples: Examples of one pass; None if unknown or infinite.
      is_endless: Whether a pass is known to have no end.
      is_repeatable: Whether two reads of the first examples were the same. Several workers, each of
        which keeps its rows, need that.
      runs_python: Whether Python of the user's reads, which parameter servers' workers cannot run.
      error: The error that ended the last read in Python, which TensorFlow reports as a text.
    """

    def __init__(self, name: str, data: Any, batched: bool | None, length: int | None):
        """Reads the first examples twice.

        Args:
          name: Name of the data in messages.
          data: A `tf.data.Dataset`; or a function of the number of a pass, that returns one or an
            iterable.
          batched: As in `stream`.
          length: As in `stream`.

        Raises:
          DataError: As `stream`.
        """
        self.name, self.files = name, ()
        self.runs_python = not isinstance(data, tf.data.Dataset)
        self.error: Exception | None = None
        self.element_spec: dict[str, tf.TensorSpec] = {}
        self._data, self._limit = data, length
        self._yields_batches, self._is_batched = bool(batched), batched
        self._first: Any = None
        self._weight_rank: int | None = None
        self._first = self._dataset(0)
        spec = self._first.map(self._named).element_spec
        found = elements_of(self._first, spec, self._is_batched, f"An element of {name}")
        self._is_batched, spec, known = found
        self._weight_rank, self.element_spec = int(self._is_batched), named(spec, name)
        check_weight_spec(self.element_spec, name)
        self.is_endless = known == tf.data.INFINITE_CARDINALITY and length is None
        self.num_examples = length or (known if known >= 0 else None)
        examples = self._first_pass(_COMPARED)
        first, again = (next(self._read(examples), {}) for _ in range(2))
        if not first or 0 <= known < (length or 1):
            raise DataError(
                f"{name} must have at least {length or 1:,} examples, got {max(known, 0):,}. "
                "Correct what it reads, or stream.length."
            )
        self.is_repeatable = are_same(first, again)
        if not self.is_repeatable:
            logging.warning(
                "Two reads of the first examples of %s differ, so a resumed run reads other "
                "examples than an uninterrupted one. Seed what is random, and pass a function: "
                "ddl.data.stream(lambda epoch: ….shuffle(n, seed=epoch)).",
                name,
            )

    def undecodable(self) -> DataError | None:
        """Returns None: TensorFlow's error tells all that is known of a stream."""
        return None

    def count(self) -> int:
        """Returns the examples of one pass; reads it to its end if their number is unknown.

        Raises:
          DataError: If the data have no end, or cannot be read.
        """
        if self.is_endless:
            raise DataError(
                f"{self.name} has no end, and so no epochs. Set TRAIN_STEPS, or the number of "
                "batches of an evaluation; or pass ddl.data.stream(data, length=…)."
            )
        if self.num_examples is None:
            logging.warning("Counting the examples of %s: a pass is read to its end", self.name)
            batches = self._read(self._first_pass(1024))
            self.num_examples = sum(len(next(iter(batch.values()))) for batch in batches)
        return self.num_examples

    def batches(
        self, global_batch_size: int, first_batch: int, rows: np.ndarray | None = None
    ) -> tf.data.Dataset:
        """Builds the batches from number `first_batch` on, without end.

        Args:
          global_batch_size: B.
          first_batch: Batch number, counted from 0 over the whole run.
          rows: Rows of each batch to keep, in this order, int [b]; None: all.

        Returns:
          A data set of infinite cardinality: dicts of features [b, …], and "weight", float32 [b].
          The last batch of a pass repeats rows with weight 0. Reading fails, with the message of a
          DataError, if a pass has fewer or more examples than `num_examples`, or none.
        """
        first_pass, skipped = 0, first_batch
        if self.num_examples is not None:
            steps = steps_per_epoch(self.num_examples, global_batch_size)
            first_pass, skipped = divmod(first_batch, steps)
        if self.is_endless:
            batches = self._first_pass(global_batch_size)
        else:
            batches = self._all_passes(first_pass, global_batch_size)
        if skipped:
            batches = self._skipped(batches, skipped, global_batch_size)
        kept = np.arange(global_batch_size) if rows is None else np.asarray(rows)
        batches = batches.map(lambda batch: self._finished(batch, global_batch_size, kept))
        options = tf.data.Options()
        options.deterministic = True
        infinite = tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
        return batches.apply(infinite).with_options(options)

    def _blocks(self, number: int | tf.Tensor, size: int) -> tf.data.Dataset:
        """Returns one pass in batches of `size`, of which the last may be shorter."""
        elements, is_batched = self._elements(number), self._is_batched
        if self._limit is not None:
            elements = (elements.unbatch() if is_batched else elements).take(self._limit)
            is_batched = False
        join = elements.rebatch if is_batched else elements.batch
        return join(size, drop_remainder=self.is_endless)

    def _first_pass(self, size: int) -> tf.data.Dataset:
        if not self.runs_python:
            return self._blocks(0, size)
        # In a graph, which keeps the functions that Python runs.
        return tf.data.Dataset.range(1).flat_map(lambda number: self._blocks(number, size))

    def _elements(self, number: int | tf.Tensor) -> tf.data.Dataset:
        """Returns one pass, whose number may be a tensor of a graph, as dicts of features."""
        if not self.runs_python:
            return self._first.map(self._named)
        held: collections.deque[tf.data.Dataset] = collections.deque(maxlen=4)

        def made(number: tf.Tensor) -> tf.Tensor:
            held.append(self._dataset(int(number)))  # one that is freed loses its generators
            return tf.data.experimental.to_variant(held[-1])

        variant = tf.py_function(made, [number], tf.variant)
        variant.set_shape([])
        dataset = tf.data.experimental.from_variant(variant, self._first.element_spec)
        return dataset.map(self._named)

    @tf.autograph.experimental.do_not_convert
    def _named(self, *element: Any) -> dict[str, tf.Tensor]:
        given = element[0] if len(element) == 1 else element
        features = named(given, f"An element of {self.name}", self._weight_rank)
        ragged = {n: one for n, one in features.items() if isinstance(one, tf.RaggedTensor)}
        return features | {n: one.to_tensor(shape=one.shape) for n, one in ragged.items()}

    def _all_passes(self, first: int, size: int) -> tf.data.Dataset:
        """Returns the batches of all passes, and checks the number of examples of each."""
        zeros = {n: tf.zeros([0, *one.shape], one.dtype) for n, one in self.element_spec.items()}
        end = tf.data.Dataset.from_tensors(zeros)  # a batch without rows marks the end of a pass
        if not self.runs_python:
            passes = self._first_pass(size).concatenate(end).repeat()
        else:
            # Dataset.counter would leak objects.
            passes = tf.data.Dataset.range(first, 2**62).flat_map(
                lambda number: self._blocks(number, size).concatenate(end)
            )
        counted = passes.scan(tf.zeros([], tf.int64), self._counted)
        return counted.filter(lambda batch: _rows_of(batch) > 0)

    @tf.autograph.experimental.do_not_convert
    def _counted(self, before: tf.Tensor, batch: Any) -> tuple[tf.Tensor, Any]:
        rows, wanted = _rows_of(batch), self.num_examples
        total, is_end = before + rows, tf.equal(rows, 0)
        fits = total > 0
        if wanted is not None:
            fits = tf.where(is_end, tf.equal(total, wanted), total <= wanted)
        message = tf.strings.format(
            f"{self.name} must have {wanted or 'at least 1'} examples in each pass, got {{}}. "
            "Correct what it reads, or pass ddl.data.stream(data, length=…).",
            total,
        )
        with tf.control_dependencies([tf.debugging.Assert(fits, [message])]):
            return tf.where(is_end, tf.zeros([], tf.int64), total), batch

    def _skipped(self, batches: tf.data.Dataset, count: int, size: int) -> tf.data.Dataset:
        logging.warning("Skipping %s examples of %s", f"{count * size:,}", self.name)

        @tf.autograph.experimental.do_not_convert
        def told(last: tf.Tensor, numbered: Any) -> tuple[tf.Tensor, Any]:
            now = tf.timestamp()
            is_due = (numbered[0] < count) & (now > last + _SECONDS)
            texts = ("Skipped", numbered[0] * size, "of", count * size, "examples of", self.name)
            with tf.control_dependencies([tf.cond(is_due, lambda: tf.print(*texts), tf.no_op)]):
                return tf.where(is_due, now, last), numbered

        numbered = batches.enumerate().scan(tf.timestamp(), told)
        return numbered.skip(count).map(lambda number, batch: batch)

    @tf.autograph.experimental.do_not_convert
    def _finished(self, batch: Any, size: int, kept: np.ndarray) -> dict[str, tf.Tensor]:
        """Pads a batch to `size` rows with weight 0, and keeps some of them."""
        rows = tf.cast(_rows_of(batch), tf.int32)
        batch = {"weight": tf.ones([rows]), **batch}
        batch["weight"] = checked_weight(batch["weight"])

        def gathered() -> dict[str, tf.Tensor]:
            chosen = {name: tf.gather(values, kept % rows) for name, values in batch.items()}
            return {**chosen, "weight": tf.where(kept < rows, chosen["weight"], 0.0)}

        is_whole = tf.equal(rows, size) & np.array_equal(kept, np.arange(size))
        found = tf.cond(is_whole, lambda: batch, gathered)  # a whole batch is not copied
        return {n: tf.ensure_shape(v, [len(kept), *v.shape[1:]]) for n, v in found.items()}

    def _read(self, dataset: tf.data.Dataset) -> Iterator[dict[str, np.ndarray]]:
        try:
            yield from dataset.as_numpy_iterator()
        except tf.errors.OpError as error:
            if isinstance(self.error, DataError):
                raise self.error from None
            raise DataError(f"{self.name} could not be read: {first_line(error)}.") from error

    def _dataset(self, number: int) -> tf.data.Dataset:
        """Returns the user's data set of a pass; of an iterable, a data set of batches."""
        with self._data_errors():
            made = self._data(number) if self.runs_python else self._data
            if not isinstance(made, tf.data.Dataset):
                made = self._from_iterable(made)
            if self._first is not None and made.element_spec != self._first.element_spec:
                raise DataError(
                    f"{self.name} must return the features of epoch 0, {self._first.element_spec}, "
                    f"in each epoch, got {made.element_spec} in epoch {number}."
                )
            return made

    def _from_iterable(self, iterable: Any) -> tf.data.Dataset:
        elements = itertools.starmap(self._checked, enumerate(iterable))
        if self._first is None and next(elements, None) is None:
            raise DataError(f"{self.name} must have at least 1 example, got 0. Correct it.")
        self._is_batched = True
        spec = {n: tf.TensorSpec([None, *s.shape], s.dtype) for n, s in self.element_spec.items()}
        batches = functools.partial(self._batches, elements)
        return tf.data.Dataset.from_generator(batches, output_signature=spec)

    def _batches(self, elements: Iterator[dict[str, np.ndarray]]) -> Iterator[dict[str, Any]]:
        with self._data_errors():
            if self._yields_batches:
                yield from elements
            while block := list(itertools.islice(elements, _AT_ONCE)):
                yield {name: np.stack([one[name] for one in block]) for name in self.element_spec}

    def _checked(self, number: int, element: Any) -> dict[str, np.ndarray]:
        where = f"Element {number:,} of {self.name}"
        # Copies: a generator may fill its arrays anew.
        given = named(element, where, int(self._yields_batches))
        features = {n: np.array(array_of(value, n)) for n, value in given.items()}
        spec = {n: tf.TensorSpec(v.shape, tensorflow_dtype(n, v)) for n, v in features.items()}
        spec = example_spec(spec, self._yields_batches, where)
        self.element_spec = self.element_spec or spec
        if spec != self.element_spec:
            raise DataError(
                f"{where} must be as element 0, {described(self.element_spec)}, got "
                f"{described(spec)}. {ONE_LENGTH if self._yields_batches else AS_BATCHES}"
            )
        return features

    @contextlib.contextmanager
    def _data_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            line = traceback.extract_tb(error.__traceback__)[-1]
            reason = f"{type(error).__name__}: {error} ({line.filename}:{line.lineno})"
            known = DataError(f"{self.name} could not be read: {reason}. Correct it.")
            self.error = error if isinstance(error, DataError) else known
            raise self.error from None


class _Epochs:
    """The batches of a PyDataset in an epoch, which its hooks have to reach first."""

    def __init__(self, data: keras.utils.PyDataset):
        self._data, self._begun = data, 0

    def __call__(self, epoch: int) -> Iterator[Any]:
        while self._begun <= epoch:
            if self._begun:
                self._data.on_epoch_end()
            self._data.on_epoch_begin()
            self._begun += 1
        count = self._data.num_batches
        return map(self._data.__getitem__, itertools.count() if count is None else range(count))


def _rows_of(batch: Any) -> tf.Tensor:
    return tf.shape(next(iter(batch.values())), tf.int64)[0]
