"""Detection of a batched `tf.data.Dataset` where single examples are expected.

A batch of static size looks like one large example: a data set of 1,000 images in batches of 50
would train on 20 examples of 50 images each. Only the operations of the data set reveal the batch.
"""

import tensorflow as tf

from ddl.errors import DataError

# These operations turn batches into other elements. The names are parts of private Python class
# names of tf.data; tests/data/test_batched.py checks them.
_MAKE_OTHER_ELEMENTS = ("Unbatch", "FlatMap", "Interleave", "Window")


def check_not_batched(dataset: tf.data.Dataset) -> None:
    """Checks that the elements are single examples.

    Elements count as batches of n if `batch` or a variant of it made them and every feature still
    has n as its first dimension, whatever `map`, `shuffle` or `repeat` followed. Windows that a
    `map` has split into inputs and targets therefore pass. A `batch` inside a `flat_map` is not
    detected.

    Args:
      dataset: A data set whose elements are dicts of features.

    Raises:
      DataError: If the elements are batches.
    """
    batch = _last_batch(dataset)
    features = tf.nest.flatten(dataset.element_spec)
    ranked = [f.shape for f in features if isinstance(f, tf.TensorSpec) and f.shape.rank]
    if batch is None or not features or len(ranked) < len(features):
        return
    sizes = {shape[0] for shape in ranked}
    if len(sizes) > 1:
        return
    (size,) = sizes
    made = _batch_size(batch)
    if size is None or made not in (None, size):
        return  # an unknown size raises elsewhere; another size is no longer that batch
    raise DataError(
        f"The tf.data.Dataset must yield single examples, but it yields batches of {size} rows, "
        f"made by {type(batch).__name__.strip('_').removesuffix('Dataset').lower()}. Remove "
        f".batch(…) or append .unbatch(). If an example consists of {size} rows, such as a window "
        "of a series, pass windows=True: StreamSource(dataset, windows=True)."
    )


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
