"""Operations of a graph that change a state, or draw from one, beside those that do no harm."""

import re
from collections.abc import Iterator

import tensorflow as tf
from tensorflow.core.framework import node_def_pb2
from tensorflow.python.framework import op_def_registry

from ddl.errors import ConfigError

# Operations that TensorFlow counts as stateful and that may run twice. They read variables, check
# values, or send tensors between replicas, which all replicas do together. What calls functions is
# as harmless as the functions.
_HARMLESS = re.compile(
    r"^(ReadVariableOp|ResourceGather(Nd)?|VariableShape|VarIsInitializedOp|Assert|Placeholder|"
    r"PartitionedCall|StatefulPartitionedCall|While|If|Case|CheckNumerics(V2)?|StatelessRandomGetAlg|Collective\w+|Nccl\w+)$"
)

# Operations on what a checkpoint holds or the data give, and outputs.
_OF_VARIABLES = re.compile(
    r"^(Assign\w*|Resource\w+|Var\w*|Variable\w*|(Destroy)?TemporaryVariable|DestroyResourceOp|"
    r"\w*Iterator\w*|\w*HashTable\w*|LookupTable(Find|Size|Export)\w*|Print(V2)?|\w*PyFunc\w*|"
    r"\w*Summary\w*|TensorArray\w*|OutfeedEnqueue\w*|Xla\w+)$"
)


def is_harmful(kind: str) -> bool:
    """Returns whether operations of a kind may change a state, or draw from one.

    The list names what is harmless, so that an operation that is not known counts as harmful.
    """
    definition = op_def_registry.get(kind)
    return definition is not None and definition.is_stateful and not _HARMLESS.match(kind)


def check_stateless(where: str, graph: tf.Graph) -> None:
    """Raises ConfigError for an operation that draws or counts by a state of its own.

    Args:
      where: Name of the loss or step.
      graph: Graph of its trace; the functions that it calls are searched too.
    """
    seen: set[str] = set()
    for operation in graph.get_operations():
        for node in with_called(graph, operation.node_def, seen):
            if not is_harmful(node.op) or _OF_VARIABLES.match(node.op):
                continue
            # The recurrent kernels of GPUs have seeds for a dropout that Keras does not use.
            if "dropout" in node.attr and not node.attr["dropout"].f:
                continue
            raise ConfigError(
                f"{where} runs the operation {node.op} at {node.name!r}, which draws or counts by "
                "a state of its own: each replica would get other values, and a resumed run would "
                "not repeat them. Draw with keras.random or ddl.random instead of tf.random, and "
                "keep counts in a tf.Variable."
            )


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
