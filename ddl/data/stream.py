"""Data that can only be read in sequence: a user's tf.data pipeline, generator or PyDataset."""

import collections
import contextlib
import functools
import inspect
import itertools
import time
import traceback
import weakref
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from ddl.data import features
from ddl.data.order import steps_per_epoch
from ddl.data.source import are_same, first_line
from ddl.errors import DataError, check_takes, definition_of, repeats

# Parts of private class names of tf.data: operations that turn batches into other elements. Nothing
# but the operations tells a batch of 50 images from one example of 50 images.
_MAKE_OTHERS = ("Unbatch", "FlatMap", "Interleave", "Window")

_COMPARED = 32  # examples that are read twice at the start
_AT_ONCE = 32  # examples that one call of Python reads: tf.data's own batches take one for each
_SECONDS = 10.0  # between two reports of progress


def stream(data: Any, *, batched: bool | None = None) -> "Stream":
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
        - a `keras.utils.PyDataset`, whose batches are read by as many threads as it has `workers`;
          `on_epoch_begin` and `on_epoch_end` are called once for each pass. Where epochs are
          asked for, one pass is read to count its examples.
      batched: Whether elements are batches. None: those that an operation of tf.data has batched,
        those whose features have one unknown first dimension, and those of a PyDataset. Pass False
        for windows that `batch` has made, and True for a generator of batches.

    Raises:
      ConfigError: If a function takes other arguments than `epoch`.
      DataError: If there are no examples, or they are not of one static shape.
    """
    if isinstance(data, tf.data.Dataset):
        return Stream("The tf.data.Dataset", data, batched)
    if isinstance(data, keras.utils.PyDataset):
        found = Stream(type(data).__name__, _Epochs(data), True)
        found.is_endless = data.num_batches is None
        return found
    if not callable(data):
        raise DataError(
            "stream.data must be a tf.data.Dataset, a PyDataset, or a function that returns a data "
            f"set or an iterable, got {type(data).__name__}. Pass the function that makes it."
        )
    taken = {"epoch"} & inspect.signature(data).parameters.keys()
    check_takes("stream.data, which may take one argument, epoch,", data, (), tuple(taken))
    return Stream(definition_of(data), lambda epoch: data(**dict.fromkeys(taken, epoch)), batched)


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
      error: The error that ended the last read in Python, which TensorFlow reports as a text.
    """

    def __init__(self, name: str, data: Any, batched: bool | None):
        """Reads the first examples twice.

        Args:
          name: Name of the data in messages.
          data: A `tf.data.Dataset`; or a function of the number of a pass, that returns one or an
            iterable.
          batched: As in `stream`.

        Raises:
          DataError: As `stream`.
        """
        self.name, self.files = name, ()
        self._runs_python = not isinstance(data, tf.data.Dataset)
        self.error: Exception | None = None
        self.element_spec: dict[str, tf.TensorSpec] = {}
        self._data, self._yields_batches, self._is_batched = data, bool(batched), batched
        self._alike = features.Alike(self._yields_batches)
        self._first: Any = None
        self._weight_rank: int | None = None
        self._first = self._dataset(0)
        known = self._find_elements()
        features.check_weight_spec(self.element_spec, name)
        self.is_endless = known == tf.data.INFINITE_CARDINALITY
        self.num_examples = known if known >= 0 else None
        examples = self._passes(_COMPARED, 0, 1)
        first, again = (next(self._read(examples), {}) for _ in range(2))
        if not first or known == 0:
            raise DataError(f"{name} must have at least 1 example, got 0. Correct what it reads.")
        self.is_repeatable = are_same(first, again)
        if not self.is_repeatable:
            logging.warning(
                f"{name}: two reads of the first examples differ. Unless all its draws have seeds, "
                "a resumed run reads others: ddl.data.stream(lambda epoch: ….shuffle(n, "
                "seed=epoch)). A seeded shuffle also takes reshuffle_each_iteration=False."
            )

    def count(self) -> int:
        """Returns the examples of one pass; reads it to its end if their number is unknown.

        Raises:
          DataError: If the data have no end, or cannot be read.
        """
        if self.is_endless:
            raise DataError(
                f"{self.name} has no end. Train for a number of steps (macro TRAIN_STEPS) in place "
                "of epochs; end evaluation data, or a pass, by .take(…)."
            )
        if self.num_examples is None:
            count, told = 0, time.monotonic()
            for batch in self._read(self._passes(1024, 0, 1)):
                count += len(next(iter(batch.values())))
                if time.monotonic() > told + _SECONDS:
                    told = time.monotonic()
                    logging.warning(f"Counting {self.name}: {count:,}. Endless? Set train_steps.")
            self.num_examples = count
        return self.num_examples

    def batches(self, global_batch_size: int, first_batch: int) -> tf.data.Dataset:
        """Builds the batches from number `first_batch` on, without end.

        Args:
          global_batch_size: B.
          first_batch: Batch number, counted from 0 over the whole run.

        Returns:
          A data set of infinite cardinality: dicts of features [B, …], and "weight", float32 [B].
          The last batch of a pass repeats rows with weight 0. Reading fails, with the message of a
          DataError, if a pass has fewer or more examples than `num_examples`, or none.
        """
        steps = steps_per_epoch(self.num_examples, global_batch_size) if self.num_examples else 0
        first_pass, skipped = divmod(first_batch, steps) if steps else (0, first_batch)
        batches = self._passes(global_batch_size, first_pass)
        if skipped:
            batches = self._skipped(batches, skipped, global_batch_size)
        infinite = tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
        return batches.apply(infinite)

    def _find_elements(self) -> int:
        """Finds out whether elements are batches; returns the examples of a pass.

        Returns:
          The number, tf.data.INFINITE_CARDINALITY or tf.data.UNKNOWN_CARDINALITY.
        """
        spec, what = self._first.map(self._named).element_spec, f"An element of {self.name}"
        rows, count = features.rows_in(spec), int(self._first.cardinality())
        operation = _batch_operation(self._first)
        made = 0 if operation is None else features.rows_in(operation.element_spec)
        if self._is_batched is None:
            if rows is None and operation is None and all(s.shape.rank == 1 for s in spec.values()):
                raise DataError(
                    f"{what} may be a batch, or vary: {features.described(spec)}. Pass "
                    "ddl.data.stream(data, batched=True) if it is a batch, else batched=False."
                )
            # Another number of rows than the operation made is no longer its batch.
            self._is_batched = rows is None or (rows > 0 and made in (None, rows))
        example = features.checked_spec(spec, what, self._is_batched)
        self.element_spec = features.named(example, what)
        self._weight_rank = 1
        if not self._is_batched or count < 0:
            return count
        if rows is not None:
            return count * rows
        # The last batch may be shorter. Operations that change the number of batches, or batch
        # batches, hide that of examples.
        if operation is not None and int(operation.cardinality()) == count:
            (examples,) = operation._inputs()
            if _batch_operation(examples) is None:
                return int(examples.cardinality())
        return tf.data.UNKNOWN_CARDINALITY

    def _passes(self, size: int, first: int, count: int | None = None) -> tf.data.Dataset:
        """Returns passes in batches of `size`; if `count` is given, as they are, else finished.

        TensorFlow keeps a function of Python for good, so it only gets a weak reference to the
        reader of the passes; the data set keeps the reader.

        Args:
          size: Examples of a batch.
          first: Number of the first pass.
          count: Number of passes; None: without end, with a check of the examples of each.
        """
        held: collections.deque[Any] = collections.deque(maxlen=4)

        def read(number: tf.Tensor) -> tf.Tensor:
            made = self._dataset(int(number))
            if not held or held[-1][0] is not made:
                # The deque keeps the data sets: one that is freed loses its generators.
                held.append((made, blocks := batched(made), _optimized(blocks)))
            return held[-1][-1]

        found = weakref.ref(read)

        @tf.autograph.experimental.do_not_convert
        def passed(number: tf.Tensor) -> tf.data.Dataset:
            # If the data set has been dropped, nobody waits for the error.
            variant = tf.py_function(lambda n: found()(n), [number], tf.variant)  # type: ignore[misc]
            variant.set_shape([])
            return tf.data.experimental.from_variant(variant, spec)

        def batched(elements: tf.data.Dataset) -> tf.data.Dataset:
            if any(type(s) is not tf.TensorSpec for s in tf.nest.flatten(elements.element_spec)):
                elements = elements.map(self._named)  # ragged ones become dense
            batch = elements.rebatch if self._is_batched else elements.batch
            blocks = batch(size, drop_remainder=self.is_endless)
            if count is not None or self.is_endless:
                return blocks
            # A batch without rows marks the end of a pass.
            end = tf.nest.map_structure(
                lambda one: tf.zeros([0, *one.shape[1:]], one.dtype), blocks.element_spec
            )
            return blocks.concatenate(tf.data.Dataset.from_tensors(end))

        spec = batched(self._first).element_spec
        if self._runs_python:
            # Dataset.counter would leak objects.
            end = 2**62 if count is None else first + count
            passes = tf.data.Dataset.range(first, end).flat_map(passed)
        else:
            passes = batched(self._first).repeat(count)
        if count is None:
            # One function for each batch: tf.data forwards arguments without a call.
            finished = passes.scan(tf.zeros([], tf.int64), functools.partial(self._finished, size))
            passes = finished.filter(lambda has_rows, _: has_rows).map(lambda _, batch: batch)
        else:
            passes = passes.map(self._named)
        passes._ddl_reader = read
        return passes

    @tf.autograph.experimental.do_not_convert
    def _named(self, *element: Any) -> dict[str, tf.Tensor]:
        what = f"An element of {self.name}"
        given = element[0] if len(element) == 1 else element
        example = features.named(given, what, self._weight_rank)
        ragged = {n: one for n, one in example.items() if isinstance(one, tf.RaggedTensor)}
        return example | {n: _dense(one) for n, one in ragged.items()}

    @tf.autograph.experimental.do_not_convert
    def _finished(self, size: int, before: tf.Tensor, element: Any) -> tuple[tf.Tensor, Any]:
        """Pads a batch to `size` rows, which repeat its own with weight 0.

        Returns:
          Examples of the pass until now; and whether the batch has rows, and the batch.
        """
        batch, wanted = self._named(element), self.num_examples
        rows = tf.shape(next(iter(batch.values())))[0]
        total, is_end = before + tf.cast(rows, tf.int64), tf.equal(rows, 0)
        text = f"{self.name} must have {wanted or 'at least 1'} examples in each pass, got {{}}."
        fits = total > 0
        if wanted is not None:
            fits = tf.where(is_end, tf.equal(total, wanted), total <= wanted)
            text += " Where a map changes the rows of batches, end with .unbatch()."
        own = batch.get("weight")
        batch["weight"] = tf.ones([rows]) if own is None else features.checked_weight(own)

        def repeated() -> dict[str, tf.Tensor]:
            # The end of a pass has no rows.
            places, one = tf.range(size), {n: v.shape[1:] for n, v in batch.items()}
            more = {n: tf.concat([v, tf.zeros([1, *one[n]], v.dtype)], 0) for n, v in batch.items()}
            found = {n: tf.gather(v, places % tf.maximum(rows, 1)) for n, v in more.items()}
            return {**found, "weight": tf.where(places < rows, found["weight"], 0.0)}

        found = tf.cond(rows < size, repeated, lambda: batch)  # a whole batch is not copied
        found = {n: tf.ensure_shape(v, [size, *v.shape[1:]]) for n, v in found.items()}
        with tf.control_dependencies([tf.debugging.Assert(fits, [tf.strings.format(text, total)])]):
            return tf.where(is_end, tf.zeros([], tf.int64), total), (~is_end, found)

    def _skipped(self, batches: tf.data.Dataset, count: int, size: int) -> tf.data.Dataset:
        logging.warning("Skipping %s examples of %s", f"{count * size:,}", self.name)

        @tf.autograph.experimental.do_not_convert
        def told(last: tf.Tensor, numbered: Any) -> tuple[tf.Tensor, Any]:
            now, texts = tf.timestamp(), ("Skipped", numbered[0] * size, "of", count * size)
            is_due = (numbered[0] < count) & (now > last + _SECONDS)
            told_of = tf.cond(is_due, lambda: tf.print(*texts, "examples of", self.name), tf.no_op)
            with tf.control_dependencies([told_of]):
                return tf.where(is_due, now, last), numbered[1]

        return batches.enumerate().scan(tf.timestamp(), told).skip(count)

    def _read(self, dataset: tf.data.Dataset) -> Iterator[dict[str, np.ndarray]]:
        try:
            yield from dataset.as_numpy_iterator()
        except tf.errors.OpError as error:
            if self.error is not None:
                raise self.error from self.error.__cause__
            raise DataError(f"{self.name} could not be read: {first_line(error)}.") from error

    def _dataset(self, number: int) -> tf.data.Dataset:
        """Returns the user's data set of a pass; of an iterable, a data set of batches."""
        with self._data_errors():
            made = self._data(number) if self._runs_python else self._data
            if isinstance(made, keras.utils.PyDataset):
                made = self._from_batches(made)
            elif not isinstance(made, tf.data.Dataset):
                made = self._from_iterable(made)
            if self._first is not None and made.element_spec != self._first.element_spec:
                raise DataError(
                    f"{self.name} must return the features of epoch 0, {self._first.element_spec}, "
                    f"in each epoch, got {made.element_spec} in epoch {number}."
                )
            return made

    def _from_iterable(self, iterable: Any) -> tf.data.Dataset:
        checked = itertools.starmap(self._checked, enumerate(iterable))
        # Copies: a generator may fill its arrays anew.
        elements = ({n: np.array(x) for n, x in one.items()} for one in checked)
        if self._first is None and next(elements, None) is None:
            raise DataError(f"{self.name} must have at least 1 example, got 0. Correct it.")
        shares = len(self._alike.spec) > 1 and (features.rows_in(self._alike.spec) or 0) > 1
        if self._is_batched is None and shares:
            text = "%s: an element is one example, %s. If not, ddl.data.stream(…, batched=True)."
            logging.warning(text, self.name, features.described(self._alike.spec))
        self._is_batched = True
        spec = {n: tf.TensorSpec([None, *s.shape], s.dtype) for n, s in self._alike.spec.items()}
        batches = self._batches(elements)
        weak = weakref.ref(batches)  # as in `_passes`
        dataset = tf.data.Dataset.from_generator(lambda: weak(), output_signature=spec)
        dataset._ddl_reader = batches
        return dataset

    def _from_batches(self, batches: keras.utils.PyDataset) -> tf.data.Dataset:
        """Returns a data set that reads batches by their numbers, by the PyDataset's workers."""

        def read(number: np.ndarray) -> list[np.ndarray]:
            with self._data_errors():
                batch = self._checked(int(number), batches[int(number)])
                return [np.array(batch[name]) for name in self._alike.spec]  # may be refilled

        if self._first is None:
            self._checked(0, batches[0])
        elif self._first.cardinality() == batches.num_batches:
            return self._first  # made anew, it would be traced anew
        spec, weak = dict(self._alike.spec), weakref.ref(read)  # as in `_passes`

        @tf.autograph.experimental.do_not_convert
        def read_batch(number: tf.Tensor) -> dict[str, tf.Tensor]:
            dtypes = [one.dtype for one in spec.values()]
            columns = tf.numpy_function(lambda n: weak()(n), [number], dtypes)  # type: ignore[misc]
            pairs = zip(columns, spec.items(), strict=True)
            return {name: tf.ensure_shape(x, [None, *one.shape]) for x, (name, one) in pairs}

        numbers, workers = tf.data.Dataset.range(batches.num_batches), max(1, batches.workers)
        made = numbers.map(read_batch, num_parallel_calls=workers, deterministic=True)
        made._ddl_reader = read
        return made

    def _batches(self, elements: Iterator[dict[str, np.ndarray]]) -> Iterator[dict[str, Any]]:
        with self._data_errors():
            if self._yields_batches:
                yield from elements
            while block := list(itertools.islice(elements, _AT_ONCE)):
                yield {name: np.stack([one[name] for one in block]) for name in self._alike.spec}

    def _checked(self, number: int, element: Any) -> dict[str, np.ndarray]:
        return self._alike.arrays(element, f"Element {number:,} of {self.name}")

    @contextlib.contextmanager
    def _data_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            line = traceback.extract_tb(error.__traceback__)[-1]
            reason = f"{type(error).__name__}: {error} ({line.filename}:{line.lineno})"
            known = DataError(f"{self.name} could not be read: {reason}. Correct it.")
            # A restart may not meet the error of a disk or a network again.
            self.error = error if isinstance(error, DataError) or not repeats(error) else known
            raise self.error from None


