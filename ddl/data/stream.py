"""Data that can only be read in sequence: a user's tf.data pipeline, generator or PyDataset."""

import collections
import inspect
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from ddl.data.batched import elements_of
from ddl.data.features import check_weight_spec, named
from ddl.data.order import steps_per_epoch
from ddl.data.reader import Reader
from ddl.errors import DataError, check_takes, definition_of

_COMPARED = 32  # examples that are read twice at the start
_SECONDS = 10.0  # between two reports of progress


def stream(data: Any, *, batched: bool | None = None, length: int | None = None) -> "Stream":
    """Takes a pipeline as it is, in its own order: ddl does not shuffle it.

    A Trainer makes it of a `tf.data.Dataset` by itself. Examples are dicts of features, or tuples
    (x, y) or (x, y, weight) as Keras takes them, or batches of such. Batches are taken apart, and put
    together at the global batch size. A pass follows the other; the last batch of each is padded
    with weight 0. Repeated data have no end and no padding.

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
          `on_epoch_begin` and `on_epoch_end` are called once for each pass.
      batched: Whether elements are batches. None: those that an operation of tf.data has batched,
        those whose features have one unknown first dimension, and those of a PyDataset. Pass False
        for windows that `batch` has made, and True for a generator of batches.
      length: Examples of a pass; further ones are not read. None: found out where tf.data or the
        PyDataset tells it.

    Raises:
      DataError: If there are no examples, they are not of one static shape, or fewer than `length`.
    """
    if length is not None and length < 1:
        raise DataError(f"stream.length must be at least 1, got {length}.")
    if isinstance(data, tf.data.Dataset):
        return Stream(Reader("The tf.data.Dataset", data, batched), length)
    if isinstance(data, keras.utils.PyDataset):
        return _of_py_dataset(data, length)
    if not callable(data):
        raise DataError(
            "stream.data must be a tf.data.Dataset, a PyDataset, or a function that returns a data "
            f"set or an iterable, got {type(data).__name__}. Pass the function that makes it."
        )
    takes_epoch = "epoch" in inspect.signature(data).parameters
    what = "stream.data, which may take the argument epoch,"
    check_takes(what, data, (), ("epoch",) if takes_epoch else ())
    make = (lambda epoch: data(epoch=epoch)) if takes_epoch else (lambda epoch: data())
    return Stream(Reader(definition_of(data), make, batched), length)


