"""Several data sets one after the other."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ddl.data.arrays import is_in_memory, with_rows_of
from ddl.data.combining.random_access import RandomAccess, check_same_spec, with_random_access
from ddl.data.decoded import DecodedSource
from ddl.data.source import Source
from ddl.errors import DataError


def concatenation(sources: Sequence[Any]) -> Source:
    """Returns one data set of all examples of several, which are shuffled together.

    Args:
      sources: Sources with random access, or what `Trainer.train_data` converts into such. All must
        have the same features in shape and dtype.

    Returns:
      An `ArraySource` with copies of the arrays if all are arrays in memory; else a source that
      reads from them.

    Raises:
      DataError: If there are no sources, their features differ, or one is a stream.
    """
    if isinstance(sources, str) or not isinstance(sources, Sequence):
        raise DataError(
            "concatenation takes a list of data sets, got "
            f"{type(sources).__name__}. Pass [@first/…(), @second/…()]."
        )
    found = [with_random_access(source, "concatenation") for source in sources]
    check_same_spec(found, "concatenation")
    in_memory = [source for source in found if is_in_memory(source)]
    if len(in_memory) == len(found):
        names = found[0].element_spec
        arrays = {name: [source.features[name] for source in in_memory] for name in names}
        return with_rows_of({name: np.concatenate(parts) for name, parts in arrays.items()})
    return _Concatenation(found)


class _Concatenation(DecodedSource):
    def __init__(self, sources: Sequence[RandomAccess]):
        self._sources = self.sources_read = sources

    def __len__(self) -> int:
        return sum(len(source) for source in self._sources)

    @property
    def element_spec(self) -> dict[str, tf.TensorSpec]:
        return self._sources[0].element_spec

    def example(self, index: tf.Tensor, seed: tf.Tensor) -> dict[str, tf.Tensor]:
        return example_of(self._sources, index, seed)

    def describe(self, index: int) -> str:
        return described(self._sources, index)


def described(sources: Sequence[RandomAccess], index: int) -> str:
    """Returns what messages call an example, by its number among those of all sources."""
    for number, source in enumerate(sources):
        if index < len(source):
            if isinstance(source, DecodedSource):
                return source.describe(index)
            return f"example {index:,} of data set number {number}"
        index -= len(source)
    raise IndexError(index)


def example_of(
    sources: Sequence[RandomAccess], index: tf.Tensor, seed: tf.Tensor
) -> dict[str, tf.Tensor]:
    """Reads an example by its number among those of all sources, in a graph.

    Args:
      sources: Sources of the same features.
      index: Number of the example, int64 [].
      seed: int64 [2].
    """
    ends = np.cumsum([len(source) for source in sources])
    number = tf.searchsorted(tf.constant(ends), index[tf.newaxis], side="right")[0]
    of_source = index - tf.constant([0, *ends[:-1]], tf.int64)[number]

    def reader(source: RandomAccess) -> Any:
        def read() -> dict[str, tf.Tensor]:
            features = source.example(of_source, seed)
            return {name: features[name] for name in sorted(features)}

        return read

    return tf.switch_case(number, [reader(source) for source in sources])
