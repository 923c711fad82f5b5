"""Tables of which a loss reads single rows, and their sparse gradients: sums, each row once."""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from ddl.microbatch import CannotCompileError, is_compiled
from ddl.step.clipping import Gradient


def tables_in(graph: tf.Graph) -> dict[int, bool]:
    """Returns the variables of which a forward pass looks up only rows, by `id` of their handles.

    The gradient of any other variable is dense. A variable that is read within another function is
    not found.

    Args:
      graph: Graph of the forward pass, a FuncGraph.

    Returns:
      For each, whether the pass reads the whole variable to do so, as `tf.gather` does.
    """
    found = {}
    for handle, inner in graph.captures:
        reads = [op for op in inner.consumers() if op.type == "ReadVariableOp"]
        readers = [op for read in reads for op in read.outputs[0].consumers()]
        others = [op for op in inner.consumers() if op not in reads and op.type != "VariableShape"]
        gathers = [op for op in readers if _gathers_rows(op)]
        of_rows = all(op.type == "Shape" or op in gathers for op in readers)
        if of_rows and (others or gathers) and all(op.type == "ResourceGather" for op in others):
            found[id(handle)] = bool(gathers)
    return found


def _gathers_rows(operation: tf.Operation) -> bool:
    if operation.type != "GatherV2" or operation.inputs[0].op.type != "ReadVariableOp":
        return False
    return tf.get_static_value(operation.inputs[2]) == 0


def read_as_a_whole(
    variable: keras.Variable, tables: Mapping[int, bool], strategy: tf.distribute.Strategy
) -> bool | None:
    """Returns what `tables_in` found for a variable; None if the loss does not read its rows."""
    copies = strategy.experimental_local_results(variable.value)
    found = (tables.get(id(getattr(copy, "handle", None))) for copy in copies)
    return next((one for one in found if one is not None), None)


def dense_where_sparse_saves_nothing(
    gradients: Sequence[Gradient | None],
    variables: Sequence[keras.Variable],
    by_rows: Container[int],
) -> list[Any]:
    """Returns the gradients of a replica, dense where a sparse one saves nothing.

    XLA compiles no tensors of which the size depends on the examples, and so no merging of rows. In
    compiled code a sparse gradient saves nothing if all replicas look up at least as many rows as
    the table has. On one replica it also saves nothing if the optimizer computes on all rows;
    several replicas would send all rows of a dense gradient to each other. Replica context, in a
    graph.

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


def empty_sums(
    variables: Sequence[keras.Variable],
    tables: Mapping[int, bool],
    strategy: tf.distribute.Strategy,
) -> Callable[[], list[Gradient]]:
    """Returns a function that makes the empty sums of gradients, in replica context.

    Args:
      variables: The variables of the gradients.
      tables: Those whose sums are of rows (`tables_in`).
      strategy: The strategy.
    """
    of_rows = [read_as_a_whole(v, tables, strategy) is not None for v in variables]
    pairs = list(zip(variables, of_rows, strict=True))
    return lambda: [_no_rows(v.value) if rows else tf.zeros_like(v.value) for v, rows in pairs]


def _no_rows(table: tf.Variable) -> tf.IndexedSlices:
    # Of unknown size, since each microbatch adds rows: the loop's tensors keep their static shape.
    width = table.shape[1:]
    rows = tf.zeros([0, *width], table.dtype)
    rows = tf.raw_ops.PlaceholderWithDefault(input=rows, shape=[None, *width])
    places = tf.raw_ops.PlaceholderWithDefault(input=tf.zeros([0], tf.int64), shape=[None])
    return tf.IndexedSlices(rows, places, tf.constant(table.shape.as_list(), tf.int64))


def added(total: Gradient, gradient: Gradient) -> Gradient:
    """Returns a sum of gradients with a further one; of rows, one after the other."""
    if not isinstance(total, tf.IndexedSlices):
        return total + tf.convert_to_tensor(gradient)
    if not isinstance(gradient, tf.IndexedSlices):  # of a loss that does not depend on the table
        gradient = tf.IndexedSlices(gradient, tf.range(gradient.shape[0], dtype=tf.int64))
    rows = tf.concat([total.values, gradient.values], axis=0)
    places = tf.concat([total.indices, tf.cast(gradient.indices, tf.int64)], axis=0)
    return tf.IndexedSlices(rows, places, total.dense_shape)


def merge_duplicates(gradient: Gradient) -> Gradient:
    """Returns a sparse gradient with duplicate rows added up, and a dense gradient unchanged.

    Several replicas, or several examples, may give rows for the same index. These rows must be
    added before the norm or an optimizer such as Adam squares them; else the result would depend on
    the number of replicas.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    indices, segments = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, segments, tf.shape(indices)[0])
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def with_each_row_once(gradients: list[Any], strategy: tf.distribute.Strategy) -> list[Any]:
    """Merges the duplicate rows of sparse gradients, before they are checked or applied.

    Cross-replica context.

    Raises:
      CannotCompileError: If there are sparse gradients within what XLA compiles.
    """
    first = (strategy.experimental_local_results(gradient)[0] for gradient in gradients)
    if not any(isinstance(gradient, tf.IndexedSlices) for gradient in first):
        return gradients
    if is_compiled():
        raise CannotCompileError("the number of rows of a sparse gradient depends on the examples")
    return strategy.run(lambda values: [*map(merge_duplicates, values)], args=(gradients,))