class Stream:
    """Examples that are read in sequence, pass after pass. `stream` makes it.

    Attributes:
      name: What messages call the data.
      element_spec: Shape and dtype of each feature of one example.
      files: Empty: the files are the user's.
      num_examples: Examples of one pass; None if unknown or infinite.
      is_endless: Whether a pass is known to have no end.
      is_repeatable: Whether two reads of the first examples were the same. Several workers, each of
        which keeps its rows, need that.
      runs_python: Whether Python of the user's reads, which parameter servers' workers cannot run.
    """

    def __init__(self, reader: Reader, length: int | None):
        """Reads the first examples twice.

        Args:
          reader: Makes the passes.
          length: As in `stream`.

        Raises:
          DataError: As `stream`.
        """
        self.name, self.files, self.runs_python = reader.name, (), not reader.is_constant
        self._reader, self._limit = reader, length
        spec, what = self._dense(reader.first).element_spec, f"An element of {self.name}"
        found = elements_of(reader.first, spec, reader.batched, what)
        self._is_batched, self.element_spec, known = found
        self.is_endless = known == tf.data.INFINITE_CARDINALITY and length is None
        self.num_examples = length or (known if known >= 0 else None)
        if 0 <= known < (length or 1):
            raise DataError(
                f"{self.name} must have at least {length or 1:,} examples, got {known:,}. Correct "
                "what it reads, or stream.length."
            )
        check_weight_spec(self.element_spec, self.name)
        label = self.element_spec.get("label")
        if label is not None and label.dtype == tf.string:
            raise DataError(f"Feature 'label' of {self.name} is text. Map it to numbers.")
        reads = tf.data.Dataset.range(1).flat_map(lambda pass_: self._blocks(pass_, _COMPARED))
        first, again = (next(self._read(reads), {}) for _ in range(2))
        if not first:
            raise DataError(f"{self.name} must have at least one example, got none. Correct it.")
        self.is_repeatable = all(_are_same(first[key], again.get(key)) for key in first)
        if not self.is_repeatable:
            logging.warning(
                "Two reads of the first examples of %s differ, so a resumed run reads other "
                "examples than an uninterrupted one. Seed what is random, and pass a function: "
                "ddl.data.stream(lambda epoch: ….shuffle(n, seed=epoch)).",
                self.name,
            )

    @property
    def error(self) -> Exception | None:
        """The error that ended the last read in Python, which TensorFlow reports as a text."""
        return self._reader.error

    @error.setter
    def error(self, error: Exception | None) -> None:
        self._reader.error = error

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
            logging.info("Counting the examples of %s: a pass is read to its end", self.name)
            batches = self._read(self._blocks(0, 1024))
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
            batches = self._blocks(0, global_batch_size)
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

    def _elements(self, number: int | tf.Tensor) -> tf.data.Dataset:
        """Returns one pass, whose number may be a tensor of a graph, as dicts of features."""
        first = self._reader.first
        if self._reader.is_constant:
            return self._dense(first)
        held: collections.deque[tf.data.Dataset] = collections.deque(maxlen=4)

        def made(number: tf.Tensor) -> tf.Tensor:
            held.append(self._reader.dataset(int(number)))  # one that is freed loses its generators
            return tf.data.experimental.to_variant(held[-1])

        variant = tf.py_function(made, [number], tf.variant)
        variant.set_shape([])
        return self._dense(tf.data.experimental.from_variant(variant, first.element_spec))

    def _dense(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        @tf.autograph.experimental.do_not_convert
        def dense(*element: Any) -> dict[str, tf.Tensor]:
            element = element[0] if len(element) == 1 else element
            features = named(element, f"An element of {self.name}")
            for name, value in features.items():
                if isinstance(value, tf.RaggedTensor):
                    features[name] = value.to_tensor(shape=value.shape)
            return features

        return dataset.map(dense)

    def _all_passes(self, first: int, size: int) -> tf.data.Dataset:
        """Returns the batches of all passes, and checks the number of examples of each."""
        zeros = {n: tf.zeros([0, *one.shape], one.dtype) for n, one in self.element_spec.items()}
        end = tf.data.Dataset.from_tensors(zeros)  # a batch without rows marks the end of a pass
        if self._reader.is_constant:
            passes = self._blocks(0, size).concatenate(end).repeat()
        else:
            # Dataset.counter would leak objects.
            passes = tf.data.Dataset.range(first, 2**62).flat_map(
                lambda number: self._blocks(number, size).concatenate(end)
            )
        counted = passes.scan(tf.zeros([], tf.int64), self._counted)
        return counted.filter(lambda batch: _rows_of(batch) > 0)

    @tf.autograph.experimental.do_not_convert
    def _counted(
        self, before: tf.Tensor, batch: dict[str, tf.Tensor]
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        rows, wanted = _rows_of(batch), self.num_examples
        total, is_end = before + rows, tf.equal(rows, 0)
        fits = total > 0
        if wanted is not None:
            fits = tf.where(is_end, tf.equal(total, wanted), total <= wanted)
        message = (
            f"{self.name} must have {wanted or 'at least 1'} examples in each pass, got {{}}. "
            "Correct what it reads, or pass ddl.data.stream(data, length=…)."
        )
        report = tf.cond(
            fits, tf.no_op, lambda: tf.debugging.Assert(False, [tf.strings.format(message, total)])
        )
        with tf.control_dependencies([report]):
            return tf.where(is_end, tf.zeros([], tf.int64), total), batch

    def _skipped(self, batches: tf.data.Dataset, count: int, size: int) -> tf.data.Dataset:
        logging.info("Skipping %s examples of %s", f"{count * size:,}", self.name)

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
    def _finished(
        self, batch: dict[str, tf.Tensor], size: int, kept: np.ndarray
    ) -> dict[str, tf.Tensor]:
        """Pads a batch to `size` rows with weight 0, and keeps some of them."""
        rows = tf.cast(_rows_of(batch), tf.int32)
        weight = batch["weight"] if "weight" in batch else tf.ones([rows])
        batch = {**batch, "weight": tf.cast(weight, tf.float32)}

        def gathered() -> dict[str, tf.Tensor]:
            chosen = {name: tf.gather(values, kept % rows) for name, values in batch.items()}
            return {**chosen, "weight": tf.where(kept < rows, chosen["weight"], 0.0)}

        if np.array_equal(kept, np.arange(size)):  # a full batch is not copied
            batch = tf.cond(tf.equal(rows, size), lambda: batch, gathered)
        else:
            batch = gathered()
        return {n: tf.ensure_shape(v, [len(kept), *v.shape[1:]]) for n, v in batch.items()}

    def _read(self, dataset: tf.data.Dataset) -> Iterator[dict[str, np.ndarray]]:
        try:
            yield from dataset.as_numpy_iterator()
        except tf.errors.OpError as error:
            if isinstance(self.error, DataError):
                raise self.error from None
            raise DataError(f"{self.name} could not be read: {error.message}") from error


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


def _of_py_dataset(data: keras.utils.PyDataset, length: int | None) -> Stream:
    found = Stream(Reader(type(data).__name__, _Epochs(data), True), length)
    if data.num_batches is None:
        found.is_endless = length is None
    elif length is None:
        ends = (named(data[number], found.name) for number in (0, data.num_batches - 1))
        first, last = (len(next(iter(batch.values()))) for batch in ends)
        found.num_examples = first * (data.num_batches - 1) + last
    return found


def _rows_of(batch: Mapping[str, tf.Tensor]) -> tf.Tensor:
    return tf.shape(next(iter(batch.values())), tf.int64)[0]


def _are_same(first: np.ndarray, again: np.ndarray) -> bool:
    return first.shape == again.shape and np.array_equal(
        first, again, equal_nan=first.dtype.kind in "fc"
    )
