"""The lengths of a source's examples, which fill a part of features of static shape."""

import numpy as np
import tensorflow as tf

from ddl.data.arrays import is_in_memory
from ddl.data.checks import data_errors
from ddl.data.combining.random_access import RandomAccess
from ddl.data.decoded import DecodedSource
from ddl.data.source import read_in_place
from ddl.errors import DataError

_AT_ONCE = 1024


def lengths_of(source: RandomAccess, name: str) -> np.ndarray:
    """Returns the length of each example, int64 [n].

    They are those of the attribute `lengths` of the source, if it has one, or of an array in
    memory. Otherwise all examples are read once.

    Args:
      source: The source.
      name: Name of the feature that holds the length, integer [].

    Raises:
      DataError: If there is no such feature, a length is negative, or the attribute `lengths` is
        not one integer for each example.
    """
    spec = source.element_spec.get(name)
    if spec is None or spec.shape.rank or not spec.dtype.is_integer:
        raise DataError(
            f"packed needs the length of each example as a feature {name!r}, an integer []; the "
            f"data have {', '.join(sorted(source.element_spec))}. Add it, or set "
            "packed.length_name."
        )
    lengths = getattr(source, "lengths", None)
    if lengths is None:
        lengths = source.features[name] if is_in_memory(source) else _read(source, name)
    lengths = np.asarray(lengths)
    if lengths.shape != (len(source),) or lengths.dtype.kind not in "iu":
        raise DataError(
            f"The attribute lengths of {type(source).__name__} must hold one integer for each of "
            f"its {len(source):,} examples, got {lengths.dtype} of shape {lengths.shape}. Correct "
            f"it, or remove it, so that packed reads the feature {name!r} of all examples."
        )
    lengths = lengths.astype(np.int64)
    if lengths.min() < 0:
        raise DataError(
            f"Feature {name!r} must be at least 0, got {lengths.min()} in example "
            f"{int(np.argmin(lengths))}."
        )
    return lengths


def examples_of(
    source: RandomAccess, numbers: tf.Tensor, seed: tf.Tensor | None = None
) -> dict[str, tf.Tensor]:
    """Reads examples by their numbers, in a graph of tf.data: features [k, …].

    Args:
      source: The source.
      numbers: int64 [k].
      seed: First number of the seeds of the examples, int64 []; None: 0.
    """
    if not isinstance(source, DecodedSource):
        return source.gather(numbers)
    first = tf.zeros([], tf.int64) if seed is None else seed
    return tf.map_fn(
        lambda number: source.example(number, tf.stack([first, number])),
        numbers,
        fn_output_signature=source.element_spec,
    )


def _read(source: RandomAccess, name: str) -> np.ndarray:
    numbers = read_in_place(tf.data.Dataset.range(len(source)).batch(_AT_ONCE), source)

    @tf.autograph.experimental.do_not_convert
    def read(of_batch: tf.Tensor) -> tf.Tensor:
        return tf.cast(examples_of(source, of_batch)[name], tf.int64)

    with data_errors(source):
        return np.concatenate(list(numbers.map(read, tf.data.AUTOTUNE).as_numpy_iterator()))
