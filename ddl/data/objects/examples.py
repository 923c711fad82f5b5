"""Examples that Python code returns, as arrays by name."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from ddl.data.naming import named
from ddl.data.source import array_of, tensorflow_dtype
from ddl.errors import DataError


def features_of(example: Any, where: str) -> dict[str, np.ndarray]:
    """Converts an example, or a batch of examples, into arrays by feature name.

    Python's floats become float32 and its integers int64; arrays keep their dtype.

    Args:
      example: A dict of features, or a tuple as Keras takes it: (x, y) or (x, y, weights).
      where: Name of the example in the message.

    Raises:
      DataError: If the example has another form, or a feature is missing, ragged or of a dtype that
        TensorFlow lacks.
    """
    if isinstance(example, tuple) and len(example) in (2, 3):
        example = named(*example)
    if not isinstance(example, Mapping) or not example:
        raise DataError(
            f"{where} must be a dict of features by name, or a tuple (x, y) or (x, y, weights), "
            f"got {example!r:.80}."
        )
    return {
        str(name): _array(value, f"Feature {name!r} of {where}") for name, value in example.items()
    }


def copied(features: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns copies of arrays, which the code that returned them may fill anew."""
    return {name: array.copy() for name, array in features.items()}


def spec_of(features: Mapping[str, np.ndarray]) -> dict[str, tf.TensorSpec]:
    """Returns shape and dtype of each feature of one example."""
    return {
        name: tf.TensorSpec(array.shape, tensorflow_dtype(array.dtype), name)
        for name, array in features.items()
    }


def check_fits(
    features: Mapping[str, np.ndarray], spec: Mapping[str, tf.TensorSpec], where: str
) -> None:
    """Checks an example against the spec of the first one.

    Raises:
      DataError: If names, a shape or a dtype differ.
    """
    if features.keys() != spec.keys():
        raise DataError(
            f"{where} must have the features of the first example, {', '.join(sorted(spec))}, got "
            f"{', '.join(sorted(features))}."
        )
    for name, array in features.items():
        if array.shape != spec[name].shape or tensorflow_dtype(array.dtype) != spec[name].dtype:
            raise DataError(
                f"Feature {name!r} of {where} must be {spec[name].dtype.name} of shape "
                f"{tuple(spec[name].shape)}, as in the first example, got {array.dtype} of shape "
                f"{array.shape}. Convert, pad or crop all examples to one dtype and shape."
            )


def are_same(first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]) -> bool:
    """Returns whether two examples are the same to the bit."""
    return first.keys() == second.keys() and all(
        array.dtype == second[name].dtype
        and array.shape == second[name].shape
        and (
            array.tolist() == second[name].tolist()
            if array.dtype == object
            else array.tobytes() == second[name].tobytes()
        )
        for name, array in first.items()
    )


def _array(value: Any, what: str) -> np.ndarray:
    try:
        array = array_of(value)
    except ValueError as error:
        raise DataError(
            f"{what} must be numbers or text of one shape, but NumPy could not convert it: "
            f"{str(error).rstrip('.')}. Pad rows of different lengths to one length."
        ) from error
    if array.dtype.kind in "US":
        array = array.astype(object)
    if array.dtype == object and not all(isinstance(one, str | bytes) for one in array.flat):
        raise DataError(
            f"{what} must be numbers or text of one shape, got {value!r:.80}. Fill in missing "
            "values, and pad rows of different lengths to one length."
        )
    if array.dtype == np.float64 and not hasattr(value, "dtype"):
        array = array.astype(np.float32)
    try:
        tensorflow_dtype(array.dtype)
    except TypeError as error:
        raise DataError(
            f"{what} has dtype {array.dtype}, which TensorFlow does not support. Convert it to "
            "another dtype."
        ) from error
    return array
