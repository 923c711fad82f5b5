"""The resource by which TensorFlow orders the collective operations of a process."""

from collections.abc import Iterator, Sequence

import tensorflow as tf
from tensorflow.core.framework import node_def_pb2


def only_orders_collectives(graph: tf.Graph, resource: tf.Tensor) -> bool:
    """Returns whether collective operations take a resource, and no others.

    With several processes, TensorFlow gives each collective operation one and the same variable, so
    that all run in one order. The operations count as writing it, but its value never changes.

    Args:
      graph: The graph.
      resource: The resource, an input of the graph.
    """
    kinds = set(_kinds_of(graph, [op.node_def for op in graph.get_operations()], resource.op.name))
    return bool(kinds) and all(kind.startswith("Collective") for kind in kinds)


def _kinds_of(
    graph: tf.Graph, nodes: Sequence[node_def_pb2.NodeDef], resource: str
) -> Iterator[str]:
    """Yields the kinds of the operations that take a resource, also within functions.

    Args:
      graph: The graph.
      nodes: The operations of the graph or of one of its functions.
      resource: Name of the operation or the argument that gives the resource.
    """
    for node in nodes:
        given = [name.partition(":")[0] for name in node.input if not name.startswith("^")]
        for place in (place for place, name in enumerate(given) if name == resource):
            called = _called_by(graph, node)
            if node.op == "Identity":  # a loop passes its resources on
                yield from _kinds_of(graph, nodes, node.name)
            elif not called:
                yield node.op
            for function in called:
                arguments = function.signature.input_arg
                # The conditions of If and Case come first, and are no arguments of the functions.
                argument = arguments[place - (len(given) - len(arguments))]
                yield from _kinds_of(graph, function.node_def, argument.name)


def _called_by(graph: tf.Graph, node: node_def_pb2.NodeDef) -> list:
    names = [
        name
        for attribute in node.attr.values()
        for name in [attribute.func.name, *(each.name for each in attribute.list.func)]
        if name and graph._is_function(name)  # private; tests/step/effects guards it
    ]
    return [graph._get_function(name).cached_definition for name in names]
