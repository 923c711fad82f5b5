"""Operations of a graph that change a state, or draw from one, beside those that do no harm."""

import re
from collections.abc import Iterator

import tensorflow as tf
from tensorflow.core.framework import node_def_pb2
from tensorflow.python.framework import op_def_registry

# Operations that TensorFlow counts as stateful and that may run twice. They read variables, check
# values, or send tensors between replicas, which all replicas do together. What calls functions is
# as harmless as the functions.
_HARMLESS = re.compile(
    r"^(ReadVariableOp|ResourceGather(Nd)?|VariableShape|VarIsInitializedOp|Assert|Placeholder|"
    r"PartitionedCall|StatefulPartitionedCall|While|If|Case|CheckNumerics(V2)?|StatelessRandomGetAlg|Collective\w+|Nccl\w+)$"
)


def is_harmful(kind: str) -> bool:
    """Returns whether operations of a kind may change a state, or draw from one.

    The list names what is harmless, so that an operation that is not known counts as harmful.
    """
    definition = op_def_registry.get(kind)
    return definition is not None and definition.is_stateful and not _HARMLESS.match(kind)


def with_called(
    graph: tf.Graph, node: node_def_pb2.NodeDef, seen: set[str]
) -> Iterator[node_def_pb2.NodeDef]:
    """Yields a node and those of the functions that it calls.

    Args:
      graph: The graph.
      node: The node.
      seen: Names of functions to leave out; gets those that were yielded.
    """
    yield node
    for attribute in node.attr.values():
        for name in [attribute.func.name, *(each.name for each in attribute.list.func)]:
            if not name or name in seen or not graph._is_function(name):
                continue
            seen.add(name)
            called = graph._get_function(name)  # private; tests/step/remat guards it
            for inner in called.cached_definition.node_def:
                yield from with_called(graph, inner, seen)
