"""Whether the elements of a user's pipeline are examples or batches of examples."""

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from ddl.data.features import checked_spec
from ddl.errors import DataError

# Parts of private class names of tf.data: operations that turn batches into other elements. Nothing
# but the operations tells a batch of 50 images from one example of 50 images.
_MAKE_OTHERS = ("Unbatch", "FlatMap", "Interleave", "Window")

AS_BATCHES = (
    "Pass ddl.data.stream(data, batched=True) if elements are batches, or batched=False if each is "
    "one example."
)

Spec = Mapping[str, tf.TensorSpec]


def elements_of(
    dataset: tf.data.Dataset, spec: Spec, batched: bool | None, what: str
) -> tuple[bool, dict[str, tf.TensorSpec], int]:
    """Finds out whether elements are batches, and the number of examples.

    Args:
      dataset: A user's pipeline.
      spec: Its features.
      batched: Whether elements are batches; None: found out.
      what: Name of an element in messages.

    Returns:
      Whether elements are batches; the specification of one example; and the number of examples,
      which may be tf.data.INFINITE_CARDINALITY or UNKNOWN_CARDINALITY.

    Raises:
      DataError: If a shape is not static, or it cannot be known whether elements are batches.
    """
    rows, operation, count = _rows_in(spec), _batch_operation(dataset), int(dataset.cardinality())
    made = _rows_in(operation.element_spec) if operation is not None else 0
    if batched is None:
        if rows is None and operation is None and all(one.shape.rank == 1 for one in spec.values()):
            raise DataError(
                f"{what} may be a batch, or vary in length: {described(spec)}. {AS_BATCHES}"
            )
        # Another number of rows than the operation made is no longer its batch.
        batched = rows is None or (operation is not None and rows > 0 and made in (None, rows))
    if batched and count >= 0 and rows is not None:
        count *= rows
    elif batched and count >= 0:  # the last batch may be shorter
        # Operations that change the number of batches, or batch batches, hide that of examples.
        count, before = tf.data.UNKNOWN_CARDINALITY, count
        if operation is not None and int(operation.cardinality()) == before:
            (examples,) = operation._inputs()
            if _batch_operation(examples) is None:
                count = int(examples.cardinality())
    return batched, example_spec(spec, batched, what), count


def described(spec: Spec) -> str:
    """Returns features with their dtypes and shapes for messages, in the order of their names."""
    return ", ".join(f"{n} {spec[n].dtype.name} {spec[n].shape}" for n in sorted(spec))


def example_spec(spec: Spec, is_batch: bool, what: str) -> dict[str, tf.TensorSpec]:
    """Returns the specification of one example, of static shapes.

    Args:
      spec: Specification of an element.
      is_batch: Whether the element is a batch.
      what: Name of the element in messages.

    Raises:
      DataError: If a shape is not static, or the element is no batch.
    """
    if is_batch:
        if _rows_in(spec) == 0:
            raise DataError(
                f"{what} must be a batch, features of equal first dimension, got "
                f"{described(spec)}. {AS_BATCHES}"
            )
        spec = {name: tf.TensorSpec(one.shape[1:], one.dtype) for name, one in spec.items()}
    return checked_spec(spec, what)


def _rows_in(spec: Any) -> int | None:
    """Returns the first dimension of all features, None if unknown; 0 if they share none."""
    found = {one.shape[0] if one.shape.rank else 0 for one in tf.nest.flatten(spec)}
    return found.pop() if len(found) == 1 else 0


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
    return next(filter(None.__ne__, map(_batch_operation, inputs)), None)
