"""Check that a second computation in the backward pass changes nothing and draws the same."""

import re
from collections.abc import Iterator

import tensorflow as tf
from tensorflow.core.framework import node_def_pb2
from tensorflow.python.framework import op_def_registry

from ddl.errors import ConfigError

# Stateful operations that may run twice. They read variables, or send tensors between replicas,
# which all replicas do together. What calls functions is as harmless as the functions.
_HARMLESS = re.compile(
    r"^(ReadVariableOp|ResourceGather(Nd)?|VariableShape|VarIsInitializedOp|Assert|Placeholder|"
    r"PartitionedCall|StatefulPartitionedCall|While|If|Case|Collective\w+|Nccl\w+)$"
)


def check_changes_nothing(name: str, graph: tf.Graph, first: int, scope: str) -> None:
    """Raises ConfigError if operations of a scope change a state, or draw from one.

    Args:
      name: Name of the part of the model, for the error.
      graph: The graph.
      first: Number of operations before those of the scope.
      scope: Prefix of the names of the operations.
    """
    for operation in graph.get_operations()[first:]:
        if not operation.name.startswith(scope):
            continue
        for node in _with_called(graph, operation.node_def, set()):
            definition = op_def_registry.get(node.op)
            if definition is None or not definition.is_stateful or _HARMLESS.match(node.op):
                continue
            raise ConfigError(
                f"The backward pass computes {name!r} a second time, so it must change nothing "
                f"but variables of its layers, and draw no numbers from a state, got the operation "
                f"{node.op} at {operation.name}. Leave the layer out of Remat.layers. Or keep its "
                "state in variables made by add_weight, draw with ddl.random, and do not wrap its "
                "code in tf.function."
            )


def _with_called(
    graph: tf.Graph, node: node_def_pb2.NodeDef, seen: set[str]
) -> Iterator[node_def_pb2.NodeDef]:
    """Yields a node and those of the functions that it calls."""
    yield node
    for attribute in node.attr.values():
        for name in [attribute.func.name, *(each.name for each in attribute.list.func)]:
            if not name or name in seen:
                continue
            seen.add(name)
            called = graph._get_function(name)  # private; tests/step/remat guards it
            for inner in called.cached_definition.node_def:
                yield from _with_called(graph, inner, seen)
