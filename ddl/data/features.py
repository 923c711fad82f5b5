"""Features of an example: their names, dtypes and shapes, of which all examples have the same."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from ddl.errors import DataError

ONE_LENGTH = "Resize images; pad texts to one length, or pack them into rows (ddl.data.packed)."
"""The remedy for features whose shapes vary."""


def named(example: Any, what: str, weight_rank: int | None = 0) -> dict[str, Any]:
    """Returns an example as a dict of features; a tuple's parts become "input", "label", "weight".

    Args:
      example: A dict; or (x, y) or (x, y, weight), where x and y may be dicts of features. A dict
        of weights by output becomes "entry_weight_OUTPUT".
      what: Name of the example in messages.
      weight_rank: Rank of "weight" if it is one number for each example. One of a higher rank, such
        as of time steps, becomes "entry_weight". None: any rank.

    Raises:
      DataError: If the example has another form, or a feature is a dict.
    """
    if isinstance(example, tuple | list) and len(example) in (2, 3):
        inputs, *others = example
        if isinstance(inputs, tuple | list) and not any(map(np.isscalar, inputs)):
            raise DataError(
                f"{what} has {len(inputs)} arrays as x. Give x as one array, np.asarray(x), or as "
                "a dict by the names of the model's inputs."
            )
        parts = dict(zip(("label", "weight"), others, strict=False))
        features = dict(inputs) if isinstance(inputs, Mapping) else {"input": inputs}
        for part, before in (("label", ""), ("weight", "entry_weight_")):  # of several outputs
            if isinstance(parts.get(part), Mapping):
                parts |= {f"{before}{name}": one for name, one in parts.pop(part).items()}
        if both := parts.keys() & features.keys():
            raise DataError(
                f"{what} is a tuple (x, y), whose x has the feature {min(both)!r} too. Rename it."
            )
        example = features | {name: part for name, part in parts.items() if part is not None}
    if not isinstance(example, Mapping) or not example:
        given = f"a tuple of {len(example)}" if isinstance(example, tuple) else f"{example!r:.80}"
        raise DataError(
            f"{what} must be a dict of features, or a tuple (x, y[, weight]), got {given}."
        )
    for name, value in example.items():
        if not isinstance(name, str):
            raise DataError(f"{what} has a feature named {name!r:.40}. Name features by texts.")
        if value is None or isinstance(value, Mapping):
            kind = "None. Leave it out" if value is None else "a dict. Put its features beside"
            raise DataError(f"Feature {name!r} of {what} is {kind}.")
    features = dict(example)
    weight = features.get("weight")
    if weight is not None and weight_rank is not None:
        shape = getattr(weight, "shape", None)
        if len(array_of(weight, "weight", what).shape if shape is None else shape) > weight_rank:
            features["entry_weight"] = features.pop("weight")
    return features


def array_of(value: Any, name: str, what: str) -> np.ndarray:
    """Converts a feature into an array; text becomes Python objects, which keep zero bytes.

    Raises:
      DataError: If NumPy cannot convert it, as where rows differ in length, or values are masked.
    """
    if isinstance(value, np.ma.MaskedArray) and np.any(value.mask):
        raise DataError(f"Feature {name!r} of {what} has masked values. Fill them by .filled(…).")
    if isinstance(value, np.ndarray):
        return np.asarray(value)
    try:
        array = np.asarray(value.numpy() if isinstance(value, tf.RaggedTensor) else value)
        return np.asarray(value, object) if array.dtype.kind in "US" else array
    except ValueError as error:
        raise DataError(
            f"Feature {name!r} of {what} must be an array of numbers or text, but NumPy could not "
            f"convert it: {str(error).rstrip('.')}. {ONE_LENGTH}"
        ) from error


def taken_by_tensorflow(array: np.ndarray) -> np.ndarray:
    """Returns text as Python objects and numbers in this machine's byte order.

    tf.data would read the bytes of the other order as they lie, which gives other numbers.
    """
    if array.dtype.kind in "US":
        return array.astype(object)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def tensorflow_dtype(name: str, value: np.ndarray) -> tf.DType:
    """Returns the TensorFlow dtype of a feature; text becomes tf.string.

    Raises:
      DataError: If TensorFlow lacks the dtype, or the feature holds other Python objects.
    """
    dtype = value.dtype
    if dtype.kind in "US":
        return tf.string
    if dtype.kind == "O":
        others = [one for one in value.flat if not isinstance(one, str | bytes)]
        if not others:
            return tf.string
        raise DataError(
            f"Feature {name!r} must be numbers or text of one shape, got Python objects, such as "
            f"{others[0]!r:.40}. {ONE_LENGTH}"
        )
    try:
        return tf.as_dtype(dtype)
    except TypeError:
        raise DataError(f"Feature {name!r} has dtype {dtype}, which TensorFlow lacks.") from None


def spec_of(example: Mapping[str, np.ndarray]) -> dict[str, tf.TensorSpec]:
    """Returns the specification of an example of arrays."""
    return {n: tf.TensorSpec(v.shape, tensorflow_dtype(n, v), n) for n, v in example.items()}


def form_of(example: Mapping[str, np.ndarray]) -> Any:
    """Returns what `spec_of` depends on, in a fraction of its time."""
    return tuple(
        (name, one.dtype, one.shape, frozenset(map(type, one.flat)) if one.dtype == object else ())
        for name, one in example.items()
    )


class Alike:
    """Elements that Python reads, each like the first one.

    Attributes:
      spec: Shape and dtype of each feature of one example; {} before the first element.
    """

    def __init__(self, in_batches: bool = False):
        """Takes whether an element is a batch of examples."""
        self.spec: dict[str, tf.TensorSpec] = {}
        self._in_batches = in_batches
        self._forms: set[Any] = set()  # dtypes and shapes of elements that were checked

    def arrays(self, element: Any, what: str) -> dict[str, np.ndarray]:
        """Returns the features of an element; DataError, naming it, if it is unlike the first."""
        parts = named(element, what, int(self._in_batches))
        arrays = {name: array_of(value, name, what) for name, value in parts.items()}
        if (form := form_of(arrays)) not in self._forms:
            spec = checked_spec(spec_of(arrays), what, self._in_batches)
            self.spec = self.spec or spec
            if spec != self.spec:
                raise DataError(
                    f"{what} must be like the first, {described(self.spec)}, got "
                    f"{described(spec)}. Convert it. {ONE_LENGTH}"
                )
            self._forms.add(form)
        return arrays


def described(spec: Mapping[str, tf.TensorSpec]) -> str:
    """Returns features with their dtypes and shapes for messages, in the order of their names."""
    return ", ".join(f"{n} {spec[n].dtype.name} {spec[n].shape}" for n in sorted(spec))


def rows_in(spec: Any) -> int | None:
    """Returns the first dimension of all features, None if unknown; 0 if they share none."""
    found = {one.shape[0] if one.shape.rank else 0 for one in tf.nest.flatten(spec)}
    return found.pop() if len(found) == 1 else 0


def checked_spec(spec: Any, what: str, is_batch: bool = False) -> dict[str, tf.TensorSpec]:
    """Returns the specification of an example after checking that all shapes are static.

    Args:
      spec: Tensors or their specifications by feature.
      what: Name of the maker of the example, for errors.
      is_batch: Whether it is that of a batch, whose features have one length.

    Raises:
      DataError: If a feature is not dense, its shape is not known or has no values, or lengths of
        a batch differ or are 0.
    """
    if is_batch and rows_in(spec) == 0:
        raise DataError(f"{what} must be features of one length, 1 or more, got {described(spec)}.")
    found = {}
    for name, feature in spec.items():
        if not isinstance(feature, tf.Tensor | tf.TensorSpec):
            raise DataError(
                f"Feature {name!r} of {what} is a {type(feature).__name__}. Make it dense by "
                "tf.sparse.to_dense or feature.to_tensor(shape=[…])."
            )
        shape = tf.TensorShape(feature.shape)[int(is_batch) :]
        if not shape.is_fully_defined():
            raise DataError(
                f"Feature {name!r} of {what} must have one static shape, got {shape}. State one "
                f"that does not vary by tf.ensure_shape. {ONE_LENGTH}"
            )
        if not shape.num_elements():  # on which unbatch of TensorFlow 2.21 crashes
            raise DataError(f"Feature {name!r} of {what} has no values, shape {shape}. Remove it.")
        found[name] = tf.TensorSpec(shape, feature.dtype, name)
    return found


@tf.autograph.experimental.do_not_convert
def checked_weight(weight: tf.Tensor) -> tf.Tensor:
    """Returns weights as float32, after a check while tf.data reads them.

    Args:
      weight: A float of any shape.

    Raises:
      tf.errors.InvalidArgumentError: When the check runs, if one is negative, NaN or infinite.
    """
    weight = tf.cast(weight, tf.float32)
    message = "Feature 'weight' must be a finite number of at least 0"
    return tf.debugging.check_numerics(tf.where(weight < 0, math.nan, weight), message)


def check_weights(weight: np.ndarray, describe: Callable[[int], str]) -> None:
    """Raises DataError, naming the example by its row, if a weight is negative or not finite."""
    bad = ~(np.isfinite(weight) & (weight >= 0))
    if bad.any():
        row = int(np.argmax(bad))
        raise DataError(
            f"Feature 'weight' of {describe(row)} must be a finite number of at least 0, got "
            f"{weight[row]}."
        )


def check_weight_spec(spec: Mapping[str, tf.TensorSpec], what: str) -> None:
    """Raises DataError if the feature "weight" is no float []."""
    weight = spec.get("weight")
    if weight is not None and (weight.shape.rank or not weight.dtype.is_floating):
        raise DataError(
            f"Feature 'weight' of {what} must be one float per example, got {weight.dtype.name} of "
            f"shape {weight.shape}."
        )
