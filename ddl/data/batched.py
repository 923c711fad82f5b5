"""Detection of a batched `tf.data.Dataset` where single examples are expected.

A batch of static size looks like one large example: a data set of 1,000 images in batches of 50
would train on 20 examples of 50 images each. Only the operations of the data set reveal the batch.
"""

import tensorflow as tf

from ddl.errors import DataError

# These operations turn batches into other elements. The names are parts of private Python class
# names of tf.data; tests/data/test_batched.py checks them.
_MAKE_OTHER_ELEMENTS = ("Unbatch", "FlatMap", "Interleave", "Window")


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
    batch = _last_batch(dataset)
    features = tf.nest.flatten(dataset.element_spec)
    shapes = [
        f.shape for f in features if isinstance(f, tf.TensorSpec) and f.shape.rank is not None
    ]
    if batch is None or not features or len(shapes) < len(features):
        return
    made = _batch_size(batch)
    sizes = {shape[0] if shape.rank else 0 for shape in shapes}  # a scalar is no batch
    if None in sizes and (windows or len(sizes) > 1):
        raise DataError(
            f"The examples must have static shapes, but {_operation(batch)} makes windows of which "
            f"the last may be shorter. Write batch({made or 'n'}, drop_remainder=True)."
        )
    if windows or len(sizes) > 1 or 0 in sizes:
        return
    (size,) = sizes
    if size is not None and made not in (None, size):
        return  # another size is no longer that batch
    rows = size or made or "n"
    raise DataError(
        f"The tf.data.Dataset must yield single examples, but it yields batches of {rows} rows, "
        f"made by {_operation(batch)}. Remove .batch(…) or append .unbatch(). If an example "
        f"consists of {rows} rows, such as a window of a series, write batch({rows}, "
        "drop_remainder=True) and pass windows=True: StreamSource(dataset, windows=True)."
    )


def _operation(batch: tf.data.Dataset) -> str:
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
