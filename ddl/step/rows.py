"""Gradients of single rows of a table: which tables have them, and their sums over microbatches.

A sum that starts with zeros of the table's shape would be dense, and would take time and memory for
each row of the table in each microbatch. The rows are put one after the other instead; after the
all-reduce, `with_each_row_once` adds up those of one index.
"""

import dataclasses
from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from ddl.microbatch import CannotCompileError, is_compiled
from ddl.step.gradients import Gradient


class Table(NamedTuple):
    """Lookups of a loss in a variable of which it reads only rows.

    Attributes:
      lookups: Number of rows that it looks up for an example; 0 if unknown.
      as_a_whole: Whether it reads the whole variable to do so, as `tf.gather` does.
    """

    lookups: int
    as_a_whole: bool


def tables_in(graph: tf.Graph, examples: int) -> dict[int, Table]:
    """Returns the variables of which a forward pass looks up only rows, by `id` of their handles.

    The gradient of any other variable is dense. A variable that is read within another function is
    not found.

    Args:
      graph: Graph of the forward pass, a FuncGraph.
      examples: Number of examples in that graph.
    """
    found = {}
    for handle, inner in graph.captures:
        reads = [op for op in inner.consumers() if op.type == "ReadVariableOp"]
        readers = [op for read in reads for op in read.outputs[0].consumers()]
        others = [op for op in inner.consumers() if op not in reads and op.type != "VariableShape"]
        gathers = [op for op in readers if _gathers_rows(op)]
        of_rows = all(op.type == "Shape" or op in gathers for op in readers)
        of_rows = of_rows and all(op.type == "ResourceGather" for op in others)
        if of_rows and (others or gathers):
            sizes = [op.inputs[1].shape.num_elements() or 0 for op in [*others, *gathers]]
            lookups = -(-sum(sizes) // examples) if all(sizes) else 0
            found[id(handle)] = Table(lookups, as_a_whole=bool(gathers))
    return found


def _gathers_rows(operation: tf.Operation) -> bool:
    if operation.type != "GatherV2" or operation.inputs[0].op.type != "ReadVariableOp":
        return False
    return tf.get_static_value(operation.inputs[2]) == 0


def table_of(
    variable: keras.Variable, tables: Mapping[int, Table], strategy: tf.distribute.Strategy
) -> Table | None:
    """Returns how a loss reads a variable by rows; None if it does not."""
    copies = strategy.experimental_local_results(variable.value)
    found = (tables.get(id(getattr(copy, "handle", None))) for copy in copies)
    return next((table for table in found if table is not None), None)


def dense_if_compiled(
    gradients: Sequence[Gradient | None],
    variables: Sequence[keras.Variable],
    by_rows: Container[int],
) -> list[Any]:
    """Returns the gradients of a replica, dense in compiled code where a sparse one saves nothing.

    XLA compiles no tensors of which the size depends on the examples, and so no merging of rows. A
    sparse gradient saves nothing if all replicas look up at least as many rows as the table has. On
    one replica it also saves nothing if the optimizer computes on all rows; several replicas would
    send all rows of a dense gradient to each other. Replica context, in a graph.

    Args:
      gradients: The gradients, one per variable; None where the loss does not depend on it.
      variables: The variables.
      by_rows: `id` of each variable of which the optimizer updates single rows.
    """
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    found = list(gradients)
    for place, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
        if not is_compiled() or not isinstance(gradient, tf.IndexedSlices):
            continue
        rows, size = gradient.indices.shape[0], variable.shape[0]
        saves = replicas > 1 or id(variable) in by_rows
        if rows is not None and not (saves and rows * replicas < size):
            found[place] = tf.math.unsorted_segment_sum(gradient.values, gradient.indices, size)
    return found


class Rows(NamedTuple):
    """Rows of sparse gradients: of a microbatch as tensors, of their sum as lists of these.

    A loop can carry lists; a concatenation in each turn would copy all earlier rows each time.

    Attributes:
      values: [rows, …].
      indices: int64 [rows]; an index may occur more than once.
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
            Rows(_empty_list(v.shape[1:], v.value.dtype), _empty_list([], tf.int64))
            if by_rows
            else tf.zeros_like(v.value)
            for v, by_rows in zip(self.variables, self.by_rows, strict=True)
        ]

    def next(self, so_far: Any, values: tuple[Sequence[Gradient], tf.Tensor]) -> Any:
        """Returns the sums with a microbatch.

        Args:
          so_far: The sums of gradients and metrics so far; None returns those of the microbatch.
          values: The microbatch's gradients and metric sums.
        """
        gradients = [
            _rows(gradient) if by_rows else gradient
            for gradient, by_rows in zip(values[0], self.by_rows, strict=True)
        ]
        own = gradients, values[1]
        return own if so_far is None else added(so_far, own)

    def as_gradients(self, sums: Any) -> Any:
        """Returns the sums of each replica as gradients. Cross-replica context."""
        return self.strategy.run(self._gradients, args=(sums,)) if any(self.by_rows) else sums

    def _gradients(self, sums: Sequence[Any]) -> list[Gradient]:
        found = list(sums)
        for place, (total, v) in enumerate(zip(sums, self.variables, strict=True)):
            if isinstance(total, Rows):
                values = _joined(total.values, v.shape[1:], v.value.dtype)
                indices = _joined(total.indices, [], tf.int64)
                shape = tf.constant(v.value.shape.as_list(), tf.int64)
                found[place] = tf.IndexedSlices(values, indices, shape)
        return found


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
    found = [table_of(variable, tables, strategy) for variable in variables]
    by_rows = [
        table is not None and table.lookups * examples < variable.shape[0]
        for table, variable in zip(found, variables, strict=True)
    ]
    if any(by_rows) and is_compiled():
        raise CannotCompileError("the number of rows of a sparse gradient depends on the examples")
    return GradientSums(strategy, variables, by_rows)


def added(sums: Any, own: Any) -> Any:
    """Returns the sums with a microbatch's own, in a structure of tensors and `Rows`."""
    if isinstance(sums, Rows):
        push = tf.raw_ops.TensorListPushBack
        return Rows(*(push(input_handle=x, tensor=y) for x, y in zip(sums, own, strict=True)))
    if isinstance(sums, list | tuple):
        return type(sums)(added(one, other) for one, other in zip(sums, own, strict=True))
    return sums + own


def has_rows(sums: Any) -> bool:
    """Returns whether a structure of tensors contains `Rows`."""
    if isinstance(sums, Rows):
        return True
    return isinstance(sums, list | tuple) and any(map(has_rows, sums))


def _empty_list(rows: list[int], dtype: tf.DType) -> tf.Tensor:
    return tf.raw_ops.EmptyTensorList(
        element_shape=[-1, *rows], max_num_elements=-1, element_dtype=dtype
    )


def _joined(handle: tf.Tensor, rows: list[int], dtype: tf.DType) -> tf.Tensor:
    joined = tf.raw_ops.TensorListConcatV2(
        input_handle=handle,
        element_shape=[-1, *rows],
        leading_dims=tf.zeros([0], tf.int64),
        element_dtype=dtype,
    )[0]
    return tf.ensure_shape(joined, [None, *rows])


def _rows(gradient: Gradient) -> Rows:
    if isinstance(gradient, tf.IndexedSlices):
        return Rows(gradient.values, tf.cast(gradient.indices, tf.int64))
    # Such as from a layer with a gradient of its own.
    return Rows(gradient, tf.range(tf.shape(gradient, tf.int64)[0]))
