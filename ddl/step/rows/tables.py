"""Discovery of the tables that a loss reads by rows, so that their gradients are sparse."""

from typing import NamedTuple

import tensorflow as tf


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
    for handle, inner in getattr(graph, "captures", ()):
        if inner.dtype == tf.resource:
            table = _table(inner, examples)
            if table is not None:
                found[id(handle)] = table
    return found


def _table(handle: tf.Tensor, examples: int) -> Table | None:
    lookups: list[int] = []
    as_a_whole = False
    for operation in handle.consumers():
        if operation.type == "ResourceGather":
            lookups.append(_size(operation.inputs[1]))
        elif operation.type == "ReadVariableOp":
            readers = operation.outputs[0].consumers()
            gathers = [one for one in readers if _gathers_rows(one, operation.outputs[0])]
            if len(gathers) + sum(one.type == "Shape" for one in readers) < len(readers):
                return None
            lookups += [_size(one.inputs[1]) for one in gathers]
            as_a_whole = as_a_whole or bool(gathers)
        elif operation.type != "VariableShape":
            return None
    if not lookups:
        return None
    return Table(-(-sum(lookups) // examples) if all(lookups) else 0, as_a_whole)


def _gathers_rows(operation: tf.Operation, table: tf.Tensor) -> bool:
    if operation.type != "GatherV2" or operation.inputs[0] is not table:
        return False
    axis = tf.get_static_value(operation.inputs[2])
    return axis is not None and int(axis) == 0


def _size(indices: tf.Tensor) -> int:
    return indices.shape.num_elements() or 0
