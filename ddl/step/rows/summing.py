"""Sums of the gradients of microbatches, which stay sparse for large tables.

A sum that starts with zeros of the table's shape would be dense, and would take time and memory for
each row of the table in each microbatch. The rows are put one after the other instead; after the
all-reduce, `with_each_row_once` adds up those of one index. A loop on CPUs carries a list of the
microbatches' rows and joins them at its end, since joining them in each turn would copy all earlier
rows each time.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from ddl.microbatch import CannotCompileError, is_compiled
from ddl.step.gradients import Gradient
from ddl.step.rows.tables import Table


class Rows(NamedTuple):
    """Rows of a sparse gradient as tensors, which a loop can carry.

    Attributes:
      values: [rows, …].
      indices: int64 [rows]; an index may occur more than once.
    """

    values: tf.Tensor
    indices: tf.Tensor


class Listed(NamedTuple):
    """Rows of a sparse gradient as lists of tensors, one entry per microbatch.

    Attributes:
      values: TensorList of the values.
      indices: TensorList of the indices.
    """

    values: tf.Tensor
    indices: tf.Tensor


@dataclasses.dataclass(frozen=True)
class GradientSums:
    """The form of the sums of a loss's gradients. Replica context, unless a method says else.

    Attributes:
      strategy: The strategy.
      variables: The variables of the gradients.
      by_rows: Whether the sum of each gradient consists of `Rows`.
    """

    strategy: tf.distribute.Strategy
    variables: Sequence[keras.Variable]
    by_rows: Sequence[bool]

    def zeros(self) -> list[Any]:
        """Returns the empty sums, one per variable."""
        return [
            self._zero(v, by_rows) for v, by_rows in zip(self.variables, self.by_rows, strict=True)
        ]

    def of(self, gradients: Sequence[Gradient | None]) -> list[Any]:
        """Returns the gradients of a microbatch in the form of the sums; None becomes zero."""
        return [
            self._zero(v, by_rows) if g is None else _rows(g, v) if by_rows else g
            for v, g, by_rows in zip(self.variables, gradients, self.by_rows, strict=True)
        ]

    def next(self, so_far: Any, values: tuple[Sequence[Gradient], tf.Tensor]) -> Any:
        """Returns the sums with a microbatch.

        Args:
          so_far: The sums of gradients and metrics so far; None before the first microbatch.
          values: The microbatch's gradients and metric sums.
        """
        own = self.of(values[0]), values[1]
        return own if so_far is None else added(so_far, own)

    def as_gradients(self, sums: Any) -> Any:
        """Returns the sums of each replica as gradients. Cross-replica context."""
        return self.strategy.run(self._gradients, args=(sums,)) if any(self.by_rows) else sums

    def _gradients(self, sums: Sequence[Any]) -> list[Gradient]:
        return [
            tf.IndexedSlices(
                one.values, one.indices, tf.constant(v.value.shape.as_list(), tf.int64)
            )
            if isinstance(one, Rows)
            else one
            for v, one in zip(self.variables, sums, strict=True)
        ]

    @staticmethod
    def _zero(variable: keras.Variable, by_rows: bool) -> Any:
        return _no_rows(variable) if by_rows else tf.zeros_like(variable.value)


def gradient_sums(
    variables: Sequence[keras.Variable],
    tables: Mapping[int, Table],
    batch_size: int,
    strategy: tf.distribute.Strategy,
) -> GradientSums:
    """Returns the form of the sums of gradients. Cross-replica or replica context.

    A sum consists of rows if all microbatches together look up fewer rows than the table has.

    Args:
      variables: The variables of the gradients.
      tables: The variables that the loss reads by rows (`tables_in`).
      batch_size: Number of examples of a global batch.
      strategy: The strategy.

    Raises:
      CannotCompileError: If a sum consists of rows, within what XLA compiles.
    """
    examples = batch_size // strategy.num_replicas_in_sync

    def by_rows(variable: keras.Variable) -> bool:
        table = table_of(variable, tables, strategy)
        return table is not None and table.lookups * examples < variable.shape[0]

    form = GradientSums(strategy, variables, [by_rows(variable) for variable in variables])
    if any(form.by_rows) and is_compiled():
        raise CannotCompileError("the number of rows of a sparse gradient depends on the examples")
    return form


def table_of(
    variable: keras.Variable, tables: Mapping[int, Table], strategy: tf.distribute.Strategy
) -> Table | None:
    """Returns how a loss reads a variable by rows; None if it does not."""
    copies = strategy.experimental_local_results(variable.value)
    found = (tables.get(id(getattr(copy, "handle", None))) for copy in copies)
    return next((table for table in found if table is not None), None)


def added(one: Any, other: Any) -> Any:
    """Returns the sum of two structures of tensors and `Rows`; sparse values may be added.

    The first structure may have `Listed` instead of `Rows`, and so has the result.
    """
    if isinstance(one, Listed):
        pushed = (
            tf.raw_ops.TensorListPushBack(input_handle=rows, tensor=new)
            for rows, new in zip(one, other, strict=True)
        )
        return Listed(*pushed)
    if isinstance(one, Rows):
        joined = (tf.concat(parts, axis=0) for parts in zip(one, other, strict=True))
        return Rows(*joined)
    if isinstance(one, list | tuple):
        return type(one)(added(a, b) for a, b in zip(one, other, strict=True))
    return one + other


def has_rows(sums: Any) -> bool:
    """Returns whether a structure of tensors contains `Rows` or `Listed`."""
    if isinstance(sums, Rows | Listed):
        return True
    return isinstance(sums, list | tuple) and any(map(has_rows, sums))


def listed(sums: Any) -> Any:
    """Returns a structure with an empty `Listed` for each `Rows`."""
    if isinstance(sums, Rows):
        return Listed(*map(_empty_list, sums))
    if isinstance(sums, list | tuple):
        return type(sums)(map(listed, sums))
    return sums


def joined(sums: Any, like: Any) -> Any:
    """Returns a structure with `Rows` for each `Listed`.

    Args:
      sums: The structure.
      like: The structure with `Rows` of which `listed` made the empty lists.
    """
    if isinstance(sums, Listed):
        return Rows(*map(_joined, sums, like))
    if isinstance(sums, list | tuple):
        return type(sums)(map(joined, sums, like))
    return sums


def _empty_list(like: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.EmptyTensorList(
        element_shape=tf.constant([-1, *like.shape[1:]], tf.int32),
        max_num_elements=-1,
        element_dtype=like.dtype,
    )


def _joined(handle: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    rows, _ = tf.raw_ops.TensorListConcatV2(
        input_handle=handle,
        element_shape=tf.constant([-1, *like.shape[1:]], tf.int32),
        leading_dims=tf.constant([], tf.int64),
        element_dtype=like.dtype,
    )
    return tf.ensure_shape(rows, like.shape)


def _rows(gradient: Gradient, variable: keras.Variable) -> Rows:
    if isinstance(gradient, tf.IndexedSlices):
        values = tf.ensure_shape(gradient.values, [None, *variable.shape[1:]])
        return Rows(values, tf.cast(gradient.indices, tf.int64))
    # Such as from a layer with a gradient of its own.
    return Rows(gradient, tf.range(tf.shape(gradient, tf.int64)[0]))


def _no_rows(variable: keras.Variable) -> Rows:
    # A loop may lengthen a tensor only if its static length is unknown.
    shape = list(variable.shape[1:])
    values, indices = tf.zeros([0, *shape], variable.value.dtype), tf.zeros([0], tf.int64)
    return Rows(
        tf.raw_ops.PlaceholderWithDefault(input=values, shape=[None, *shape]),
        tf.raw_ops.PlaceholderWithDefault(input=indices, shape=[None]),
    )