class _Epochs:
    """A PyDataset in an epoch, which its hooks reach first; an iterator if it has no end."""

    def __init__(self, data: keras.utils.PyDataset):
        self._data, self._begun = data, 0

    def __call__(self, epoch: int) -> Any:
        while self._begun <= epoch:
            if self._begun:
                self._data.on_epoch_end()
            self._data.on_epoch_begin()
            self._begun += 1
        is_endless = self._data.num_batches is None
        return map(self._data.__getitem__, itertools.count()) if is_endless else self._data


def _dense(ragged: tf.RaggedTensor) -> tf.Tensor:
    """Pads to the static shape, which longer rows do not fit: `to_tensor` would cut them."""
    size = tf.maximum(ragged.bounding_shape(), [n or 0 for n in ragged.shape])
    return tf.ensure_shape(ragged.to_tensor(shape=size), ragged.shape)


def _optimized(dataset: tf.data.Dataset) -> tf.Tensor:
    """Returns the variant of batches after the rewrites that TensorFlow makes for an iterator.

    It makes none inside of a flat_map.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    specs = tf.nest.flatten(dataset.element_spec)
    return tf.raw_ops.FinalizeDataset(
        input_dataset=tf.data.experimental.to_variant(dataset.with_options(options)),
        output_types=[spec.dtype for spec in specs],
        output_shapes=[spec.shape for spec in specs],
    )


def _batch_operation(dataset: tf.data.Dataset) -> tf.data.Dataset | None:
    """Returns the last operation of a pipeline that made batches of its elements, if any."""
    name = type(dataset).__name__
    # A choice among data sets keeps their elements whole, unlike other interleaves.
    is_choice = "DirectedInterleave" in name
    if not is_choice and any(other in name for other in _MAKE_OTHERS):
        return None
    if "batch" in name.lower():
        return dataset
    inputs = dataset._data_inputs if is_choice else dataset._inputs()
    return next((one for one in map(_batch_operation, inputs) if one is not None), None)
