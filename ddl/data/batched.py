"""Batches and shuffles of a `tf.data.Dataset`, which only its operations reveal.

A batch of static size looks like one large example: a data set of 1,000 images in batches of 50
would train on 20 examples of 50 images each.
"""

import weakref
from typing import Any, NamedTuple

import tensorflow as tf
from absl import logging

from ddl.errors import DataError

# These operations turn batches into other elements. The names are parts of private Python class
# names of tf.data; tests/data/test_batched.py checks them.
_MAKE_OTHER_ELEMENTS = ("Unbatch", "FlatMap", "Interleave", "Window")

_MOST_COPIED = 1 << 28
"""Bytes of tensors in memory that tf.data's optimizer may copy."""

# These operations yield a batch for each batch of their input.
_KEEP_BATCHES = ("Map", "Prefetch", "Cache", "Shuffle", "Options", "AssertCardinality")

# These operations batch single examples; `rebatch`, for one, batches batches.
_OF_EXAMPLES = ("_BatchDataset", "_ParallelBatchDataset", "_PaddedBatchDataset")


class _Batches(NamedTuple):
    """The batches that a data set yields.

    Attributes:
      operation: The operation that made them.
      size: Rows of a batch; None if the last batch may be shorter.
    """

    operation: tf.data.Dataset
    size: int | None

    @property
    def rows(self) -> int | str:
        """The rows of a full batch, for errors."""
        return self.size or _batch_size(self.operation) or "n"


def check_not_batched(dataset: tf.data.Dataset, windows: bool = False) -> None:
    """Checks that the elements are single examples, or else windows of one size.

    Elements count as batches of n if `batch` or a variant of it made them and every feature still
    has n as its first dimension, whatever `map`, `shuffle` or `repeat` followed. Windows that a
    `map` has split into inputs and targets therefore pass. A `batch` inside a `flat_map` is not
    detected.

    Args:
      dataset: A data set whose elements are dicts of features.
      windows: Whether examples may be batches, of static size.

    Raises:
      DataError: If the elements are batches, or windows of which the last may be shorter.
    """
    found = _batches(dataset, windows)
    if found is None or windows:
        return
    rows = found.rows
    raise DataError(
        f"The tf.data.Dataset must yield single examples, but it yields batches of {rows} rows, "
        f"made by {_name(found.operation)}. Remove .batch(…) or append .unbatch(). If an example "
        f"consists of {rows} rows, such as a window of a series, write batch({rows}, "
        "drop_remainder=True) and pass windows=True: StreamSource(dataset, windows=True)."
    )


