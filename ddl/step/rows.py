"""Gradients of single rows of a table: which tables have them, and their sums over microbatches.

A sum that starts with zeros of the table's shape would be dense, and would take time and memory for
each row of the table in each microbatch. The sum has room for the rows of all microbatches instead,
one after the other; after the all-reduce, `with_each_row_once` adds up those of one index.
"""

import dataclasses
from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from ddl.layers.broadcasting import with_rank
from ddl.microbatch import is_compiled
from ddl.step.gradients import Gradient


class Table(NamedTuple):
    """Lookups of a loss in a variable of which it reads only rows.

    Attributes:
      lookups: Number of rows that a probe looked up; None if unknown.
      examples: Number of examples of the probe.
      as_a_whole: Whether the loss reads the whole variable to do so, as `tf.gather` does.
    """

    lookups: int | None
    examples: int
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
            sizes = [op.inputs[1].shape.num_elements() for op in [*others, *gathers]]
            lookups = None if None in sizes else sum(sizes)
            found[id(handle)] = Table(lookups, examples, as_a_whole=bool(gathers))
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


@dataclasses.dataclass(frozen=True)
class GradientSums:
    """The sums of a loss's gradients over microbatches, of which each is a sum of tensors.

    Attributes:
      variables: The variables of the gradients.
      rows: Rows of each gradient in a microbatch, for which a sparse sum has room; 0: a dense sum.
      microbatches: Number of microbatches.
    """

    variables: Sequence[keras.Variable]
    rows: Sequence[int]
    microbatches: int

    def zeros(self) -> list[Any]:
        """Returns the empty sums, one per variable: values, or values and indices of rows."""
        pairs = zip(self.variables, self.rows, strict=True)
        rooms = [(v.value, rows * self.microbatches) for v, rows in pairs]
        return [
            (tf.zeros([room, *v.shape[1:]], v.dtype), tf.zeros([room], tf.int64))
            if room
            else tf.zeros_like(v)
            for v, room in rooms
        ]

    def summands(self, gradients: Sequence[Gradient], index: tf.Tensor | int) -> list[Any]:
        """Returns what a microbatch adds to the sums. Replica context.

        Args:
          gradients: The gradients of the microbatch.
          index: Number of the microbatch.
        """
        found: list[Any] = list(gradients)
        for place, (gradient, rows) in enumerate(zip(gradients, self.rows, strict=True)):
            if rows:
                both = gradient.values, tf.cast(gradient.indices, tf.int64)
                found[place] = tuple(self._in_its_room(x, rows, index) for x in both)
        return found

    def _in_its_room(self, values: tf.Tensor, rows: int, index: tf.Tensor | int) -> tf.Tensor:
        if missing := rows - values.shape[0]:  # not tf.pad, which has no int64 on GPUs
            empty = tf.zeros([missing, *values.shape[1:]], values.dtype)
            values = tf.concat([values, empty], axis=0)
        is_own = with_rank(tf.equal(tf.range(self.microbatches), index), values.shape.rank + 1)
        rooms = tf.where(is_own, values[tf.newaxis], tf.zeros([], values.dtype))
        return tf.reshape(rooms, [-1, *values.shape[1:]])

    def gradients(self, sums: Sequence[Any]) -> list[Gradient]:
        """Returns the sums as gradients. Replica context."""
        pairs = zip(sums, self.variables, strict=True)
        return [
            tf.IndexedSlices(*own, tf.constant(v.value.shape.as_list(), tf.int64))
            if isinstance(own, tuple)
            else own
            for own, v in pairs
        ]


def gradient_sums(
    variables: Sequence[keras.Variable],
    tables: Mapping[int, Table],
    batch_size: int,
    microbatches: int,
    strategy: tf.distribute.Strategy,
) -> GradientSums:
    """Returns the form of the sums of gradients. Cross-replica or replica context.

    A sum consists of rows if all microbatches together look up fewer rows than the table has.

    Args:
      variables: The variables of the gradients.
      tables: The variables that the loss reads by rows (`tables_in`).
      batch_size: Number of examples of a global batch.
      microbatches: Number of microbatches.
      strategy: The strategy.
    """
    examples = batch_size // strategy.num_replicas_in_sync // microbatches
    rows = []
    for variable in variables:
        table, room = table_of(variable, tables, strategy), 0
        if table is not None and table.lookups is not None:
            # Some lookups may not follow the examples: few examples have as many as the probe.
            room = -(-table.lookups * max(examples, table.examples) // table.examples)
        rows.append(room if room * microbatches < variable.shape[0] else 0)
    return GradientSums(variables, rows, microbatches)
