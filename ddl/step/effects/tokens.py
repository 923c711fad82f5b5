"""The resource by which TensorFlow orders the collective operations of a process."""

from collections.abc import Iterable

import tensorflow as tf
from tensorflow.core.framework import node_def_pb2


def only_orders_collectives(
    graph: tf.Graph, consumers: Iterable[node_def_pb2.NodeDef], resource: tf.Tensor
) -> bool:
    """Returns whether only collective operations take a resource.

    With several processes, TensorFlow gives each collective operation one and the same variable, so
    that all run in one order. The operations count as writing it, but its value never changes.

    Args:
      graph: The graph.
      consumers: The operations that take the resource.
      resource: The resource, an input of the graph.
    """
    return _only_collectives(graph, consumers, resource.op.name)


def _only_collectives(
    graph: tf.Graph, nodes: Iterable[node_def_pb2.NodeDef], resource: str
) -> bool:
    nodes = list(nodes)
    for node in nodes:
        given = [name.partition(":")[0] for name in node.input if not name.startswith("^")]
        for place, name in enumerate(given):
            if name != resource or node.op.startswith("Collective"):
                continue
            if node.op == "Identity":  # a loop passes its resources on
                if not _only_collectives(graph, nodes, node.name):
                    return False
                continue
            called = _called_by(graph, node)
            for function in called:
                arguments = function.signature.input_arg
                # The conditions of If and Case come first, and are no arguments of the functions.
                argument = arguments[place - (len(given) - len(arguments))]
                if not _only_collectives(graph, function.node_def, argument.name):
                    return False
            if not called:
                return False
    return True


def _called_by(graph: tf.Graph, node: node_def_pb2.NodeDef) -> list:
    names = [
        name
        for attribute in node.attr.values()
        for name in [attribute.func.name, *(each.name for each in attribute.list.func)]
        if name and graph._is_function(name)  # private; tests/step/effects guards it
    ]
    return [graph._get_function(name).cached_definition for name in names]