def single_examples(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the rows of a batched data set, or an unbatched data set itself.

    The result has a known cardinality. Reading it fails if the number of rows is another one.

    Raises:
      DataError: If the number of rows is unknown or infinite; or if the examples are windows of
        which the last may be shorter.
    """
    found = _batches(dataset)
    if found is None:
        return dataset
    if found.size is None:
        number, rows = _number_of_rows(dataset, found.operation), _limited(dataset, found)
    else:
        warn_once(
            dataset,
            f"The batches of {found.size} rows, made by {_name(found.operation)}, are split into "
            f"single examples. If an example consists of {found.size} rows, such as a window of a "
            "series, pass ddl.data.StreamSource(dataset, windows=True).",
        )
        number, rows = int(dataset.cardinality()) * found.size, dataset.unbatch()
    if number < 0:
        what = "infinite" if dataset.cardinality() == tf.data.INFINITE_CARDINALITY else "unknown"
        raise DataError(
            f"The tf.data.Dataset yields batches, made by {_name(found.operation)}, and its number "
            f"of examples is {what}. Remove its repeat() or filter(), or pass the number: "
            "ddl.data.StreamSource(dataset.unbatch(), num_examples=…)."
        )
    return rows.apply(tf.data.experimental.assert_cardinality(number))


def optimized(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a data set as tf.data's optimizer rewrites it, for use in a `flat_map`.

    Unasked, tf.data optimizes only the outermost data set. Functions that are not optimized cost
    a map twice as much processor time for each small example. Call it once, eagerly: in the
    function itself, each epoch would repeat the draws of seeded operations, and take memory.

    Args:
      dataset: Dicts of dense features.

    Returns:
      `dataset` itself if it reads large tensors, of which the optimizer makes a copy.
    """
    if _bytes_in_memory(dataset) > _MOST_COPIED:
        return dataset
    specs = tf.nest.flatten(dataset.element_spec)
    with tf.init_scope(), tf.device("CPU:0"):
        rewritten = tf.raw_ops.OptimizeDatasetV2(
            input_dataset=tf.data.experimental.to_variant(dataset),
            optimizations_enabled=["map_and_batch_fusion", "noop_elimination"],
            optimizations_disabled=tf.constant([], tf.string),
            optimizations_default=tf.constant([], tf.string),
            output_types=[spec.dtype for spec in specs],
            output_shapes=[spec.shape for spec in specs],
        )
        return tf.data.experimental.from_variant(rewritten, dataset.element_spec)


def _bytes_in_memory(dataset: tf.data.Dataset) -> int:
    """Returns the bytes of the tensors that a data set, or one before it, was made from or maps."""
    function = getattr(getattr(dataset, "_map_func", None), "function", None)
    tensors = [*getattr(dataset, "_tensors", ()), *getattr(function, "captured_inputs", ())]
    own = sum((each.shape.num_elements() or 0) * each.dtype.size for each in tensors)
    return own + sum(map(_bytes_in_memory, dataset._inputs()))


_warned: weakref.WeakKeyDictionary[tf.data.Dataset, set[str]] = weakref.WeakKeyDictionary()


def warn_once(dataset: tf.data.Dataset, message: str) -> None:
    """Logs a warning of a data set, which a run converts more than once."""
    told = _warned.setdefault(dataset, set())
    if message not in told:
        told.add(message)
        logging.warning("%s", message)


def has_changing_order(dataset: tf.data.Dataset) -> bool:
    """Returns whether a shuffle gives each epoch or each process another order.

    Shuffles in the function of a `flat_map` or `interleave` are not detected.
    """
    if hasattr(dataset, "_reshuffle_each_iteration"):
        seeds = [tf.get_static_value(seed) for seed in (dataset._seed, dataset._seed2)]
        is_fixed = dataset._reshuffle_each_iteration is False and any(seeds)
        return not is_fixed or any(map(has_changing_order, dataset._inputs()))
    return any(map(has_changing_order, dataset._inputs()))


def _limited(dataset: tf.data.Dataset, batches: _Batches) -> tf.data.Dataset:
    """Returns the rows of batches; reading them fails if a `map` has added rows to a batch."""
    limit = _batch_size(batches.operation)

    def checked(*batch: Any) -> Any:
        rows = tf.shape(tf.nest.flatten(batch)[0])[0]
        message = f"A map of the tf.data.Dataset added rows to a batch of {limit} rows."
        with tf.control_dependencies([tf.debugging.assert_less_equal(rows, limit, message)]):
            same = tf.nest.map_structure(tf.identity, batch)
        return same[0] if len(same) == 1 else same

    if limit is None:
        return dataset.unbatch()
    return dataset.map(tf.autograph.experimental.do_not_convert(checked)).unbatch()


def _batches(dataset: tf.data.Dataset, windows: bool = False) -> _Batches | None:
    """Returns the batches that a data set yields; None for single examples.

    Args:
      dataset: The data set.
      windows: Whether examples may be batches.

    Raises:
      DataError: If the elements are windows of which the last may be shorter.
    """
    batch = _last_batch(dataset)
    features = tf.nest.flatten(dataset.element_spec)
    shapes = [
        f.shape for f in features if isinstance(f, tf.TensorSpec) and f.shape.rank is not None
    ]
    if batch is None or not features or len(shapes) < len(features):
        return None
    made = _batch_size(batch)
    sizes = {shape[0] if shape.rank else 0 for shape in shapes}  # a scalar is no batch
    if None in sizes and (windows or len(sizes) > 1):
        raise DataError(
            f"The examples must have static shapes, but {_name(batch)} makes windows of which "
            f"the last may be shorter. Write batch({made or 'n'}, drop_remainder=True)."
        )
    if len(sizes) > 1 or 0 in sizes:
        return None
    (size,) = sizes
    if size is not None and made not in (None, size):
        return None  # another size is no longer that batch
    return _Batches(batch, size)


def _number_of_rows(dataset: tf.data.Dataset, batch: tf.data.Dataset) -> int:
    """Returns the rows of all batches, of which the last may be shorter; -1 if unknown.

    Args:
      dataset: The data set.
      batch: The operation that made its batches.
    """
    while dataset is not batch:
        inputs = list(dataset._inputs())
        if len(inputs) != 1 or not any(one in type(dataset).__name__ for one in _KEEP_BATCHES):
            return -1
        (dataset,) = inputs
    if type(batch).__name__ not in _OF_EXAMPLES:
        return -1
    (examples,) = batch._inputs()
    return int(examples.cardinality())


def _name(batch: tf.data.Dataset) -> str:
    return type(batch).__name__.strip("_").removesuffix("Dataset").lower()


def _last_batch(dataset: tf.data.Dataset) -> tf.data.Dataset | None:
    """Returns the operation that batched the elements, or None if there is none."""
    name = type(dataset).__name__
    # A choice among data sets (DirectedInterleave) keeps elements whole, unlike other interleaves.
    chosen = getattr(dataset, "_data_inputs", None) if "DirectedInterleave" in name else None
    if chosen is None and any(other in name for other in _MAKE_OTHER_ELEMENTS):
        return None
    if "batch" in name.lower():
        return dataset
    inputs = list(chosen if chosen is not None else dataset._inputs())
    batches = [_last_batch(each) for each in inputs]
    if not batches or (None in batches and "Zip" in name):
        return None
    return next((batch for batch in batches if batch is not None), None)


def _batch_size(batch: tf.data.Dataset) -> int | None:
    size = tf.get_static_value(getattr(batch, "_batch_size", None))
    if size is not None:
        return int(size)
    # `rebatch` and others have no _batch_size, only the shapes.
    shape = tf.nest.flatten(batch.element_spec)[0].shape
    return shape[0] if shape.rank else None
